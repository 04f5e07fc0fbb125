"""Source text as the notebooks show it: slices of a submission, diffs, and generated code side by side.

A slice is found by what its first and last line say, never by line numbers, so a step that is edited shows its new
text, and one that lost the line says so.
"""

from __future__ import annotations

import difflib
import html
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_lab.model.lowering import LoweredKernel, Lowering, lower_many
from moe_lab.problem.contract import CASES, ENTRY_POINT
from moe_lab.problem.errors import BackendError, SubmissionError
from moe_lab.problem.submission import Submission

#: Index arithmetic of generated code: loop counters, thread numbers, constants and operators, but no buffer.
_ARITHMETIC = re.compile(r"(?:\(int(?:32_t|64_t)?\)|threadIdx\.\w|blockIdx\.\w|\b[ijk]\w*|\d+|[-+*&|^%/<>?:()\s])+")

_SHADES = {
    "+": "background-color:#dbeafe;color:#111111", "-": "background-color:#ffe4c7;color:#111111", "@": "opacity:0.6",
}  # fmt: skip
_CASTS = re.compile(r"reinterpret_cast<[^<>]*>")


@dataclass(frozen=True, repr=False)
class Listing:
    """Some lines of source.

    Attributes:
        text: the lines, not indented.
        language: what to highlight it as: "python", "diff" or "cpp".
        first_line: number of the first line in its file, from 1; 0 if that means nothing.
        summary: a heading that opens the lines; empty if they are always open.
    """

    text: str
    language: str
    first_line: int = 0
    summary: str = ""

    def __str__(self) -> str:
        """The lines below their heading."""
        return f"{self.summary}\n{self.text}" if self.summary else self.text

    def folded(self, summary: str) -> Listing:
        """The same below a line that opens it."""
        return replace(self, summary=summary)

    def __repr__(self) -> str:
        """How much there is: a notebook keeps this beside what it shows."""
        return (
            f"{self.summary}: " if self.summary else ""
        ) + f"{self.text.count(chr(10)) + 1} lines of {self.language}"

    def _repr_markdown_(self) -> str | None:
        if self.language == "diff" or self.summary:
            return None
        last = self.first_line + self.text.count("\n")
        where = f"Lines {self.first_line} to {last}:\n\n" if self.first_line else ""
        return f"{where}```{self.language}\n{self.text}\n```"

    def _repr_html_(self) -> str | None:
        """Differences in colour; the signs at the beginning of the lines say the same."""
        if self.language == "diff":
            shown = []
            for sign, group in itertools.groupby(self.text.splitlines(), key=lambda line: line[:1]):
                text = html.escape("\n".join(group))
                shown.append(f'<span style="{_SHADES[sign]}">{text}</span>' if sign in _SHADES else text)
            lines = "\n".join(shown)
            found = f'<pre style="font-family:monospace;font-size:12px;line-height:1.35">{lines}</pre>'
        else:
            found = f"<pre>{html.escape(self.text)}</pre>"
        if self.summary:
            return f"<details><summary>{html.escape(self.summary)}</summary>{found}</details>"
        return found if self.language == "diff" else None


def lines(submission: Submission, first: str, last: str | None = None, *, occurrence: int = 1) -> Listing:
    """The lines of a submission from one to another.

    Args:
        submission: whose text.
        first: some text of the first line.
        last: some text of the last line, at or after the first; None for the first line alone.
        occurrence: which of the lines that hold ``first``, from 1.

    Raises:
        SubmissionError: if there is no such line.

    >>> str(lines(Submission("a = 1\\nif a:\\n    b = 2\\n    c = 3\\n"), "b =", "c ="))
    'b = 2\\nc = 3'
    """
    start, end = _span(submission.source.splitlines(), submission.name, first, last, occurrence)
    return Listing(_cut(submission.source, start, end), "python", start + 1)


def block(code: str, first: str, *, occurrence: int = 1) -> str:
    """A statement of generated code: its line, or everything up to the brace that closes what the line opens.

    Args:
        code: C, CUDA or HIP source.
        first: some text of its first line.
        occurrence: which of the lines that hold ``first``, from 1.

    Returns:
        The lines, made short by :func:`elide`.

    Raises:
        SubmissionError: if there is no such line.
    """
    text = code.splitlines()
    start, end = _span(text, "the generated code", first, None, occurrence)
    indent = re.match(r"\s*", text[start])
    if text[start].endswith("{") and indent:
        closing = indent.group() + "}"
        end = next(number for number in range(start + 1, len(text)) if text[number].startswith(closing))
    return elide(_cut(code, start, end))


def _span(text: list[str], name: str, first: str, last: str | None, occurrence: int) -> tuple[int, int]:
    starts = [number for number, line in enumerate(text) if first in line]
    if len(starts) < occurrence:
        raise SubmissionError(
            f"got {len(starts)} lines with {first!r} in {name}, expected at least {occurrence}, usually because the "
            "file was edited"
        )
    start = starts[occurrence - 1]
    ends = [start] if last is None else [number for number in range(start, len(text)) if last in text[number]]
    if not ends:
        raise SubmissionError(
            f"got no line with {last!r} after line {start + 1} of {name}, expected one, usually because the file was "
            "edited"
        )
    return start, ends[0]


