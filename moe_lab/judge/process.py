"""The process that runs a submission: started fresh, watched, and ended together with everything it started."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

import psutil

from moe_lab.judge.channel import KEY_BYTES, Channel, ChannelClosedError, ForgedFrameError, Message

#: Marks every process that a run starts, so that none of them can outlive it unseen.
RUN_VARIABLE = "MOE_LAB_JUDGE_RUN"

_HEAD_BYTES = 2_000
_TAIL_BYTES = 6_000


@dataclass(frozen=True)
class Limits:
    """What one run may use.

    Attributes:
        start_s: until the worker is up; importing torch and TileLang is ours, not the submission's.
        load_s: executing the submission's module level.
        first_call_s: the first call of a case, which may compile.
        call_s: every other call.
        memory_bytes: address space beyond what is mapped once TileLang is imported; not enforced where a GPU driver
            reserves address space of its own.
        output_bytes: of print.
        file_bytes: largest file the process may write.
    """

    start_s: float = 90.0
    load_s: float = 30.0
    first_call_s: float = 90.0
    call_s: float = 60.0
    memory_bytes: int = 6 << 30
    output_bytes: int = 4 << 20
    file_bytes: int = 256 << 20


class WorkerEnded(Exception):  # noqa: N818 - an outcome, not an error of ours
    """The worker will not answer any more.

    Attributes:
        kind: "timeout", "exit" (code), "signal" (number), "output" (bytes) or "forged".
        detail: the number or text that belongs to the kind.
    """

    def __init__(self, kind: Literal["timeout", "exit", "signal", "output", "forged"], detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class _Log:
    """The first and the last bytes of a stream that may be endless."""

    def __init__(self) -> None:
        self.total = 0
        self._head = b""
        self._tail = b""

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = _HEAD_BYTES - len(self._head)
        self._head += data[:room] if room > 0 else b""
        self._tail = (self._tail + data[max(0, room) :])[-_TAIL_BYTES:]

    def text(self) -> str:
        cut = self.total - len(self._head) - len(self._tail)
        middle = f"\n[{cut} bytes left out]\n".encode() if cut else b""
        text = (self._head + middle + self._tail).decode("utf-8", "replace")
        return "".join(char for char in text if char.isprintable() or char in "\n\t")


class Worker:
    """One worker process and the channel to it; a context manager that leaves nothing behind.

    Args:
        folder: empty private folder, the worker's current directory and place for temporary files.
        limits: see :class:`Limits`.
        tick: called about twice a second while the judge waits, for progress lines.
    """

    def __init__(self, folder: Path, limits: Limits, tick: Callable[[float], None] | None = None) -> None:
        self._folder = folder
        self._limits = limits
        self._tick = tick
        self._log = _Log()
        self._token = secrets.token_hex(16)
        self._survivors: list[str] = []

    def __enter__(self) -> Worker:
        """Start the process."""
        ours, theirs = socket.socketpair()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        environment |= {RUN_VARIABLE: self._token, "PYTHONUNBUFFERED": "1", "TMPDIR": str(self._folder)}
        # Torch only fills buffers there; threads that spin on a shared machine cost more than they bring.
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [_checkout(), environment.get("PYTHONPATH")]))
        key = secrets.token_bytes(KEY_BYTES)
        with theirs:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", "moe_lab.judge.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self._folder,
                env=environment, pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        # A process that is already gone shows in the answer to the first request.
        with contextlib.suppress(OSError):
            ours.sendall(key)
        self._channel = Channel(ours, key, "judge")
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it, whatever happened."""
        self.kill()

    @property
    def log(self) -> str:
        """What the worker printed, head and tail."""
        return self._log.text()

    @property
    def survivors(self) -> list[str]:
        """Processes that were still there after the group was ended; they were ended too."""
        return self._survivors

    def request(self, message: Message, timeout_s: float) -> Message:
        """Send a message and wait for the answer.

        Raises:
            WorkerEnded: if none comes.
        """
        with contextlib.suppress(ChannelClosedError):
            self._channel.send(message)
        return self._answer(timeout_s)

    def interrupt(self) -> None:
        """End the process at once, from any thread; whoever waits for its answer sees that it has ended."""
        self._process.kill()

    def strangers(self) -> list[str]:
        """Names of the processes that the worker has started and that still run."""
        try:
            children = psutil.Process(self._process.pid).children(recursive=True)
            return [child.name() for child in children if child.status() != psutil.STATUS_ZOMBIE]
        except psutil.Error:
            return []

    def kill(self) -> None:
        """End the worker, its process group and whatever left that group."""
        descendants: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            descendants = psutil.Process(self._process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        left = {process.pid: process for process in [*descendants, *self._marked()]}
        for process in left.values():
            with contextlib.suppress(psutil.Error):
                # A member of the group that is only waiting to be reaped is no survivor.
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    self._survivors.append(process.name())
                    process.kill()
        self._drain()
        self._selector.close()
        self._channel.close()
        if self._process.stdout:
            self._process.stdout.close()

    def _marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(RUN_VARIABLE) == self._token:
                    found.append(process)
        return found

    def _answer(self, timeout_s: float) -> Message:
        start = time.monotonic()
        ticked = start
        while True:
            now = time.monotonic()
            if now - start > timeout_s:
                raise WorkerEnded("timeout", f"{timeout_s:.0f}")
            if self._tick and now - ticked > 0.5:
                ticked = now
                self._tick(now - start)
            for key, _ in self._selector.select(timeout=min(0.25, max(0.0, start + timeout_s - now))):
                if key.fileobj is self._channel:
                    message = self._receive()
                    if message is not None:
                        return message
                else:
                    self._read(key.fileobj)  # type: ignore[arg-type]

    def _receive(self) -> Message | None:
        try:
            self._channel.fill()
            return self._channel.poll()
        except ForgedFrameError as error:
            raise WorkerEnded("forged", str(error)) from None
        except ChannelClosedError:
            pass
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            raise WorkerEnded("exit", "channel closed") from None
        self._drain()
        if code < 0:
            raise WorkerEnded("signal", signal.Signals(-code).name)
        raise WorkerEnded("exit", str(code))

    def _read(self, stream: IO[bytes]) -> None:
        data = stream.read(1 << 16)
        if data:
            self._log.add(data)
        elif data == b"":
            self._selector.unregister(stream)
        if self._log.total > self._limits.output_bytes:
            raise WorkerEnded("output", f"{self._log.total}")

    def _drain(self) -> None:
        stream = self._process.stdout
        if stream is None or stream.closed:
            return
        # A survivor may hold the pipe open and write for ever: read only what is there now.
        for _ in range(64):
            data = stream.read(1 << 16)
            if not data:
                break
            self._log.add(data)


def _checkout() -> str:
    return str(Path(__file__).resolve().parents[2])
