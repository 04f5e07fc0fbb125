"""The process of a submission: signed messages, bounded output, and nothing left behind."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from moe_lab.judge.arena import MappedArena, WindowArena, private_folder, view
from moe_lab.judge.channel import Channel, ChannelClosedError, ForgedFrameError
from moe_lab.judge.process import _Log
from moe_lab.problem.contract import ARGUMENTS, Case
from moe_lab.problem.inputs import make_inputs

EXPLOITS = Path(__file__).parent.parent / "exploits"
LOOP = (
    "def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights, group_sizes, group_offsets,\n"
    "               group_padded_offsets, group_idx_for_bx, out):\n"
    "    while True:\n        pass\n"
)


def channels(key: bytes = b"k" * 32, other: bytes | None = None) -> tuple[Channel, Channel, socket.socket]:
    ours, theirs = socket.socketpair()
    return Channel(ours, key, "judge"), Channel(theirs, other or key, "worker"), theirs


def test_messages_arrive_in_order_and_whole() -> None:
    judge, worker, _ = channels()
    for number in range(3):
        worker.send({"number": number, "text": "x" * 100_000 * number})
        assert judge.receive() == {"number": number, "text": "x" * 100_000 * number}
    judge.send({"event": "call"})
    assert worker.receive() == {"event": "call"}


def test_forged_replayed_and_reflected_frames_are_refused() -> None:
    judge, worker, _ = channels(other=b"x" * 32)
    worker.send({"event": "done"})
    with pytest.raises(ForgedFrameError, match="no valid signature"):
        judge.receive()

    judge, worker, raw = channels()
    worker.send({"event": "done"})
    frame = judge._sock.recv(4096)
    raw.sendall(frame + frame)
    assert judge.receive() == {"event": "done"}
    with pytest.raises(ForgedFrameError, match="frame 1"):
        judge.receive()

    judge, worker, raw = channels()
    judge.send({"event": "done"})
    raw.sendall(raw.recv(4096))  # the judge's own frame, sent back
    with pytest.raises(ForgedFrameError):
        judge.receive()

    judge, _, raw = channels()
    raw.sendall(b"\xff" * 64)
    with pytest.raises(ForgedFrameError, match="claims"):
        judge.receive()


def test_a_closed_channel_and_a_forked_copy_are_told_apart_from_messages() -> None:
    judge, worker, _ = channels()
    worker.close()
    with pytest.raises(ChannelClosedError):
        judge.receive()
    judge, worker, _ = channels()
    child = os.fork()
    if child == 0:
        try:
            worker.send({"event": "done"})
        except ChannelClosedError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_endless_output_keeps_its_beginning_and_end() -> None:
    log = _Log()
    log.add(b"first words\n")
    for _ in range(100):
        log.add(b"x" * 1000)
    log.add(b"\x1b[31mlast words\x00")
    text = log.text()
    assert text.startswith("first words")
    assert text.endswith("[31mlast words")
    assert "bytes left out]" in text
    assert len(text) < 9_000
    assert "\x1b" not in text


def arena_of(tmp_path: Path, experts: list[int] | None = None) -> tuple[MappedArena, dict[str, torch.Tensor]]:
    inputs = make_inputs(Case("small", 3, 64, 32, 5), (2, 0, 3), seed=1)
    tensors = dict(zip((argument.name for argument in ARGUMENTS), inputs.args, strict=True))
    arena = MappedArena(tensors, tmp_path / "arena", experts)
    arena.write(tensors)
    return arena, tensors


def test_an_arena_gives_back_what_was_written(tmp_path: Path) -> None:
    arena, tensors = arena_of(tmp_path)
    for region in arena._regions:
        there = view(arena._buffer, region)
        assert there.shape == tensors[region.name].shape
        assert torch.equal(there.nan_to_num(), tensors[region.name].nan_to_num())
        assert region.start % 4096 == 0
    arena.out.fill_(1.0)
    assert arena.edits() == []


@pytest.mark.parametrize("name", [argument.name for argument in ARGUMENTS[:-1]])
def test_every_input_is_watched(name: str, tmp_path: Path) -> None:
    arena, _ = arena_of(tmp_path)
    region = next(region for region in arena._regions if region.name == name)
    there = view(arena._buffer, region).flatten()
    there[-1] = there[-1] + 1 if name != "stacked_expert_tokens" else 1.0
    (edit,) = arena.edits()
    assert (edit.where, edit.first) == (name, there.numel() - 1)
    assert edit.is_input


def test_sparse_weights_are_watched_where_they_are_used(tmp_path: Path) -> None:
    arena, tensors = arena_of(tmp_path, experts=[2])
    region = next(region for region in arena._regions if region.name == "up_w")
    there = view(arena._buffer, region)
    assert torch.equal(there[2], tensors["up_w"][2])
    assert not there[0].any()
    there[2, 0, 1] += 1
    (edit,) = arena.edits()
    assert (edit.where, edit.first) == ("up_w", 2 * 32 * 64 + 1)


@pytest.mark.parametrize(("where", "offset", "distance"), [("before out", -6, 4), ("after out", 6, 6)])
def test_guard_bands_name_the_side_and_the_distance(where: str, offset: int, distance: int, tmp_path: Path) -> None:
    arena, _ = arena_of(tmp_path)
    out = arena._regions[-1]
    start = out.start + offset if offset < 0 else out.stop + offset
    arena._buffer[start : start + 2] = 0
    (edit,) = arena.edits()
    assert (edit.where, edit.first, edit.count) == (where, distance, 2)
    assert str(edit) == f"wrote 2 bytes {where}, the nearest {distance} bytes away"


def test_a_block_too_far_lands_in_the_guard(tmp_path: Path) -> None:
    arena, _ = arena_of(tmp_path)
    out = arena._regions[-1]
    block = 128 * 64 * 2
    assert arena.size_bytes >= out.stop + block
    arena._buffer[out.stop : out.stop + block] = 0
    arena._buffer[out.start - block : out.start] = 0
    assert {edit.where for edit in arena.edits()} == {"before out", "after out"}


class Elsewhere:
    """Memory of another process behind a window that divides nothing evenly."""

    def __init__(self) -> None:
        self.window = torch.zeros(10_007, dtype=torch.uint8)
        inputs = make_inputs(Case("small", 3, 64, 32, 5), (2, 0, 3), seed=1)
        self.tensors = dict(zip((argument.name for argument in ARGUMENTS), inputs.args, strict=True))
        self.arena = WindowArena(self.tensors, self.window, self.move)
        self.memory = torch.zeros(self.arena.size_bytes, dtype=torch.uint8)
        self.arena.write(self.tensors)
        self.window.zero_()

    def move(self, direction: str, start: int, size: int) -> None:
        part, window = self.memory[start : start + size], self.window[:size]
        (part if direction == "put" else window).copy_(window if direction == "put" else part)

    def there(self, name: str) -> torch.Tensor:
        return view(self.memory, next(region for region in self.arena._regions if region.name == name))


def test_a_window_carries_every_byte_there_and_back() -> None:
    other = Elsewhere()
    for name, tensor in other.tensors.items():
        assert torch.equal(other.there(name).nan_to_num(), tensor.nan_to_num()), name
    answer = torch.randn(other.there("out").shape).half()
    other.there("out").copy_(answer)
    out, edits = other.arena.read()
    assert torch.equal(out, answer)
    assert edits == []


@pytest.mark.parametrize("name", [argument.name for argument in ARGUMENTS[:-1]])
def test_every_input_behind_a_window_is_watched(name: str) -> None:
    other = Elsewhere()
    there = other.there(name).flatten()
    last = there.numel() - 1
    changed = [0, last] if last > 6_000 else [last]
    for index in changed:
        there[index] = there[index] + 1 if name != "stacked_expert_tokens" or index == 0 else 1.0
    _, (edit,) = other.arena.read()
    assert (edit.where, edit.first) == (name, changed[0])
    assert edit.count >= len(changed)


@pytest.mark.parametrize(("where", "offset", "distance"), [("before out", -6, 4), ("after out", 6, 6)])
def test_guard_bands_behind_a_window(where: str, offset: int, distance: int) -> None:
    other = Elsewhere()
    region = other.arena._regions[-1]
    start = region.start + offset if offset < 0 else region.stop + offset
    other.memory[start : start + 2] = 0
    _, (edit,) = other.arena.read()
    assert (edit.where, edit.first, edit.count) == (where, distance, 2)


def start_holder() -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a folder until it is killed."""
    code = (
        "from moe_lab.judge.arena import private_folder\n"
        "held = private_folder(1); print(held.__enter__(), flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_folders_of_killed_processes_are_removed_and_those_of_living_ones_stay() -> None:
    process, folder = start_holder()
    # Another container sees the folder under the number of a process that it does not know.
    held = folder.rename(folder.with_name(folder.name.replace(f"_{process.pid}_", "_4194305_")))
    foreign = held.with_name(f"moe_lab_held_link_{process.pid}")
    foreign.symlink_to(held)
    try:
        with private_folder(1) as first, private_folder(1) as second:
            assert first.stat().st_mode & 0o777 == 0o700
            assert first.is_dir()
            assert second.is_dir()
            assert held.is_dir()
        assert not first.exists()
        process.kill()
        process.wait()
        with private_folder(1):
            assert not held.exists()
        assert foreign.is_symlink()
    finally:
        foreign.unlink()
        process.kill()
        process.wait()


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Path] = []
    lock_for_real = fcntl.flock

    def make(**options: Any) -> str:
        made.append(tmp_path / str(len(made)))
        if len(made) > 1:
            made[-1].mkdir()
        return str(made[-1])

    def lock(file: int, operation: int) -> None:
        # Whoever looks for orphans does not wait for a lock.
        if operation == fcntl.LOCK_EX and len(made) == 2:
            made[1].rmdir()
        lock_for_real(file, operation)

    monkeypatch.setattr("tempfile.mkdtemp", make)
    monkeypatch.setattr("fcntl.flock", lock)
    with private_folder(1) as folder:
        assert folder == tmp_path / "2"
    assert list(tmp_path.iterdir()) == []


