"""What a configuration needs, whether it fits a device, and what it could reach there: without compiling it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moe_lab.machine.devices import Device, Roof
from moe_lab.model import roofline, tiles
from moe_lab.problem.contract import CASES
from moe_lab.problem.routings import routing
from moe_lab.problem.submission import Submission

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

# Okabe and Ito's palette; what does not fit is hatched as well, so that no reader depends on the colour.
_BLUE, _ORANGE, _VERMILION = "#0072B2", "#E69F00", "#D55E00"
_PALE, _LINE = "#ECECEC", "#333333"


@dataclass(frozen=True)
class Gauge:
    """What a configuration needs of one thing, and how much of it there is.

    Attributes:
        label: "stage 1: shared memory".
        need, limit: in the same unit; None where it is not known, or where the device has no limit.
        text: both in words.
    """

    label: str
    need: float | None
    limit: float | None
    text: str

    @property
    def share(self) -> float:
        """Need over limit; 0 if one of them is missing."""
        return self.need / self.limit if self.need and self.limit else 0.0


@dataclass(frozen=True)
class Readout:
    """What can be said about a configuration without compiling it.

    Attributes:
        title: step, case, routing and device.
        fits: whether it fits the device and computes the whole case; None if that cannot be told.
        sentence: that it fits, or why not, naming the limit.
        gauges: needs against limits, stage by stage.
        columns: head of ``rows``.
        rows: the other figures, a cell for each stage.
        roof: the device's ceilings; None if nobody knows them.
        flops: operations on valid rows.
        case_intensity: ``flops`` over the bytes if every weight is read from memory once.
        weight_reads: how often each weight is read, on average; None if unknown.
        intensity: ``flops`` over the bytes if every one of these reads goes to memory; None if unknown.
        case_ms: least time of the case on the device, without padding.
        bound_ms: least time of this configuration, every weight read from memory once.
        uncached_ms: the same if every read of a weight goes to memory.
    """

    title: str
    fits: bool | None
    sentence: str
    gauges: tuple[Gauge, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    roof: Roof | None
    flops: int
    case_intensity: float
    weight_reads: float | None
    intensity: float | None
    case_ms: float | None
    bound_ms: float | None
    uncached_ms: float | None

    @property
    def bound_sentence(self) -> str:
        """The times in words."""
        if self.roof is None or self.case_ms is None:
            return "No roof of this device is known, so there is no bound."
        text = f"Least time of the case: {self.case_ms:.3f} ms ({self.roof.title})."
        if self.bound_ms is not None:
            text += f" This configuration: at least {self.bound_ms:.3f} ms"
            if self.uncached_ms is not None and self.uncached_ms > self.bound_ms:
                text += (
                    f", or {self.uncached_ms:.3f} ms if all {self.weight_reads:.2f} reads of each weight go to memory"
                )
            text += "."
        else:
            text += " Only run time knows what this configuration computes, so no bound of its own can be told."
        return text

    @property
    def description(self) -> str:
        """What :func:`draw` shows, in words."""
        gauges = "; ".join(f"{gauge.label} {gauge.text}" for gauge in self.gauges)
        return f"{self.title}. {self.sentence} {gauges}. {self.bound_sentence}"


def read_out(submission: Submission, case_number: int, routing_name: str, device: Device | None) -> Readout:
    """Say what a configuration needs and what it could reach.

    Args:
        submission: with the literals wanted.
        case_number: of the contest.
        routing_name: a routing of that case, see :mod:`moe_lab.problem.routings`.
        device: a GPU, a CPU (which has no limits of this kind), or None for a machine that nobody has figures of.

    Raises:
        MoeLabError: for text that cannot be followed, or a routing that the case does not have.
    """
    sizes = routing(case_number, routing_name).sizes
    return describe(tiles.resources(submission, CASES[case_number], sizes), routing_name, device)


def describe(found: tiles.Resources, routing_name: str, device: Device | None) -> Readout:
    """The same for resources that are known already.

    The bound counts what the kernels compute, padded rows included, on the processor that gets the most blocks, and
    the traffic that no kernel can avoid. Whatever only tuning decides (panels, copies, depth of K) leaves it alone.
    """
    case, sizes, kernels = found.case, found.layout.sizes, found.kernels
    gpu = device if device is not None and device.kind == "gpu" else None
    fit = tiles.fit(found, gpu) if gpu is not None else None
    passes = [_mean(found.weight_passes(kernel).values(), kernel) for kernel in kernels]
    work = roofline.work(case, sizes)
    roof = best_roof(device) if device is not None else None
    # A mean over the launches is exact where all weights are read equally often, as in every step of the ladder.
    known = [each for each in passes if each is not None]
    mean = sum(known) / len(known) if known else None
    uncached = roofline.work(case, sizes, weight_passes=max(1.0, mean)) if mean is not None else None
    # Blocks that find nothing to do skip the work. Of the padded layout's own blocks none does.
    computed = work.whole.padded_flops / work.whole.flops
    skips = any(kernel.conditional for kernel in kernels) and found.work_ratio != computed
    flops = [None if skips else _busiest_flops(kernel, gpu.processors if gpu else 1) for kernel in kernels]
    fits, sentence = _verdict(found, fit, device)
    return Readout(
        title=f"{found.submission.name}, {case.name}, {routing_name}, {device.title if device else 'this machine'}",
        fits=fits, sentence=sentence, gauges=tuple(_gauges(found, gpu)),
        columns=("", *(f"stage {kernel.stage}" for kernel in kernels)),
        rows=tuple(_rows(found, fit, passes, "at most " if skips else "")), roof=roof, flops=work.whole.flops,
        case_intensity=work.whole.intensity, weight_reads=mean,
        intensity=uncached.whole.intensity if uncached else None,
        case_ms=_bound_ms(work, [work.stage1.flops, work.stage2.flops], roof),
        bound_ms=_bound_ms(work, flops, roof), uncached_ms=_bound_ms(uncached, flops, roof) if uncached else None,
    )  # fmt: skip


def print_out(
    console: Console, readout: Readout, others: Sequence[tiles.Fit], lowered: Sequence[dict[str, Any]]
) -> None:
    """Print a readout: needs against limits, what it costs, and other devices in a line.

    Args:
        console: a rich console.
        readout: what to print.
        others: more devices.
        lowered: from :func:`moe_lab.model.tiles.lowered_figures`, empty if nobody asked for it.
    """
    from rich.table import Table

    verdict = {True: "fits", False: "does not fit", None: "cannot be told"}[readout.fits]
    console.print(f"{readout.title}: {verdict}\n{readout.sentence}", highlight=False, markup=False)
    table, stages = Table(*readout.columns), len(readout.columns) - 1
    for number in range(len(readout.gauges) // stages):
        row = readout.gauges[number :: len(readout.gauges) // stages]
        table.add_row(row[0].label.partition(": ")[2], *(gauge.text for gauge in row))
    for cells in readout.rows:
        table.add_row(*cells)
    console.print(table)
    lines = [readout.bound_sentence]
    if readout.fits is None and not lowered:
        lines.append("`moe-lab fit FILE --lower` asks TileLang itself; that runs the file's host code as it is")
    for figure in lowered:
        parts = (f"{kernel['shared_bytes']} bytes and {kernel['threads']} threads" for kernel in figure["kernels"])
        label = f"lowered for {figure['target']}" + (", a stand-in" if figure["stand_in"] else "")
        lines.append(f"{label}: {figure['error'] or '; '.join(parts)}")
    words = {True: "fits", False: "no", None: "?"}
    lines.append("elsewhere: " + ", ".join(f"{item.device.name} {words[item.fits]}" for item in others))
    console.print("\n".join(lines), highlight=False, markup=False)


def best_roof(device: Device) -> Roof:
    """Ceilings that were reached on a device, else those of its maker's paper."""
    return device.roof("measured" if device.figure("peak_fp16_tflops", "measured") else "specification")


