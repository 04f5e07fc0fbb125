"""Comparing one call's ``out`` with the truth, on every row, under two tolerances.

The contest's own tolerance (0.05 absolute and relative) passes a kernel that drops low bits or, on small values, one
that returns zeros. The strict bound has no scale of its own: a row may differ from the truth by what rounding to fp16
explains, measured by the row's own norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_lab.contract import JUDGE_TOLERANCE
from moe_lab.inputs import Inputs
from moe_lab.judge.verdict import Failure

#: Unit roundoff of fp16 and half its smallest step.
_FP16_ROUNDOFF = 2.0**-11
_FP16_HALF_STEP = 2.0**-25
#: Roundings to fp16 that an honest kernel may add up along the way: gate, up, their product, the result, twice over.
_ROUNDINGS = 8
_FP32_ROUNDOFF = 2.0**-24
#: An element may leave the row's root mean square error this far behind: five standard deviations and some tail.
_ELEMENT_FACTOR = 8.0


@dataclass(frozen=True)
class Comparison:
    """One call against the truth.

    Attributes:
        max_abs_error: largest |out - truth|; None if something is not finite.
        judge_ratio: largest error over what the contest's tolerance allows; None as above.
        row_error: largest relative Frobenius error of a row that is large enough to have one; None as above.
        strict_ratio: largest error over the strict bound; None as above.
        wrong_rows: (N,) bool, rows that fail either tolerance.
        judge_rows: (N,) bool, rows that fail the contest's tolerance.
        padding_rows: padded rows that should be zero and are not, (K,) int64.
        ratio: (N, H) error over the strict bound of an element; NaN where not finite.
    """

    max_abs_error: float | None
    judge_ratio: float | None
    row_error: float | None
    strict_ratio: float | None
    wrong_rows: torch.Tensor
    judge_rows: torch.Tensor
    padding_rows: torch.Tensor
    ratio: torch.Tensor

    @property
    def passed(self) -> bool:
        """Every valid row inside both tolerances and every padding row zero."""
        return not self.wrong_rows.any() and self.padding_rows.numel() == 0


def row_bound(inputs: Inputs, truth: torch.Tensor) -> torch.Tensor:
    """What a row of the result may differ by, as a Frobenius norm, (N,) fp32.

    Rounding to fp16 gives a relative part; fp32 accumulation over H and then I adds its own; values below fp16's
    normal range lose a constant half step each, in the hidden activation (carried through ``down_w``) and in ``out``.

    Args:
        inputs: of the call.
        truth: (N, H) fp32.
    """
    case = inputs.case
    relative = _ROUNDINGS * _FP16_ROUNDOFF + (case.hidden + case.intermediate) * _FP32_ROUNDOFF
    sizes = torch.tensor(inputs.layout.sizes, device=truth.device)
    # Mean squared norm of a row of down_w is what a random error of the hidden activation is multiplied by.
    gain = torch.stack([weight.float().square().sum() / case.hidden for weight in inputs.down_w])
    gain = torch.repeat_interleave(gain, sizes)
    weights = inputs.routed_expert_weights.float()
    absolute = _FP16_HALF_STEP * case.hidden**0.5 * (1 + weights.square() * gain).sqrt()
    return relative * truth.norm(dim=1) + 4 * absolute


def compare(inputs: Inputs, out: torch.Tensor, truth: torch.Tensor) -> Comparison:
    """Compare every row.

    Args:
        inputs: of the call, untouched.
        out: (P, H) fp16 after the call.
        truth: (N, H) fp32, raw order.
    """
    rows = inputs.valid_rows
    got = out[rows].float()
    finite = torch.isfinite(got)
    error = torch.where(finite, (got - truth).abs(), torch.inf)
    judge_allowed = JUDGE_TOLERANCE * (1 + truth.abs())
    judge_rows = (error > judge_allowed).any(dim=1)
    bound = row_bound(inputs, truth)
    norm = torch.where(finite, got - truth, torch.inf).norm(dim=1)
    element = _ELEMENT_FACTOR * bound[:, None] / truth.shape[1] ** 0.5
    wrong = judge_rows | (norm > bound) | (error > element).any(dim=1)
    padding = torch.ones(out.shape[0], dtype=torch.bool, device=out.device)
    padding[rows] = False
    dirty = torch.nonzero(padding & (out != 0).any(dim=1)).flatten()
    all_finite = bool(finite.all())
    # A row below fp16's resolution has no relative error worth the name.
    size = truth.norm(dim=1)
    sizeable = size > 64 * bound.sub(_relative(inputs) * size)
    relative = norm[sizeable] / size[sizeable]
    return Comparison(
        max_abs_error=_largest(error) if all_finite else None,
        judge_ratio=_largest(error / judge_allowed) if all_finite else None,
        row_error=_largest(relative) if all_finite else None,
        strict_ratio=max(_largest(norm / bound), _largest(error / element)) if all_finite else None,
        wrong_rows=wrong, judge_rows=judge_rows, padding_rows=dirty,
        ratio=torch.where(finite, error / element, torch.nan),
    )  # fmt: skip


def first_failure(inputs: Inputs, out: torch.Tensor, truth: torch.Tensor, result: Comparison, call: int) -> Failure:
    """Where the first wrong element of a call is.

    Args:
        inputs, out, truth: as for :func:`compare`.
        result: what it returned; must not have passed.
        call: number of the call.
    """
    layout = inputs.layout
    if result.wrong_rows.any():
        raw = int(torch.nonzero(result.wrong_rows)[0])
        row_ratio = torch.nan_to_num(result.ratio[raw], nan=torch.inf)
        over = torch.nonzero(row_ratio > 1).flatten()
        column = int(over[0]) if over.numel() else int(row_ratio.argmax())
        storage = int(inputs.valid_rows[raw])
        expert = next(e for e in range(layout.num_experts) if raw < layout.offsets[e + 1])
        row = raw - layout.offsets[expert]
        value = float(out[storage, column])
        finite = bool(torch.isfinite(out[storage, column]))
        if not torch.isfinite(out[inputs.valid_rows[result.wrong_rows]]).all():
            what = "valid rows hold NaN or Inf"
        elif not result.judge_rows.any():
            what = "valid rows are inside the contest's tolerance and outside what fp16 rounding explains"
        else:
            what = "valid rows are wrong"
        return Failure(
            call=call, what=what, expert=expert, row_in_group=row, column=column,
            block=(layout.padded_offsets[expert] + row) // layout.block, padded_row=storage, raw_row=raw,
            got=value if finite else None, expected=float(truth[raw, column]),
            wrong_rows=int(result.wrong_rows.sum()), rows=layout.num_rows,
        )  # fmt: skip
    padded = int(result.padding_rows[0])
    column = int(torch.nonzero(out[padded] != 0).flatten()[0])
    owner = layout.block_map[padded // layout.block]
    finite = bool(torch.isfinite(out[padded, column]))
    return Failure(
        call=call, what="padding rows of out are not zero", expert=owner,
        row_in_group=padded - layout.padded_offsets[owner], column=column,
        block=padded // layout.block, padded_row=padded, got=float(out[padded, column]) if finite else None,
        expected=0.0, wrong_rows=int(result.padding_rows.numel()), rows=layout.num_padded_rows - layout.num_rows,
    )  # fmt: skip


def _relative(inputs: Inputs) -> float:
    case = inputs.case
    return _ROUNDINGS * _FP16_ROUNDOFF + (case.hidden + case.intermediate) * _FP32_ROUNDOFF


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
