import ast
import dataclasses
import inspect
import subprocess
from collections.abc import Callable

import pytest
import torch

from moe_lab.judge.rules import check
from moe_lab.machine import backend
from moe_lab.model.lowering import Lowering, lower_many
from moe_lab.problem.contract import CASES, ENTRY_POINT, Case
from moe_lab.problem.errors import SubmissionError
from moe_lab.problem.inputs import Inputs, make_inputs
from moe_lab.problem.reference import fused_truth
from moe_lab.steps import STEPS, find, predecessors, step

C500_SHARED_BYTES = 65536
SMALL = Case("small", 4, 256, 256, 140)
RAGGED = Case("ragged", 2, 200, 136, 131)
#: Sizes for which every step takes the kernel that it would take for a contest case on a GPU.
ON_A_GPU = Case("on a GPU", 5, 512, 256, 558)
GROUPS = (1, 0, 300, 129, 128)
#: Calls of these steps with new values must find their kernel: those of the h branch whatever the number of rows.
ONE_SIZE_FITS_ALL = [entry.name for entry in STEPS.values() if entry.branch == "hopper"]


def writes_padding(name: str) -> bool:
    """Every step from c4 on, and everything that is built on it, leaves padding rows at 0 whatever they held."""
    return any(entry.name == "c4_skip_empty" or entry.branch == "hopper" for entry in predecessors(name))


