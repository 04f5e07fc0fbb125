"""What a tile costs and whether a device can pay: shared memory, registers, threads, waves, reads of the weights.

Shared memory is predicted as TileLang lays it out: a buffer that a pipelined loop fills from device memory exists
once per stage, and buffers whose lifetimes do not meet share their bytes. The prediction equals what TileLang lowers
for sm_80, byte for byte, over the shapes that the tests try; on a Hopper alignment and barriers come on top. Registers
are a lower bound: fragments spread evenly over the threads, with nothing for indices and copies in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moe_lab.machine.devices import Device
from moe_lab.model import tir
from moe_lab.model.roofline import balanced, work
from moe_lab.model.tir import Branch, Launch, Loop, Node, Number, Op, Unknown, product, walk
from moe_lab.problem.contract import Case
from moe_lab.problem.errors import DataError, SubmissionError
from moe_lab.problem.layout import GroupedLayout
from moe_lab.problem.submission import Submission

#: Every buffer starts at a multiple of it, and so does what follows the last one (TileLang for sm_80).
_ALIGN_BYTES = 16
#: Bytes of a 32-bit register.
_REGISTER_BYTES = 4


@dataclass(frozen=True)
class Placed:
    """One buffer of shared memory with its place."""

    name: str  # variable in the source
    size_bytes: int  # all copies together
    copies: int  # 1, or the stages of the pipeline that fills it
    offset_bytes: int  # where it starts; buffers that never live at once may overlap


@dataclass(frozen=True)
class KernelResources:
    """What one launch asks for; None is what cannot be told, see ``unknown``."""

    stage: int  # number of the launch, from 1, in the order of the calls
    grid: tuple[int | None, ...]  # blocks along each axis
    threads: int  # of a block
    shared: tuple[Placed, ...]  # buffers of shared memory, in the order of their places
    shared_bytes: int | None  # of a block
    accumulator_registers: int | None  # 32-bit registers of a thread that hold results of T.gemm
    fragment_registers: int | None  # fragments and arrays of a thread alive at once: a lower bound of its registers
    flops: int | None  # operations of all T.gemm in all blocks, rows of padding included
    # Read from each tensor in device memory by all blocks; at most, if a condition skips some.
    reads_bytes: dict[str, int | None] = field(hash=False)
    unknown: tuple[str, ...] = ()  # what could not be evaluated, naming its expression
    # Whether only run time knows which blocks multiply, so that `flops` and `reads_bytes` are upper limits.
    conditional: bool = False

    @property
    def blocks(self) -> int | None:
        """Blocks of the launch."""
        known = [extent for extent in self.grid if extent is not None]
        return math.prod(known) if len(known) == len(self.grid) else None


@dataclass(frozen=True)
class Resources:
    """What a submission asks for, for one case, launch by launch."""

    submission: Submission
    case: Case
    layout: GroupedLayout
    kernels: tuple[KernelResources, ...]

    @property
    def unknown(self) -> tuple[str, ...]:
        """Everything that could not be evaluated, each once."""
        return tuple(dict.fromkeys(text for kernel in self.kernels for text in kernel.unknown))

    @property
    def work_ratio(self) -> float | None:
        """Operations done over operations needed: what padding rows cost; 1 is none."""
        needed = work(self.case, self.layout.sizes).whole.flops
        done = _sum(kernel.flops for kernel in self.kernels)
        return done / needed if needed and done is not None else None

    def weight_passes(self, *kernels: KernelResources) -> dict[str, float | None]:
        """How often each weight is read, on average over its elements; what the caches catch counts too.

        Experts with no row are not read, so they are left out of the size.

        Args:
            *kernels: the launches to look at; all by default.
        """
        size_bytes = 2 * sum(map(bool, self.layout.sizes)) * self.case.hidden * self.case.intermediate
        passes: dict[str, float | None] = {}
        for name in ("gate_w", "up_w", "down_w"):
            found = [kernel.reads_bytes[name] for kernel in kernels or self.kernels if name in kernel.reads_bytes]
            bytes_read = _sum(found)
            passes[name] = bytes_read / size_bytes if found and bytes_read is not None and size_bytes else None
        return passes


def _sum(values: Iterable[int | None]) -> int | None:
    """Sum of what is known, None if something is not."""
    every = list(values)
    return None if None in every else sum(value for value in every if value is not None)


def resources(submission: Submission, case: Case, sizes: Sequence[int] | None = None, *, load: str = "") -> Resources:
    """Predict what every launch of a submission asks for.

    Args:
        submission: with the literals wanted.
        case: sizes.
        sizes: valid rows of each expert; equal groups by default. The grid and the reads follow from them.
        load: see :func:`moe_lab.model.tir.launches`.

    Raises:
        SubmissionError: if the file cannot be parsed or followed, or launches nothing.
        ContractError: for sizes that do not fit the case.
    """
    layout = GroupedLayout(tuple(sizes) if sizes is not None else balanced(case))
    work(case, layout.sizes)  # refuses sizes that do not fit
    found = tir.launches(submission, case, layout, load=load)
    if not found:
        raise SubmissionError(f"got no T.Kernel in what {submission.name} calls from run_kernel, expected at least one")
    kernels = tuple(_describe(stage, launch) for stage, launch in enumerate(found, start=1))
    return Resources(submission, case, layout, kernels)


def _describe(stage: int, launch: Launch) -> KernelResources:
    unknown: dict[str, None] = {}

    def known(value: Number, what: str) -> int | None:
        if isinstance(value, Unknown):
            unknown[f"{what} of stage {stage}: {value.reason}"] = None
            return None
        return value

    grid, blocks = tuple(known(extent, "the grid") for extent in launch.grid), product(launch.grid)
    placed, shared = _place(launch)
    shared_bytes = known(shared, "the shared memory")
    accumulators, fragments = _registers(launch, known)
    flops = known(_times(blocks, _total(launch.body, lambda op: op.flops)), "the operations")
    reads: dict[str, int | None] = {}
    for place in dict.fromkeys(place for op in walk(launch.body) for place in op.moved):
        name, bits = launch.buffers[place].name, tir.dtype_bits(launch.buffers[place].dtype)
        count = _times(blocks, _total(launch.body, lambda op, place=place: op.moved.get(place, 0)))  # type: ignore[misc]
        read = known(_times(count, bits if isinstance(bits, Unknown) else bits // 8), f"what is read of {name}")
        reads[name] = _sum([reads.get(name, 0), read])
    return KernelResources(
        stage, grid, launch.threads, placed, shared_bytes, accumulators, fragments, flops, reads, tuple(unknown),
        _conditional(launch.body),
    )  # fmt: skip


def _registers(launch: Launch, known: Callable[[Number, str], int | None]) -> tuple[int | None, int | None]:
    """Registers of a thread that hold results of T.gemm, and all that fragments and local arrays need."""
    fragments: dict[int, int] = {}
    local, whole, used = 0, launch.threads > 0, set().union(*map(_touched, launch.body))
    for place, buffer in enumerate(launch.buffers):
        if buffer.scope in ("fragment", "local"):
            size = known(buffer.size_bytes, f"the size of {buffer.name}")
            whole &= size is not None
            # A local array is each thread's own; a fragment is spread over the threads of the block.
            if buffer.scope == "fragment":
                each = math.ceil((size or 0) / max(1, launch.threads))
                fragments[place] = math.ceil(each / _REGISTER_BYTES)
            elif place in used:
                local += math.ceil((size or 0) / _REGISTER_BYTES)
    if not whole:
        return None, None
    results = {op.writes[0] for op in walk(launch.body) if op.kind == "gemm" and op.writes}
    held = {place: size for place, size in fragments.items() if place in results}
    return _peak(launch.body, held), local + _peak(launch.body, fragments)


def _conditional(nodes: Sequence[Node]) -> bool:
    """Whether a T.gemm stands inside an ``if`` of the device."""
    return any(
        any(op.kind == "gemm" for op in walk([node])) if isinstance(node, Branch) else _conditional(node.body)
        for node in nodes
        if not isinstance(node, Op)
    )


def _touched(node: Node) -> set[int]:
    return {place for op in walk([node]) for place in (*op.reads, *op.writes)}


def _spans(nodes: Sequence[Node], places: Iterable[int]) -> dict[int, tuple[int, int]]:
    """First and last statement that touch each buffer."""
    touched = [_touched(node) for node in nodes]
    uses = {place: [at for at, found in enumerate(touched) if place in found] for place in places}
    return {place: (at[0], at[-1]) for place, at in uses.items() if at}


def _peak(nodes: Sequence[Node], sizes: dict[int, int]) -> int:
    """The most that is alive at once, from first to last use; what one loop or one way alone uses lives inside it."""
    spans, inside = _spans(nodes, sizes), [0] * len(nodes)
    for at, node in enumerate(nodes):
        ways = () if isinstance(node, Op) else node.ways
        uses = [set().union(*map(_touched, way)) for way in ways]
        mine = {place for place, span in spans.items() if span == (at, at) and sum(place in use for use in uses) == 1}
        for way, use in zip(ways, uses, strict=True):
            inside[at] = max(inside[at], _peak(way, {place: sizes[place] for place in use & mine}))
        spans = {place: span for place, span in spans.items() if place not in mine}
    alive = [
        sum(sizes[place] for place, (first, last) in spans.items() if first <= at <= last) for at in range(len(nodes))
    ]
    return max(map(sum, zip(inside, alive, strict=True)), default=0)


def _times(left: Number, right: Number) -> Number:
    # Nothing times an unknown is still nothing: a loop of unknown length that moves no weight hides none.
    return 0 if left == 0 or right == 0 else product((left, right))


def _total(nodes: Sequence[Node], count: Callable[[Op], Number]) -> Number:
    """Sum over a block's statements, loops multiplied out; of two branches the larger."""
    parts: list[Number] = []
    for node in nodes:
        if isinstance(node, Op):
            parts.append(count(node))
        else:
            ways = [_total(way, count) for way in node.ways]
            most = max(ways, key=lambda way: math.inf if isinstance(way, Unknown) else way)
            parts.append(_times(node.trips, most) if isinstance(node, Loop) else most)
    return tir.total(parts)


