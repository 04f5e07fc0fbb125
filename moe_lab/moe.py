"""The fused layer for torch users: one call for the fused part, one module for the whole layer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from moe_lab import backend
from moe_lab.autotune import tuned
from moe_lab.contract import Case
from moe_lab.errors import ContractError
from moe_lab.layout import GroupedLayout, permute, unpermute
from moe_lab.reference import Experts, route
from moe_lab.steps import STEPS, Step


def best_step() -> Step:
    """The step recommended for this machine's device.

    Hopper GPUs get the end of the Hopper branch, which uses instructions that no other card has; every other device,
    the CPU included, gets the end of the C500 branch, which needs no more than 64 KiB of shared memory.
    """
    hopper = backend.detect().kind == "cuda" and torch.cuda.get_device_capability()[0] == 9
    branch = "hopper" if hopper else "c500"
    return next(
        (entry for entry in STEPS.values() if entry.recommended and entry.branch == branch), STEPS["s0_baseline"]
    )


@functools.cache
def _entry(case: Case) -> Callable[..., None]:
    """The best step for this device with the literals that tuning found for this shape, if it was tuned."""
    return tuned(best_step().submission(), case).load()


def fused_moe(
    stacked_tokens: torch.Tensor, experts: Experts, route_weights: torch.Tensor, layout: GroupedLayout
) -> torch.Tensor:
    """Run the best step for this device on tokens in the grouped layout. Forward only.

    Args:
        stacked_tokens: (P, H) fp16 contiguous, as :func:`moe_lab.layout.permute` makes it.
        experts: gate and up (E, I, H), down (E, H, I), fp16 contiguous.
        route_weights: (N,) fp32, raw order.
        layout: the layout of the tokens, with blocks of 128 rows.

    Returns:
        (P, H) fp16: ``down(silu(gate(x)) * up(x)) * route weight`` in valid rows, exactly 0 in padding rows.

    Raises:
        ContractError: for a shape, dtype or block size that does not fit, with what came.
        BackendError: if this machine cannot run TileLang.
    """
    _check(stacked_tokens, experts, route_weights, layout)
    out = torch.zeros_like(stacked_tokens)
    if not layout.num_rows:
        return out
    device = stacked_tokens.device
    num_experts, intermediate, hidden = experts.gate_w.shape
    # The number of rows changes with every routing and must not cost another load.
    entry = _entry(Case("fused_moe", num_experts, hidden, intermediate, 0))

    def integers(values: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    entry(
        stacked_tokens, experts.gate_w, experts.up_w, experts.down_w, route_weights,
        integers(layout.sizes), integers(layout.offsets), integers(layout.padded_offsets), integers(layout.block_map),
        out,
    )  # fmt: skip
    return out


def _check(tokens: torch.Tensor, experts: Experts, route_weights: torch.Tensor, layout: GroupedLayout) -> None:
    num_experts, intermediate, hidden = experts.gate_w.shape
    rows = layout.num_padded_rows
    expected = {
        "stacked_tokens": (tokens, (rows, hidden), torch.float16),
        "gate_w": (experts.gate_w, (num_experts, intermediate, hidden), torch.float16),
        "up_w": (experts.up_w, (num_experts, intermediate, hidden), torch.float16),
        "down_w": (experts.down_w, (num_experts, hidden, intermediate), torch.float16),
        "route_weights": (route_weights, (layout.num_rows,), torch.float32),
    }
    if layout.block != 128:
        raise ContractError(f"got a layout with blocks of {layout.block} rows, expected 128")
    if layout.num_experts != num_experts:
        raise ContractError(f"got a layout of {layout.num_experts} experts, expected {num_experts} as in the weights")
    for name, (tensor, shape, dtype) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ContractError(f"got {name} {tuple(tensor.shape)} {tensor.dtype}, expected {shape} {dtype}")
        if not tensor.is_contiguous():
            raise ContractError(f"got {name} with strides {tensor.stride()}, expected a contiguous tensor")


class MoE(torch.nn.Module):
    """A Mixture-of-Experts layer: router, permute, fused experts, unpermute. Forward only, weights in fp16.

    Args:
        hidden: H.
        intermediate: I.
        num_experts: E.
        top_k: experts of a token, 1 to E.
        device: where the weights live.

    Attributes:
        router_w: (E, H).
        gate_w, up_w: (E, I, H).
        down_w: (E, H, I).
    """

    def __init__(
        self, hidden: int, intermediate: int, num_experts: int, top_k: int, device: str | torch.device | None = None
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ContractError(f"got top_k={top_k}, expected 1 to {num_experts}, the number of experts")
        self.top_k = top_k

        def weight(*shape: int) -> torch.nn.Parameter:
            values = torch.randn(shape, dtype=torch.float32, device=device) * shape[-1] ** -0.5
            return torch.nn.Parameter(values.half(), requires_grad=False)

        self.router_w = weight(num_experts, hidden)
        self.gate_w = weight(num_experts, intermediate, hidden)
        self.up_w = weight(num_experts, intermediate, hidden)
        self.down_w = weight(num_experts, hidden, intermediate)

    @property
    def experts(self) -> Experts:
        """The expert weights as :mod:`moe_lab.reference` takes them."""
        return Experts(self.gate_w, self.up_w, self.down_w)

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Route every token to its experts and add their results.

        Args:
            tokens: (..., H) fp16.

        Returns:
            (..., H) fp16.

        Raises:
            ContractError: for another last dimension or dtype.
        """
        hidden = self.router_w.shape[1]
        if tokens.shape[-1] != hidden or tokens.dtype != torch.float16:
            raise ContractError(
                f"got tokens {tuple(tokens.shape)} {tokens.dtype}, expected (..., {hidden}) torch.float16"
            )
        flat = tokens.reshape(-1, hidden)
        choices, weights = route(flat, self.router_w, self.top_k)
        layout = GroupedLayout.from_choices(choices, self.router_w.shape[0])
        stacked, raw_weights, source = permute(flat, choices, weights, layout)
        out = fused_moe(stacked, self.experts, raw_weights.contiguous(), layout)
        return unpermute(out, source, layout, flat.shape[0], self.top_k).view(tokens.shape)
