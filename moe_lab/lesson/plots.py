"""Plots of numbers. Each returns a figure and, in words, what it shows; ``display.show(*plot)`` shows both.

Names and figures stand in legends and beside the axes, never among the marks. Markers, line styles and hatching carry
what colour carries, so a plot can be read in grey."""

import functools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moe_lab.judge.score import Score, case_points
from moe_lab.lesson.display import BLUE, GREEN, INK, ORANGE, PALE, PURPLE, RED, SKY, canvas, short_number
from moe_lab.machine.devices import Roof
from moe_lab.machine.timing import Measurement
from moe_lab.model.roofline import attainable_tflops
from moe_lab.problem.errors import ContractError
from moe_lab.problem.layout import GroupedLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Plot = tuple["Figure", str]
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", "-.", ":")
_measured = functools.partial(short_number, zeros=True)
_plain = functools.partial(np.format_float_positional, precision=12, trim="-")  #: ``0.0005``, ``20``, ``2000000``


def timings(rows: Sequence[Measurement], bounds_ms: Mapping[str, float] = {}) -> Plot:
    """Median times with their 95% intervals, a panel for each case, one line for each step or, after them, peer.

    ``rows`` are of one run for each case, or ContractError: times of several may not be compared. Roofs are left out.
    ``bounds_ms`` has least times by case, drawn as lines (:func:`moe_lab.speed.bench.bound_ms`).
    """
    rows = [row for row in rows if row.kind != "roof"]
    if not rows:
        raise ContractError("got no rows of a step or peer, expected those of a run")
    cases = list(dict.fromkeys(row.case for row in rows))
    names = list(dict.fromkeys(row.name for row in sorted(rows, key=lambda row: row.kind == "peer")))
    width = min(9.0, 3.2 + 2.5 * len(cases))
    figure, panels = canvas(width, 1.6 + 0.25 * len(names), len(cases))
    words = []
    for axes, case in zip(panels, cases, strict=True):
        found = {names.index(row.name): row for row in rows if row.case == case}
        if (runs := len({row.run for row in rows if row.case == case})) != 1:
            raise ContractError(
                f"got rows of {runs} runs for {case}, expected one: only what was timed in turns can be compared"
            )
        medians, bound = {place: _measured(row.median_ms) for place, row in sorted(found.items())}, bounds_ms.get(case)
        _draw_times(axes, found, bound)
        axes.set_yticks(range(len(names)), [textwrap.fill(name, 30) for name in names], fontsize=9)
        axes.tick_params(axis="y", labelleft=axes is panels[0])
        axes.set_ylim(len(names) - 0.4, -0.6)
        column = axes.secondary_yaxis("right")
        column.set_yticks(list(medians), list(medians.values()), fontsize=9)
        column.tick_params(length=0)
        axes.set_title(case if bound is None else f"{case}, dashed: bound {_measured(bound)} ms", fontsize=9)
        times = ", ".join(f"{names[place]} {median} ms" for place, median in medians.items())
        words.append(f"{case}: {times}" + (f"; bound {_measured(bound)} ms" if bound is not None else ""))
    first = rows[0]
    head = (
        f"{first.device}, {first.routing}, {first.cache} cache: median of {first.rounds} and 95% interval; filled "
        "circles are steps, hollow squares peers"
    )
    figure.suptitle(textwrap.fill(head, int(13.5 * width)), fontsize=9)
    return figure, f"Median times on {first.device}, routing {first.routing}. {'. '.join(words)}."


