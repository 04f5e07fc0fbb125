"""The literals of a submission and the values worth trying in their place."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moe_lab.problem.submission import LiteralValue, Submission


@dataclass(frozen=True)
class Choice:
    """One literal of a step and the values that the explorer offers for it."""

    name: str  # as in the source
    value: LiteralValue  # what the source says
    values: tuple[LiteralValue, ...]  # offered, in order, `value` among them; if alone it is shown and not offered
    comment: str  # the comment above it in the source, empty if there is none


#: What the last word of a literal's name says about its values; everything else goes by the value alone.
_VOCABULARY: dict[str, tuple[LiteralValue, ...]] = {
    "ORDER": ("row", "column"),
    "POLICY": ("Square", "FullRow", "FullCol"),
    "STAGES": (1, 2, 3, 4),  # copies in flight
    "PANEL": (1, 2, 4, 6, 8, 10, 12, 16),
    "THREADS": (64, 128, 256, 384, 512, 1024),
    "WIDTH": (1, 2, 4, 8),  # values copied at once
    "VECTOR": (0, 2, 4, 8),  # values kept together
}


def offered(name: str, value: LiteralValue) -> tuple[LiteralValue, ...]:
    """Values worth trying in the place of one; none need fit a card or be right: readout and judge say that.

    The last word of the name may have its own values, see the table above. Otherwise they are neighbours of the same
    kind. Of a power of two from 16 on, as tile sides are: powers of two from an eighth, at least 16, to four times the
    value. Of another multiple of 16, as token tiles are: multiples of 32, or of 16 if it is none of 32, up to twice the
    value. Below 16: counts from 1 to twice the value, at least to 4. Of True or False: both. Anything else is a
    constant, not a tile: itself alone.

    >>> offered("BLOCK_K", 128)
    (16, 32, 64, 128, 256, 512)
    >>> offered("NUM_STAGES", 1)
    (1, 2, 3, 4)
    >>> offered("TOKEN_TILE", 48)
    (16, 32, 48, 64, 80, 96)
    >>> offered("LOG2_E", 1.44269504)
    (1.44269504,)
    """
    words = _VOCABULARY.get(name.rpartition("_")[2])
    if words is not None and type(value) is type(words[0]):
        return words if value in words else tuple(sorted((*words, value)))  # type: ignore[type-var]
    if isinstance(value, bool):
        return (False, True)
    if not isinstance(value, int) or value < 1:
        return (value,)
    if value < 16:
        return tuple(range(1, max(4, 2 * value) + 1))
    if value & (value - 1) == 0:
        return tuple(16 << shift for shift in range(value.bit_length() - 2) if value // 8 <= 16 << shift)
    unit = 32 if value % 32 == 0 else 16
    return (value,) if value % unit else tuple(range(unit, 2 * value + 1, unit))


def choices(submission: Submission) -> tuple[Choice, ...]:
    """Every literal of a submission, in the order of the source."""
    lines = submission.source.splitlines()

    def comment(line: int) -> str:
        """The comment above a literal, or above the run of literals that it belongs to."""
        above = lines[: line - 1]
        while above and re.match(r"[^# ].*=", above[-1]):
            above.pop()
        start = next((at for at in range(len(above), 0, -1) if not above[at - 1].startswith("#")), 0)
        return " ".join(text.lstrip("# ").rstrip() for text in above[start:])

    return tuple(
        Choice(literal.name, literal.value, offered(literal.name, literal.value), comment(literal.line))
        for literal in submission.literals.values()
    )


def grid(offers: Mapping[str, Sequence[LiteralValue]]) -> Iterator[dict[str, LiteralValue]]:
    """Every combination of some values, the last name varying fastest.

    >>> list(grid({"A": (1, 2), "B": (3,)}))
    [{'A': 1, 'B': 3}, {'A': 2, 'B': 3}]
    """
    for combination in itertools.product(*offers.values()):
        yield dict(zip(offers, combination, strict=True))
