"""The contest's score: from three times to points, and back from points to the time that earns them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_lab.problem.errors import ContractError, DataError
from moe_lab.problem.tables import published_results


@functools.cache
def baseline_times_ms() -> tuple[float, float, float]:
    """Times of the judge's own baseline, measured once and reused: the anchor row of the published results.

    Raises:
        DataError: if there is no such row.
    """
    for row in published_results():
        if row.accepted == "anchor" and row.times_ms is not None:
            return row.times_ms
    raise DataError("got no row with accepted=anchor and three times in c500_results.csv, expected the judge's own")


@dataclass(frozen=True)
class CaseScore:
    """Points of one case."""

    case: int  # number, from 1
    time_ms: float
    baseline_ms: float  # time of the judge's baseline
    points: float  # before rounding down, 0 to 100
    floored: int  # whole points: what is displayed and averaged
    next_time_ms: float | None  # the time at which the next whole point is earned; None at the top


@dataclass(frozen=True)
class Score:
    """Points of a submission, case by case."""

    cases: tuple[CaseScore, ...]

    @property
    def points(self) -> float:
        """Displayed score: the mean of the floored cases, so it moves in thirds."""
        return sum(case.floored for case in self.cases) / len(self.cases)

    @property
    def total_ms(self) -> float:
        """Displayed time: the sum of the cases."""
        return sum(case.time_ms for case in self.cases)


def case_points(time_ms: float, baseline_ms: float) -> float:
    """Points of one case, before rounding down: 100 * Tb / (Tb + Tk).

    The guide's formula is 100 / (1 + (1/s - 1) * (Tk - Th) / (Tb - Th)) with s = 0.5, compressed by a logarithm above
    100 points. Th is the hardware's floor; solved from eight published ratios it is 0 on this problem, so no time earns
    100 points.

    Args:
        time_ms: Tk, above 0.
        baseline_ms: Tb, above 0.

    Returns:
        points in (0, 100).

    Raises:
        ContractError: for a time that is no positive number.

    Source:
        the contest's evaluation guide (formula, s); published ratios of accepted runs (Th = 0, rounding down).

    >>> case_points(11.251, 11.251)
    50.0
    """
    for what, value in (("a time", time_ms), ("a baseline", baseline_ms)):
        if not (math.isfinite(value) and value > 0):
            raise ContractError(
                f"got {what} of {value} ms, expected a number above 0; the judge's 0 means that it failed before timing"
            )
    return 100 / (1 + time_ms / baseline_ms)


def time_for_points(points: float, baseline_ms: float) -> float:
    """The time in ms that earns so many points: the inverse of :func:`case_points`.

    Args:
        points: above 0, at most 100.
        baseline_ms: Tb, above 0.

    Raises:
        ContractError: for points outside (0, 100].

    >>> round(time_for_points(81, 11.251), 3)
    2.639
    """
    if not 0 < points <= 100:
        raise ContractError(f"got {points} points, expected above 0 and at most 100, where the formula is known")
    return baseline_ms * (100 / points - 1)


def score(times_ms: Sequence[float]) -> Score:
    """Score the times of the contest's cases.

    Args:
        times_ms: one time a case, each above 0.

    Raises:
        ContractError: for another number of times or a time that is no positive number.

    >>> round(score([2.551, 4.489, 8.853]).points, 2)
    80.33
    """
    baselines = baseline_times_ms()
    if len(times_ms) != len(baselines):
        raise ContractError(f"got {len(times_ms)} times, expected {len(baselines)}, one for each case, in ms")
    cases = []
    for number, (time_ms, baseline_ms) in enumerate(zip(times_ms, baselines, strict=True), start=1):
        points = case_points(time_ms, baseline_ms)
        # 1e-9 keeps an exact boundary, such as the baseline's own 50, from falling through a rounding error.
        floored = math.floor(points + 1e-9)
        target = time_for_points(floored + 1, baseline_ms) if floored < 99 else None
        cases.append(CaseScore(number, time_ms, baseline_ms, points, floored, target))
    return Score(tuple(cases))
