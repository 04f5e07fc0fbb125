"""Other implementations of the same operator, to measure against: whatever of them is installed.

Copies that a user would make once (weights in another layout or dtype, rows without padding) are never timed. The route
weight is part of the operator: a peer with no place for it scales the smaller of the hidden and the result, in place.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from moe_lab.machine import backend
from moe_lab.problem.inputs import Inputs

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Peer:
    """One implementation."""

    name: str  # says the dtype it computes in
    package: str
    needs_gpu: bool
    prepare: Callable[[Inputs], Call]  # the call issues the work on these inputs and gives (N, H) in raw order

    def missing(self, has_gpu: bool) -> str:
        """Why it cannot be measured here; empty if it can be tried."""
        if self.needs_gpu and not has_gpu:
            return "needs a CUDA GPU"
        return "" if backend.installed(self.package) else f"not installed (`pip install {self.package}`)"


@functools.lru_cache(maxsize=8)
def _weights(gate_w: torch.Tensor, up_w: torch.Tensor, down_w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(E, 2I, H) bf16, gate rows, then up rows, and (E, H, I) bf16; one copy for all peers that want it."""
    return torch.cat([gate_w, up_w], dim=1).bfloat16(), down_w.bfloat16()


#: Frees the weights that peers keep in a layout of their own.
forget_copies = _weights.cache_clear


def _in_bf16(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The valid rows, (N, H), gate and up weights in one tensor, and down weights."""
    rows = inputs.stacked_expert_tokens[inputs.valid_rows].bfloat16()
    return rows, *_weights(inputs.gate_w, inputs.up_w, inputs.down_w)


def _scaled(hidden: torch.Tensor, down: Callable[[torch.Tensor], torch.Tensor], inputs: Inputs) -> torch.Tensor:
    weights = inputs.routed_expert_weights[:, None]
    if inputs.case.intermediate < inputs.case.hidden:
        return down(hidden.mul_(weights))
    return down(hidden).mul_(weights)


def _torch_loop(inputs: Inputs) -> Call:
    rows, layout = inputs.stacked_expert_tokens[inputs.valid_rows], inputs.layout
    out = torch.empty_like(rows)

    def call() -> torch.Tensor:
        for expert, size in enumerate(layout.sizes):
            if size:
                span = slice(layout.offsets[expert], layout.offsets[expert + 1])
                x = rows[span]
                hidden = F.silu(x @ inputs.gate_w[expert].T).mul_(x @ inputs.up_w[expert].T)
                torch.mul(hidden @ inputs.down_w[expert].T, inputs.routed_expert_weights[span, None], out=out[span])
        return out

    return call


def _torch_grouped(inputs: Inputs) -> Call:
    # Only bf16 reaches torch's grouped kernel; fp16 falls back to one matmul for each group.
    grouped: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
    rows, gate_up, down = _in_bf16(inputs)
    ends, inter = inputs.group_offsets[1:].contiguous(), inputs.case.intermediate

    def call() -> torch.Tensor:
        both = grouped(rows, gate_up.transpose(1, 2), offs=ends)
        hidden = F.silu(both[:, :inter]).mul_(both[:, inter:])
        return _scaled(hidden, lambda part: grouped(part, down.transpose(1, 2), offs=ends), inputs)

    return call


def _quack(inputs: Inputs, *, tuned: bool) -> Call:
    interface = importlib.import_module("quack.gemm_interface")
    rows, gate_up, down = _in_bf16(inputs)
    starts = inputs.group_offsets

    def call() -> torch.Tensor:
        _, hidden = interface.gemm_gated(
            rows, gate_up.mT, activation="swiglu", cu_seqlens_m=starts, store_preact=False, tuned=tuned,
            concat_layout=("B",),
        )  # fmt: skip
        return _scaled(hidden, lambda part: interface.gemm(part, down.mT, cu_seqlens_m=starts, tuned=tuned), inputs)

    return call


def _liger(inputs: Inputs) -> Call:
    function = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    rows, gate_up, down = _in_bf16(inputs)
    # Every raw row is a token with one choice; Liger sorts them itself, as a part of its operator.
    sizes = inputs.group_sizes.to(torch.int64)
    choices = torch.repeat_interleave(torch.arange(len(sizes), device=rows.device), sizes)[:, None].to(torch.int32)
    weights = inputs.routed_expert_weights[:, None].to(torch.bfloat16)

    def call() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = function.apply(rows, gate_up, down, choices, weights)
        return result

    return call


#: Every peer that `moe-lab bench` looks for.
PEERS: tuple[Peer, ...] = (
    Peer("torch loop over experts (fp16)", "torch", False, _torch_loop),
    Peer("torch grouped_mm (bf16)", "torch", False, _torch_grouped),
    Peer("QuACK (bf16)", "quack-kernels", True, functools.partial(_quack, tuned=False)),
    Peer("QuACK autotuned (bf16)", "quack-kernels", True, functools.partial(_quack, tuned=True)),
    Peer("Liger fused MoE (bf16)", "liger-kernel", True, _liger),
)
