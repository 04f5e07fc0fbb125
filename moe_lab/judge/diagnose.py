"""Which usual mistake a wrong answer is: the one whose own answer agrees with ``out`` on the wrong rows.

Where none does, the pattern of the wrong rows and columns is described instead.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from moe_lab.judge.plan import WEIGHTS
from moe_lab.judge.session import Made
from moe_lab.problem.contract import data_dir
from moe_lab.problem.inputs import Inputs
from moe_lab.problem.layout import GroupedLayout

#: Relative Frobenius distance below which a row is what a mistake would have answered. Where the mistake is a
#: rounding, other roundings differ by no more than the larger figure.
_SAME, _SAME_ROUNDING = 5e-3, 8e-4
#: Part of the wrong rows that a mistake has to explain to be named, and to be named without "most of".
_NAMED, _SURE = 0.5, 0.97
_SPREAD = 0.2  # part of the rows that rounding has to harm before precision is blamed: a lost tile harms few
_FEW_ROWS = 3  # wrong rows whose answer a mistake has to explain with finite numbers
_MAX_ROWS = 128  # wrong rows in which a mistake is looked for, at most: a contest case has thousands
_CHUNKS = (16, 32, 64, 128, 256)  # of a reduction, that a loop over K may lose

#: Cause of a mistake to the options of :func:`_answers` that compute what it would answer.
Table = dict[str, dict[str, Any]]
#: Of gate and up, (rows, I) each.
Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: What usual mistakes make of gate and up instead of ``silu(gate) * up``.
_FORMULAS: dict[str, Formula] = {
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
    "sigmoid(2 * g) instead of sigmoid(g): the half in tanh(g / 2) is missing": lambda g, u: g * (2 * g).sigmoid() * u,
    "tanh instead of SiLU": lambda g, u: torch.tanh(g) * u,
}
#: Which part of H stays in the sum of stage 1, or of I in the sum of stage 2, for a chunk of so many.
_CUTS: dict[str, Callable[[int], slice]] = {
    "only the first {} are in the sum of stage {}": lambda chunk: slice(0, chunk),
    "only the last {} are in the sum of stage {}: the loop clears its accumulator": lambda chunk: slice(-chunk, None),
    "the last {} are missing from the sum of stage {}": lambda chunk: slice(0, -chunk),
    "the first {} are missing from the sum of stage {}": lambda chunk: slice(chunk, None),
}


def _eight_bits(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return (weight / scale).round() * scale


_ROUNDINGS: Table = {
    "the hidden activation is rounded to bf16": {"hidden": lambda g, u: (F.silu(g) * u).bfloat16().float()},
    "weights are rounded to bf16": {"rounded": lambda weight: weight.bfloat16().float()},
    "weights are rounded to 8 bits": {"rounded": _eight_bits},
}


class Mistake(NamedTuple):
    """One usual mistake."""

    cause: str  # the sentence that is shown, without a full stop
    answer: torch.Tensor  # what it would have answered, (R, H); infinite where unknown
    same: float = _SAME  # 0 where the answer is copied and not computed, so that only equal bits count


def cause_of(history: Sequence[Made]) -> str | None:
    """The usual mistake that explains the last of a group's calls so far: no full stop, and None if nothing fits."""
    made, result = history[-1], history[-1].comparison
    wrong = torch.nonzero(result.wrong_rows).flatten()
    if not wrong.numel():
        return _padding_cause(made)
    if wrong.numel() > _MAX_ROWS:
        wrong = wrong[torch.linspace(0, wrong.numel() - 1, _MAX_ROWS, device=wrong.device).long()]
    # Where whole columns are right, only the others can tell.
    columns = _wrong_columns(made)
    got = made.out[made.inputs.valid_rows[wrong]][:, columns].float()
    cause, explained = "", 0.0
    for mistake in _mistakes(history, wrong):
        share = _agreement(mistake.answer[:, columns], got, mistake.same)
        if share > explained + 0.01:
            cause, explained = mistake.cause, share
        if explained > _SURE:
            return cause
    if explained >= _NAMED:
        return f"{cause} (explains {explained:.0%} of the wrong rows)"
    if result.judge_rows.any() or result.row_error is None or result.wrong_rows.float().mean() < _SPREAD:
        return None
    return (
        f"less precision than fp16 somewhere: a row is off by up to {result.row_error:.2%} of its norm, where rounding "
        "to fp16 costs 0.04% and one rounding to bf16 0.16%"
    )


