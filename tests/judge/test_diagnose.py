"""Each usual mistake is recognised from its answer alone; what is no usual mistake is described, not guessed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moe_lab.judge.compare import compare
from moe_lab.judge.diagnose import cause_of, pattern_of, remedy
from moe_lab.judge.plan import Call
from moe_lab.judge.session import Made
from moe_lab.problem.contract import Case
from moe_lab.problem.inputs import Inputs, make_inputs
from moe_lab.problem.reference import fused_truth
from moe_lab.steps import step

SIZES = (17, 0, 130, 3, 128)
CASE = Case("small", 5, 128, 192, sum(SIZES))


def inputs_of(seed: int = 0, sizes: tuple[int, ...] = SIZES) -> Inputs:
    return make_inputs(CASE, sizes, seed=seed)


def made_of(inputs: Inputs, rows: torch.Tensor, number: int = 0, before: torch.Tensor | None = None) -> Made:
    """A call that wrote some raw rows, (N, H) fp32, over noise."""
    if before is None:
        before = torch.zeros_like(inputs.out)
        noise = torch.randn(len(inputs.valid_rows), CASE.hidden, generator=torch.Generator().manual_seed(9))
        before[inputs.valid_rows] = noise.half()
    out = before.clone()
    out[inputs.valid_rows] = rows.half()
    truth = fused_truth(inputs)
    inputs, comparison = replace(inputs, out=before), compare(inputs, out, truth)
    return Made(number, Call(inputs.layout.sizes, 0), inputs, out, truth, comparison, [], None, 0.1, 1, 0)


def answer(inputs: Inputs, hidden: Callable[[Any, Any], Any] = lambda g, u: F.silu(g) * u) -> torch.Tensor:
    """(N, H) fp32 with another formula for the hidden activation."""
    out = torch.empty(inputs.layout.num_rows, CASE.hidden)
    for expert, size in enumerate(inputs.layout.sizes):
        start = inputs.layout.offsets[expert]
        x = inputs.stacked_expert_tokens[inputs.valid_rows[start : start + size]].float()
        h = hidden(x @ inputs.gate_w[expert].float().T, x @ inputs.up_w[expert].float().T)
        weight = inputs.routed_expert_weights[start : start + size, None]
        out[start : start + size] = h @ inputs.down_w[expert].float().T * weight
    return out


def rolled(name: str, shift: int) -> Callable[[Inputs], torch.Tensor]:
    return lambda inputs: answer(replace(inputs, **{name: getattr(inputs, name).roll(shift, 0)}))


def reread(name: str) -> Callable[[Inputs], torch.Tensor]:
    """The memory of each matrix read with rows and columns exchanged."""

    def wrong(inputs: Inputs) -> torch.Tensor:
        weights = getattr(inputs, name)
        experts, rows, columns = weights.shape
        return answer(replace(inputs, **{name: weights.reshape(experts, columns, rows).transpose(1, 2)}))

    return wrong


def cut(name: str, kept: slice) -> Callable[[Inputs], torch.Tensor]:
    def wrong(inputs: Inputs) -> torch.Tensor:
        weights = torch.zeros_like(getattr(inputs, name))
        weights[:, :, kept] = getattr(inputs, name)[:, :, kept]
        return answer(replace(inputs, **{name: weights}))

    return wrong


def formula(hidden: Callable[[Any, Any], Any]) -> Callable[[Inputs], torch.Tensor]:
    return lambda inputs: answer(inputs, hidden)


MISTAKES: dict[str, Callable[[Inputs], torch.Tensor]] = {
    "gate projection is missing": formula(lambda g, u: u),
    "gate and up are added": formula(lambda g, u: F.silu(g) + u),
    "gate stands in for up": formula(lambda g, u: F.silu(g) * g),
    "up stands in for gate": formula(lambda g, u: F.silu(u) * u),
    "GELU instead of SiLU": formula(lambda g, u: F.gelu(g) * u),
    "ReLU instead of SiLU": formula(lambda g, u: F.relu(g) * u),
    "the previous expert's gate_w is used": rolled("gate_w", 1),
    "the next expert's up_w is used": rolled("up_w", -1),
    "the previous expert's down_w is used": rolled("down_w", 1),
    "the route weight is read one row off (-1)": rolled("routed_expert_weights", 1),
    "the tokens are read one row off (+1)": rolled("stacked_expert_tokens", -1),
    "down_w is read transposed": reread("down_w"),
    "the last 16 of intermediate are missing": cut("down_w", slice(0, 176)),
    "the first 32 of intermediate are missing": cut("down_w", slice(32, 192)),
    "only the first 64 of intermediate": cut("down_w", slice(0, 64)),
    "another route weight than the row's own": lambda inputs: fused_truth(inputs) * torch.linspace(2, 3, 278)[:, None],
}


@pytest.mark.parametrize("says", MISTAKES)
def test_formulas_indices_and_sums(says: str) -> None:
    inputs = inputs_of()
    assert says in str(cause_of([made_of(inputs, MISTAKES[says](inputs))]))


@pytest.mark.parametrize(
    ("cause", "line", "do"),
    [
        (
            "the route weight is read at the padded row; it lives at the raw row",
            "routed_expert_weights[",
            "the raw row",
        ),
        ("the next expert's gate_w is used", "group_idx_for_bx[", "group_idx_for_bx[bx]"),
        ("gate and up are swapped: silu belongs to the gate", "T.exp2(", "gate * sigmoid(gate) * up"),
        ("exp2 is used without the factor log2(e) = 1.44269504", "T.exp2(", "1.44269504"),
        ("the last 64 of intermediate are missing from the sum of stage 2", "T.Pipelined(", "the loop over K"),
        ("down_w is read transposed: it is (E, hidden, intermediate)", "T.gemm(", "transpose_B"),
        ("padding rows are written: the store is not masked with actual_rows", "out[block_start", "T.if_then_else"),
        ("not written, out still holds what it held before the call", "out[block_start", "valid rows"),
    ],
)
def test_a_cause_leads_to_a_line_and_a_remedy(cause: str, line: str, do: str) -> None:
    source = step("s0").source
    number, said = remedy(cause, source)
    assert number is not None
    assert line in source.splitlines()[number - 1]
    assert do in said


def test_every_mistake_has_a_remedy_and_an_unknown_cause_has_none() -> None:
    assert all(remedy(says, "")[1] for says in MISTAKES)
    assert remedy("something else", step("s0").source) == (None, "")
    assert remedy("SiLU is missing", "def run_kernel(): pass")[0] is None


def test_a_workspace_that_is_not_written_anew() -> None:
    """Stage 2 on the hidden activation of the call before."""
    first, second = inputs_of(1), inputs_of(2)
    mixed = replace(first, down_w=second.down_w, routed_expert_weights=second.routed_expert_weights)
    history = [made_of(first, fused_truth(first)), made_of(second, fused_truth(mixed), 1)]
    assert "a workspace that call 1 left behind" in str(cause_of(history))


@pytest.mark.parametrize(
    ("shift", "says"), [(1, "one row too far"), (-1, "one row too early"), (128, "one block too far")]
)
def test_rows_that_land_elsewhere(shift: int, says: str) -> None:
    inputs = inputs_of()
    right = made_of(inputs, fused_truth(inputs))
    landed = right.inputs.out.clone()
    source = inputs.valid_rows
    target = source + shift
    inside = (target >= 0) & (target < len(landed))
    landed[target[inside]] = right.out[source[inside]]
    landed[~torch.isin(torch.arange(len(landed)), source)] = 0
    assert says in str(cause_of([made_of(inputs, landed[source].float())]))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("gate_w",), "gate_w of call 1"),
        (("gate_w", "up_w", "down_w"), "all weights of call 1"),
        (("stacked_expert_tokens",), "the tokens of call 1"),
        (("routed_expert_weights",), "the route weights of call 1"),
    ],
)
def test_what_an_earlier_call_left(arguments: tuple[str, ...], says: str) -> None:
    first, second = inputs_of(1), inputs_of(2)
    mixed = replace(second, **{name: getattr(first, name) for name in arguments})
    history = [made_of(first, fused_truth(first)), made_of(second, fused_truth(mixed), 1)]
    assert says in str(cause_of(history))


def test_a_replay_is_named_even_when_rows_have_moved() -> None:
    first, second = inputs_of(1), inputs_of(2, (130, 17, 0, 128, 3))
    old = made_of(first, fused_truth(first))
    replayed = made_of(second, old.out[second.valid_rows].float(), 1)
    assert "the answer of call 1 again: results are kept and replayed" in str(cause_of([old, replayed]))


def test_routing_that_is_kept() -> None:
    """The same raw rows under another routing: right rows at the old places."""
    first, second = inputs_of(1), inputs_of(1, (3, 17, 130, 0, 128))
    computed = fused_truth(
        replace(
            second, layout=first.layout, group_sizes=first.group_sizes, group_offsets=first.group_offsets,
            group_padded_offsets=first.group_padded_offsets, group_idx_for_bx=first.group_idx_for_bx,
        )
    )  # fmt: skip
    lookup = made_of(second, fused_truth(second)).inputs.out.float()
    lookup[first.valid_rows] = computed
    history = [made_of(first, fused_truth(first)), made_of(second, lookup[second.valid_rows], 1)]
    assert "routing of call 1" in str(cause_of(history))


@pytest.mark.parametrize("factor", [1, float("nan")])
def test_noise_and_nan_are_no_usual_mistake(factor: float) -> None:
    inputs = inputs_of()
    noise = torch.randn(len(inputs.valid_rows), CASE.hidden, generator=torch.Generator().manual_seed(1))
    assert cause_of([made_of(inputs, factor * noise)]) is None


def test_less_precision_is_said_in_numbers() -> None:
    inputs = inputs_of()
    truth = fused_truth(inputs)
    rough = truth * (1 + 0.004 * torch.randn(truth.shape, generator=torch.Generator().manual_seed(1)))
    said = "less precision than fp16 somewhere: a row is off by up to 0."
    assert str(cause_of([made_of(inputs, rough)])).startswith(said)


PATTERNS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "exactly the last row of each group": lambda owner, row: row == torch.tensor(SIZES)[owner] - 1,
    "exactly the first row of each group": lambda owner, row: row == 0,
    "exactly the upper half of each block": lambda owner, row: row % 128 >= 64,
    "exactly the rows of expert 2": lambda owner, row: owner == 2,
    "exactly the rows of experts 0, 4": lambda owner, row: (owner == 0) | (owner == 4),
    "rows that are 6 modulo 16": lambda owner, row: (row % 16 == 6) & (row != 22),
    "exactly rows from 128 on in each group": lambda owner, row: row >= 128,
}


@pytest.mark.parametrize("says", PATTERNS)
def test_patterns_of_rows(says: str) -> None:
    inputs = inputs_of()
    sizes = torch.tensor(SIZES)
    owner = torch.repeat_interleave(torch.arange(len(SIZES)), sizes)
    row = torch.cat([torch.arange(size) for size in SIZES])
    rows = fused_truth(inputs)
    rows[PATTERNS[says](owner, row)] = 7.0
    assert says in str(pattern_of(made_of(inputs, rows)))


def test_patterns_of_columns() -> None:
    inputs = inputs_of()
    rows = fused_truth(inputs)
    rows[:, 64:96] += 1
    assert pattern_of(made_of(inputs, rows)) == "columns 64 to 95 only"
    rows = fused_truth(inputs)
    rows[:, 3::16] += 1
    assert pattern_of(made_of(inputs, rows)) == "columns that are 3 modulo 16"
    assert pattern_of(made_of(inputs, rows + 1)) is None


def test_only_wrong_columns_are_asked() -> None:
    inputs = inputs_of()
    rows = fused_truth(inputs)
    rows[:, 64:] = answer(inputs, lambda g, u: g * u)[:, 64:]
    assert cause_of([made_of(inputs, rows)]) == "SiLU is missing"


@pytest.mark.parametrize(
    ("value", "says"),
    [(0.5, "not masked with actual_rows"), (float("nan"), "zero mask keeps NaN"), (None, "left unwritten")],
)
def test_padding_rows(value: float | None, says: str) -> None:
    inputs = inputs_of()
    before = torch.zeros_like(inputs.out)
    if value is None:
        before[20] = 3.0
    made = made_of(inputs, fused_truth(inputs), before=before)
    if value is not None:
        made.out[20] = value
    made = replace(made, comparison=compare(inputs, made.out, made.truth))
    assert says in str(cause_of([made]))
