"""Kernels compiled ahead, by workers that launch nothing."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from moe_lab.judge import judge, process
from moe_lab.judge import local as judging
from moe_lab.judge.ahead import Ahead, specs
from moe_lab.judge.plan import Call, Group, Plan, call_inputs
from moe_lab.problem.contract import VARIANTS
from moe_lab.problem.submission import Submission
from moe_lab.steps import step

GROUP = Group("uneven groups", 256, 256, (Call((3, 129, 0), 11),))
OTHER = Group("one row", 256, 256, (Call((0, 0, 1), 12),))
LOOP = "def run_kernel(a, b, c, d, e, f, g, h, i, out):\n    while True:\n        pass\n"


def kernels(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*/*/kernels/*")}


def ahead(submission: Submission, *groups: Group, processes: int = 1) -> Ahead:
    return Ahead(submission, Plan(groups), "cpu", processes)


@pytest.mark.parametrize("name", [None, *VARIANTS])
def test_the_arguments_are_those_of_the_call(name: str | None) -> None:
    group = replace(GROUP, variant=VARIANTS[name]) if name else GROUP
    inputs = call_inputs(group, group.calls[0], None)
    for (shape, dtype, values), tensor in zip(specs(group), inputs.args, strict=True):
        assert (shape, f"torch.{dtype}") == (tuple(tensor.shape), str(tensor.dtype))
        assert values is None or list(values) == tensor.tolist()


def test_calls_find_what_was_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    same_shapes = replace(GROUP, name="the same shapes", calls=(Call((129, 3, 0), 13),))
    with ahead(step("s0_baseline"), GROUP, same_shapes, OTHER, processes=2) as compiling:
        compiling.wait(OTHER, print)
        compiling.wait(same_shapes, print)
        compiled = kernels(tmp_path)
    assert len(compiled) == 2
    report = judge(step("s0_baseline"), seed=1, plan=Plan((GROUP, OTHER), variants=False, fit=False))
    assert report.accepted, report.sentence
    assert kernels(tmp_path) == compiled


def test_nothing_is_launched_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that faults on the arguments would end the worker before the second group."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    source = step("s0_baseline").source.replace("out[block_start + i,", "out[block_start + (1 << 40) + i,")
    assert source != step("s0_baseline").source
    with ahead(Submission(source, "faults.py"), GROUP, OTHER) as compiling:
        compiling.wait(OTHER, print)
        assert len(kernels(tmp_path)) == 2


def test_a_file_that_never_ends_holds_nobody_up() -> None:
    process.warm_up()  # what all workers are forked from stays
    before = psutil.Process().children(recursive=True)
    with ahead(Submission(LOOP, "loop.py"), GROUP, OTHER) as compiling:  # one at work, one that waits
        deadline = time.monotonic() + 60
        while len(psutil.Process().children(recursive=True)) <= len(before):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert not [job for job in compiling.jobs if not job.done()]
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert psutil.wait_procs(left, timeout=5)[1] == []


def test_a_file_that_cannot_be_loaded_holds_nobody_up() -> None:
    with ahead(Submission("raise ValueError\n", "raises.py"), GROUP, OTHER) as compiling:
        compiling.wait(GROUP, print)
        compiling.wait(OTHER, print)


def test_the_whole_run_with_workers_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        judging, "Ahead", lambda submission, plan, device, processes: Ahead(submission, plan, device, 1)
    )
    report = judge(step("s0_baseline"), seed=1, plan=Plan((GROUP, OTHER), variants=False, fit=False))
    assert report.accepted, report.sentence
    assert [case.name for case in report.cases] == [GROUP.name, OTHER.name]


def test_without_processes_the_calls_compile() -> None:
    with ahead(step("s0_baseline"), GROUP, processes=0) as compiling:
        compiling.wait(GROUP, print)
    assert compiling.jobs == []


def test_workers_that_have_not_begun_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run may be over while a worker is still looking for a folder."""
    begun, entered = threading.Event(), threading.Event()

    def slow(*args: object, **options: object) -> None:
        begun.set()
        assert entered.wait(10)
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.TemporaryDirectory", slow)
        with ahead(step("s0_baseline"), GROUP) as compiling:
            assert begun.wait(10)
            threading.Timer(0.5, entered.set).start()
    assert all(job.done() for job in compiling.jobs)
