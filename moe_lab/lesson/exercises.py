"""The exercises of the notebooks, each defined once.

An :class:`Exercise` holds everything a notebook shows of it: the task, the code with a gap, three hints, the solution
and the usual wrong answers. :mod:`moe_lab.lesson.notebooks` writes the cells from here, so that a gap and its
solution cannot drift apart, and :func:`check` judges what the reader filled in.

A check compares behaviour, never text. What the reader defined is observed (a function is called with a few probes),
the solution is observed in the same way, and the two must agree. If they do not, every known mistake is observed too,
and the one that behaves like the reader's answer gives the answer its name.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from moe_lab.problem.contract import CASES, Case
from moe_lab.problem.errors import ExerciseError

#: What a gap, a solution and a mistake may use; the setup cell of the notebook imports what its own ones need.
PRELUDE = """\
import math
import torch
import torch.nn.functional as F
from moe_lab.problem.contract import CASES
"""

#: What an exercise looks at: (what was asked, what came back) for each probe.
Observation = list[tuple[str, Any]]


@dataclass(frozen=True)
class Mistake:
    """A usual wrong answer.

    Attributes:
        name: what went wrong, as the end of "this is what comes out if ...".
        code: source that makes the mistake and otherwise solves the exercise.
    """

    name: str
    code: str


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        key: identifies it in cell tags and in :func:`check`.
        notebook: stem of the notebook it belongs to.
        title: a few words.
        task: Markdown; says what to fill in.
        answer: the name that the gap defines, a function or a value.
        gap: source with ``...`` where the reader writes.
        hints: three of them, from where to look to almost the code.
        solution: source that is right.
        mistakes: at least two usual wrong answers.
        observe: what is compared, given the object called ``answer``.
        lesson: what a right answer has shown; printed.
    """

    key: str
    notebook: str
    title: str
    task: str
    answer: str
    gap: str
    hints: tuple[str, str, str]
    solution: str
    mistakes: tuple[Mistake, ...]
    observe: Callable[[Any], Observation]
    lesson: str

    def run(self, code: str) -> Any:
        """Execute ``code`` with the prelude and return what it bound to ``answer``."""
        namespace: dict[str, Any] = {}
        exec(PRELUDE + code, namespace)
        return namespace[self.answer]


def check(key: str, answer: Any) -> None:
    """Say whether an exercise is solved: print one sentence, or raise with the name of the mistake.

    Args:
        key: the exercise.
        answer: the function or value of the reader.

    Raises:
        ExerciseError: for a wrong answer, with what came, what was expected and, if it is a usual mistake, its name;
            for an unknown key.

    >>> check("flops", ...)
    Not filled in yet: replace the ... above and run this cell again. Three hints and the solution are below.
    """
    exercise = EXERCISES.get(key)
    if exercise is None:
        raise ExerciseError(f"got exercise {key!r}, expected one of {', '.join(EXERCISES)}")
    failure: Exception | None = None
    got: Observation = []
    try:
        got = exercise.observe(answer)
    except Exception as error:  # noqa: BLE001 -- whatever a reader's code raises becomes one sentence
        failure = error
    gap = _has_gap(answer)
    # A solution may take a run of the judge to observe: not for a gap that says so itself.
    untouched = gap and (failure is not None or any(item is ... for _, item in got))
    expected = got if untouched else exercise.observe(exercise.run(exercise.solution))
    if not untouched and failure is None and _same(got, expected):
        print(f"Right. {exercise.lesson}")
    elif gap:
        print(
            "Not filled in yet: replace the ... above and run this cell again. Three hints and the solution are below."
        )
    elif failure is not None:
        raise _explain_error(exercise, failure)
    else:
        raise _explain(exercise, got, expected)


def _explain_error(exercise: Exercise, failure: Exception) -> ExerciseError:
    sentence = f"{exercise.title}: your code raised {type(failure).__name__}: {failure}"
    for mistake in exercise.mistakes:
        try:
            exercise.observe(exercise.run(mistake.code))
        except Exception as error:  # noqa: BLE001 -- compared with what the reader's code raised
            if (type(error), str(error)) == (type(failure), str(failure)):
                return ExerciseError(f"{sentence.rstrip('.')}. This is what comes out if {mistake.name}.", mistake.name)
    return ExerciseError(sentence, type(failure).__name__)


def _explain(exercise: Exercise, got: Observation, expected: Observation) -> ExerciseError:
    mistake = next((each for each in exercise.mistakes if _makes(exercise, each, got)), None)
    asked, value, wanted = next(
        (asked, value, wanted)
        for (asked, value), (_, wanted) in zip(got, expected, strict=True)
        if not _same(value, wanted)
    )
    sentence = f"{exercise.title}: for {asked} got {_show(value)}, expected {_show(wanted)}"
    if mistake is not None:
        return ExerciseError(f"{sentence}. This is what comes out if {mistake.name}.", mistake.name)
    if value is None and exercise.gap.startswith("def "):
        return ExerciseError(f"{sentence}, usually because the function has no return.")
    return ExerciseError(f"{sentence}. It is none of the usual mistakes; the hints below may help.")


def _makes(exercise: Exercise, mistake: Mistake, got: Observation) -> bool:
    """Whether a mistake comes to what was observed; one that raises comes to nothing."""
    try:
        return _same(got, exercise.observe(exercise.run(mistake.code)))
    except Exception:  # noqa: BLE001 -- of a mistake's own code
        return False


def calls(name: str, *probes: tuple[Any, ...]) -> Callable[[Any], Observation]:
    """Observe a function called ``name`` by calling it once with each tuple of arguments (copied first)."""

    def observe(function: Any) -> Observation:
        if not callable(function):
            raise TypeError(f"{name} is {_show(function)}, expected a function")
        return [
            (f"{name}({', '.join(_show(argument) for argument in probe)})", function(*copy.deepcopy(probe)))
            for probe in probes
        ]

    return observe


def value(name: str) -> Callable[[Any], Observation]:
    """Observe a plain value."""
    return lambda answer: [(name, answer)]


def _has_gap(answer: Any) -> bool:
    """Whether ``...`` is still the answer or somewhere in the code of a function."""

    def in_code(code: CodeType) -> bool:
        return any(item is ... or (isinstance(item, CodeType) and in_code(item)) for item in code.co_consts)

    if isinstance(answer, (tuple, list)):
        return any(item is ... for item in answer)
    code = getattr(answer, "__code__", None)
    return answer is ... or (isinstance(code, CodeType) and in_code(code))


def _same(got: Any, expected: Any) -> bool:
    """Equality that forgives list for tuple, int for float and rounding; never a wrong shape or a NaN."""
    if isinstance(expected, torch.Tensor) or isinstance(got, torch.Tensor):
        got, expected = (torch.as_tensor(item) if isinstance(item, (int, float)) else item for item in (got, expected))
        if not (isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor)) or got.shape != expected.shape:
            return False
        return torch.allclose(got.double(), expected.double(), rtol=1e-3, atol=1e-5)
    if isinstance(expected, (tuple, list)):
        return (
            isinstance(got, (tuple, list))
            and len(got) == len(expected)
            and all(_same(a, b) for a, b in zip(got, expected, strict=True))
        )
    if isinstance(expected, (int, float)) and isinstance(got, (int, float)):
        return math.isclose(got, expected, rel_tol=1e-6)
    return type(got) is type(expected) and bool(got == expected)


def _show(item: Any) -> str:
    """A short text for a message."""
    if isinstance(item, torch.Tensor):
        if item.numel() <= 8:
            return str([round(number, 4) for number in item.flatten().tolist()])
        head = ", ".join(f"{number:.4g}" for number in item.flatten()[:3].tolist())
        return f"a tensor of shape {tuple(item.shape)} that begins {head}"
    if isinstance(item, Case):
        return item.name
    if isinstance(item, _Outcome):
        return str(item)
    if isinstance(item, float):
        return f"{item:.6g}"
    if isinstance(item, (tuple, list)):
        return f"({', '.join(_show(part) for part in item)})"
    if callable(item):
        return getattr(item, "__name__", type(item).__name__)
    text = repr(item)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _block(text: str) -> str:
    """Source or Markdown as written below: no first newline, one last newline left to the cell."""
    return text.strip("\n")


