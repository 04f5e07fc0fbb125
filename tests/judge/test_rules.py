"""Every rule catches its bad example, spares its good one, and cannot be dodged by writing the same thing otherwise."""

from __future__ import annotations

import itertools
import sys
import textwrap
from pathlib import Path

import pytest

from moe_lab.judge.rules import RULES, check, explain
from moe_lab.problem.contract import ARGUMENTS
from moe_lab.problem.errors import RuleError, SubmissionError
from moe_lab.problem.submission import Submission
from moe_lab.steps import STEPS

ENTRY = """
def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
               group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out):
"""
IMPORTS = "import math\nimport tilelang\nimport tilelang.language as T\nimport torch\n"


def module(text: str, body: str = "return None") -> Submission:
    """A submission with some module-level lines and a body of run_kernel."""
    return Submission(f"{IMPORTS}{textwrap.dedent(text)}\n{ENTRY}{textwrap.indent(textwrap.dedent(body), '    ')}\n")


def kernel(text: str, *, head: str = "", params: str = "rows", body: str = "return None") -> Submission:
    """A submission with some lines inside a prim_func."""
    return module(
        f"{textwrap.dedent(head)}\n"
        f"@tilelang.jit\ndef builder({params}):\n"
        "    @T.prim_func\n"
        '    def main(x: T.Tensor((rows,), "float16"), y: T.Tensor((rows,), "float16")):\n'
        "        with T.Kernel(1, threads=128) as bx:\n"
        f"{textwrap.indent(textwrap.dedent(text), ' ' * 12)}\n"
        "    return main\n",
        body,
    )


def place(rule_id: str, text: str) -> Submission:
    where = RULES[rule_id].where
    if where == "file":
        return Submission(text)
    return {"module": module, "run_kernel": lambda body: module("", body), "prim_func": kernel}[where](text)


def found(submission: Submission, profile: str = "contest", level: str | None = None) -> set[str]:
    return {item.rule_id for item in check(submission, profile) if level in (None, item.level)}


@pytest.mark.parametrize("rule_id", RULES)
def test_examples_of_a_rule(rule_id: str) -> None:
    rule = RULES[rule_id]
    bad = check(place(rule_id, rule.bad))
    assert {item.level for item in bad if item.rule_id == rule_id} == {rule.level}
    assert check(place(rule_id, rule.good)) == []


@pytest.mark.parametrize("rule_id", RULES)
def test_the_open_profile_relaxes_the_contest_only(rule_id: str) -> None:
    rule = RULES[rule_id]
    levels = {item.level for item in check(place(rule_id, rule.bad), "open") if item.rule_id == rule_id}
    relaxed = rule.kind in ("ruling", "limit") or rule.level == "advice"
    assert levels == ({"advice"} if relaxed else {"violation"})


def test_line_and_column() -> None:
    (finding,) = check(module("X = 1\nY = 'é'; import os"))
    assert (finding.rule_id, finding.line, finding.column) == ("import-root", 6, 10)
    assert "import os" in finding.message


STAGES = {
    "keyword": ("for k in T.Pipelined(4, num_stages=3):\n    T.copy(x, y)", "", "rows"),
    "positional": ("for k in T.Pipelined(0, 4, 2):\n    T.copy(x, y)", "", "rows"),
    "module constant": ("for k in T.Pipelined(4, num_stages=STAGES):\n    T.copy(x, y)", "STAGES = 2", "rows"),
    "unpacked": ("for k in T.Pipelined(4, num_stages=B):\n    T.copy(x, y)", "A, B = (1, 2)", "rows"),
    "builder default": ("for k in T.Pipelined(4, num_stages=n):\n    T.copy(x, y)", "", "rows, n=2"),
    "module alias": (
        "for k in TL.Pipelined(4, num_stages=2):\n    T.copy(x, y)", "import tilelang.language as TL", "rows",
    ),
    "package": ("for k in tilelang.language.Pipelined(4, num_stages=2):\n    T.copy(x, y)", "", "rows"),
    "renamed import": (
        "for k in P(4, num_stages=2):\n    T.copy(x, y)", "from tilelang.language import Pipelined as P", "rows",
    ),
    "submodule import": (
        "for k in P(4, num_stages=2):\n    T.copy(x, y)", "from tilelang.language.loop import Pipelined as P", "rows",
    ),
    "local alias": ("p = T.Pipelined\nfor k in p(4, num_stages=2):\n    T.copy(x, y)", "", "rows"),
    "chosen from a tuple": ("for k in (T.serial, T.Pipelined)[1](4, num_stages=2):\n    T.copy(x, y)", "", "rows"),
    "annotation": ("for k in T.serial(4, annotations={'num_stages': 2}):\n    T.copy(x, y)", "", "rows"),
    "cp.async": ("T.ptx_cp_async('float16', x.data, 0, y.data, 0, 16)", "", "rows"),
    "tma": ("T.tma_copy(x, y)", "", "rows"),
    "bsm": ("T.ldg_b128_bsm(x, y)", "", "rows"),
}  # fmt: skip


