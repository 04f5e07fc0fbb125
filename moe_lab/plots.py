"""Plots of numbers. Each returns a figure and, in words, what it shows; ``display.show(*plot)`` shows both.

Nothing here touches pyplot or any other global state. Markers, line styles and hatching carry what colour carries, so
a plot can be read in grey. Drawings that explain a kernel are in :mod:`moe_lab.pictures`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_lab.devices import Device, Roof
from moe_lab.errors import ContractError
from moe_lab.judge.score import Score, case_points
from moe_lab.layout import GroupedLayout
from moe_lab.pictures import BLUE, GREEN, ORANGE, PURPLE, RED, SKY
from moe_lab.roofline import attainable_tflops
from moe_lab.tiles import KernelResources, Placed
from moe_lab.timing import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Plot = tuple["Figure", str]

_GREY, _PALE = "#444444", "#E8E8E8"
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", "-.", ":")


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def timings(rows: Sequence[Measurement], bounds_ms: dict[str, float] | None = None) -> Plot:
    """Median times with their 95% intervals, a panel for each case, one line for each step or peer.

    Args:
        rows: of one run for each case, roofs left out or not; steps are drawn in the order given, peers after them.
        bounds_ms: least time by name of the case, drawn as a line (:func:`moe_lab.bench.bound_ms`).

    Raises:
        ContractError: for no rows, or a case with rows of several runs: their times may not be compared.
    """
    rows = [row for row in rows if row.kind != "roof"]
    if not rows:
        raise ContractError("got no rows of a step or peer, expected those of a run")
    cases = list(dict.fromkeys(row.case for row in rows))
    for case in cases:
        runs = {row.run for row in rows if row.case == case}
        if len(runs) != 1:
            raise ContractError(
                f"got rows of {len(runs)} runs for {case}, expected one: only what was timed in turns can be compared"
            )
    names = list(dict.fromkeys(row.name for row in sorted(rows, key=lambda row: row.kind == "peer")))
    figure, panels = _figure(3.2 + 2.5 * len(cases), 1.5 + 0.3 * len(names), len(cases))
    words = []
    for axes, case in zip(panels, cases, strict=True):
        found = {row.name: row for row in rows if row.case == case}
        for place, name in enumerate(names):
            row = found.get(name)
            if row is None:
                continue
            peer = row.kind == "peer"
            spread = [[row.median_ms - row.low_ms], [row.high_ms - row.median_ms]]
            axes.errorbar(
                row.median_ms, place, xerr=spread, fmt="s" if peer else "o", color=ORANGE if peer else BLUE,
                markerfacecolor="white" if peer else BLUE, ecolor=_GREY, capsize=3, markersize=7,
            )  # fmt: skip
            axes.annotate(
                f"{row.median_ms:.3g}", (row.median_ms, place), xytext=(0, 6), textcoords="offset points",
                ha="center", fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
        bound = (bounds_ms or {}).get(case)
        if bound is not None:
            axes.axvline(bound, color=RED, linestyle="--", linewidth=1.2)
            axes.annotate(
                f"bound {bound:.3g}", (bound, 1), xycoords=("data", "axes fraction"), xytext=(3, -10),
                textcoords="offset points", fontsize=8, color=RED,
            )  # fmt: skip
        axes.set_xlim(0, 1.12 * max(row.high_ms for row in found.values()))
        axes.set_ylim(len(names) - 0.4, -1.3)
        axes.set_yticks(range(len(names)), names if axes is panels[0] else [""] * len(names))
        axes.set(title=case, xlabel="ms (less is better)")
        axes.grid(axis="x", color=_PALE)
        axes.set_axisbelow(True)
        times = (f"{name} {found[name].median_ms:.3g} ms" for name in names if name in found)
        words.append(f"{case}: {', '.join(times)}" + (f"; bound {bound:.3g} ms" if bound is not None else ""))
    first = rows[0]
    figure.suptitle(
        f"{first.device}, {first.routing}, {first.cache} cache: median of {first.rounds} and 95% interval"
        f"{'; ' if len(cases) > 1 else chr(10)}filled circles are steps, hollow squares peers",
        fontsize=9,
    )
    return figure, f"Median times on {first.device}, routing {first.routing}. {'. '.join(words)}."


@dataclass(frozen=True)
class Point:
    """One dot of a roofline plot.

    Attributes:
        label: what to write.
        intensity: FLOP per byte, above 0.
        rate_tflops: useful operations a second, 1e12, above 0.
    """

    label: str
    intensity: float
    rate_tflops: float


def roofline(roofs: Sequence[Roof], points: Sequence[Point] = ()) -> Plot:
    """Rooflines of any number of devices and dots under them, on logarithmic axes, each ridge labelled.

    Args:
        roofs: at least one.
        points: what reached which rate at which intensity.

    Raises:
        ContractError: for no roof, or a point that is not above 0.
    """
    if not roofs or any(point.intensity <= 0 or point.rate_tflops <= 0 for point in points):
        raise ContractError("got no roof or a point at 0, expected at least one roof and points above 0: axes are logs")
    figure, (axes,) = _figure(8.6, 4.6 + 0.12 * (len(roofs) + len(points)))
    intensities = [*(roof.ridge for roof in roofs), *(point.intensity for point in points)]
    left, right = min(intensities) / 8, max(intensities) * 8
    words = []
    for number, roof in enumerate(roofs):
        colour = _COLOURS[number % len(_COLOURS)]
        corners = [left, roof.ridge, right]
        axes.plot(
            corners, [attainable_tflops(x, roof) for x in corners], linewidth=2, color=colour,
            linestyle=_LINES[number % len(_LINES)], label=f"{roof.title} ({roof.peak_tflops:g} TFLOP/s)",
        )  # fmt: skip
        axes.plot(roof.ridge, roof.peak_tflops, marker="|", markersize=14, color=colour, markeredgewidth=2)
        # A roof just below another writes under its line, one step lower for each above it.
        above = sum(roof.peak_tflops < other.peak_tflops < 2 * roof.peak_tflops for other in roofs)
        axes.annotate(
            f"ridge {roof.ridge:.0f}", (roof.ridge, roof.peak_tflops), fontsize=9, color=_GREY,
            xytext=(6, 5) if not above else (6, 1 - 11 * above), textcoords="offset points",
            va="bottom" if not above else "top",
        )  # fmt: skip
        words.append(
            f"{roof.title}: {roof.peak_tflops:g} TFLOP/s, {roof.bandwidth_tbps:g} TB/s, ridge at {roof.ridge:.0f} FLOP "
            "per byte"
        )
    for number, point in enumerate(points):
        # Dots in one place shrink, so that each shows around the next.
        under = sum(
            abs(math.log(point.intensity / other.intensity)) < 0.1
            and abs(math.log(point.rate_tflops / other.rate_tflops)) < 0.1
            for other in points[:number]
        )
        axes.plot(
            point.intensity, point.rate_tflops, marker=_MARKERS[number % len(_MARKERS)], linestyle="none",
            markersize=max(4, 13 - 4 * under), markerfacecolor=_COLOURS[number % len(_COLOURS)],
            markeredgecolor="black", label=point.label,
        )  # fmt: skip
        words.append(f"{point.label}: {point.rate_tflops:.3g} TFLOP/s at {point.intensity:.0f} FLOP per byte")
    lowest = min([attainable_tflops(left, roof) for roof in roofs] + [point.rate_tflops for point in points])
    axes.set(
        xscale="log", yscale="log", xlim=(left, right), ylim=(lowest / 2, 3 * max(roof.peak_tflops for roof in roofs)),
        xlabel="arithmetic intensity, FLOP per byte of device memory", ylabel="TFLOP/s on valid rows",
    )  # fmt: skip
    axes.grid(which="major", color=_PALE)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, labelspacing=0.9)  # the markers are tall
    return figure, f"Roofline on logarithmic axes. {'. '.join(words)}."


def layout_picture(layout: GroupedLayout) -> Plot:
    """Rows of every expert: valid ones filled, padding hatched, blocks divided, blocks of padding alone crossed out.

    Args:
        layout: any number of experts; one line each.
    """
    from matplotlib.patches import Rectangle

    height = min(0.32, 9 / layout.num_experts)
    figure, (axes,) = _figure(8.6, 1.4 + height * layout.num_experts)
    block, empty = layout.block, 0
    for expert, (size, blocks) in enumerate(zip(layout.sizes, layout.num_blocks_of, strict=True)):
        axes.add_patch(Rectangle((0, expert - 0.4), size, 0.8, facecolor=BLUE, linewidth=0))
        padding = blocks * block - size
        axes.add_patch(
            Rectangle((size, expert - 0.4), padding, 0.8, facecolor="white", edgecolor="#AAAAAA", hatch="////",
                      linewidth=0)
        )  # fmt: skip
        for number in range(blocks):
            start = number * block
            axes.add_patch(
                Rectangle((start, expert - 0.4), block, 0.8, facecolor="none", edgecolor="black", linewidth=0.8)
            )
            if start >= size:
                empty += 1
                axes.plot([start, start + block], [expert - 0.4, expert + 0.4], color=RED, linewidth=1.5)
                axes.plot([start, start + block], [expert + 0.4, expert - 0.4], color=RED, linewidth=1.5)
    step = max(1, -(-layout.num_experts // 32))
    longest = max(1, *layout.num_blocks_of) * block
    axes.set_yticks(range(0, layout.num_experts, step))
    axes.set_xticks(range(0, longest + 1, block * max(1, longest // block // 10)))
    axes.set(xlim=(0, longest * 1.01), ylim=(layout.num_experts - 0.4, -0.6))
    axes.set(ylabel="expert", xlabel="row of the group")
    summary = (
        f"{layout.num_rows} valid rows in {layout.num_padded_rows} padded rows, {len(layout.block_map)} blocks of "
        f"{block}, {layout.waste:.0%} padding"
    )
    crossed = f", {empty} blocks hold padding alone (crossed)" if empty else ""
    axes.set_title(f"{summary}{crossed}; filled: valid, hatched: padding", fontsize=9)
    spread = f"group sizes from {min(layout.sizes)} to {max(layout.sizes)}"
    return figure, f"Grouped layout of {layout.num_experts} experts, {spread}: {summary}{crossed}."


def tile_memory(kernels: Sequence[KernelResources], device: Device) -> Plot:
    """Shared memory of each launch to scale: every buffer at its place, against what a block of the device has.

    Buffers that never live at once may share bytes; they are drawn below each other.

    Args:
        kernels: from :func:`moe_lab.tiles.resources`.
        device: a GPU.

    Raises:
        ContractError: if the shared memory of a launch is not known.
    """
    from matplotlib.patches import Rectangle

    if any(kernel.shared_bytes is None for kernel in kernels):
        raise ContractError("got a launch whose shared memory is not known, expected a prediction: see its `unknown`")
    lanes = [_lanes(kernel.shared) for kernel in kernels]
    figure, (axes,) = _figure(9.0, 1.2 + 0.62 * sum(max(1, len(each)) for each in lanes))
    limit = device.shared_per_block_bytes
    most = max(limit, *(kernel.shared_bytes or 0 for kernel in kernels))
    labels, words, top = [], [], 0
    for kernel, rows in zip(kernels, lanes, strict=True):
        need = kernel.shared_bytes or 0
        labels.append((top + (max(1, len(rows)) - 1) / 2, f"stage {kernel.stage}\n{need / 1024:g} KiB"))
        for row, buffers in enumerate(rows):
            for number, item in enumerate(buffers):
                fits = item.offset_bytes + item.size_bytes <= limit
                each = item.size_bytes / item.copies
                for copy in range(item.copies):
                    start = (item.offset_bytes + copy * each) / 1024
                    box = Rectangle((start, top + row - 0.38), each / 1024, 0.76, edgecolor="black", linewidth=1)
                    box.set_facecolor((SKY, "#F5D08A")[(row + number) % 2] if fits else "white")
                    box.set_hatch("" if fits else "xx")
                    axes.add_patch(box)
                _label(axes, item, (most * 1.02) / 1024, top + row)
        top += max(1, len(rows))
        parts = ", ".join(f"{b.name} {b.size_bytes} bytes" + (f" in {b.copies} copies" if b.copies > 1 else "")
                          for b in kernel.shared)  # fmt: skip
        verdict = "fits" if need <= limit else "does not fit"
        words.append(f"stage {kernel.stage} needs {need} bytes and {verdict}: {parts or 'no buffer'}")
    axes.axvline(limit / 1024, color=RED, linewidth=2, linestyle="--")
    axes.annotate(
        f"a block of the {device.title}: {limit / 1024:g} KiB", (limit / 1024, -0.55), xytext=(-4, 0),
        textcoords="offset points", ha="right", va="bottom", fontsize=9, color=RED,
    )  # fmt: skip
    axes.set(xlim=(0, most * 1.02 / 1024), ylim=(top - 0.45, -1.0))
    axes.set_xlabel("KiB of shared memory; hatched: beyond the limit")
    axes.set_yticks([place for place, _ in labels], [text for _, text in labels])
    return figure, f"Shared memory against the {limit} bytes of a {device.title} block. {'. '.join(words)}."


def _lanes(buffers: Sequence[Placed]) -> list[list[Placed]]:
    """Buffers in rows so that none of a row overlap."""
    rows: list[list[Placed]] = []
    for item in sorted(buffers, key=lambda b: (b.offset_bytes, -b.size_bytes)):
        for row in rows:
            if row[-1].offset_bytes + row[-1].size_bytes <= item.offset_bytes:
                row.append(item)
                break
        else:
            rows.append([item])
    return rows


def _label(axes: Axes, item: Placed, width_kib: float, y: float) -> None:
    """The buffer's name inside its box, or nothing if the box is too narrow: the words have it."""
    text = f"{item.name}\n{item.size_bytes / 1024:g} KiB" + (f" = {item.copies} copies" if item.copies > 1 else "")
    # About 110 characters of this size fit across the axes.
    if max(map(len, text.split("\n"))) / 110 < item.size_bytes / 1024 / width_kib:
        middle = (item.offset_bytes + item.size_bytes / 2) / 1024
        axes.text(middle, y, text, ha="center", va="center", fontsize=8,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85})  # fmt: skip


