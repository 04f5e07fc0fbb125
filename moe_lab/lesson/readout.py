"""What a configuration needs, whether it fits a device, what it could reach there, and how that is drawn.

Nothing is compiled for it.
"""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.console import Console
from rich.table import Table

from moe_lab.lesson.display import BLUE, INK, ORANGE, PALE, RED, canvas
from moe_lab.machine.devices import Device, Roof
from moe_lab.model import roofline, tiles
from moe_lab.problem.contract import CASES
from moe_lab.problem.routings import routing
from moe_lab.problem.submission import Submission

if TYPE_CHECKING:
    from moe_lab.lesson.explorer import Setting, Trial

#: Verdict of a configuration that the judge never saw, because its tiles do not fit the card.
DOES_NOT_FIT = "does not fit"
#: Verdict of a configuration that a sweep ran on one case only.
FIRST_CASE_RIGHT = "right on one case"


@dataclass(frozen=True)
class Gauge:
    """What a configuration needs of one thing, and how much of it there is."""

    label: str  # "stage 1: shared memory"
    need: float | None  # None where it is not known
    limit: float | None  # in the same unit; None where the device has none
    text: str  # both in words

    @property
    def share(self) -> float:
        """Need over limit; 0 if one of them is missing."""
        return self.need / self.limit if self.need and self.limit else 0.0


@dataclass(frozen=True)
class Readout:
    """What can be said about a configuration without compiling it; None is what nobody can tell."""

    title: str  # step, case, routing and device
    fits: bool | None  # whether it fits the device and computes the whole case
    sentence: str  # that it fits, or why not, naming the limit
    gauges: tuple[Gauge, ...]  # needs against limits, stage by stage
    columns: tuple[str, ...]  # head of the rows
    rows: tuple[tuple[str, ...], ...]  # the other figures, a cell for each stage
    roof: Roof | None  # the device's ceilings
    flops: int  # operations on valid rows
    case_intensity: float  # flops over the bytes if every weight is read from memory once
    weight_reads: float | None  # how often each weight is read, on average
    intensity: float | None  # flops over the bytes if every one of these reads goes to memory
    case_ms: float | None  # least time of the case on the device, without padding
    bound_ms: float | None  # least time of this configuration, every weight read from memory once
    uncached_ms: float | None  # the same if every read of a weight goes to memory

    @property
    def bound_sentence(self) -> str:
        """The times in words."""
        if self.roof is None or self.case_ms is None:
            return "No roof of this device is known, so there is no bound."
        text = f"Least time of the case: {self.case_ms:.3f} ms ({self.roof.title})."
        if self.bound_ms is None:
            return f"{text} Only run time knows what this configuration computes, so no bound of its own can be told."
        text += f" This configuration: at least {self.bound_ms:.3f} ms"
        if self.uncached_ms is not None and self.uncached_ms > self.bound_ms:
            text += f", or {self.uncached_ms:.3f} ms if all {self.weight_reads:.2f} reads of each weight go to memory"
        return f"{text}."

    @property
    def description(self) -> str:
        """What :func:`draw` shows, in words."""
        gauges = "; ".join(f"{gauge.label} {gauge.text}" for gauge in self.gauges)
        return f"{self.title}. {self.sentence} {gauges}. {self.bound_sentence}"