_START = (
    Exercise(
        key="raw_argument",
        notebook="00_start_here",
        title="The odd one out",
        task=_block("""
Ten arguments, four index spaces. Exactly one argument is indexed by *raw* rows: it counts the valid rows only and
knows nothing of padding. Write its name as a string.
"""),
        answer="raw_argument",
        gap="raw_argument = ...",
        hints=(
            "Look at the column *index space* of the table above.",
            "Raw rows are numbered 0 to N - 1, so its shape is (N,).",
            "It is the number that each row's result is multiplied by at the very end.",
        ),
        solution='raw_argument = "routed_expert_weights"',
        mistakes=(
            Mistake(
                "the tokens are taken for compact; they are stored with their padding rows, so they have P rows, not N",
                'raw_argument = "stacked_expert_tokens"',
            ),
            Mistake(
                "one entry an expert is taken for one entry a row; group_sizes has E entries",
                'raw_argument = "group_sizes"',
            ),
            Mistake(
                "an array that holds raw row numbers is taken for one that is indexed by them; group_offsets has E+1 "
                "entries",
                'raw_argument = "group_offsets"',
            ),
            Mistake(
                "an array that tells where each expert's padded rows start is taken for one that is indexed by "
                "rows; it has E+1 entries",
                'raw_argument = "group_padded_offsets"',
            ),
            Mistake(
                "out is taken for compact; the kernel writes each row where its token stood, among P padded rows",
                'raw_argument = "out"',
            ),
            Mistake(
                "a block is taken for a row: group_idx_for_bx has one entry for each 128 padded rows",
                'raw_argument = "group_idx_for_bx"',
            ),
            Mistake(
                "the weights of a matrix product are taken for route weights; gate_w has one matrix for each of "
                "the E experts",
                'raw_argument = "gate_w"',
            ),
            Mistake(
                "the weights of a matrix product are taken for route weights; up_w has one matrix for each of the "
                "E experts",
                'raw_argument = "up_w"',
            ),
            Mistake(
                "the weights of a matrix product are taken for route weights; down_w has one matrix for each of "
                "the E experts",
                'raw_argument = "down_w"',
            ),
        ),
        observe=value("raw_argument"),
        lesson="Tokens and out have padded rows, the route weights have raw rows: remember this one.",
    ),
)

_NAIVE = (
    Exercise(
        key="route_weights",
        notebook="01_naive_moe",
        title="Weights that sum to one",
        task=_block("""
The router keeps the `top_k` largest probabilities of each token, and what it drops is missing from their sum. Return
weights that sum to 1 for every token.
"""),
        answer="route_weights",
        gap=_block("""
def route_weights(logits, top_k):
    \"\"\"logits (T, E) -> choices (T, K) and weights (T, K); the weights of a token sum to 1.\"\"\"
    probabilities = torch.softmax(logits, dim=-1)
    kept, choices = probabilities.topk(top_k, dim=-1)
    return choices, ...
"""),
        hints=(
            "Print `kept.sum(dim=-1)` for a few tokens: it is below 1. What number does each row lack?",
            "Divide every kept probability by the sum of the kept probabilities *of the same token*.",
            "`kept / kept.sum(dim=..., keepdim=True)`: the dimension is the one that runs over the K choices.",
        ),
        solution=_block("""
def route_weights(logits, top_k):
    \"\"\"logits (T, E) -> choices (T, K) and weights (T, K); the weights of a token sum to 1.\"\"\"
    probabilities = torch.softmax(logits, dim=-1)
    kept, choices = probabilities.topk(top_k, dim=-1)
    return choices, kept / kept.sum(dim=-1, keepdim=True)
"""),
        mistakes=(
            Mistake(
                "the kept probabilities are returned as they are, so the weights of a token sum to less than 1",
                _block("""
def route_weights(logits, top_k):
    kept, choices = torch.softmax(logits, dim=-1).topk(top_k, dim=-1)
    return choices, kept
"""),
            ),
            Mistake(
                "the sum runs over all tokens, so the tokens share one weight of 1 between them",
                _block("""
def route_weights(logits, top_k):
    kept, choices = torch.softmax(logits, dim=-1).topk(top_k, dim=-1)
    return choices, kept / kept.sum()
"""),
            ),
            Mistake(
                "the sum runs over the tokens (dim=0) and not over the choices of one token (dim=-1)",
                _block("""
def route_weights(logits, top_k):
    kept, choices = torch.softmax(logits, dim=-1).topk(top_k, dim=-1)
    return choices, kept / kept.sum(dim=0, keepdim=True)
"""),
            ),
            Mistake(
                "a second softmax runs over the kept probabilities: they sum to 1 then, but lie closer together than "
                "the router meant",
                _block("""
def route_weights(logits, top_k):
    kept, choices = torch.softmax(logits, dim=-1).topk(top_k, dim=-1)
    return choices, torch.softmax(kept, dim=-1)
"""),
            ),
            Mistake(
                "the sum loses its dimension: (T, K) over (T,) lines the sums up with the choices, and "
                "`keepdim=True` keeps them with their tokens",
                _block("""
def route_weights(logits, top_k):
    kept, choices = torch.softmax(logits, dim=-1).topk(top_k, dim=-1)
    return choices, kept / kept.sum(dim=-1)
"""),
            ),
            Mistake(
                "all E probabilities are returned; a token has a weight for each of its K choices only",
                _block("""
def route_weights(logits, top_k):
    probabilities = torch.softmax(logits, dim=-1)
    kept, choices = probabilities.topk(top_k, dim=-1)
    return choices, probabilities / kept.sum(dim=-1, keepdim=True)
"""),
            ),
            Mistake(
                "every choice gets the weight 1 / K, whatever the router said",
                _block("""
def route_weights(logits, top_k):
    kept, choices = torch.softmax(logits, dim=-1).topk(top_k, dim=-1)
    return choices, torch.ones_like(kept) / top_k
"""),
            ),
        ),
        observe=calls(
            "route_weights",
            (torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.5, 3.0, 0.25], [1.0, -2.0, 0.75, 0.5]]), 2),
            (torch.tensor([[0.3, -0.7, 1.9], [0.2, 0.1, 0.0]]), 1),
        ),
        lesson="A softmax over the kept logits alone gives the same weights: the dropped ones cancel out.",
    ),
    Exercise(
        key="combine",
        notebook="01_naive_moe",
        title="Add the results back",
        task=_block("""
The experts' results come back as one list: result `i` belongs to token `rows[i]` and has route weight `weights[i]`. A
token with `top_k` choices appears `top_k` times in `rows`. Return `out`, where every token has the weighted sum of its
results.
"""),
        answer="combine",
        gap=_block("""
def combine(num_tokens, rows, weights, results):
    \"\"\"rows (N,), weights (N,), results (N, H) -> out (num_tokens, H).\"\"\"
    out = torch.zeros(num_tokens, results.shape[1])
    return ...
"""),
        hints=(
            "The loop over experts above does this for one expert at a time. Which call adds?",
            "Weight the results first: `weights[:, None] * results`. Then add row i to row `rows[i]` of `out`; a row "
            "number may come twice.",
            "`out.index_add(0, ..., ...)` adds every row, also one that is repeated; `out[rows] += ...` does not.",
        ),
        solution=_block("""
def combine(num_tokens, rows, weights, results):
    \"\"\"rows (N,), weights (N,), results (N, H) -> out (num_tokens, H).\"\"\"
    out = torch.zeros(num_tokens, results.shape[1])
    return out.index_add(0, rows, weights[:, None] * results)
"""),
        mistakes=(
            Mistake(
                "`out[rows] += ...` meets a repeated row: it reads each row once, so only one of a token's results "
                "stays",
                _block("""
def combine(num_tokens, rows, weights, results):
    out = torch.zeros(num_tokens, results.shape[1])
    out[rows] += weights[:, None] * results
    return out
"""),
            ),
            Mistake(
                "the route weight is left out",
                _block("""
def combine(num_tokens, rows, weights, results):
    return torch.zeros(num_tokens, results.shape[1]).index_add(0, rows, results)
"""),
            ),
            Mistake(
                "the weights have no second dimension: `weights * results` would need as many weights as columns, "
                "`weights[:, None]` gives one to each row",
                _block("""
def combine(num_tokens, rows, weights, results):
    return torch.zeros(num_tokens, results.shape[1]).index_add(0, rows, weights * results)
"""),
            ),
            Mistake(
                "the weighted results are returned as they came, N rows of them; those of one token are still to "
                "be added up",
                _block("""
def combine(num_tokens, rows, weights, results):
    return weights[:, None] * results
"""),
            ),
            Mistake(
                "out is returned as it was made, all zeros: `index_add` gives back a new tensor and leaves its own "
                "alone",
                _block("""
def combine(num_tokens, rows, weights, results):
    return torch.zeros(num_tokens, results.shape[1])
"""),
            ),
        ),
        observe=calls(
            "combine",
            (
                3,
                torch.tensor([0, 2, 0, 1, 2]),
                torch.tensor([0.75, 0.5, 0.25, 1.0, 0.5]),
                torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0]]),
            ),
            (2, torch.tensor([1]), torch.tensor([0.5]), torch.tensor([[2.0, -2.0]])),
        ),
        lesson="Unpermuting is nothing but this scatter-add. The contest leaves it out: its kernel writes a row once.",
    ),
)