def _mean(passes: Iterable[float | None], kernel: tiles.KernelResources) -> float | None:
    """How often one launch reads each of its weights, on average; None if it reads none, or unknown."""
    known = [each for each in passes if each is not None]
    unknown = any(kernel.reads_bytes.get(name, 0) is None for name in ("gate_w", "up_w", "down_w"))
    return sum(known) / len(known) if known and not unknown else None


def _busiest_flops(kernel: tiles.KernelResources, processors: int) -> int | None:
    """Operations of a launch if every processor took as long as the one with the most blocks."""
    if kernel.flops is None or not kernel.blocks:
        return None
    return kernel.flops // kernel.blocks * processors * math.ceil(kernel.blocks / processors)


def _bound_ms(work: roofline.CaseWork, flops: Sequence[int | None], roof: Roof | None) -> float | None:
    """Least time for some traffic and the operations of each launch, in order; None if something is unknown."""
    if roof is None or None in flops:
        return None
    # A launch that multiplies nothing prepares the others and has no part of the work.
    computed = [value for value in flops if value]
    parts = [work.stage1, work.stage2]
    if len(computed) != len(parts):
        parts, computed = [work.whole], [sum(computed)]
    pairs = zip(parts, computed, strict=True)
    return sum(roofline.bound(replace(part, flops=value), roof).time_ms for part, value in pairs)


