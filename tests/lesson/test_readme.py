"""README.md says what the data and the notebooks say."""

import re

import pytest
import readme_parts as readme

from moe_lab.problem.contract import CASES
from moe_lab.problem.errors import DataError


def test_every_made_part_is_up_to_date():
    text = readme.README.read_text(encoding="utf-8")
    assert readme.rendered(text) == text, "run python tests/lesson/readme_parts.py"


def test_the_speed_table_holds_the_medians_of_its_run():
    rows = readme.bench.summary_rows()
    part = readme.speed()
    for row in rows:
        if row.kind == "step":
            line = next(line for line in part.splitlines() if line.startswith(f"| `{row.name}` |"))
            assert f"{row.median_ms:.3f}" in line
    assert len(re.findall(r"^case \d bound_ratio=", part, re.M)) == len(CASES)


def test_a_missing_marker_is_named():
    with pytest.raises(DataError, match="markers verdict:begin"):
        readme.rendered("# no markers")


def test_every_link_of_the_readme_exists():
    text = readme.README.read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert len(targets) > 10
    assert [target for target in targets if not (readme.README.parent / target).exists()] == []
