"""The sandbox runs honest files as they are and names the rule and the line of everything else."""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_lab.judge import rules, sandbox
from moe_lab.problem.contract import ARGUMENTS, Case, Variant
from moe_lab.problem.errors import SandboxError, SubmissionError
from moe_lab.problem.inputs import make_inputs
from moe_lab.problem.reference import fused_truth
from moe_lab.problem.submission import Submission
from moe_lab.steps import step

HONEST = sorted((Path(__file__).parent.parent / "honest").glob("*.py"))
NAMES = ", ".join(argument.name for argument in ARGUMENTS)
HEAD = "import math\nimport tilelang\nimport tilelang.language as T\nimport torch\n\nBOX = {}\n\n\n"

Runner = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    """Load a body of run_kernel in the sandbox and call it with ten small tensors; returns ``out``."""
    torch = pytest.importorskip("torch")

    def call(body: str, head: str = "") -> Any:
        inside = textwrap.indent(textwrap.dedent(body), "    ")
        source = f"{HEAD}{textwrap.dedent(head)}\ndef run_kernel({NAMES}):\n{inside}\n"
        entry = sandbox.load(source, tmp_path / "submission.py")
        tensors = [torch.zeros(4, 8) for _ in range(10)]
        entry(*tensors)
        return tensors[-1]

    return call


@pytest.fixture(scope="module", autouse=True)
def _cpu_meaning() -> None:
    from moe_lab.machine import backend

    backend.prepare()


#: Honest files that, like the baseline, are right because out arrives zeroed; the others write the padding rows too.
LEAVE_PADDING = ("half_blocks", "kernel_returns_workspace", "macros_and_variables", "names_from_imports")


@pytest.mark.parametrize("path", [None, *HONEST], ids=lambda path: path.stem if path else "baseline")
def test_honest_files_run_and_are_right(path: Path | None, tmp_path: Path) -> None:
    source = path.read_text() if path else step("s0_baseline").source
    entry = sandbox.load(source, tmp_path / "submission.py")
    case = Case("small", 3, 128, 128, 200)
    left = path is None or path.stem in LEAVE_PADDING
    inputs = make_inputs(case, (129, 0, 71), variant=Variant() if left else Variant(out_fill="nan"), seed=3)
    assert entry(*inputs.args) is None
    truth = fused_truth(inputs)
    rows = inputs.out[inputs.valid_rows].float()
    assert float((rows - truth).norm() / truth.norm()) < 2e-3
    # Nothing but valid rows is different from 0.
    assert float(inputs.out.float().pow(2).sum()) == pytest.approx(float(rows.pow(2).sum()))


def test_host_code_that_needs_every_guard(run: Runner) -> None:
    head = """
    def _pairs(rows, columns=(1, 2)):
        for index, (left, right) in enumerate(zip(columns, reversed(columns))):
            yield index, left * rows + right

    def _total(*values, scale=1, **more):
        total = 0
        for value in values:
            total += value * scale
        total -= len(more)
        total //= 1
        return total
    """
    body = """
    (rows, columns), *others = out.shape, gate_w.shape
    table = {index: value for index, value in _pairs(rows)}
    first, second = table.values()
    text = f"{rows}x{columns}" + "{0.ndim}, {1:>3}".format(out, first) + "{a}".format_map({"a": 1})
    text = str.format("{}", text)
    assert text == "4x82,   61", text
    options = {"scale": 2}
    key = lambda value: -value
    best = sorted([first, second, 3], key=key)[0]
    BOX.setdefault("best", best)
    BOX["best"], BOX["more"] = best, [i for i in range(3) if i]
    del BOX["more"]
    with torch.device("cpu"):
        scratch = torch.empty((rows, columns), dtype=torch.float16, device=out.device)
    if (count := math.gcd(rows, columns)) != 4 or scratch.dtype != torch.float16:
        raise ValueError(count)
    print("a line", best, sep=" ")
    other = torch.zeros_like(out, dtype=torch.float32)
    out[:] = _total(first, second, **options, more=1)
    out[0, 0] = float(other.sum()) + max(0, min(2, 1))
    """
    out = run(body, head)
    assert (float(out[0, 0]), float(out[1, 1])) == (1.0, 29.0)


