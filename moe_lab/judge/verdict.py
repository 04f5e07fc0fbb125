"""What the judge says: the verdict, the report behind it, its JSON form and its tables."""

import io
import itertools
import os
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from moe_lab.problem.contract import Profile
from moe_lab.problem.submission import write_atomic


class Verdict(str, Enum):
    """The nine answers of the judge; only ``accepted`` is a yes."""

    ACCEPTED = "accepted"
    WRONG_ANSWER = "wrong_answer"
    RULE_VIOLATION = "rule_violation"
    CONTRACT_ERROR = "contract_error"
    RESOURCE_ERROR = "resource_error"
    COMPILE_ERROR = "compile_error"
    RUNTIME_ERROR = "runtime_error"
    TIMEOUT = "timeout"
    JUDGE_ERROR = "judge_error"

    def __str__(self) -> str:
        """The bare word, as in the report's JSON."""
        return self.value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class FindingReport(_Strict):
    """One rule that the file breaks or comes close to."""

    rule_id: str  # `moe-lab explain RULE` says more
    level: Literal["violation", "advice"]  # a violation rejects the file
    message: str  # one sentence
    line: int | None = None  # where, from 1; None for the whole file
    column: int | None = None


class Failure(_Strict):
    """The first wrong element of a call; a padding row has no raw row."""

    call: int  # number in its case, from 0
    what: str  # what is wrong, one clause
    expert: int | None = None
    row_in_group: int | None = None
    column: int | None = None
    block: int | None = None
    padded_row: int | None = None
    raw_row: int | None = None
    got: float | None = None  # None where the number is not finite
    expected: float | None = None
    wrong_rows: int = 0  # how many rows of the call are wrong
    rows: int = 0  # of how many
    pattern: str | None = None  # what the wrong rows and columns have in common
    cause: str | None = None  # the usual mistake whose answer this is, if one fits

    @property
    def extent(self) -> str:
        """What is wrong, and in how many rows."""
        pattern = f": {self.pattern}" if self.pattern else ""
        return f"{self.what} ({self.wrong_rows} of {self.rows} rows{pattern})" if self.rows else self.what

    def __str__(self) -> str:
        """One sentence: what, how many rows, where, which values."""
        text = self.extent
        if self.padded_row is not None and self.expected is not None:
            raw = "" if self.raw_row is None else f", raw row {self.raw_row}"
            got = "not a finite number" if self.got is None else f"{self.got:.6g}"
            text += (
                f"; first at expert {self.expert}, row {self.row_in_group} of its group, padded row {self.padded_row}"
                f"{raw}, column {self.column}, block {self.block}: got {got}, expected {self.expected:.6g}"
            )
        return text


class CaseReport(_Strict):
    """One structural case: a set of shapes, called several times. An error is None if something was not finite."""

    name: str  # what it is there for
    num_experts: int
    hidden: int
    intermediate: int
    sizes: tuple[int, ...]  # group sizes of the first call; later calls permute them
    values: tuple[str, ...]  # kinds of values used
    calls: int = 0  # calls made
    passed: bool = False  # every check of every call
    max_abs_error: float | None = None
    judge_ratio: float | None = None  # largest error over what the contest's tolerance allows; at most 1 passes
    row_error: float | None = None  # largest relative error of a row (Frobenius norm)
    strict_ratio: float | None = None  # largest error over the bound that fp16 rounding explains; at most 1 passes
    padding: str = ""  # "zero" or what was found in the padding rows
    guards: str = ""  # "intact" or what was overwritten
    inputs: str = ""  # "unchanged" or what was edited
    repeat: str = ""  # "same bits", or the spread between calls on the same input
    seconds: float = 0.0  # wall time of all calls, compilation included
    failure: Failure | None = None  # the first one


class VariantReport(_Strict):
    """One reading of the contract's open questions, or a shape the contest does not use; never part of the verdict."""

    name: str
    robust: bool | None  # whether the file is right there; None if it was not run
    sentence: str  # why, for people


class SubmissionReport(_Strict):
    """Which text was judged; it has no hash if it could not be read."""

    name: str
    sha256: str | None = None
    lines: int = 0


class TimingReport(_Strict):
    """Times of one contest case, submission and baseline in turns."""

    case: str
    median_ms: float
    low_ms: float  # of the median's 95% bootstrap interval
    high_ms: float
    baseline_ms: float  # median of the baseline in the same window
    samples: int  # timed calls of each