def start_judge() -> tuple[subprocess.Popen[str], int]:
    """A judge that waits for a call that never returns; the process and its worker's id."""
    path = EXPLOITS / "crash_loop_in_call.py"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_exploits import *\n"
        "header = header_of(Path(sys.argv[2]))\n"
        "judge(sys.argv[2], plan=plan_for(replace(header, limit_s=120.0)), progress=lambda t: print(t, flush=True))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if "call 1" in line:
            break
    (worker,) = psutil.Process(process.pid).children()
    return process, worker.pid


def gone(pid: int) -> bool:
    """Whether a process ends within a few seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def folders_of(pid: int) -> list[Path]:
    return [path for base in (Path("/dev/shm"), Path("/tmp")) for path in base.glob(f"moe_lab_held_{pid}_*")]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """A shell's background job ignores Ctrl-C, and so would every process that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_leaves_nothing_behind() -> None:
    process, worker = start_judge()
    assert folders_of(process.pid)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=30)
    assert gone(worker)
    assert folders_of(process.pid) == []


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_command_that_is_ended_leaves_nothing_behind(number: signal.Signals, code: int, tmp_path: Path) -> None:
    path = tmp_path / "submission.py"
    path.write_text(LOOP)
    process = subprocess.Popen(
        [sys.executable, "-m", "moe_lab", "judge", str(path), "--profile", "open"], stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "call 1" in line:
            break
    (worker,) = psutil.Process(process.pid).children()
    assert folders_of(process.pid)
    process.send_signal(number)
    rest = process.stderr.read()
    assert process.wait(timeout=30) == code
    assert "Traceback" not in rest
    assert gone(worker.pid)
    assert folders_of(process.pid) == []


def test_the_worker_ends_with_a_killed_judge() -> None:
    process, worker = start_judge()
    process.kill()
    process.wait(timeout=30)
    assert gone(worker)


def test_the_worker_never_imports_the_truth() -> None:
    code = (
        "import sys, moe_lab.judge.worker, moe_lab.judge.sandbox, moe_lab.judge.arena\n"
        "print([name for name in sys.modules if name in ('moe_lab.problem.reference', 'moe_lab.judge.compare')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