_PADDING = (
    Exercise(
        key="padded_offsets",
        notebook="02_grouped_padding",
        title="Where each group starts",
        task=_block("""
Every group starts at a multiple of `block`. Fill in how many blocks a group of `size` rows needs. An exact multiple
needs no extra block, and an empty group needs none at all.
"""),
        answer="padded_offsets",
        gap=_block("""
def padded_offsets(sizes, block):
    \"\"\"First padded row of each group and, last, the number of padded rows.\"\"\"
    offsets = [0]
    for size in sizes:
        num_blocks = ...
        offsets.append(offsets[-1] + num_blocks * block)
    return offsets
"""),
        hints=(
            "With blocks of 128: 0 rows need 0 blocks, 1 needs 1, 128 need 1, 129 need 2.",
            "That is the quotient rounded *up*. Python's `//` rounds down; what must be added to `size` first?",
            "`(size + block - 1) // block`, or the trick `-(-size // block)`.",
        ),
        solution=_block("""
def padded_offsets(sizes, block):
    \"\"\"First padded row of each group and, last, the number of padded rows.\"\"\"
    offsets = [0]
    for size in sizes:
        num_blocks = (size + block - 1) // block
        offsets.append(offsets[-1] + num_blocks * block)
    return offsets
"""),
        mistakes=(
            Mistake(
                "the quotient is rounded down: the last rows of a group get no place",
                _block("""
def padded_offsets(sizes, block):
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size // block * block)
    return offsets
"""),
            ),
            Mistake(
                "an exact multiple (and an empty group) gets one block more than it fills; that is ceil((n+1)/block), "
                "the other reading of the contract",
                _block("""
def padded_offsets(sizes, block):
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + (size // block + 1) * block)
    return offsets
"""),
            ),
            Mistake(
                "the raw offsets are rounded up one by one: padding of earlier groups is forgotten, so groups overlap",
                _block("""
def padded_offsets(sizes, block):
    offsets, rows = [0], 0
    for size in sizes:
        rows += size
        offsets.append(-(-rows // block) * block)
    return offsets
"""),
            ),
            Mistake(
                "rows are filled in where blocks are asked for: the next line multiplies by block once more",
                _block("""
def padded_offsets(sizes, block):
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // block) * block * block)
    return offsets
"""),
            ),
            Mistake(
                "an empty group gets a block; it needs none",
                _block("""
def padded_offsets(sizes, block):
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + max(1, -(-size // block)) * block)
    return offsets
"""),
            ),
            Mistake(
                "the quotient is rounded to the nearest whole number: what is left of a group needs a block, "
                "however little it is",
                _block("""
def padded_offsets(sizes, block):
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + round(size / block) * block)
    return offsets
"""),
            ),
            Mistake(
                "the groups are not padded at all: these are the raw offsets",
                _block("""
def padded_offsets(sizes, block):
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    return offsets
"""),
            ),
        ),
        observe=calls("padded_offsets", ((3, 0, 2), 2), ((1, 127, 128, 129), 128), ((0, 256, 5, 0), 128)),
        lesson="Round up each size, then add up: every group starts at a multiple of the block.",
    ),
    Exercise(
        key="two_rows",
        notebook="02_grouped_padding",
        title="Two index spaces",
        task=_block("""
Row `r` of an expert has a token and a route weight. Give the row number of each: tokens are stored with padding, route
weights without.
"""),
        answer="two_rows",
        gap=_block("""
def two_rows(expert, r, offsets, padded_offsets):
    \"\"\"Row of the token and row of the route weight, for row r of an expert.\"\"\"
    token_row = ...
    weight_row = ...
    return token_row, weight_row
"""),
        hints=(
            "Look at the picture of the five tokens: the first row of expert 2 has padded row 4 and raw row 3.",
            "Both are `start of the expert + r`. They differ in which array holds the start.",
            "The token is at `padded_offsets[expert] + r`. The weight uses the other array.",
        ),
        solution=_block("""
def two_rows(expert, r, offsets, padded_offsets):
    \"\"\"Row of the token and row of the route weight, for row r of an expert.\"\"\"
    token_row = padded_offsets[expert] + r
    weight_row = offsets[expert] + r
    return token_row, weight_row
"""),
        mistakes=(
            Mistake(
                "the route weight is read at the padded row: right for the first expert only, and past the end of the "
                "array for the last ones",
                _block("""
def two_rows(expert, r, offsets, padded_offsets):
    return padded_offsets[expert] + r, padded_offsets[expert] + r
"""),
            ),
            Mistake(
                "the token is read at the raw row, as if tokens were stored without padding",
                _block("""
def two_rows(expert, r, offsets, padded_offsets):
    return offsets[expert] + r, offsets[expert] + r
"""),
            ),
            Mistake(
                "the two arrays are swapped",
                _block("""
def two_rows(expert, r, offsets, padded_offsets):
    return offsets[expert] + r, padded_offsets[expert] + r
"""),
            ),
            Mistake(
                "r is left out: this is the row of the expert's first token",
                _block("""
def two_rows(expert, r, offsets, padded_offsets):
    return padded_offsets[expert], offsets[expert]
"""),
            ),
            Mistake(
                "the start of the next expert is taken",
                _block("""
def two_rows(expert, r, offsets, padded_offsets):
    return padded_offsets[expert + 1] + r, offsets[expert + 1] + r
"""),
            ),
        ),
        observe=calls(
            "two_rows",
            (0, 1, (0, 3, 3, 5), (0, 4, 4, 6)),
            (2, 1, (0, 3, 3, 5), (0, 4, 4, 6)),
            (3, 100, (0, 1, 128, 256, 385), (0, 128, 256, 384, 640)),
        ),
        lesson="The first expert hides the mistake, because both of its starts are 0; test with more than one.",
    ),
    Exercise(
        key="actual_rows",
        notebook="02_grouped_padding",
        title="How much of a block is real",
        task=_block("""
A kernel works on one block of padded rows at a time and must know how many of its rows are valid. `left` is what
remains of the group at the start of the block; it can be more than a block, and below zero where a group has one block
too many. Return a number from 0 to `block`.
"""),
        answer="actual_rows",
        gap=_block("""
def actual_rows(bx, size, padded_start, block=128):
    \"\"\"Valid rows in block number bx; its group has size rows and starts at row padded_start.\"\"\"
    left = size - (bx * block - padded_start)
    return ...
"""),
        hints=(
            "Three kinds of block: full ones, one that is partly filled, and (in some layouts) empty ones.",
            "`left` is right for the partly filled block only. Cap it at both ends.",
            "`max(0, min(..., left))`.",
        ),
        solution=_block("""
def actual_rows(bx, size, padded_start, block=128):
    \"\"\"Valid rows in block number bx; its group has size rows and starts at row padded_start.\"\"\"
    left = size - (bx * block - padded_start)
    return max(0, min(block, left))
"""),
        mistakes=(
            Mistake(
                "there is no lower limit: an all-padding block gets a negative number of rows",
                _block("""
def actual_rows(bx, size, padded_start, block=128):
    return min(block, size - (bx * block - padded_start))
"""),
            ),
            Mistake(
                "there is no upper limit: a full block claims the rows of the blocks after it",
                _block("""
def actual_rows(bx, size, padded_start, block=128):
    return max(0, size - (bx * block - padded_start))
"""),
            ),
            Mistake(
                "there is no limit at all: what is left of the group can be more than a block, or less than nothing",
                _block("""
def actual_rows(bx, size, padded_start, block=128):
    return size - (bx * block - padded_start)
"""),
            ),
            Mistake(
                "the block is always taken to have 128 rows, whatever the argument says",
                _block("""
def actual_rows(bx, size, padded_start, block=128):
    return max(0, min(128, size - (bx * block - padded_start)))
"""),
            ),
            Mistake(
                "the whole block is taken to be valid, padding too",
                _block("""
def actual_rows(bx, size, padded_start, block=128):
    return block
"""),
            ),
            Mistake(
                "the size of the group is taken for what is left of it: every block claims to be its first",
                _block("""
def actual_rows(bx, size, padded_start, block=128):
    return max(0, min(block, size))
"""),
            ),
            Mistake(
                "max and min have changed places: every block has 0 rows then",
                _block("""
def actual_rows(bx, size, padded_start, block=128):
    return min(0, max(block, size - (bx * block - padded_start)))
"""),
            ),
            Mistake(
                "the remainder is taken: it is right for the last block of a group, and no full block has one",
                _block("""
def actual_rows(bx, size, padded_start, block=128):
    return (size - (bx * block - padded_start)) % block
"""),
            ),
        ),
        observe=calls(
            "actual_rows", (3, 142, 256), (2, 142, 256), (4, 142, 256), (5, 256, 256), (1, 9, 4, 4), (6, 100, 768)
        ),
        lesson="The baseline has the same line, with `T.max` and `T.min` of TileLang for `max` and `min`.",
    ),
)

