"""Which usual mistake a wrong answer is.

The judge computes what each usual mistake would have answered and looks for the one that agrees with ``out`` on the
wrong rows. Where none does, the pattern of the wrong rows and columns is described instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from moe_lab.judge.session import Made
from moe_lab.problem.inputs import Inputs

#: As :attr:`Hypothesis.same`, where the mistake is a rounding: other roundings differ by no more than 5e-3.
_SAME_ROUNDING = 8e-4
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

_LOG2_E = 1.44269504
#: (rows, H) tokens, then gate_w, up_w (I, H) and down_w (H, I) of one expert to (rows, H) before the route weight.
_Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Hypothesis:
    """One usual mistake.

    Attributes:
        cause: the sentence that is shown, without a full stop.
        answer: raw row numbers (R,) to what the mistake would have answered there, (R, H) fp32; infinite where
            unknown.
        same: relative Frobenius distance below which a row is what this mistake would have answered.
        bits: whether the answer is copied and not computed, so that only equal bits count.
    """

    cause: str
    answer: Callable[[torch.Tensor], torch.Tensor]
    same: float = 5e-3
    bits: bool = False


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
    got = made.out[made.inputs.valid_rows[wrong]].float()
    # Where whole columns are right, only the others can tell.
    columns = _wrong_columns(made)
    best, explained = None, 0.0
    for hypothesis in _hypotheses(history):
        answer = hypothesis.answer(wrong)[:, columns]
        share = _agreement(answer, got[:, columns], hypothesis.same, bits=hypothesis.bits)
        if share > explained + 0.01:
            best, explained = hypothesis, share
        if explained > _SURE:
            break
    if best is None or explained < _NAMED:
        return _precision(made)
    return best.cause if explained > _SURE else f"{best.cause} (explains {explained:.0%} of the wrong rows)"


def _precision(made: Made) -> str | None:
    """What to say of an answer that is a little wrong everywhere."""
    result = made.comparison
    if result.judge_rows.any() or result.row_error is None or result.wrong_rows.float().mean() < _SPREAD:
        return None
    return (
        f"less precision than fp16 somewhere: a row is off by up to {result.row_error:.2%} of its norm, where rounding "
        "to fp16 costs 0.04% and one rounding to bf16 0.16%"
    )


def _rows_of(answers: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return answers.__getitem__


def _agreement(answer: torch.Tensor, got: torch.Tensor, same: float = 5e-3, *, bits: bool = False) -> float:
    """Part of the rows that agree, of those where the answer is known; 0 if too few are known to tell.

    A mistake that reads past the end of an array is known on the other rows only, often the smaller part. One NaN is
    like another, so some of the rows that agree must be finite.

    Args:
        answer, got: (R, H) fp32; a row of the answer is unknown where it is infinite.
        same: relative Frobenius distance below which a row agrees.
        bits: whether only equal bits agree, NaN among them.
    """
    known = ~torch.isinf(answer).any(dim=1)
    if not known.any():
        return 0.0
    equal = ((answer == got) | (answer.isnan() & got.isnan())).all(dim=1)
    if bits:
        return float(equal[known].float().mean())
    distance = (answer - got).norm(dim=1)
    agree = known & (equal | (distance <= same * answer.norm(dim=1) + 2.0**-24 * got.shape[1] ** 0.5))
    # Whole rows do not agree by chance, so three of them are enough.
    enough = int((agree & torch.isfinite(got).all(dim=1)).sum()) >= min(_FEW_ROWS, len(got))
    return float(agree[known].float().mean()) if enough else 0.0


def _wrong_columns(made: Made) -> torch.Tensor:
    """(H,) bool, columns with a wrong element in a wrong row."""
    ratio = torch.nan_to_num(made.comparison.ratio[made.comparison.wrong_rows], nan=torch.inf)
    columns = (ratio > 1).any(dim=0)
    return columns if columns.any() else torch.ones_like(columns)


def _hypotheses(history: Sequence[Made]) -> Iterator[Hypothesis]:
    """Every usual mistake, the most telling first."""
    made = history[-1]
    yield from _replayed(history)
    yield from _unwritten(made)
    yield from _remembered(history)
    yield from _route_weights(made.inputs)
    yield _some_weight(made)
    yield from _formulas(made.inputs)
    yield from _indices(made)
    yield from _reductions(made.inputs)
    yield from _roundings(made.inputs)


def _replayed(history: Sequence[Made]) -> Iterator[Hypothesis]:
    """The whole of ``out`` as an earlier call left it, padding included, which no wrong kernel hits by chance."""
    made = history[-1]
    for old in reversed(history[:-1]):
        same = old.out.shape == made.out.shape and torch.equal(old.out, made.out)
        if same and bool(made.out.any()) and not torch.equal(made.out, made.out_before):
            rows = old.out[made.inputs.valid_rows].float()
            cause = f"the answer of call {old.number + 1} again: results are kept and replayed"
            yield Hypothesis(cause, rows.__getitem__, bits=True)


def _unwritten(made: Made) -> Iterator[Hypothesis]:
    storage = made.inputs.valid_rows
    before = made.out_before[storage].float()
    yield Hypothesis("not written, out still holds what it held before the call", before.__getitem__, bits=True)
    yield Hypothesis("zero where a value is expected", lambda rows: torch.zeros_like(made.truth[rows]))
    constant = made.out[storage[made.comparison.wrong_rows]].float().flatten()
    if constant.numel() and bool(torch.isfinite(constant).all()) and bool((constant == constant[0]).all()):
        value = float(constant[0])
        yield Hypothesis(f"the constant {value:g}", lambda rows: torch.full_like(made.truth[rows], value))
    yield Hypothesis("added to what out held instead of replacing it", lambda rows: before[rows] + made.truth[rows])
    for factor in (2.0, 0.5, -1.0):
        yield Hypothesis(f"{factor:g} times the right answer", _rows_of(factor * made.truth))


def _remembered(history: Sequence[Made]) -> Iterator[Hypothesis]:
    """What a file answers that keeps something from an earlier call of the same shapes."""
    made, earlier = history[-1], list(history[:-1])
    now = made.inputs
    storage = now.valid_rows
    # The call right before and the very first are the ones that a cache keeps.
    kept = list({id(item): item for item in [*earlier[-1:], *earlier[:1], *earlier[-2:-1]]}.values())
    for old in kept:
        if old.out.shape == made.out.shape:
            yield Hypothesis(
                f"the answer of call {old.number + 1} again: results are kept and replayed",
                _rows_of(old.out[storage].float()),
            )
        if old.truth.shape == made.truth.shape:
            yield Hypothesis(
                f"the answer of call {old.number + 1} again, row by row: results are kept and replayed",
                _rows_of(old.truth),
            )
    names = {
        "all weights": ("gate_w", "up_w", "down_w"), "gate_w": ("gate_w",), "up_w": ("up_w",), "down_w": ("down_w",),
        "the tokens": ("stacked_expert_tokens",), "the route weights": ("routed_expert_weights",),
    }  # fmt: skip
    for old in kept:
        for what, arguments in names.items():
            changes = {name: getattr(old.inputs, name) for name in arguments}
            if all(changes[name].shape == getattr(now, name).shape for name in arguments):
                yield Hypothesis(
                    f"computed with {what} of call {old.number + 1}: they are kept from an earlier call",
                    partial(_answers, replace(now, **changes)),
                )
        if old.inputs.layout != now.layout and old.inputs.layout.num_padded_rows == now.layout.num_padded_rows:
            yield Hypothesis(
                f"computed with the routing of call {old.number + 1}: sizes or offsets are kept from an earlier call",
                partial(_with_layout_of, made, old.inputs),
            )
        if old.inputs.layout.num_padded_rows == now.layout.num_padded_rows:
            yield Hypothesis(
                f"computed from a workspace that call {old.number + 1} left behind: stage 1 did not write it this time",
                partial(_stale_hidden, now, old.inputs),
            )


def _route_weights(inputs: Inputs) -> Iterator[Hypothesis]:
    layout, weights = inputs.layout, inputs.routed_expert_weights.float()
    device = weights.device
    padded = torch.tensor(layout.raw_to_padded, dtype=torch.int64, device=device)
    in_group = torch.cat([torch.arange(size, device=device) for size in layout.sizes])

    def weighted(cause: str, factor: Callable[[torch.Tensor], torch.Tensor]) -> Hypothesis:
        return Hypothesis(cause, lambda rows: _unweighted(inputs, rows) * factor(rows)[:, None])

    def at(index: torch.Tensor) -> torch.Tensor:
        """Weight at an index, unknown outside."""
        inside = (index >= 0) & (index < len(weights))
        return torch.where(inside, weights[index.clamp(0, max(0, len(weights) - 1))], torch.inf)

    yield weighted("the route weight is missing", lambda rows: torch.ones(len(rows), device=device))
    yield weighted("the route weight is applied twice", lambda rows: weights[rows].square())
    yield weighted(
        "the route weight is read at the padded row; it lives at the raw row, group_offsets[e] + row",
        lambda rows: at(padded[rows]),
    )
    yield weighted(
        "the route weight is read at the row inside its group: group_offsets[e] is missing",
        lambda rows: at(in_group[rows]),
    )
    yield weighted(
        "the route weight is read at the row inside its block of 128", lambda rows: at(in_group[rows] % layout.block)
    )
    for shift in (1, -1):
        moved = weights.roll(-shift)
        yield weighted(f"the route weight is read one row off ({shift:+d})", partial(torch.index_select, moved, 0))
    if inputs.routed_expert_weights.dtype == torch.float32 and len(weights):
        halves = inputs.routed_expert_weights.view(torch.float16).float()
        yield weighted("the fp32 route weights are read as fp16", lambda rows: halves[rows])


def _some_weight(made: Made) -> Hypothesis:
    """Whatever weight a row got: all of it is one multiple of the right answer, which nothing else looks like."""

    def answer(rows: torch.Tensor) -> torch.Tensor:
        right = _unweighted(made.inputs, rows)
        got = made.out[made.inputs.valid_rows[rows]].float()
        weight = (got * right).sum(dim=1, keepdim=True) / right.square().sum(dim=1, keepdim=True)
        own = made.inputs.routed_expert_weights[rows, None].float()
        # A row of zeros or NaN is a multiple of anything, and a row with its own weight has another fault.
        other = torch.isfinite(weight) & (weight != 0) & ((weight - own).abs() > 0.02 * own.abs())
        return torch.where(other, weight * right, torch.inf)

    return Hypothesis(
        "another route weight than the row's own: it is read at a wrong place, usually at the padded row", answer
    )


def _formulas(inputs: Inputs) -> Iterator[Hypothesis]:
    def formula(cause: str, hidden: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Hypothesis:
        def compute(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            return hidden(x @ gate.T, x @ up.T) @ down.T

        return Hypothesis(cause, lambda rows: _answers(inputs, rows, compute))

    yield formula("gate and up are swapped: silu belongs to the gate", lambda g, u: F.silu(u) * g)
    yield formula("SiLU is missing", lambda g, u: g * u)
    yield formula("sigmoid instead of SiLU: the factor g is missing", lambda g, u: torch.sigmoid(g) * u)
    yield formula("the up projection is missing", lambda g, u: F.silu(g))
    yield formula("the gate projection is missing", lambda g, u: u)
    yield formula("silu is applied to the product instead of the gate", lambda g, u: F.silu(g * u))
    yield formula("exp2 is used without the factor log2(e) = 1.44269504", lambda g, u: g / (1 + torch.exp2(-g)) * u)
    yield formula("the sign in the sigmoid is wrong", lambda g, u: g * torch.sigmoid(-g) * u)
    yield formula("gate and up are added instead of multiplied", lambda g, u: F.silu(g) + u)
    yield formula("gate stands in for up as well", lambda g, u: F.silu(g) * g)
    yield formula("up stands in for gate as well", lambda g, u: F.silu(u) * u)
    yield formula("GELU instead of SiLU", lambda g, u: F.gelu(g) * u)
    yield formula("ReLU instead of SiLU", lambda g, u: F.relu(g) * u)
    yield formula("hard swish instead of SiLU", lambda g, u: F.hardswish(g) * u)
    yield formula("sigmoid(1.702 * g), a fast GELU, instead of SiLU", lambda g, u: g * torch.sigmoid(1.702 * g) * u)
    yield formula(
        "sigmoid(2 * g) instead of sigmoid(g): the half in tanh(g / 2) is missing",
        lambda g, u: g * torch.sigmoid(2 * g) * u,
    )
    yield formula("tanh instead of SiLU", lambda g, u: torch.tanh(g) * u)


def _indices(made: Made) -> Iterator[Hypothesis]:
    inputs, layout = made.inputs, made.inputs.layout
    experts = layout.num_experts
    for shift in (1, -1):
        which = "next" if shift > 0 else "previous"
        others = [(expert + shift) % experts for expert in range(experts)]
        yield Hypothesis(
            f"the {which} expert's weights are used", partial(_answers, inputs, expert_of=others.__getitem__)
        )
        for name in ("gate_w", "up_w", "down_w"):
            rolled: dict[str, Any] = {name: getattr(inputs, name).roll(-shift, 0)}
            yield Hypothesis(f"the {which} expert's {name} is used", partial(_answers, replace(inputs, **rolled)))
    yield Hypothesis("expert 0 is used for every row", partial(_answers, inputs, expert_of=([0] * experts).__getitem__))
    tokens = inputs.stacked_expert_tokens
    compact = tokens.clone()
    compact[inputs.valid_rows] = tokens[: layout.num_rows]
    yield Hypothesis(
        "the tokens are read at raw rows; they live at padded rows, group_padded_offsets[e] + row",
        partial(_answers, replace(inputs, stacked_expert_tokens=compact)),
    )
    for shift in (1, -1):
        yield Hypothesis(
            f"the tokens are read one row off ({shift:+d})",
            partial(_answers, replace(inputs, stacked_expert_tokens=tokens.roll(-shift, 0))),
        )
    yield Hypothesis(
        "the result is written to raw rows of out instead of padded rows", lambda rows: _compact(made, rows)
    )
    for distance, name in ((1, "one row"), (layout.block, "one block")):
        for sign, direction in ((-1, "far"), (1, "early")):
            yield Hypothesis(
                f"the result is written {name} too {direction}",
                lambda rows, shift=sign * distance: _shifted(made, inputs.valid_rows[rows], shift),  # type: ignore[misc]
            )
    hidden, intermediate = inputs.case.hidden, inputs.case.intermediate

    def read_as(cause: str, **weights: Any) -> Hypothesis:
        return Hypothesis(cause, partial(_answers, replace(inputs, **weights)))

    # The memory of an (A, B) matrix read as if it were (B, A).
    def transposed(weights: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return weights.reshape(experts, columns, rows).transpose(1, 2)

    yield read_as(
        "down_w is read transposed: it is (E, hidden, intermediate)",
        down_w=transposed(inputs.down_w, hidden, intermediate),
    )
    yield read_as(
        "gate_w and up_w are read transposed: they are (E, intermediate, hidden)",
        gate_w=transposed(inputs.gate_w, intermediate, hidden), up_w=transposed(inputs.up_w, intermediate, hidden),
    )  # fmt: skip


def _reductions(inputs: Inputs) -> Iterator[Hypothesis]:
    for name, stage, extent in (
        ("hidden", "stage 1", inputs.case.hidden), ("intermediate", "stage 2", inputs.case.intermediate),
    ):  # fmt: skip
        chunks = [chunk for chunk in _CHUNKS if chunk < extent]
        found: list[tuple[str, slice]] = []
        for chunk in chunks:
            found += [
                (f"only the first {chunk} of {name} are in the sum of {stage}", slice(0, chunk)),
                (
                    f"only the last {chunk} of {name} are in the sum of {stage}: the loop clears its accumulator",
                    slice(extent - chunk, extent),
                ),
            ]
        found += [
            (f"the {part} {chunk} of {name} are missing from the sum of {stage}", kept)
            for chunk in chunks
            for part, kept in (("last", slice(0, extent - chunk)), ("first", slice(chunk, extent)))
        ]
        for cause, kept in found:
            yield Hypothesis(cause, partial(_answers, inputs, formula=_cut(name, kept)))


def _roundings(inputs: Inputs) -> Iterator[Hypothesis]:
    def bf16(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.bfloat16().float()

    def eight_bits(tensor: torch.Tensor) -> torch.Tensor:
        scale = tensor.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
        return (tensor / scale).round() * scale

    def rounded(cause: str, weight: Callable[[torch.Tensor], torch.Tensor], hidden: bool) -> Hypothesis:
        def compute(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            h = F.silu(x @ weight(gate).T) * (x @ weight(up).T)
            return (bf16(h) if hidden else h) @ weight(down).T

        return Hypothesis(cause, lambda rows: _answers(inputs, rows, compute), _SAME_ROUNDING)

    same: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor  # noqa: E731
    yield rounded("the hidden activation is rounded to bf16", same, hidden=True)
    yield rounded("weights are rounded to bf16", bf16, hidden=False)
    yield rounded("weights are rounded to 8 bits", eight_bits, hidden=False)


def _answers(
    inputs: Inputs, rows: torch.Tensor, formula: _Formula | None = None,
    expert_of: Callable[[int], int] = lambda expert: expert,
) -> torch.Tensor:  # fmt: skip
    """The answer at some raw rows, (R, H) fp32, with another formula or other experts."""
    return _unweighted(inputs, rows, formula, expert_of) * inputs.routed_expert_weights[rows, None].float()


def _unweighted(
    inputs: Inputs, rows: torch.Tensor, formula: _Formula | None = None,
    expert_of: Callable[[int], int] = lambda expert: expert,
) -> torch.Tensor:  # fmt: skip
    formula = formula or _right
    storage = inputs.valid_rows[rows]
    owner = _owners(inputs)[rows]
    answer = torch.empty(len(rows), inputs.case.hidden, device=rows.device)
    for expert in owner.unique().tolist():
        mine = owner == expert
        used = expert_of(expert)
        weights = (inputs.gate_w[used].float(), inputs.up_w[used].float(), inputs.down_w[used].float())
        answer[mine] = formula(inputs.stacked_expert_tokens[storage[mine]].float(), *weights)
    return answer


def _right(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _cut(name: str, kept: slice) -> _Formula:
    def compute(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        if name == "hidden":
            x, gate, up = x[:, kept], gate[:, kept], up[:, kept]
        h = F.silu(x @ gate.T) * (x @ up.T)
        return h[:, kept] @ down[:, kept].T if name == "intermediate" else h @ down.T

    return compute


def _owners(inputs: Inputs) -> torch.Tensor:
    """Expert of each raw row, (N,)."""
    sizes = torch.tensor(inputs.layout.sizes, device=inputs.out.device)
    return torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)


def _in_storage(inputs: Inputs) -> torch.Tensor:
    """Raw row that lives at each storage row, (P,); -1 for padding."""
    raw = torch.full((inputs.out.shape[0],), -1, dtype=torch.int64, device=inputs.out.device)
    raw[inputs.valid_rows] = torch.arange(inputs.layout.num_rows, device=raw.device)
    return raw


def _at_storage(inputs: Inputs, storage: torch.Tensor) -> torch.Tensor:
    """The right answer of whatever row lives at some storage rows; unknown for padding and outside."""
    lookup = _in_storage(inputs)
    inside = (storage >= 0) & (storage < len(lookup))
    raw = torch.where(inside, lookup[storage.clamp(0, len(lookup) - 1)], -1)
    answer = _answers(inputs, raw.clamp_min(0))
    answer[raw < 0] = torch.inf
    return answer


def _shifted(made: Made, storage: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """What is found at storage rows if each holds the answer of the row that lies ``shift`` further on."""
    answer = _at_storage(made.inputs, storage + shift)
    unwritten = torch.isinf(answer).any(dim=1)
    answer[unwritten] = made.out_before[storage[unwritten]].float()
    return answer


def _compact(made: Made, rows: torch.Tensor) -> torch.Tensor:
    """What is found at padded rows if raw row i is written to row i of out."""
    inputs = made.inputs
    storage = inputs.valid_rows[rows]
    written = storage < inputs.layout.num_rows
    answer = made.out_before[storage].float()
    answer[written] = _answers(inputs, storage[written])
    return answer


def _stale_hidden(now: Inputs, old: Inputs, rows: torch.Tensor) -> torch.Tensor:
    """Stage 2 of this call on the hidden activation that an earlier call left at the same padded rows."""
    raw = _in_storage(old)[now.valid_rows[rows]]
    mine, theirs = _owners(now)[rows], _owners(old)[raw.clamp_min(0)]
    answer = torch.full((len(rows), now.case.hidden), torch.inf, device=rows.device)
    for expert, other in {(int(a), int(b)) for a, b, c in zip(mine, theirs, raw, strict=True) if c >= 0}:
        both = (mine == expert) & (theirs == other) & (raw >= 0)
        x = old.stacked_expert_tokens[old.valid_rows[raw[both]]].float()
        left = F.silu(x @ old.gate_w[other].float().T) * (x @ old.up_w[other].float().T)
        answer[both] = left @ now.down_w[expert].float().T * now.routed_expert_weights[rows[both], None].float()
    return answer


def _with_layout_of(made: Made, old: Inputs, rows: torch.Tensor) -> torch.Tensor:
    """This call's tensors, cut into groups as an earlier call was; rows that belonged to no group are not written."""
    mixed = replace(
        made.inputs, layout=old.layout, group_sizes=old.group_sizes, group_offsets=old.group_offsets,
        group_padded_offsets=old.group_padded_offsets, group_idx_for_bx=old.group_idx_for_bx,
    )  # fmt: skip
    return _shifted(replace(made, inputs=mixed), made.inputs.valid_rows[rows])


