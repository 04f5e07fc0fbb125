"""Reading the tables under ``data/``: one row type a file, every cell checked, the wrong row named.

``data/README.md`` is the dictionary: what each column means, its unit, its source and the licence of the facts.
"""

from __future__ import annotations

import csv
import functools
import math
import types
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from moe_lab.problem.contract import data_dir
from moe_lab.problem.errors import DataError

Row = TypeVar("Row")


def load(path: Path, row_type: type[Row]) -> tuple[Row, ...]:
    """Read a CSV file into rows of a dataclass whose fields are its columns, in order.

    A cell is converted by the field's type: ``int``, ``float``, ``str``, a ``Literal`` of texts, ``tuple[int, ...]``
    (separated by spaces), each also ``| None`` for a cell that may be empty. The row type's own ``__post_init__`` may
    raise ``ValueError`` for what a single cell cannot show.

    Args:
        path: a UTF-8 file with a header line.
        row_type: a dataclass.

    Raises:
        DataError: for a missing file, another header, or a row that does not fit; names file, line and column.
    """
    columns = [field.name for field in fields(row_type)]  # type: ignore[arg-type]
    hints = get_type_hints(row_type)
    rows = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            if header != columns:
                raise DataError(f"{path.name}, line 1: got columns {', '.join(header)}, expected {', '.join(columns)}")
            for cells in reader:
                where = f"{path.name}, line {reader.line_num}"
                if len(cells) != len(columns):
                    raise DataError(
                        f"{where}: got {len(cells)} cells, expected {len(columns)}, usually because a text with a "
                        "comma has no quotes"
                    )
                try:
                    values = {name: _cell(name, text, hints[name]) for name, text in zip(columns, cells, strict=True)}
                    rows.append(row_type(**values))
                except ValueError as error:
                    raise DataError(f"{where}: {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return tuple(rows)


def _cell(name: str, text: str, kind: Any) -> Any:
    """Convert one cell.

    Raises:
        ValueError: "got X, expected Y", naming the column.
    """
    options = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        if text == "":
            return None
        kind = next(option for option in options if option is not type(None))
        options = get_args(kind)
    expected = {int: "an integer", float: "a finite number", str: "a text that is not empty"}.get(kind, "")
    try:
        if get_origin(kind) is Literal:
            expected = f"one of {', '.join(options)}"
            return options[options.index(text)]
        if get_origin(kind) is tuple:
            expected = "integers separated by spaces"
            return tuple(int(part) for part in text.split())
        value = kind(text)
        if value == "" or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(text)
    except ValueError:
        raise ValueError(f"column {name}: got {text!r}, expected {expected}") from None
    return value


@dataclass(frozen=True)
class PublishedResult:
    """One public result of the contest's operator on a C500; a number of other people, none of ours.

    Attributes:
        label: version name in the source, or a short one of ours.
        technique: what was done, in our words.
        case1_ms, case2_ms, case3_ms: mean time of each case.
        total_ms: sum of the cases, as published or added up.
        score: points of the contest, 0 to 150.
        accepted: "yes", "no", "partly" (some cases), "void" (a verdict of the judge, but against
            the rules), "local" (somebody's own card, not the judge), "shown" (a
            leaderboard line, nothing else known) or "anchor" (the judge's own baseline).
        tier: "fast" or "slow" where the source names the judge machine's tier.
        submission: number of the judge run.
        approximate: cases whose time the source rounds.
        source: repository and file.
        note: what else the source says.
    """

    label: str
    technique: str
    case1_ms: float | None
    case2_ms: float | None
    case3_ms: float | None
    total_ms: float | None
    score: float | None
    accepted: Literal["yes", "no", "partly", "void", "local", "shown", "anchor"]
    tier: Literal["fast", "slow"] | None
    submission: int | None
    approximate: tuple[int, ...]
    source: str
    note: str | None

    def __post_init__(self) -> None:
        """Refuse times that are not positive and a total that is not the sum of its cases."""
        times = [self.case1_ms, self.case2_ms, self.case3_ms]
        _positive(case1_ms=self.case1_ms, case2_ms=self.case2_ms, case3_ms=self.case3_ms, total_ms=self.total_ms)
        known = [time for time in times if time is not None]
        if len(known) == 3 and self.total_ms is not None and abs(sum(known) - self.total_ms) > 0.002:
            raise ValueError(f"got total_ms={self.total_ms}, expected {sum(known):.3f}, the sum of the cases")
        if self.score is not None and not 0 <= self.score <= 150:
            raise ValueError(f"got score={self.score}, expected 0 to 150")
        if not set(self.approximate) <= {1, 2, 3}:
            raise ValueError(f"got approximate={self.approximate}, expected numbers of cases, 1 to 3")

    @property
    def times_ms(self) -> tuple[float, float, float] | None:
        """Times of all three cases, None unless all are known."""
        if self.case1_ms is None or self.case2_ms is None or self.case3_ms is None:
            return None
        return self.case1_ms, self.case2_ms, self.case3_ms


@dataclass(frozen=True)
class TuningResult:
    """One row of a public tuning table on a C500, for sizes that are not the contest's.

    Attributes:
        trial: name of the trial in the source.
        technique: what was changed, in our words.
        large_ms, small_ms: time of the two sizes (``data/README.md``); total_ms: both together.
        outcome: "reference", "faster", "same" (within noise), "slower", "mixed" or "failed" (did not compile or run).
        note: what the source says of it.
        source: repository and file.
    """

    trial: str
    technique: str
    large_ms: float | None
    small_ms: float | None
    total_ms: float | None
    outcome: Literal["reference", "faster", "same", "slower", "mixed", "failed"]
    note: str | None
    source: str

    def __post_init__(self) -> None:
        """Refuse times that are not positive, or missing from a trial that ran."""
        _positive(large_ms=self.large_ms, small_ms=self.small_ms, total_ms=self.total_ms)
        if (self.total_ms is None) != (self.outcome == "failed"):
            raise ValueError(f"got total_ms={self.total_ms} with outcome {self.outcome!r}, expected a time iff it ran")


@dataclass(frozen=True)
class Lever:
    """One thing people tried on a C500 and what came of it.

    Attributes:
        lever: what was changed, in our words.
        gain_low_percent, gain_high_percent: speed gained (negative: lost); None where only a verdict is known.
        effect: the published effect in words.
        verdict: "helps", "hurts", "no effect", "depends" or "fails" (wrong answers, no compile, or against the rules).
        source: where in the sources.
    """

    lever: str
    gain_low_percent: float | None
    gain_high_percent: float | None
    effect: str
    verdict: Literal["helps", "hurts", "no effect", "depends", "fails"]
    source: str

    def __post_init__(self) -> None:
        """Refuse half a range, or one that is upside down."""
        low, high = self.gain_low_percent, self.gain_high_percent
        if (low is None) != (high is None) or (low is not None and high is not None and low > high):
            raise ValueError(f"got a gain of {low} to {high} percent, expected both ends or none, the lower first")


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ValueError(f"got {name}={value}, expected a time above 0")


@functools.cache
def published_results() -> tuple[PublishedResult, ...]:
    """Public results of the contest's operator on a C500 (``data/published/c500_results.csv``)."""
    return load(data_dir() / "published" / "c500_results.csv", PublishedResult)


@functools.cache
def published_tuning() -> tuple[TuningResult, ...]:
    """A public tuning table on a C500 (``data/published/c500_tuning.csv``)."""
    return load(data_dir() / "published" / "c500_tuning.csv", TuningResult)


@functools.cache
def published_levers() -> tuple[Lever, ...]:
    """What helped and what did not on a C500 (``data/published/c500_levers.csv``)."""
    return load(data_dir() / "published" / "c500_levers.csv", Lever)