@functools.cache
def _remedies() -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads((data_dir() / "remedies.json").read_text(encoding="utf-8"))
    return rows


def remedy(cause: str, source: str) -> tuple[int | None, str]:
    """The line of a file that a cause is most likely about, from 1, and what to do there; None and "" if unknown."""
    row = next((row for row in _remedies() if re.search(row["cause"], cause)), None)
    if row is None:
        return None, ""
    code = [line.partition("#")[0] for line in source.splitlines()]
    places = [number for number, line in enumerate(code, start=1) if re.search(row["look_at"], line)]
    # What both stages have stands in their order.
    place = places[-1 if "stage 2" in cause else 0] if places else None
    return place, row["do"]


def _agreement(answer: torch.Tensor, got: torch.Tensor, same: float = _SAME) -> float:
    """Part of the rows that agree, of those where the answer is known; 0 if too few are known to tell.

    A mistake that reads past the end of an array is known on the other rows only, often the smaller part. One NaN is
    like another, so some of the rows that agree must be finite.
    """
    known = ~torch.isinf(answer).any(dim=1)
    if not known.any():
        return 0.0
    agree = known & ((answer == got) | (answer.isnan() & got.isnan())).all(dim=1)
    if same:
        distance = (answer - got).norm(dim=1)
        agree |= known & (distance <= same * answer.norm(dim=1) + 2.0**-24 * got.shape[1] ** 0.5)
        # Whole rows do not agree by chance, so three of them are enough.
        if int((agree & torch.isfinite(got).all(dim=1)).sum()) < min(_FEW_ROWS, len(got)):
            return 0.0
    return float(agree[known].float().mean())


def _wrong_columns(made: Made) -> torch.Tensor:
    """(H,) bool, columns with a wrong element, NaN among them, in a wrong row; all columns if there is none."""
    columns = (~(made.comparison.ratio[made.comparison.wrong_rows] <= 1)).any(dim=0)
    return columns if columns.any() else torch.ones_like(columns)


def _mistakes(history: Sequence[Made], rows: torch.Tensor) -> Iterator[Mistake]:
    """Every usual mistake with its answer at some raw rows (R,), the most telling first."""
    *earlier, now = history
    inputs = now.inputs
    # The call right before and the very first are the ones that a cache keeps.
    kept = list({id(old): old for old in [*earlier[-1:], *earlier[:1], *earlier[-2:-1]]}.values())

    def computed(table: Table, same: float = _SAME) -> Iterator[Mistake]:
        return (Mistake(cause, _answers(now, rows, **options), same) for cause, options in table.items())

    yield from _copied(history, kept, rows)
    yield from computed(_remembered(now, kept))
    yield from computed(_weighted(inputs))
    got, truth = now.out[inputs.valid_rows[rows]].float(), now.truth[rows]
    factor = (got * truth).sum(dim=1, keepdim=True) / truth.square().sum(dim=1, keepdim=True)
    # A row of zeros or NaN is a multiple of anything, and a row with its own weight has another fault.
    other = factor.isfinite() & (factor != 0) & ((factor - 1).abs() > 0.02)
    cause = "another route weight than the row's own: it is read at a wrong place, usually at the padded row"
    yield Mistake(cause, torch.where(other, factor * truth, torch.inf))
    yield from computed({cause: {"hidden": formula} for cause, formula in _FORMULAS.items()})
    yield from computed(_misplaced(inputs))
    stages = ((1, "hidden", inputs.case.hidden), (2, "intermediate", inputs.case.intermediate))
    for (stage, name, extent), (cause, kept_of), chunk in itertools.product(stages, _CUTS.items(), _CHUNKS):
        if chunk < extent:
            yield from computed({cause.format(f"{chunk} of {name}", stage): {f"stage_{stage}": kept_of(chunk)}})
    yield from computed(_ROUNDINGS, _SAME_ROUNDING)