def _cut(text: str, start: int, end: int) -> str:
    return textwrap.dedent("\n".join(text.splitlines()[start : end + 1]))


def difference(old: Submission, new: Submission, context: int = 1) -> Listing:
    """What changes from one submission to another; lines that only moved to the right or left count as equal.

    Args:
        old, new: the two.
        context: equal lines around each change.

    >>> text = difference(Submission("a = 1\\nb = 2\\n"), Submission("if c:\\n    a = 1\\n    b = 3\\n"))
    >>> print(text)
    @@ line 1 @@
    +if c:
         a = 1
    -b = 2
    +    b = 3
    """
    before, after = old.source.splitlines(), new.source.splitlines()
    matcher = difflib.SequenceMatcher(None, [line.strip() for line in before], [line.strip() for line in after], False)
    shown = []
    for group in matcher.get_grouped_opcodes(context):
        shown.append(f"@@ line {group[0][3] + 1} @@")
        for kind, start, end, new_start, new_end in group:
            if kind == "equal":
                shown += [f" {line}" for line in after[new_start:new_end]]
            else:
                shown += [f"-{line}" for line in before[start:end]]
                shown += [f"+{line}" for line in after[new_start:new_end]]
    return Listing("\n".join(shown), "diff")


def generated(kernel: Callable[..., Any], targets: Sequence[str], **sizes: int) -> dict[str, LoweredKernel]:
    """What a kernel of a notebook becomes for some targets.

    Args:
        kernel: a function decorated with ``@tilelang.jit`` with one launch, which uses no name from outside but
            ``tilelang`` and ``T``.
        targets: keys of :data:`moe_lab.model.lowering.TARGETS`.
        **sizes: its arguments.

    Raises:
        BackendError: if TileLang cannot lower it.
    """
    function = getattr(kernel, "func", kernel)
    text = (
        f"import tilelang\nimport tilelang.language as T\n\n\n{textwrap.dedent(inspect.getsource(function))}\n\n"
        f"def {ENTRY_POINT}(*tensors):\n    {function.__name__}(**{sizes!r})\n"
    )
    submission = Submission(text, function.__name__)
    found = {}
    for target, result in zip(
        targets, lower_many([Lowering(submission, CASES[1], target) for target in targets]), strict=True
    ):
        if isinstance(result, BackendError):
            raise result
        found[target] = result[0]
    return found


def elide(code: str, limit: int = 20) -> str:
    """Generated code with long index arithmetic cut to "…" and casts left out, so that what is done can be read.

    Args:
        code: C, CUDA or HIP source.
        limit: brackets with at most this many characters stay.

    >>> elide("x[((((int)threadIdx.x) >> 3) * 64)] = y[(i * 4)];", limit=10)
    'x[…] = y[(i * 4)];'
    """
    text = "\n".join(_elide_line(_CASTS.sub("", line), limit) for line in code.splitlines())
    # Sums of cut terms are one cut term.
    while (shorter := text.replace("(…) + (…)", "(…)").replace("((…))", "(…)")) != text:
        text = shorter
    return text.replace("tl::DataType::kFloat", "fp")


def _elide_line(line: str, limit: int) -> str:
    """Every outermost pair of brackets that holds nothing but long arithmetic is emptied."""
    pairs, opened = {}, []
    for place, sign in enumerate(line):
        if sign in "([":
            opened.append(place)
        elif sign in ")]" and opened:
            pairs[opened.pop()] = place
    shown, done = "", 0
    for start, end in sorted(pairs.items()):
        if start >= done and end - start - 1 > limit and _ARITHMETIC.fullmatch(line, start + 1, end):
            shown, done = shown + line[done : start + 1] + "…", end
    return shown + line[done:]


@dataclass(frozen=True, repr=False)
class SideBySide:
    """Columns of source, for comparing what one kernel became for several targets.

    Attributes:
        columns: text by heading.
    """

    columns: Mapping[str, str]

    def __str__(self) -> str:
        """The columns one below the other."""
        return "\n\n".join(f"{heading}\n{text}" for heading, text in self.columns.items())

    def __repr__(self) -> str:
        """The headings."""
        return " | ".join(self.columns)

    def _repr_html_(self) -> str:
        heads = "".join(f'<th style="text-align:left">{html.escape(heading)}</th>' for heading in self.columns)
        cells = "".join(
            '<td style="text-align:left;vertical-align:top">'
            f'<pre style="white-space:pre-wrap;font-family:monospace;font-size:11px">{html.escape(text)}</pre></td>'
            for text in self.columns.values()
        )
        return f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{cells}</tr></tbody></table>"
