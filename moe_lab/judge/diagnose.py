"""Which usual mistake a wrong answer is.

The judge computes what each usual mistake would have answered and looks for the one that agrees with ``out`` on the
wrong rows. Where none does, the pattern of the wrong rows and columns is described instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from moe_lab.judge.plan import WEIGHTS
from moe_lab.judge.session import Made
from moe_lab.problem.inputs import Inputs
from moe_lab.problem.layout import GroupedLayout

#: Relative Frobenius distance below which a row is what a mistake would have answered. Where the mistake is a
#: rounding, other roundings differ by no more than the larger figure.
_SAME, _SAME_ROUNDING = 5e-3, 8e-4
#: Part of the wrong rows that a mistake has to explain to be named, and to be named without "most of".
_NAMED, _SURE = 0.5, 0.97
#: Part of the rows that rounding has to harm before precision is blamed: a lost tile harms few.
_SPREAD = 0.2
#: Wrong rows whose answer a mistake has to explain with finite numbers.
_FEW_ROWS = 3
#: A mistake is looked for in so many wrong rows at most: a contest case has thousands.
_MAX_ROWS = 128
#: Reduction chunks that a loop over K may lose.
_CHUNKS = (16, 32, 64, 128, 256)

_ALL = slice(None)
_NONE: Mapping[str, torch.Tensor] = {}

#: What usual mistakes make of gate and up, (rows, I) each, instead of ``silu(gate) * up``.
_FORMULAS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gate and up are swapped: silu belongs to the gate": lambda g, u: F.silu(u) * g,
    "SiLU is missing": lambda g, u: g * u,
    "sigmoid instead of SiLU: the factor g is missing": lambda g, u: torch.sigmoid(g) * u,
    "the up projection is missing": lambda g, u: F.silu(g),
    "the gate projection is missing": lambda g, u: u,
    "silu is applied to the product instead of the gate": lambda g, u: F.silu(g * u),
    "exp2 is used without the factor log2(e) = 1.44269504": lambda g, u: g / (1 + torch.exp2(-g)) * u,
    "the sign in the sigmoid is wrong": lambda g, u: g * torch.sigmoid(-g) * u,
    "gate and up are added instead of multiplied": lambda g, u: F.silu(g) + u,
    "gate stands in for up as well": lambda g, u: F.silu(g) * g,
    "up stands in for gate as well": lambda g, u: F.silu(u) * u,
    "GELU instead of SiLU": lambda g, u: F.gelu(g) * u,
    "ReLU instead of SiLU": lambda g, u: F.relu(g) * u,
    "hard swish instead of SiLU": lambda g, u: F.hardswish(g) * u,
    "sigmoid(1.702 * g), a fast GELU, instead of SiLU": lambda g, u: g * torch.sigmoid(1.702 * g) * u,
    "sigmoid(2 * g) instead of sigmoid(g): the half in tanh(g / 2) is missing": lambda g, u: (
        g * torch.sigmoid(2 * g) * u
    ),
    "tanh instead of SiLU": lambda g, u: torch.tanh(g) * u,
}


class Mistake(NamedTuple):
    """One usual mistake."""

    cause: str  # the sentence that is shown, without a full stop
    answer: Callable[[torch.Tensor], torch.Tensor]  # (R,) raw rows to its answer there, (R, H); infinite where unknown
    same: float = _SAME
    bits: bool = False  # the answer is copied and not computed, so that only equal bits count


def cause_of(history: Sequence[Made]) -> str | None:
    """The usual mistake that explains the last call.

    Args:
        history: the calls of one group up to the wrong one, oldest first.

    Returns:
        One sentence without a full stop, or None if nothing fits.
    """
    made = history[-1]
    wrong = torch.nonzero(made.comparison.wrong_rows).flatten()
    if not wrong.numel():
        return _padding_cause(made)
    if wrong.numel() > _MAX_ROWS:
        wrong = wrong[torch.linspace(0, wrong.numel() - 1, _MAX_ROWS, device=wrong.device).long()]
    # Where whole columns are right, only the others can tell.
    columns = _wrong_columns(made)
    got = made.out[made.inputs.valid_rows[wrong]][:, columns].float()
    cause, explained = "", 0.0
    for mistake in _mistakes(history):
        share = _agreement(mistake.answer(wrong)[:, columns], got, mistake.same, bits=mistake.bits)
        if share > explained + 0.01:
            cause, explained = mistake.cause, share
        if explained > _SURE:
            return cause
    return f"{cause} (explains {explained:.0%} of the wrong rows)" if explained >= _NAMED else _precision(made)


def _precision(made: Made) -> str | None:
    """What to say of an answer that is a little wrong everywhere."""
    result = made.comparison
    if result.judge_rows.any() or result.row_error is None or result.wrong_rows.float().mean() < _SPREAD:
        return None
    return (
        f"less precision than fp16 somewhere: a row is off by up to {result.row_error:.2%} of its norm, where rounding "
        "to fp16 costs 0.04% and one rounding to bf16 0.16%"
    )


def _agreement(answer: torch.Tensor, got: torch.Tensor, same: float, *, bits: bool) -> float:
    """Part of the rows that agree, of those where the answer is known; 0 if too few are known to tell.

    A mistake that reads past the end of an array is known on the other rows only, often the smaller part. One NaN is
    like another, so some of the rows that agree must be finite.
    """
    known = ~torch.isinf(answer).any(dim=1)
    if not known.any():
        return 0.0
    agree = known & ((answer == got) | (answer.isnan() & got.isnan())).all(dim=1)
    if not bits:
        distance = (answer - got).norm(dim=1)
        agree |= known & (distance <= same * answer.norm(dim=1) + 2.0**-24 * got.shape[1] ** 0.5)
        # Whole rows do not agree by chance, so three of them are enough.
        if int((agree & torch.isfinite(got).all(dim=1)).sum()) < min(_FEW_ROWS, len(got)):
            return 0.0
    return float(agree[known].float().mean())


def _wrong_columns(made: Made) -> torch.Tensor:
    """(H,) bool, columns with a wrong element in a wrong row."""
    ratio = torch.nan_to_num(made.comparison.ratio[made.comparison.wrong_rows], nan=torch.inf)
    columns = (ratio > 1).any(dim=0)
    return columns if columns.any() else torch.ones_like(columns)


def _mistakes(history: Sequence[Made]) -> Iterator[Mistake]:
    """Every usual mistake, the most telling first."""
    made = history[-1]
    # The call right before and the very first are the ones that a cache keeps.
    *earlier, now = history
    kept = list({id(old): old for old in [*earlier[-1:], *earlier[:1], *earlier[-2:-1]]}.values())
    yield from _copied(history, kept)
    yield from _computed(made, _remembered(now, kept))
    for old in kept:
        if old.out.shape == made.out.shape:
            cause = (
                f"computed from a workspace that call {old.number + 1} left behind: stage 1 did not write it this time"
            )
            yield Mistake(cause, partial(_stale, made.inputs, old.inputs))
    yield from _computed(made, _weighted(made.inputs))
    cause = "another route weight than the row's own: it is read at a wrong place, usually at the padded row"
    yield Mistake(cause, partial(_some_weight, made))
    yield from _computed(made, ((cause, {"hidden": formula}) for cause, formula in _FORMULAS.items()))
    yield from _computed(made, _misplaced(made.inputs))
    yield from _computed(made, _cut(made.inputs))
    yield from _computed(made, _ROUNDINGS.items(), _SAME_ROUNDING)


def _computed(made: Made, table: Iterable[tuple[str, dict[str, Any]]], same: float = _SAME) -> Iterator[Mistake]:
    """Mistakes that :func:`_answers` computes, from their causes and its options."""
    for cause, options in table:
        yield Mistake(cause, partial(_answers, made, **options), same)


def _copied(history: Sequence[Made], kept: Sequence[Made]) -> Iterator[Mistake]:
    """What is not computed, or computed right and then spoiled."""
    made, storage, truth = history[-1], history[-1].inputs.valid_rows, history[-1].truth
    again = "the answer of call {} again{}: results are kept and replayed"
    for old in reversed(history[:-1]):
        # The whole of out as an earlier call left it, padding included, which no wrong kernel hits by chance.
        same = old.out.shape == made.out.shape and torch.equal(old.out, made.out)
        if same and bool(made.out.any()) and not torch.equal(made.out, made.out_before):
            yield Mistake(again.format(old.number + 1, ""), old.out[storage].float().__getitem__, bits=True)
    before = made.out_before[storage].float()
    yield Mistake("not written, out still holds what it held before the call", before.__getitem__, bits=True)
    yield Mistake("zero where a value is expected", torch.zeros_like(truth).__getitem__)
    found = made.out[storage[made.comparison.wrong_rows]].float().unique()
    if len(found) == 1 and bool(found.isfinite()):
        yield Mistake(f"the constant {float(found):g}", torch.full_like(truth, float(found)).__getitem__)
    yield Mistake("added to what out held instead of replacing it", (before + truth).__getitem__)
    for factor in (2.0, 0.5, -1.0):
        yield Mistake(f"{factor:g} times the right answer", (factor * truth).__getitem__)
    for old in kept:
        if old.out.shape == made.out.shape:
            yield Mistake(again.format(old.number + 1, ""), old.out[storage].float().__getitem__)
        if old.truth.shape == truth.shape:
            yield Mistake(again.format(old.number + 1, ", row by row"), old.truth.__getitem__)


def _remembered(made: Made, kept: Sequence[Made]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a file answers that keeps something from an earlier call of the same shapes."""
    names = {"all weights": WEIGHTS, **{name: (name,) for name in WEIGHTS}}
    names |= {"the tokens": ("stacked_expert_tokens",), "the route weights": ("routed_expert_weights",)}
    now = made.inputs
    for old in kept:
        for what, arguments in names.items():
            changes: dict[str, Any] = {name: getattr(old.inputs, name) for name in arguments}
            if all(changes[name].shape == getattr(now, name).shape for name in arguments):
                cause = f"computed with {what} of call {old.number + 1}: they are kept from an earlier call"
                yield cause, {"inputs": replace(now, **changes)}
        if old.inputs.layout != now.layout and old.out.shape == made.out.shape:
            mixed = replace(now, layout=old.inputs.layout)
            cause = (
                f"computed with the routing of call {old.number + 1}: sizes or offsets are kept from an earlier call"
            )
            yield cause, {"inputs": mixed, "written": _raw_rows(mixed)}


