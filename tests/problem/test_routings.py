from dataclasses import replace

import pytest

from moe_lab.problem.contract import BLOCK_TOKEN, CASES, data_dir
from moe_lab.problem.errors import DataError
from moe_lab.problem.layout import DISTRIBUTIONS, group_sizes
from moe_lab.problem.routings import Routing, routing, routings
from moe_lab.problem.tables import to_csv

FILE = data_dir() / "routings" / "routings.csv"
#: Random routings: distribution and how many seeds of it.
SEEDS = {"balanced": 1, "multinomial": 3, "skewed": 2, "one_expert": 1}


def edge_sizes(case):
    """Shapes that break kernels; every expert but the ones that take the rest follows the pattern."""
    experts, rows = case.num_experts, case.num_tokens

    def cycle(*pattern):
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


def drawn_again():
    """Every routing of ``data/routings/routings.csv``."""
    found = []
    for number, case in CASES.items():
        for distribution in DISTRIBUTIONS:
            for seed in range(SEEDS[distribution]):
                name = distribution if SEEDS[distribution] == 1 else f"{distribution}-{seed}"
                sizes = group_sizes(distribution, case.num_experts, case.num_tokens, seed)
                found.append(Routing(number, name, distribution, seed, sizes))
        found += [Routing(number, name, "edge", None, sizes) for name, sizes in edge_sizes(case).items()]
    return tuple(found)


def test_the_file_is_what_the_generator_draws():
    assert to_csv(drawn_again()) == FILE.read_text(encoding="utf-8"), f"`python {__file__}` writes the file again"


def test_every_case_has_every_distribution_and_its_edges():
    for number in CASES:
        names = {row.name for row in routings() if row.case == number}
        assert {"balanced", "multinomial-0", "skewed-0", "one_expert", "around a block", "empty half"} <= names
    assert max(routing(1, "one_expert").sizes) == 2272
    assert routing(2, "around two blocks").sizes[:4] == (255, 1, 257, 0)


def test_sizes_that_do_not_fit_their_case_are_refused():
    row = routing(1, "balanced")
    with pytest.raises(ValueError, match="16 sizes that sum to 2273"):
        replace(row, sizes=(143, *row.sizes[1:]))
    with pytest.raises(ValueError, match="15 sizes"):
        replace(row, sizes=row.sizes[1:])


def test_an_unknown_routing_is_one_sentence():
    with pytest.raises(DataError, match="got routing 'flat' for case 1, expected one of balanced"):
        routing(1, "flat")


if __name__ == "__main__":
    FILE.write_text(to_csv(drawn_again()), encoding="utf-8")