@pytest.mark.parametrize("how", STAGES)
def test_asynchronous_copies_however_written(how: str) -> None:
    text, head, params = STAGES[how]
    submission = kernel(text, head=head, params=params)
    assert "async-copy" in found(submission, level="violation")
    assert "async-copy" in found(submission, "open", "advice")


@pytest.mark.parametrize("call", ["builder(128, 2)", "builder(128, n=2)"])
def test_stages_passed_to_a_builder(call: str) -> None:
    text = "for k in T.Pipelined(4, num_stages=n):\n    T.copy(x, y)"
    assert "async-copy" in found(kernel(text, head="KEY = (128, 2)", params="rows, n", body=call), level="violation")
    one_stage = kernel(text, head="KEY = (128, 1)", params="rows, n", body=call.replace("2)", "1)"))
    assert check(one_stage) == []


@pytest.mark.parametrize("stages", ["1 if rows > 64 else 2", "(1, 4)[1]", "C['s']"])
def test_stages_that_the_text_leaves_open_are_advice(stages: str) -> None:
    """What TileLang makes of them decides."""
    text = f"for k in T.Pipelined(4, num_stages={stages}):\n    T.copy(x, y)"
    assert [item.level for item in check(kernel(text, head="C = {'t': 1, 's': 2}"))] == ["advice"]


def test_the_pass_that_makes_copies_asynchronous() -> None:
    text = "@tilelang.jit(pass_configs={KEY: True})\ndef build():\n    return None"
    for key in ("'tl.enable_async_copy'", "tilelang.PassConfigKey.TL_ENABLE_ASYNC_COPY"):
        assert "async-copy" in found(module(text.replace("KEY", key)), level="violation")
        assert "async-copy" not in found(module(text.replace("KEY", key).replace("True", "False")))


DEVICE_SOURCE = [
    ("T.import_source('x')", ""),
    ("T.call_pure_extern('float32', 'f', x[0])", ""),
    ("T.tvm_call_packed('f', x.data)", ""),
    ("f('float32', 'f', x[0])", "from tilelang.language import call_extern as f"),
    ("f = T.call_extern\nf('float32', 'g', x[0])", ""),
    ("tilelang.register_cuda_postproc(lambda code, target: code)", ""),
    ("f = tilelang.register_c_postproc", ""),
]


@pytest.mark.parametrize(("text", "head"), DEVICE_SOURCE)
def test_device_code_of_ones_own(text: str, head: str) -> None:
    assert "device-source" in found(kernel(text, head=head), level="violation")


TORCH = {
    "t = torch\nt.cuda.synchronize()": "torch-name",
    "import torch.nn.functional as F\nF.linear(out, gate_w)": "torch-name",
    "from torch import nn": "torch-name",
    "torch.load('x')": "torch-name",
    "torch.ops.load_library('x')": "torch-name",
    "tilelang.utils.tensor.torch.cuda.synchronize()": "torch-name",
    "x = torch.bmm(stacked_expert_tokens, gate_w)": "torch-compute",
    "f = torch.matmul\nf(out, out)": "torch-compute",
    "out.matmul(gate_w)": "torch-compute",
    "x = stacked_expert_tokens\nx @= gate_w": "torch-compute",
    "x = torch.nn.functional.silu(out)": "torch-compute",
    "w = gate_w\nw.data_ptr()": "tensor-member",
    "w = gate_w[0]\nkeep = w.data": "tensor-member",
    "torch.zeros(4, some_kwarg=1)": "torch-keyword",
}


@pytest.mark.parametrize("body", TORCH)
def test_torch_under_other_names(body: str) -> None:
    assert TORCH[body] in found(module("", body), level="violation")


@pytest.mark.parametrize("text", ["x.__class__", "getattr(x, 'data')", "import os", "T.os.getcwd()"])
def test_prim_funcs_are_untouched_but_not_lawless(text: str) -> None:
    assert found(kernel(text), level="violation")


