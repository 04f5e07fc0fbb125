from dataclasses import dataclass, fields
from typing import Literal

import pytest

from moe_lab.machine.timing import Measurement
from moe_lab.problem import tables
from moe_lab.problem.contract import data_dir
from moe_lab.problem.errors import DataError
from moe_lab.problem.tables import Finite, Integers, load, published_levers, published_results, published_tuning


@dataclass(frozen=True)
class Row:
    name: str
    count: int
    time_ms: Finite | None
    kind: Literal["a", "b"]
    sizes: Integers


GOOD = "name,count,time_ms,kind,sizes\nx,1,2.5,a,1 2 3\ny,2,,b,\n"


def read(tmp_path, text):
    path = tmp_path / "rows.csv"
    path.write_text(text, encoding="utf-8")
    return load(path, Row)


def test_cells_take_the_type_of_their_column(tmp_path):
    assert read(tmp_path, GOOD) == (Row("x", 1, 2.5, "a", (1, 2, 3)), Row("y", 2, None, "b", ()))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("x,1,", "x,1.5,", "rows.csv, line 2: column count: got '1.5', expected a valid integer"),
        ("2.5", "nan", "line 2: column time_ms: got 'nan', expected a finite number"),
        (",b,", ",c,", "line 3: column kind: got 'c', expected 'a' or 'b'"),
        ("1 2 3", "1;2", "line 2: column sizes: got '1;2', expected a valid integer"),
        ("y,2", ",2", "line 3: column name: got '', expected a valid string"),
        ("y,2,", "y,z,2,", "line 3: got 6 cells, expected 5"),
        ("name,", "nom,", "line 1: got columns nom, count"),
    ],
)
def test_the_wrong_row_is_named(tmp_path, old, new, message):
    with pytest.raises(DataError) as error:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert message in str(error.value)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        load(tmp_path / "none.csv", Row)


def test_every_published_row_has_a_source_and_the_known_best_ones_are_there():
    results = published_results()
    assert all(row.source for row in (*results, *published_tuning(), *published_levers()))
    best = min((row for row in results if row.accepted == "yes" and row.total_ms), key=lambda row: row.total_ms)
    assert (best.label, best.total_ms, best.score) == ("v748", 15.893, 80.33)
    assert max(row.score for row in results if row.accepted == "yes") == 80.33
    # The largest single gain of the tuning table: one weight tile instead of two.
    trials = {row.trial: row for row in published_tuning()}
    assert trials["T14"].large_ms / trials["T0"].large_ms == pytest.approx(0.575, abs=1e-3)
    assert trials["T1"].outcome == "failed"


def test_published_times_agree_with_their_points():
    from moe_lab.judge.score import score

    compared = 0
    for row in published_results():
        if row.accepted == "yes" and row.times_ms and row.score and not row.approximate:
            assert score(row.times_ms).points == pytest.approx(row.score, abs=0.34), row
            compared += 1
    assert compared > 50


@pytest.mark.parametrize(
    ("name", "row_type", "old", "new", "message"),
    [
        ("c500_results.csv", "PublishedResult", "15.893", "25.893", "line 98: got total_ms=25.893, expected 15.893"),
        ("c500_tuning.csv", "TuningResult", "425.8014", "-1", "column large_ms: got '-1', expected greater than 0"),
        ("c500_levers.csv", "Lever", ",19,20,", ",20,19,", "expected both ends or none"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path, name, row_type, old, new, message):
    text = (data_dir() / "published" / name).read_text(encoding="utf-8")
    (tmp_path / name).write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(DataError) as error:
        load(tmp_path / name, getattr(tables, row_type))
    assert message in str(error.value)


def test_the_dictionary_names_every_file_and_column():
    dictionary = (data_dir() / "README.md").read_text(encoding="utf-8")
    assert all(f"`{field.name}`" in dictionary for field in fields(Measurement))
    for path in data_dir().rglob("*.csv"):
        assert path.name in dictionary or path.parent.name == "measurements"
        for column in path.read_text(encoding="utf-8").splitlines()[0].split(","):
            assert f"`{column}`" in dictionary, f"{path.name}: column {column} is not in data/README.md"