def check_out(inputs: Inputs, padding: float | None = None, tolerance: float = 1e-3) -> None:
    """Valid rows of out as the truth, and padding rows, if asked for, all of one value."""
    # Rounding the hidden activation and the result to fp16 explains about 5e-4 of the largest value.
    truth = fused_truth(inputs)
    assert (inputs.out[inputs.valid_rows].float() - truth).abs().max() <= tolerance * truth.abs().max()
    if padding is not None:
        rows = torch.ones(len(inputs.out), dtype=torch.bool, device=inputs.out.device)
        rows[inputs.valid_rows] = False
        assert inputs.out[rows].eq(padding).all()


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(
    ("case", "sizes"),
    [(SMALL, (1, 0, 129, 10)), (RAGGED, (128, 3))],
    ids=["an empty expert, 129 rows", "H and I no multiples of the tiles"],
)
def test_a_step_gives_the_truth_on_every_valid_row(name: str, case: Case, sizes: tuple[int, ...]) -> None:
    inputs = make_inputs(case, sizes, token_poison="nan", seed=3)
    inputs.out.fill_(7.0)
    untouched = [tensor.clone() for tensor in inputs.args[:-1]]
    backend.load(step(name))(*inputs.args)
    check_out(inputs, 0.0 if writes_padding(name) else 7.0)
    for before, after in zip(untouched, inputs.args, strict=False):
        assert before.view(torch.uint8).equal(after.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_a_step_on_a_gpu_gives_the_truth_and_writes_nowhere_else(name: str) -> None:
    inputs = make_inputs(ON_A_GPU, GROUPS, token_poison="nan", seed=3, device="cuda")
    # A block of rows before and after out: what is written there would be another tensor elsewhere.
    block = 128
    room = torch.full((len(inputs.out) + 2 * block, ON_A_GPU.hidden), 7.0, dtype=torch.float16, device="cuda")
    inputs = dataclasses.replace(inputs, out=room[block:-block])
    untouched = [tensor.clone() for tensor in inputs.args[:-1]]
    run_kernel = backend.load(step(name))
    # The second call meets the workspace that the first has left.
    for _ in range(2):
        inputs.out.fill_(7.0)
        run_kernel(*inputs.args)
        check_out(inputs, 0.0 if writes_padding(name) else 7.0)
    assert room[:block].eq(7.0).all()
    assert room[-block:].eq(7.0).all()
    for before, after in zip(untouched, inputs.args, strict=False):
        assert before.view(torch.uint8).equal(after.view(torch.uint8))


#: The steps whose blocks stay until all tiles are done.
BY_HAND = ["h4_persistent", "h5_heights", "h6_matrix_stores", "h7_any_shape"]


def check_on_a_gpu(run_kernel: Callable[..., None], inputs: Inputs, tolerance: float = 1e-3) -> None:
    """One call into an out full of NaN: valid rows as the truth, padding rows 0."""
    inputs.out.fill_(float("nan"))
    run_kernel(*inputs.args)
    check_out(inputs, 0.0, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [78, 114, 132, 144])
@pytest.mark.parametrize("name", BY_HAND)
def test_a_persistent_step_is_right_with_any_number_of_blocks(name: str, blocks: int) -> None:
    case = Case("sizes around tiles and blocks", 9, 512, 256, 843)
    inputs = make_inputs(case, (1, 0, 300, 129, 128, 63, 17, 200, 5), token_poison="nan", seed=3, device="cuda")
    check_on_a_gpu(backend.load(step(name).with_literals(BLOCKS=blocks)), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BY_HAND)
def test_a_persistent_step_works_on_two_streams_and_keeps_no_memory(name: str) -> None:
    run_kernel = backend.load(step(name))
    sets = [make_inputs(ON_A_GPU, GROUPS, token_poison="nan", seed=seed, device="cuda") for seed in (1, 2)]
    for inputs in sets:
        check_on_a_gpu(run_kernel, inputs)
    alone = [inputs.out.clone() for inputs in sets]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        for inputs, stream in zip(sets, streams, strict=True):
            with torch.cuda.stream(stream):
                run_kernel(*inputs.args)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    for inputs, expected in zip(sets, alone, strict=True):
        assert inputs.out.equal(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_experts", "hidden", "intermediate", "sizes"),
    [
        (3, 64, 64, (5, 0, 70)),
        (5, 576, 320, GROUPS),
        (32, 2880, 2880, tuple(range(32))),
        (256, 320, 192, (600, *range(255))),
        (512, 320, 192, (0, 600, *(expert % 7 for expert in range(510)))),
    ],
)
def test_the_step_for_any_shape_is_right_on_a_gpu(
    dtype: torch.dtype, num_experts: int, hidden: int, intermediate: int, sizes: tuple[int, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    case = Case("a shape", num_experts, hidden, intermediate, sum(sizes))
    inputs = make_inputs(case, sizes, token_poison="nan", seed=3, device="cuda")
    halves = {
        field.name: getattr(inputs, field.name).to(dtype)
        for field in dataclasses.fields(inputs)
        if getattr(getattr(inputs, field.name), "dtype", None) == torch.float16
    }
    # bf16 has 8 bits of 11: its rounding is eight times as coarse.
    check_on_a_gpu(
        backend.load(step("h7")), dataclasses.replace(inputs, **halves), 1e-3 if dtype == torch.float16 else 8e-3
    )
    assert capsys.readouterr().out == ""


@pytest.mark.gpu
def test_the_step_for_any_shape_says_when_it_is_slow(capsys: pytest.CaptureFixture[str]) -> None:
    inputs = make_inputs(RAGGED, (128, 3), token_poison="nan", seed=3, device="cuda")
    check_on_a_gpu(backend.load(step("h7")), inputs)
    assert "got H = 200, I = 136, E = 2" in capsys.readouterr().out


def test_hidden_activation_is_fenced_between_its_two_proxies() -> None:
    (by_hand,) = lower_many([Lowering(step("h4"), SMALL, "sm_90a")])
    lines = by_hand[0].source.splitlines() if not isinstance(by_hand, Exception) else []
    waits = next(number for number, line in enumerate(lines) if "AtomicLoad" in line)
    fence = next(number for number, line in enumerate(lines) if "fence.proxy.async.global" in line)
    loads = next(number for number, line in enumerate(lines) if "tma_load" in line and "up_logits_desc" in line)
    assert waits < fence < loads


def test_the_plain_form_is_the_same_text_in_every_step_that_has_it() -> None:
    texts = {
        ast.unparse(node)
        for name in BY_HAND[:3]
        for node in step(name).tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "_plain_forward_kernel"
    }
    assert len(texts) == 1


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one entry for each kernel that TileLang is asked for and each program that is started.

    A kernel that is compiled, and one that is read from the disk, passes :meth:`KernelCache.cached`; and no compiler
    works without a process of its own. So a call that adds nothing has compiled nothing.
    """
    from tilelang.cache.kernel_cache import KernelCache

    seen: list[str] = []
    cached, started = KernelCache.cached, subprocess.Popen.__init__

    def ask(self: KernelCache, *args: object, **kwargs: object) -> object:
        seen.append("kernel")
        return cached(self, *args, **kwargs)

    def start(self: subprocess.Popen[bytes], *args: object, **kwargs: object) -> None:
        seen.append(f"process {args[:1]}")
        started(self, *args, **kwargs)

    monkeypatch.setattr(KernelCache, "cached", ask)
    monkeypatch.setattr(subprocess.Popen, "__init__", start)
    return seen


def check_compiles(name: str, case: Case, groups: tuple[int, ...], device: str, seen: list[str]) -> None:
    """Call a step with one routing, with another of the same shapes, and with other numbers of rows."""
    run_kernel = backend.load(step(name))

    def call(sizes: tuple[int, ...], seed: int) -> list[str]:
        rows = Case(case.name, case.num_experts, case.hidden, case.intermediate, sum(sizes))
        inputs = make_inputs(rows, sizes, seed=seed, device=device)
        seen.clear()
        run_kernel(*inputs.args)
        asked = list(seen)
        check_out(inputs)
        return asked

    assert "kernel" in call(groups, 1)
    assert call(groups[::-1], 2) == []
    found = call(tuple(size + 90 for size in groups), 3)
    # The baseline is compiled for one number of rows.
    assert found == [] if name in ONE_SIZE_FITS_ALL else "kernel" in found


@pytest.mark.parametrize("name", ["s0_baseline", *ONE_SIZE_FITS_ALL])
def test_a_new_routing_compiles_nothing(name: str, compiles: list[str]) -> None:
    check_compiles(name, SMALL, (1, 0, 129, 10), "cpu", compiles)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["s0_baseline", *ONE_SIZE_FITS_ALL])
def test_a_new_routing_compiles_nothing_on_a_gpu(name: str, compiles: list[str]) -> None:
    check_compiles(name, ON_A_GPU, GROUPS, "cuda", compiles)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_a_whole_submission_that_breaks_no_rule(name: str) -> None:
    entry = STEPS[name]
    submission = entry.submission()
    violations = [finding for finding in check(submission, entry.profile) if finding.level == "violation"]
    assert violations == []
    functions = {node.name: node for node in submission.tree.body if isinstance(node, ast.FunctionDef)}
    assert {"_moe_forward_kernel", "_get_kernel", "_get_workspace", ENTRY_POINT} <= set(functions)
    assert ast.get_docstring(submission.tree)
    assert submission.source.isascii()
    literals = submission.values
    assert literals["BLOCK_M"] == 128 or entry.branch == "hopper"
    if entry.branch != "hopper":
        assert literals["NUM_STAGES"] == 1
        assert {"STAGE1_BLOCK_N", "STAGE1_BLOCK_K", "STAGE2_BLOCK_N", "STAGE2_BLOCK_K"} <= set(literals)


@pytest.mark.parametrize("name", ["c1_one_weight_tile", "c10_shared_layout"])
def test_literals_of_a_step_can_be_changed_and_stay_right(name: str) -> None:
    inputs = make_inputs(SMALL, (1, 0, 129, 10), seed=4)
    changed = step(name).with_literals(STAGE1_BLOCK_N=64, STAGE2_BLOCK_K=32, STAGE1_PANEL=2)
    backend.load(changed)(*inputs.args)
    check_out(inputs)


@pytest.mark.parametrize(
    "options",
    [{"DISABLE_MEMORY_GUARDS": True}, {"SWIZZLE_VECTOR": 4, "WEIGHT_COPY_WIDTH": 4}, {"SWIZZLE_VECTOR": 8}],
)
def test_the_options_of_the_last_c500_step_do_not_change_the_result(options: dict[str, int | bool]) -> None:
    inputs = make_inputs(SMALL, (1, 0, 129, 10), seed=5)
    expected = make_inputs(SMALL, (1, 0, 129, 10), seed=5)
    backend.load(step("c10"))(*expected.args)
    backend.load(step("c10").with_literals(**options))(*inputs.args)
    assert inputs.out.equal(expected.out)


def test_c500_steps_lower_within_a_c500_block() -> None:
    # gfx90a has the C500's 64 lanes and lays the tiles out for them; sm_80 multiplies buffers as its compiler would.
    steps = [entry for entry in STEPS.values() if entry.branch in ("base", "c500")]
    lowerings = [Lowering(entry.submission(), CASES[2], "gfx90a") for entry in steps]
    lowerings += [Lowering(step(name), CASES[2], "sm_80") for name in ("s0", "c10")]
    shared, source = {}, {}
    for item, kernels in zip(lowerings, lower_many(lowerings), strict=True):
        assert not isinstance(kernels, Exception), str(kernels)
        assert len(kernels) == 2
        assert all(kernel.threads == 256 for kernel in kernels)
        key = item.submission.name.split("_")[0], item.target
        shared[key] = [kernel.shared_bytes for kernel in kernels]
        source[key] = kernels[0].source
    assert max(max(sizes) for sizes in shared.values()) <= C500_SHARED_BYTES
    assert shared["s0", "sm_80"] == shared["s0", "gfx90a"] == [65536, 32768]
    assert shared["c1", "gfx90a"] == [32768, 32768]
    assert shared["c2", "gfx90a"] == [65536, 65536]
    assert shared["c10", "sm_80"] == shared["c10", "gfx90a"] == [32768, 32768]
    # The promise of step 8 takes the comparison with E, 32 in case 2, off the weight loads.
    assert source["c7", "gfx90a"].count("expert < 32") >= 3
    assert "expert < 32" not in source["c8", "gfx90a"]


def test_the_ladder_hangs_together() -> None:
    names = list(STEPS)
    assert names[0] == "s0_baseline"
    for position, entry in enumerate(STEPS.values()):
        assert entry.path.is_file(), entry.path
        assert (entry.after is None) == (entry.branch == "base")
        if entry.after is not None:
            # One idea apart: something changed, most of the text did not.
            assert names.index(entry.after) < position
            changed = sum(line[0] in "+-" for line in entry.diff().splitlines())
            assert changed > 0
    on_disk = {path.stem for path in STEPS["s0_baseline"].path.parent.glob("[a-z][0-9]*_*.py")}
    assert on_disk == set(STEPS)
    recommended = [entry.branch for entry in STEPS.values() if entry.recommended]
    assert len(recommended) == len(set(recommended))
    assert "c500" in recommended
    assert STEPS["s0_baseline"].diff() == ""


def test_steps_are_found_by_name_and_by_number() -> None:
    assert step("s0") == step("s0_baseline")
    assert find("c3").name == "c3_k64"
    assert [entry.name.split("_")[0] for entry in predecessors("c3")] == ["s0", "c1", "c2", "c3"]
    with pytest.raises(SubmissionError, match="got step 'c99', expected one of s0_baseline"):
        step("c99")


def test_run_kernel_has_the_signature_of_the_contract() -> None:
    from moe_lab.problem.contract import ARGUMENTS

    entry = backend.load(step("s0"))
    assert entry.__name__ == ENTRY_POINT
    assert list(inspect.signature(entry).parameters) == [argument.name for argument in ARGUMENTS]
