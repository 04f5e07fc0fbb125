"""What a tile costs and whether a device can pay: shared memory, registers, threads, waves, reads of the weights.

Shared memory is predicted as TileLang lays it out for sm_80, byte for byte over the shapes that the tests try; on a
Hopper alignment and barriers come on top. Registers are a lower bound: nothing for indices and copies in flight.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moe_lab.machine.devices import Device
from moe_lab.model import tir
from moe_lab.model.lowering import Lowering, LoweringError, lower_many
from moe_lab.model.roofline import balanced, work
from moe_lab.model.tir import Branch, Launch, Loop, Node, Number, Op, Unknown, every, total
from moe_lab.problem.contract import Case
from moe_lab.problem.errors import DataError, SubmissionError
from moe_lab.problem.layout import GroupedLayout
from moe_lab.problem.submission import Submission

_ALIGN_BYTES = 16  # every buffer of shared memory starts at a multiple of it, and so does what follows the last
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
        extents: tuple[Any, ...] = self.grid
        return None if None in extents else math.prod(extents)


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
        """How often each weight is read by some launches (all by default), on average over its elements.

        What the caches catch counts too. Experts with no row are not read, so they are left out of the size.
        """
        size_bytes = 2 * sum(map(bool, self.layout.sizes)) * self.case.hidden * self.case.intermediate
        passes: dict[str, float | None] = dict.fromkeys(("gate_w", "up_w", "down_w"))
        for name in passes:
            found = [kernel.reads_bytes[name] for kernel in kernels or self.kernels if name in kernel.reads_bytes]
            if found and size_bytes and (bytes_read := _sum(found)) is not None:
                passes[name] = bytes_read / size_bytes
        return passes


def _sum(values: Iterable[int | None]) -> int | None:
    """Sum of what is known, None if something is not."""
    found: list[Any] = list(values)
    return None if None in found else sum(found)


def resources(submission: Submission, case: Case, sizes: Sequence[int] | None = None, *, load: str = "") -> Resources:
    """Predict what every launch of a submission asks for; see :func:`moe_lab.model.tir.launches` for ``load``.

    The grid and the reads follow from ``sizes``, the valid rows of each expert: equal groups by default. Raises
    SubmissionError if the file cannot be parsed or followed, or launches nothing, ContractError for sizes that do not
    fit the case.
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

    grid, blocks, body = tuple(known(extent, "the grid") for extent in launch.grid), math.prod(launch.grid), launch.body
    placed, shared = _place(launch)
    shared_bytes = known(shared, "the shared memory")
    accumulators, fragments = _registers(launch, known)
    flops = known(blocks * total(body, lambda op: op.flops), "the operations")
    reads: dict[str, Number] = {}
    for place, count in tir.moved(body).items():
        buffer = launch.buffers[place]
        reads[buffer.name] = reads.get(buffer.name, 0) + blocks * count * buffer.bits // 8
    reads_bytes = {name: known(read, f"what is read of {name}") for name, read in reads.items()}
    conditional = any(op.kind == "gemm" for op in every(list(every(body, Branch)), Op))
    return KernelResources(
        stage, grid, launch.threads, placed, shared_bytes, accumulators, fragments, flops, reads_bytes,
        tuple(unknown), conditional,
    )  # fmt: skip


def _registers(launch: Launch, known: Callable[[Number, str], int | None]) -> tuple[int | None, int | None]:
    """Registers of a thread that hold results of T.gemm, and all that fragments and local arrays need."""
    buffers, sizes = launch.buffers, dict[int, Any]()
    for place, buffer in enumerate(buffers):
        if buffer.scope in ("fragment", "local"):
            sizes[place] = known(buffer.size_bytes, f"the size of {buffer.name}")
    if None in sizes.values() or launch.threads < 1:
        return None, None
    # A fragment is spread over the threads of the block, a local array is each thread's own.
    spread = {place: launch.threads if buffers[place].scope == "fragment" else 1 for place in sizes}
    sizes = {place: math.ceil(math.ceil(size / spread[place]) / _REGISTER_BYTES) for place, size in sizes.items()}
    fragments = {place: size for place, size in sizes.items() if buffers[place].scope == "fragment"}
    local = sum(sizes[place] for place in _touched(launch.body) & (sizes.keys() - fragments.keys()))
    results = {place for op in every(launch.body, Op) if op.kind == "gemm" for place in op.writes[:1]}
    held = {place: size for place, size in fragments.items() if place in results}
    return _peak(launch.body, held), local + _peak(launch.body, fragments)


def _touched(nodes: Sequence[Node]) -> set[int]:
    return {place for op in every(nodes, Op) for place in (*op.reads, *op.writes)}