def _verdict(found: tiles.Resources, fit: tiles.Fit | None, device: Device | None) -> tuple[bool | None, str]:
    where = device.title if device is not None else "this machine"
    ratio = found.work_ratio
    # Less work than the case needs cannot be right, on any device.
    if ratio is not None and ratio < 1:
        return False, (
            f"Computes only {ratio:.0%} of what {found.case.name} needs: some rows or columns have no block, usually "
            "because the grid has one block for each 128 rows and the tile holds fewer."
        )
    if fit is None:
        return None, f"{where} is no GPU with known limits: here is what each block asks for."
    reasons = [reason for kernel in fit.kernels for reason in kernel.reasons]
    if reasons:
        return False, f"Does not fit: {'; '.join(reasons)}."
    if fit.fits is None:
        return None, f"It cannot be told whether this fits the {where}: {'; '.join(found.unknown)}."
    held = [f"{kernel.blocks_per_processor} of stage {kernel.kernel.stage}" for kernel in fit.kernels]
    return True, f"Fits the {where}. Blocks that a processor holds at once: {', '.join(held)}."


def _gauges(found: tiles.Resources, gpu: Device | None) -> list[Gauge]:
    limits = (gpu.shared_per_block_bytes, gpu.registers_per_thread, gpu.threads_per_block) if gpu else (None,) * 3
    units = (("shared memory", 1024, "KiB"), ("fragments", 1, "registers a thread"), ("threads", 1, "a block"))
    gauges = []
    for kernel in found.kernels:
        needs = (kernel.shared_bytes, kernel.fragment_registers, kernel.threads)
        for (what, scale, unit), need, limit in zip(units, needs, limits, strict=True):
            words = "unknown" if need is None else f"{round(need / scale, 2):g}"
            words += f" of {limit / scale:g} {unit}" if limit else f" {unit}"
            gauges.append(Gauge(f"stage {kernel.stage}: {what}", need, limit, words))
    return gauges


def _rows(
    found: tiles.Resources, fit: tiles.Fit | None, passes: Sequence[float | None], most: str
) -> list[tuple[str, ...]]:
    kernels, ratio = found.kernels, found.work_ratio

    def held(part: tiles.KernelFit) -> str:
        count = part.blocks_per_processor
        return "unknown" if count is None else f"{count} ({part.limited_by})" if count else "none"

    def rounds(part: tiles.KernelFit) -> str:
        if not part.grid_waves:
            return "none" if part.blocks_per_processor == 0 else "unknown"
        return f"{part.grid_waves:.2f} in {math.ceil(part.grid_waves)} ({part.wave_efficiency:.0%})"

    rows = {
        "accumulators": [_or_unknown(k.accumulator_registers, f"{k.accumulator_registers} registers") for k in kernels],
        "blocks": [_or_unknown(k.blocks, f"{' × '.join(map(str, k.grid))} = {k.blocks}") for k in kernels],
        "resident blocks": list(map(held, fit.kernels)) if fit else [],
        "rounds": list(map(rounds, fit.kernels)) if fit else [],
        "reads of a weight": ["none" if each is None else f"{most}{each:.2f}" for each in passes],
        "work with padding": [_or_unknown(ratio, f"{most}{ratio or 0:.2f} × useful"), *("" for _ in kernels[1:])],
    }
    return [(label, *cells) for label, cells in rows.items() if cells]


def _or_unknown(value: float | None, text: str) -> str:
    return "unknown" if value is None else text


# --- figure ----------------------------------------------------------------------------------------------------------


def draw(readout: Readout) -> Figure:
    """Needs against limits, and the place on the roofline."""
    from matplotlib.figure import Figure

    # Fixed axes: a layout engine would take longer than everything else, and the frame would move with the labels.
    figure = Figure(figsize=(6.6, 5.2))
    _draw_gauges(figure.add_axes((0.25, 0.57, 0.34, 0.37)), readout)
    _draw_roofline(figure.add_axes((0.12, 0.10, 0.85, 0.36)), readout)
    return figure