def test_a_tensor_may_not_be_computed_with_while_a_kernel_is_traced() -> None:
    tensor = kernel("z = w.sum()", params="rows, w", body="builder(4, gate_w)")
    assert "torch-compute" in found(tensor, level="violation")
    assert check(kernel("x[0] = w", params="rows, w", body="builder(4, gate_w.shape[0])")) == []
    assert "torch-compute" in found(kernel("z = x @ y"), level="violation")


def test_lines_end_where_python_ends_them() -> None:
    (finding,) = check(module("A = 'a\x0cb\u2028c'\nB = 2 * 3"))
    assert (finding.rule_id, finding.line, finding.column) == ("module-literal", 6, 5)


MODULE_LEVEL = {
    "print('x')": "module-statement",
    "if True:\n    A = 1": "module-statement",
    "A: int = 1": "module-statement",
    "A = 1\nA += 1": "module-statement",
    "A = [i for i in (1, 2)]": "module-literal",
    "A = dict()": "module-literal",
    "A = 1\nB = A": "module-literal",
    "A = f'{1}'": "module-literal",
    "A = lambda: 1": "module-literal",
    "A = {}\nA['x'] = 1": "module-target",
    "T.x = 1": "module-target",
    "A, *B = (1, 2)": "module-target",
    "from __future__ import annotations": "import-root",
    "async def f():\n    return 1": "module-statement",
    "@jit\nclass A:\n    pass": "class-definition",
    "def f():\n    class A:\n        pass": "class-definition",
    "def f():\n    import sys": "import-root",
    "def f(x: 'torch.Tensor'):\n    return x": "torch-tensor-annotation",
    "def f() -> torch.Tensor:\n    return 1": "torch-tensor-annotation",
    "@tilelang.jit\n@math.floor\ndef f(n):\n    return n": "decorator",
}


@pytest.mark.parametrize("text", MODULE_LEVEL)
def test_module_level(text: str) -> None:
    assert MODULE_LEVEL[text] in found(module(text), level="violation")


@pytest.mark.parametrize(
    "text",
    ["A = -1.5e3", "A = 'x' 'y'", "A = {'k': (1, [2, None])}", "A = B = 3", "A, B = 1, 2", "A = {}", "A = 1 + 2j"],
)
def test_module_level_literals_that_pass(text: str) -> None:
    assert check(module(text)) == []


def test_a_docstring_may_open_the_file() -> None:
    assert check(Submission('"""What it is."""\n' + module("").source)) == []
    assert "module-statement" in found(module('"""A text in the middle."""'))


ANNOTATIONS = {
    "x: int": False,
    "x": False,
    "x: T.int32": False,
    "x: T.Tensor((get(rows),), dtype)": False,
    "x: T.Tensor((_rows,), dtype)": False,
    "x: T.Tensor((rows ** 2,), dtype)": False,
    "x: T.Tensor((rows,), torch.float16)": False,
    "x: torch.empty((rows,), dtype)": False,
    "x: T.Tensor(shape[0], dtype)": False,
    "x: T.Tensor((rows + 1, rows // 2, 3), dtype)": True,
    "x: T.Tensor([rows, 128], 'float16')": True,
    "x: T.Tensor[(rows % 3, rows - 1), T.float16]": True,
    "x: T.Tensor(shape, dtype=T.float16)": True,
}


@pytest.mark.parametrize("parameter", ANNOTATIONS)
def test_prim_func_annotations(parameter: str) -> None:
    text = (
        "@tilelang.jit\ndef builder(rows, shape, dtype, _rows=1):\n    @T.prim_func\n"
        f"    def main({parameter}):\n        with T.Kernel(1, threads=64):\n            T.evaluate(0)\n    return main"
    )
    assert ("prim-func-annotation" in found(module(text), level="violation")) is not ANNOTATIONS[parameter]


NAMES = ", ".join(argument.name for argument in ARGUMENTS)
SIGNATURES = {
    f"def run_kernel({NAMES}):": None,
    f"def run_kernel({NAMES.replace('gate_w, up_w', 'up_w, gate_w')}):": "violation",
    f"def run_kernel({NAMES.replace('stacked_expert_tokens', 'x')}):": "advice",
    f"def run_kernel({NAMES}, extra):": "violation",
    f"def run_kernel({NAMES}, extra=None):": "violation",
    f"def run_kernel({NAMES}=None):": "violation",
    f"def run_kernel({NAMES}) -> None:": "violation",
    f"def run_kernel({NAMES.replace('out', 'out: int')}):": "violation",
    f"def run_kernel({NAMES.replace(', out', ', *, out')}):": "violation",
    "def run_kernel(*tensors):": "violation",
    f"@tilelang.jit\ndef run_kernel({NAMES}):": "violation",
}


