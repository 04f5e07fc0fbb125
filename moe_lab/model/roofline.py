"""What a case must do and how fast a device could do it: FLOPs, compulsory bytes, intensity, bounds. Only useful work
counts: rows of padding, which most kernels compute, stand beside it (``padded_flops``) and are never part of it.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from moe_lab.machine.devices import Roof
from moe_lab.problem.contract import BLOCK_TOKEN, Case
from moe_lab.problem.errors import ContractError
from moe_lab.problem.layout import GroupedLayout, group_sizes

_FP16 = 2  # bytes of a number of every large tensor of the contract


@dataclass(frozen=True)
class Work:
    """What must be computed and moved."""

    flops: int  # operations on valid rows, a multiply-add being two
    weight_bytes: float  # weights read from device memory
    activation_bytes: int  # tokens and hidden read, hidden and results written
    padded_flops: int  # what is computed if every row of every block is: at least `flops`

    @property
    def bytes(self) -> float:
        """All bytes that cross device memory."""
        return self.weight_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """FLOP per byte; 0 if nothing is moved."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class CaseWork:
    """The work of a case, stage by stage."""

    stage1: Work  # gate and up projections and silu(gate) * up
    stage2: Work  # down projection and the route weight

    @property
    def whole(self) -> Work:
        """Both stages."""
        return Work(*map(sum, zip(astuple(self.stage1), astuple(self.stage2), strict=True)))


def work(
    case: Case, sizes: Sequence[int] | None = None, *, weight_passes: float = 1.0, block: int = BLOCK_TOKEN
) -> CaseWork:
    """Count the useful operations and compulsory bytes of a case: what every bound in this project rests on.

    Stage 1 does 4*H*I*N operations, stage 2 does 2*H*I*N. Bytes are fp16: gate, up and down weights ``weight_passes``
    times, tokens read, hidden written and read (a cache that kept all of it would save 4% of the bytes in case 1, 1% in
    the others), results written. Route weights and the few integers are left out: less than 0.01% of it. ``sizes`` are
    the valid rows of each expert, E integers that sum to N, balanced by default; experts with no row read no weight.
    ``block`` is the rows of a block, for ``padded_flops``. Raises ContractError for sizes that do not fit the case, or
    fewer than one pass.

    >>> from moe_lab.problem.contract import CASES
    >>> done = work(CASES[1]).whole
    >>> round(done.flops / 1e9, 1), round(done.bytes / 1e9, 3)
    (228.7, 1.704)
    """
    if weight_passes < 1:
        raise ContractError(f"got weight_passes={weight_passes}, expected at least 1: each weight is needed once")
    weights, inner = case.hidden * case.intermediate, case.hidden + case.intermediate
    layout = GroupedLayout(tuple(sizes) if sizes is not None else balanced(case), block=block)
    rows, busy = layout.num_rows, layout.num_experts if sizes is None else sum(map(bool, layout.sizes))
    if (layout.num_experts, rows) != (case.num_experts, case.num_tokens):
        raise ContractError(
            f"got {layout.num_experts} sizes with {rows} rows, expected {case.num_experts} sizes with "
            f"{case.num_tokens} rows, the experts and raw rows of {case.name}"
        )

    def stage(matrices: int) -> Work:
        flops, each = 2 * matrices * weights, matrices * weights * busy * _FP16
        return Work(flops * rows, each * weight_passes, rows * inner * _FP16, flops * layout.num_padded_rows)

    return CaseWork(stage(2), stage(1))


def balanced(case: Case) -> tuple[int, ...]:
    """Group sizes that differ by at most one, the larger ones first.

    >>> balanced(Case("small", 3, 8, 8, 7))
    (3, 2, 2)
    """
    return group_sizes("balanced", case.num_experts, case.num_tokens)


@dataclass(frozen=True)
class Bound:
    """The least time a device could need."""

    arithmetic_ms: float  # FLOPs over the peak
    memory_ms: float  # bytes over the bandwidth

    @property
    def time_ms(self) -> float:
        """The larger of the two: both are done at once at best."""
        return max(self.arithmetic_ms, self.memory_ms)

    @property
    def side(self) -> Literal["arithmetic", "memory"]:
        """Which of the two binds."""
        return "arithmetic" if self.arithmetic_ms > self.memory_ms else "memory"


def bound(done: Work, roof: Roof) -> Bound:
    """Least time for some work under a roof.

    >>> from moe_lab.problem.contract import CASES
    >>> whole = work(CASES[1]).whole
    >>> round(bound(whole, Roof("H200", 706, 4.3, "measured")).time_ms, 3)
    0.396
    """
    return Bound(done.flops / (roof.peak_tflops * 1e9), done.bytes / (roof.bandwidth_tbps * 1e9))


def attainable_tflops(intensity: float, roof: Roof) -> float:
    """The roofline itself: min(peak, intensity * bandwidth), in TFLOP/s.

    >>> attainable_tflops(100, Roof("H200", 706, 4.3, "measured"))
    430.0
    """
    return min(roof.peak_tflops, intensity * roof.bandwidth_tbps)
