"""The timed path of a GPU machine, walked on this device with small sizes."""

from moe_lab.judge import judge
from moe_lab.judge.plan import Call, Group, Plan
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