@pytest.mark.parametrize("head", SIGNATURES)
def test_entry_signature(head: str) -> None:
    findings = check(Submission(f"{IMPORTS}{head}\n    return None\n"))
    levels = {item.level for item in findings if item.rule_id == "entry-signature"}
    assert levels == ({SIGNATURES[head]} if SIGNATURES[head] else set())


@pytest.mark.parametrize(
    "text",
    [
        "run_kernel = 3",
        "def other():\n    def run_kernel():\n        return 1",
        "async def run_kernel():\n    return 1",
    ],
)
def test_entry_must_be_a_plain_function(text: str) -> None:
    assert "entry-missing" in found(Submission(IMPORTS + text))


KEPT = {
    "C['k'] = out": "violation",
    "C[out.shape] = out.clone()": "violation",
    "C.setdefault('k', out)": "violation",
    "L.append(out)": "violation",
    "global last\nlast = out": "violation",
    "C['k'] = gate_w.contiguous()": "advice",
    "C['k'] = (gate_w, up_w)": "advice",
    "C[id(gate_w)] = torch.empty((4, 4))": "advice",
    "key = (out.shape, group_sizes.sum())\nC[key] = 1": "advice",
    "C['calls'] = C.get('calls', 0) + 1": "advice",
    "global calls\ncalls = calls + 1": "advice",
    "C[out.shape[0]] = torch.empty((4, 4), dtype=out.dtype, device=out.device)": None,
    "C['k'] = torch.zeros_like(out)": None,
    "C[out.device.index, str(out.dtype)] = builder(out.shape[0])": None,
    "local = {}\nlocal['k'] = out.shape": None,
}


@pytest.mark.parametrize("body", KEPT)
def test_what_is_kept_between_calls(body: str) -> None:
    head = "C = {}\nL = []\ncalls = 0\nlast = None\n@tilelang.jit\ndef builder(n):\n    return n"
    levels = {item.level for item in check(module(head, body)) if item.rule_id == "result-cache"}
    assert levels == ({KEPT[body]} if KEPT[body] else set())


def test_a_helper_does_not_hide_what_is_kept() -> None:
    text = "C = {}\ndef keep(value, key='k'):\n    C[key] = value\n    return value"
    assert "result-cache" in found(module(text, "keep(out)"), level="violation")
    assert "result-cache" not in found(module(text, "keep(out.shape)"))


@pytest.mark.parametrize("body", ["n = int(group_sizes[0])", "group_sizes.tolist()", "x = out.to('cpu')", "out.cpu()"])
def test_reading_back_is_advice(body: str) -> None:
    levels = {item.level for item in check(module("", body)) if item.rule_id == "synchronise"}
    assert levels == {"advice"}


HONEST = sorted((Path(__file__).parent.parent / "honest").glob("*.py"))


@pytest.mark.parametrize("path", HONEST, ids=lambda path: path.stem)
def test_honest_files_in_other_styles(path: Path) -> None:
    # The sources are silent on macros, and a host that reads sizes waits for the device: both are worth a word.
    said = {"macros_and_variables": {("decorator", "advice")}, "launch_per_expert": {("synchronise", "advice")}}
    found = {(item.rule_id, item.level) for item in check(Submission.from_file(path))}
    assert found == said.get(path.stem, set())


@pytest.mark.parametrize("name", STEPS)
def test_steps_under_their_own_profile(name: str) -> None:
    entry = STEPS[name]
    assert found(entry.submission(), entry.profile, "violation") == set()
    if entry.branch != "hopper":
        assert check(entry.submission(), entry.profile) == []


