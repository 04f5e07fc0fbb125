import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.judge.score import baseline_times_ms, case_points, score, time_for_points
from moe_lab.problem.errors import ContractError
from moe_lab.problem.tables import published_results

BEST = (2.551, 4.489, 8.853)


def test_the_best_accepted_times_earn_their_published_points():
    got = score(BEST)
    assert got.points == pytest.approx(80.33, abs=0.005)
    assert got.total_ms == pytest.approx(15.9, abs=0.05)
    assert [case.floored for case in got.cases] == [81, 80, 80]
    published = next(row for row in published_results() if row.times_ms == BEST)
    assert published.score == pytest.approx(got.points, abs=0.005)


def test_the_baseline_is_fifty_points_and_sixty_six_milliseconds():
    times = baseline_times_ms()
    assert times == (11.251, 18.61, 35.875)
    got = score(times)
    assert got.points == 50
    assert round(got.total_ms) == 66


@pytest.mark.parametrize(
    ("case", "points", "time_ms"),
    [(0, 79, 2.991), (0, 80, 2.813), (0, 85, 1.985), (1, 81, 4.365), (1, 85, 3.284), (2, 80, 8.969), (2, 82, 7.875)],
)
def test_the_time_that_earns_a_point_is_the_inverse(case, points, time_ms):
    assert time_for_points(points, baseline_times_ms()[case]) == pytest.approx(time_ms, abs=5e-4)


@given(st.floats(0.01, 100), st.floats(0.1, 100))
def test_points_and_time_are_each_others_inverse(time_ms, baseline_ms):
    points = case_points(time_ms, baseline_ms)
    assert 0 < points < 100
    assert time_for_points(points, baseline_ms) == pytest.approx(time_ms, rel=1e-6)


def test_the_next_point_is_earned_at_its_time_and_not_before():
    for case in score(BEST).cases:
        times = list(BEST)
        times[case.case - 1] = case.next_time_ms
        assert score(times).cases[case.case - 1].floored == case.floored + 1
        times[case.case - 1] = case.next_time_ms * 1.0001
        assert score(times).cases[case.case - 1].floored == case.floored


@pytest.mark.parametrize("times", [(1, 2), (0, 1, 2), (-1, 1, 2), (float("nan"), 1, 2), (float("inf"), 1, 2)])
def test_times_that_are_none_are_refused(times):
    with pytest.raises(ContractError, match="expected"):
        score(times)


@pytest.mark.parametrize("points", [0, -1, 100.1])
def test_points_outside_the_known_formula_are_refused(points):
    with pytest.raises(ContractError, match="expected above 0 and at most 100"):
        time_for_points(points, 10)


@pytest.mark.parametrize(
    ("times", "code", "says"),
    [
        (("2.551", "4.489", "8.853"), 0, ("score 80.33", "15.893 ms", "2.470 ms")),
        (("0", "1", "2"), 2, ("failed before timing",)),
    ],
)
def test_the_command_prints_points_total_and_the_next_step_or_one_sentence(times, code, says):
    command = [sys.executable, "-m", "moe_lab", "score", *times]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert all(part in done.stdout + done.stderr for part in says)
    assert done.stderr.count("\n") == (1 if code else 0)