class Report(_Strict):
    """Everything one run of the judge found."""

    schema_version: int = 1  # raised when a field changes its meaning
    verdict: Verdict
    sentence: str  # the verdict in one sentence, with what to do about it
    line: int | None = None  # of the file, from 1: what the verdict is about, as far as the judge can tell
    excerpt: dict[int, str] = Field(default_factory=dict)  # that line and two around it, by number
    remedy: str = ""  # what to do there
    profile: Profile
    submission: SubmissionReport
    judge_sha256: str  # of the judge's own sources
    device: str  # what the kernels ran on
    versions: dict[str, str] = Field(default_factory=dict)  # of Python, torch, TileLang and others
    seed: int  # replay with it
    started: str  # UTC, ISO 8601
    seconds: float = 0.0  # wall time
    findings: list[FindingReport] = Field(default_factory=list)
    cases: list[CaseReport] = Field(default_factory=list)  # in the order they ran
    variants: list[VariantReport] = Field(default_factory=list)
    fit: list[str] = Field(default_factory=list)  # C500 resources, one sentence each
    timing: list[TimingReport] = Field(default_factory=list)  # one entry for each contest case; empty without a GPU
    score: float | None = None  # contest points, only from times measured on a C500
    not_measured: list[str] = Field(default_factory=list)  # what this run does not tell
    compiler_messages: list[str] = Field(default_factory=list)  # of cases that could not be lowered, in full
    log: str = ""  # what the submission printed, and a compiler's last lines; bounded
    #: Error over strict bound of the first wrong call, (P, tiles of 16 columns) numpy float32, NaN where an element is
    #: not finite. Only a report made in this process has one.
    error_map: Any = Field(default=None, exclude=True)

    @property
    def accepted(self) -> bool:
        """Whether the verdict is a yes."""
        return self.verdict is Verdict.ACCEPTED

    @property
    def first_failure(self) -> Failure | None:
        """The first wrong element of the first case that has one."""
        return next((case.failure for case in self.cases if case.failure), None)

    def to_json(self) -> str:
        """Strict JSON: no NaN, no infinity."""
        return self.model_dump_json(indent=2) + "\n"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the JSON, whole or not at all. Raises SubmissionError where the folder cannot be written to."""
        return write_atomic(path, self.to_json().encode())

    def __rich__(self) -> RenderableType:
        """What ``rich`` prints: the card, and how to see the rest."""
        more = [Text("--full shows every case and open question, and what it printed", style="dim")]
        return Group(*_card(self), *(more if self.cases else []))

    @property
    def full(self) -> RenderableType:
        """The card and all details."""
        return Group(*_card(self), *_details(self))

    def render(self, width: int = 120) -> str:
        """The whole report as plain text, in lines of at most ``width`` columns, which must be at least 60."""
        return _recorded(self.full, width).export_text()

    __str__ = render

    def _repr_html_(self) -> str:
        """The card, whose lines the page wraps, and the details folded."""
        colour = "#1b7837" if self.accepted else "#b2182b"
        pre = '<pre style="font-family: monospace; line-height: 1.3; {}">{{code}}</pre>'
        wrap, scroll = pre.format("white-space: pre-wrap; margin: 0"), pre.format("overflow-x: auto")
        card = _recorded(Group(*_card(self)), 4000).export_html(inline_styles=True, code_format=wrap)
        details = _recorded(Group(*_details(self)), 84).export_html(inline_styles=True, code_format=scroll)
        folded = f"<details><summary>every case and open question</summary>{details}</details>" if self.cases else ""
        return f'<div style="border-left: 4px solid {colour}; padding-left: 8px">{card}{folded}</div>'

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # What IPython shows in a terminal, and a notebook where HTML is not drawn.
        printer.text(_recorded(Group(*_card(self)), 100).export_text().rstrip())


def _recorded(what: RenderableType, width: int) -> Console:
    # Within Jupyter a console would show its text there and leave the file empty.
    console = Console(file=io.StringIO(), width=width, force_jupyter=False, color_system=None, record=True)
    console.print(what)
    return console


def _card(report: Report) -> Iterator[RenderableType]:
    """The verdict, its cause, the author's line and what to do; for an accepted file what is good to know."""
    failed = next((case for case in report.cases if case.failure), None)
    said, cause = report.sentence, None
    if failed and failed.failure and report.verdict is Verdict.WRONG_ANSWER:
        said, cause = f"{failed.name}, call {failed.failure.call + 1}: {failed.failure.extent}", failed.failure.cause
    yield Text.assemble((str(report.verdict), _style(report.accepted)), f"  {said}")
    if cause:
        yield Text.assemble("Likely cause: ", (cause, "bold"))
    if report.excerpt:
        yield Text(f"Look at line {report.line} of {report.submission.name}:")
        yield from (
            Text(f"{number:5} {'>' if number == report.line else ' '} {line}", style="bold" * (number == report.line))
            for number, line in report.excerpt.items()
        )
    if report.remedy:
        yield Text(f"What to do: {report.remedy}")
    shown = "advice" if report.accepted else "violation"
    yield from (Text(line) for line in _findings(report) if line.startswith(shown))
    if not report.cases and report.verdict in (Verdict.RULE_VIOLATION, Verdict.CONTRACT_ERROR, Verdict.COMPILE_ERROR):
        yield Text("Nothing of it was run.")
    if report.variants:
        answers = {True: "right under", False: "not right under", None: "not tried"}
        found = {word: [each.name for each in report.variants if each.robust is key] for key, word in answers.items()}
        yield Text(
            "Open questions of the contest: " + "; ".join(f"{word} {', '.join(n)}" for word, n in found.items() if n)
        )
    yield from (Text(f"C500 fit: {line}") for line in report.fit)
    for row in report.timing:
        yield Text(
            f"{row.case}: {row.median_ms:.3f} ms (95% {row.low_ms:.3f} to {row.high_ms:.3f}), baseline "
            f"{row.baseline_ms:.3f} ms, {row.samples} calls in turns on {report.device}"
        )
    if report.score is not None:
        yield Text(f"score from these times: {report.score:.2f}")
    if report.accepted:
        yield from _not_measured(report)
    file = report.submission
    run = f"{file.name}  sha256 {(file.sha256 or 'none')[:12]}  profile {report.profile}  {report.device}"
    yield Text(f"{run}  seed {report.seed}  {report.seconds:.1f} s", style="dim")