# ---- shared memory, as TileLang lays it out --------------------------------------------------------------------


@dataclass
class _Life:
    name: str
    scope: str
    copies: int
    size: int
    start: int
    end: int


def _place(launch: Launch) -> tuple[tuple[Placed, ...], Number]:
    """Places of all shared buffers and the bytes they need together."""
    copies = _copies(launch.body)
    unmodelled = _unmodelled(launch, copies)
    if unmodelled:
        return (), Unknown(unmodelled)
    lives: list[_Life] = []
    # TileLang drops what nothing uses.
    shared = [place for place, buffer in enumerate(launch.buffers) if buffer.scope.startswith("shared")]
    for place, (first, last) in _spans(_statements(launch.body), shared).items():
        buffer, number = launch.buffers[place], copies.get(place, 1)
        size = product((buffer.size_bytes, number))
        if isinstance(size, Unknown):
            return (), size
        lives.append(_Life(buffer.name, buffer.scope, number, size, first, last + 1))
    share = not launch.pass_configs.get("tl_disable_shared_memory_reuse", False)
    placed: list[Placed] = []
    size_bytes = 0
    # Static and dynamic shared memory are two areas of the same store.
    for scope in ("shared.dyn", "shared"):
        area = [life for life in lives if life.scope == scope]
        offsets, top = _pack(area, share)
        placed += [
            Placed(life.name, life.size, life.copies, size_bytes + offset)
            for life, offset in zip(area, offsets, strict=True)
        ]
        size_bytes += _aligned(top)
    return tuple(sorted(placed, key=lambda item: item.offset_bytes)), size_bytes