def _draw_times(axes: "Axes", found: Mapping[int, Measurement], bound: float | None) -> None:
    """One case: a mark and an interval per line."""
    for place, row in found.items():
        marker, colour, fill = ("s", ORANGE, "white") if row.kind == "peer" else ("o", BLUE, BLUE)
        axes.errorbar(
            row.median_ms, place, xerr=[[row.median_ms - row.low_ms], [row.high_ms - row.median_ms]], fmt=marker,
            color=colour, markerfacecolor=fill, markeredgewidth=1.5, ecolor=INK, capsize=2, markersize=5,
        )  # fmt: skip
    if bound is not None:
        axes.axvline(bound, color=RED, linestyle="--", linewidth=1.2, zorder=1)
    # As factors: what stands near the bound is told apart, and so is what stands far from it.
    axes.set_xscale("log")
    ends = [*([bound] if bound else []), *(ms for row in found.values() for ms in (row.low_ms, row.high_ms))]
    axes.set_xlim(0.9 * min(ends), 1.15 * max(ends))
    _plain_ticks(axes.xaxis)
    axes.set_xlabel("ms (less is better)", fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    axes.grid(axis="x", color=PALE)
    axes.set_axisbelow(True)


class Point(NamedTuple):
    """One dot of a roofline plot."""

    label: str
    intensity: float  #: FLOP per byte
    rate_tflops: float  #: useful operations a second, 1e12


def roofline(roofs: Sequence[Roof], points: Sequence[Point] = ()) -> Plot:
    """Rooflines of devices (ContractError for none) and dots above 0, on logarithmic axes, each named in the legend."""
    if not roofs or any(point.intensity <= 0 or point.rate_tflops <= 0 for point in points):
        raise ContractError("got no roof or a point at 0, expected at least one roof and points above 0: axes are logs")
    figure, (axes,) = canvas(8.6, 4.4 + 0.11 * (len(roofs) + len(points)))
    intensities = [*(roof.ridge for roof in roofs), *(point.intensity for point in points)]
    left, right = min(intensities) / 8, max(intensities) * 8
    words = []
    for number, roof in enumerate(roofs):
        colour, dashes = _COLOURS[number % len(_COLOURS)], _LINES[number % len(_LINES)]
        ridge, corners = f"ridge at {roof.ridge:.0f}", [left, roof.ridge, right]
        label = f"{roof.title}: {_measured(roof.peak_tflops)} TFLOP/s, {ridge}"
        rates = [attainable_tflops(x, roof) for x in corners]
        axes.plot(corners, rates, dashes, color=colour, linewidth=2, label=label)
        axes.plot(roof.ridge, roof.peak_tflops, "|", markersize=14, markeredgewidth=2, color=colour)
        words.append(f"{roof.title}: {roof.peak_tflops:g} TFLOP/s, {roof.bandwidth_tbps:g} TB/s, {ridge} FLOP per byte")
    words += [f"{p.label}: {_measured(p.rate_tflops)} TFLOP/s at {p.intensity:.0f} FLOP per byte" for p in points]
    dots = [point.rate_tflops for point in points]
    low = min([*dots, *(attainable_tflops(left, roof) for roof in roofs)]) / 2
    high = max([*dots, *(roof.peak_tflops for roof in roofs)]) * 3
    axes.set(
        xscale="log", yscale="log", xlim=(left, right), ylim=(low, high),
        xlabel="arithmetic intensity, FLOP per byte of device memory", ylabel="TFLOP/s on valid rows",
    )  # fmt: skip
    _plain_ticks(axes.xaxis, axes.yaxis)
    axes.grid(which="major", color=PALE)
    _draw_dots(figure, axes, points)
    return figure, f"Roofline on logarithmic axes. {'. '.join(words)}."


def _plain_ticks(*axes: Any) -> None:
    """Ticks of logarithmic sides of a figure as numbers that can be read aloud: 20, 50, 100, without powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for axis in axes:
        low, high = axis.get_view_interval()
        decades = math.log10(high / low)
        major, minor = (1, 2, 5) if decades < 3 else (1,), range(2, 10)
        axis.set_major_locator(LogLocator(subs=major, numticks=99 if decades < 12 else None))
        axis.set_minor_locator(LogLocator(subs=minor, numticks=99 if decades < 6 else None))
        axis.set_major_formatter(lambda value, _: _plain(value))
        axis.set_minor_formatter(NullFormatter())


def _draw_dots(figure: "Figure", axes: "Axes", dots: Sequence[tuple[str, float, float]]) -> None:
    """Dots (name, x, y) on axes with set limits, and a legend of all names below. Those that touch are nested rings."""
    at = [axes.transData.transform((x, y)) * 72 / figure.dpi for _, x, y in dots]
    for number, (name, x, y) in enumerate(dots):
        near = [other for other, place in enumerate(at) if math.dist(place, at[number]) < 11]
        order, last = near.index(number), len(near) - 1
        colour, ring = _COLOURS[number % len(_COLOURS)], order < last
        axes.plot(
            x, y, marker=_MARKERS[number % len(_MARKERS)], linestyle="none", zorder=4, label=name,
            markersize=15 - 10 * order / last if last else 9, markerfacecolor="none" if ring else colour,
            markeredgecolor=colour if ring else "black", markeredgewidth=min(2, 6 / last) if ring else 1,
        )  # fmt: skip
    lines, names = axes.get_legend_handles_labels()
    texts = [textwrap.fill(name, 54) for name in names]
    figure.legend(lines, texts, loc="outside lower center", ncols=min(2, len(names)), fontsize=9)


def score_curve(found: Score) -> Plot:
    """Points against speed relative to the judge's baseline: one curve for all cases, a marker for each."""
    figure, (axes,) = canvas(8.0, 4.6)
    speeds = [case.baseline_ms / case.time_ms for case in found.cases]
    low, high = min(0.5, *speeds) / 1.2, max(8.0, *speeds) * 1.2
    xs = np.geomspace(low, high, 201)
    axes.plot(xs, [case_points(1 / x, 1.0) for x in xs], color=INK, linewidth=2)
    words = []
    for case in found.cases:
        following = f", {case.floored + 1} at {case.next_time_ms:.3f} ms" if case.next_time_ms else ""
        words.append(f"case {case.case}: {case.time_ms:.3f} ms, {case.floored} points{following}")
    axes.set_xscale("log")
    exponents = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    ticks = [2.0**exponent for exponent in exponents if exponent % -(-len(exponents) // 8) == 0]
    axes.set_xticks(ticks, [f"{_plain(x)}x" for x in ticks])
    axes.minorticks_off()
    axes.set(ylim=(0, 100), xlim=(low, high), xlabel="times faster than the judge's baseline", ylabel="points")
    axes.grid(color=PALE)
    axes.set_title(f"score {found.points:.2f}, total {found.total_ms:.3f} ms", fontsize=10)
    dots = [(text, speed, case.points) for text, speed, case in zip(words, speeds, found.cases, strict=True)]
    _draw_dots(figure, axes, [*dots, ("the judge's baseline: 50 points", 1, 50)])
    return figure, (
        f"Points rise steeply up to the baseline's speed (50 points) and flatten towards 100. {'; '.join(words)}. "
        f"Score {found.points:.2f}, the mean of the whole points."
    )


def layout_picture(layout: GroupedLayout) -> Plot:
    """Rows of every expert, a line each: valid ones filled, padding hatched, blocks of padding alone crossed out."""
    experts, block = range(layout.num_experts), layout.block
    high = min(0.32, 9 / layout.num_experts)
    figure, (axes,) = canvas(8.6, 1.4 + high * layout.num_experts)
    padded = [blocks * block for blocks in layout.num_blocks_of]
    longest = max(block, *padded)
    axes.barh(experts, padded, color="white", edgecolor="#AAAAAA", hatch="////", linewidth=0)
    axes.barh(experts, layout.sizes, color=BLUE)
    frame = min(0.8, 0.15 * 560 * block / longest, 0.1 * 72 * high)  # some 560 points across: must not hide thin blocks
    crosses = []
    for expert, (size, end) in enumerate(zip(layout.sizes, padded, strict=True)):
        pieces = [(start, block) for start in range(0, end, block)]
        axes.broken_barh(pieces, (expert - 0.4, 0.8), facecolor="none", edgecolor="black", linewidth=frame)
        crosses += [(start + block / 2, expert) for start, _ in pieces if start >= size]
    for x, y in crosses:
        axes.plot(x, y, "x", color=RED, markersize=min(12, 50 * high), markeredgewidth=1.5)
    axes.set_yticks(range(0, layout.num_experts, -(-layout.num_experts // 32)))
    axes.set_xticks(range(0, longest + 1, block * max(1, longest // block // 10)))
    axes.set(xlim=(0, longest * 1.01), ylim=(layout.num_experts - 0.4, -0.6))
    axes.set(ylabel="expert", xlabel="row of the group")
    summary = (
        f"{layout.num_rows} valid rows in {layout.num_padded_rows} padded rows, {len(layout.block_map)} blocks of "
        f"{block}, {layout.waste:.0%} padding"
    ) + (f", {len(crosses)} blocks hold padding alone (crossed)" if crosses else "")
    axes.set_title(f"{summary}\nfilled: valid, hatched: padding", fontsize=9)
    sizes = f"{layout.num_experts} experts, group sizes from {min(layout.sizes)} to {max(layout.sizes)}"
    return figure, f"Grouped layout of {sizes}: {summary}."
