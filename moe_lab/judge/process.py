"""The process that runs a submission: started fresh, watched, and ended together with everything it started.

Requests and answers are JSON, one datagram each. Nothing that the submission prints can end up there, and an answer
repeats a number that was drawn for its request, so it can be neither prepared nor replayed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

Message = dict[str, Any]

#: Marks every process that a run starts, so that none of them can outlive it unseen.
_RUN_VARIABLE = "MOE_LAB_JUDGE_RUN"
#: More than a datagram may hold.
_MESSAGE_BYTES = 1 << 20
_HEAD_BYTES = 2_000
_TAIL_BYTES = 6_000
_TICK_S = 0.25


@dataclass(frozen=True)
class Limits:
    """What one run may use."""

    start_s: float = 90.0  # until the worker is up; importing torch and TileLang is ours, not the submission's
    load_s: float = 30.0  # executing the submission's module level
    first_call_s: float = 90.0  # the first call of a case, which may compile
    call_s: float = 60.0  # every other call
    #: Address space beyond what is mapped once TileLang is imported; not enforced where a GPU driver reserves its own.
    memory_bytes: int = 6 << 30
    output_bytes: int = 4 << 20  # of print
    file_bytes: int = 256 << 20  # largest file the process may write


class WorkerEnded(Exception):  # noqa: N818 - an outcome, not an error of ours
    """The worker will not answer any more."""

    def __init__(self, kind: Literal["timeout", "exit", "signal", "output", "forged"], detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail  # seconds, exit code, signal's name, bytes, or a text


class Worker:
    """One worker process; a context manager that leaves nothing behind.

    Args:
        folder: empty private folder, the worker's current directory and place for temporary files.
        limits: see :class:`Limits`.
        tick: called about twice a second with the seconds that the judge has waited.
    """

    def __init__(self, folder: Path, limits: Limits, tick: Callable[[float], None]) -> None:
        self._folder, self._limits, self._tick = folder, limits, tick
        self._token = secrets.token_hex(16)
        self.strangers: list[str] = []  # processes that ran beside the worker at the end; they were ended too

    def __enter__(self) -> Worker:
        """Start the process."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        environment |= {_RUN_VARIABLE: self._token, "PYTHONUNBUFFERED": "1", "TMPDIR": str(self._folder)}
        # Torch only fills buffers there; threads that spin on a shared machine cost more than they bring.
        environment.setdefault("OMP_NUM_THREADS", "1")
        checkout = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, environment.get("PYTHONPATH")]))
        self._output = tempfile.TemporaryFile(dir=self._folder, buffering=0)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_TICK_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moe_lab.judge.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT, cwd=self._folder,
                env=environment, pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        """End the worker, its session, and whatever left that session but not its environment."""
        left: dict[psutil.Process, str] = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                # One that only waits to be reaped does not run.
                if child.status() != psutil.STATUS_ZOMBIE:
                    left[child] = child.name()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(_RUN_VARIABLE) == self._token:
                    left[process] = process.name()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.strangers = list(left.values())
        self._log = self.log
        self._output.close()
        self._socket.close()

    @property
    def log(self) -> str:
        """What the worker printed, head and tail."""
        if self._output.closed:
            return self._log
        file, size = self._output.fileno(), os.fstat(self._output.fileno()).st_size
        data = os.pread(file, _HEAD_BYTES, 0)
        tail_start = max(len(data), size - _TAIL_BYTES)
        if tail_start > len(data):
            data += f"\n[{tail_start - len(data)} bytes left out]\n".encode()
        data += os.pread(file, _TAIL_BYTES, tail_start)
        return "".join(char for char in data.decode("utf-8", "replace") if char.isprintable() or char in "\n\t")

    def interrupt(self) -> None:
        """End the process at once, from any thread; whoever waits for its answer sees that it has ended."""
        self._process.kill()

    def request(self, message: Message, timeout_s: float) -> Message:
        """Send a message and wait for the answer.

        Raises:
            WorkerEnded: if none comes.
        """
        number = secrets.token_hex(16)
        # A process that is already gone shows in the answer.
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(message | {"number": number}).encode())
        data = self._receive(timeout_s)
        try:
            answer: Message = json.loads(data)
            if answer.pop("number") != number:
                raise ValueError
        except (ValueError, KeyError, AttributeError, TypeError):
            raise WorkerEnded("forged", f"{len(data)} bytes that answer no request") from None
        return answer

    def _receive(self, timeout_s: float) -> bytes:
        start = ticked = time.monotonic()
        while True:
            data: bytes | None = None
            with contextlib.suppress(TimeoutError):
                try:
                    data = self._socket.recv(_MESSAGE_BYTES)
                except ConnectionError:
                    data = b""
            size = os.fstat(self._output.fileno()).st_size
            if size > self._limits.output_bytes:
                raise WorkerEnded("output", str(size))
            if data:
                return data
            if data is not None:
                raise self._ended()
            now = time.monotonic()
            if now - start > timeout_s:
                raise WorkerEnded("timeout", f"{timeout_s:.0f}")
            if now - ticked > 2 * _TICK_S:
                ticked = now
                self._tick(now - start)

    def _ended(self) -> WorkerEnded:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return WorkerEnded("exit", "channel closed")
        return WorkerEnded("signal", signal.Signals(-code).name) if code < 0 else WorkerEnded("exit", str(code))