def _unmodelled(launch: Launch, copies: Iterable[int]) -> str:
    """Why the shared memory of a launch cannot be predicted; empty if it can."""
    if launch.pass_configs.get("tl_enable_aggressive_shared_memory_merge", False):
        return "the pass config for aggressive merging of shared memory is not modelled"
    if any(op.kind == "reduce" for op in walk(launch.body)):
        return "T.reduce takes shared memory of its own, which is not modelled"
    for loop in tir.loops(launch.body):
        # A pipeline of an order of its own changes copies and lifetimes.
        if any(note.startswith("tl_pipeline") for note in loop.notes) and any(map(_touched, loop.body)):
            return f"the pipeline over {loop.name} with an explicit order is not modelled"
    # TileLang refuses a buffer that a pipeline multiplies and something else touches too.
    users: dict[int, set[int]] = {place: set() for place in copies}

    def collect(nodes: Sequence[Node], pipeline: int) -> None:
        for node in nodes:
            if isinstance(node, Op):
                for place in users.keys() & _touched(node):
                    users[place].add(pipeline)
            else:
                own = isinstance(node, Loop) and (node.num_stages or 0) > 1
                for way in node.ways:
                    collect(way, id(node) if own else pipeline)

    collect(launch.body, 0)
    split = next((launch.buffers[place].name for place, where in users.items() if len(where) > 1), "")
    return split and (
        f"{split} is multiplied by the pipeline of one loop and used in another or outside, which TileLang refuses"
    )


