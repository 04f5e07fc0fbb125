"""The timed path of a GPU machine, walked on this device with small sizes."""

import random

import pytest

from moe_lab.judge import Verdict, judge
from moe_lab.judge.local import impossible, timing_report
from moe_lab.judge.plan import Call, Group, Plan, contest_groups
from moe_lab.problem.submission import Submission
from moe_lab.steps import step


def test_a_group_drawn_on_the_device_is_timed_beside_the_baseline() -> None:
    calls = (Call((5, 0, 130), 1, out_fill="noise"), Call((130, 5, 0), 2))
    group = Group("case 1", 256, 256, calls, on_device=True, timed_rounds=4)
    report = judge(step("s0_baseline"), seed=1, plan=Plan((group,), variants=False, fit=False))
    assert report.accepted, report.sentence
    (row,) = report.timing
    assert (row.case, row.samples) == ("case 1", 4)
    assert 0 < row.low_ms <= row.median_ms <= row.high_ms
    assert row.baseline_ms > 0
    assert report.score is None
    assert any("contest score" in line for line in report.not_measured)


def test_a_file_that_replays_once_it_is_timed_is_caught() -> None:
    baseline = step("s0_baseline").source
    launch = baseline[baseline.rindex("    kernel(\n") :]
    replay = (
        "    calls = KERNELS.setdefault('calls', [0])\n    calls[0] += 1\n"
        "    if calls[0] > 2:\n        out.copy_(KERNELS['answer'])\n        return\n"
        f"{launch}    KERNELS['answer'] = out.clone()\n"
    )
    group = Group("case 1", 128, 128, (Call((5, 0, 130), 1), Call((130, 5, 0), 2)), on_device=True, timed_rounds=4)
    plan = Plan((group,), variants=False, fit=False, sandboxed=False)
    report = judge(Submission(baseline.replace(launch, replay)), profile="open", seed=1, plan=plan)
    assert report.verdict is Verdict.WRONG_ANSWER, report.sentence
    assert "call 2" in report.sentence
    assert "kept" in report.sentence


@pytest.mark.parametrize("number", [0, 1, 2])
def test_times_below_the_roof_are_not_believed(number: int) -> None:
    group = contest_groups(random.Random(1), full=True)[number]
    assert group.case.num_tokens == 142 * group.case.num_experts
    # The best times measured on that card are a few percent above the bound of its measured roofs.
    measured_ms = (0.50, 0.88, 1.61)[number]
    assert impossible(group, measured_ms, "NVIDIA H200") is None
    assert "the clock is not to be trusted" in (impossible(group, 0.5 * measured_ms, "NVIDIA H200") or "")
    assert impossible(group, 1e-3, "a card that nobody knows") is None


def test_medians_and_their_interval() -> None:
    report = timing_report("case 1", [2.0, 1.0, 3.0, 2.0, 2.1], [4.0, 5.0, 6.0])
    assert (report.median_ms, report.baseline_ms, report.samples) == (2.0, 5.0, 5)
    assert 1.0 <= report.low_ms <= 2.0 <= report.high_ms <= 3.0