def _spans(nodes: Sequence[Node], places: Iterable[int]) -> dict[int, tuple[int, int]]:
    """First and last statement that touch each buffer."""
    touched = [_touched([node]) for node in nodes]
    uses = {place: [at for at, found in enumerate(touched) if place in found] for place in places}
    return {place: (at[0], at[-1]) for place, at in uses.items() if at}


def _peak(nodes: Sequence[Node], sizes: dict[int, int]) -> int:
    """The most that is alive at once, from first to last use; what one loop or one way alone uses lives inside it."""
    spans, most = _spans(nodes, sizes), 0
    for at, node in enumerate(nodes):
        alive = {place for place, (first, last) in spans.items() if first <= at <= last}
        uses = [_touched(way) for way in node.ways]
        mine = {place for place in alive if spans[place] == (at, at) and sum(place in use for use in uses) == 1}
        inside = [_peak(way, {place: sizes[place] for place in _touched(way) & mine}) for way in node.ways]
        most = max(most, sum(sizes[place] for place in alive - mine) + max(inside, default=0))
    return most


def _place(launch: Launch) -> tuple[tuple[Placed, ...], Number]:
    """Places of all shared buffers and the bytes they need together."""
    copies, buffers = _copies(launch.body), launch.buffers
    for reason in _unmodelled(launch, copies):
        return (), Unknown(reason)
    shared = [place for place, buffer in enumerate(buffers) if buffer.scope.startswith("shared")]
    spans = _spans(_statements(launch.body), shared)  # TileLang drops what nothing uses
    sizes: dict[int, Any] = {place: buffers[place].size_bytes * copies.get(place, 1) for place in spans}
    if unknown := [size for size in sizes.values() if isinstance(size, Unknown)]:
        return (), unknown[0]
    share = not launch.pass_configs.get("tl_disable_shared_memory_reuse", False)
    offsets: dict[int, int] = {}
    base = 0
    # Static and dynamic shared memory are two areas of the same store.
    for scope in ("shared.dyn", "shared"):
        area = [place for place in spans if buffers[place].scope == scope]
        area.sort(key=lambda place: (spans[place][0], -sizes[place], buffers[place].name))
        packed, size_bytes = _pack([(sizes[place], *spans[place]) for place in area], share)
        offsets |= {place: base + offset for place, offset in zip(area, packed, strict=True)}
        base += size_bytes
    placed = [Placed(buffers[at].name, sizes[at], copies.get(at, 1), offsets[at]) for at in spans]
    return tuple(sorted(placed, key=lambda item: item.offset_bytes)), base


def _pack(lives: Sequence[tuple[int, int, int]], share: bool) -> tuple[list[int], int]:
    """Offsets of buffers (size, first and last use) and the bytes of all.

    A linear scan with the best fit into what died, as TileLang's merge pass has it.
    """
    offsets: list[int] = []
    active: list[tuple[int, int, int]] = []  # offset, where it ends, last use
    top = 0
    for size, first, last in lives:
        active = sorted(part for part in active if not share or part[2] >= first)
        ends = [0, *(end for _, end, _ in active)]
        gaps = zip(ends, [*(offset for offset, _, _ in active), top], strict=True)
        fits = [(stop - start, _aligned(start)) for start, stop in gaps if _aligned(start) + size <= stop]
        offsets.append(min(fits)[1] if fits else _aligned(ends[-1]))
        active.append((offsets[-1], offsets[-1] + size, last))
        top = max(top, offsets[-1] + size)
    return offsets, _aligned(top)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN_BYTES) * _ALIGN_BYTES


def _copies(nodes: Sequence[Node]) -> dict[int, int]:
    """Number of copies of each buffer that a pipelined loop fills from device memory."""
    copies: dict[int, int] = {}
    for loop in every(nodes, Loop):
        for statement in _statements(loop.ways[0]) if (loop.num_stages or 0) > 1 else ():
            ops = list(every([statement], Op))
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
        bare = isinstance(node, Branch) and not node.ways[1]
        once = isinstance(node, Loop) and node.num_stages is None and node.trips == 1
        flat += _statements(node.ways[0]) if bare or once else [node]
    return flat


def _unmodelled(launch: Launch, copies: Iterable[int]) -> Iterator[str]:
    """Why the shared memory of a launch cannot be predicted."""
    if launch.pass_configs.get("tl_enable_aggressive_shared_memory_merge", False):
        yield "the pass config for aggressive merging of shared memory is not modelled"
    if any(op.kind == "reduce" for op in every(launch.body, Op)):
        yield "T.reduce takes shared memory of its own, which is not modelled"
    for loop in every(launch.body, Loop):
        # A pipeline of an order of its own changes copies and lifetimes.
        if any(note.startswith("tl_pipeline") for note in loop.notes) and _touched(loop.ways[0]):
            yield f"the pipeline over {loop.name} with an explicit order is not modelled"
    pipelines = Counter(place for place, _ in set(_uses(launch.body, 0)))
    for name in (launch.buffers[place].name for place in copies if pipelines[place] > 1):
        yield f"{name} is multiplied by the pipeline of one loop and used in another or outside, which TileLang refuses"