def read_out(submission: Submission, case_number: int, routing_name: str, device: Device | None) -> Readout:
    """Say what a configuration needs and what it could reach; ``device`` None is one that nobody has figures of.

    Raises MoeLabError for text that cannot be followed, or a routing that the case does not have.
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
    roof = best_roof(device) if device is not None else None
    passes = [_passes(found, kernel) for kernel in kernels]
    work = roofline.work(case, sizes)
    # A mean over the launches is exact where all weights are read equally often, as in every step of the ladder.
    mean = _mean(passes)
    uncached = roofline.work(case, sizes, weight_passes=max(1.0, mean)) if mean is not None else None
    # Blocks that find nothing to do skip the work. Of the padded layout's own blocks none does.
    computed = work.whole.padded_flops / work.whole.flops
    skips = any(kernel.conditional for kernel in kernels) and found.work_ratio != computed
    flops = [None if skips else _busiest_flops(kernel, gpu.processors if gpu else 1) for kernel in kernels]
    where = device.title if device else "this machine"
    fits, sentence = _verdict(found, fit, where)
    return Readout(
        title=f"{found.submission.name}, {case.name}, {routing_name}, {where}", fits=fits, sentence=sentence,
        gauges=tuple(_gauges(found, gpu)), columns=("", *(f"stage {kernel.stage}" for kernel in kernels)),
        rows=tuple(_rows(found, fit, passes, "at most " if skips else "")), roof=roof, flops=work.whole.flops,
        case_intensity=work.whole.intensity, weight_reads=mean,
        intensity=uncached.whole.intensity if uncached else None,
        case_ms=_bound_ms(work, [work.stage1.flops, work.stage2.flops], roof),
        bound_ms=_bound_ms(work, flops, roof), uncached_ms=_bound_ms(uncached, flops, roof) if uncached else None,
    )  # fmt: skip


def best_roof(device: Device) -> Roof:
    """Ceilings that were reached on a device, else those of its maker's paper."""
    return device.roof("measured" if device.figure("peak_fp16_tflops", "measured") else "specification")


def _passes(found: tiles.Resources, kernel: tiles.KernelResources) -> float | None:
    """How often one launch reads each of its weights, on average; None if it reads none, or unknown."""
    passes = found.weight_passes(kernel)
    return None if any(kernel.reads_bytes.get(name, 0) is None for name in passes) else _mean(passes.values())


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


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


def _verdict(found: tiles.Resources, fit: tiles.Fit | None, where: str) -> tuple[bool | None, str]:
    ratio = found.work_ratio
    # Less work than the case needs cannot be right, on any device.
    if ratio is not None and ratio < 1:
        return False, (
            f"Computes only {ratio:.0%} of what {found.case.name} needs: some rows or columns have no block, usually "
            "because the grid has one block for each 128 rows and the tile holds fewer."
        )
    if fit is None:
        return None, f"{where} is no GPU with known limits: here is what each block asks for."
    if fit.fits is False:
        return False, f"Does not fit: {'; '.join(reason for kernel in fit.kernels for reason in kernel.reasons)}."
    if fit.fits is None:
        return None, f"It cannot be told whether this fits the {where}: {'; '.join(found.unknown)}."
    held = [f"{kernel.blocks_per_processor} of stage {kernel.kernel.stage}" for kernel in fit.kernels]
    return True, f"Fits the {where}. Blocks that a processor holds at once: {', '.join(held)}."


def _gauges(found: tiles.Resources, gpu: Device | None) -> list[Gauge]:
    limits = (gpu.shared_per_block_bytes, gpu.registers_per_thread, gpu.threads_per_block) if gpu else (None,) * 3
    # Of some cards only the threads of a whole processor are known, which a block cannot exceed either.
    of = "per processor" if gpu and not gpu.figure("threads_per_block") else "per block"
    units = (("shared memory", 1024, "KiB"), ("fragments", 1, "registers per thread"), ("threads", 1, of))
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
    kernels, ratio, held, rounds = found.kernels, found.work_ratio, [], []
    for part in fit.kernels if fit else ():
        nothing = {None: "unknown", 0: "none"}.get(part.blocks_per_processor)
        held.append(nothing or f"{part.blocks_per_processor} ({part.limited_by})")
        waves = part.grid_waves or 0
        share = f"{waves:.2f} in {math.ceil(waves)} ({part.wave_efficiency or 0:.0%})" if waves else "unknown"
        rounds.append(nothing or share)

    def known(value: float | None, text: str) -> str:
        return "unknown" if value is None else text

    rows = {
        "accumulators": [known(k.accumulator_registers, f"{k.accumulator_registers} registers") for k in kernels],
        "blocks": [known(k.blocks, f"{' × '.join(map(str, k.grid))} = {k.blocks}") for k in kernels],
        "resident blocks": held,
        "rounds": rounds,
        "reads of a weight": ["none" if each is None else f"{most}{each:.2f}" for each in passes],
        "work with padding": [known(ratio, f"{most}{ratio or 0:.2f} × useful"), *("" for _ in kernels[1:])],
    }
    return [(label, *cells) for label, cells in rows.items() if cells]


# --- in a terminal and on a page -------------------------------------------------------------------------------------


