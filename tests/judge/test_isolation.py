"""The process of a submission: bounded output, shared memory that is watched, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from moe_lab.judge import Verdict, judge, process
from moe_lab.judge.arena import Arena, tensors_in
from moe_lab.judge.plan import Call, Group, Plan
from moe_lab.problem.contract import ARGUMENTS, Case
from moe_lab.problem.inputs import make_inputs
from moe_lab.problem.submission import Submission

EXPLOITS = Path(__file__).parent.parent / "exploits"
SIGNATURE = (
    "def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights, group_sizes, group_offsets,\n"
    "               group_padded_offsets, group_idx_for_bx, out):\n"
)
LOOP = f"{SIGNATURE}    while True:\n        pass\n"


def test_long_output_keeps_its_beginning_and_end() -> None:
    words = "print('first words')\nprint('x' * 100_000)\nprint('\\x1b[31mlast words\\x00')\n"
    plan = Plan((Group("one row", 64, 32, (Call((1, 0), 1),)),), sandboxed=False, variants=False, fit=False)
    report = judge(Submission(f"{words}{SIGNATURE}    pass\n"), plan=plan)
    assert report.verdict is Verdict.WRONG_ANSWER
    assert report.log.startswith("first words")
    assert report.log.endswith("[31mlast words\n")
    assert "bytes left out]" in report.log
    assert len(report.log) < 9_000
    assert "\x1b" not in report.log


INPUTS = make_inputs(Case("small", 3, 64, 32, 5), (0, 2, 3), seed=1)
NAMES = [argument.name for argument in ARGUMENTS]


def arena_of(*, sparse: bool = False) -> tuple[Arena, dict[str, torch.Tensor], torch.Tensor]:
    """A filled arena, and as the worker sees it: tensors and bytes."""
    arena = Arena(INPUTS, sparse=sparse)
    arena.write(INPUTS)
    there = torch.from_file(arena.shared["path"], shared=True, size=arena.shared["size_bytes"], dtype=torch.uint8)
    return arena, dict(zip(NAMES, tensors_in(there, arena.shared["places"]), strict=True)), there


def test_an_arena_gives_back_what_was_written() -> None:
    arena, there, buffer = arena_of()
    for name, tensor in zip(NAMES, INPUTS.args, strict=True):
        assert torch.equal(there[name].nan_to_num(), tensor.nan_to_num()), name
        assert (there[name].data_ptr() - buffer.data_ptr()) % 4096 == 0
    answer = torch.randn(there["out"].shape).half()
    there["out"].copy_(answer)
    out, edits = arena.read()
    assert torch.equal(out, answer)
    assert edits == []
    arena.close()


@pytest.mark.parametrize("stride", [1 << 26, 1000])
@pytest.mark.parametrize("name", NAMES[:-1])
def test_every_input_is_watched(name: str, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_lab.judge.arena._STRIDE", stride)
    arena, there, _ = arena_of()
    flat = there[name].flatten()
    last = flat.numel() - 1
    changed = [0, last] if last > 6_000 else [last]
    for index in changed:
        flat[index] = flat[index] + 1 if name != "stacked_expert_tokens" or index == 0 else 1.0
    _, (edit,) = arena.read()
    assert (edit.where, edit.first) == (name, changed[0])
    assert edit.count >= len(changed)
    assert edit.is_input


def test_sparse_weights_are_watched_where_they_are_used() -> None:
    arena, there, _ = arena_of(sparse=True)
    assert torch.equal(there["up_w"][2], INPUTS.up_w[2])
    assert not there["up_w"][0].any()
    there["up_w"][2, 0, 1] += 1
    _, (edit,) = arena.read()
    assert (edit.where, edit.first) == ("up_w", 2 * 32 * 64 + 1)


@pytest.mark.parametrize(("where", "offset", "distance"), [("before out", -6, 4), ("after out", 6, 6)])
def test_guard_bands_name_the_side_and_the_distance(where: str, offset: int, distance: int) -> None:
    arena, there, buffer = arena_of()
    start = there["out"].data_ptr() - buffer.data_ptr() + offset + (offset > 0) * there["out"].nbytes
    buffer[start : start + 2] = 0
    _, (edit,) = arena.read()
    assert (edit.where, edit.first, edit.count) == (where, distance, 2)
    assert str(edit) == f"wrote 2 bytes {where}, the nearest {distance} bytes away"


def test_a_block_too_far_lands_in_the_guard() -> None:
    arena, there, buffer = arena_of()
    start = there["out"].data_ptr() - buffer.data_ptr()
    stop, block = start + there["out"].nbytes, 128 * 64 * 2
    assert arena.shared["size_bytes"] >= stop + block
    buffer[stop : stop + block] = 0
    buffer[start - block : start] = 0
    assert {edit.where for edit in arena.read()[1]} == {"before out", "after out"}


def start_judge(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A judge that waits for a call that never returns; the process and those below it."""
    path = EXPLOITS / "crash_loop_in_call.py"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_exploits import *\n"
        "header = header_of(Path(sys.argv[2]))\n"
        "judge(sys.argv[2], plan=plan_for(replace(header, limit_s=120.0)), progress=lambda t: print(t, flush=True))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(path)], env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if "call 1" in line:
            break
    return process, below(process.pid)