def _weighted(inputs: Inputs) -> Iterator[tuple[str, dict[str, Any]]]:
    """Another factor than the row's own route weight."""
    weights, in_group = inputs.routed_expert_weights.float(), _in_group(inputs)
    padded = torch.tensor(inputs.layout.raw_to_padded, dtype=torch.int64, device=weights.device)
    in_block = in_group % inputs.layout.block
    read = "the route weight is read"
    yield "the route weight is missing", {"factor": torch.ones_like(weights)}
    yield "the route weight is applied twice", {"factor": weights.square()}
    at_padded = _at(weights, padded, torch.inf)
    yield f"{read} at the padded row; it lives at the raw row, group_offsets[e] + row", {"factor": at_padded}
    yield f"{read} at the row inside its group: group_offsets[e] is missing", {"factor": weights[in_group]}
    yield f"{read} at the row inside its block of {inputs.layout.block}", {"factor": weights[in_block]}
    for shift in (1, -1):
        yield f"{read} one row off ({shift:+d})", {"factor": weights.roll(-shift)}
    if inputs.routed_expert_weights.dtype == torch.float32:
        halves = inputs.routed_expert_weights.view(torch.float16).float()
        yield "the fp32 route weights are read as fp16", {"factor": halves}


def _misplaced(inputs: Inputs) -> Iterator[tuple[str, dict[str, Any]]]:
    """Experts, tokens, results and matrices at a wrong place."""
    layout, tokens = inputs.layout, inputs.stacked_expert_tokens
    own = torch.arange(layout.num_experts)
    for shift, which in ((1, "next"), (-1, "previous")):
        others = own.roll(-shift)
        yield f"the {which} expert's weights are used", {"experts": dict.fromkeys(WEIGHTS, others)}
        for name in WEIGHTS:
            yield f"the {which} expert's {name} is used", {"experts": {name: others}}
    yield "expert 0 is used for every row", {"experts": dict.fromkeys(WEIGHTS, own * 0)}
    compact = tokens.clone()
    compact[inputs.valid_rows] = tokens[: layout.num_rows]
    cause = "the tokens are read at raw rows; they live at padded rows, group_padded_offsets[e] + row"
    yield cause, {"inputs": replace(inputs, stacked_expert_tokens=compact)}
    for shift in (1, -1):
        moved = replace(inputs, stacked_expert_tokens=tokens.roll(-shift, 0))
        yield f"the tokens are read one row off ({shift:+d})", {"inputs": moved}
    rows = torch.arange(len(tokens), device=tokens.device)
    cause = "the result is written to raw rows of out instead of padded rows"
    yield cause, {"written": torch.where(rows < layout.num_rows, rows, -1)}
    for distance, name in ((1, "one row"), (layout.block, "one block")):
        for shift, direction in ((-distance, "far"), (distance, "early")):
            written = _at(_raw_rows(inputs), rows + shift, -1)
            yield f"the result is written {name} too {direction}", {"written": written}

    def transposed(*names: str) -> dict[str, Inputs]:
        """The memory of matrices read as if rows were columns."""
        weights = [(name, getattr(inputs, name)) for name in names]
        read: dict[str, Any] = {name: w.reshape(len(w), w.shape[2], w.shape[1]).transpose(1, 2) for name, w in weights}
        return {"inputs": replace(inputs, **read)}

    yield "down_w is read transposed: it is (E, hidden, intermediate)", transposed("down_w")
    cause = "gate_w and up_w are read transposed: they are (E, intermediate, hidden)"
    yield cause, transposed("gate_w", "up_w")