REFUSED = {
    "torch.cuda.synchronize()": "torch-name",
    "t = torch\nt.nn": "torch-name",
    "import torch.utils": "torch-name",
    "from torch import jit": "torch-name",
    "torch.zeros(4, pin_memory=True)": "torch-keyword",
    "torch.zeros(4, **{'requires_grad': True})": "torch-keyword",
    "out.to(torch.float16, non_blocking=True)": "torch-keyword",
    "for f in [out]:\n    f.data_ptr()": "tensor-member",
    "(lambda x: x.data)(out)": "tensor-member",
    "BOX['x'] = out\nBOX['x'].untyped_storage()": "tensor-member",
    "out.grad = out": "attribute-write",
    "BOX['o'] = out\nBOX['o'].requires_grad = True": "attribute-write",
    "T.Pipelined = T.serial": "attribute-write",
    "import sys": "import-root",
    "from .x import y": "import-relative",
    "tilelang.env": "host-escape",
    "[run_kernel][0].adapter": "host-escape",
    "'{0.adapter}'.format(run_kernel)": "host-escape",
    "for m in [tilelang]:\n    m.sys.exit()": "host-escape",
    "for m in [tilelang]:\n    m.tvm": "host-escape",
    "from tilelang.utils.target import subprocess": "host-escape",
    "from tilelang.jit import makedirs": "host-escape",
    "import tilelang.contrib.nvcc": "host-escape",
    "from tilelang.utils.tensor import torch as real": "torch-name",
    "x = [m.torch for m in [tilelang.utils.tensor]][0]\nx.cuda": "torch-name",
    "().__class__": "dunder-attribute",
    "(i for i in []).gi_frame": "dunder-attribute",
    "run_kernel.__globals__": "dunder-attribute",
    "'{0.__class__}'.format(out)": "dunder-attribute",
    "'{a._base}'.format_map({'a': out})": "private-attribute",
    "str.format('{0.__class__}', out)": "dunder-attribute",
    "f = '{0[0].__class__}'\nf.format([1])": "dunder-attribute",
    "'{0.data_ptr}'.format(out)": "tensor-member",
    "int.mro()": "dunder-attribute",
    "try:\n    1 / 0\nexcept Exception as e:\n    e.__traceback__.tb_frame": "dunder-attribute",
    "eval('1')": "banned-builtin",
    "[type][0]": "banned-builtin",
    "open('x')": "unavailable-builtin",
    "_getattr_ = 1": "reserved-name",
    "__builtins__": "reserved-name",
    "x: int = 1": "restricted-syntax",
    "BOX['n'] += 1": "restricted-syntax",
    "x = 1\ndef f():\n    nonlocal x": "restricted-syntax",
    "match 1:\n    case _:\n        pass": "restricted-syntax",
    "x = getattr(out, 'data')": "banned-builtin",
    "x = ().__class__.__base__.__subclasses__()": "dunder-attribute",
    "x = (i for i in ()).gi_frame": "dunder-attribute",
    "x = f'{out.__class__}'": "dunder-attribute",
    "x = tilelang.env.os": "host-escape",
    "x = out.adapter.lib.system(b'ls')": "host-escape",
    "import tilelang.env as e\ne.os.getcwd()": "host-escape",
    "from tilelang.contrib import nvcc": "host-escape",
    "x = tilelang.language.eager.utils.disk_compile('x', 'y')": "host-escape",
    "x = eval('1')": "banned-builtin",
    "f = exec\nf('1')": "banned-builtin",
    "x = (lambda: type)()": "banned-builtin",
    "x = open('a')": "unavailable-builtin",
    "x = out._base": "private-attribute",
    "from tilelang import _ffi_api": "private-attribute",
    "_getattr_ = len": "reserved-name",
    "try:\n    x = 1\nexcept ValueError as _getattr_:\n    x = 2": "reserved-name",
    "x = __builtins__": "reserved-name",
    "*[*out.__class__],": "dunder-attribute",
}


@pytest.mark.parametrize("body", REFUSED)
def test_refused_with_the_rule_and_the_line(body: str, run: Runner) -> None:
    with pytest.raises(SandboxError) as caught:
        run("rows = 1\n" + body)
    assert caught.value.rule_id == REFUSED[body]
    first = HEAD.count("\n") + 4
    assert first <= caught.value.line < first + body.count("\n") + 1
    assert str(caught.value).startswith(f"line {caught.value.line}: got ")
    assert rules.RULES[REFUSED[body]].sentence in str(caught.value)


