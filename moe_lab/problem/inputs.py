"""The trusted input generator: one place that makes the ten tensors, for every distribution and every variant.

Everything is seeded and made on the CPU before it moves to a device, so the same seed gives the same bits everywhere;
:func:`draw_inputs` draws on the device, where the contest's sizes take milliseconds.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import numpy as np
import torch

from moe_lab.problem.contract import JUDGE_PROFILE, Case, Variant
from moe_lab.problem.errors import ContractError
from moe_lab.problem.layout import GroupedLayout

Distribution = Literal["balanced", "multinomial", "skewed", "one_expert"]
Values = Literal["normal", "large", "tiny", "mixed"]
TokenPoison = Literal["nan", "large", "zeros"]

DISTRIBUTIONS = cast(tuple[Distribution, ...], get_args(Distribution))

#: Scale of the tokens for each kind of values; weights are scaled by 1/sqrt(reduction length) on top.
_TOKEN_SCALE = {"normal": 1.0, "large": 8.0, "tiny": 2.0**-8}


def group_sizes(distribution: Distribution, num_experts: int, num_rows: int, seed: int = 0) -> tuple[int, ...]:
    """Draw how many rows each expert gets.

    Args:
        distribution: "balanced" (sizes differ by at most one), "multinomial" (each row picks an expert uniformly),
            "skewed" (Zipf weights 1/rank over shuffled experts) or "one_expert" (one takes all).
        num_experts: E, at least 1.
        num_rows: N, at least 0.
        seed: any integer.

    Returns:
        E sizes that sum to N.

    Raises:
        ContractError: for an unknown distribution or sizes out of range.

    >>> group_sizes("balanced", 3, 7)
    (3, 2, 2)
    """
    if num_experts < 1 or num_rows < 0:
        raise ContractError(f"got {num_experts} experts and {num_rows} rows, expected at least 1 and 0")
    rng = random.Random(f"{distribution}-{num_experts}-{num_rows}-{seed}")
    if distribution == "balanced":
        share, rest = divmod(num_rows, num_experts)
        return tuple(share + (expert < rest) for expert in range(num_experts))
    if distribution == "one_expert":
        taker = rng.randrange(num_experts)
        return tuple(num_rows if expert == taker else 0 for expert in range(num_experts))
    if distribution == "multinomial":
        weights = [1.0] * num_experts
    elif distribution == "skewed":
        weights = [1.0 / rank for rank in range(1, num_experts + 1)]
        rng.shuffle(weights)
    else:
        raise ContractError(f"got distribution {distribution!r}, expected one of {', '.join(DISTRIBUTIONS)}")
    sizes = [0] * num_experts
    for expert in rng.choices(range(num_experts), weights, k=num_rows):
        sizes[expert] += 1
    return tuple(sizes)


@dataclass(frozen=True)
class Inputs:
    """The ten tensors of one call and the layout behind them.

    Attributes:
        case: sizes; ``case.num_tokens`` is the sum of ``layout.sizes``.
        layout: where the rows lie.
        variant: the reading of the contract they follow.
        stacked_expert_tokens: (P, H) fp16, or (N, H) under compact storage.
        gate_w, up_w: (E, I, H) fp16.
        down_w: (E, H, I) fp16.
        routed_expert_weights: (N,) fp32 or fp16, raw order, in [0, 1).
        group_sizes: (E,) int32.
        group_offsets, group_padded_offsets: (E+1,) or (E,) int32.
        group_idx_for_bx: (P/128,) int32, or more under a surplus block map.
        out: as the tokens; holds what the variant says.
    """

    case: Case
    layout: GroupedLayout
    variant: Variant
    stacked_expert_tokens: torch.Tensor
    gate_w: torch.Tensor
    up_w: torch.Tensor
    down_w: torch.Tensor
    routed_expert_weights: torch.Tensor
    group_sizes: torch.Tensor
    group_offsets: torch.Tensor
    group_padded_offsets: torch.Tensor
    group_idx_for_bx: torch.Tensor
    out: torch.Tensor

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        """The ten positional arguments of ``run_kernel``, in order."""
        return (
            self.stacked_expert_tokens, self.gate_w, self.up_w, self.down_w, self.routed_expert_weights,
            self.group_sizes, self.group_offsets, self.group_padded_offsets, self.group_idx_for_bx, self.out,
        )  # fmt: skip

    @property
    def valid_rows(self) -> torch.Tensor:
        """Row in ``stacked_expert_tokens`` and ``out`` of each raw row, (N,) int64 on the inputs' device."""
        rows = range(self.layout.num_rows) if self.variant.storage == "compact" else self.layout.raw_to_padded
        return torch.tensor(list(rows), dtype=torch.int64, device=self.out.device)

    def with_out(self, out: torch.Tensor) -> Inputs:
        """The same inputs with another output buffer."""
        return replace(self, out=out)


