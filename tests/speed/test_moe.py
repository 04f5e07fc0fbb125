import pytest
import torch

import moe_lab
from moe_lab.problem.errors import BackendError, ContractError
from moe_lab.problem.layout import GroupedLayout
from moe_lab.problem.reference import Experts, moe_per_expert, route


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


SIZES = {"hidden": 64, "intermediate": 64, "num_experts": 4, "top_k": 2}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -3, 1.5, 64.0, True, "2", None])
def test_a_size_that_is_no_integer_of_at_least_1_is_named(name, value):
    with pytest.raises(ContractError, match=rf"^got {name}={value!r}, expected an integer of at least 1$"):
        moe_lab.MoE(**{**SIZES, name: value})


def test_a_device_that_is_not_here_is_named():
    for device in ("mps", "xpu", *(() if torch.cuda.is_available() else ("cuda", "cuda:1"))):
        with pytest.raises(BackendError, match=rf"^got device='{device}', which this machine or its torch does not"):
            moe_lab.MoE(**SIZES, device=device)
    for wrong in ("no such", 1.5):
        with pytest.raises(ContractError, match=r"expected one that torch knows"):
            moe_lab.MoE(**SIZES, device=wrong)
    nowhere = moe_lab.MoE(**SIZES, device="meta")
    with pytest.raises(ContractError, match="got tensors on meta, expected "):
        nowhere(torch.zeros(3, 64, dtype=torch.float16, device="meta"))
    with pytest.raises(ContractError, match="got tokens on cpu, expected meta as the weights"):
        nowhere(torch.zeros(3, 64, dtype=torch.float16))


def test_what_is_no_tensor_no_layout_or_no_experts_is_named():
    layer, layout = moe_lab.MoE(**SIZES), GroupedLayout((3, 2, 0, 0))
    tokens, weights, experts = torch.zeros(256, 64, dtype=torch.float16), torch.ones(5), layer.experts
    flat = Experts(experts.gate_w[0], experts.up_w, experts.down_w)
    for call, says in (
        (lambda: layer([[0.0] * 64]), "got tokens of type list"),
        (lambda: layer(torch.tensor(1.0).half()), r"got tokens \(\) torch.float16, expected a tensor \(..., 64\)"),
        (lambda: moe_lab.fused_moe([], experts, weights, layout), "got stacked_tokens of type list"),
        (lambda: moe_lab.fused_moe(tokens, (1, 2, 3), weights, layout), "got experts of type tuple"),
        (lambda: moe_lab.fused_moe(tokens, flat, weights, layout), r"got gate_w \(64, 64\), expected \(E, I, H\)"),
        (lambda: moe_lab.fused_moe(tokens, experts, weights, [3, 2, 0, 0]), "got a layout of type list"),
    ):
        with pytest.raises(ContractError, match=f"^{says}"):
            call()


def test_a_gradient_that_cannot_be_computed_is_never_silently_missing():
    layer, tokens = moe_lab.MoE(**SIZES), torch.randn(5, 64).half()
    assert not layer(tokens).requires_grad
    asking = tokens.clone().requires_grad_()
    with torch.no_grad():
        assert not layer(asking).requires_grad
    layout = GroupedLayout((3, 2, 0, 0))
    stacked, weights = torch.zeros(256, 64, dtype=torch.float16), torch.ones(5, requires_grad=True)
    results = [layer(asking), moe_lab.fused_moe(stacked, layer.experts, weights, layout)]
    assert torch.equal(results[0], layer(tokens))
    layer.gate_w.requires_grad_()
    for result in (*results, layer(tokens), layer(tokens[:0])):
        with pytest.raises(ContractError, match=r"got backward\(\) through fused_moe or MoE, expected a forward pass"):
            result.sum().backward()


def test_the_way_out_that_the_sentence_names_has_a_gradient():
    layer, tokens = moe_lab.MoE(**SIZES), torch.randn(5, 64, requires_grad=True)
    layer.down_w.requires_grad_()
    moe_per_expert(tokens, *route(tokens, layer.router_w, 2), layer.experts).square().sum().backward()
    assert tokens.grad.norm() > 0
    assert layer.down_w.grad.norm() > 0


def test_a_layer_says_its_sizes():
    assert repr(moe_lab.MoE(**SIZES)) == "MoE(hidden=64, intermediate=64, num_experts=4, top_k=2)"


def test_the_route_weights_of_a_token_sum_to_1():
    layer = moe_lab.MoE(**SIZES)
    # With all experts alike the choice does not matter, and the layer is one expert times the sum of the weights.
    for weight in (layer.gate_w, layer.up_w, layer.down_w):
        weight[:] = weight[:1].clone()
    tokens = torch.randn(7, 64).half()
    one = moe_per_expert(tokens, torch.zeros(7, 1, dtype=torch.int64), torch.ones(7, 1), layer.experts)
    assert ((layer(tokens) - one).norm() / one.norm()).item() < 2e-3