def below(judge: int) -> list[int]:
    """The judge's processes: a parent that forks; for each worker one that waits, and the worker."""
    found = [process.pid for process in psutil.Process(judge).children(recursive=True)]
    assert len(found) >= 3
    return found


def gone(pid: int) -> bool:
    """Whether a process ends within a few seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """A shell's background job ignores Ctrl-C, and so would every process that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    process, workers = start_judge(tmp_path)
    assert list(tmp_path.iterdir())
    process.send_signal(signal.SIGINT)
    process.wait(timeout=30)
    assert all(map(gone, workers))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_command_that_is_ended_leaves_nothing_behind(number: signal.Signals, code: int, tmp_path: Path) -> None:
    path, folder = tmp_path / "submission.py", tmp_path / "temporary"
    path.write_text(LOOP)
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "moe_lab", "judge", str(path), "--profile", "open"], stderr=subprocess.PIPE, text=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "call 1" in line:
            break
    workers = below(process.pid)
    assert list(folder.iterdir())
    process.send_signal(number)
    rest = process.stderr.read()
    assert process.wait(timeout=30) == code
    assert "Traceback" not in rest
    assert all(map(gone, workers))
    assert list(folder.iterdir()) == []


def test_the_worker_ends_with_a_killed_judge(tmp_path: Path) -> None:
    """What it leaves is a small folder of text: the arguments lay in memory without a name."""
    process, workers = start_judge(tmp_path)
    process.kill()
    process.wait(timeout=30)
    assert all(map(gone, workers))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 1 << 20


def test_workers_share_a_parent_until_the_environment_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan((Group("one row", 64, 32, (Call((1, 0), 1),)),), sandboxed=False, variants=False, fit=False)
    text = f"import os\nprint('seen', os.getppid() != 1, os.environ.get('MOE_LAB_TEST'))\n{SIGNATURE}    pass\n"

    def parent() -> int:
        report = judge(Submission(text), plan=plan)
        assert report.log == f"seen True {os.environ.get('MOE_LAB_TEST')}\n"
        running = process._Parent._running
        assert running is not None
        return running._process.pid

    first = parent()
    assert parent() == first
    os.kill(first, signal.SIGKILL)
    assert gone(first)
    second = parent()
    assert second != first
    monkeypatch.setenv("MOE_LAB_TEST", "another")
    assert parent() not in (first, second)
    assert gone(second)


def test_a_worker_that_kills_its_parents_is_a_runtime_error() -> None:
    text = f"import os\n{SIGNATURE}    os.kill(os.getppid(), 9)\n    while True:\n        pass\n"
    plan = Plan((Group("one row", 64, 32, (Call((1, 0), 1),)),), sandboxed=False, variants=False, fit=False)
    report = judge(Submission(text), plan=plan)
    assert report.verdict is Verdict.RUNTIME_ERROR, report.sentence


def test_the_worker_never_imports_the_truth() -> None:
    code = (
        "import sys, moe_lab.judge.worker, moe_lab.judge.sandbox, moe_lab.judge.arena\n"
        "print([name for name in sys.modules if name in ('moe_lab.problem.reference', 'moe_lab.judge.compare')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
