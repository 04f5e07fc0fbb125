"""Comparing one call's ``out`` with the truth, on every row, under the contest's tolerance and a strict bound.

The contest's 0.05 passes zeros where values are small; the bound is what rounding to fp16 explains of a row's norm.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from moe_lab.judge.verdict import Failure
from moe_lab.problem.contract import JUDGE_TOLERANCE
from moe_lab.problem.inputs import Inputs

_FP16_ROUNDOFF, _FP16_HALF_STEP = 2.0**-11, 2.0**-25
#: A row's error may be this many unit roundoffs. Rounding once costs a row 0.42 of a unit (mean over the mantissas), so
#: rounding hidden and out costs 0.6 and rounding gate and up as well 0.85, while one rounding to bf16 costs 3.4.
_ROUNDOFFS = 2.0
#: Bias of fp32 sums inside the matrix units: one step of 8 products may lose a whole bit instead of half.
_FP32_STEP, _PRODUCTS_PER_STEP = 2.0**-23, 8
#: An element may exceed the row's root mean square error by this factor: five standard deviations and some tail.
_ELEMENT_FACTOR = 10.0
_DEVIATIONS = 4.0  # absolute parts of the bound are standard deviations of a uniform error; this many are allowed
_SIZEABLE = 0.1  # a row's relative error is only reported where less than this part of its bound is absolute
_MAP_COLUMNS = 16  # of one tile of the error map


@dataclass(frozen=True)
class Comparison:
    """One call against the truth; the four largest errors are None if something is not finite."""

    max_abs_error: float | None  # |out - truth|
    judge_ratio: float | None  # error over what the contest's tolerance allows
    row_error: float | None  # relative Frobenius error of a row that is large enough to have one
    strict_ratio: float | None  # error over the strict bound
    wrong_rows: torch.Tensor  # (N,) bool, rows that fail either tolerance
    judge_rows: torch.Tensor  # (N,) bool, rows that fail the contest's tolerance
    padding_rows: torch.Tensor  # (K,) int64, padded rows that should be zero and are not
    ratio: torch.Tensor  # (N, H) error over the strict bound of an element; NaN where not finite

    @property
    def passed(self) -> bool:
        """Every valid row inside both tolerances and every padding row zero."""
        return not self.wrong_rows.any() and self.padding_rows.numel() == 0


def row_bound(inputs: Inputs, truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a row may differ by from the truth (N, H) fp32, as a Frobenius norm: two parts, each (N,) fp32.

    The relative part: rounding to fp16, and fp32 accumulation over H and then I. The absolute part: values below
    fp16's normal range lose a constant half step each, in the hidden activation (carried through ``down_w``) and in
    ``out``.
    """
    case, sizes = inputs.case, inputs.layout.sizes
    # Mean squared norm of a row of down_w is what a random error of the hidden activation is multiplied by.
    squares = [float(w.float().square().sum()) if size else 0 for w, size in zip(inputs.down_w, sizes, strict=True)]
    gain = torch.repeat_interleave(torch.tensor(squares) / case.hidden, torch.tensor(sizes)).to(truth.device)
    weights = inputs.routed_expert_weights.float()
    deviation = _FP16_HALF_STEP / 3**0.5 * case.hidden**0.5 * (1 + weights.square() * gain).sqrt()
    steps = (case.hidden + case.intermediate) / _PRODUCTS_PER_STEP
    return (_ROUNDOFFS * _FP16_ROUNDOFF + steps * _FP32_STEP) * truth.norm(dim=1), _DEVIATIONS * deviation