_ROOFLINE = (
    Exercise(
        key="flops",
        notebook="03_roofline",
        title="Count the work",
        task=_block("""
Fill in the floating-point operations that one valid row costs: three matrix products (gate, up, down), each of
`hidden * intermediate` multiply-adds. A multiply-add is two operations. SiLU and the route weight are too few to count.
"""),
        answer="flops",
        gap=_block("""
def flops(case):
    \"\"\"Floating-point operations of one call; valid rows only.\"\"\"
    per_row = ...
    return per_row * case.num_tokens
"""),
        hints=(
            "A row of length H times a weight matrix (I, H) gives I numbers, each a sum of H products.",
            "One product matrix costs 2 * H * I a row. How many are there?",
            "Three of them: `2 * 3 * case.hidden * case.intermediate`.",
        ),
        solution=_block("""
def flops(case):
    \"\"\"Floating-point operations of one call; valid rows only.\"\"\"
    per_row = 6 * case.hidden * case.intermediate
    return per_row * case.num_tokens
"""),
        mistakes=(
            Mistake(
                "a multiply-add is counted as one operation; data sheets count it as two",
                "def flops(case):\n    return 3 * case.hidden * case.intermediate * case.num_tokens",
            ),
            Mistake(
                "one of the three products is left out (gate and up are two, down is the third)",
                "def flops(case):\n    return 4 * case.hidden * case.intermediate * case.num_tokens",
            ),
            Mistake(
                "the work is counted for every expert; a row goes through the weights of its own expert only",
                "def flops(case):\n    return 6 * case.hidden * case.intermediate * case.num_tokens * case.num_experts",
            ),
            Mistake(
                "one product is counted; a row goes through three: gate, up and down",
                _block("""
def flops(case):
    return 2 * case.hidden * case.intermediate * case.num_tokens
"""),
            ),
            Mistake(
                "the rows are counted twice: the last line multiplies by them already",
                _block("""
def flops(case):
    return 6 * case.hidden * case.intermediate * case.num_tokens**2
"""),
            ),
        ),
        observe=calls("flops", *((case,) for case in CASES.values())),
        lesson="6 * H * I for each valid row: the number of experts does not appear.",
    ),
    Exercise(
        key="bound",
        notebook="03_roofline",
        title="The bound",
        task=_block("""
A device computes and moves memory at the same time. Return the least time in milliseconds that a call can take.
"""),
        answer="bound_ms",
        gap=_block("""
def bound_ms(num_flops, num_bytes, peak_tflops, bandwidth_tbps):
    \"\"\"Least time in ms on a device with this peak (TFLOP/s) and bandwidth (TB/s).\"\"\"
    compute_ms = num_flops / (peak_tflops * 1e12) * 1e3
    memory_ms = num_bytes / (bandwidth_tbps * 1e12) * 1e3
    return ...
"""),
        hints=(
            "Two people work side by side, one needs 3 hours, the other 5. When is all done?",
            "The two run at once, so neither adds to the other: the slower one decides.",
            "`max(compute_ms, memory_ms)`.",
        ),
        solution=_block("""
def bound_ms(num_flops, num_bytes, peak_tflops, bandwidth_tbps):
    \"\"\"Least time in ms on a device with this peak (TFLOP/s) and bandwidth (TB/s).\"\"\"
    compute_ms = num_flops / (peak_tflops * 1e12) * 1e3
    memory_ms = num_bytes / (bandwidth_tbps * 1e12) * 1e3
    return max(compute_ms, memory_ms)
"""),
        mistakes=(
            Mistake(
                "the two times are added, as if the device waited for its memory before it computed",
                _block("""
def bound_ms(num_flops, num_bytes, peak_tflops, bandwidth_tbps):
    return num_flops / (peak_tflops * 1e9) + num_bytes / (bandwidth_tbps * 1e9)
"""),
            ),
            Mistake(
                "the smaller time is taken; the slower side decides",
                _block("""
def bound_ms(num_flops, num_bytes, peak_tflops, bandwidth_tbps):
    return min(num_flops / (peak_tflops * 1e9), num_bytes / (bandwidth_tbps * 1e9))
"""),
            ),
            Mistake(
                "only the arithmetic is counted: where memory is slower, it decides",
                _block("""
def bound_ms(num_flops, num_bytes, peak_tflops, bandwidth_tbps):
    return num_flops / (peak_tflops * 1e9)
"""),
            ),
            Mistake(
                "only the memory is counted: where the arithmetic is slower, it decides",
                _block("""
def bound_ms(num_flops, num_bytes, peak_tflops, bandwidth_tbps):
    return num_bytes / (bandwidth_tbps * 1e9)
"""),
            ),
            Mistake(
                "the mean of the two times is taken; the slower side decides alone",
                _block("""
def bound_ms(num_flops, num_bytes, peak_tflops, bandwidth_tbps):
    return (num_flops / (peak_tflops * 1e9) + num_bytes / (bandwidth_tbps * 1e9)) / 2
"""),
            ),
        ),
        observe=calls("bound_ms", (2e11, 1e9, 100, 2), (1e11, 5e9, 400, 1.5), (6e11, 3e9, 300, 1.5)),
        lesson="The larger of the two is the roof over every kernel; being above it means a mistake in the counting.",
    ),
    Exercise(
        key="contest_score",
        notebook="03_roofline",
        title="Points for time",
        task=_block("""
A case that takes T ms scores 100 * B / (B + T), where B is the time of the judge's own baseline, *rounded down* to a
whole point. Fill in the list of the three cases' points; the score shown is their mean.
"""),
        answer="contest_score",
        gap=_block("""
def contest_score(times_ms, baseline_ms):
    \"\"\"Displayed score of three times, given the baseline's.\"\"\"
    points = ...
    return sum(points) / len(points)
"""),
        hints=(
            "Make a list with one entry for each pair `for t, b in zip(times_ms, baseline_ms)`.",
            "Each entry is 100 * b / (b + t), rounded down before the mean is taken.",
            "`[math.floor(100 * b / (b + t)) for t, b in zip(times_ms, baseline_ms)]`.",
        ),
        solution=_block("""
def contest_score(times_ms, baseline_ms):
    \"\"\"Displayed score of three times, given the baseline's.\"\"\"
    points = [math.floor(100 * b / (b + t)) for t, b in zip(times_ms, baseline_ms)]
    return sum(points) / len(points)
"""),
        mistakes=(
            Mistake(
                "the points are not rounded down before the mean: the judge shows thirds only",
                _block("""
def contest_score(times_ms, baseline_ms):
    points = [100 * b / (b + t) for t, b in zip(times_ms, baseline_ms)]
    return sum(points) / len(points)
"""),
            ),
            Mistake(
                "the points are rounded to the nearest whole number, not down",
                _block("""
def contest_score(times_ms, baseline_ms):
    points = [round(100 * b / (b + t)) for t, b in zip(times_ms, baseline_ms)]
    return sum(points) / len(points)
"""),
            ),
            Mistake(
                "only the mean is rounded down: the judge rounds each case",
                _block("""
def contest_score(times_ms, baseline_ms):
    points = [100 * b / (b + t) for t, b in zip(times_ms, baseline_ms)]
    return math.floor(sum(points) / len(points))
"""),
            ),
            Mistake(
                "the times are added up first: then the slowest case decides, while the judge weighs all three alike",
                _block("""
def contest_score(times_ms, baseline_ms):
    return math.floor(100 * sum(baseline_ms) / (sum(baseline_ms) + sum(times_ms)))
"""),
            ),
            Mistake(
                "the two times have changed places: a faster kernel would get fewer points",
                _block("""
def contest_score(times_ms, baseline_ms):
    points = [math.floor(100 * t / (b + t)) for t, b in zip(times_ms, baseline_ms)]
    return sum(points) / len(points)
"""),
            ),
            Mistake(
                "the points are rounded up; the judge rounds down",
                _block("""
def contest_score(times_ms, baseline_ms):
    points = [math.ceil(100 * b / (b + t)) for t, b in zip(times_ms, baseline_ms)]
    return sum(points) / len(points)
"""),
            ),
            Mistake(
                "100 is multiplied after the rounding (or not at all), so every case has 0 points",
                _block("""
def contest_score(times_ms, baseline_ms):
    points = [math.floor(b / (b + t)) * 100 for t, b in zip(times_ms, baseline_ms)]
    return sum(points) / len(points)
"""),
            ),
            Mistake(
                "B / T is taken; the score is 100 * B / (B + T), which cannot exceed 100",
                _block("""
def contest_score(times_ms, baseline_ms):
    points = [math.floor(100 * b / t) for t, b in zip(times_ms, baseline_ms)]
    return sum(points) / len(points)
"""),
            ),
        ),
        observe=calls(
            "contest_score",
            ((2.549, 4.487, 8.850), (11.251, 18.610, 35.875)),
            ((11.3, 18.7, 36.0), (11.251, 18.610, 35.875)),
            ((4.0, 4.0, 4.0), (11.251, 18.610, 35.875)),
        ),
        lesson="Because of the rounding, a gain inside one point is invisible, and a third of a point is one case.",
    ),
)