def _details(report: Report) -> Iterator[RenderableType]:
    """Every case and open question, advice to a refused file, and what it printed."""
    if (failure := report.first_failure) and report.verdict is Verdict.WRONG_ANSWER:
        yield Text(f"first failure: {failure}")
    if not report.accepted:
        yield from _not_measured(report)
        yield from (Text(line) for line in _findings(report) if line.startswith("advice"))
    if report.cases:
        yield _case_table(report.cases)
        yield Text(
            "0.05: largest error as a part of what the contest's tolerance allows; fp16: as a part of what rounding to "
            "fp16 explains. Both must stay below 1 on every row, and padding rows must be zero.",
            style="dim",
        )
    if report.variants:
        table = _table(Column("open question", ratio=2), "robust", Column("what happens", ratio=3))
        for variant in report.variants:
            table.add_row(variant.name, {True: "yes", False: "no", None: "?"}[variant.robust], variant.sentence)
        yield table
        yield Text("Open questions of the contract are no part of the verdict.", style="dim")
    if report.log and not report.accepted:
        yield Text("last lines of its output:\n" + "\n".join(report.log.rstrip().splitlines()[-12:]))


def _not_measured(report: Report) -> list[RenderableType]:
    said = f"Not measured here: {'; '.join(report.not_measured)}"
    return [Text(said, style="dim")] if report.not_measured else []


def _findings(report: Report) -> Iterator[str]:
    """One line for each rule that is touched, violations first."""
    in_order = sorted(report.findings, key=lambda found: (found.level == "advice", found.rule_id, found.line or 0))
    for (level, rule_id), group in itertools.groupby(in_order, key=lambda found: (found.level, found.rule_id)):
        first, *others = group
        where = f"line {first.line}, column {first.column}: " if first.line is not None else ""
        numbers = list(dict.fromkeys(str(other.line) for other in others if other.line is not None))
        lines = f" (also line{'s' * (len(numbers) > 1)} {', '.join(numbers)})" if numbers else ""
        # What the verdict's own sentence says is not said twice.
        known = level == "violation" and first.message.removesuffix(".") in report.sentence
        if lines or not known:
            yield f"{level} {rule_id}: {where}{'see above' if known else first.message}{lines}"


def _case_table(cases: list[CaseReport]) -> Table:
    numbers = (Column(name, justify="right", no_wrap=True) for name in ("calls", "0.05", "fp16"))
    table = _table("case", "E, H, I", *numbers, "padding", "result")
    # They run in an order of their own each time.
    for case in sorted(cases, key=lambda case: case.name):
        wrong = [text for text in (case.guards, case.inputs) if text not in ("intact", "unchanged")]
        result = "pass" if case.passed else ": ".join(["FAIL", *wrong]) if case.calls else "no answer"
        figures = [*map(_ratio, (case.judge_ratio, case.strict_ratio)), case.padding] if case.calls else ["-"] * 3
        shape = f"{case.num_experts}, {case.hidden}, {case.intermediate}"
        table.add_row(case.name, shape, str(case.calls), *figures, Text(result, _style(case.passed)))
    return table


def _ratio(ratio: float | None) -> str:
    return "NaN/Inf" if ratio is None else f"{ratio:.3f}" if ratio < 100 else f"{ratio:.1e}"


def _table(*columns: Column | str) -> Table:
    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def _style(good: bool) -> str:
    return "bold green" if good else "bold red"
