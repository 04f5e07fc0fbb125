"""What is checked in every call of a group, and what only shows over several."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from moe_lab.judge import diagnose
from moe_lab.judge.compare import first_failure
from moe_lab.judge.plan import Group
from moe_lab.judge.session import Made, Session
from moe_lab.judge.verdict import CaseReport, Failure, Verdict

#: A repeated input that is answered this many times faster than new ones was not computed; shorter calls say nothing.
_REPLAY_FACTOR = 5.0
_REPLAY_LEAST_S = 0.01
_REPLAY_FRESH, _REPLAY_REPEATS = 5, 3


@dataclass
class Problem:
    """The first thing that is wrong with a group."""

    verdict: Verdict
    group: Group
    failure: Failure  # what and where in the call; its cause may be filled in later
    made: Made  # the wrong call

    @property
    def sentence(self) -> str:
        """For people."""
        cause = f". Likely cause: {self.failure.cause}" if self.failure.cause else ""
        return f"{self.group.name}, call {self.failure.call + 1}: {self.failure}{cause}"


def check_group(session: Session, group: Group, reports: list[CaseReport]) -> Problem | None:
    """Make the calls of a group and check each; the first problem, or None.

    A report is added and filled in as far as the group comes. Raises :class:`Stopped` if the submission cannot go on.
    """
    report = CaseReport(
        name=group.name, num_experts=group.case.num_experts, hidden=group.hidden, intermediate=group.intermediate,
        sizes=group.calls[0].sizes, values=tuple(dict.fromkeys(call.values for call in group.calls)),
        max_abs_error=0.0, judge_ratio=0.0, row_error=0.0, strict_ratio=0.0, padding="zero", guards="intact",
        inputs="unchanged", repeat="not repeated",
    )  # fmt: skip
    reports.append(report)
    start = time.monotonic()
    history: list[Made] = []
    problem: Problem | None = None
    for made in session.calls(group):
        history.append(made)
        _record(report, made)
        report.seconds = round(time.monotonic() - start, 3)
        problem = problem or _call_problem(group, history)
        if problem and session.plan.stop_at_first:
            break
        # Contest cases are gigabytes; only the state of small ones is worth keeping.
        if group.on_device or group.sparse:
            del history[:-1]
    problem = problem or _history_problem(group, history, must_launch=session.plan.sandboxed)
    report.repeat = _spread(history)
    report.failure = problem.failure if problem else None
    report.passed = problem is None
    return problem


def _record(report: CaseReport, made: Made) -> None:
    report.calls += 1
    for field in ("max_abs_error", "judge_ratio", "row_error", "strict_ratio"):
        both = getattr(made.comparison, field), getattr(report, field)
        setattr(report, field, None if None in both else max(both))
    if made.comparison.padding_rows.numel():
        report.padding = f"{made.comparison.padding_rows.numel()} rows not zero"
    for edit in made.edits:
        if edit.is_input:
            report.inputs = f"edited {edit.where}"
        else:
            report.guards = f"overwritten {edit.where}"


def _call_problem(group: Group, history: Sequence[Made]) -> Problem | None:
    made = history[-1]
    if made.edits or made.returned is not None:
        what = f"run_kernel returned a {made.returned}, expected None: the result goes into out"
        failure = Failure(call=made.number, what="; ".join(map(str, made.edits)) or what)
        return Problem(Verdict.CONTRACT_ERROR, group, failure, made)
    if made.comparison.passed:
        return None
    failure = first_failure(made.inputs, made.out, made.truth, made.comparison, made.number)
    failure.pattern, failure.cause = diagnose.pattern_of(made), diagnose.cause_of(history)
    return Problem(Verdict.WRONG_ANSWER, group, failure, made)


def _history_problem(group: Group, history: Sequence[Made], *, must_launch: bool) -> Problem | None:
    """What only shows over several calls: answers without a launch, replays of a repeated input, threads left."""
    usual = max(made.launches for made in history)
    repeats = [made.seconds for made in history if made.call.change == "nothing"]
    # The first call compiles. Of the other new inputs the fastest, of the repeats the middle one: a busy machine makes
    # single calls slow, never fast.
    fresh = [made.seconds for made in history[1:] if made.call.change != "nothing"]
    fresh_s = min(fresh, default=0.0)
    enough = len(fresh) >= _REPLAY_FRESH and len(repeats) >= _REPLAY_REPEATS
    replayed = enough and fresh_s > max(_REPLAY_LEAST_S, _REPLAY_FACTOR * median(repeats))
    for made in history:
        repeated, what = made.call.change == "nothing", ""
        if made.launches == 0 and must_launch:
            kept = ": the answer to a repeated input was kept and copied, which the contest forbids"
            fresh_too = ", expected the work to be done by kernels: torch is for shapes and buffers"
            what = f"answered without launching a TileLang kernel{kept if repeated else fresh_too}"
        elif repeated and (replayed or made.launches < usual):
            what = (
                f"answered a repeated input with {made.launches} kernel launches in {1e3 * made.seconds:.1f} ms, new "
                f"inputs take {usual} and at least {1e3 * fresh_s:.1f} ms: results are kept and replayed, which the "
                "contest forbids"
            )
        elif made.threads > 0:
            what = (
                f"left {made.threads} thread(s) running after the call, expected none: work that goes on after "
                "run_kernel returns is not timed"
            )
        if what:
            return Problem(Verdict.RULE_VIOLATION, group, Failure(call=made.number, what=what), made)
    return None


def _spread(history: Sequence[Made]) -> str:
    """Whether the same input gave the same bits."""
    spreads = [
        float((made.out[rows].float() - before.out[rows].float()).abs().nan_to_num(nan=0.0).max())
        for before, made in itertools.pairwise(history)
        if made.call.change == "nothing" and len(rows := made.inputs.valid_rows)
    ]
    if not spreads:
        return "not repeated"
    return "same bits" if max(spreads) == 0 else f"spread {max(spreads):.2e}"