_KERNEL = (
    Exercise(
        key="registers",
        notebook="04_first_tilelang_kernel",
        title="What a fragment costs a thread",
        task=_block("""
A fragment is spread over the registers of all threads of a block. A register holds 4 bytes. If several waves need the
same elements, each keeps a copy of its own. Return the registers that a fragment takes from each thread.
"""),
        answer="registers",
        gap=_block("""
def registers(rows, columns, element_bytes, threads, copies):
    \"\"\"32-bit registers of one thread for a fragment that the block holds `copies` times over.\"\"\"
    return ...
"""),
        hints=(
            "Start with the bytes of the whole fragment. How many times is it held? Who shares it?",
            "bytes * copies / threads is what one thread holds. A register holds 4 of these bytes.",
            "`rows * columns * element_bytes * copies // threads // 4`.",
        ),
        solution=_block("""
def registers(rows, columns, element_bytes, threads, copies):
    \"\"\"32-bit registers of one thread for a fragment that the block holds `copies` times over.\"\"\"
    return rows * columns * element_bytes * copies // threads // 4
"""),
        mistakes=(
            Mistake(
                "every element is given a register; two fp16 numbers share one",
                "def registers(rows, columns, element_bytes, threads, copies):\n"
                "    return rows * columns * copies // threads",
            ),
            Mistake(
                "the copies are left out; waves that need the same rows hold them once each",
                "def registers(rows, columns, element_bytes, threads, copies):\n"
                "    return rows * columns * element_bytes // threads // 4",
            ),
            Mistake(
                "bytes are returned; a register holds 4 of them",
                "def registers(rows, columns, element_bytes, threads, copies):\n"
                "    return rows * columns * element_bytes * copies // threads",
            ),
            Mistake(
                "the registers of all threads are added up; each of the threads holds its share",
                _block("""
def registers(rows, columns, element_bytes, threads, copies):
    return rows * columns * element_bytes * copies // 4
"""),
            ),
            Mistake(
                "the copies divide instead of multiplying: the more often a fragment is held, the more registers "
                "it takes",
                _block("""
def registers(rows, columns, element_bytes, threads, copies):
    return rows * columns * element_bytes // copies // threads // 4
"""),
            ),
            Mistake(
                "the bytes of one element are rounded down to whole registers first: 2 bytes become 0",
                _block("""
def registers(rows, columns, element_bytes, threads, copies):
    return rows * columns * (element_bytes // 4) * copies // threads
"""),
            ),
        ),
        observe=calls("registers", (128, 128, 4, 256, 1), (128, 128, 2, 256, 2), (128, 64, 2, 256, 4)),
        lesson="The baseline's stage 1 on 64-lane waves: 64 + 64 for the accumulators, 64 for the token tile, of 256.",
    ),
    Exercise(
        key="swiglu",
        notebook="04_first_tilelang_kernel",
        title="SiLU with exp2",
        task=_block("""
The hardware has an instruction for 2 to the power of x, and none for e to the power of x, so kernels write
exp(x) = exp2(x * log2(e)). Return silu(gate) * up, where silu(g) = g / (1 + exp(-g)), with `torch.exp2` and the
constant `LOG2_E`.
"""),
        answer="swiglu",
        gap=_block("""
LOG2_E = 1.44269504


def swiglu(gate, up):
    \"\"\"silu(gate) * up, element by element; any shape.\"\"\"
    silu = ...
    return silu * up
"""),
        hints=(
            "silu(0) is 0, silu(10) is nearly 10 and silu(-10) is nearly 0: try these three.",
            "The denominator is 1 + exp(-gate). Write its exp as an exp2; which factor goes inside?",
            "`gate / (1.0 + torch.exp2(-gate * ...))`.",
        ),
        solution=_block("""
LOG2_E = 1.44269504


def swiglu(gate, up):
    \"\"\"silu(gate) * up, element by element; any shape.\"\"\"
    silu = gate / (1.0 + torch.exp2(-gate * LOG2_E))
    return silu * up
"""),
        mistakes=(
            Mistake(
                "exp2 takes the place of exp with no log2(e): the curve is too flat, off by up to 0.19",
                "def swiglu(gate, up):\n    return gate / (1.0 + torch.exp2(-gate)) * up",
            ),
            Mistake(
                "the sigmoid is returned; SiLU is gate times the sigmoid of gate",
                "def swiglu(gate, up):\n    return up / (1.0 + torch.exp2(-gate * 1.44269504))",
            ),
            Mistake(
                "the minus sign is lost: the curve is turned around",
                "def swiglu(gate, up):\n    return gate / (1.0 + torch.exp2(gate * 1.44269504)) * up",
            ),
            Mistake(
                "gate and up have changed places: SiLU belongs to the gate",
                "def swiglu(gate, up):\n    return up / (1.0 + torch.exp2(-up * 1.44269504)) * gate",
            ),
            Mistake(
                "gate is divided by log2(e); exp(x) = exp2(x * log2(e))",
                _block("""
def swiglu(gate, up):
    return gate / (1.0 + torch.exp2(-gate / 1.44269504)) * up
"""),
            ),
            Mistake(
                "exp is called with the argument of exp2: log2(e) belongs inside exp2 only",
                _block("""
def swiglu(gate, up):
    return gate / (1.0 + torch.exp(-gate * 1.44269504)) * up
"""),
            ),
            Mistake(
                "the 1 of the denominator is left out",
                _block("""
def swiglu(gate, up):
    return gate / torch.exp2(-gate * 1.44269504) * up
"""),
            ),
            Mistake(
                "up is multiplied twice: the last line does it already",
                _block("""
def swiglu(gate, up):
    return gate / (1.0 + torch.exp2(-gate * 1.44269504)) * up * up
"""),
            ),
        ),
        observe=calls(
            "swiglu",
            (torch.tensor([0.0, 1.0, -1.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 0.5])),
            (torch.tensor([[-3.0, 0.25], [2.0, -0.5]]), torch.tensor([[1.0, -2.0], [0.5, 4.0]])),
        ),
        lesson="These are the two lines after the K loop of the baseline.",
    ),
    Exercise(
        key="shared_bytes",
        notebook="04_first_tilelang_kernel",
        title="What stage 1 keeps in shared memory",
        task=_block("""
Stage 1 multiplies one token tile (`block_m` rows, `block_k` columns) with two weight tiles (`block_n` rows, `block_k`
columns), all fp16. The weight tiles are shared. The token tile is a register fragment or shared: the flag says which.
The two accumulators (`block_m` by `block_n`, fp32) are fragments. Return the bytes of shared memory of one block.
"""),
        answer="shared_bytes",
        gap=_block("""
def shared_bytes(block_m, block_n, block_k, token_tile_is_shared):
    \"\"\"Shared memory of one block of stage 1, in bytes.\"\"\"
    elements = ...
    return elements * 2
"""),
        hints=(
            "Only what `alloc_shared` makes counts. Go through the five buffers of the kernel above, one by one.",
            "Two weight tiles of block_n * block_k elements; and block_m * block_k more if the flag is set.",
            "`2 * block_n * block_k + (block_m * block_k if token_tile_is_shared else 0)`.",
        ),
        solution=_block("""
def shared_bytes(block_m, block_n, block_k, token_tile_is_shared):
    \"\"\"Shared memory of one block of stage 1, in bytes.\"\"\"
    elements = 2 * block_n * block_k + (block_m * block_k if token_tile_is_shared else 0)
    return elements * 2
"""),
        mistakes=(
            Mistake(
                "there is one weight tile; stage 1 needs a gate tile and an up tile at the same time",
                _block("""
def shared_bytes(block_m, block_n, block_k, token_tile_is_shared):
    return 2 * (block_n * block_k + (block_m * block_k if token_tile_is_shared else 0))
"""),
            ),
            Mistake(
                "the token tile is always counted; a fragment lives in registers and takes no shared memory",
                _block("""
def shared_bytes(block_m, block_n, block_k, token_tile_is_shared):
    return 2 * (2 * block_n * block_k + block_m * block_k)
"""),
            ),
            Mistake(
                "the accumulators are counted; they are fragments, in registers",
                _block("""
def shared_bytes(block_m, block_n, block_k, token_tile_is_shared):
    tiles = 2 * (2 * block_n * block_k + (block_m * block_k if token_tile_is_shared else 0))
    return tiles + 2 * block_m * block_n * 4
"""),
            ),
            Mistake(
                "the token tile is never counted; the flag says when it is shared",
                _block("""
def shared_bytes(block_m, block_n, block_k, token_tile_is_shared):
    return 2 * 2 * block_n * block_k
"""),
            ),
            Mistake(
                "bytes are filled in where elements are asked for: the last line multiplies by 2 already",
                _block("""
def shared_bytes(block_m, block_n, block_k, token_tile_is_shared):
    return 4 * (2 * block_n * block_k + (block_m * block_k if token_tile_is_shared else 0))
"""),
            ),
            Mistake(
                "the flag is read the wrong way round",
                _block("""
def shared_bytes(block_m, block_n, block_k, token_tile_is_shared):
    return 2 * (2 * block_n * block_k + (0 if token_tile_is_shared else block_m * block_k))
"""),
            ),
            Mistake(
                "the weight tiles are given block_m rows; theirs are block_n",
                _block("""
def shared_bytes(block_m, block_n, block_k, token_tile_is_shared):
    return 2 * (2 * block_m * block_k + (block_m * block_k if token_tile_is_shared else 0))
"""),
            ),
        ),
        observe=calls("shared_bytes", (128, 128, 128, False), (128, 128, 64, True), (64, 256, 32, True)),
        lesson="128x128x128 with a fragment fills the 64 KiB of a C500 block; half the K leaves room for the tokens.",
    ),
)

