"""What a submission launches, as TileLang's own front end builds it; and that a file cannot hang or fill anything."""

import time

import pytest

from moe_lab.model import tir
from moe_lab.model.tiles import resources
from moe_lab.problem.contract import CASES, Case
from moe_lab.problem.errors import SubmissionError
from moe_lab.problem.layout import GroupedLayout
from moe_lab.problem.submission import Submission
from moe_lab.steps import step

SMALL, LAYOUT = Case("small", 2, 256, 256, 130), GroupedLayout((129, 1))

KERNEL = """
import tilelang
import tilelang.language as T


@tilelang.jit(target="cuda", pass_configs={"tl.disable_warp_specialized": True})
def build(rows):
    @T.prim_func
    def kernel(x: T.Tensor((rows, 256), "float16"), y: T.Tensor((rows, 256), "float16")):
        with T.Kernel(rows // 64, threads=128) as bx:
            T.import_source("__device__ int twice(int x) { return 2 * x; }")
            a = T.alloc_shared((64, 64), "float16")
            number = T.alloc_var("int32")
            for ko in T.Pipelined(4, num_stages=rows // rows + 1):
                T.async_copy(x[bx * 64, ko * 64], a)
                T.copy(a, y[bx * 64, ko * 64])
            number = T.call_extern("int32", "twice", 1)
    return kernel


def run_kernel(x, gate_w, up_w, down_w, weights, sizes, offsets, padded, blocks, out):
    for expert, size in enumerate(sizes.tolist()):
        if size > 1:
            build(-(-size // 64) * 64)(x[padded[expert] : padded[expert + 1]], out)
"""


def launches(source, name="file.py", **options):
    return tir.launches(Submission(source, name), SMALL, LAYOUT, **options)


def test_everything_that_rules_ask_about_is_read():
    (launch,) = launches(KERNEL)
    assert (launch.name, launch.grid, launch.threads) == ("kernel", (3,), 128)
    assert launch.pass_configs == {"tl_disable_warp_specialized": True}
    assert launch.source == "__device__ int twice(int x) { return 2 * x; }"
    (loop,) = tir.every(launch.body, tir.Loop)
    assert (loop.name, loop.trips, loop.num_stages, loop.notes) == ("ko", 4, 2, ("num_stages",))
    calls = {call.name: call.text for call in launch.calls}
    assert "tl.tileop.async_copy" in calls
    assert calls["tirx.call_extern"] == "twice"
    # A slice of an argument is the argument; what a kernel allocates comes after what it is given.
    names = [(buffer.name, buffer.scope) for buffer in launch.buffers]
    assert names == [("stacked_expert_tokens", "global"), ("out", "global"), ("a", "shared.dyn")]
    (copy,) = [op for op in tir.every(launch.body, tir.Op) if op.kind == "copy" and 0 in op.reads]
    assert (copy.writes, copy.moved, copy.pure_copy) == ((2,), {0: 64 * 64}, True)


def test_the_baseline_and_the_largest_step():
    layout = GroupedLayout((142,) * 16)
    first, second = tir.launches(step("s0"), CASES[1], layout)
    assert (first.grid, second.grid, first.threads) == ((32, 64), (32, 16), 256)
    assert sum(op.flops for op in tir.every(first.body, tir.Op) if op.kind == "gemm") == 2 * 2 * 128**3
    (persistent,) = tir.launches(step("h6"), CASES[1], layout)
    assert (persistent.grid, persistent.threads) == ((132,), 384)
    assert any(isinstance(loop.trips, tir.Unknown) for loop in tir.every(persistent.body, tir.Loop))


def test_each_launch_of_a_kernel_counts():
    source = KERNEL.replace("if size > 1", "if size").replace("-(-size // 64) * 64", "128")
    assert len(launches(source)) == 2


def test_a_known_answer_takes_no_time_and_neighbours_are_worked_ahead():
    base = step("s0")
    near = [base.with_literals(STAGE1_BLOCK_K=depth) for depth in (32, 64)]
    assert tir.peek(near[0], SMALL, LAYOUT) is None
    tir.ahead([(item, SMALL, LAYOUT) for item in near])
    deadline = time.monotonic() + 60
    while any(tir.peek(item, SMALL, LAYOUT) is None for item in near) and time.monotonic() < deadline:
        time.sleep(0.02)
    start = time.perf_counter()
    for item in near:
        assert tir.peek(item, SMALL, LAYOUT) == tir.launches(item, SMALL, LAYOUT)
    assert time.perf_counter() - start < 0.1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "got no function run_kernel"),
        ("def run_kernel(*a):\n    raise ValueError('no luck')\n", "file.py cannot be followed: ValueError: no luck$"),
        ("def run_kernel(*a):\n    run_kernel(*a)\n", "RecursionError: maximum recursion depth exceeded"),
        ("X = 'a' * 10 ** 12\n", "MemoryError"),
        ("import os\nos._exit(3)\n", "the process ended with exit code 3"),
        ("def run_kernel(:\n", "line 1"),
    ],
)
def test_files_that_cannot_be_followed_end_in_one_sentence(source, message):
    for _ in range(2):  # the second answer is kept
        with pytest.raises(SubmissionError, match=message):
            launches(source)


def test_a_number_of_trips_that_the_device_chooses_is_the_larger_one() -> None:
    source = step("s0").source
    trips = "T.ceildiv(hidden, STAGE1_BLOCK_K)"
    chosen = Submission(source.replace(f"Pipelined({trips}", f"Pipelined(T.if_then_else(actual_rows > 0, {trips}, 0)"))
    assert chosen.source != source
    plain, other = (resources(each, CASES[1]).kernels for each in (step("s0"), chosen))
    assert [kernel.unknown for kernel in other] == [(), ()]
    assert [kernel.flops for kernel in other] == [kernel.flops for kernel in plain]
    assert [kernel.shared for kernel in other] == [kernel.shared for kernel in plain]
    assert [kernel.conditional for kernel in other] == [True, False]


def test_what_has_no_end_is_given_up_and_the_next_file_is_read(monkeypatch):
    assert len(launches(KERNEL + "\n# warm\n")) == 1
    monkeypatch.setattr(tir, "_TIMEOUT_S", 1.0)
    with pytest.raises(SubmissionError, match="got no answer in 1 s: a loop may have no end"):
        launches("X = 9 ** 9 ** 9 ** 9\n")
    monkeypatch.undo()
    assert len(launches(KERNEL + "\n# again\n")) == 1


def test_a_strangers_file_is_loaded_by_the_judges_sandbox(tmp_path):
    mark = tmp_path / "mark"
    bad = f"open({str(mark)!r}, 'w')\n" + step("s0").source
    with pytest.raises(SubmissionError, match="cannot be followed"):
        launches(bad, load="moe_lab.judge.sandbox:load")
    assert not mark.exists()
    good = tir.launches(step("s0"), SMALL, LAYOUT, load="moe_lab.judge.sandbox:load")
    assert good == tir.launches(step("s0"), SMALL, LAYOUT)