def _cut(inputs: Inputs) -> Iterator[tuple[str, dict[str, Any]]]:
    """Sums over a part of H in stage 1, or of I in stage 2."""
    for stage, name in ((1, "hidden"), (2, "intermediate")):
        extent = getattr(inputs.case, name)
        chunks = [chunk for chunk in _CHUNKS if chunk < extent]
        for chunk in chunks:
            only = f"{chunk} of {name} are in the sum of stage {stage}"
            yield f"only the first {only}", {f"stage_{stage}": slice(0, chunk)}
            cause = f"only the last {only}: the loop clears its accumulator"
            yield cause, {f"stage_{stage}": slice(extent - chunk, extent)}
        for chunk in chunks:
            missing = f"{chunk} of {name} are missing from the sum of stage {stage}"
            yield f"the last {missing}", {f"stage_{stage}": slice(0, extent - chunk)}
            yield f"the first {missing}", {f"stage_{stage}": slice(chunk, extent)}


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().float()


def _eight_bits(tensor: torch.Tensor) -> torch.Tensor:
    scale = tensor.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return (tensor / scale).round() * scale


_ROUNDINGS: dict[str, dict[str, Any]] = {
    "the hidden activation is rounded to bf16": {"hidden": lambda g, u: _bf16(_swiglu(g, u))},
    "weights are rounded to bf16": {"rounded": _bf16},
    "weights are rounded to 8 bits": {"rounded": _eight_bits},
}