_BASELINE = (
    Exercise(
        key="weight_row",
        notebook="05_fused_two_stage",
        title="Which route weight",
        task=_block("""
Stage 2 multiplies row `i` of block `bx` by its route weight. The block belongs to one expert, whose rows start at
`padded_start` in the padded space and at `raw_start` in the raw space. Return the index into the route weights.
"""),
        answer="weight_row",
        gap=_block("""
def weight_row(bx, i, padded_start, raw_start, block=128):
    \"\"\"Raw row of row i of block bx.\"\"\"
    rows_before = bx * block - padded_start
    return ...
"""),
        hints=(
            "How many rows of the same expert lie before row i of this block? They may be in earlier blocks.",
            "`rows_before` rows lie in earlier blocks of the expert, and i more in this one. Where does the expert "
            "start among the raw rows?",
            "`raw_start + rows_before + i`.",
        ),
        solution=_block("""
def weight_row(bx, i, padded_start, raw_start, block=128):
    \"\"\"Raw row of row i of block bx.\"\"\"
    rows_before = bx * block - padded_start
    return raw_start + rows_before + i
"""),
        mistakes=(
            Mistake(
                "the padded row is used: the classic mix of the two index spaces",
                "def weight_row(bx, i, padded_start, raw_start, block=128):\n    return bx * block + i",
            ),
            Mistake(
                "the rows of the expert's earlier blocks are forgotten: right for the first block of each group only",
                "def weight_row(bx, i, padded_start, raw_start, block=128):\n    return raw_start + i",
            ),
            Mistake(
                "raw_start is left out: every expert would read the weights of the first",
                _block("""
def weight_row(bx, i, padded_start, raw_start, block=128):
    return bx * block - padded_start + i
"""),
            ),
            Mistake(
                "i is left out: every row of the block would use the weight of its first",
                _block("""
def weight_row(bx, i, padded_start, raw_start, block=128):
    return raw_start + bx * block - padded_start
"""),
            ),
            Mistake(
                "the padded rows of earlier experts are counted on top of their raw rows",
                _block("""
def weight_row(bx, i, padded_start, raw_start, block=128):
    return raw_start + bx * block + i
"""),
            ),
        ),
        observe=calls("weight_row", (0, 5, 0, 0), (1, 5, 0, 0), (3, 0, 256, 142), (4, 7, 512, 284)),
        lesson="Line `raw_start = group_offsets[expert] + rows_before` of the baseline, with i added where it is used.",
    ),
    Exercise(
        key="one_stage",
        notebook="05_fused_two_stage",
        title="The price of one stage",
        task=_block("""
A one-stage kernel has a block for every `block_n` columns of `out`, and each of these blocks computes the whole hidden
activation of its rows for itself. Return how many times the operations of the two-stage kernel that takes. Per row,
gate and up cost 4 * H * I operations, down costs 2 * H * I; `block_n` divides H.
"""),
        answer="one_stage",
        gap=_block("""
def one_stage(hidden, block_n):
    \"\"\"Operations of the one-stage kernel over those of the two-stage kernel.\"\"\"
    repeats = hidden // block_n
    return ...
"""),
        hints=(
            "What is repeated, and what is not? Each column of out is still computed once.",
            "Drop the factor H * I: two stages cost 4 + 2. In one stage, the 4 is paid `repeats` times.",
            "`(4 * repeats + 2) / 6`.",
        ),
        solution=_block("""
def one_stage(hidden, block_n):
    \"\"\"Operations of the one-stage kernel over those of the two-stage kernel.\"\"\"
    repeats = hidden // block_n
    return (4 * repeats + 2) / 6
"""),
        mistakes=(
            Mistake(
                "everything is repeated; the down projection is still done once for each column of out",
                "def one_stage(hidden, block_n):\n    return hidden // block_n",
            ),
            Mistake(
                "the repeated part is not divided by the whole of two stages, which is 4 + 2",
                "def one_stage(hidden, block_n):\n    return (4 * (hidden // block_n) + 2) / 4",
            ),
            Mistake(
                "gate and up are counted as one product; they are two, of 2 * H * I each",
                "def one_stage(hidden, block_n):\n    return (2 * (hidden // block_n) + 2) / 6",
            ),
            Mistake(
                "operations are returned (over H * I); the question is how many times those of two stages, 4 + 2",
                _block("""
def one_stage(hidden, block_n):
    return 4 * (hidden // block_n) + 2
"""),
            ),
            Mistake(
                "down is left out: it is done once, in one stage as in two",
                _block("""
def one_stage(hidden, block_n):
    return 4 * (hidden // block_n) / 6
"""),
            ),
            Mistake(
                "down is repeated instead of gate and up",
                _block("""
def one_stage(hidden, block_n):
    return (4 + 2 * (hidden // block_n)) / 6
"""),
            ),
            Mistake(
                "the ratio is upside down: one stage does more, so it is above 1",
                _block("""
def one_stage(hidden, block_n):
    return 6 / (4 * (hidden // block_n) + 2)
"""),
            ),
        ),
        observe=calls("one_stage", (2048, 128), (7168, 128), (256, 256)),
        lesson="11 times the work to save 4.4% of the bytes in case 1; 37.7 times to save 1.2% in cases 2 and 3.",
    ),
    Exercise(
        key="cache_key",
        notebook="05_fused_two_stage",
        title="What compiles again",
        task=_block("""
`run_kernel` has been called once. For each of these four next calls, say whether `_get_kernel` compiles (True) or finds
its kernel in the cache (False):

1. the same tensors again;
2. new weights, and another routing that happens to need the same number of blocks; E, H, I and N are unchanged;
3. the same E, H, I and N, but a routing that needs one block more;
4. one valid row fewer, the same number of blocks.
"""),
        answer="compiles",
        gap="compiles = (..., ..., ..., ...)",
        hints=(
            "The key is the tuple of six numbers in `_get_kernel`. Which of them differ between the calls?",
            "No tensor's content is in the key, only sizes: H, I, E, P, N and the number of blocks.",
            "Another number of blocks changes P; one row fewer changes N.",
        ),
        solution="compiles = (False, False, True, True)",
        mistakes=(
            Mistake(
                "new values are taken for a new kernel; the key holds sizes only, and must: keying on content would "
                "compile at every call",
                "compiles = (False, True, True, True)",
            ),
            Mistake(
                "N is left out of the key; the route weights are declared as T.Tensor((N,), ...), so a kernel is made "
                "for one N",
                "compiles = (False, False, True, False)",
            ),
            Mistake(
                "P is left out of the key; the grid and three tensors are as large as P says",
                "compiles = (False, False, False, True)",
            ),
            Mistake(
                "every call is taken to compile; the cache is there so that the same sizes compile once",
                "compiles = (True, True, True, True)",
            ),
            Mistake(
                "nothing is taken to compile again; P and N are in the key, and both can differ between calls",
                "compiles = (False, False, False, False)",
            ),
            Mistake(
                "content is taken for the key, and sizes are not: it is the other way round",
                "compiles = (False, True, False, False)",
            ),
            Mistake(
                "True and False have changed places: True is for a call that compiles",
                "compiles = (True, True, False, False)",
            ),
        ),
        observe=value("compiles"),
        lesson="Sizes are compiled in, contents are read when the kernel runs.",
    ),
)