def _tokens(
    layout: GroupedLayout, hidden: int, values: Values, token_poison: TokenPoison, generator: torch.Generator,
    *, padded: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Tokens of one call on the generator's device: (P, H) fp16, or (N, H) without padding rows."""
    valid = _valid_tokens(layout.num_rows, hidden, values, generator)
    if not padded:
        return valid
    tokens = _poison(layout.num_padded_rows, hidden, token_poison, generator)
    tokens[torch.tensor(layout.raw_to_padded, dtype=torch.int64, device=tokens.device)] = valid
    return tokens


def _normal(shape: tuple[int, ...], generator: torch.Generator, scale: float) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).mul_(scale).half()


def _valid_tokens(rows: int, hidden: int, values: Values, generator: torch.Generator) -> torch.Tensor:
    if values in _TOKEN_SCALE:
        return _normal((rows, hidden), generator, _TOKEN_SCALE[values])
    if values != "mixed":
        raise ContractError(f"got values={values!r}, expected one of {', '.join(get_args(Values))}")
    # Each row its own power of two, so that a relative error of a small row cannot hide behind a large one.
    device = generator.device
    exponents = torch.randint(-8, 4, (rows, 1), generator=generator, device=device)
    return (torch.randn(rows, hidden, generator=generator, device=device) * torch.exp2(exponents.float())).half()