@pytest.mark.parametrize("rule_id", [rule.id for rule in rules.RULES.values() if rule.kind == "sandbox"])
def test_every_sandbox_rule_is_enforced_when_a_file_is_loaded(rule_id: str, tmp_path: Path) -> None:
    rule = rules.RULES[rule_id]
    body, head = ("return None", rule.bad) if rule.where == "module" else (rule.bad, "")
    source = f"{HEAD}{head}\n\n\ndef run_kernel({NAMES}):\n{textwrap.indent(body, '    ')}\n"
    if rule.level == "advice":
        sandbox.load(source, tmp_path / "submission.py")
        return
    with pytest.raises(SandboxError) as caught:
        sandbox.load(source, tmp_path / "submission.py")
    assert caught.value.rule_id == rule_id


PRIM_FUNC = """
@tilelang.jit
def builder(rows):
    @T.prim_func
    def main(x: T.Tensor((rows,), "float16")):
        with T.Kernel(1, threads=64):
            {}
    return main
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x[0] = ().__class__", "dunder-attribute"),
        ("x[0] = eval('1')", "banned-builtin"),
        ("import os", "import-root"),
        ("x[0] = tilelang.env.os.getpid()", "host-escape"),
        ("x[0] = torch.cuda.device_count()", "torch-name"),
    ],
)
def test_a_prim_func_is_left_alone_but_leads_nowhere(line: str, expected: str, run: Runner) -> None:
    with pytest.raises(SandboxError) as caught:
        run("builder(4)", PRIM_FUNC.format(line))
    assert caught.value.rule_id == expected


OTHER_STYLES = """
from tilelang.maca.intrinsics import make_mma_swizzle_layout


@tilelang.jit
def build(rows):
    @T.macro
    def twice(buffer, i):
        buffer[0, i] = buffer[0, i] * 2

    @T.prim_func
    def main(x: T.Tensor((rows, 8), "float32")):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((rows, 8), "float32")
            T.annotate_layout({tile: make_mma_swizzle_layout(tile, vecSize=4)})
            for i in T.serial(8):
                x[0, i] += 1
                twice(x, i)

    return main


@tilelang.jit
def eager(x):
    n, m = T.const("n m")
    x: T.Tensor[[n, m], T.float32]
    with T.Kernel(1, threads=64):
        for i in T.serial(m):
            x[0, i] = x[0, i] + 1
"""


def test_macros_eager_kernels_and_vendor_layouts_are_traced_as_they_are(run: Runner) -> None:
    out = run("build(out.shape[0])(out)\neager(out)", OTHER_STYLES)
    assert out[0].tolist() == [3.0] * 8
    assert float(out[1:].abs().sum()) == 0


def test_what_the_submission_raises_keeps_its_own_line(run: Runner) -> None:
    body = "rows = out.shape[0]\nif rows == 4:\n    raise ValueError('four rows')"
    with pytest.raises(ValueError, match="four rows") as caught:
        run(body)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.name == "run_kernel"
    assert last.lineno == HEAD.count("\n") + 5
    assert last.line == "raise ValueError('four rows')"


def test_an_attribute_that_does_not_exist_is_an_ordinary_error(run: Runner) -> None:
    with pytest.raises(AttributeError, match="shap"):
        run("out.shap")


def test_text_that_is_no_python(tmp_path: Path) -> None:
    with pytest.raises(SubmissionError, match="line 1"):
        sandbox.load("def run_kernel(:\n", tmp_path / "submission.py")


def test_what_only_the_compiler_sees(run: Runner) -> None:
    with pytest.raises(SubmissionError, match="line 11: 'break' outside loop"):
        run("break")


def test_two_loads_share_nothing(tmp_path: Path) -> None:
    body = "    BOX.append(1)\n    if len(BOX) > 1:\n        raise ValueError(BOX)\n"
    source = f"BOX = []\n\n\ndef run_kernel({NAMES}):\n{body}"
    first, second = (sandbox.load(source, tmp_path / name) for name in ("a.py", "b.py"))
    first(*range(10))
    second(*range(10))
    # The same load does keep its box, so the two above had one each.
    with pytest.raises(ValueError, match=r"\[1, 1\]"):
        first(*range(10))


def test_the_tree_of_a_submission_is_not_changed(tmp_path: Path) -> None:
    import ast

    submission = Submission(step("s0_baseline").source)
    before = ast.dump(submission.tree)
    rules.check(submission)
    sandbox.load(submission.source, tmp_path / "submission.py")
    assert ast.dump(submission.tree) == before
