"""The judge where the submission runs on a GPU: small plans here, the whole one by `moe-lab judge`."""

import random
from pathlib import Path

import pytest

from moe_lab.judge import Verdict, judge
from moe_lab.judge.plan import Call, Group, Plan, state_group, structural_groups
from moe_lab.lesson.exercises import EXERCISES
from moe_lab.machine import backend
from moe_lab.problem.submission import Submission
from moe_lab.steps import step

pytestmark = pytest.mark.gpu

FIRST = structural_groups(random.Random(0))[0]
CALLS = (Call((5, 0, 130), 1, out_fill="noise"), Call((130, 5, 0), 2))
#: As a contest case is drawn and timed, a thousandth of the work.
TIMED = Group("drawn on the device", 512, 256, CALLS, on_device=True, timed_rounds=5)


def small(*groups: Group) -> Plan:
    return Plan(groups, variants=False, fit=False)


@pytest.mark.parametrize(("name", "profile"), [("s0", "contest"), ("c10", "contest"), ("h6", "open")])
def test_a_step_is_accepted_and_timed(name: str, profile: str) -> None:
    report = judge(step(name), profile=profile, seed=1, plan=small(FIRST, TIMED))
    assert report.accepted, f"{report.sentence}\n{report.log}"
    assert report.device == backend.detect().name
    assert [case.padding for case in report.cases] == ["zero", "zero"]
    (row,) = report.timing
    assert (row.case, row.samples) == (TIMED.name, 5)
    assert 0 < row.low_ms <= row.median_ms <= row.high_ms


def test_many_calls_of_the_fastest_step_are_right() -> None:
    """Twenty times the same input among other calls: a race shows in one call of many."""
    report = judge(step("h6"), profile="open", seed=2, plan=small(state_group(random.Random(2), 512, 256, repeats=20)))
    assert report.accepted, f"{report.sentence}\n{report.log}"


def changed(old: str, new: str) -> Submission:
    source = step("s0").source
    assert source.count(old) == 1
    return Submission(source.replace(old, new), "changed.py")


@pytest.mark.parametrize(
    ("submission", "cause"),
    [
        (
            changed("raw_start = group_offsets[expert]", "raw_start = group_padded_offsets[expert]"),
            "the route weight is read at the padded row",
        ),
        (changed("gate_acc[i, j] * (1.0 / (1.0 + T.exp2(-gate_acc[i, j] * LOG2_E)))", "gate_acc[i, j]"), "SiLU"),
    ],
    ids=["the classic mistake", "no SiLU"],
)
def test_a_usual_mistake_is_named(submission: Submission, cause: str) -> None:
    report = judge(submission, seed=1, plan=small(FIRST))
    assert report.verdict is Verdict.WRONG_ANSWER, f"{report.sentence}\n{report.log}"
    assert report.first_failure is not None
    assert cause in (report.first_failure.cause or "")


def test_a_cheat_is_caught() -> None:
    cheat = EXERCISES["cheat"]
    submission = Submission(cheat.run(cheat.solution)(step("s0").source), "cheat.py")
    report = judge(submission, seed=1, plan=small(state_group(random.Random(1))))
    assert report.verdict is Verdict.WRONG_ANSWER, f"{report.sentence}\n{report.log}"


def test_torch_that_computes_is_seen() -> None:
    path = Path(__file__).parent.parent / "exploits" / "cheat_torch_elementwise.py"
    report = judge(path, seed=1, plan=small(FIRST))
    assert report.verdict is Verdict.RULE_VIOLATION, f"{report.sentence}\n{report.log}"
    assert "torch computed with" in report.sentence
