"""Readable torch references: the naive layer two ways, and the truth that the fused part is compared with."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moe_lab.problem.errors import ContractError
from moe_lab.problem.inputs import Inputs


@dataclass(frozen=True)
class Experts:
    """The weights of all experts: gate and up (E, I, H), down (E, H, I)."""

    gate_w: torch.Tensor
    up_w: torch.Tensor
    down_w: torch.Tensor


def route(tokens: torch.Tensor, router_w: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax router with top-k renormalised weights, for tokens (T, H) and router_w (E, H).

    Returns ``choices`` (T, K) int64 and ``weights`` (T, K) fp32 that sum to 1 for each token.
    Raises ContractError for a top_k outside 1 to E.
    """
    num_experts = router_w.shape[0]
    if not 1 <= top_k <= num_experts:
        raise ContractError(f"got top_k={top_k}, expected 1 to {num_experts}, the number of experts")
    probabilities = torch.softmax(tokens.float() @ router_w.float().T, dim=-1)
    weights, choices = probabilities.topk(top_k, dim=-1)
    return choices, weights / weights.sum(dim=-1, keepdim=True)


def expert_ffn(experts: Experts | Inputs, expert: int, x: torch.Tensor) -> torch.Tensor:
    """SwiGLU of one of the experts, (rows, H) for x (rows, H), in the dtype of x."""
    gate_w, up_w, down_w = (weights[expert].to(x.dtype) for weights in (experts.gate_w, experts.up_w, experts.down_w))
    return (F.silu(x @ gate_w.T) * (x @ up_w.T)) @ down_w.T


def moe_per_token(tokens: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
    """The definition, token by token: tokens (T, H), choices and weights (T, K); returns (T, H) fp32."""
    out = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    for token in range(tokens.shape[0]):
        for choice, weight in zip(choices[token].tolist(), weights[token].float(), strict=True):
            out[token] += weight * expert_ffn(experts, choice, tokens[token : token + 1].float())[0]
    return out


def moe_per_expert(
    tokens: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor, experts: Experts
) -> torch.Tensor:
    """The same sum, expert by expert: each weight is read once for all its tokens."""
    out = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    for expert in range(len(experts.gate_w)):
        rows, slots = torch.where(choices == expert)
        if rows.numel():
            y = expert_ffn(experts, expert, tokens[rows].float())
            out.index_add_(0, rows, y * weights[rows, slots, None].float())
    return out


def fused_truth(inputs: Inputs, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What ``run_kernel`` must compute: (N, H) in fp32 or fp64 and raw order, without rounding in between.

    Source: the problem statement's reference, fp32 from fp16 inputs, hidden not rounded to fp16.
    """
    layout, rows = inputs.layout, inputs.valid_rows
    out = torch.empty(layout.num_rows, inputs.case.hidden, dtype=dtype, device=inputs.out.device)
    for expert, size in enumerate(layout.sizes):
        if size:
            span = slice(layout.offsets[expert], layout.offsets[expert + 1])
            y = expert_ffn(inputs, expert, inputs.stacked_expert_tokens[rows[span]].to(dtype))
            out[span] = y * inputs.routed_expert_weights[span, None].to(dtype)
    return out