def _copies(nodes: Sequence[Node]) -> dict[int, int]:
    """Number of copies of each buffer that a pipelined loop fills from device memory."""
    copies: dict[int, int] = {}
    for loop in tir.loops(nodes):
        for statement in _statements(loop.body) if (loop.num_stages or 0) > 1 else ():
            ops = list(walk([statement]))
            if ops and all(op.pure_copy for op in ops):
                copies |= dict.fromkeys((place for op in ops for place in op.writes), loop.num_stages or 1)
    return copies


def _statements(nodes: Sequence[Node]) -> list[Node]:
    """The statements whose order decides lifetimes.

    TileLang gives an ``if`` without ``else`` to each statement inside it, and a loop of one trip vanishes; both are
    as good as not there. Any other loop or branch counts as one statement.
    """
    flat: list[Node] = []
    for node in nodes:
        if isinstance(node, Branch):
            transparent = not node.orelse
        else:
            transparent = isinstance(node, Loop) and node.num_stages is None and node.trips == 1
        flat += _statements(node.body) if transparent and not isinstance(node, Op) else [node]
    return flat


def _pack(lives: Sequence[_Life], share: bool) -> tuple[list[int], int]:
    """Offsets of buffers and the top of the area: linear scan, best fit into what died, as TileLang's merge pass."""
    offsets, top = [0] * len(lives), 0
    active: list[tuple[int, int, int]] = []  # offset, where it ends, when it dies
    for index in sorted(range(len(lives)), key=lambda i: (lives[i].start, -lives[i].size, lives[i].name)):
        life = lives[index]
        active = sorted(part for part in active if not share or part[2] > life.start)
        ends = [0, *(end for _, end, _ in active)]
        gaps = zip(ends, [*(offset for offset, _, _ in active), top], strict=True)
        fits = [(stop - start, _aligned(start)) for start, stop in gaps if _aligned(start) + life.size <= stop]
        offset = min(fits)[1] if fits else _aligned(ends[-1])
        active.append((offset, offset + life.size, life.end))
        offsets[index], top = offset, max(top, offset + life.size)
    return offsets, top


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN_BYTES) * _ALIGN_BYTES


# ---- against a device ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelFit:
    """One launch on one device."""

    kernel: KernelResources  # what it asks for
    reasons: tuple[str, ...]  # why it does not fit, one sentence each; empty if it does
    waves_of_threads: int  # waves (warps) of a block
    blocks_per_processor: int | None  # that one can hold at once, at most; 0 if it does not fit; None if unknown
    limited_by: str  # what keeps it from holding one more
    grid_waves: float | None  # rounds that the grid takes, as a fraction: 4.2 takes as long as 5

    @property
    def wave_efficiency(self) -> float | None:
        """Share of the processors' rounds that holds a block: 4.2 waves in 5 rounds are 0.84."""
        return self.grid_waves / math.ceil(self.grid_waves) if self.grid_waves else None


@dataclass(frozen=True)
class Fit:
    """A submission on one device, launch by launch."""

    device: Device
    kernels: tuple[KernelFit, ...]

    @property
    def fits(self) -> bool | None:
        """Whether every launch fits; None if none fails but something is unknown."""
        if any(kernel.reasons for kernel in self.kernels):
            return False
        return None if any(kernel.blocks_per_processor is None for kernel in self.kernels) else True


def fit(found: Resources, device: Device) -> Fit:
    """Hold what a submission asks for against what a device has.

    Raises:
        DataError: for a CPU, which has no such limits.
    """
    if device.kind != "gpu":
        raise DataError(f"got {device.title}, expected a GPU, because a CPU has no such limits")
    return Fit(device, tuple(_fit_kernel(kernel, device) for kernel in found.kernels))