def compare(inputs: Inputs, out: torch.Tensor, truth: torch.Tensor) -> Comparison:
    """Compare every row of ``out`` (P, H) fp16 after a call with the truth (N, H) fp32 in raw order."""
    rows = inputs.valid_rows
    got = out[rows].float()
    finite = torch.isfinite(got)
    difference = torch.where(finite, got - truth, torch.inf)
    error, norm = difference.abs(), difference.norm(dim=1)
    judge_ratio = error / (JUDGE_TOLERANCE * (1 + truth.abs()))
    relative, absolute = row_bound(inputs, truth)
    bound = relative + absolute
    element_ratio = error / (_ELEMENT_FACTOR * bound[:, None] / truth.shape[1] ** 0.5)
    padding = torch.ones(out.shape[0], dtype=torch.bool, device=out.device)
    padding[rows] = False
    # A row near fp16's resolution has no relative error worth the name.
    sizeable = absolute < _SIZEABLE * bound
    all_finite = bool(finite.all())

    def largest(values: torch.Tensor) -> float | None:
        return (float(values.max()) if values.numel() else 0.0) if all_finite else None

    judge_rows = (judge_ratio > 1).any(dim=1)
    return Comparison(
        max_abs_error=largest(error),
        judge_ratio=largest(judge_ratio),
        row_error=largest(norm[sizeable] / truth.norm(dim=1)[sizeable]),
        strict_ratio=largest(torch.maximum(norm / bound, element_ratio.amax(dim=1))),
        wrong_rows=judge_rows | (norm > bound) | (element_ratio > 1).any(dim=1),
        judge_rows=judge_rows,
        padding_rows=torch.nonzero(padding & (out != 0).any(dim=1)).flatten(),
        ratio=torch.where(finite, element_ratio, torch.nan),
    )


def first_failure(inputs: Inputs, out: torch.Tensor, truth: torch.Tensor, result: Comparison, call: int) -> Failure:
    """Where the first wrong element of a call is, of a comparison that did not pass."""
    layout, expected, raw = inputs.layout, 0.0, None
    if result.wrong_rows.any():
        raw = int(torch.nonzero(result.wrong_rows)[0])
        stored, padded = int(inputs.valid_rows[raw]), layout.raw_to_padded[raw]
        ratio = torch.nan_to_num(result.ratio[raw], nan=torch.inf)
        over = torch.nonzero(ratio > 1).flatten()
        column = int(over[0]) if over.numel() else int(ratio.argmax())
        expected, wrong, rows = float(truth[raw, column]), int(result.wrong_rows.sum()), layout.num_rows
        if not torch.isfinite(out[inputs.valid_rows[result.wrong_rows]]).all():
            what = "valid rows hold NaN or Inf"
        elif result.judge_rows.any():
            what = "valid rows are wrong"
        else:
            what = "valid rows are inside the contest's tolerance and outside what fp16 rounding explains"
    else:
        stored = padded = int(result.padding_rows[0])
        column = int(torch.nonzero(out[padded] != 0)[0])
        wrong, rows = result.padding_rows.numel(), layout.num_padded_rows - layout.num_rows
        what = "padding rows of out are not zero"
    got, block = float(out[stored, column]), padded // layout.block
    expert = layout.block_map[block]
    return Failure(
        call=call, what=what, expert=expert, row_in_group=padded - layout.padded_offsets[expert], column=column,
        block=block, padded_row=padded, raw_row=raw, got=got if math.isfinite(got) else None, expected=expected,
        wrong_rows=wrong, rows=rows,
    )  # fmt: skip


def error_map(inputs: Inputs, out: torch.Tensor, result: Comparison) -> np.ndarray:
    """Error over strict bound by row and tile of 16 columns, the largest of each: (P, H/16 rounded up) float32.

    NaN marks a tile with an element that is not finite; a padding row is 0 where it is zero and infinite elsewhere.
    """
    ratio = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    ratio[inputs.valid_rows] = result.ratio
    ratio[result.padding_rows] = torch.where(out[result.padding_rows] != 0, torch.inf, 0.0)
    padded = torch.nn.functional.pad(ratio, (0, -out.shape[1] % _MAP_COLUMNS))
    # amax passes a NaN on.
    found: np.ndarray = padded.view(out.shape[0], -1, _MAP_COLUMNS).amax(dim=2).cpu().numpy()
    return found
