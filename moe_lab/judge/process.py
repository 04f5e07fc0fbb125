"""The process that runs a submission: started fresh, watched, and ended together with everything it started.

Requests and answers are JSON, one datagram each. Nothing that the submission prints can end up there, and an answer
repeats a number that was drawn for its request, so it can be neither prepared nor replayed.
"""

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


class Worker:
    """One worker process, whose :meth:`end` leaves nothing behind; ``say`` hears what it does, twice a second."""

    def __init__(self, limits: Limits, say: Progress) -> None:
        self.log = ""  # what it printed, head and tail; known at the end
        self.strangers: list[str] = []  # processes that ran beside it at the end; they were ended too
        self._limits, self._say, self._doing = limits, say, ""
        self._token = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Path:
        """Start the process; its private folder, in which it has one of its own for temporary files."""
        self._folder = tempfile.TemporaryDirectory(prefix="moe_lab_", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        own = folder / "cwd"
        own.mkdir()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        environment |= {_RUN_VARIABLE: self._token, "PYTHONUNBUFFERED": "1", "TMPDIR": str(own)}
        # Torch only fills buffers there; threads that spin on a shared machine cost more than they bring.
        environment.setdefault("OMP_NUM_THREADS", "1")
        checkout = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, environment.get("PYTHONPATH")]))
        self._output = os.memfd_create("output")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moe_lab.judge.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT, cwd=own, env=environment,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        return folder

    def end(self) -> None:
        """End the worker, its session, and whatever left that session but not its environment; remove its folder."""
        if self._process is None or self._socket.fileno() < 0:
            return
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
        head, size = os.pread(self._output, _HEAD_BYTES, 0), os.fstat(self._output).st_size
        tail = os.pread(self._output, _TAIL_BYTES, max(len(head), size - _TAIL_BYTES))
        left_out = size - len(head) - len(tail)
        gap = f"\n[{left_out} bytes left out]\n".encode() if left_out > 0 else b""
        said = (head + gap + tail).decode("utf-8", "replace")
        self.log = "".join(char for char in said if char.isprintable() or char in "\n\t")
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
        assert self._process is not None
        code: int | str = "channel closed"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=5)
        if isinstance(code, int) and code < 0:
            name = signal.Signals(-code).name
            usual = _SIGNALS.get(name, "which it sent itself or got from a library")
            return Stopped(Verdict.RUNTIME_ERROR, f"the process died of {name} while {self._doing}, {usual}")
        what = f"the process ended itself with exit code {code} while {self._doing}"
        return Stopped(Verdict.RUNTIME_ERROR, f"{what}, expected run_kernel to return")