def _uses(nodes: Sequence[Node], pipeline: int) -> Iterator[tuple[int, int]]:
    """Each buffer with the pipeline that uses it; 0 is none."""
    for node in nodes:
        if isinstance(node, Op):
            yield from ((place, pipeline) for place in (*node.reads, *node.writes))
        own = id(node) if isinstance(node, Loop) and (node.num_stages or 0) > 1 else pipeline
        for way in node.ways:
            yield from _uses(way, own)


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
    """Hold what a submission asks for against what a device has; raises DataError for a CPU, which has no limits."""
    if device.kind != "gpu":
        raise DataError(f"got {device.title}, expected a GPU, because a CPU has no such limits")
    return Fit(device, tuple(_fit_kernel(kernel, device) for kernel in found.kernels))


def _fit_kernel(kernel: KernelResources, device: Device) -> KernelFit:
    where, stage, lanes = device.title, f"stage {kernel.stage}", device.lanes
    shared, threads, registers = kernel.shared_bytes, kernel.threads, kernel.fragment_registers
    waves = math.ceil(threads / lanes)
    reasons, limits = [], {"threads": device.threads_per_processor // max(1, waves * lanes)}
    if shared:
        limits["shared memory"] = device.shared_per_processor_bytes // (shared + device.shared_reserved_per_block_bytes)
        if shared > (most := device.shared_per_block_bytes):
            reasons.append(f"{stage} needs {shared} bytes of shared memory, a block of the {where} has {most}")
    if registers:
        limits["registers"] = device.registers_per_processor // max(1, registers * waves * lanes)
        if registers > (most := device.registers_per_thread):
            kept = f"keeps at least {registers} registers per thread in fragments"
            reasons.append(f"{stage} {kept}, the {where} has {most}: the rest goes to memory")
    if threads > (most := device.threads_per_block):
        reasons.append(f"{stage} has {threads} threads per block, the {where} takes {most}")
    if threads % lanes or threads < 1:
        reasons.append(f"{stage} has {threads} threads, no multiple of the {where}'s waves of {lanes} lanes")
    resident = 0 if reasons else None if None in (shared, registers) else min(limits.values())
    limited_by = "" if reasons else min(limits, key=lambda key: limits[key])
    grid_waves = kernel.blocks / (resident * device.processors) if resident and kernel.blocks else None
    return KernelFit(kernel, tuple(reasons), waves, resident, limited_by, grid_waves)


def as_dict(found: Resources, fits: Sequence[Fit]) -> dict[str, Any]:
    """Everything as plain data for strict JSON; what is unknown is None and named under "unknown"."""
    sizes = ("name", "num_experts", "hidden", "intermediate", "num_tokens")

    def figures(part: KernelFit) -> dict[str, Any]:
        own = {name: value for name, value in vars(part).items() if name != "kernel"}
        return {"stage": part.kernel.stage, **own, "wave_efficiency": part.wave_efficiency}

    case = {name: getattr(found.case, name) for name in sizes}
    devices = [
        {"device": item.device.name, "fits": item.fits, "kernels": list(map(figures, item.kernels))} for item in fits
    ]
    return {
        "submission": found.submission.name, "source_hash": found.submission.source_hash, "case": case,
        "group_sizes": found.layout.sizes, "padding_waste": found.layout.waste, "work_ratio": found.work_ratio,
        "weight_passes": found.weight_passes(), "kernels": [asdict(kernel) for kernel in found.kernels],
        "devices": devices, "unknown": found.unknown,
    }  # fmt: skip


def lowered_figures(submission: Submission, case: Case, device: Device) -> list[dict[str, Any]]:
    """What TileLang's own lowering says, in a child process that runs the submission's host code.

    For a card with 64 lanes sm_80 gives the shared memory and gfx90a, a stand-in and not that card, the layout
    inference for 64 lanes; for a Hopper its own target gives both. Each entry has "target", "stand_in" (whether the
    target is another card's), "error" (None or TileLang's reason) and "kernels": name, shared_bytes, threads and grid.
    """
    targets = ["sm_90a" if device.architecture == "sm_90a" else "sm_80", *(["gfx90a"] if device.lanes == 64 else [])]
    found: list[dict[str, Any]] = []
    answers = lower_many([Lowering(submission, case, target) for target in targets])
    for target, answer in zip(targets, answers, strict=True):
        kernels, error = ([], str(answer)) if isinstance(answer, LoweringError) else (answer, None)
        names = ("name", "shared_bytes", "threads", "grid")
        figures = [{name: getattr(kernel, name) for name in names} for kernel in kernels]
        found.append({"target": target, "stand_in": target != device.architecture, "error": error, "kernels": figures})
    return found
