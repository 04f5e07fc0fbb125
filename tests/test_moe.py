import pytest
import torch

import moe_lab
from moe_lab.errors import ContractError
from moe_lab.layout import GroupedLayout
from moe_lab.reference import Experts, moe_per_expert, route


@pytest.mark.parametrize("top_k", [1, 3])
def test_the_module_equals_the_naive_layer(top_k):
    torch.manual_seed(top_k)
    layer = moe_lab.MoE(hidden=128, intermediate=256, num_experts=5, top_k=top_k)
    tokens = torch.randn(2, 60, 128).half()
    flat = tokens.reshape(-1, 128)
    naive = moe_per_expert(flat, *route(flat, layer.router_w, top_k), layer.experts).view(2, 60, 128)
    got = layer(tokens)
    assert got.dtype == torch.float16
    assert ((got - naive).norm() / naive.norm()).item() < 2e-3


@pytest.mark.gpu
def test_the_module_equals_the_naive_layer_on_a_gpu():
    torch.manual_seed(1)
    layer = moe_lab.MoE(hidden=512, intermediate=256, num_experts=8, top_k=2, device="cuda")
    for count in (300, 77):
        tokens = torch.randn(count, 512, device="cuda").half()
        naive = moe_per_expert(tokens, *route(tokens, layer.router_w, 2), layer.experts)
        assert ((layer(tokens) - naive).norm() / naive.norm()).item() < 2e-3


def test_no_tokens_give_no_rows():
    layer = moe_lab.MoE(hidden=128, intermediate=128, num_experts=2, top_k=1)
    assert layer(torch.zeros(0, 128, dtype=torch.float16)).shape == (0, 128)


def test_other_shapes_and_dtypes_are_named():
    layer = moe_lab.MoE(hidden=128, intermediate=128, num_experts=2, top_k=1)
    with pytest.raises(ContractError, match=r"got tokens \(3, 64\)"):
        layer(torch.zeros(3, 64, dtype=torch.float16))
    with pytest.raises(ContractError, match="got top_k=3, expected 1 to 2"):
        moe_lab.MoE(128, 128, 2, 3)
    layout = GroupedLayout((3, 2))
    tokens, weights = torch.zeros(256, 128, dtype=torch.float16), torch.ones(5)
    with pytest.raises(ContractError, match=r"got route_weights \(5,\) torch.float16"):
        moe_lab.fused_moe(tokens, layer.experts, weights.half(), layout)
    with pytest.raises(ContractError, match="got a layout of 3 experts, expected 2"):
        moe_lab.fused_moe(tokens, layer.experts, weights, GroupedLayout((3, 1, 1)))
    with pytest.raises(ContractError, match="blocks of 64 rows"):
        moe_lab.fused_moe(tokens, layer.experts, weights, GroupedLayout((3, 2), block=64))
    strided = Experts(layer.gate_w.transpose(1, 2).contiguous().transpose(1, 2), layer.up_w, layer.down_w)
    with pytest.raises(ContractError, match="expected a contiguous tensor"):
        moe_lab.fused_moe(tokens, strided, weights, layout)
