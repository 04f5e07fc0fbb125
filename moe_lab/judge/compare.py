"""Comparing one call's ``out`` with the truth, on every row, under two tolerances.

The contest's own tolerance (0.05 absolute and relative) passes a kernel that drops low bits or, on small values, one
that returns zeros. The strict bound has no scale of its own: a row may differ from the truth by what rounding to fp16
explains, measured by the row's own norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moe_lab.judge.verdict import Failure
from moe_lab.problem.contract import JUDGE_TOLERANCE
from moe_lab.problem.inputs import Inputs

#: Unit roundoff of fp16 and half its smallest step.
_FP16_ROUNDOFF = 2.0**-11
_FP16_HALF_STEP = 2.0**-25
#: A row's error may be this many unit roundoffs. Rounding once costs a row 0.42 of a unit (mean over the mantissas), so
#: rounding hidden and out costs 0.6 and rounding gate and up as well 0.85, while one rounding to bf16 costs 3.4.
_ROUNDOFFS = 2.0
#: Bias of fp32 sums inside the matrix units: one step of 8 products may lose a whole bit instead of half.
_FP32_STEP = 2.0**-23
_PRODUCTS_PER_STEP = 8
#: An element may exceed the row's root mean square error by this factor: five standard deviations and some tail.
_ELEMENT_FACTOR = 10.0
#: Absolute parts of the bound are standard deviations of a uniform error, and this many of them are allowed.
_DEVIATIONS = 4.0
#: A row's relative error is only reported where less than this part of its bound is absolute.
_SIZEABLE = 0.1
#: Columns of one tile of the error map.
MAP_COLUMNS = 16


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
    case, layout = inputs.case, inputs.layout
    # Mean squared norm of a row of down_w is what a random error of the hidden activation is multiplied by.
    gain = torch.empty(layout.num_rows, device=truth.device)
    for expert, size in enumerate(layout.sizes):
        if size:
            start = layout.offsets[expert]
            gain[start : start + size] = inputs.down_w[expert].float().square().sum() / case.hidden
    weights = inputs.routed_expert_weights.float()
    absolute = _FP16_HALF_STEP / 3**0.5 * case.hidden**0.5 * (1 + weights.square() * gain).sqrt()
    return _relative_bound(inputs) * truth.norm(dim=1) + _DEVIATIONS * absolute


def _relative_bound(inputs: Inputs) -> float:
    steps = (inputs.case.hidden + inputs.case.intermediate) / _PRODUCTS_PER_STEP
    return _ROUNDOFFS * _FP16_ROUNDOFF + steps * _FP32_STEP


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
    # A row near fp16's resolution has no relative error worth the name.
    size = truth.norm(dim=1)
    sizeable = bound - _relative_bound(inputs) * size < _SIZEABLE * bound
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


def error_map(inputs: Inputs, out: torch.Tensor, result: Comparison) -> np.ndarray:
    """Error over strict bound by row and tile of columns, the largest of each tile.

    Args:
        inputs, out, result: of one call.

    Returns:
        (P, H/16 rounded up) float32. NaN marks a tile with an element that is not finite; a padding row is 0 where it
        is zero and infinite where it is not.
    """
    ratio = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    ratio[inputs.valid_rows] = result.ratio
    ratio[result.padding_rows] = torch.where(out[result.padding_rows] != 0, torch.inf, 0.0)
    tiles = -(-out.shape[1] // MAP_COLUMNS)
    padded = torch.nn.functional.pad(ratio, (0, tiles * MAP_COLUMNS - out.shape[1]))
    # amax passes a NaN on.
    found: np.ndarray = padded.view(out.shape[0], tiles, MAP_COLUMNS).amax(dim=2).cpu().numpy()
    return found


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
