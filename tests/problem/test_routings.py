from dataclasses import replace

import pytest

from moe_lab.problem.contract import CASES, data_dir
from moe_lab.problem.errors import DataError
from moe_lab.problem.routings import make_routings, routing, routings
from moe_lab.problem.tables import to_csv


def test_the_file_is_what_the_generator_draws():
    recorded = (data_dir() / "routings" / "routings.csv").read_text(encoding="utf-8")
    assert to_csv(make_routings()) == recorded, "run `python -m moe_lab.problem.routings` and look at the difference"


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