def draw_roofline(readout: Readout) -> Figure:
    """The place on the roofline alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 2.7))
    _draw_roofline(figure.add_axes((0.10, 0.19, 0.88, 0.70)), readout)
    return figure


def _draw_gauges(axes: Axes, readout: Readout) -> None:
    gauges, end = readout.gauges, 1.25
    limited = any(gauge.limit for gauge in gauges)
    for row, gauge in enumerate(gauges):
        over = gauge.share > 1
        axes.barh(row, 1.0 if gauge.limit else 0.0, height=0.66, color=_PALE)
        axes.barh(
            row, min(gauge.share, end), height=0.66, color=_VERMILION if over else _BLUE, hatch="///" if over else None,
            edgecolor="white", linewidth=0,
        )  # fmt: skip
        # What is far over the limit would squeeze everything else, so its bar ends in an arrow.
        if gauge.share > end:
            axes.plot(end, row, marker=">", markersize=9, color=_VERMILION, clip_on=False)
        at = end + 0.07 if limited else 0.02
        axes.text(at, row, gauge.text + (", too much" if over else ""), va="center", fontsize=8.5)
    axes.set_title("What a block needs against the limit" if limited else "What a block needs", fontsize=10, loc="left")
    if limited:
        axes.axvline(1.0, color=_LINE, linewidth=1.2)
    axes.set_yticks(range(len(gauges)), [gauge.label for gauge in gauges], fontsize=8.5)
    axes.set_xticks([0, 0.5, 1.0] if limited else [], ["0", "50%", "limit"] if limited else [], fontsize=8)
    axes.set_xlim(0, end)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    for side in ("top", "right", "left") if limited else ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _draw_roofline(axes: Axes, readout: Readout) -> None:
    from matplotlib.ticker import NullLocator

    lands = readout.fits is not False
    title = "Where it can land on the roofline" if lands else "Where it would land on the roofline, if it fitted"
    axes.set_title(title, fontsize=10, loc="left")
    roof, colour = readout.roof, _ORANGE if lands else _VERMILION
    if roof is None:
        axes.set_axis_off()
        axes.text(0.0, 0.9, readout.bound_sentence, va="center", fontsize=9)
        return
    low, high, top = roof.ridge / 30, roof.ridge * 30, roof.peak_tflops
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.plot([low, roof.ridge, high], [low * roof.bandwidth_tbps, top, top], color=_LINE)
    axes.plot([roof.ridge] * 2, [top / 100, top], color=_LINE, linewidth=0.8, linestyle=":")
    axes.text(roof.ridge * 1.08, top * 1.18, f"ridge {roof.ridge:.0f} FLOP/byte", fontsize=8)
    if readout.case_ms:
        axes.plot(
            readout.case_intensity, _tflops(readout.flops, readout.case_ms), marker="D", markersize=9,
            markerfacecolor="none", markeredgecolor=_LINE, linestyle="none",
            label=f"the case: {readout.case_ms:.3f} ms",
        )  # fmt: skip
    if readout.bound_ms and readout.intensity and readout.uncached_ms:
        ends = [(readout.case_intensity, readout.bound_ms), (readout.intensity, readout.uncached_ms)]
        places, heights = zip(*((at, _tflops(readout.flops, ms)) for at, ms in ends), strict=True)
        axes.plot(places, heights, color=colour, linewidth=2, zorder=1, linestyle="-" if lands else "--")
        counts = ("once", f"{readout.weight_reads:.2f} times")
        for (at, ms), marker, count in zip(ends, "os", counts, strict=True):
            axes.plot(
                at, _tflops(readout.flops, ms), marker=marker, markersize=7, color=colour if lands else "white",
                markeredgecolor=_LINE if lands else colour, linestyle="none",
                label=f"each weight read {count}: {ms:.3f} ms",
            )  # fmt: skip
    axes.set_xlim(low, high)
    axes.set_ylim(top / 30, top * 2)
    axes.set_xlabel("useful FLOP per byte of memory traffic", fontsize=8.5)
    axes.set_ylabel("useful TFLOP/s", fontsize=8.5)
    axes.grid(True, linewidth=0.4, color="#CCCCCC")
    # Plain numbers: matplotlib's typesetter of powers is slow and must not run in two threads at once. No small ticks:
    # they are most of the work of drawing log axes.
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8, loc="lower right", title=roof.title, title_fontsize=8, framealpha=0.95)


def _tflops(flops: int, time_ms: float) -> float:
    return flops / time_ms / 1e9