def print_out(
    console: Console, readout: Readout, others: Sequence[tiles.Fit], lowered: Sequence[dict[str, Any]]
) -> None:
    """Print a readout: needs against limits, what it costs, and other devices in a line.

    ``lowered`` is from :func:`moe_lab.model.tiles.lowered_figures`, empty if nobody asked for it.
    """
    verdict = {True: "fits", False: "does not fit", None: "cannot be told"}[readout.fits]
    console.print(f"{readout.title}: {verdict}\n{readout.sentence}", highlight=False, markup=False)
    table = Table(*readout.columns)
    needs: dict[str, list[str]] = {}
    for gauge in readout.gauges:
        needs.setdefault(gauge.label.partition(": ")[2], []).append(gauge.text)
    for cells in [*([what, *texts] for what, texts in needs.items()), *readout.rows]:
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


def gauges_html(readout: Readout) -> str:
    """Needs against limits as bars; the whole bar is 125% of the limit, so that the limit is a line inside it."""
    parts = []
    for gauge in readout.gauges:
        over, limit = gauge.share > 1, '<span style="left: 80%"></span>' if gauge.limit else ""
        fill = f'<div class="{"moe-lab-over" if over else ""}" style="width: {min(gauge.share, 1.25) * 80:.1f}%"></div>'
        parts.append(
            f"<div>{html.escape(gauge.label)}</div>"
            f'<div class="moe-lab-bar" aria-hidden="true">{fill}{limit}</div>'
            f"<div>{html.escape(gauge.text)}{', <b>too much</b>' if over else ''}</div>"
        )
    return f'<div class="moe-lab-gauges">{"".join(parts)}</div>'


def rows_html(readout: Readout) -> str:
    """The other figures as a table."""
    table = pd.DataFrame(readout.rows, columns=list(readout.columns))
    return table.to_html(index=False, border=0, classes="moe-lab-facts")


# --- figures ---------------------------------------------------------------------------------------------------------


def draw(readout: Readout, *, gauges: bool = True) -> Figure:
    """Needs against limits unless ``gauges`` are not wanted, and the place on the roofline."""
    # Fixed axes: a layout engine would take longer than everything else, and the frame would move with the labels.
    figure = Figure(figsize=(6.6, 5.2 if gauges else 2.7))
    if gauges:
        _draw_gauges(figure.add_axes((0.25, 0.57, 0.34, 0.37)), readout)
    _draw_roofline(figure.add_axes((0.12, 0.10, 0.85, 0.36) if gauges else (0.10, 0.19, 0.88, 0.70)), readout)
    return figure


def _draw_gauges(axes: Axes, readout: Readout) -> None:
    """What is too much is hatched as well, so that no reader depends on the colour."""
    gauges, end = readout.gauges, 1.25
    limited = any(gauge.limit for gauge in gauges)
    for row, gauge in enumerate(gauges):
        over = gauge.share > 1
        axes.barh(row, 1.0 if gauge.limit else 0.0, height=0.66, color=PALE)
        (bar,) = axes.barh(row, min(gauge.share, end), height=0.66, color=RED if over else BLUE, linewidth=0)
        bar.set(edgecolor="white", hatch="///" if over else None)
        # What is far over the limit would squeeze everything else, so its bar ends in an arrow.
        if gauge.share > end:
            axes.plot(end, row, marker=">", markersize=9, color=RED, clip_on=False)
        at = end + 0.07 if limited else 0.02
        axes.text(at, row, gauge.text + (", too much" if over else ""), va="center", fontsize=8.5)
    axes.set_title("What a block needs against the limit" if limited else "What a block needs", fontsize=10, loc="left")
    if limited:
        axes.axvline(1.0, color=INK, linewidth=1.2)
    axes.set_yticks(range(len(gauges)), [gauge.label for gauge in gauges], fontsize=8.5)
    axes.set_xticks([0, 0.5, 1.0] if limited else [], ["0", "50%", "limit"] if limited else [], fontsize=8)
    axes.set_xlim(0, end)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"] if limited else ["top", "right", "left", "bottom"]].set_visible(False)