_EXPLORER = (
    Exercise(
        key="fits",
        notebook="06_tile_explorer",
        title="Which of these fit?",
        task=_block("""
Stage 1 of the baseline with 256 threads and these (`STAGE1_BLOCK_N`, `STAGE1_BLOCK_K`):

1. (64, 256)
2. (128, 256)
3. (256, 64)
4. (128, 64)

A block of the C500 has 65,536 bytes of shared memory, and a thread at most 256 registers of 4 bytes. Say for each
whether it fits (True or False), before you run anything.
"""),
        answer="fits",
        gap="fits = (..., ..., ..., ...)",
        hints=(
            "Two limits, two counts for each: the shared weight tiles, and what a thread holds of the fragments.",
            "Shared: two tiles of BLOCK_N * BLOCK_K numbers of 2 bytes. Registers of the two accumulators: "
            "2 * 128 * BLOCK_N numbers of 4 bytes, spread over 256 threads.",
            "(64, 256) needs 65,536 bytes. (256, 64) needs 65,536 bytes too, and 256 registers for the accumulators "
            "alone.",
        ),
        solution="fits = (True, False, False, True)",
        mistakes=(
            Mistake(
                "only shared memory is checked: at 256 columns the two accumulators take all 256 registers of a "
                "thread, and the token tile needs some too",
                "fits = (True, False, True, True)",
            ),
            Mistake(
                "65,536 bytes are taken for too much; a block may use every byte it has",
                "fits = (False, False, False, True)",
            ),
            Mistake(
                "one weight tile is counted; stage 1 keeps the gate tile and the up tile at once",
                "fits = (True, True, False, True)",
            ),
            Mistake(
                "one weight tile is counted and no registers; stage 1 keeps two tiles, and 256 columns fill a "
                "thread's registers",
                "fits = (True, True, True, True)",
            ),
            Mistake(
                "the last is refused; it needs 32,768 bytes and 144 registers, half of what there is and a little more",
                "fits = (True, False, False, False)",
            ),
            Mistake(
                "True and False have changed places: True is for what fits",
                "fits = (False, True, True, False)",
            ),
        ),
        observe=value("fits"),
        lesson="Width fills the registers, width times depth the shared memory: check both.",
    ),
    Exercise(
        key="reads",
        notebook="06_tile_explorer",
        title="What half the width does to the traffic",
        task=_block("""
`STAGE1_BLOCK_N` goes from 128 to 64, and nothing else changes. Say by which factor the bytes change that all blocks of
stage 1 together read of (the tokens, the weights). Count every read, whether a cache answers it or not. 1 means no
change, 2 twice as many, 0.5 half.
"""),
        answer="reads",
        gap="reads = (..., ...)",
        hints=(
            "Draw the grid: row blocks down, column blocks across. What happens to each side of it?",
            "A row block's tokens are read once by every column block. A column's weights are read once by every row "
            "block of the expert.",
            "There are twice as many column blocks, each half as wide, and the same row blocks as before.",
        ),
        solution="reads = (2, 1)",
        mistakes=(
            Mistake(
                "the two have changed places: the number of column blocks decides how often *tokens* are read",
                "reads = (1, 2)",
            ),
            Mistake(
                "every block is counted as if it still read whole tiles: there are twice as many blocks, but each "
                "reads half the weights",
                "reads = (2, 2)",
            ),
            Mistake(
                "a smaller tile is taken for less traffic; there are more tiles, so the other operand is read more "
                "often",
                "reads = (0.5, 1)",
            ),
            Mistake(
                "one block is looked at: it reads half the weights, but there are twice as many blocks",
                "reads = (1, 0.5)",
            ),
            Mistake(
                "the tokens are right; of the weights one block is looked at, and there are twice as many blocks",
                "reads = (2, 0.5)",
            ),
            Mistake(
                "the blocks are taken to share everything; each reads its row block's tokens for itself, and there "
                "are twice as many",
                "reads = (1, 1)",
            ),
        ),
        observe=value("reads"),
        lesson="A tile's width pays for the other operand's reads; only its height (128 rows) pays for the weights'.",
    ),
    Exercise(
        key="resident",
        notebook="06_tile_explorer",
        title="How many blocks at once?",
        task=_block("""
Stage 1 of the baseline with `STAGE1_BLOCK_K` = 128, 64 and 32. What one block then needs:

| `STAGE1_BLOCK_K` | shared memory | registers a thread | threads |
|---|---|---|---|
| 128 | 64 KiB | 160 | 256 |
| 64 | 32 KiB | 144 | 256 |
| 32 | 16 KiB | 136 | 256 |

A processor of the C500 has 64 KiB of shared memory, 131,072 registers and places for 2,048 threads. How many blocks
does it hold at the same time in each case?
"""),
        answer="resident",
        gap="resident = (..., ..., ...)",
        hints=(
            "Three resources, and each allows some number of blocks. Which of the three numbers counts?",
            "Shared memory allows 1, 2 and 4 blocks; threads allow 8. Registers of a block: registers a thread * 256.",
            "131,072 // (136 * 256) is 3.",
        ),
        solution="resident = (1, 2, 3)",
        mistakes=(
            Mistake(
                "only shared memory is counted; with 16 KiB a block, registers end first",
                "resident = (1, 2, 4)",
            ),
            Mistake(
                "only registers are counted; shared memory ends first for the two larger tiles",
                "resident = (3, 3, 3)",
            ),
            Mistake(
                "only threads are counted",
                "resident = (8, 8, 8)",
            ),
            Mistake(
                "a processor is taken to hold one block at a time; it holds as many as find room",
                "resident = (1, 1, 1)",
            ),
            Mistake(
                "the order is turned round: the smaller the tile, the more blocks",
                "resident = (3, 2, 1)",
            ),
        ),
        observe=value("resident"),
        lesson="The scarcest resource decides, and which one that is changes with the tile.",
    ),
)

