"""The process that runs a submission: started fresh, watched, and ended together with everything it started.

Requests and answers are JSON, one datagram each. Nothing that the submission prints can end up there, and an answer
repeats a number that was drawn for its request, so it can be neither prepared nor replayed.
"""

import atexit
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from moe_lab.judge.verdict import Verdict

Message = dict[str, Any]
Progress = Callable[[str], None]

#: Marks every process that a run starts, so that none of them can outlive it unseen.
_RUN_VARIABLE = "MOE_LAB_JUDGE_RUN"
#: More than a datagram may hold.
_MESSAGE_BYTES = 1 << 20
_HEAD_BYTES, _TAIL_BYTES = 2_000, 6_000  # of what a submission prints
_TICK_S = 0.5
_END_S = 5.0  # until a process that was killed, or closed its channel, is gone
_SIGNALS = {
    "SIGSEGV": "usually a kernel that reads or writes outside its tensors",
    "SIGBUS": "usually a kernel that reads or writes outside its tensors",
    "SIGKILL": "usually because the machine ran out of memory",
    "SIGABRT": "usually a failed check inside a library, see its last lines",
    "SIGXFSZ": "because it wrote a larger file than one run may",
}


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


class Stopped(Exception):  # noqa: N818 - an outcome, never seen by callers of the judge
    """The submission cannot go on."""

    def __init__(
        self, verdict: Verdict, sentence: str, *, line: int | None = None, remedy: str = "", alive: bool = False
    ) -> None:
        # What a submission raises may hold characters that no encoding has.
        self.sentence = sentence.encode("utf-8", "replace").decode()
        super().__init__(self.sentence)
        self.verdict, self.line, self.remedy = verdict, line, remedy
        self.alive = alive  # whether the worker could take another call, as after an exception


class _Forked:
    """A worker that :class:`_Parent` has forked, as far as the judge needs to know it."""

    def __init__(self, news: socket.socket) -> None:
        self._news, self._lock, self._number = news, threading.Lock(), 0

    def _hear(self) -> int | None:
        self._news.settimeout(_END_S)
        with contextlib.suppress(OSError):
            return int(said) if (said := self._news.recv(32)) else None
        return None

    def number(self) -> int | None:
        """Its process number; None if it has not come to life."""
        with self._lock:
            self._number = self._number or self._hear() or 0
            return self._number or None

    def ended(self) -> int | None:
        """Its exit code, negative for a signal; None if nobody knows."""
        return self._hear() if self.number() else None

    def kill(self) -> None:
        """End it with its session; one that was never born finds its judge gone."""
        if number := self.number():
            for end in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    end(number, signal.SIGKILL)