def make_inputs(
    case: Case,
    sizes: Sequence[int] | None = None,
    *,
    distribution: Distribution = "multinomial",
    variant: Variant = JUDGE_PROFILE,
    values: Values = "normal",
    token_poison: TokenPoison = "nan",
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Inputs:
    """Make the ten tensors of one call.

    Tokens are N(0, 1) times the scale of ``values``; gate, up and down weights are N(0, 1) divided by the root of
    their reduction length, so that activations stay of order 1 (scale of the platform's earlier public version of the
    operator, with larger tokens; the contest's own scale is not published). Route weights are uniform in [0, 1).

    Args:
        case: sizes; hidden and intermediate may be any positive integer.
        sizes: valid rows of each expert, E integers that sum to ``case.num_tokens``; overrides ``distribution``.
        distribution: how the sizes are drawn when not given, see :func:`group_sizes`.
        variant: the reading of the contract.
        values: "normal", "large" (8x), "tiny" (1/256) or "mixed" (each row its own power of two).
        token_poison: what padding rows of the tokens hold: "nan", "large" (+-60000) or "zeros".
        seed: same seed, same bits.
        device: where the tensors end up.

    Raises:
        ContractError: for sizes that are negative, do not sum to N or do not match E, and unknown names.
    """
    if sizes is None:
        sizes = group_sizes(distribution, case.num_experts, case.num_tokens, seed)
    layout = GroupedLayout(tuple(sizes), padding_rule=variant.padding_rule)
    if layout.num_experts != case.num_experts:
        raise ContractError(f"got {layout.num_experts} group sizes, expected {case.num_experts}, one for each expert")
    if layout.num_rows != case.num_tokens:
        raise ContractError(
            f"got group sizes that sum to {layout.num_rows}, expected {case.num_tokens}, the raw rows of {case.name}"
        )
    generator = torch.Generator().manual_seed(seed)
    experts, hidden, intermediate = case.num_experts, case.hidden, case.intermediate
    tokens = _tokens(layout, hidden, values, token_poison, generator, padded=variant.storage == "padded")
    gate_w = _normal((experts, intermediate, hidden), generator, hidden**-0.5)
    up_w = _normal((experts, intermediate, hidden), generator, hidden**-0.5)
    down_w = _normal((experts, hidden, intermediate), generator, intermediate**-0.5)
    weights = torch.rand(layout.num_rows, generator=generator).to(getattr(torch, variant.route_weight_dtype))
    entries = experts + 1 if variant.offsets_length == "E+1" else experts
    out = torch.zeros_like(tokens)
    if variant.out_fill == "nan":
        out.fill_(float("nan"))
    elif variant.out_fill == "stale":
        out.copy_(torch.randn(out.shape, generator=generator))

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device).contiguous()

    def integers(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Inputs(
        case=case, layout=layout, variant=variant,
        stacked_expert_tokens=moved(tokens), gate_w=moved(gate_w), up_w=moved(up_w), down_w=moved(down_w),
        routed_expert_weights=moved(weights),
        group_sizes=integers(layout.sizes),
        group_offsets=integers(layout.offsets[:entries]),
        group_padded_offsets=integers(layout.padded_offsets[:entries]),
        group_idx_for_bx=integers(_block_map(layout, variant)),
        out=moved(out),
    )  # fmt: skip


def draw_inputs(
    case: Case,
    sizes: Sequence[int],
    *,
    values: Values = "normal",
    token_poison: TokenPoison = "nan",
    seed: int = 0,
    device: str | torch.device = "cpu",
    idle_weights: bool = True,
) -> Inputs:
    """The tensors of :func:`make_inputs` under the judge profile, tokens and weights drawn on the device.

    A contest case holds gigabytes of weights, which a CPU takes minutes to draw and to move.

    Args:
        case, sizes, values, token_poison: as for :func:`make_inputs`.
        seed: same seed and same kind of device, same bits.
        device: where tokens and weights are drawn.
        idle_weights: whether the weights of experts without rows are drawn. Otherwise they are zeros, on a CPU in
            memory that is never touched.

    Raises:
        ContractError: as :func:`make_inputs`.
    """
    thin = make_inputs(replace(case, hidden=1, intermediate=1), sizes, seed=seed, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    tokens = _tokens(thin.layout, case.hidden, values, token_poison, generator)

    def weights(rows: int, columns: int) -> torch.Tensor:
        shape = (case.num_experts, rows, columns)
        if idle_weights:
            made = torch.empty(shape, dtype=torch.float16, device=device)
        else:
            # numpy's zeros are pages that the system only hands out when somebody writes to them.
            made = torch.from_numpy(np.zeros(shape, dtype=np.float16)).to(device)
        for expert, size in enumerate(thin.layout.sizes):
            if size or idle_weights:
                made[expert] = torch.randn(rows, columns, generator=generator, device=device).mul_(columns**-0.5)
        return made

    return replace(
        thin, case=case, stacked_expert_tokens=tokens, gate_w=weights(case.intermediate, case.hidden),
        up_w=weights(case.intermediate, case.hidden), down_w=weights(case.hidden, case.intermediate),
        out=torch.zeros_like(tokens),
    )  # fmt: skip


def _poison(rows: int, hidden: int, kind: TokenPoison, generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    if kind == "nan":
        return torch.full((rows, hidden), float("nan"), dtype=torch.float16, device=device)
    if kind == "zeros":
        return torch.zeros(rows, hidden, dtype=torch.float16, device=device)
    if kind == "large":
        signs = torch.randint(0, 2, (rows, hidden), generator=generator, device=device) * 2 - 1
        return (signs * 60000.0).half()
    raise ContractError(f"got token_poison={kind!r}, expected one of {', '.join(get_args(TokenPoison))}")


def _block_map(layout: GroupedLayout, variant: Variant) -> tuple[int, ...]:
    if variant.block_map == "exact":
        return layout.block_map
    # As in the operator's earlier public version: room for the worst case, the rest naming the last expert.
    entries = max(-(-layout.num_rows // layout.block) + layout.num_experts, len(layout.block_map))
    surplus = itertools.repeat(layout.num_experts - 1, entries - len(layout.block_map))
    return (*layout.block_map, *surplus)
