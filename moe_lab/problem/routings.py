"""Group sizes for the contest's cases: random routings with their seeds, and the shapes that break kernels.

``data/routings/routings.csv`` holds what :func:`make_routings` returns, so that everybody times and judges the same
routing; ``python -m moe_lab.problem.routings`` writes it again, and a test compares the two.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from moe_lab.problem.contract import BLOCK_TOKEN, CASES, Case, data_dir
from moe_lab.problem.errors import DataError
from moe_lab.problem.layout import DISTRIBUTIONS, group_sizes
from moe_lab.problem.submission import write_atomic
from moe_lab.problem.tables import Integers, load, to_csv

#: Random routings: distribution and how many seeds of it.
_DRAWN = {"balanced": 1, "multinomial": 3, "skewed": 2, "one_expert": 1}


@dataclass(frozen=True)
class Routing:
    """How many rows each expert of one case gets; "edge" is a shape made by hand and has no seed."""

    case: int
    name: str
    distribution: Literal["balanced", "multinomial", "skewed", "one_expert", "edge"]
    seed: int | None
    sizes: Integers

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit the case."""
        if self.case not in CASES:
            raise ValueError(f"got case {self.case}, expected one of {', '.join(map(str, CASES))}")
        case = CASES[self.case]
        if len(self.sizes) != case.num_experts or min(self.sizes) < 0 or sum(self.sizes) != case.num_tokens:
            raise ValueError(
                f"got {len(self.sizes)} sizes that sum to {sum(self.sizes)}, expected {case.num_experts} of at least 0 "
                f"that sum to {case.num_tokens}"
            )


def _edge_sizes(case: Case) -> dict[str, tuple[int, ...]]:
    """Shapes that break kernels; every expert but the ones that take the rest follows the pattern."""
    experts, rows = case.num_experts, case.num_tokens

    def cycle(*pattern: int) -> tuple[int, ...]:
        sizes = [pattern[expert % len(pattern)] for expert in range(experts - 1)]
        return (*sizes, rows - sum(sizes))

    half = experts // 2
    return {
        "exact blocks": cycle(BLOCK_TOKEN),
        "around a block": cycle(BLOCK_TOKEN - 1, BLOCK_TOKEN, BLOCK_TOKEN + 1),
        "around two blocks": cycle(2 * BLOCK_TOKEN - 1, 1, 2 * BLOCK_TOKEN + 1, 0),
        "one row each": cycle(1),
        "empty half": (0,) * half + (rows // (experts - half),) * (experts - half),
        "empty ends": (0, *cycle(BLOCK_TOKEN)[: experts - 3], rows - BLOCK_TOKEN * (experts - 3), 0),
        # Once taken for the contest's own routing in a public log, then withdrawn there; same N and block count.
        "64 and 220": (64, 220) * half,
    }


def make_routings() -> tuple[Routing, ...]:
    """Every routing of ``data/routings/routings.csv``, drawn again."""
    found = []
    for number, case in CASES.items():
        for distribution in DISTRIBUTIONS:
            for seed in range(_DRAWN[distribution]):
                name = distribution if _DRAWN[distribution] == 1 else f"{distribution}-{seed}"
                sizes = group_sizes(distribution, case.num_experts, case.num_tokens, seed)
                found.append(Routing(number, name, distribution, seed, sizes))
        found += [Routing(number, name, "edge", None, sizes) for name, sizes in _edge_sizes(case).items()]
    return tuple(found)


@functools.cache
def routings() -> tuple[Routing, ...]:
    """Every recorded routing.

    Raises:
        DataError: for a row that does not fit its case, or a name given twice.
    """
    return load(data_dir() / "routings" / "routings.csv", Routing, key=("case", "name"))


def routing(case: int, name: str) -> Routing:
    """One recorded routing.

    Raises:
        DataError: for a name that the case does not have.
    """
    known = {row.name: row for row in routings() if row.case == case}
    if name not in known:
        raise DataError(f"got routing {name!r} for case {case}, expected one of {', '.join(known) or 'a known case'}")
    return known[name]


if __name__ == "__main__":
    write_atomic(data_dir() / "routings" / "routings.csv", to_csv(make_routings()).encode())
