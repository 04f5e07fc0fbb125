"""Time a submission in turns with the baseline, in a process of its own that can be ended at any moment.

A GPU runs the contest's case; a CPU would need hours for it, so it runs a small case of the same kind, and its times
say nothing about a card. The submission runs as it is, without the judge's sandbox: it is for your own code.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_lab.model.roofline import balanced
from moe_lab.problem.contract import CASES
from moe_lab.problem.errors import ExplorerError, MoeLabError
from moe_lab.problem.submission import Submission

#: Begins every line of ours: whatever else the process prints belongs to the submission or to TileLang.
_MARK = "moe_lab stopwatch "
#: Of Linux' prctl: the signal that arrives when the parent ends.
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Times:
    """Medians of one interleaved run.

    Attributes:
        time_ms: of the submission.
        baseline_ms: of the baseline.
        where: case, routing and device.
    """

    time_ms: float
    baseline_ms: float
    where: str


def time_against_baseline(
    submission: Submission, case: int, routing: str, *, say: Callable[[str], None], checkpoint: Callable[[], None]
) -> Times:
    """Compile, check and time a submission and the baseline on this machine's device.

    Args:
        submission: what to time.
        case: number of the contest's case; a CPU runs :data:`moe_lab.speed.bench.CPU_CASE` instead.
        routing: name of a routing of that case.
        say: told what is being done.
        checkpoint: called several times a second; what it raises ends the process and goes on.

    Raises:
        ExplorerError: if it does not compile or run, if its result is wrong, or if the process dies.
    """
    request = {"source": submission.source, "name": submission.name, "case": case, "routing": routing}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    with tempfile.TemporaryDirectory(prefix="moe_lab_stopwatch_") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "moe_lab.lesson.stopwatch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, cwd=folder, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(json.dumps(request).encode())
            return _follow(process, say, checkpoint)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _follow(process: subprocess.Popen[bytes], say: Callable[[str], None], checkpoint: Callable[[], None]) -> Times:
    assert process.stdout is not None
    rest, last = b"", ""
    with process.stdout as stdout, selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        while True:
            checkpoint()
            if not selector.select(timeout=0.25):
                continue
            data = os.read(stdout.fileno(), 1 << 16)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                text = line.decode("utf-8", "replace")
                if not text.startswith(_MARK):
                    last = text.strip() or last
                    continue
                message: dict[str, Any] = json.loads(text.removeprefix(_MARK))
                if "say" in message:
                    say(message["say"])
                elif "error" in message:
                    raise ExplorerError(message["error"])
                else:
                    return Times(**message)
            if not data:
                raise ExplorerError(f"the process that timed it ended by itself; its last words: {last or 'none'}")


# --- in the child ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mine:
    """What the benchmark calls a rung."""

    text: Submission
    name: str = "this configuration"

    def submission(self) -> Submission:
        return self.text


def _tell(**message: Any) -> None:
    # A mark in the middle of a line that the submission left open would be lost.
    print(f"\n{_MARK}{json.dumps(message)}", flush=True)


def _answer() -> None:
    request = json.loads(sys.stdin.buffer.read())
    try:
        _tell(**_measure(_Mine(Submission(request["source"], request["name"])), request["case"], request["routing"]))
    except MoeLabError as error:
        _tell(error=str(error))


def _measure(mine: _Mine, number: int, routing_name: str) -> dict[str, Any]:
    from moe_lab.machine import backend
    from moe_lab.problem.routings import routing
    from moe_lab.speed.bench import CPU_CASE, time_case
    from moe_lab.steps import find

    where = backend.prepare()
    if where.kind == "cpu":
        case, sizes, rounds, name = CPU_CASE, balanced(CPU_CASE), 5, "balanced"
    else:
        case, sizes, rounds, name = CASES[number], routing(number, routing_name).sizes, 25, routing_name
    left_out = []

    def say(line: str) -> None:
        _tell(say=line)
        left_out.extend([line] if "left out" in line else [])

    baseline = find("s0")
    texts = {baseline.name: baseline.submission(), mine.name: mine.text}
    timed = {
        candidate.name: timing.median_ms
        for candidate, timing, _ in time_case(case, sizes, 0, texts, rounds, say, alone=True)
    }
    if len(timed) < 2:
        raise ExplorerError("; ".join(left_out))
    return {
        "time_ms": timed[mine.name], "baseline_ms": timed[baseline.name], "where": f"{case.name}, {name}, {where.name}",
    }  # fmt: skip


def _die_with_parent() -> None:
    """End when the notebook's kernel is killed: nothing else would stop a configuration that never ends (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _die_with_parent()
    _answer()