def _copied(history: Sequence[Made], kept: Sequence[Made], rows: torch.Tensor) -> Iterator[Mistake]:
    """What is not computed, or computed right and then spoiled."""
    *earlier, now = history
    storage, truth = now.inputs.valid_rows, now.truth[rows]
    again = "the answer of call {} again{}: results are kept and replayed"
    for old in reversed(earlier):
        # The whole of out as an earlier call left it, padding included, which no wrong kernel hits by chance.
        same = old.out.shape == now.out.shape and torch.equal(old.out, now.out)
        if same and bool(now.out.any()) and not torch.equal(now.out, now.inputs.out):
            yield Mistake(again.format(old.number + 1, ""), old.out[storage[rows]].float(), same=0)
    before = now.inputs.out[storage[rows]].float()
    yield Mistake("not written, out still holds what it held before the call", before, same=0)
    yield Mistake("zero where a value is expected", torch.zeros_like(truth))
    found = now.out[storage[now.comparison.wrong_rows]].float().unique()
    if len(found) == 1 and bool(found.isfinite()):
        yield Mistake(f"the constant {float(found):g}", found.expand_as(truth))
    yield Mistake("added to what out held instead of replacing it", before + truth)
    for factor in (2.0, 0.5, -1.0):
        yield Mistake(f"{factor:g} times the right answer", factor * truth)
    for old in kept:
        if old.out.shape == now.out.shape:
            yield Mistake(again.format(old.number + 1, ""), old.out[storage[rows]].float())
        if old.truth.shape == now.truth.shape:
            yield Mistake(again.format(old.number + 1, ", row by row"), old.truth[rows])


def _remembered(made: Made, kept: Sequence[Made]) -> Table:
    """What a file answers that keeps something from an earlier call of the same shapes."""
    names = {"all weights": WEIGHTS, **{name: (name,) for name in WEIGHTS}}
    names |= {"the tokens": ("stacked_expert_tokens",), "the route weights": ("routed_expert_weights",)}
    table: Table = {}
    for old in kept:
        call = f"of call {old.number + 1}"
        for what, arguments in names.items():
            changes: dict[str, Any] = {name: getattr(old.inputs, name) for name in arguments}
            if all(value.shape == getattr(made.inputs, name).shape for name, value in changes.items()):
                cause = f"computed with {what} {call}: they are kept from an earlier call"
                table[cause] = {"inputs": replace(made.inputs, **changes)}
        if old.inputs.layout != made.inputs.layout and old.out.shape == made.out.shape:
            mixed = replace(made.inputs, layout=old.inputs.layout)
            cause = f"computed with the routing {call}: sizes or offsets are kept from an earlier call"
            table[cause] = {"inputs": mixed, "written": _raw_rows(mixed)}
    for old in kept:
        if old.out.shape == made.out.shape:
            left = f"a workspace that call {old.number + 1} left behind: stage 1 did not write it this time"
            table[f"computed from {left}"] = {"left": old.inputs}
    return table