def _fit_kernel(kernel: KernelResources, device: Device) -> KernelFit:
    where, stage = device.title, f"stage {kernel.stage}"
    shared, threads, registers = kernel.shared_bytes, kernel.threads, kernel.fragment_registers
    waves = math.ceil(threads / device.lanes)
    wrong = {
        f"{stage} needs {shared} bytes of shared memory, a block of the {where} has {device.shared_per_block_bytes}":
            (shared or 0) > device.shared_per_block_bytes,
        f"{stage} keeps at least {registers} registers a thread in fragments, the {where} has "
        f"{device.registers_per_thread}: the rest goes to memory": (registers or 0) > device.registers_per_thread,
        f"{stage} has {threads} threads a block, the {where} takes {device.most_threads_per_block}":
            threads > device.most_threads_per_block,
        f"{stage} has {threads} threads, no multiple of the {where}'s waves of {device.lanes} lanes":
            threads % device.lanes or threads < 1,
    }  # fmt: skip
    reasons = tuple(reason for reason, applies in wrong.items() if applies)
    limits = {"threads": device.threads_per_processor // max(1, waves * device.lanes)}
    if shared:
        each = shared + device.shared_reserved_per_block_bytes
        limits["shared memory"] = device.shared_per_processor_bytes // each
    if registers:
        limits["registers"] = device.registers_per_processor // max(1, registers * waves * device.lanes)
    resident = 0 if reasons else None if None in (shared, registers) else min(limits.values())
    limited_by = "" if reasons else min(limits, key=lambda key: limits[key])
    grid_waves = kernel.blocks / (resident * device.processors) if resident and kernel.blocks else None
    return KernelFit(kernel, reasons, waves, resident, limited_by, grid_waves)


def as_dict(found: Resources, fits: Sequence[Fit]) -> dict[str, Any]:
    """Everything as plain data for strict JSON; what is unknown is None and named under "unknown"."""
    sizes = ("name", "num_experts", "hidden", "intermediate", "num_tokens")
    figures = ("reasons", "waves_of_threads", "blocks_per_processor", "limited_by", "grid_waves", "wave_efficiency")
    devices = [
        {
            "device": item.device.name,
            "fits": item.fits,
            "kernels": [
                {"stage": part.kernel.stage, **{name: getattr(part, name) for name in figures}} for part in item.kernels
            ],
        }
        for item in fits
    ]
    return {
        "submission": found.submission.name,
        "source_hash": found.submission.source_hash,
        "case": {name: getattr(found.case, name) for name in sizes},
        "group_sizes": found.layout.sizes,
        "padding_waste": found.layout.waste,
        "work_ratio": found.work_ratio,
        "weight_passes": found.weight_passes(),
        "kernels": [asdict(kernel) for kernel in found.kernels],
        "devices": devices,
        "unknown": found.unknown,
    }


def lowered_figures(submission: Submission, case: Case, device: Device) -> list[dict[str, Any]]:
    """What TileLang's own lowering says, in a child process that runs the submission's host code.

    For a card with 64 lanes sm_80 gives the shared memory and gfx90a, a stand-in and not that card, the layout
    inference for 64 lanes; for a Hopper its own target gives both.

    Returns:
        One entry a target: "target", "stand_in" (whether the target is another card's), "error" (None or TileLang's
        reason) and "kernels", each with name, shared_bytes, threads and grid.
    """
    from moe_lab.model.lowering import Lowering, LoweringError, lower_many

    targets = ["sm_90a"] if device.architecture == "sm_90a" else ["sm_80"]
    targets += ["gfx90a"] if device.lanes == 64 else []
    found: list[dict[str, Any]] = []
    answers = lower_many([Lowering(submission, case, target) for target in targets])
    for target, answer in zip(targets, answers, strict=True):
        error = str(answer) if isinstance(answer, LoweringError) else None
        kernels = [
            {name: getattr(kernel, name) for name in ("name", "shared_bytes", "threads", "grid")}
            for kernel in ([] if isinstance(answer, LoweringError) else answer)
        ]
        found.append({"target": target, "stand_in": target != device.architecture, "error": error, "kernels": kernels})
    return found