def _padding_cause(made: Made) -> str:
    """Why padding rows of ``out`` are not zero."""
    inputs, rows = made.inputs, made.comparison.padding_rows
    held = made.out_before[rows]
    now = made.out[rows]
    if bool(((now == held) | (now.isnan() & held.isnan())).all()):
        return "padding rows of out are left unwritten: right only where out arrives zeroed"
    if bool(now.isnan().any()):
        return (
            "padding rows are computed and stored, and NaN comes through: multiplying by a zero mask keeps NaN, select "
            "with `row < actual_rows` instead"
        )
    layout = inputs.layout
    owner = [layout.block_map[int(row) // layout.block] for row in rows]
    x = inputs.stacked_expert_tokens[rows].float()
    answer = torch.stack(
        [
            _right(x[i : i + 1], *(w[e].float() for w in (inputs.gate_w, inputs.up_w, inputs.down_w)))[0]
            for i, e in enumerate(owner)
        ]
    )
    if _agreement(answer, now.float()) > _NAMED:
        return "padding rows are computed like valid ones: the store is not masked with actual_rows"
    return "padding rows are written: the store is not masked with actual_rows"


def pattern_of(made: Made) -> str | None:
    """Which rows and columns are wrong, if they form a pattern; one clause or None.

    Args:
        made: a call with wrong rows.
    """
    inputs, layout = made.inputs, made.inputs.layout
    wrong = made.comparison.wrong_rows.cpu()
    if not wrong.any():
        return None
    owner = _owners(inputs).cpu()
    in_group = torch.cat([torch.arange(size) for size in layout.sizes])
    last = in_group == torch.tensor(layout.sizes)[owner] - 1
    parts = []
    experts = owner[wrong].unique()
    rows_patterns: list[tuple[str, torch.Tensor]] = [
        ("the last row of each group", last),
        ("the last row of each full block of 128", in_group % layout.block == layout.block - 1),
        ("the last valid row of each block", last | (in_group % layout.block == layout.block - 1)),
        ("the first row of each group", in_group == 0),
        ("rows from 128 on in each group: only its first block is computed", in_group >= layout.block),
        ("the first block of each group", in_group < layout.block),
        (
            "the last block of each group, the partly filled one",
            _tail_block(layout.sizes, owner, in_group, layout.block),
        ),
        ("the upper half of each block, rows 64 to 127", in_group % layout.block >= layout.block // 2),
        ("the lower half of each block, rows 0 to 63", in_group % layout.block < layout.block // 2),
    ]
    everything = bool(wrong.all())
    named = next((name for name, rows in rows_patterns if torch.equal(rows, wrong)), None)
    if named and not everything:
        parts.append(f"exactly {named}")
    elif not everything and torch.equal(torch.isin(owner, experts), wrong):
        listed = ", ".join(map(str, experts.tolist()))
        parts.append(f"exactly the rows of expert{'s' if len(experts) > 1 else ''} {listed}")
    elif not everything:
        residue = _residue(in_group[wrong], (64, 32, 16, 8, 4, 2))
        if residue:
            parts.append(f"rows that are {residue[1]} modulo {residue[0]}")
    columns = _wrong_columns(made).cpu()
    if columns.any() and not columns.all():
        listed_columns = torch.nonzero(columns).flatten()
        first, final = int(listed_columns[0]), int(listed_columns[-1])
        residue = _residue(listed_columns, (64, 32, 16, 8, 4, 2))
        if final - first + 1 == len(listed_columns):
            parts.append(f"columns {first} to {final} only")
        elif residue:
            parts.append(f"columns that are {residue[1]} modulo {residue[0]}")
    return ", ".join(parts) or None


def _tail_block(sizes: Sequence[int], owner: torch.Tensor, in_group: torch.Tensor, block: int) -> torch.Tensor:
    full = torch.tensor([size // block * block for size in sizes])
    return in_group >= full[owner]


def _residue(values: torch.Tensor, moduli: Sequence[int]) -> tuple[int, int] | None:
    """The largest modulus under which all values are equal, if at least three of them say so."""
    if values.numel() < 3:
        return None
    for modulus in moduli:
        left = values % modulus
        if bool((left == left[0]).all()):
            return modulus, int(left[0])
    return None