def _draw_roofline(axes: Axes, readout: Readout) -> None:
    lands = readout.fits is not False
    title = "Where it can land on the roofline" if lands else "Where it would land on the roofline, if it fitted"
    axes.set_title(title, fontsize=10, loc="left")
    roof, colour = readout.roof, ORANGE if lands else RED
    if roof is None:
        axes.set_axis_off()
        axes.text(0.0, 0.9, readout.bound_sentence, va="center", fontsize=9)
        return
    low, high, top = roof.ridge / 30, roof.ridge * 30, roof.peak_tflops
    axes.plot([low, roof.ridge, high], [low * roof.bandwidth_tbps, top, top], color=INK)
    axes.plot([roof.ridge] * 2, [top / 100, top], color=INK, linewidth=0.8, linestyle=":")
    axes.text(roof.ridge * 1.08, top * 1.18, f"ridge {roof.ridge:.0f} FLOP/byte", fontsize=8)

    def point(intensity: float, time_ms: float, label: str, marker: str, size: float, fill: str, edge: str) -> float:
        rate_tflops = readout.flops / time_ms / 1e9
        text = f"{label}: {time_ms:.3f} ms"
        axes.plot(intensity, rate_tflops, marker, markersize=size, mfc=fill, mec=edge, label=text)
        return rate_tflops

    if readout.case_ms:
        point(readout.case_intensity, readout.case_ms, "the case", "D", 9, "none", INK)
    if readout.bound_ms and readout.intensity and readout.uncached_ms:
        ends = [
            (readout.case_intensity, readout.bound_ms, "each weight read once", "o"),
            (readout.intensity, readout.uncached_ms, f"each weight read {readout.weight_reads:.2f} times", "s"),
        ]
        heights = [point(*each, 7, colour if lands else "white", INK if lands else colour) for each in ends]
        places = [intensity for intensity, *_ in ends]
        axes.plot(places, heights, color=colour, linewidth=2, zorder=1, linestyle="-" if lands else "--")
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(top / 30, top * 2))
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


#: How a verdict is drawn: marker, fill, edge. Any other is one of the judge's refusals.
_LOOKS = {
    DOES_NOT_FIT: ("x", RED, RED), "accepted": ("o", BLUE, BLUE), FIRST_CASE_RIGHT: ("o", "none", BLUE),
    "not judged": (".", INK, INK), "refused by the judge": ("^", RED, RED),
}  # fmt: skip


def draw_trials(trials: "Sequence[Trial]", setting: "Setting") -> Figure:
    """What was tried for one setting, numbered by its place among all: least times, and speeds measured."""
    wanted = (setting.device, f"case {setting.case}", setting.routing)
    mine = [(n, each) for n, each in enumerate(trials, 1) if (each.device, each.case, each.routing) == wanted]
    where = next((trial.timed_on for _, trial in reversed(mine) if trial.speed), "")
    parts = {"predicted: least ms": [(n, trial.verdict, trial.bound_ms) for n, trial in mine]}
    if where:
        timed = [(n, trial.verdict, trial.speed) for n, trial in mine if trial.timed_on == where]
        parts[f"measured: times as fast as the baseline\n{where}"] = timed
    figure, panels = canvas(6.6, 2.8, len(parts))
    for axes, (title, found) in zip(panels, parts.items(), strict=True):
        dots: dict[str, list[tuple[int, float]]] = {look: [] for look in _LOOKS}
        for number, verdict, height in found:
            if height is not None:
                look = verdict or "not judged"
                dots[look if look in dots else "refused by the judge"].append((number, height))
        for look, (marker, fill, edge) in _LOOKS.items():
            if dots[look]:
                axes.plot(*zip(*dots[look], strict=True), marker, mfc=fill, mec=edge, label=look)
        axes.set_title(title if axes.lines else f"{title}: nothing yet", fontsize=9, loc="left")
        axes.set_xlabel("configuration, in the order tried", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.set(xlim=(0.5, max(1, len(trials)) + 0.5), ylim=(0, 1.1 * max([y for *_, y in found if y], default=1)))
        axes.locator_params(axis="x", integer=True)
    if names := {str(line.get_label()): line for axes in panels for line in axes.lines}:
        figure.legend(names.values(), names.keys(), loc="outside lower center", ncols=5, fontsize=8)
    if where:
        panels[1].axhline(1.0, color=INK, linewidth=0.8)
    return figure
