"""A submission: source text plus the literals at its top; all that judges, times or draws takes one.

Literals are found and rewritten by their position in the text, so nothing else of a file ever changes.
"""

import ast
import contextlib
import difflib
import errno
import hashlib
import itertools
import os
import tempfile
import types
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_lab.problem.contract import ENTRY_POINT
from moe_lab.problem.errors import SubmissionError

#: A submission is a page or two of text; a file beyond this was not written by hand.
_MAX_BYTES = 1 << 20
#: What a tile literal may be: the tile explorer offers a control for each.
LiteralValue = bool | int | float | str | tuple[Any, ...] | None


@dataclass(frozen=True)
class Literal:
    """One module-level constant such as ``BLOCK_K = 64``."""

    name: str
    value: LiteralValue
    line: int  # the first, from 1
    span: slice  # of its right side in the UTF-8 text


@dataclass(frozen=True)
class Submission:
    """One candidate for ``run_kernel``."""

    source: str  # the whole text
    name: str = "submission.py"  # what people call it, usually the file's name

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "Submission":
        """Read a file; raises SubmissionError if it is missing, no file, too large, not UTF-8, or empty."""
        path = Path(path)
        try:
            data = read_file(path, _MAX_BYTES + 1)
            if len(data) > _MAX_BYTES:
                found = f"got {path.stat().st_size} bytes in {path}, expected at most {_MAX_BYTES}"
                raise SubmissionError(f"{found}, usually because it is not the file you meant")
            text = data.decode("utf-8-sig")
        except FileNotFoundError:
            raise SubmissionError(f"got no file {path}, expected a Python file with {ENTRY_POINT}") from None
        except UnicodeDecodeError as error:
            found = f"got bytes that are not UTF-8 in {path} (offset {error.start}), expected Python text"
            raise SubmissionError(f"{found}, usually because the file was saved in another encoding") from None
        except OSError as error:
            raise SubmissionError(f"{path} cannot be read: {error.strerror}") from None
        if not text.strip():
            raise SubmissionError(f"got an empty file {path}, expected Python text with {ENTRY_POINT}")
        # A name may hold bytes that are no text, which no report could be written with.
        return cls(text, os.fsencode(path.name).decode("utf-8", "replace"))

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed module; raises SubmissionError with line and column for text that is no Python."""
        try:
            return ast.parse(self.source, filename=self.name)
        except SyntaxError as error:
            # Some have no place, such as a null byte.
            place = f", line {error.lineno}, column {error.offset}" if error.lineno else ""
            raise SubmissionError(f"{self.name}{place}: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError) as error:
            why = str(error) or "it is nested too deeply"
            raise SubmissionError(f"{self.name} cannot be parsed as Python: {why}") from None

    @property
    def source_hash(self) -> str:
        """SHA-256 of the UTF-8 text, hexadecimal: what was really judged."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    @cached_property
    def literals(self) -> dict[str, Literal]:
        """Module-level constants with an upper-case name and a number, string, bool, None or tuple of such.

        A name that is bound twice at module level is left out: rewriting one of them would not mean what it says.
        """
        starts = list(itertools.accumulate(map(len, self.source.encode().splitlines(keepends=True)), initial=0))
        nodes = [node for node in self.tree.body if isinstance(node, ast.Assign)]
        targets = [target for node in nodes for target in node.targets]
        bound = Counter(name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        found: dict[str, Literal] = {}
        for node in nodes:
            match node:
                case ast.Assign([ast.Name(name)], right) if name == name.upper() and bound[name] == 1:
                    with contextlib.suppress(ValueError):
                        value = ast.literal_eval(right)
                        if _is_tile_literal(value):
                            start = starts[right.lineno - 1] + right.col_offset
                            end = starts[(right.end_lineno or 0) - 1] + (right.end_col_offset or 0)
                            found[name] = Literal(name, value, node.lineno, slice(start, end))
        return found

    @property
    def values(self) -> dict[str, LiteralValue]:
        """Literal values by name."""
        return {name: literal.value for name, literal in self.literals.items()}

    def with_literals(self, **values: LiteralValue) -> "Submission":
        """The same text with other values; raises SubmissionError for another name or another kind of value."""
        unknown = ", ".join(sorted(set(values) - set(self.literals)))
        if unknown:
            expected = f"one of {', '.join(self.literals) or 'no literal at all'} ({self.name})"
            why = "usually because the name is computed or bound twice"
            raise SubmissionError(f"got {unknown}, expected {expected}, {why}")
        text = self.source.encode()
        for name, literal in reversed(self.literals.items()):
            value, old = values.get(name, literal.value), literal.value
            if not _is_tile_literal(value) or not _same_kind(value, old):
                expected = f"type {type(old).__name__} as in the source ({old!r})"
                raise SubmissionError(f"got {name}={value!r}, expected {expected}")
            if repr(value) != repr(old):
                text = text[: literal.span.start] + repr(value).encode() + text[literal.span.stop :]
        return Submission(text.decode(), self.name)

    def diff(self, other: "Submission") -> str:
        """Unified diff from this text to the other's; empty if they are equal."""
        ours, theirs = (text.source.splitlines(keepends=True) for text in (self, other))
        lines = difflib.unified_diff(ours, theirs, self.name, other.name)
        return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the text as :func:`write_atomic` does."""
        return write_atomic(path, self.source.encode())

    def execute(self, folder: Path) -> dict[str, Any]:
        """Run the text in this process, without any sandbox, and return its module-level names.

        TileLang reads the source of a kernel from ``submission.py`` in the folder for as long as kernels are built.
        """
        path = self.save(folder / "submission.py")
        module = types.ModuleType("submission")
        module.__file__ = str(path)
        exec(compile(self.source, str(path), "exec", dont_inherit=True), module.__dict__)
        return module.__dict__


def read_file(path: Path, most_bytes: int = -1) -> bytes:
    """Read a file, or so many bytes of it; raises OSError for a device or a pipe, which may never end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is a device or a pipe, expected a file")
    with path.open("rb") as file:
        return file.read(most_bytes)


def write_atomic(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write beside the target, then rename: a reader sees the old bytes or the new ones, never half.

    A link stays a link. A device or a pipe, such as /dev/stdout, is written to and never replaced.
    Raises SubmissionError if the folder does not exist or cannot be written to.
    """
    given = path = Path(path)
    beside = None
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            path.write_bytes(data)
            return given
        path = Path(os.path.realpath(path))
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            beside = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.chmod(path.stat().st_mode if path.exists() else 0o644)
        beside.replace(path)
    except OSError as error:
        if beside is not None:
            beside.unlink(missing_ok=True)
        raise SubmissionError(f"{given} cannot be written: {error.strerror}; an existing file is unchanged") from None
    return given


def _is_tile_literal(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_tile_literal(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _same_kind(value: object, old: object) -> bool:
    """A float takes an integer too, and what is not a bool takes None."""
    kinds = (type(value), type(old))
    return kinds[0] is kinds[1] or kinds == (int, float) or (None in (value, old) and bool not in kinds)
