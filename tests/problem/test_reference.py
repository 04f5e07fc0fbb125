from dataclasses import replace

import pytest
import torch

from moe_lab.problem.contract import Case
from moe_lab.problem.errors import ContractError
from moe_lab.problem.inputs import make_inputs
from moe_lab.problem.layout import GroupedLayout, permute, unpermute
from moe_lab.problem.reference import Experts, fused_truth, moe_per_expert, moe_per_token, route


def _layer(num_tokens=13, hidden=16, intermediate=24, num_experts=5, top_k=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randn(num_tokens, hidden, generator=g)
    router_w = torch.randn(num_experts, hidden, generator=g)
    experts = Experts(
        torch.randn(num_experts, intermediate, hidden, generator=g) / 4,
        torch.randn(num_experts, intermediate, hidden, generator=g) / 4,
        torch.randn(num_experts, hidden, intermediate, generator=g) / 5,
    )
    return tokens, *route(tokens, router_w, top_k), experts


def test_one_number_by_hand():
    # One token x=2, one expert: gate 1, up 3, down 0.5: silu(2)*6*0.5*weight.
    experts = Experts(torch.ones(1, 1, 1), torch.full((1, 1, 1), 3.0), torch.full((1, 1, 1), 0.5))
    out = moe_per_token(torch.tensor([[2.0]]), torch.tensor([[0]]), torch.tensor([[0.25]]), experts)
    assert out.item() == pytest.approx(2 / (1 + 2.718281828**-2) * 6 * 0.5 * 0.25, rel=1e-6)


def test_per_token_and_per_expert_agree():
    layer = _layer()
    torch.testing.assert_close(moe_per_token(*layer), moe_per_expert(*layer))


def test_route_weights_sum_to_one_and_experts_differ():
    _, choices, weights, _ = _layer(top_k=3)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(13))
    assert all(len(set(row)) == 3 for row in choices.tolist())


def test_top_k_beyond_the_experts_is_refused():
    with pytest.raises(ContractError, match="got top_k=6, expected 1 to 5"):
        _layer(top_k=6)


def test_the_grouped_layout_and_the_truth_give_the_naive_layer():
    tokens, choices, weights, experts = _layer(num_tokens=40)
    tokens, weights = tokens.half().float(), weights.float()
    layout = GroupedLayout.from_choices(choices, num_experts=5)
    stacked, raw_weights, source = permute(tokens, choices, weights, layout)
    case = Case("layer", 5, 16, 24, layout.num_rows)
    inputs = replace(
        make_inputs(case, layout.sizes),
        stacked_expert_tokens=stacked,
        routed_expert_weights=raw_weights,
        **vars(experts),
    )
    out = torch.zeros_like(stacked)
    out[torch.tensor(layout.raw_to_padded)] = fused_truth(inputs)
    naive = moe_per_expert(tokens, choices, weights, experts)
    torch.testing.assert_close(unpermute(out, source, layout, 40, 2), naive)


def test_fp32_and_fp64_truth_agree_and_ignore_padding():
    inputs = make_inputs(Case("small", 4, 64, 48, 150), (0, 128, 21, 1))
    single, double = fused_truth(inputs), fused_truth(inputs, torch.float64)
    assert single.shape == (150, 64)
    assert single.isfinite().all()
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-6)
