"""Source text as the notebooks show it: slices of a submission, diffs, and generated code side by side.

A slice is found by what its lines say, never by line numbers, so an edited step shows its new text."""

import difflib
import html
import inspect
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

_SHADES = {"+": "background:#dbeafe;color:#111", "-": "background:#ffe4c7;color:#111", "@": "opacity:0.6"}


@dataclass(frozen=True, repr=False)
class Listing:
    """Some lines of source."""

    text: str
    language: str  #: "python" or "diff", whose lines are coloured; the signs at their beginning say the same
    first_line: int = 0  #: its number in the file, from 1; 0 for a difference
    summary: str = ""  #: a heading that opens the lines; empty if they are always open

    def __str__(self) -> str:
        """The lines below their heading."""
        return f"{self.summary}\n{self.text}" if self.summary else self.text

    def folded(self, summary: str) -> "Listing":
        """The same below a line that opens it."""
        return replace(self, summary=summary)

    def __repr__(self) -> str:
        """How much there is: a notebook keeps this beside what it shows."""
        size = f"{len(self.text.splitlines())} lines of {self.language}"
        return f"{self.summary}: {size}" if self.summary else size

    def _repr_markdown_(self) -> str | None:
        if self.language == "diff" or self.summary:
            return None
        last = self.first_line + self.text.count("\n")
        return f"Lines {self.first_line} to {last}:\n\n```python\n{self.text}\n```"

    def _repr_html_(self) -> str | None:
        text, look = html.escape(self.text), ""
        if self.language == "diff":
            look = ' style="font-family:monospace;font-size:12px;line-height:1.35"'
            shaded = '<span style="{}">{}</span>'.format
            text = re.sub(r"(?m)^([-+@]).*(?:\n\1.*)*", lambda run: shaded(_SHADES[run[1]], run[0]), text)
        if self.summary:
            return f"<details><summary>{html.escape(self.summary)}</summary><pre{look}>{text}</pre></details>"
        return f"<pre{look}>{text}</pre>" if look else None


def lines(submission: Submission, first: str, last: str, *, occurrence: int = 1) -> Listing:
    """The lines from the one with ``first`` (its ``occurrence``) to the next with ``last``, or SubmissionError.

    >>> str(lines(Submission("a = 1\\nif a:\\n    b = 2\\n    c = 3\\n"), "b =", "c ="))
    'b = 2\\nc = 3'
    """
    text = submission.source.splitlines()
    start = _find(text, submission.name, first, occurrence=occurrence)
    end = _find(text, submission.name, last, start)
    return Listing(textwrap.dedent("\n".join(text[start : end + 1])), "python", start + 1)


def block(code: str, first: str) -> str:
    """A statement of generated code, by a part of its first line, up to the brace that closes what that line opens.

    It is made short by :func:`elide`. Raises SubmissionError if there is no such line.
    """
    text = code.splitlines()
    start = end = _find(text, "the generated code", first)
    if text[start].endswith("{"):
        closing = text[start][: -len(text[start].lstrip())] + "}"
        end = next(number for number in range(start + 1, len(text)) if text[number].startswith(closing))
    return elide(textwrap.dedent("\n".join(text[start : end + 1])))


def _find(text: list[str], name: str, sought: str, start: int = 0, occurrence: int = 1) -> int:
    found = [number for number in range(start, len(text)) if sought in text[number]]
    if len(found) < occurrence:
        raise SubmissionError(
            f"got {len(found)} lines with {sought!r} in {name} from line {start + 1}, expected at least {occurrence}, "
            "usually because the file was edited"
        )
    return found[occurrence - 1]


def difference(old: Submission, new: Submission) -> Listing:
    """What changes from one submission to another; lines that only moved to the right or left count as equal.

    >>> print(difference(Submission("a = 1\\n"), Submission("if c:\\n    a = 1\\n")))
    @@ line 1 @@
    +if c:
         a = 1
    """
    before, after = old.source.splitlines(), new.source.splitlines()
    matcher = difflib.SequenceMatcher(None, [line.strip() for line in before], [line.strip() for line in after], False)
    shown = []
    for group in matcher.get_grouped_opcodes(1):
        shown.append(f"@@ line {group[0][3] + 1} @@")
        for kind, start, end, new_start, new_end in group:
            equal = kind == "equal"
            shown += [] if equal else [f"-{line}" for line in before[start:end]]
            shown += [f"{' ' if equal else '+'}{line}" for line in after[new_start:new_end]]
    return Listing("\n".join(shown), "diff")


def generated(kernel: Callable[..., Any], targets: Sequence[str], **sizes: int) -> dict[str, LoweredKernel]:
    """What a kernel of a notebook becomes for keys of :data:`moe_lab.model.lowering.TARGETS`, or BackendError.

    The kernel is decorated with ``@tilelang.jit``, launches once, takes ``sizes``, and uses no name from outside but
    ``tilelang`` and ``T``.
    """
    function = getattr(kernel, "func", kernel)
    text = (
        f"import tilelang\nimport tilelang.language as T\n\n\n{textwrap.dedent(inspect.getsource(function))}\n\n"
        f"def {ENTRY_POINT}(*tensors):\n    {function.__name__}(**{sizes!r})\n"
    )
    submission = Submission(text, function.__name__)
    jobs, found = [Lowering(submission, CASES[1], target) for target in targets], {}
    for target, result in zip(targets, lower_many(jobs), strict=True):
        if isinstance(result, BackendError):
            raise result
        found[target] = result[0]
    return found


def elide(code: str) -> str:
    """Generated code with index arithmetic of over 20 characters cut to "…" and casts left out, to see what is done.

    >>> elide("x[((((int)threadIdx.x) >> 3) * 64)] = y[(i * 4)];")
    'x[…] = y[(i * 4)];'
    """
    text = "\n".join(map(_elide_line, re.sub(r"reinterpret_cast<[^<>]*>", "", code).splitlines()))
    # Sums of cut terms are one cut term.
    while (shorter := text.replace("(…) + (…)", "(…)").replace("((…))", "(…)")) != text:
        text = shorter
    return text.replace("tl::DataType::kFloat", "fp")


def _elide_line(line: str) -> str:
    """Every outermost pair of brackets that holds nothing but long arithmetic is emptied."""
    pairs, opened = {}, []
    for place, sign in enumerate(line):
        if sign in "([":
            opened.append(place)
        elif sign in ")]" and opened:
            pairs[opened.pop()] = place
    shown, done = "", 0
    for start, end in sorted(pairs.items()):
        if start >= done and end - start > 21 and _ARITHMETIC.fullmatch(line, start + 1, end):
            shown, done = shown + line[done : start + 1] + "…", end
    return shown + line[done:]


@dataclass(frozen=True, repr=False)
class SideBySide:
    """Columns of source, for comparing what one kernel became for several targets."""

    columns: Mapping[str, str]  #: text by heading

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
