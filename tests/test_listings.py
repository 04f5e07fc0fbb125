from __future__ import annotations

import pytest

from moe_lab.errors import SubmissionError
from moe_lab.listings import SideBySide, difference, elide, excerpt, lines
from moe_lab.steps import step
from moe_lab.submission import Submission

FILE = Submission("A = 1\n\n\ndef f(x):\n    if x:\n        return A\n    return 0\n", "file.py")


def test_slice_is_found_by_its_text_and_keeps_its_line_number() -> None:
    listing = lines(FILE, "if x", "return A")
    assert str(listing) == "if x:\n    return A"
    assert listing.first_line == 5
    assert listing._repr_markdown_().startswith("Lines 5 to 6:\n\n```python\nif x:")


def test_later_occurrence_is_another_line() -> None:
    assert lines(FILE, "return").first_line == 6
    assert str(lines(FILE, "return", occurrence=2)) == "return 0"


@pytest.mark.parametrize(("first", "last"), [("no such line", None), ("if x", "A = 1")])
def test_lost_line_is_named(first: str, last: str | None) -> None:
    with pytest.raises(SubmissionError, match=r"no such line|A = 1"):
        lines(FILE, first, last)


def test_difference_holds_the_change_and_no_file_names() -> None:
    text = str(difference(FILE, Submission(FILE.source.replace("A = 1", "A = 2"), "new.py")))
    assert text.startswith("@@")
    assert "-A = 1\n+A = 2" in text
    assert "file.py" not in text


def test_only_long_arithmetic_is_cut() -> None:
    line = "copy((&(b_shared[((((int)threadIdx.x) >> 3) * 64) + 8])), (&(b[(i_1 * 8)])), limit_of_rows[expert_of_block]);"
    assert elide(line) == "copy((&(b_shared[…])), (&(b[(i_1 * 8)])), limit_of_rows[expert_of_block]);"


def test_bracket_that_is_never_closed_stays() -> None:
    assert elide("f(a[0], (") == "f(a[0], ("


def test_excerpt_cuts_and_elides() -> None:
    code = "void f() {\n  for (int i = 0; i < 4; ++i) {\n    x[((((int)threadIdx.x) >> 3) * 64)] = 0;\n  }\n}"
    assert excerpt(code, "for (", "}") == "for (int i = 0; i < 4; ++i) {\n  x[…] = 0;\n}"


def test_every_slice_of_the_walk_through_exists() -> None:
    baseline = step("s0_baseline")
    assert "actual_rows = " in str(lines(baseline, "expert = group_idx_for_bx", "actual_rows", occurrence=2))


def test_columns_are_escaped() -> None:
    table = SideBySide({"C": "a<b", "CUDA": "x"})
    assert "a&lt;b" in table._repr_html_()
    assert str(table) == "C\na<b\n\nCUDA\nx"
