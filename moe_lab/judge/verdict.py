"""What the judge says: the verdict, the report behind it, its JSON form and its tables."""

from __future__ import annotations

import io
import itertools
import os
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_lab.problem.errors import SubmissionError
from moe_lab.problem.submission import write_atomic

#: Raised when a field of the report changes its meaning.
SCHEMA_VERSION = 1

NOT_MEASURED = "not measured here"


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
    """One rule that the file breaks or comes close to.

    Attributes:
        rule_id: ``moe-lab explain RULE`` says more.
        level: "violation" rejects the file, "advice" does not.
        message: one sentence.
        line, column: where, from 1; None for the whole file.
    """

    rule_id: str
    level: Literal["violation", "advice"]
    message: str
    line: int | None = None
    column: int | None = None


class Failure(_Strict):
    """The first wrong element of a call.

    Attributes:
        call: number of the call in its case, from 0.
        what: what is wrong, one clause.
        expert, row_in_group, column, block: where; a padding row has no raw row.
        padded_row, raw_row: the same row in both index spaces.
        got, expected: values; None where the number is not finite.
        wrong_rows, rows: how many rows of the call are wrong, of how many.
        pattern: what the wrong rows and columns have in common.
        cause: the usual mistake whose answer this is, if one fits.
    """

    call: int
    what: str
    expert: int | None = None
    row_in_group: int | None = None
    column: int | None = None
    block: int | None = None
    padded_row: int | None = None
    raw_row: int | None = None
    got: float | None = None
    expected: float | None = None
    wrong_rows: int = 0
    rows: int = 0
    pattern: str | None = None
    cause: str | None = None

    def __str__(self) -> str:
        """One sentence: what, how many rows, where, which values."""
        where = []
        if self.expert is not None:
            where.append(f"expert {self.expert}, row {self.row_in_group} of its group")
        if self.padded_row is not None:
            raw = f", raw row {self.raw_row}" if self.raw_row is not None else ""
            where.append(f"padded row {self.padded_row}{raw}, column {self.column}, block {self.block}")
        values = ""
        if self.expected is not None:
            got = "not a finite number" if self.got is None else f"{self.got:.6g}"
            values = f": got {got}, expected {self.expected:.6g}"
        pattern = f": {self.pattern}" if self.pattern else ""
        count = f" ({self.wrong_rows} of {self.rows} rows{pattern})" if self.rows else ""
        return f"{self.what}{count}" + (f"; first at {', '.join(where)}" if where else "") + values


class CaseReport(_Strict):
    """One structural case: a set of shapes, called several times.

    Attributes:
        name: what it is there for.
        num_experts, hidden, intermediate: E, H, I.
        sizes: group sizes of the first call; later calls permute them.
        values: kinds of values used.
        calls: calls made.
        passed: every check of every call.
        max_abs_error: largest absolute error; None if something was not finite.
        judge_ratio: largest error over what the contest's tolerance allows; at most 1 passes.
        row_error: largest relative error of a row (Frobenius norm); None as above.
        strict_ratio: largest error over the bound that fp16 rounding explains; at most 1 passes.
        padding: "zero" or what was found in the padding rows.
        guards: "intact" or what was overwritten.
        inputs: "unchanged" or what was edited.
        repeat: "same bits", or the spread between calls on the same input.
        seconds: wall time of all calls, compilation included.
        failure: the first one.
    """

    name: str
    num_experts: int
    hidden: int
    intermediate: int
    sizes: tuple[int, ...]
    values: tuple[str, ...]
    calls: int = 0
    passed: bool = False
    max_abs_error: float | None = None
    judge_ratio: float | None = None
    row_error: float | None = None
    strict_ratio: float | None = None
    padding: str = ""
    guards: str = ""
    inputs: str = ""
    repeat: str = ""
    seconds: float = 0.0
    failure: Failure | None = None


class VariantReport(_Strict):
    """One reading of the contract's open questions; never part of the verdict.

    Attributes:
        name: key of :data:`moe_lab.problem.contract.VARIANTS`, or a shape that the contest does not use.
        robust: whether the file is right there; None if it was not run.
        sentence: why, for people.
    """

    name: str
    robust: bool | None
    sentence: str