def score_curve(found: Score) -> Plot:
    """Points against speed relative to the judge's baseline: one curve for all cases, a marker for each.

    Args:
        found: from :func:`moe_lab.judge.score.score`.
    """
    figure, (axes,) = _figure(8.0, 4.2)
    speeds = [case.baseline_ms / case.time_ms for case in found.cases]
    low, high = min(0.5, *speeds) / 1.2, max(8.0, *speeds) * 1.2
    xs = [low * (high / low) ** (step / 200) for step in range(201)]
    axes.plot(xs, [case_points(1 / x, 1.0) for x in xs], color=_GREY, linewidth=2)
    words = []
    for number, (case, speed) in enumerate(zip(found.cases, speeds, strict=True)):
        following = f", {case.floored + 1} at {case.next_time_ms:.3f} ms" if case.next_time_ms else ""
        text = f"case {case.case}: {case.time_ms:.3f} ms, {case.floored} points{following}"
        axes.plot(
            speed, case.points, marker=_MARKERS[number], markersize=10, linestyle="none", label=text,
            markerfacecolor=_COLOURS[number], markeredgecolor="black",
        )  # fmt: skip
        words.append(text)
    axes.plot(1, 50, marker="x", markersize=9, color="black", linestyle="none", label="the judge's baseline: 50 points")
    ticks = [x for x in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if low <= x <= high]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{x:g}x" for x in ticks])
    axes.minorticks_off()
    axes.set(ylim=(0, 100), xlim=(low, high), xlabel="times faster than the judge's baseline", ylabel="points")
    axes.grid(color=_PALE)
    axes.legend(loc="lower right", fontsize=9, framealpha=1)
    axes.set_title(f"score {found.points:.2f}, total {found.total_ms:.3f} ms", fontsize=10)
    return figure, (
        f"Points rise steeply up to the baseline's speed (50 points) and flatten towards 100. {'; '.join(words)}. "
        f"Score {found.points:.2f}, the mean of the whole points."
    )
