"""Another Python process that answers requests: what may hang, crash, patch names or print does so over there.

The process starts with the first request and stays warm, in a session and a folder of its own. It ends with
:meth:`Child.close`, with a request that is not answered in time, and when this process ends, however that ends; the
next request starts a new one. Requests and answers are JSON.
"""

import contextlib
import fcntl
import functools
import json
import math
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from moe_lab.problem.errors import BackendError, MoeLabError

_MESSAGE_CHARS = 20_000  # kept of an error and of what was printed: a compiler may say the whole kernel


class ChildError(BackendError):
    """A request without an answer; its text is one line."""

    def __init__(self, text: str, message: str, ending: str = "") -> None:
        super().__init__(text)
        self.message = message  #: all that the error said, or the last that the process printed, shortened
        #: "exit code 3", "signal 9 (Killed)", "no answer in 60 s"; empty if the function raised and the process goes on
        self.ending = ending


class Child(contextlib.AbstractContextManager["Child"]):
    """One process; not for several threads at once.

    ``function`` is the "module:name" of a function of the package, called as ``name(say, **request)``; ``say(value)``
    tells the parent something before the answer. ``environment`` has variables to set; None takes one away.
    """

    def __init__(
        self, function: str, *, python: str = sys.executable, environment: Mapping[str, str | None] | None = None
    ) -> None:
        self._function, self._python, self._environment = function, python, environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._parts = contextlib.ExitStack()

    @property
    def running(self) -> bool:
        """Whether a process has started that the last request did not end."""
        return self._process is not None

    def close(self, *error: object) -> None:
        """End the process and what it started, and remove its folder."""
        self._process = None
        self._parts.close()

    __exit__ = close

    def ask(
        self, request: Mapping[str, Any], *, timeout_s: float = math.inf,
        say: Callable[[Any], object] = lambda value: None, tick: Callable[[], object] = lambda: None,
    ) -> Any:  # fmt: skip
        """Send the arguments of the function and wait for its answer; the start of the process counts as waiting.

        ``say`` is told what the function tells before it answers. ``tick`` is called several times a second; what it
        raises ends the process and goes on. Raises ChildError for an exception of the function, a process that ended,
        or no answer in time, BackendError if the interpreter cannot be run.
        """
        try:
            if self._process is None:
                self._start()
            with contextlib.suppress(OSError):  # it is gone: the answer says how
                self._connection.send_bytes(json.dumps(dict(request)).encode())
            kind, value = self._answer(timeout_s, say, tick)
        except BaseException:
            self.close()
            raise
        if kind == "error":
            raise ChildError(*value)
        return value

    def _start(self) -> None:
        temporary = tempfile.TemporaryDirectory(prefix="moe_lab_child_", ignore_cleanup_errors=True)
        folder = self._parts.enter_context(temporary)
        self._connection, theirs = Pipe()
        life, ours = os.pipe()
        self._parts.callback(os.close, ours)
        path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]))
        own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TMPDIR": folder}
        environment = {**os.environ, **own, **self._environment}
        pipes = (theirs.fileno(), life)
        try:
            self._process = subprocess.Popen(
                [self._python, "-m", "moe_lab.machine.child", self._function, *map(str, pipes)], pass_fds=pipes,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
                env={name: value for name, value in environment.items() if value is not None}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise BackendError(f"got python={self._python}, expected an interpreter ({error.strerror})") from None
        finally:
            theirs.close()
            os.close(life)
        self._parts.callback(_end, self._process, self._connection)

    def _answer(self, timeout_s: float, say: Callable[[Any], object], tick: Callable[[], object]) -> tuple[str, Any]:
        process: Any = self._process
        prints, printed, deadline = process.stdout.fileno(), b"", time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            tick()
            ready = wait([self._connection, prints], min(0.2, left))
            if prints in ready:
                printed = (printed + os.read(prints, 1 << 16))[-_MESSAGE_CHARS:]
            if self._connection in ready:
                try:
                    kind, value = json.loads(self._connection.recv_bytes())
                except (EOFError, OSError):
                    break
                if kind != "say":
                    return kind, value
                say(value)
        else:
            ending = f"no answer in {timeout_s:g} s"
            raise ChildError(f"got {ending}", printed.decode("utf-8", "replace"), ending)
        code = process.wait(5)
        while wait([prints], 0.1) and (data := os.read(prints, 1 << 16)):
            printed = (printed + data)[-_MESSAGE_CHARS:]
        ending = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        text = printed.decode("utf-8", "replace")
        words = "".join(f"; its last words: {line}" for line in text.strip().splitlines()[-1:])
        raise ChildError(f"the process ended with {ending}{words}", text, ending)


def _end(process: Any, connection: Connection) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    connection.close()
    process.stdout.close()


def _words(error: BaseException) -> tuple[str, str]:
    """An error in a line and in full; a stranger's error may not even have a text."""
    try:
        text = str(error).encode("utf-8", "replace").decode().strip()[:_MESSAGE_CHARS]
    except Exception:  # noqa: BLE001
        text = ""
    kind = "" if isinstance(error, MoeLabError) and text else type(error).__name__
    first = text.partition("\n")[0].strip()
    return ": ".join(filter(None, [kind, first])), ": ".join(filter(None, [kind, text]))


def _serve(function: str, connection: Connection, life: int) -> None:
    # The parent never writes there: the kernel tells its end, and this group ends with it, whatever it is doing.
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)

    def tell(kind: str, value: Any) -> None:
        connection.send_bytes(json.dumps([kind, value]).encode())

    answer = pkgutil.resolve_name(function)
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            tell("answer", answer(functools.partial(tell, "say"), **request))
        # Whatever a submission and a compiler raise belongs to this request only.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            tell("error", _words(error))


if __name__ == "__main__":
    _serve(sys.argv[1], Connection(int(sys.argv[2])), int(sys.argv[3]))
