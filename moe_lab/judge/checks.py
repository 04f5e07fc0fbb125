"""What is checked in every call of a group, and what only shows over several."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from moe_lab.judge import diagnose
from moe_lab.judge.compare import first_failure
from moe_lab.judge.plan import Call, Group
from moe_lab.judge.session import Made, Session
from moe_lab.judge.verdict import CaseReport, Failure, Verdict

#: A repeated input that is answered this many times faster than new ones was not computed; shorter calls say nothing.
_REPLAY_FACTOR = 5.0
_REPLAY_LEAST_S = 0.01
_REPLAY_FRESH, _REPLAY_REPEATS = 5, 3


@dataclass
class Problem:
    """The first thing that is wrong with a group.

    Attributes:
        verdict: what it means.
        group: where.
        failure: what and where in the call; its cause may be filled in later.
        history: the calls up to the wrong one.
    """

    verdict: Verdict
    group: Group
    failure: Failure
    history: list[Made]

    @property
    def sentence(self) -> str:
        """For people."""
        cause = f". Likely cause: {self.failure.cause}" if self.failure.cause else ""
        return f"{self.group.name}, call {self.failure.call + 1}: {self.failure}{cause}"


def new_report(group: Group) -> CaseReport:
    """An empty report of a group."""
    case = group.case
    return CaseReport(
        name=group.name, num_experts=case.num_experts, hidden=group.hidden, intermediate=group.intermediate,
        sizes=group.calls[0].sizes, values=tuple(dict.fromkeys(call.values for call in group.calls)),
        max_abs_error=0.0, judge_ratio=0.0, row_error=0.0, strict_ratio=0.0, padding="zero", guards="intact",
        inputs="unchanged", repeat="not repeated",
    )  # fmt: skip


def check_group(
    session: Session, group: Group, report: CaseReport, *, stop_at_first: bool, must_launch: bool
) -> Problem | None:
    """Make the calls of a group and check each.

    Args:
        session: with the submission loaded.
        group: what to call.
        report: filled in as far as the group comes.
        stop_at_first: no further calls after a wrong one.
        must_launch: whether every answer needs a TileLang kernel.

    Returns:
        The first problem, or None.

    Raises:
        Stopped: if the submission cannot go on.
    """
    start = time.monotonic()
    history: list[Made] = []
    problem: Problem | None = None
    for made in session.calls(group):
        history.append(made)
        _record(report, made)
        report.seconds = round(time.monotonic() - start, 3)
        if problem is None:
            verdict, failure = _call_problem(made)
            if failure:
                problem = Problem(verdict, group, failure, list(history))
                if verdict is Verdict.WRONG_ANSWER:
                    failure.pattern = diagnose.pattern_of(made)
                    failure.cause = diagnose.cause_of(history)
                if stop_at_first:
                    break
        # Contest cases are gigabytes; only the state of small ones is worth keeping.
        if group.on_device or group.sparse:
            del history[:-1]
    report.repeat = _spread(history)
    if problem is None:
        found = _history_problem(history, must_launch)
        problem = Problem(Verdict.RULE_VIOLATION, group, found, history) if found else None
    report.failure = problem.failure if problem else None
    report.passed = problem is None
    return problem


def _record(report: CaseReport, made: Made) -> None:
    report.calls += 1
    for field in ("max_abs_error", "judge_ratio", "row_error", "strict_ratio"):
        value, worst = getattr(made.comparison, field), getattr(report, field)
        setattr(report, field, None if value is None or worst is None else max(value, worst))
    if made.comparison.padding_rows.numel():
        report.padding = f"{made.comparison.padding_rows.numel()} rows not zero"
    for edit in made.edits:
        if edit.is_input:
            report.inputs = f"edited {edit.where}"
        else:
            report.guards = f"overwritten {edit.where}"


def _call_problem(made: Made) -> tuple[Verdict, Failure | None]:
    if made.edits:
        return Verdict.CONTRACT_ERROR, Failure(call=made.number, what="; ".join(map(str, made.edits)))
    if made.returned is not None:
        what = f"run_kernel returned a {made.returned}, expected None: the result goes into out"
        return Verdict.CONTRACT_ERROR, Failure(call=made.number, what=what)
    if not made.comparison.passed:
        return Verdict.WRONG_ANSWER, first_failure(made.inputs, made.out, made.truth, made.comparison, made.number)
    return Verdict.ACCEPTED, None


def _history_problem(history: Sequence[Made], must_launch: bool) -> Failure | None:
    """What only shows over several calls: answers without a launch, replays of a repeated input, threads left."""
    usual = max(made.launches for made in history)
    repeats = [made for made in history if made.call.change == "nothing"]
    # The first call compiles. Of the other new inputs the fastest, of the repeats the middle one: a busy machine makes
    # single calls slow, never fast.
    fresh = [made.seconds for made in history[1:] if made.call.change != "nothing"]
    fresh_s, repeat_s = min(fresh, default=0.0), median(made.seconds for made in repeats) if repeats else 0.0
    replayed = (
        len(fresh) >= _REPLAY_FRESH
        and len(repeats) >= _REPLAY_REPEATS
        and fresh_s > max(_REPLAY_LEAST_S, _REPLAY_FACTOR * repeat_s)
    )
    for made in history:
        if made.launches == 0 and must_launch:
            what = "answered without launching a TileLang kernel"
            if made.call.change == "nothing":
                what += ": the answer to a repeated input was kept and copied, which the contest forbids"
            else:
                what += ", expected the work to be done by kernels: torch is for shapes and buffers"
            return Failure(call=made.number, what=what)
        if made.call.change == "nothing" and (replayed or made.launches < usual):
            what = (
                f"answered a repeated input with {made.launches} kernel launches in {1e3 * made.seconds:.1f} ms, new "
                f"inputs take {usual} and at least {1e3 * fresh_s:.1f} ms: results are kept and replayed, which the "
                "contest forbids"
            )
            return Failure(call=made.number, what=what)
        if made.threads > history[0].threads_before:
            what = (
                f"left {made.threads - history[0].threads_before} thread(s) running after the call, expected none: "
                "work that goes on after run_kernel returns is not timed"
            )
            return Failure(call=made.number, what=what)
    return None


def _spread(history: Sequence[Made]) -> str:
    """Whether the same input gave the same bits."""
    spreads = []
    for before, made in itertools.pairwise(history):
        if made.call.change == "nothing":
            rows = made.inputs.valid_rows
            difference = (made.out[rows].float() - before.out[rows].float()).abs()
            spreads.append(float(torch.nan_to_num(difference, nan=0.0).max()))
    if not spreads:
        return "not repeated"
    return "same bits" if max(spreads) == 0 else f"spread {max(spreads):.2e}"


def experiments(group: Group, call: Call) -> list[tuple[str, Group]]:
    """Calls that differ from a wrong one in a single thing that a right kernel does not depend on.

    Returns:
        Pairs of what it means if that call is right, and the call as a group. The first is the call itself, alone and
        in a fresh process.
    """
    alone = replace(call, change="everything")
    base = replace(group, calls=(alone,), name=f"why: {group.name}")
    return [
        (
            "it is right when called first and alone: something is kept between calls",
            base,
        ),
        (
            "it is right when the padding rows of the tokens are zero: their values leak, or a zero mask meets NaN",
            replace(base, calls=(replace(alone, token_poison="zeros"),)),
        ),
        (
            "it is right when fresh workspace memory is zero: rows of the workspace are read that nobody wrote, or a "
            "zero mask multiplies NaN",
            replace(base, garbage="zeros"),
        ),
        (
            "it is right when out arrives zeroed: valid rows of out are read or added to",
            replace(base, calls=(replace(alone, out_fill="zeros"),)),
        ),
    ]
