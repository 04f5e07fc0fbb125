"""Time a submission in turns with the baseline, in a process of its own that can be ended at any moment.

A GPU runs the contest's case; a CPU would need hours for it, so it runs a small case of the same kind, and its times
say nothing about a card. The submission runs as it is, without the judge's sandbox: it is for your own code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_lab import steps
from moe_lab.machine import backend
from moe_lab.machine.child import Child
from moe_lab.model.roofline import balanced
from moe_lab.problem.contract import CASES
from moe_lab.problem.errors import ExplorerError
from moe_lab.problem.routings import routing
from moe_lab.problem.submission import Submission


@dataclass(frozen=True)
class Times:
    """Medians of one interleaved run."""

    time_ms: float  # of the submission
    baseline_ms: float
    where: str  # case, routing and device


def time_against_baseline(
    submission: Submission, case: int, routing: str, *, say: Callable[[str], None], checkpoint: Callable[[], None]
) -> Times:
    """Compile, check and time a submission and the baseline on this machine's device.

    A CPU runs :data:`moe_lab.speed.bench.CPU_CASE` in place of the contest's case. ``checkpoint`` is called several
    times a second; what it raises ends the process and goes on. Raises ChildError if the submission does not compile
    or run, if its result is wrong, or if the process dies.
    """
    request = {"source": submission.source, "name": submission.name, "number": case, "routing_name": routing}
    with Child("moe_lab.lesson.stopwatch:_measure") as child:
        return Times(**child.ask(request, say=say, tick=checkpoint))


def _measure(say: Callable[[str], None], source: str, name: str, number: int, routing_name: str) -> dict[str, Any]:
    """In the child: the fields of the times."""
    from moe_lab.speed.bench import CPU_CASE, time_case  # loads torch

    where = backend.prepare()
    if where.kind == "cpu":
        case, sizes, rounds, routing_name = CPU_CASE, balanced(CPU_CASE), 5, "balanced"
    else:
        case, sizes, rounds = CASES[number], routing(number, routing_name).sizes, 25
    said: list[str] = []

    def tell(line: str) -> None:
        say(line)
        said.append(line)

    texts = {"s0_baseline": steps.step("s0"), "this configuration": Submission(source, name)}
    measured = time_case(case, sizes, 0, texts, rounds, tell, alone=True)
    timed = {candidate.name: timing.median_ms for candidate, timing, _ in measured}
    if len(timed) < 2:
        raise ExplorerError("; ".join(line for line in said if "left out" in line))
    baseline_ms, time_ms = (timed[name] for name in texts)
    return {"time_ms": time_ms, "baseline_ms": baseline_ms, "where": f"{case.name}, {routing_name}, {where.name}"}
