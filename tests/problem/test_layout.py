import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.problem.errors import ContractError
from moe_lab.problem.layout import GroupedLayout, permute, unpermute

SIZES = st.lists(st.integers(0, 400), min_size=1, max_size=12).map(tuple)
BLOCKS = st.sampled_from([1, 2, 16, 128])
RULES = st.sampled_from(["ceil", "plus_one"])


@given(SIZES, BLOCKS, RULES)
def test_offsets_are_monotone_and_aligned(sizes, block, rule):
    layout = GroupedLayout(sizes, block, rule)
    assert layout.offsets[0] == layout.padded_offsets[0] == 0
    assert all(b - a == size for a, b, size in zip(layout.offsets, layout.offsets[1:], sizes, strict=False))
    assert all(offset % block == 0 for offset in layout.padded_offsets)
    for start, stop, size in zip(layout.padded_offsets, layout.padded_offsets[1:], sizes, strict=False):
        spare = stop - start - size
        assert (0 <= spare < block) if rule == "ceil" else (0 < spare <= block)


@given(SIZES, BLOCKS, RULES)
def test_the_block_map_agrees_with_the_padded_offsets(sizes, block, rule):
    layout = GroupedLayout(sizes, block, rule)
    assert len(layout.block_map) * block == layout.num_padded_rows
    for number, expert in enumerate(layout.block_map):
        assert layout.padded_offsets[expert] <= number * block < layout.padded_offsets[expert + 1]


@given(SIZES, BLOCKS, RULES)
def test_no_row_is_lost_and_none_is_shared(sizes, block, rule):
    layout = GroupedLayout(sizes, block, rule)
    rows = layout.raw_to_padded
    assert len(set(rows)) == len(rows) == sum(sizes)
    assert sum(layout.actual_rows(number) for number in range(len(layout.block_map))) == sum(sizes)
    valid = [n * block + r for n in range(len(layout.block_map)) for r in range(layout.actual_rows(n))]
    assert valid == list(rows)
    if layout.num_padded_rows:
        assert layout.waste == pytest.approx(1 - sum(sizes) / layout.num_padded_rows)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(4, 6), st.integers(0, 2**31), RULES)
def test_permute_then_unpermute_is_the_weighted_identity(num_tokens, top_k, num_experts, seed, rule):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(num_tokens, 8, generator=generator)
    choices = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, top_k, generator=generator)
    layout = GroupedLayout.from_choices(choices, num_experts, block=4, padding_rule=rule)
    stacked, raw_weights, source = permute(tokens, choices, weights, layout)
    rows = torch.tensor(layout.raw_to_padded)
    padding = torch.ones(layout.num_padded_rows, dtype=torch.bool)
    padding[rows] = False
    assert stacked[padding].abs().sum() == 0
    stacked[rows] *= raw_weights[:, None]
    back = unpermute(stacked, source, layout, num_tokens, top_k)
    torch.testing.assert_close(back, tokens * weights.sum(dim=1, keepdim=True))


def test_both_padding_rules_on_an_exact_multiple_and_an_empty_expert():
    assert GroupedLayout((128, 0, 129)).padded_offsets == (0, 128, 128, 384)
    assert GroupedLayout((128, 0, 129), padding_rule="plus_one").padded_offsets == (0, 256, 384, 640)


@pytest.mark.parametrize(
    ("sizes", "block", "message"),
    [
        ((), 128, "got no group sizes"),
        ((3, -1), 128, "got size -1 for expert 1"),
        ((2.5,), 128, "got size 2.5 for expert 0"),
        ((3,), 0, "got block=0"),
    ],
)
def test_impossible_layouts_are_refused_with_the_value(sizes, block, message):
    with pytest.raises(ContractError, match=message):
        GroupedLayout(sizes, block)


def test_a_choice_of_no_expert_is_refused():
    with pytest.raises(ContractError, match="got expert 4 at position 2, expected 0 to 3"):
        GroupedLayout.from_choices([0, 1, 4], 4)


def test_choices_of_another_layout_are_refused():
    with pytest.raises(ContractError, match=r"got choices with group sizes \(1, 1\), expected \(2, 0\)"):
        permute(torch.zeros(2, 4), torch.tensor([[0], [1]]), torch.ones(2, 1), GroupedLayout((2, 0), 4))
