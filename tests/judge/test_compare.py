"""Tolerances: what passes, what each of the two catches, and what neither may miss."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from moe_lab.judge.compare import compare, error_map, first_failure, row_bound
from moe_lab.problem.contract import Case
from moe_lab.problem.inputs import Inputs, Values, make_inputs
from moe_lab.problem.reference import fused_truth

SIZES = (3, 0, 130, 17)


def inputs_of(values: Values = "normal", seed: int = 0) -> Inputs:
    return make_inputs(Case("small", 4, 256, 192, sum(SIZES)), SIZES, values=values, seed=seed)


def answer(
    inputs: Inputs, hidden_dtype: torch.dtype = torch.float16, gate_dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """What an honest kernel writes, (P, H) fp16, rounding where it is told to."""
    out = torch.zeros_like(inputs.out)
    layout = inputs.layout
    for expert, size in enumerate(layout.sizes):
        rows = slice(layout.padded_offsets[expert], layout.padded_offsets[expert] + size)
        x = inputs.stacked_expert_tokens[rows].float()
        gate = (x @ inputs.gate_w[expert].float().T).to(gate_dtype).float()
        up = (x @ inputs.up_w[expert].float().T).to(gate_dtype).float()
        hidden = (F.silu(gate) * up).to(hidden_dtype).float()
        weight = inputs.routed_expert_weights[layout.offsets[expert] : layout.offsets[expert] + size, None]
        out[rows] = (hidden @ inputs.down_w[expert].float().T * weight).half()
    return out


@pytest.mark.parametrize("values", ["normal", "large", "tiny", "mixed"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.float16])
def test_honest_rounding_passes_with_room(values: Values, seed: int, gate_dtype: torch.dtype) -> None:
    inputs = inputs_of(values, seed)
    result = compare(inputs, answer(inputs, gate_dtype=gate_dtype), fused_truth(inputs))
    assert result.passed
    assert result.strict_ratio is not None
    assert 0.05 < result.strict_ratio < 0.75


@pytest.mark.parametrize(("values", "caught"), [("normal", 0.9), ("large", 0.9), ("mixed", 0.5)])
def test_one_rounding_to_bf16_is_caught_although_the_contest_would_pass_it(values: Values, caught: float) -> None:
    """Not on tiny values, where fp16 itself keeps no more digits."""
    inputs = inputs_of(values)
    result = compare(inputs, answer(inputs, hidden_dtype=torch.bfloat16), fused_truth(inputs))
    assert result.wrong_rows.float().mean() > caught
    assert values != "normal" or not result.judge_rows.any()


def test_zeros_pass_the_contest_on_tiny_values_and_fail_here() -> None:
    inputs = inputs_of("tiny")
    truth = fused_truth(inputs)
    result = compare(inputs, torch.zeros_like(inputs.out), truth)
    assert not result.judge_rows.any()
    assert result.wrong_rows.float().mean() > 0.9
    # Never a bound so wide that it says nothing.
    assert (sum(row_bound(inputs, truth)) < 0.25 * truth.norm(dim=1)).float().mean() > 0.9


@pytest.mark.parametrize(("values", "deviations"), [("normal", 0.1), ("large", 0.1), ("mixed", 1), ("tiny", 1)])
def test_one_wrong_element_is_caught(values: Values, deviations: float) -> None:
    inputs = inputs_of(values)
    truth = fused_truth(inputs)
    out = answer(inputs)
    row = int(inputs.valid_rows[140])
    out[row, 77] += (deviations * truth[140].norm() / truth.shape[1] ** 0.5).half()
    result = compare(inputs, out, truth)
    assert torch.nonzero(result.wrong_rows).flatten().tolist() == [140]
    failure = first_failure(inputs, out, truth, result, 5)
    assert (failure.call, failure.expert, failure.row_in_group, failure.column) == (5, 3, 7, 77)
    assert (failure.padded_row, failure.raw_row, failure.block) == (row, 140, row // 128)
    assert failure.expected == pytest.approx(float(truth[140, 77]))
    assert (failure.wrong_rows, failure.rows) == (1, 150)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_fails_in_valid_rows(bad: float) -> None:
    inputs = inputs_of()
    truth = fused_truth(inputs)
    out = answer(inputs)
    out[inputs.valid_rows[2], 1] = bad
    result = compare(inputs, out, truth)
    assert not result.passed
    assert result.max_abs_error is None
    assert result.strict_ratio is None
    failure = first_failure(inputs, out, truth, result, 0)
    assert failure.got is None
    assert "NaN or Inf" in failure.what


@pytest.mark.parametrize("value", [1e-7, float("nan"), -1.0])
def test_padding_rows_must_be_zero(value: float) -> None:
    inputs = inputs_of()
    truth = fused_truth(inputs)
    out = answer(inputs)
    out[5, 3] = value
    out[127, 0] = -0.0
    result = compare(inputs, out, truth)
    assert result.padding_rows.tolist() == [5]
    assert not result.wrong_rows.any()
    assert not result.passed
    failure = first_failure(inputs, out, truth, result, 0)
    assert (failure.expert, failure.row_in_group, failure.column, failure.raw_row) == (0, 5, 3, None)
    assert failure.expected == 0.0


def test_the_contest_tolerance_is_absolute_plus_relative() -> None:
    inputs = inputs_of()
    truth = torch.full((150, 256), 2.0)
    out = torch.zeros_like(inputs.out)
    out[inputs.valid_rows] = 2.125
    result = compare(inputs, out, truth)
    assert result.judge_ratio == pytest.approx(0.125 / 0.15)
    assert not result.judge_rows.any()
    out[inputs.valid_rows] = 2.1875
    assert compare(inputs, out, truth).judge_rows.all()


def test_the_error_map_shows_row_and_tile() -> None:
    inputs = inputs_of()
    out = answer(inputs)
    out[inputs.valid_rows[10], 33] += 1
    out[4, 250] = 1
    out[inputs.valid_rows[0], 0] = float("nan")
    found = error_map(inputs, out, compare(inputs, out, fused_truth(inputs)))
    assert found.shape == (inputs.layout.num_padded_rows, 16)
    assert found[int(inputs.valid_rows[10]), 2] > 1
    assert found[4, 15] == float("inf")
    assert found[0, 0] != found[0, 0]
    assert (found > 1).sum() == 2


def test_rows_without_weight_do_not_hide_the_others() -> None:
    inputs = inputs_of()
    weights = inputs.routed_expert_weights.clone()
    weights[0] = 0.0
    inputs = replace(inputs, routed_expert_weights=weights)
    result = compare(inputs, answer(inputs), fused_truth(inputs))
    assert result.passed
    assert result.row_error is not None
    assert result.row_error < 1e-3