class _Parent:
    """A process of ours that has imported torch and TileLang; each fork of it is a worker."""

    _lock = threading.Lock()
    _running: "_Parent | None" = None

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment, self._folder = environment, tempfile.TemporaryDirectory(prefix="moe_lab_")
        self.output = os.memfd_create("output")
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        checkout = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [checkout, environment.get("PYTHONPATH")]))
        # The run's token and its folder are written over these.
        room = {_RUN_VARIABLE: "-" * 32, "TMPDIR": self._folder.name, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        # To ask for a GPU must not open it: no fork could use it then.
        room["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        # Torch only fills buffers there; threads that spin on a shared machine cost more than they bring.
        threads = {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moe_lab.judge.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT, cwd=self._folder.name,
                env=environment | room | threads, pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip

    @classmethod
    def now(cls) -> "_Parent":
        """The one for today's environment."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        with cls._lock:
            if cls._running and (cls._running.environment != environment or cls._running._process.poll() is not None):
                cls._running.close()
                cls._running = None
            cls._running = cls._running or cls(environment)
            return cls._running

    def fork(self, judge: socket.socket, output: int, **request: Any) -> _Forked:
        """A new worker that answers the judge."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.suppress(OSError):  # who is gone shows in the first answer
            descriptors = [judge.fileno(), output, theirs.fileno()]
            socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)
        return _Forked(ours)

    def close(self) -> None:
        """End it, and with it the workers that run."""
        self._requests.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
        os.close(self.output)


def warm_up() -> None:
    """Begin to import what a worker needs, for a judge that has other things to do first."""
    _Parent.now()


@atexit.register
def _close() -> None:
    if _Parent._running:
        _Parent._running.close()


def _text(output: int) -> str:
    """Head and tail of a file, without control characters."""
    head, size = os.pread(output, _HEAD_BYTES, 0), os.fstat(output).st_size
    tail = os.pread(output, _TAIL_BYTES, max(len(head), size - _TAIL_BYTES))
    left_out = size - len(head) - len(tail)
    gap = f"\n[{left_out} bytes left out]\n".encode() if left_out > 0 else b""
    said = (head + gap + tail).decode("utf-8", "replace")
    return "".join(char for char in said if char.isprintable() or char in "\n\t")


class Worker:
    """One worker process, whose :meth:`end` leaves nothing behind; ``say`` hears what it does, twice a second."""

    def __init__(self, limits: Limits, say: Progress) -> None:
        self.log = ""  # what it printed, head and tail; known at the end
        self.strangers: list[str] = []  # processes that ran beside it at the end; they were ended too
        self._limits, self._say, self._doing = limits, say, ""
        self._token = secrets.token_hex(16)
        self._process: _Forked | None = None

    def start(self) -> Path:
        """Start the process; its private folder, in which it has one of its own for temporary files."""
        self._folder = tempfile.TemporaryDirectory(prefix="moe_lab_", ignore_cleanup_errors=True)
        own = Path(self._folder.name) / "cwd"
        own.mkdir()
        self._output = os.memfd_create("output")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._parent = _Parent.now()
            self._process = self._parent.fork(
                theirs, self._output, folder=str(own), environment={_RUN_VARIABLE: self._token, "TMPDIR": str(own)}
            )
        return own.parent

    def end(self) -> None:
        """End the worker, its session, and whatever left that session but not its environment; remove its folder."""
        if self._process is None or self._socket.fileno() < 0:
            return
        left: dict[psutil.Process, str] = {}
        with contextlib.suppress(psutil.Error):
            number = self._process.number()
            for child in psutil.Process(number).children(recursive=True) if number else ():
                # One that only waits to be reaped does not run.
                if child.status() != psutil.STATUS_ZOMBIE:
                    left[child] = child.name()
        self._process.kill()
        self._process.ended()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(_RUN_VARIABLE) == self._token:
                    left[process] = process.name()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.strangers = list(left.values())
        # Why a worker was not even born, its parent has said.
        self.log = _text(self._output if self._process.number() else self._parent.output)
        os.close(self._output)
        self._socket.close()
        self._folder.cleanup()

    def interrupt(self) -> None:
        """End the process at once, from any thread; whoever waits for its answer sees that it has ended."""
        if self._process is not None:
            self._process.kill()

    def do(self, what: str) -> None:
        """Say what the next requests are for."""
        self._doing = what
        self._say(what)

    def request(self, event: str, timeout_s: float, **message: Any) -> Message:
        """Send a message and wait for the answer; raises :class:`Stopped` if none comes."""
        number, start = secrets.token_hex(16), time.monotonic()
        # A process that is already gone shows in the answer.
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps({"event": event, "number": number, **message}).encode())
        while True:
            answered, waited_s = wait([self._socket], _TICK_S), time.monotonic() - start
            if os.fstat(self._output).st_size > self._limits.output_bytes:
                what = f"printed more than {self._limits.output_bytes >> 20} MiB while {self._doing}"
                raise Stopped(Verdict.RESOURCE_ERROR, f"{what}, expected next to nothing: remove the prints")
            if answered:
                break
            if waited_s > timeout_s:
                what = f"no answer within {timeout_s:.0f} s while {self._doing}"
                raise Stopped(Verdict.TIMEOUT, f"{what}, usually an endless loop or far too much work for one call")
            self._say(f"{self._doing} ({waited_s:.0f} s)")
        data = b""
        with contextlib.suppress(ConnectionError):
            data = self._socket.recv(_MESSAGE_BYTES)
        if not data:
            raise self._ended()
        with contextlib.suppress(ValueError, KeyError, AttributeError, TypeError):
            answer: Message = json.loads(data)
            if answer.pop("number") == number:
                return answer
        what = f"wrote on the judge's own channel while {self._doing} ({len(data)} bytes that answer no request)"
        raise Stopped(Verdict.RULE_VIOLATION, f"{what}; results are only read from out")

    def _ended(self) -> Stopped:
        code = self._process.ended() if self._process else None
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            usual = _SIGNALS.get(name, "which it sent itself or got from a library")
            return Stopped(Verdict.RUNTIME_ERROR, f"the process died of {name} while {self._doing}, {usual}")
        how = "its channel closed" if code is None else f"exit code {code}"
        what = f"the process ended itself with {how} while {self._doing}"
        return Stopped(Verdict.RUNTIME_ERROR, f"{what}, expected run_kernel to return")
