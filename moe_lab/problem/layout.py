"""The grouped-padding layout: tokens sorted by expert, every group starting at a multiple of the block size.

*Raw* rows count valid rows only, N: route weights live there. *Padded* rows count storage, P: tokens and results live
there. Row r of expert e is raw row ``offsets[e] + r`` and padded row ``padded_offsets[e] + r``: do not mix the two.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, cast, get_args

from moe_lab.problem.contract import BLOCK_TOKEN, PaddingRule
from moe_lab.problem.errors import ContractError

if TYPE_CHECKING:
    import torch

Distribution = Literal["balanced", "multinomial", "skewed", "one_expert"]
DISTRIBUTIONS = cast(tuple[Distribution, ...], get_args(Distribution))


def group_sizes(distribution: Distribution, num_experts: int, num_rows: int, seed: int = 0) -> tuple[int, ...]:
    """Draw how many rows each expert gets: E sizes that sum to N.

    "balanced" sizes differ by at most one; "multinomial": each row picks an expert uniformly; "skewed": with Zipf
    weights, 1/rank over shuffled experts; "one_expert" takes all. Raises ContractError for another one, or no expert.

    >>> group_sizes("balanced", 3, 7)
    (3, 2, 2)
    """
    if num_experts < 1 or num_rows < 0:
        raise ContractError(f"got {num_experts} experts and {num_rows} rows, expected at least 1 and 0")
    if distribution not in DISTRIBUTIONS:
        raise ContractError(f"got distribution {distribution!r}, expected one of {', '.join(DISTRIBUTIONS)}")
    rng = random.Random(f"{distribution}-{num_experts}-{num_rows}-{seed}")
    if distribution == "balanced":
        drawn = [row % num_experts for row in range(num_rows)]
    elif distribution == "one_expert":
        drawn = [rng.randrange(num_experts)] * num_rows
    else:
        weights = [1.0 / rank if distribution == "skewed" else 1.0 for rank in range(1, num_experts + 1)]
        if distribution == "skewed":
            rng.shuffle(weights)
        drawn = rng.choices(range(num_experts), weights, k=num_rows)
    counts = Counter(drawn)
    return tuple(counts[expert] for expert in range(num_experts))


@dataclass(frozen=True)
class GroupedLayout:
    """Where every expert's rows lie.

    Raises ContractError for no expert, a size that is no integer or negative, or a block below 1.

    >>> layout = GroupedLayout((3, 0, 2), block=2)
    >>> layout.offsets, layout.padded_offsets, layout.block_map
    ((0, 3, 3, 5), (0, 4, 4, 6), (0, 0, 2))
    """

    sizes: tuple[int, ...]  # valid rows of each expert, E integers of at least 0
    block: int = BLOCK_TOKEN  # rows of a block, at least 1
    padding_rule: PaddingRule = "ceil"  # see :class:`moe_lab.problem.contract.Variant`

    def __post_init__(self) -> None:
        """Check every size, and keep them as a tuple of plain integers."""
        if not self.sizes:
            raise ContractError("got no group sizes, expected one for each expert")
        for expert, size in enumerate(self.sizes):
            if isinstance(size, bool) or int(size) != size:
                raise ContractError(f"got size {size!r} for expert {expert}, expected an integer")
            if size < 0:
                why = "usually because the sizes of the other experts already sum to more than the rows there are"
                raise ContractError(f"got size {size} for expert {expert}, expected at least 0, {why}")
        if self.block < 1:
            raise ContractError(f"got block={self.block}, expected at least 1 row")
        if self.padding_rule not in get_args(PaddingRule):
            raise ContractError(f"got padding_rule={self.padding_rule!r}, expected 'ceil' or 'plus_one'")
        object.__setattr__(self, "sizes", tuple(map(int, self.sizes)))

    @classmethod
    def from_choices(
        cls, choices: Sequence[int] | torch.Tensor, num_experts: int, block: int = BLOCK_TOKEN,
        padding_rule: PaddingRule = "ceil",
    ) -> GroupedLayout:  # fmt: skip
        """Count a router's choices, of any shape; raises ContractError for one outside [0, num_experts)."""
        flat = choices.flatten().tolist() if hasattr(choices, "flatten") else list(choices)
        for position, expert in enumerate(flat):
            if not 0 <= expert < num_experts:
                raise ContractError(f"got expert {expert} at position {position}, expected 0 to {num_experts - 1}")
        counts = Counter(flat)
        return cls(tuple(counts[expert] for expert in range(num_experts)), block, padding_rule)

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.sizes)

    @cached_property
    def num_blocks_of(self) -> tuple[int, ...]:
        """Blocks of each expert, shape (E,)."""
        return tuple(-(-(size + (self.padding_rule == "plus_one")) // self.block) for size in self.sizes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First raw row of each expert and, last, N; shape (E+1,)."""
        return (0, *itertools.accumulate(self.sizes))

    @cached_property
    def padded_offsets(self) -> tuple[int, ...]:
        """First padded row of each expert and, last, P; shape (E+1,); every entry a multiple of the block."""
        return (0, *itertools.accumulate(blocks * self.block for blocks in self.num_blocks_of))

    @cached_property
    def block_map(self) -> tuple[int, ...]:
        """Expert of each block of padded rows, shape (P/block,)."""
        return tuple(expert for expert, blocks in enumerate(self.num_blocks_of) for _ in range(blocks))

    @property
    def num_rows(self) -> int:
        """N, raw rows."""
        return self.offsets[-1]

    @property
    def num_padded_rows(self) -> int:
        """P, padded rows."""
        return self.padded_offsets[-1]

    @property
    def waste(self) -> float:
        """Share of the padded rows that are padding, in [0, 1]; 0 for an empty layout."""
        return 1 - self.num_rows / self.num_padded_rows if self.num_padded_rows else 0.0

    @cached_property
    def raw_to_padded(self) -> tuple[int, ...]:
        """Padded row of each raw row, shape (N,)."""
        groups = zip(self.padded_offsets, self.sizes, strict=False)
        return tuple(start + row for start, size in groups for row in range(size))

    def actual_rows(self, block: int) -> int:
        """Valid rows of a block, numbered from 0; raises ContractError for one that does not exist."""
        if not 0 <= block < len(self.block_map):
            raise ContractError(f"got block {block}, expected 0 to {len(self.block_map) - 1}")
        expert = self.block_map[block]
        left = self.sizes[expert] - (block * self.block - self.padded_offsets[expert])
        return max(0, min(self.block, left))


def permute(
    tokens: torch.Tensor, choices: torch.Tensor, route_weights: torch.Tensor, layout: GroupedLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gather tokens (T, H) into the layout of the same choices (T, K), padding rows zero.

    Returns ``stacked`` (P, H) in the dtype of tokens, ``weights`` (N,): the route_weights (T, K) in raw order, and
    ``source`` (N,) int64: the flat position t*K + k of each raw row, which :func:`unpermute` needs.
    Raises ContractError if the choices do not fill the layout.
    """
    import torch

    order = torch.argsort(choices.flatten(), stable=True)
    counts = torch.bincount(choices.flatten(), minlength=layout.num_experts).tolist()
    if tuple(counts) != layout.sizes:
        why = "usually because the layout was built from other choices"
        raise ContractError(f"got choices with group sizes {tuple(counts)}, expected {layout.sizes}, {why}")
    rows = torch.tensor(layout.raw_to_padded, dtype=torch.int64, device=tokens.device)
    stacked = torch.zeros(layout.num_padded_rows, tokens.shape[1], dtype=tokens.dtype, device=tokens.device)
    stacked[rows] = tokens[order // choices.shape[1]]
    return stacked, route_weights.flatten()[order], order


def unpermute(
    out: torch.Tensor, source: torch.Tensor, layout: GroupedLayout, num_tokens: int, top_k: int
) -> torch.Tensor:
    """Sum the K results of every token in fp32, for ``out`` (P, H), which already holds the route weights.

    Returns (T, H) in the dtype of ``out``; ``source`` (N,) is from :func:`permute`.
    """
    import torch

    rows = torch.tensor(layout.raw_to_padded, dtype=torch.int64, device=out.device)
    flat = torch.zeros(num_tokens * top_k, out.shape[1], dtype=torch.float32, device=out.device)
    flat[source] = out[rows].float()
    return flat.view(num_tokens, top_k, out.shape[1]).sum(dim=1).to(out.dtype)