HONEST_HOST = '''
"""Nothing in here breaks a rule."""
import math
import tilelang
import tilelang.language as TT
import torch
from tilelang import jit
from tilelang.intrinsics import make_mma_swizzle_layout as swizzled

TILES = {"small": (64, 1), "large": (128, 1)}  # eval, exec and os are only words here
_CACHE = {}
BLOCK, THREADS = 128, 256


@jit(out_idx=None, pass_configs={"tl.enable_fast_math": True, "tl.disable_warp_specialized": True})
def _build(rows, columns, *, block=128, stages=1):
    """A builder with helpers, closures and its own arithmetic."""
    dtype = TT.float16
    shape = (rows, columns)
    width = math.gcd(block, columns)

    def steps(n, d=width):
        return -(-n // d)

    @TT.prim_func
    def main(x: TT.Tensor(shape, dtype), y: TT.Tensor((rows, columns), dtype)):
        with TT.Kernel(steps(rows), threads=THREADS) as bx:
            tile = TT.alloc_shared((block, width), dtype)
            TT.annotate_layout({tile: swizzled(tile)})
            TT.assume(bx >= 0)
            for k in range(steps(columns)):
                TT.copy(x[bx * block, k * width], tile, coalesced_width=8)
                TT.sync_threads()
                TT.copy(tile, y[bx * block, k * width])
            n = TT.if_then_else(rows > 0, 1, 0)
            for i in TT.serial(n):
                y[i, 0] += x[i, 0]
            for k in TT.Pipelined(steps(columns), num_stages=stages):
                TT.copy(x[bx * block, k * width], tile)

    return main


def _pick(rows):
    if rows < 0:
        raise ValueError(f"got {rows} rows, expected at least 0: {rows!r:>10}")
    assert rows >= 0, "never negative"
    sizes = [n for n in (64, 128) if n <= max(rows, 64)]
    best = sorted(sizes, key=lambda n: -n)[0]
    total = 0
    for index, (name, (block, _)) in enumerate(TILES.items()):
        total += block * index
        while total > 1 << 20:
            total -= 1
    return {"block": best, **{"stages": 1}}, total


def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
               group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out):
    """Docstrings may say torch.matmul, num_stages=4 and __class__."""
    rows, hidden = stacked_expert_tokens.shape
    options, _ = _pick(int(rows))
    key = (int(rows), int(hidden), str(out.dtype), out.device.index, *options.values())
    if (kernel := _CACHE.get(key)) is None:
        kernel = _build(rows, hidden, **options)
        _CACHE[key] = kernel
    weights = "float32" if routed_expert_weights.dtype == torch.float32 else "float16"
    scratch = torch.empty((rows, hidden), dtype=out.dtype, device=out.device)
    first, *rest = (stacked_expert_tokens, out)
    kernel(stacked_expert_tokens.view(rows, hidden), scratch)
    kernel(*(scratch, out)) if weights else None
'''


def test_honest_host_code_in_another_style() -> None:
    assert check(Submission(HONEST_HOST)) == []


def test_explain_lists_and_suggests() -> None:
    assert all(rule_id in explain() for rule_id in RULES)
    text = explain("async-copy")
    assert RULES["async-copy"].fix in text
    assert "advice under --profile open" in text
    with pytest.raises(RuleError, match="async-copy"):
        explain("asinc-copy")


def test_unknown_profile() -> None:
    with pytest.raises(RuleError, match="contest, open"):
        check(module(""), "strict")  # type: ignore[arg-type]


def test_deep_nesting_is_one_sentence() -> None:
    with pytest.raises(SubmissionError):
        check(Submission("X = " + "+".join(["1"] * 20_000)))


def test_names_that_fan_out_or_chase_themselves_end() -> None:
    chain = "".join(
        f"def f{i}(x, y=None):\n    if x:\n        return f{i + 1}(y, x)\n    return f{i + 1}(x, f{i + 1}(y))\n\n\n"
        for i in range(40)
    )
    assert (
        check(module(chain + "def f40(x, y=None):\n    return f0(y, x)", "a = f0(out)\na = a.b\nb = b if b else a"))
        == []
    )


def test_the_work_of_reading_a_file_grows_with_its_length() -> None:
    def calls(count: int) -> int:
        pairs = list(itertools.pairwise(f"n{i}" for i in range(count)))
        lines = [f"    {a} = {b} if {b} else ({a}, {b}, out.x{a})" for a, b in pairs]
        helpers = [f"def {a}(x, y=1):\n    return {b}(y, x) or {b}(x, {a}(y))\n" for a, b in pairs]
        submission, seen = Submission("\n".join([*helpers, ENTRY, *lines])), 0

        def count_call(frame: object, event: str, argument: object) -> None:
            nonlocal seen
            seen += event in ("call", "c_call")

        sys.setprofile(count_call)
        try:
            check(submission)
        finally:
            sys.setprofile(None)
        return seen

    calls(50)
    assert calls(800) < 5 * calls(200)
