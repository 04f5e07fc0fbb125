import pytest
import torch

from moe_lab.problem.contract import ARGUMENTS, VARIANTS, Case, Variant
from moe_lab.problem.errors import ContractError
from moe_lab.problem.inputs import DISTRIBUTIONS, draw_inputs, group_sizes, make_inputs

CASE = Case("small", num_experts=5, hidden=64, intermediate=32, num_tokens=300)


def test_the_judge_profile_matches_the_argument_table():
    inputs = make_inputs(CASE)
    symbols = {"E": 5, "E+1": 6, "H": 64, "I": 32, "N": 300}
    symbols |= {"P": inputs.layout.num_padded_rows, "P/128": inputs.layout.num_padded_rows // 128}
    for argument, tensor in zip(ARGUMENTS, inputs.args, strict=True):
        assert tuple(tensor.shape) == tuple(symbols[size] for size in argument.shape), argument.name
        assert tensor.dtype == getattr(torch, argument.dtype), argument.name
        assert tensor.is_contiguous()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_sizes_sum_and_repeat_for_a_seed(distribution):
    sizes = group_sizes(distribution, 16, 2272, seed=3)
    assert sum(sizes) == 2272
    assert sizes == group_sizes(distribution, 16, 2272, seed=3)


def test_the_distributions_are_what_their_names_say():
    assert set(group_sizes("balanced", 16, 2272)) == {142}
    assert sorted(group_sizes("one_expert", 4, 99)) == [0, 0, 0, 99]
    multinomial, skewed = group_sizes("multinomial", 16, 2272), group_sizes("skewed", 16, 2272)
    assert max(multinomial) < 200 < 500 < max(skewed)


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not():
    first, again, other = make_inputs(CASE, seed=1), make_inputs(CASE, seed=1), make_inputs(CASE, seed=2)
    for a, b in zip(first.args, again.args, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    assert not torch.equal(first.gate_w, other.gate_w)


@pytest.mark.parametrize(("poison", "expected"), [("nan", True), ("large", False), ("zeros", False)])
def test_padding_rows_are_poisoned_and_valid_rows_are_not(poison, expected):
    inputs = make_inputs(CASE, token_poison=poison)
    mask = torch.ones(inputs.layout.num_padded_rows, dtype=torch.bool)
    mask[inputs.valid_rows] = False
    assert inputs.stacked_expert_tokens[mask].isnan().all().item() is expected
    assert inputs.stacked_expert_tokens[~mask].isfinite().all()
    if poison == "large":
        assert (inputs.stacked_expert_tokens[mask].abs() == 60000).all()


def test_poison_does_not_change_the_valid_values():
    a, b = make_inputs(CASE, token_poison="nan"), make_inputs(CASE, token_poison="zeros")
    assert torch.equal(a.stacked_expert_tokens[a.valid_rows], b.stacked_expert_tokens[b.valid_rows])


@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_variant_can_be_made(name):
    variant = VARIANTS[name]
    inputs = make_inputs(CASE, (128, 0, 100, 1, 71), variant=variant)
    layout = inputs.layout
    rows = 300 if variant.storage == "compact" else layout.num_padded_rows
    assert inputs.stacked_expert_tokens.shape == inputs.out.shape == (rows, 64)
    assert len(inputs.group_offsets) == len(inputs.group_padded_offsets) == (5 if variant.offsets_length == "E" else 6)
    assert inputs.routed_expert_weights.dtype == getattr(torch, variant.route_weight_dtype)
    assert layout.num_blocks_of == ((2, 1, 1, 1, 1) if variant.padding_rule == "plus_one" else (1, 0, 1, 1, 1))
    assert len(inputs.group_idx_for_bx) == (8 if variant.block_map == "surplus" else len(layout.block_map))
    if variant.block_map == "surplus":
        assert inputs.group_idx_for_bx.tolist() == [*layout.block_map, 4, 4, 4, 4]
    filled = {"zeros": inputs.out.eq(0).all(), "nan": inputs.out.isnan().all(), "stale": inputs.out.std() > 0.5}
    assert filled[variant.out_fill]


def test_values_change_the_scale():
    kinds = ("tiny", "normal", "large")
    stds = {kind: make_inputs(CASE, values=kind).stacked_expert_tokens.nan_to_num().std() for kind in kinds}
    assert stds["large"] / stds["normal"] == pytest.approx(8, rel=0.01)
    assert stds["normal"] / stds["tiny"] == pytest.approx(256, rel=0.01)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((100, 100, 100), "got 3 group sizes, expected 5"),
        ((100, 100, 50, 0, 0), "sum to 250, expected 300"),
        ((400, -100, 0, 0, 0), "got size -100 for expert 1"),
    ],
)
def test_impossible_sizes_are_refused_with_the_value(sizes, message):
    with pytest.raises(ContractError, match=message):
        make_inputs(CASE, sizes)


@pytest.mark.parametrize(
    "options", [{"distribution": "normal"}, {"values": "huge"}, {"token_poison": "inf"}], ids=lambda o: next(iter(o))
)
def test_unknown_names_are_refused(options):
    with pytest.raises(ContractError, match=f"got {next(iter(options))}"):
        make_inputs(CASE, **options)


def test_no_rows_at_all():
    inputs = make_inputs(Case("empty", 3, 16, 16, 0), (0, 0, 0), variant=Variant())
    assert inputs.stacked_expert_tokens.shape == (0, 16)


def test_inputs_drawn_on_a_device_are_the_same_problem():
    case, sizes = Case("x", 4, 256, 128, 140), (9, 0, 130, 1)
    drawn, made = draw_inputs(case, sizes, seed=5), make_inputs(case, sizes, seed=5)
    for name in ("group_sizes", "group_offsets", "group_padded_offsets", "group_idx_for_bx"):
        assert torch.equal(getattr(drawn, name), getattr(made, name))
    for one, other in zip(drawn.args, made.args, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    padding = torch.ones(len(drawn.out), dtype=torch.bool)
    padding[drawn.valid_rows] = False
    assert drawn.stacked_expert_tokens[padding].isnan().all()
    assert drawn.stacked_expert_tokens[drawn.valid_rows].float().std() == pytest.approx(1.0, rel=0.03)
    for weights, length in ((drawn.gate_w, 256), (drawn.up_w, 256), (drawn.down_w, 128)):
        for expert in range(4):
            assert weights[expert].float().std() == pytest.approx(length**-0.5, rel=0.03)
    assert not torch.equal(drawn.gate_w, drawn.up_w)
    for one, other in zip(drawn.args, draw_inputs(case, sizes, seed=5).args, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_weights_of_experts_without_rows_can_stay_zero():
    drawn = draw_inputs(Case("x", 3, 64, 32, 5), (5, 0, 0), idle_weights=False)
    for weights in (drawn.gate_w, drawn.up_w, drawn.down_w):
        assert weights[0].count_nonzero() > 0.99 * weights[0].numel()
        assert weights[1:].count_nonzero() == 0
