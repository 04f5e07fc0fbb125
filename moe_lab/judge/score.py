"""The contest's score: from three times to points, and back from points to the time that earns them."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_lab.problem.errors import ContractError
from moe_lab.problem.tables import published_results


@functools.cache
def baseline_times_ms() -> tuple[float, float, float]:
    """Times of the judge's own baseline, measured once and reused: the anchor row of the published results."""
    return next(row.times_ms for row in published_results() if row.accepted == "anchor" and row.times_ms is not None)


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
    """Points of one case, 0 to 100 and before rounding down: 100 * Tb / (Tb + Tk). Raises ContractError if not above 0.

    Source: the contest's evaluation guide has 100 / (1 + (1/s - 1) * (Tk - Th) / (Tb - Th)) with s = 0.5, compressed
    by a logarithm above 100 points. Th is the hardware's floor; solved from eight published ratios of accepted runs it
    is 0 on this problem, so no time earns 100 points. The same runs show the rounding down.

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
    """The time in ms that earns points in (0, 100], else ContractError: the inverse of :func:`case_points`.

    >>> round(time_for_points(81, 11.251), 3)
    2.639
    """
    if not 0 < points <= 100:
        raise ContractError(f"got {points} points, expected above 0 and at most 100, where the formula is known")
    return baseline_ms * (100 / points - 1)


def score(times_ms: Sequence[float]) -> Score:
    """Score one time for each contest case. Raises ContractError for another number of times or one not above 0.

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