def _answers(
    made: Made, rows: torch.Tensor, *, inputs: Inputs | None = None,
    hidden: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _swiglu,
    experts: Mapping[str, torch.Tensor] = _NONE, rounded: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float,
    stage_1: slice = _ALL, stage_2: slice = _ALL, factor: torch.Tensor | None = None,
    written: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """What is found at some raw rows, (R, H) fp32, after one mistake; without one the right answer.

    Args:
        made: the call.
        rows: raw rows, (R,).
        inputs: instead of the call's.
        hidden: formula of gate and up, see :data:`_FORMULAS`.
        experts: for each expert the one whose weight is used instead, (E,), by the name of the weight.
        rounded: what a matrix of weights becomes.
        stage_1, stage_2: which part of H and of I is in the sum.
        factor: (N,) instead of the route weights.
        written: (P,) the raw row whose answer goes to a storage row of ``out``, -1 for none.
    """
    inputs = inputs or made.inputs
    storage = made.inputs.valid_rows[rows]
    raw = rows if written is None else written[storage]
    source = raw.clamp_min(0)
    x = inputs.stacked_expert_tokens[inputs.valid_rows[source]].float()[:, stage_1]
    answer = torch.empty(len(rows), inputs.case.hidden, device=rows.device)
    for expert, mine in _experts(inputs, source):
        used = [getattr(inputs, name)[int(experts[name][expert]) if name in experts else expert] for name in WEIGHTS]
        gate, up, down = (rounded(weight.float()) for weight in used)
        h = hidden(x[mine] @ gate[:, stage_1].T, x[mine] @ up[:, stage_1].T)
        answer[mine] = h[:, stage_2] @ down[:, stage_2].T
    answer *= (inputs.routed_expert_weights if factor is None else factor)[source, None].float()
    return torch.where(raw[:, None] < 0, made.out_before[storage].float(), answer)


def _some_weight(made: Made, rows: torch.Tensor) -> torch.Tensor:
    """The right answer times whatever weight a row got, which nothing else looks like."""
    weights = made.inputs.routed_expert_weights.float()
    right = _answers(made, rows, factor=torch.ones_like(weights))
    got = made.out[made.inputs.valid_rows[rows]].float()
    weight = (got * right).sum(dim=1, keepdim=True) / right.square().sum(dim=1, keepdim=True)
    own = weights[rows, None]
    # A row of zeros or NaN is a multiple of anything, and a row with its own weight has another fault.
    other = torch.isfinite(weight) & (weight != 0) & ((weight - own).abs() > 0.02 * own.abs())
    return torch.where(other, weight * right, torch.inf)


def _stale(now: Inputs, old: Inputs, rows: torch.Tensor) -> torch.Tensor:
    """Stage 2 of this call on the hidden activation that an earlier call left at the same padded rows."""
    raw = _raw_rows(old)[now.valid_rows[rows]]
    answer = torch.full((len(rows), now.case.hidden), torch.inf, device=rows.device)
    x = old.stacked_expert_tokens[old.valid_rows[raw]].float()
    for (expert, mine), (other, theirs) in itertools.product(_experts(now, rows), _experts(old, raw.clamp_min(0))):
        both = mine & theirs & (raw >= 0)
        if both.any():
            left = _swiglu(x[both] @ old.gate_w[other].float().T, x[both] @ old.up_w[other].float().T)
            answer[both] = left @ now.down_w[expert].float().T * now.routed_expert_weights[rows[both], None].float()
    return answer


def _experts(inputs: Inputs, rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Each expert that owns some of the rows, and a mask (R,) of those."""
    ends = torch.tensor(inputs.layout.offsets[1:], device=rows.device)
    owner = torch.searchsorted(ends, rows, right=True)
    for expert in owner.unique().tolist():
        yield expert, owner == expert


def _in_group(inputs: Inputs) -> torch.Tensor:
    """Row inside its group of each raw row, (N,)."""
    return torch.cat([torch.arange(size, device=inputs.out.device) for size in inputs.layout.sizes])


def _raw_rows(inputs: Inputs) -> torch.Tensor:
    """Raw row that lives at each storage row, (P,); -1 for padding."""
    raw = torch.full((inputs.out.shape[0],), -1, dtype=torch.int64, device=inputs.out.device)
    raw[inputs.valid_rows] = torch.arange(inputs.layout.num_rows, device=raw.device)
    return raw


def _at(values: torch.Tensor, index: torch.Tensor, outside: float) -> torch.Tensor:
    """Values at an index, and what stands for those outside."""
    inside = (index >= 0) & (index < len(values))
    return torch.where(inside, values[index.clamp(0, max(0, len(values) - 1))], outside)


def _padding_cause(made: Made) -> str:
    """Why padding rows of ``out`` are not zero."""
    inputs, rows = made.inputs, made.comparison.padding_rows
    held, now = made.out_before[rows], made.out[rows]
    if bool(((now == held) | (now.isnan() & held.isnan())).all()):
        return "padding rows of out are left unwritten: right only where out arrives zeroed"
    if bool(now.isnan().any()):
        return (
            "padding rows are computed and stored, and NaN comes through: multiplying by a zero mask keeps NaN, select "
            "with `row < actual_rows` instead"
        )
    # As if every row were valid: then raw and storage rows are the same.
    offsets = inputs.layout.padded_offsets
    full = replace(inputs, layout=GroupedLayout(tuple(end - start for start, end in itertools.pairwise(offsets))))
    answer = _answers(replace(made, inputs=full), rows, factor=torch.ones(offsets[-1], device=rows.device))
    computed = _agreement(answer, now.float(), _SAME, bits=False) > _NAMED
    which = "computed like valid ones" if computed else "written"
    return f"padding rows are {which}: the store is not masked with actual_rows"


def pattern_of(made: Made) -> str | None:
    """Which rows and columns are wrong, if they form a pattern; one clause or None.

    Args:
        made: a call with wrong rows.
    """
    wrong, columns = made.comparison.wrong_rows, _wrong_columns(made)
    parts = [] if wrong.all() or not wrong.any() else [_rows_pattern(made.inputs, wrong)]
    if wrong.any() and not columns.all():
        listed = torch.nonzero(columns).flatten()
        first, final = int(listed[0]), int(listed[-1])
        whole = final - first + 1 == len(listed)
        parts.append(f"columns {first} to {final} only" if whole else _residue("columns", listed))
    return ", ".join(part for part in parts if part) or None


def _rows_pattern(inputs: Inputs, wrong: torch.Tensor) -> str | None:
    layout, block, in_group = inputs.layout, inputs.layout.block, _in_group(inputs)
    sizes = torch.tensor(layout.sizes, device=wrong.device)
    size = torch.repeat_interleave(sizes, sizes)
    last, in_block = in_group == size - 1, in_group % block
    patterns = {
        "the last row of each group": last,
        "the last row of each full block of 128": in_block == block - 1,
        "the last valid row of each block": last | (in_block == block - 1),
        "the first row of each group": in_group == 0,
        "rows from 128 on in each group: only its first block is computed": in_group >= block,
        "the first block of each group": in_group < block,
        "the last block of each group, the partly filled one": in_group >= size // block * block,
        "the upper half of each block, rows 64 to 127": in_block >= block // 2,
        "the lower half of each block, rows 0 to 63": in_block < block // 2,
    }
    experts = [expert for expert, _ in _experts(inputs, torch.nonzero(wrong).flatten())]
    if sum(layout.sizes[expert] for expert in experts) == int(wrong.sum()):
        named = f"the rows of expert{'s' * (len(experts) > 1)} {', '.join(map(str, experts))}"
    else:
        named = ""
    named = next((name for name, rows in patterns.items() if torch.equal(rows, wrong)), named)
    return f"exactly {named}" if named else _residue("rows", in_group[wrong])


def _residue(what: str, values: torch.Tensor) -> str | None:
    """The largest modulus under which all values are equal, if at least three of them say so."""
    for modulus in (64, 32, 16, 8, 4, 2) if values.numel() >= 3 else ():
        if bool((values % modulus == values[0] % modulus).all()):
            return f"{what} that are {int(values[0]) % modulus} modulo {modulus}"
    return None