def _weighted(inputs: Inputs) -> Table:
    """Another factor than the row's own route weight."""
    weights, in_group, block = inputs.routed_expert_weights.float(), _in_group(inputs), inputs.layout.block
    padded = torch.tensor(inputs.layout.raw_to_padded, dtype=torch.int64, device=weights.device)
    read = "the route weight is read"
    factors = {
        "the route weight is missing": torch.ones_like(weights),
        "the route weight is applied twice": weights.square(),
        f"{read} at the padded row; it lives at the raw row, group_offsets[e] + row": _at(weights, padded, torch.inf),
        f"{read} at the row inside its group: group_offsets[e] is missing": weights[in_group],
        f"{read} at the row inside its block of {block}": weights[in_group % block],
        f"{read} one row off (+1)": weights.roll(-1),
        f"{read} one row off (-1)": weights.roll(1),
    }
    if inputs.routed_expert_weights.dtype == torch.float32:
        halves = inputs.routed_expert_weights.view(torch.float16).float()
        factors["the fp32 route weights are read as fp16"] = halves
    return {cause: {"factor": factor} for cause, factor in factors.items()}


def _misplaced(inputs: Inputs) -> Table:
    """Experts, tokens, results and matrices at a wrong place."""
    own, raw = torch.arange(inputs.layout.num_experts), _raw_rows(inputs)
    rows = torch.arange(len(raw), device=raw.device)
    table: Table = {}
    for which, others in (("next", own.roll(-1)), ("previous", own.roll(1))):
        table[f"the {which} expert's weights are used"] = {"experts": dict.fromkeys(WEIGHTS, others)}
        table |= {f"the {which} expert's {name} is used": {"experts": {name: others}} for name in WEIGHTS}
    table["expert 0 is used for every row"] = {"experts": dict.fromkeys(WEIGHTS, own * 0)}
    read = {
        "at raw rows; they live at padded rows, group_padded_offsets[e] + row": raw,
        "one row off (+1)": rows.roll(-1),
        "one row off (-1)": rows.roll(1),
    }
    table |= {f"the tokens are read {where}": {"read": storage} for where, storage in read.items()}
    written = {"to raw rows of out instead of padded rows": torch.where(rows < inputs.layout.num_rows, rows, -1)}
    for distance, name in ((1, "one row"), (inputs.layout.block, "one block")):
        written[f"{name} too far"] = _at(raw, rows - distance, -1)
        written[f"{name} too early"] = _at(raw, rows + distance, -1)
    table |= {f"the result is written {where}": {"written": landed} for where, landed in written.items()}
    matrices = {
        "down_w is read transposed: it is (E, hidden, intermediate)": WEIGHTS[2:],
        "gate_w and up_w are read transposed: they are (E, intermediate, hidden)": WEIGHTS[:2],
    }
    for cause, names in matrices.items():
        # The memory of each matrix, read as if rows were columns.
        weights = [(name, getattr(inputs, name)) for name in names]
        views: dict[str, Any] = {name: weight.reshape(weight.mT.shape).mT for name, weight in weights}
        table[cause] = {"inputs": replace(inputs, **views)}
    return table


