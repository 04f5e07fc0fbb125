"""The trusted input generator: one place that makes the ten tensors, for every distribution and every variant.

Everything is seeded and made on the CPU before it moves to a device, so the same seed gives the same bits everywhere;
:func:`draw_inputs` draws on the device, where the contest's sizes take milliseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from moe_lab.problem.contract import ARGUMENTS, JUDGE_PROFILE, Case, Variant
from moe_lab.problem.errors import ContractError
from moe_lab.problem.layout import DISTRIBUTIONS as DISTRIBUTIONS
from moe_lab.problem.layout import Distribution, GroupedLayout, group_sizes

Values = Literal["normal", "large", "tiny", "mixed"]
TokenPoison = Literal["nan", "large", "zeros"]

#: Scale of the tokens for each kind of values; "mixed" gives each row a power of two of its own.
_TOKEN_SCALE = {"normal": 1.0, "large": 8.0, "tiny": 2.0**-8, "mixed": 1.0}
_PADDING = {"nan": float("nan"), "large": 60000.0, "zeros": 0.0}


@dataclass(frozen=True)
class Inputs:
    """The ten tensors of one call and the layout behind them.

    Tensors are named, shaped and typed as :data:`moe_lab.problem.contract.ARGUMENTS` says, or as ``variant`` reads it:
    tokens and ``out`` (N, H) under compact storage, offsets (E,), route weights in fp16, a longer block map.
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
        return tuple(getattr(self, argument.name) for argument in ARGUMENTS)

    @property
    def valid_rows(self) -> torch.Tensor:
        """Row in ``stacked_expert_tokens`` and ``out`` of each raw row, (N,) int64 on the inputs' device."""
        rows = range(self.layout.num_rows) if self.variant.storage == "compact" else self.layout.raw_to_padded
        return torch.tensor(rows, dtype=torch.int64, device=self.out.device)


def make_inputs(
    case: Case, sizes: Sequence[int] | None = None, *, distribution: Distribution = "multinomial",
    variant: Variant = JUDGE_PROFILE, values: Values = "normal", token_poison: TokenPoison = "nan", seed: int = 0,
    device: str | torch.device = "cpu",
) -> Inputs:  # fmt: skip
    """Make the ten tensors of one call: same seed, same bits.

    Tokens are N(0, 1), times 8 for ``values="large"``, 1/256 for "tiny", a power of two of each row's own for "mixed";
    weights are N(0, 1) divided by the root of their reduction length, so that activations stay of order 1 (scale of the
    platform's earlier public version of the operator, with larger tokens; the contest's own is not published). Route
    weights are uniform in [0, 1). Padding rows of the tokens hold NaN, +-60000 ("large") or zeros. ``sizes`` are drawn
    from ``distribution`` by default, see :func:`group_sizes`. Raises ContractError for sizes that are negative, do not
    sum to N or do not match E, and unknown names.
    """
    experts, hidden, intermediate = case.num_experts, case.hidden, case.intermediate
    sizes = group_sizes(distribution, experts, case.num_tokens, seed) if sizes is None else sizes
    layout = GroupedLayout(tuple(sizes), padding_rule=variant.padding_rule)
    if layout.num_experts != experts:
        raise ContractError(f"got {layout.num_experts} group sizes, expected {experts}, one for each expert")
    if layout.num_rows != case.num_tokens:
        wanted = f"{case.num_tokens}, the raw rows of {case.name}"
        raise ContractError(f"got group sizes that sum to {layout.num_rows}, expected {wanted}")
    generator = torch.Generator().manual_seed(seed)
    tokens = _tokens(layout, hidden, values, token_poison, generator, padded=variant.storage == "padded")
    weights = [
        torch.randn((experts, rows, columns), generator=generator).mul_(columns**-0.5).half()
        for rows, columns in ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    ]
    route_weights = torch.rand(layout.num_rows, generator=generator).to(getattr(torch, variant.route_weight_dtype))
    out = torch.full_like(tokens, float("nan") if variant.out_fill == "nan" else 0)
    if variant.out_fill == "stale":
        out.copy_(torch.randn(out.shape, generator=generator))
    entries = experts + 1 if variant.offsets_length == "E+1" else experts
    block_map = layout.block_map
    if variant.block_map == "surplus":
        # As in the operator's earlier public version: room for the worst case.
        block_map += (experts - 1,) * (-(-layout.num_rows // layout.block) + experts - len(block_map))
    integers = (layout.sizes, layout.offsets[:entries], layout.padded_offsets[:entries], block_map)
    tensors = [tokens, *weights, route_weights, *(torch.tensor(row, dtype=torch.int32) for row in integers), out]
    return Inputs(case, layout, variant, *(tensor.to(device) for tensor in tensors))


def draw_inputs(
    case: Case, sizes: Sequence[int], *, values: Values = "normal", token_poison: TokenPoison = "nan", seed: int = 0,
    device: str | torch.device = "cpu", idle_weights: bool = True,
) -> Inputs:  # fmt: skip
    """The tensors of :func:`make_inputs` under the judge profile, tokens and weights drawn on the device.

    A contest case holds gigabytes of weights, which a CPU takes minutes to draw and to move. The same seed gives the
    same bits on the same kind of device. Without ``idle_weights`` those of experts without rows are not drawn but
    zeros, on a CPU in memory that is never touched. Raises ContractError as :func:`make_inputs`.
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


def _tokens(
    layout: GroupedLayout, hidden: int, values: str, poison: str, generator: torch.Generator, padded: bool = True
) -> torch.Tensor:
    """Tokens of one call on the generator's device: (P, H) fp16, or (N, H) without padding rows."""
    for name, value, known in (("values", values, _TOKEN_SCALE), ("token_poison", poison, _PADDING)):
        if value not in known:
            raise ContractError(f"got {name}={value!r}, expected one of {', '.join(known)}")
    device, rows = generator.device, layout.num_rows
    scale: float | torch.Tensor = _TOKEN_SCALE[values]
    if values == "mixed":
        # Each row its own power of two, so that a relative error of a small row cannot hide behind a large one.
        scale = torch.exp2(torch.randint(-8, 4, (rows, 1), generator=generator, device=device).float())
    valid = torch.randn((rows, hidden), generator=generator, device=device).mul_(scale).half()
    if not padded:
        return valid
    tokens = torch.full((layout.num_padded_rows, hidden), _PADDING[poison], dtype=torch.float16, device=device)
    if poison == "large":
        tokens *= torch.randint(0, 2, tokens.shape, generator=generator, device=device) * 2 - 1
    tokens[torch.tensor(layout.raw_to_padded, dtype=torch.int64, device=device)] = valid
    return tokens