_LADDER = (
    Exercise(
        key="same_tier",
        notebook="07_the_ladder",
        title="A fair comparison",
        task=_block("""
`runs` holds judge results as (version, tier, total time in ms). The machines come in tiers of different speed, and
nobody chooses the tier. Return how many times faster `new` is than `old`, as the mean of the ratios old / new over the
tiers on which *both* ran. Each version ran at most once on a tier.
"""),
        answer="gain",
        gap=_block("""
def gain(runs, old, new):
    \"\"\"Mean over the shared tiers of time(old) / time(new); above 1 means that new is faster.\"\"\"
    times = {(version, tier): time_ms for version, tier, time_ms in runs}
    tiers = [tier for version, tier in times if version == old and (new, tier) in times]
    ratios = ...
    return sum(ratios) / len(ratios)
"""),
        hints=(
            "A ratio is only fair if both times come from the same tier.",
            "For each tier of `tiers`, look both times up: `times[old, tier]` and `times[new, tier]`.",
            "`[times[old, tier] / times[new, tier] for tier in tiers]`.",
        ),
        solution=_block("""
def gain(runs, old, new):
    \"\"\"Mean over the shared tiers of time(old) / time(new); above 1 means that new is faster.\"\"\"
    times = {(version, tier): time_ms for version, tier, time_ms in runs}
    tiers = [tier for version, tier in times if version == old and (new, tier) in times]
    ratios = [times[old, tier] / times[new, tier] for tier in tiers]
    return sum(ratios) / len(ratios)
"""),
        mistakes=(
            Mistake(
                "the best time of each version is compared, whatever machine it came from",
                _block("""
def gain(runs, old, new):
    best = lambda wanted: min(time_ms for version, _, time_ms in runs if version == wanted)
    return best(old) / best(new)
"""),
            ),
            Mistake(
                "the first time of each version is compared, whatever machine it came from",
                _block("""
def gain(runs, old, new):
    first = lambda wanted: next(time_ms for version, _, time_ms in runs if version == wanted)
    return first(old) / first(new)
"""),
            ),
            Mistake(
                "the ratio is upside down: new over old is below 1 when new is faster",
                _block("""
def gain(runs, old, new):
    times = {(version, tier): time_ms for version, tier, time_ms in runs}
    ratios = [times[new, tier] / times[old, tier] for version, tier in times if version == old and (new, tier) in times]
    return sum(ratios) / len(ratios)
"""),
            ),
            Mistake(
                "the times of the shared tiers are added up before they are divided: the slowest tier decides, "
                "while the mean of the ratios weighs all alike",
                _block("""
def gain(runs, old, new):
    times = {(version, tier): time_ms for version, tier, time_ms in runs}
    tiers = [tier for version, tier in times if version == old and (new, tier) in times]
    return sum(times[old, tier] for tier in tiers) / sum(times[new, tier] for tier in tiers)
"""),
            ),
            Mistake(
                "the times of the shared tiers are added up before they are divided, and the ratio is upside down "
                "as well",
                _block("""
def gain(runs, old, new):
    times = {(version, tier): time_ms for version, tier, time_ms in runs}
    tiers = [tier for version, tier in times if version == old and (new, tier) in times]
    return sum(times[new, tier] for tier in tiers) / sum(times[old, tier] for tier in tiers)
"""),
            ),
            Mistake(
                "the ratio is upside down, and the best time of each version is taken, whatever machine it came from",
                _block("""
def gain(runs, old, new):
    best = lambda wanted: min(time_ms for version, _, time_ms in runs if version == wanted)
    return best(new) / best(old)
"""),
            ),
            Mistake(
                "the mean time of each version is compared, over all machines it ran on",
                _block("""
def gain(runs, old, new):
    mean = lambda times: sum(times) / len(times)
    of = lambda wanted: mean([time_ms for version, _, time_ms in runs if version == wanted])
    return of(old) / of(new)
"""),
            ),
            Mistake(
                "the times are subtracted; how many times faster is a ratio",
                _block("""
def gain(runs, old, new):
    times = {(version, tier): time_ms for version, tier, time_ms in runs}
    tiers = [tier for version, tier in times if version == old and (new, tier) in times]
    return sum(times[old, tier] - times[new, tier] for tier in tiers) / len(tiers)
"""),
            ),
            Mistake(
                "the ratios are added up and not divided by how many there are",
                _block("""
def gain(runs, old, new):
    times = {(version, tier): time_ms for version, tier, time_ms in runs}
    tiers = [tier for version, tier in times if version == old and (new, tier) in times]
    return sum(times[old, tier] / times[new, tier] for tier in tiers)
"""),
            ),
        ),
        observe=calls(
            "gain",
            ((("a", "fast", 20.0), ("b", "slow", 27.0), ("a", "slow", 30.0)), "a", "b"),
            (
                (
                    ("a", "slow", 33.0),
                    ("b", "slow", 30.0),
                    ("b", "fast", 19.0),
                    ("c", "fast", 18.0),
                    ("a", "mid", 25.0),
                ),
                "a",
                "b",
            ),
            ((("a", "slow", 30.0), ("b", "slow", 28.0), ("b", "fast", 20.0), ("a", "fast", 21.0)), "a", "b"),
        ),
        lesson="On a slow tier a better kernel can look worse than its predecessor did on a fast one.",
    ),
    Exercise(
        key="interleave",
        notebook="07_the_ladder",
        title="When the machine drifts",
        task=_block("""
On your own card you run two kernels in turn: `a`, `b`, `a`, `b`, ... and get two lists of times of the same length.
While you measure, the card warms up and its clock sinks, so both lists grow. Return the time of `b` relative to `a`:
the median of the ratios of neighbours, `b[i] / a[i]`.
"""),
        answer="relative_time",
        gap=_block("""
def relative_time(a, b):
    \"\"\"Median of b[i] / a[i]; below 1 means that b is faster.\"\"\"
    ratios = sorted(...)
    middle = len(ratios) // 2
    return ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2
"""),
        hints=(
            "Neighbours ran within milliseconds of each other, so the drift is the same for both.",
            "Make one ratio for each pair: `zip(a, b)`.",
            "`y / x for x, y in zip(a, b)`.",
        ),
        solution=_block("""
def relative_time(a, b):
    \"\"\"Median of b[i] / a[i]; below 1 means that b is faster.\"\"\"
    ratios = sorted(y / x for x, y in zip(a, b))
    middle = len(ratios) // 2
    return ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2
"""),
        mistakes=(
            Mistake(
                "the totals are compared: one disturbed run moves the result",
                "def relative_time(a, b):\n    return sum(b) / sum(a)",
            ),
            Mistake(
                "the medians of the two lists are compared: their middles happened at different clocks; the ratio "
                "comes first, the median after it",
                _block("""
def relative_time(a, b):
    middle = lambda times: (sorted(times)[(len(times) - 1) // 2] + sorted(times)[len(times) // 2]) / 2
    return middle(b) / middle(a)
"""),
            ),
            Mistake(
                "the mean of the ratios is taken: one disturbed run moves it, and leaves a median alone",
                _block("""
def relative_time(a, b):
    return sum(y / x for x, y in zip(a, b)) / len(a)
"""),
            ),
            Mistake(
                "the times are subtracted; relative to a is a ratio",
                _block("""
def relative_time(a, b):
    ratios = sorted(y - x for x, y in zip(a, b))
    middle = len(ratios) // 2
    return ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2
"""),
            ),
            Mistake(
                "both lists are sorted before they are paired: what ran side by side is no longer side by side",
                _block("""
def relative_time(a, b):
    ratios = sorted(y / x for x, y in zip(sorted(a), sorted(b)))
    middle = len(ratios) // 2
    return ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2
"""),
            ),
            Mistake(
                "the fastest run of each is compared: they happened at different clocks",
                "def relative_time(a, b):\n    return min(b) / min(a)",
            ),
            Mistake(
                "the ratio is upside down: a over b is above 1 when b is faster",
                _block("""
def relative_time(a, b):
    ratios = sorted(x / y for x, y in zip(a, b))
    middle = len(ratios) // 2
    return ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2
"""),
            ),
        ),
        observe=calls(
            "relative_time",
            ((1.00, 1.10, 1.20, 1.30), (0.98, 1.08, 1.19, 1.27)),
            ((1.0, 1.1, 1.2, 1.3, 1.4), (0.95, 1.05, 3.0, 1.23, 1.34)),
        ),
        lesson="`moe_lab.machine.timing` takes turns too, forwards, then backwards, and gives each median an interval.",
    ),
)


@dataclass(frozen=True)
class _Outcome:
    """What became of an edited text.

    Attributes:
        kind: what is compared.
        said: the judge's sentence, for the reader.
    """

    kind: str
    said: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Both, in a line."""
        return f"{self.kind} ({self.said})" if self.said else self.kind


def _of_a_cheat(answer: Any) -> Observation:
    """Observe a function that edits the baseline's text, by what the judge says to the result."""
    from moe_lab.steps import step

    source = step("s0_baseline").source
    edited = answer(source)
    if not isinstance(edited, str):
        return [("cheat(source)", edited)]
    return [("cheat(source)", _Outcome("the same text") if edited == source else _judged(edited))]


@functools.cache
def _judged(source: str) -> _Outcome:
    """What one routing of the judge says to a text."""
    from moe_lab.judge import Verdict, judge
    from moe_lab.judge.plan import Plan, structural_groups
    from moe_lab.problem.submission import Submission

    plan = Plan(structural_groups(random.Random(0))[:1], variants=False, fit=False)
    report = judge(Submission(source, "cheat.py"), seed=1, plan=plan)
    if report.verdict is Verdict.ACCEPTED:
        return _Outcome("an accepted file")
    if not any(case.calls for case in report.cases):
        # Nothing was computed: what the judge refused is the text, not what it does.
        ruled = report.verdict is Verdict.RULE_VIOLATION
        return _Outcome("a text that a rule refuses" if ruled else "a file that does not run", report.sentence)
    if report.verdict in (Verdict.WRONG_ANSWER, Verdict.RULE_VIOLATION):
        return _Outcome("a file that is caught by what it does")
    return _Outcome("a file that does not run", report.sentence)


_SUBMISSION = (
    Exercise(
        key="cheat",
        notebook="08_your_submission",
        title="A cheat of your own",
        task=_block("""
Edit the text of a submission so that it still runs and does *less* than it should: skip work, keep something from an
earlier call, hope that nobody looks. `source` is the baseline's text; return the edited text. The check hands it to the
judge (about 15 seconds) and is content when the file runs and is caught by what it does; a rule that refuses the text
does not count.
"""),
        answer="cheat",
        gap=_block("""
def cheat(source):
    \"\"\"The text of a submission, edited so that it works less and hopes to pass.\"\"\"
    return ...
"""),
        hints=(
            "What would be right for one call, or for one routing, and wrong for the next?",
            "`source.replace(old, new)` edits the text. The kernel is launched by the line that reads `kernel(`, with "
            "four spaces before it; what stands before that line decides whether it is reached.",
            "Put `if SEEN:`, `return` and `SEEN[0] = True` before the launch, and `SEEN = {}` beside `KERNELS = {}`.",
        ),
        solution=_block("""
def cheat(source):
    \"\"\"The text of a submission, edited so that it works less and hopes to pass.\"\"\"
    only_once = "    if SEEN:\\n        return\\n    SEEN[0] = True\\n    kernel(\\n"
    return source.replace("    kernel(\\n", only_once).replace("KERNELS = {}", "KERNELS = {}\\nSEEN = {}")
"""),
        mistakes=(
            Mistake(
                "nothing was replaced: what `replace` looks for must be in the text to the letter, spaces included",
                'def cheat(source):\n    return source.replace("kernel.launch()", "pass")',
            ),
            Mistake(
                "a rule refused the text before it ran, so no number of it was looked at; a cheat that interests "
                "the judge keeps to what a submission may write",
                _block("""
def cheat(source):
    return "import os\\n" + source
"""),
            ),
            Mistake(
                "the edited file no longer runs; a cheat has to look honest until its numbers are compared",
                'def cheat(source):\n    return source.replace("kernel(\\n", "krenel(\\n")',
            ),
            Mistake(
                "the change does no harm: every row is still right (if yours is not, you have found a hole in the "
                "judge, and its authors would like to see the file)",
                'def cheat(source):\n    return source + "# cheating\\n"',
            ),
        ),
        observe=_of_a_cheat,
        lesson="It ran, and what it did gave it away: from call to call the judge changes tokens, weights, routing and "
        "what out holds, and compares each.",
    ),
)

#: Every exercise by key, in the order of the notebooks.
EXERCISES: dict[str, Exercise] = {
    exercise.key: exercise
    for block in (_START, _NAIVE, _PADDING, _ROOFLINE, _KERNEL, _BASELINE, _EXPLORER, _LADDER, _SUBMISSION)
    for exercise in block
}


def of_notebook(notebook: str) -> Sequence[Exercise]:
    """The exercises of one notebook (its stem), in order."""
    return [exercise for exercise in EXERCISES.values() if exercise.notebook == notebook]
