"""Group sizes for the contest's cases: random routings with their seeds, and the shapes that break kernels.

``data/routings/routings.csv`` records them, so that everybody times and judges the same; a test draws them again.
"""

import functools
from dataclasses import dataclass
from typing import Literal

from moe_lab.problem.contract import CASES, data_dir
from moe_lab.problem.errors import DataError
from moe_lab.problem.tables import Integers, load


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
        case = CASES.get(self.case)
        if case is None:
            raise ValueError(f"got case {self.case}, expected one of {', '.join(map(str, CASES))}")
        if len(self.sizes) != case.num_experts or min(self.sizes) < 0 or sum(self.sizes) != case.num_tokens:
            wanted = f"{case.num_experts} of at least 0 that sum to {case.num_tokens}"
            raise ValueError(f"got {len(self.sizes)} sizes that sum to {sum(self.sizes)}, expected {wanted}")


@functools.cache
def routings() -> tuple[Routing, ...]:
    """Every recorded routing; raises DataError for a row that does not fit its case, or a name given twice."""
    return load(data_dir() / "routings" / "routings.csv", Routing, key=("case", "name"))


def routing(case: int, name: str) -> Routing:
    """One recorded routing; raises DataError for a name that the case does not have."""
    known = {row.name: row for row in routings() if row.case == case}
    if name not in known:
        raise DataError(f"got routing {name!r} for case {case}, expected one of {', '.join(known) or 'a known case'}")
    return known[name]
