"""Reading the tables under ``data/``: one row type a file, every cell checked, the wrong row named.

``data/README.md`` is the dictionary: what each column means, its unit, its source and the licence of the facts.
"""

import csv
import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from moe_lab.problem.contract import data_dir
from moe_lab.problem.errors import DataError

Row = TypeVar("Row")

_SPLIT = BeforeValidator(lambda text: (text or "").split())
#: A cell of integers separated by spaces; it may be empty.
Integers = Annotated[tuple[int, ...], _SPLIT]
Finite = Annotated[float, Field(allow_inf_nan=False)]
#: A time, or nothing.
Ms = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None


def load(path: Path, row_type: type[Row], *, key: Sequence[str] = ()) -> tuple[Row, ...]:
    """Read a UTF-8 CSV file into rows of a dataclass whose fields are its columns, in order.

    A cell is converted by the field's type; an empty one is None, which only an optional field takes. The row type's
    own ``__post_init__`` may raise ``ValueError`` for what a single cell cannot show. No two rows may share the cells
    of the columns in ``key``. Raises DataError, which names file, line and column, for anything else.
    """
    columns = [field.name for field in fields(row_type)]  # type: ignore[arg-type]
    adapter, rows, seen = TypeAdapter(row_type), [], set()
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            if header != columns:
                raise DataError(f"{path.name}, line 1: got columns {', '.join(header)}, expected {', '.join(columns)}")
            for cells in reader:
                where = f"{path.name}, line {reader.line_num}"
                if len(cells) != len(columns):
                    found = f"{where}: got {len(cells)} cells, expected {len(columns)}"
                    raise DataError(f"{found}, usually because a text with a comma has no quotes")
                texts = dict(zip(columns, cells, strict=True))
                name = tuple(texts[column] for column in key)
                if name and name in seen:
                    raise DataError(f"{where}: got {' '.join(name)} a second time, expected each {' '.join(key)} once")
                seen.add(name)
                try:
                    rows.append(adapter.validate_python({name: text or None for name, text in texts.items()}))
                except ValidationError as error:
                    raise DataError(f"{where}: {_sentence(error, texts)}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return tuple(rows)


def _sentence(error: ValidationError, texts: dict[str, str]) -> str:
    """ "column X: got Y, expected Z" for the first cell that does not fit, or what the whole row said."""
    first = error.errors()[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    column = str(first["loc"][0])
    expected = first["msg"].partition("should be ")[2].partition(",")[0]
    return f"column {column}: got {texts[column]!r}, expected {expected}"


def to_csv(rows: Sequence[Any]) -> str:
    """The text of a file that :func:`load` reads: at least one row of one dataclass."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [field.name for field in fields(rows[0])]
    writer.writerow(names)
    for row in rows:
        cells = [getattr(row, name) for name in names]
        writer.writerow(" ".join(map(str, cell)) if isinstance(cell, tuple) else cell for cell in cells)
    return text.getvalue()


@dataclass(frozen=True)
class PublishedResult:
    """One public result of the contest's operator on a C500; a number of other people, none of ours."""

    label: str
    technique: str
    case1_ms: Ms
    case2_ms: Ms
    case3_ms: Ms
    total_ms: Ms
    score: Annotated[float, Field(ge=0, le=150)] | None
    accepted: Literal["yes", "no", "partly", "void", "local", "shown", "anchor"]
    tier: Literal["fast", "slow"] | None
    submission: int | None
    approximate: Annotated[tuple[Annotated[int, Field(ge=1, le=3)], ...], _SPLIT]
    source: str
    note: str | None

    def __post_init__(self) -> None:
        """Refuse a total that is not the sum of its cases."""
        times = self.times_ms
        if times and self.total_ms is not None and abs(sum(times) - self.total_ms) > 0.002:
            raise ValueError(f"got total_ms={self.total_ms}, expected {sum(times):.3f}, the sum of the cases")

    @property
    def times_ms(self) -> tuple[float, float, float] | None:
        """Times of all three cases, None unless all are known."""
        one, two, three = self.case1_ms, self.case2_ms, self.case3_ms
        return None if one is None or two is None or three is None else (one, two, three)


@dataclass(frozen=True)
class TuningResult:
    """One row of a public tuning table on a C500, for two sizes that are not the contest's."""

    trial: str
    technique: str
    large_ms: Ms
    small_ms: Ms
    total_ms: Ms
    outcome: Literal["reference", "faster", "same", "slower", "mixed", "failed"]
    note: str | None
    source: str

    def __post_init__(self) -> None:
        """Refuse a trial that ran without a time, and one that failed with one."""
        if (self.total_ms is None) != (self.outcome == "failed"):
            raise ValueError(f"got total_ms={self.total_ms} with outcome {self.outcome!r}, expected a time iff it ran")


@dataclass(frozen=True)
class Lever:
    """One thing people tried on a C500 and what came of it."""

    lever: str
    gain_low_percent: Finite | None
    gain_high_percent: Finite | None
    effect: str
    verdict: Literal["helps", "hurts", "no effect", "depends", "fails"]
    source: str

    def __post_init__(self) -> None:
        """Refuse half a range, or one that is upside down."""
        low, high = self.gain_low_percent, self.gain_high_percent
        if (low is None) != (high is None) or (low is not None and high is not None and low > high):
            raise ValueError(f"got a gain of {low} to {high} percent, expected both ends or none, the lower first")


@functools.cache
def published_results() -> tuple[PublishedResult, ...]:
    """Public results of the contest's operator on a C500."""
    return load(data_dir() / "published" / "c500_results.csv", PublishedResult)


@functools.cache
def published_tuning() -> tuple[TuningResult, ...]:
    """A public tuning table on a C500."""
    return load(data_dir() / "published" / "c500_tuning.csv", TuningResult)


@functools.cache
def published_levers() -> tuple[Lever, ...]:
    """What helped and what did not on a C500."""
    return load(data_dir() / "published" / "c500_levers.csv", Lever)
