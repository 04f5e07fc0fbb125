"""Time a submission in turns with the baseline, in a process of its own that can be ended at any moment.

A GPU runs the contest's case; a CPU would need hours for it, so it runs a small case of the same kind, and its times
say nothing about a card. The submission runs as it is, without the judge's sandbox: it is for your own code.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_lab.contract import CASES, JUDGE_TOLERANCE, Case
from moe_lab.errors import ContractError, ExplorerError, MoeLabError
from moe_lab.submission import Submission

#: What a CPU is given instead of a contest case: the same kind of problem, a thousandth of the work.
CPU_CASE = Case("a small case", 4, 256, 512, 568)

_ROUNDS = {"cpu": 5, "cuda": 25, "maca": 25}
#: Begins every line of ours: whatever else the process prints belongs to the submission or to TileLang.
_MARK = "moe_lab stopwatch "


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
    """Compile, compare and time a submission and the baseline on this machine's device.

    Args:
        submission: what to time.
        case: number of the contest's case; a CPU runs :data:`CPU_CASE` instead.
        routing: name of a routing of that case.
        say: told what is being done.
        checkpoint: called several times a second; what it raises ends the process and goes on.

    Raises:
        ExplorerError: if it does not compile or run, if its result is not the baseline's, or if the process dies.
    """
    request = {"source": submission.source, "name": submission.name, "case": case, "routing": routing}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    with tempfile.TemporaryDirectory(prefix="moe_lab_stopwatch_") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "moe_lab.stopwatch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
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


def _tell(**message: Any) -> None:
    # A mark in the middle of a line that the submission left open would be lost.
    print(f"\n{_MARK}{json.dumps(message)}", flush=True)


def _answer() -> None:
    request = json.loads(sys.stdin.buffer.read())
    try:
        _tell(**_measure(Submission(request["source"], request["name"]), request["case"], request["routing"]))
    except MoeLabError as error:
        _tell(error=str(error))
    except Exception as error:  # noqa: BLE001 - whatever the submission raises becomes one sentence
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == "submission.py"
        ]
        where = f"line {frames[-1].lineno}: " if frames else ""
        _tell(error=f"{where}{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")


def _measure(submission: Submission, number: int, routing_name: str) -> dict[str, Any]:
    import functools

    import torch

    from moe_lab import backend
    from moe_lab.inputs import make_inputs
    from moe_lab.routings import routing
    from moe_lab.steps import step
    from moe_lab.timing import interleave

    where = backend.prepare()
    small = where.kind == "cpu"
    case = CPU_CASE if small else CASES[number]
    _tell(say=f"making the inputs of {case.name}")
    sizes = None if small else routing(number, routing_name).sizes
    inputs = make_inputs(case, sizes, distribution="multinomial", device=where.torch_device)
    calls, results = {}, []
    for name, text in (("baseline", step("s0")), ("this configuration", submission)):
        _tell(say=f"compiling and running {name}")
        out = torch.zeros_like(inputs.out)
        calls[name] = functools.partial(_issue, text.load(), inputs.with_out(out).args)
        calls[name](0)
        results.append(out[inputs.valid_rows].float())
    expected, got = results
    off = int((~((got - expected).abs() <= JUDGE_TOLERANCE * (1 + expected.abs()))).sum())
    if off:
        raise ContractError(
            f"got {off} of {expected.numel()} elements that are not the baseline's, expected none: a wrong answer is "
            "not timed; check it first"
        )
    _tell(say="timing, in turns with the baseline")
    timings = interleave(calls, rounds=_ROUNDS[where.kind], warmup=1 if small else 3)
    return {
        "time_ms": timings["this configuration"].median_ms, "baseline_ms": timings["baseline"].median_ms,
        "where": f"{case.name}, {'multinomial' if small else routing_name}, {where.name}",
    }  # fmt: skip


def _issue(entry: Callable[..., None], args: tuple[Any, ...], index: int) -> None:
    """Call on the one set of inputs there is, whatever set is asked for."""
    entry(*args)


if __name__ == "__main__":
    _answer()