class SubmissionReport(_Strict):
    """Which text was judged.

    Attributes:
        name: file name.
        sha256: of the text; None if it could not be read.
        lines: of text.
    """

    name: str
    sha256: str | None = None
    lines: int = 0


class TimingReport(_Strict):
    """Times of one contest case, candidate and baseline interleaved.

    Attributes:
        case: name.
        median_ms, low_ms, high_ms: median of the submission and its 95% bootstrap interval.
        baseline_ms: median of the baseline in the same window.
        samples: timed calls of each.
    """

    case: str
    median_ms: float
    low_ms: float
    high_ms: float
    baseline_ms: float
    samples: int


class Report(_Strict):
    """Everything one run of the judge found.

    Attributes:
        verdict: one of :class:`Verdict`.
        sentence: the verdict in one sentence, with what to do about it.
        profile: "contest" or "open".
        submission: which text.
        judge_sha256: hash of the judge's own sources.
        device: what the kernels ran on.
        versions: of Python, torch, TileLang and others.
        seed: replay with it.
        started: UTC, ISO 8601.
        seconds: wall time.
        findings: rules.
        cases: structural cases, in the order they ran.
        variants: open questions.
        fit: C500 resources, one sentence each.
        timing: one entry for each contest case; empty without a GPU.
        score: contest points, only from times measured on a C500.
        not_measured: what this run does not tell.
        compiler_messages: what TileLang said where a C500's resources could not be counted, in full; not printed.
        log: what the submission printed, and a compiler's last lines; bounded.
    """

    schema_version: int = SCHEMA_VERSION
    verdict: Verdict
    sentence: str
    profile: Literal["contest", "open"]
    submission: SubmissionReport
    judge_sha256: str
    device: str
    versions: dict[str, str] = Field(default_factory=dict)
    seed: int
    started: str
    seconds: float = 0.0
    findings: list[FindingReport] = Field(default_factory=list)
    cases: list[CaseReport] = Field(default_factory=list)
    variants: list[VariantReport] = Field(default_factory=list)
    fit: list[str] = Field(default_factory=list)
    timing: list[TimingReport] = Field(default_factory=list)
    score: float | None = None
    not_measured: list[str] = Field(default_factory=list)
    compiler_messages: list[str] = Field(default_factory=list)
    log: str = ""

    _error_map: Any = PrivateAttr(default=None)

    @property
    def accepted(self) -> bool:
        """Whether the verdict is a yes."""
        return self.verdict is Verdict.ACCEPTED

    @property
    def first_failure(self) -> Failure | None:
        """The first wrong element of the first case that has one."""
        return next((case.failure for case in self.cases if case.failure), None)

    @property
    def error_map(self) -> Any:
        """Error over strict bound of the first wrong call, (P, tiles of 16 columns) numpy float32, or None.

        NaN marks an element that is not finite. Only a report made in this process has one.
        """
        return self._error_map

    def to_json(self) -> str:
        """Strict JSON: no NaN, no infinity."""
        return self.model_dump_json(indent=2) + "\n"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the JSON; an existing file is replaced in one step or not at all.

        Raises:
            SubmissionError: if the folder does not exist or cannot be written to.
        """
        return write_atomic(path, self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a report back.

        Raises:
            SubmissionError: for a file that is missing or that does not follow the schema.
        """
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise SubmissionError(f"{path} cannot be read: {error.strerror}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the top level"
            raise SubmissionError(f"{path} is no report of this judge: {where}: {first['msg']}") from None

    def __rich__(self) -> RenderableType:
        """What ``rich`` prints."""
        return Group(*self._parts())

    def render(self, width: int = 120) -> str:
        """The report as plain text.

        Args:
            width: columns, at least 60.
        """
        console = self._printed(width)
        return console.file.getvalue()  # type: ignore[attr-defined]

    def __str__(self) -> str:
        """As :meth:`render`."""
        return self.render()

    def _repr_html_(self) -> str:
        colour = "#1b7837" if self.accepted else "#b2182b"
        text = '<pre style="white-space: pre; font-family: monospace; line-height: 1.3">{code}</pre>'
        return (
            f'<div style="border-left: 4px solid {colour}; padding-left: 8px">'
            f"{self._printed(100).export_html(inline_styles=True, code_format=text)}</div>"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # What IPython shows in a terminal, and a notebook where HTML is not drawn.
        printer.text(self.render(100))

    def _printed(self, width: int) -> Console:
        # Within Jupyter a console would show its text there and leave the file empty.
        console = Console(
            file=io.StringIO(), width=width, force_terminal=False, force_jupyter=False, color_system=None, record=True
        )
        console.print(self)
        return console

    def _parts(self) -> list[RenderableType]:
        style = "bold green" if self.accepted else "bold red"
        parts: list[RenderableType] = [
            Text.assemble((str(self.verdict), style), f"  {self.sentence}"),
            Text(
                f"{self.submission.name}  sha256 {(self.submission.sha256 or 'none')[:12]}  profile {self.profile}  "
                f"{self.device}  seed {self.seed}  {self.seconds:.1f} s",
                style="dim",
            ),
        ]
        failure = self.first_failure
        if failure and str(failure) not in self.sentence:
            cause = f"; likely cause: {failure.cause}" if failure.cause else ""
            parts.append(Text(f"first failure: {failure}{cause}"))
        for (level, rule_id), group in itertools.groupby(
            sorted(self.findings, key=lambda found: (found.level != "violation", found.rule_id, found.line or 0)),
            key=lambda found: (found.level, found.rule_id),
        ):
            first, *others = group
            where = f"line {first.line}, column {first.column}: " if first.line is not None else ""
            numbers = list(dict.fromkeys(str(other.line) for other in others if other.line is not None))
            lines = f" (also line{'s' * (len(numbers) > 1)} {', '.join(numbers)})" if numbers else ""
            # What the verdict's own sentence says is not said twice.
            known = level == "violation" and first.message.removesuffix(".") in self.sentence
            if not known or lines:
                parts.append(Text(f"{level} {rule_id}: {where}{'see above' if known else first.message}{lines}"))
        if not any(finding.level == "violation" for finding in self.findings) and self.cases:
            parts.append(Text("rules and signature: ok"))
        if self.cases:
            parts += [self._case_table(), Text(_LEGEND, style="dim")]
        if self.variants:
            parts += [
                self._variant_table(),
                Text("Open questions of the contract are no part of the verdict.", style="dim"),
            ]
        parts += [Text(f"C500 fit: {line}") for line in self.fit]
        parts += [
            Text(
                f"{row.case}: {row.median_ms:.3f} ms (95% {row.low_ms:.3f} to {row.high_ms:.3f}), baseline "
                f"{row.baseline_ms:.3f} ms, {row.samples} calls in turns on {self.device}"
            )
            for row in self.timing
        ]
        if self.score is not None:
            parts.append(Text(f"score from these times: {self.score:.2f}"))
        if self.not_measured:
            parts.append(Text(f"{NOT_MEASURED}: {'; '.join(self.not_measured)}", style="dim"))
        if self.log and not self.accepted:
            parts.append(Text("last lines of its output:\n" + "\n".join(self.log.rstrip().splitlines()[-12:])))
        return parts

    def _case_table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("case", no_wrap=True)
        table.add_column("E, H, I", no_wrap=True)
        for column in ("calls", "0.05", "fp16"):
            table.add_column(column, justify="right", no_wrap=True)
        for column in ("padding", "result"):
            table.add_column(column)
        for case in self.cases:
            wrong = [text for text in (case.guards, case.inputs) if text not in ("intact", "unchanged")]
            failed = ": ".join(["FAIL", *wrong]) if case.calls else "no answer"
            table.add_row(
                case.name, f"{case.num_experts}, {case.hidden}, {case.intermediate}", str(case.calls),
                _number(case.judge_ratio), _number(case.strict_ratio), case.padding,
                Text("pass", "green") if case.passed else Text(failed, "red"),
            )  # fmt: skip
        return table

    def _variant_table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("open question", ratio=2)
        table.add_column("robust", no_wrap=True)
        table.add_column("what happens", ratio=3)
        for variant in self.variants:
            table.add_row(variant.name, {True: "yes", False: "no", None: "?"}[variant.robust], variant.sentence)
        return table


_LEGEND = (
    "0.05: largest error as a part of what the contest's tolerance allows; fp16: as a part of what rounding to fp16 "
    "explains. Both must stay below 1 on every row, and padding rows must be zero."
)


def _number(value: float | None) -> str:
    if value is None:
        return "NaN/Inf"
    return f"{value:.3f}" if value < 100 else f"{value:.1e}"