def _answers(
    made: Made, rows: torch.Tensor, *,
    inputs: Inputs | None = None,  # instead of the call's
    left: Inputs | None = None,  # of an earlier call, whose hidden activation is found at the same storage rows
    hidden: Formula = lambda g, u: F.silu(g) * u,
    experts: Mapping[str, torch.Tensor] = MappingProxyType({}),  # by weight: the expert used for each instead, (E,)
    rounded: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float,  # what a matrix of weights becomes
    stage_1: slice = slice(None), stage_2: slice = slice(None),  # which part of H and of I is in the sum
    read: torch.Tensor | None = None,  # (P,) storage row of the tokens that is read instead of each
    factor: torch.Tensor | None = None,  # (N,) instead of the route weights
    written: torch.Tensor | None = None,  # (P,) raw row whose answer goes to a storage row of ``out``, -1 for none
) -> torch.Tensor:  # fmt: skip
    """What is found at raw rows (R,), (R, H) fp32, after one mistake; without one the right answer."""
    inputs = inputs or made.inputs
    storage = made.inputs.valid_rows[rows]
    raw = rows if written is None else written[storage]
    source = raw.clamp_min(0)

    def product(x: torch.Tensor, name: str, of: Inputs, raw_rows: torch.Tensor, part: slice) -> torch.Tensor:
        """Rows (R, K) times the transposed weights of their experts."""
        weights = getattr(of, name)
        result = torch.empty(len(x), weights.shape[1], device=x.device)
        for expert, mine in _experts(of, raw_rows):
            weight = weights[int(experts[name][expert]) if name in experts else expert]
            result[mine] = x[mine][:, part] @ rounded(weight.float())[:, part].T
        return result

    first, owned = (left, _raw_rows(left)[storage]) if left else (inputs, source)
    unknown, owned = owned < 0, owned.clamp_min(0)
    place = first.valid_rows[owned]
    x = first.stacked_expert_tokens[place if read is None else read[place]].float()
    h = hidden(product(x, "gate_w", first, owned, stage_1), product(x, "up_w", first, owned, stage_1))
    answer = product(h, "down_w", inputs, source, stage_2)
    answer *= (inputs.routed_expert_weights if factor is None else factor)[source, None].float()
    answer[unknown] = torch.inf
    return torch.where(raw[:, None] < 0, made.inputs.out[storage].float(), answer)


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
    held, now = made.inputs.out[rows], made.out[rows]
    if bool(((now == held) | (now.isnan() & held.isnan())).all()):
        return "padding rows of out are left unwritten: right only where out arrives zeroed"
    if bool(now.isnan().any()):
        how = "multiplying by a zero mask keeps NaN, select with `row < actual_rows` instead"
        return f"padding rows are computed and stored, and NaN comes through: {how}"
    # As if every row were valid: then raw and storage rows are the same.
    offsets = inputs.layout.padded_offsets
    full = replace(inputs, layout=GroupedLayout(tuple(end - start for start, end in itertools.pairwise(offsets))))
    answer = _answers(replace(made, inputs=full), rows, factor=torch.ones(offsets[-1], device=rows.device))
    which = "computed like valid ones" if _agreement(answer, now.float()) > _NAMED else "written"
    return f"padding rows are {which}: the store is not masked with actual_rows"


def pattern_of(made: Made) -> str | None:
    """Which rows and columns of a call are wrong, if they form a pattern; one clause or None."""
    wrong, columns, parts = made.comparison.wrong_rows, _wrong_columns(made), []
    if not wrong.any():
        return None
    if not wrong.all():
        parts.append(_rows_pattern(made.inputs, wrong))
    if not columns.all():
        listed = torch.nonzero(columns).flatten()
        first, final = int(listed[0]), int(listed[-1])
        whole = final - first + 1 == len(listed)
        parts.append(f"columns {first} to {final} only" if whole else _residue("columns", listed))
    return ", ".join(filter(None, parts)) or None


def _rows_pattern(inputs: Inputs, wrong: torch.Tensor) -> str | None:
    sizes, block, in_group = torch.tensor(inputs.layout.sizes), inputs.layout.block, _in_group(inputs)
    size = torch.repeat_interleave(sizes, sizes).to(wrong.device)
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
    if int(sizes[experts].sum()) == int(wrong.sum()):
        patterns[f"the rows of expert{'s' * (len(experts) > 1)} {', '.join(map(str, experts))}"] = wrong
    named = next((f"exactly {name}" for name, rows in patterns.items() if torch.equal(rows, wrong)), None)
    return named or _residue("rows", in_group[wrong])


def _residue(what: str, values: torch.Tensor) -> str | None:
    """The largest modulus under which all values are equal, if at least three of them say so."""
    for modulus in (64, 32, 16, 8, 4, 2) if values.numel() >= 3 else ():
        if bool((values % modulus == values[0] % modulus).all()):
            return f"{what} that are {int(values[0]) % modulus} modulo {modulus}"
    return None
