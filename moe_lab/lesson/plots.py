"""Plots of numbers. Each returns a figure and, in words, what it shows; ``display.show(*plot)`` shows both.

Nothing here touches pyplot or any other global state. Markers, line styles and hatching carry what colour carries, so
a plot can be read in grey. A notebook page is some 900 pixels wide and shrinks what is wider, so no plot is wider than
9 inches. Drawings that explain a kernel are in :mod:`moe_lab.lesson.pictures`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moe_lab.judge.score import Score, case_points
from moe_lab.lesson.pictures import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, short_number, text_size
from moe_lab.machine.devices import Device, Roof
from moe_lab.machine.timing import Measurement
from moe_lab.model.roofline import attainable_tflops
from moe_lab.model.tiles import KernelResources, Placed
from moe_lab.problem.errors import ContractError
from moe_lab.problem.layout import GroupedLayout

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Plot = tuple["Figure", str]

# Text in the palette's red would be too pale on white.
_GREY, _PALE, _DARK_RED = "#444444", "#E8E8E8", "#A34700"
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
#: The markers as characters, for a name that stands apart from its dot.
_GLYPHS = dict(zip((*_MARKERS, "x"), "●■▲◆▼✚✖★×", strict=True))
_LINES = ("-", "--", "-.", ":")
_PANELS_IN_A_ROW = 3
#: Between things that must not touch, in points of text.
_GAP = 4.0


def _figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, [axes for row in figure.subplots(rows, columns, squeeze=False) for axes in row]


def _plain(value: float) -> str:
    """All digits and no power of ten: ``0.0005``, ``20``, ``2000000``."""
    return f"{value:.12f}".rstrip("0").rstrip(".")


def _wrapped(text: str, size: float, width: float) -> str:
    """The text in as many lines of about the same length as ``width`` points ask for."""
    text = " ".join(text.split())
    lines = math.ceil(text_size(text, size)[0] / width)
    return text if lines < 2 else textwrap.fill(text, max(12, math.ceil(1.1 * len(text) / lines)))


def _measured(value: float) -> str:
    return short_number(value, zeros=True)


def timings(rows: Sequence[Measurement], bounds_ms: dict[str, float] | None = None) -> Plot:
    """Median times with their 95% intervals, a panel for each case, one line for each step or peer.

    Args:
        rows: of one run for each case, roofs left out or not; steps are drawn in the order given, peers after them.
        bounds_ms: least time by name of the case, drawn as a line (:func:`moe_lab.speed.bench.bound_ms`).

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
    ticks = [textwrap.fill(name, 30) for name in names]
    columns = min(len(cases), _PANELS_IN_A_ROW)
    rows_of_panels = -(-len(cases) // columns)
    width = min(9.0, 3.2 + 2.5 * columns)
    figure, panels = _figure(width, 0.5 + (1.0 + 0.3 * len(names)) * rows_of_panels, columns, rows_of_panels)
    for axes in panels[len(cases) :]:
        axes.remove()
    words = []
    for number, (axes, case) in enumerate(zip(panels, cases, strict=False)):
        found = {row.name: row for row in rows if row.case == case}
        bound = (bounds_ms or {}).get(case)
        for place, name in enumerate(names):
            row = found.get(name)
            if row is None:
                continue
            peer = row.kind == "peer"
            spread = [[row.median_ms - row.low_ms], [row.high_ms - row.median_ms]]
            axes.errorbar(
                row.median_ms, place, xerr=spread, fmt="s" if peer else "o", color=ORANGE if peer else BLUE,
                markerfacecolor="white" if peer else BLUE, markeredgewidth=1.5, ecolor=_GREY, capsize=3, markersize=7,
            )  # fmt: skip
        axes.set_ylim(len(names) - 0.4, -1.3)
        axes.set_yticks(range(len(names)), ticks if number % columns == 0 else [""] * len(names), fontsize=9)
        axes.set_title(case, fontsize=10)
        axes.set_xlabel("ms (less is better)", fontsize=9)
        axes.tick_params(axis="x", labelsize=9)
        axes.grid(axis="x", color=_PALE)
        axes.set_axisbelow(True)
        times = (f"{name} {_measured(found[name].median_ms)} ms" for name in names if name in found)
        words.append(f"{case}: {', '.join(times)}" + (f"; bound {_measured(bound)} ms" if bound is not None else ""))
    first = rows[0]
    head = (
        f"{first.device}, {first.routing}, {first.cache} cache: median of {first.rounds} and 95% interval; filled "
        "circles are steps, hollow squares peers"
    )
    figure.suptitle(_wrapped(head, 9, 0.95 * 72 * width), fontsize=9)
    figure.draw_without_rendering()  # only now is it known how wide a panel is
    for axes, case in zip(panels, cases, strict=False):
        _write_times(axes, [row for row in rows if row.case == case], names, (bounds_ms or {}).get(case))
    return figure, f"Median times on {first.device}, routing {first.routing}. {'. '.join(words)}."


def _write_times(axes: Axes, rows: Sequence[Measurement], names: Sequence[str], bound: float | None) -> None:
    """Each time right of its interval, or right of the bound's line where that would run through it."""
    size = 9
    wide = axes.bbox.width * 72 / axes.figure.dpi
    label = max(text_size(_measured(row.median_ms), size)[0] for row in rows) + 2 * _GAP
    # Right of what is farthest right there must be room for a label: a marker's half, the label, the frame.
    farthest = max([row.high_ms for row in rows] + ([bound] if bound is not None else []))
    right = farthest * wide / max(wide - label - 6, wide / 4)
    axes.set_xlim(0, right)
    for row in rows:
        # Where the label begins: beyond the marker, which is half of 7 points wide, and the interval's end.
        start = max(row.high_ms, row.median_ms + 3.5 * right / wide) * wide / right
        if bound is not None and start - _GAP < bound * wide / right < start + label:
            start = bound * wide / right
        axes.annotate(
            _measured(row.median_ms), (row.median_ms, names.index(row.name)), va="center_baseline", fontsize=size,
            xytext=(start + _GAP - row.median_ms * wide / right, 0), textcoords="offset points",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip
    if bound is None:
        return
    axes.axvline(bound, color=RED, linestyle="--", linewidth=1.2, zorder=1)
    text = f"bound {_measured(bound)}"
    fits = bound * wide / right + text_size(text, size)[0] + 2 * _GAP < wide
    axes.annotate(
        text, (bound, 1), xycoords=("data", "axes fraction"), xytext=(_GAP if fits else -_GAP, -4),
        textcoords="offset points", fontsize=size, color=_DARK_RED, ha="left" if fits else "right", va="top",
    )  # fmt: skip


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

    Dots in one place are drawn as rings in one another, and every name is written beside its dot.

    Args:
        roofs: at least one.
        points: what reached which rate at which intensity.

    Raises:
        ContractError: for no roof, or a point that is not above 0.
    """
    if not roofs or any(point.intensity <= 0 or point.rate_tflops <= 0 for point in points):
        raise ContractError("got no roof or a point at 0, expected at least one roof and points above 0: axes are logs")
    figure, (axes,) = _figure(8.6, 4.6 + 0.12 * len(roofs) + 0.06 * len(points))
    intensities = [*(roof.ridge for roof in roofs), *(point.intensity for point in points)]
    left, right = min(intensities) / 8, max(intensities) * 8
    words, lines = [], []
    for number, roof in enumerate(roofs):
        colour = _COLOURS[number % len(_COLOURS)]
        corners = [left, roof.ridge, right]
        lines += axes.plot(
            corners, [attainable_tflops(x, roof) for x in corners], linewidth=2, color=colour,
            linestyle=_LINES[number % len(_LINES)], label=f"{roof.title} ({_measured(roof.peak_tflops)} TFLOP/s)",
        )  # fmt: skip
        axes.plot(roof.ridge, roof.peak_tflops, marker="|", markersize=14, color=colour, markeredgewidth=2)
        words.append(
            f"{roof.title}: {roof.peak_tflops:g} TFLOP/s, {roof.bandwidth_tbps:g} TB/s, ridge at {roof.ridge:.0f} FLOP "
            "per byte"
        )
    for point in points:
        words.append(f"{point.label}: {_measured(point.rate_tflops)} TFLOP/s at {point.intensity:.0f} FLOP per byte")
    lowest = min([attainable_tflops(left, roof) for roof in roofs] + [point.rate_tflops for point in points])
    highest = max([roof.peak_tflops for roof in roofs] + [point.rate_tflops for point in points])
    axes.set(
        xscale="log", yscale="log", xlim=(left, right), ylim=(lowest / 2, 3 * highest),
        xlabel="arithmetic intensity, FLOP per byte of device memory", ylabel="TFLOP/s on valid rows",
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        _plain_ticks(axis)
    axes.grid(which="major", color=_PALE)
    figure.legend(handles=lines, loc="outside lower center", ncols=2, fontsize=9)
    _draw_named(
        figure,
        axes,
        [
            _Dot(point.label, point.intensity, point.rate_tflops, *_look(number))
            for number, point in enumerate(points)
        ],
        [_Dot(f"ridge {roof.ridge:.0f}", roof.ridge, roof.peak_tflops) for roof in roofs],
    )  # fmt: skip
    return figure, f"Roofline on logarithmic axes. {'. '.join(words)}."


def _plain_ticks(axis: Axis) -> None:
    """Ticks of a logarithmic axis as numbers that can be read aloud: 20, 50, 100, without powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 3 else (1,), numticks=99 if decades < 12 else None))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axis.set_minor_locator(LogLocator(subs=range(2, 10), numticks=99 if decades < 6 else None))
    axis.set_minor_formatter(NullFormatter())


# --- names beside dots -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Dot:
    """Something at a place of the axes that has a name.

    Attributes:
        name: what to write.
        x, y: where, in the data's units.
        marker, colour: how it is drawn.
    """

    name: str
    x: float
    y: float
    marker: str = "|"
    colour: str = _GREY


@dataclass(frozen=True)
class _Box:
    """A rectangle, in points of text from the lower left corner of the axes."""

    left: float
    bottom: float
    right: float
    top: float

    @property
    def middle(self) -> tuple[float, float]:
        return (self.left + self.right) / 2, (self.bottom + self.top) / 2

    def overlaps(self, other: _Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )  # fmt: skip

    def gap_to(self, other: _Box) -> float:
        """Between the two where they are nearest."""
        aside = max(self.left - other.right, other.left - self.right, 0)
        return math.hypot(aside, max(self.bottom - other.top, other.bottom - self.top, 0))

    def is_crossed(self, start: tuple[float, float], end: tuple[float, float]) -> bool:
        """Whether the straight line between two places runs through it."""
        low, high = 0.0, 1.0
        for axis, (least, most) in enumerate(((self.left, self.right), (self.bottom, self.top))):
            along = end[axis] - start[axis]
            if abs(along) < 1e-9:
                if not least < start[axis] < most:
                    return False
                continue
            near, far = sorted(((least - start[axis]) / along, (most - start[axis]) / along))
            low, high = max(low, near), min(high, far)
        return low < high


@dataclass(frozen=True)
class _Named:
    """A name to write, its dot, and where the dot is, in points of text."""

    text: str
    dot: _Dot
    at: tuple[float, float]


def _look(number: int) -> tuple[str, str]:
    """Marker and colour of the dot of this number: 24 differ."""
    return _MARKERS[number % len(_MARKERS)], _COLOURS[number % len(_COLOURS)]


def _draw_named(figure: Figure, axes: Axes, dots: Sequence[_Dot], marks: Sequence[_Dot] = ()) -> None:
    """Draw dots, and write the name of each beside it: no name lies on another, on a dot or beyond the axes.

    Dots that touch are drawn as rings, each smaller than the one before, and their names stand one below the other with
    a thin line to each. Lines are avoided where that is possible. Call it last: it lays the figure out.

    Args:
        figure: of the axes.
        axes: with all lines drawn and the limits set.
        dots: what to draw.
        marks: what is drawn already, 14 points high, and needs a name.
    """
    import numpy as np

    figure.draw_without_rendering()
    scale = 72 / figure.dpi

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (axes.transData.transform((x, y)) - (axes.bbox.x0, axes.bbox.y0)) * scale
        return float(across), float(up)

    drawn = [list(zip(*(np.asarray(line.get_data(), float)), strict=True)) for line in axes.lines]
    curves = [np.array([place(x, y) for x, y in line]) for line in drawn if len(line) > 1]
    room = _Room(axes, axes.bbox.width * scale, axes.bbox.height * scale, _along(curves), [], [])
    at = [place(dot.x, dot.y) for dot in dots]
    groups = _touching(at)
    for group in groups:
        last = len(group) - 1
        for order, number in enumerate(group):
            dot, size = dots[number], 15 - 10 * order / last if last else 10
            axes.plot(
                dot.x, dot.y, marker=dot.marker, markersize=size, linestyle="none", label=dot.name, zorder=4,
                markerfacecolor="none" if order < last else dot.colour,
                markeredgecolor=dot.colour if order < last else "black",
                markeredgewidth=min(2, 6 / last) if order < last else 1,
            )  # fmt: skip
            room.dots.append(_around([at[number]], size / 2 + 1))
    named_marks = [_Named(mark.name, mark, place(mark.x, mark.y)) for mark in marks]
    room.dots += [_around([mark.at], 7) for mark in named_marks]
    for mark in named_marks:
        room.write([mark], margin=7, colour=_GREY)
    # The largest group is the hardest to place. Names go from the highest dot to the lowest: no two lines cross.
    for group in sorted(groups, key=len, reverse=True):
        names = []
        for number in sorted(group, key=lambda number: -at[number][1]):
            dot = dots[number]
            text = f"{_GLYPHS[dot.marker]} {dot.name}" if len(group) > 1 else dot.name
            names.append(_Named(_wrapped(text, room.size, 0.6 * room.wide), dot, at[number]))
        room.write(names, margin=8.5 if len(group) > 1 else 6, colour="black")


def _along(curves: Sequence[np.ndarray]) -> np.ndarray:
    """Places on curves of straight pieces, some 8 points of text apart."""
    import numpy as np

    found = [np.empty((0, 2))]
    for curve in curves:
        way = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(curve, axis=0).T))])
        steps = np.linspace(0, way[-1], 2 + int(way[-1] / 8))
        found.append(np.column_stack([np.interp(steps, way, curve[:, axis]) for axis in (0, 1)]))
    return np.concatenate(found)


def _touching(at: Sequence[tuple[float, float]]) -> list[list[int]]:
    """Numbers of the places in groups: those whose dots touch, or both touch one between them, are together."""
    reach = 11.0
    groups: list[list[int]] = []
    for number, (x, y) in enumerate(at):
        joined, apart = [number], []
        for group in groups:
            near = any(abs(x - at[other][0]) < reach and abs(y - at[other][1]) < reach for other in group)
            if near:
                joined = [*group, *joined]
            else:
                apart.append(group)
        groups = [*apart, sorted(joined)]
    return sorted(groups)


def _around(places: Sequence[tuple[float, float]], margin: float) -> _Box:
    xs, ys = zip(*places, strict=True)
    return _Box(min(xs) - margin, min(ys) - margin, max(xs) + margin, max(ys) + margin)


@dataclass
class _Room:
    """What is free within the axes, in points of text.

    Attributes:
        axes: where names are written.
        wide, high: size of the axes.
        lines: places on lines (n, 2), which names keep off where they can.
        dots: dots and marks, which no name may lie on.
        taken: by names.
        size: of the type.
    """

    axes: Axes
    wide: float
    high: float
    lines: np.ndarray
    dots: list[_Box]
    taken: list[_Box]
    size: float = 9.0

    def write(self, names: Sequence[_Named], margin: float, colour: str) -> None:
        """Write the names of dots that touch, one below the other; narrower, or in two parts, if there is no room.

        Args:
            names: from the highest dot to the lowest.
            margin: half of the largest dot.
            colour: of the names.
        """
        widths, heights = zip(*(text_size(name.text, self.size) for name in names), strict=True)
        target = _around([name.at for name in names], margin)
        block, free = self._best(target, max(widths), sum(heights), several=len(names) > 1)
        # In the middle of the axes there is a little less than half of them on either side.
        narrow = [replace(name, text=_wrapped(name.text, self.size, 0.42 * self.wide)) for name in names]
        if not free and narrow != list(names):
            self.write(narrow, margin, colour)
            return
        if not free and len(names) > 1:
            half = len(names) // 2
            self.write(names[:half], margin, colour)
            self.write(names[half:], margin, colour)
            return
        # Which part of each name is next to the dots: its beginning, its end or its middle.
        side = 0.0 if block.left >= target.right else 1.0 if block.right <= target.left else 0.5
        gap, others = block.gap_to(target), [dot for dot in self.dots if not dot.overlaps(target)]
        unclear = any(block.gap_to(dot) < gap + 3 * _GAP for dot in others)
        led = len(names) > 1 or gap > (_GAP if unclear else 3 * _GAP)
        top = block.top
        for name, width, height in zip(names, widths, heights, strict=True):
            left, middle, (x, y) = block.left + side * (max(widths) - width), top - height / 2, name.at
            # Held on the side of the dot, so that a hair more or less of width changes nothing there.
            hold = {0.0: "left", 0.5: "center", 1.0: "right"}[side]
            self.taken.append(_Box(left, top - height, left + width, top))
            top -= height
            below = 1.0 if middle < y else 0.0
            leader = {
                "arrowstyle": "-", "color": _GREY, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0,
                "relpos": (side, below if side == 0.5 else 0.5),
            }  # fmt: skip
            self.axes.annotate(
                name.text, (name.dot.x, name.dot.y), xytext=(left + side * width - x, middle - y),
                textcoords="offset points", fontsize=self.size, color=colour, ha=hold, va="center", zorder=3,
                linespacing=1.1, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.85},
                arrowprops=leader if led else None,
            )  # fmt: skip

    def _best(self, target: _Box, width: float, height: float, several: bool) -> tuple[_Box, bool]:
        """Where a block of this size goes beside the target, and whether nothing else is there."""
        import numpy as np

        # Lines to several names need room to spread out.
        gap = 4 * _GAP if several else _GAP
        middle_x, middle_y = target.middle
        lefts = [*np.arange(_GAP, self.wide - width - _GAP, 6), target.right + gap, target.left - gap - width,
                 middle_x - width / 2]  # fmt: skip
        bottoms = [*np.arange(_GAP, self.high - height - _GAP, 4), middle_y - height / 2, middle_y + _GAP,
                   middle_y - _GAP - height, target.top + _GAP / 2, target.bottom - _GAP / 2 - height]  # fmt: skip
        left, bottom = (grid.ravel() for grid in np.meshgrid(lefts, bottoms))
        right, top = left + width, bottom + height

        def away(box: _Box) -> tuple[np.ndarray, np.ndarray]:
            return np.maximum(left - box.right, box.left - right), np.maximum(bottom - box.top, box.bottom - top)

        aside, beyond = away(target)
        near = np.hypot(np.clip(aside, 0, None), np.clip(beyond, 0, None))
        overlap, crossed, astray = (np.zeros(len(left), bool) for _ in range(3))
        for box in (*self.dots, *self.taken):
            over, under = away(box)
            overlap |= (over < 2) & (under < 1)
        for x, y in self.lines:
            crossed |= (left - 2 < x) & (x < right + 2) & (bottom - 2 < y) & (y < top + 2)
        for box in self.dots:
            if not box.overlaps(target):
                over, under = away(box)
                astray |= np.hypot(np.clip(over, 0, None), np.clip(under, 0, None)) < near + _GAP
        # Near is best, then level with the dot, then right of it, then above it. A line under a name, or another dot
        # as near, costs as much as a detour of 40. What lies just under something else is named below.
        cost = near + 40 * crossed + 40 * astray + 3 * (right < target.left)
        if not several and any(box.overlaps(target) and box.middle[1] > middle_y + 1 for box in self.dots):
            cost += 12 * (bottom + top > 2 * middle_y)
        else:
            cost += 3 * (bottom + top < 2 * middle_y - 2)
        cost += 0.3 * np.where(aside > 0, abs((bottom + top) / 2 - middle_y), 20 + abs((left + right) / 2 - middle_x))
        impossible = 1e6
        cost += impossible * overlap
        cost += impossible * ~((aside >= gap) if several else (aside >= _GAP / 2) | (beyond >= _GAP / 2))
        cost += 10 * impossible * ~((left >= 0) & (bottom >= 0) & (right <= self.wide) & (top <= self.high))
        order = np.argsort(cost, kind="stable")[:300]
        boxes = [_Box(*(float(side[number]) for side in (left, bottom, right, top))) for number in order]
        others = [box for box in (*self.dots, *self.taken) if not box.overlaps(target)]
        for number, box in zip(order, boxes, strict=True):
            end = (min(max(middle_x, box.left), box.right), min(max(middle_y, box.bottom), box.top))
            if cost[number] < impossible and not any(other.is_crossed(target.middle, end) for other in others):
                return box, True
        return boxes[0], bool(cost[order[0]] < impossible)


# --- rows and memory -------------------------------------------------------------------------------------------------


def layout_picture(layout: GroupedLayout) -> Plot:
    """Rows of every expert: valid ones filled, padding hatched, blocks divided, blocks of padding alone crossed out.

    Args:
        layout: any number of experts; one line each.
    """
    from matplotlib.patches import Rectangle

    height = min(0.32, 9 / layout.num_experts)
    figure, (axes,) = _figure(8.6, 1.4 + height * layout.num_experts)
    block, empty = layout.block, 0
    longest = max(1, *layout.num_blocks_of) * block
    # Some 560 points across: frames of thin blocks must not hide what is in them.
    frame = min(0.8, 0.15 * 560 * block / longest, 0.1 * 72 * height)
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
                Rectangle((start, expert - 0.4), block, 0.8, facecolor="none", edgecolor="black", linewidth=frame)
            )
            if start >= size:
                empty += 1
                axes.plot([start, start + block], [expert - 0.4, expert + 0.4], color=RED, linewidth=1.5)
                axes.plot([start, start + block], [expert + 0.4, expert - 0.4], color=RED, linewidth=1.5)
    step = max(1, -(-layout.num_experts // 32))
    axes.set_yticks(range(0, layout.num_experts, step))
    axes.set_xticks(range(0, longest + 1, block * max(1, longest // block // 10)))
    axes.set(xlim=(0, longest * 1.01), ylim=(layout.num_experts - 0.4, -0.6))
    axes.set(ylabel="expert", xlabel="row of the group")
    summary = (
        f"{layout.num_rows} valid rows in {layout.num_padded_rows} padded rows, {len(layout.block_map)} blocks of "
        f"{block}, {layout.waste:.0%} padding"
    )
    crossed = f", {empty} blocks hold padding alone (crossed)" if empty else ""
    separator = "\n" if crossed else "; "
    axes.set_title(f"{summary}{crossed}{separator}filled: valid, hatched: padding", fontsize=9)
    spread = f"group sizes from {min(layout.sizes)} to {max(layout.sizes)}"
    return figure, f"Grouped layout of {layout.num_experts} experts, {spread}: {summary}{crossed}."


def tile_memory(kernels: Sequence[KernelResources], device: Device) -> Plot:
    """Shared memory of each launch to scale: every buffer at its place, against what a block of the device has.

    Buffers that never live at once may share bytes; they are drawn below each other.

    Args:
        kernels: from :func:`moe_lab.model.tiles.resources`.
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
    left = limit > most / 2
    axes.annotate(
        f"a block of the {device.title}: {limit / 1024:g} KiB", (limit / 1024, -0.55), xytext=(-4 if left else 4, 0),
        textcoords="offset points", ha="right" if left else "left", va="bottom", fontsize=9, color=_DARK_RED,
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
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip


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
    dots, words = [], []
    for number, (case, speed) in enumerate(zip(found.cases, speeds, strict=True)):
        following = f", {case.floored + 1} at {case.next_time_ms:.3f} ms" if case.next_time_ms else ""
        text = f"case {case.case}: {case.time_ms:.3f} ms, {case.floored} points{following}"
        dots.append(_Dot(text, speed, case.points, *_look(number)))
        words.append(text)
    dots.append(_Dot("the judge's baseline: 50 points", 1, 50, "x", "black"))
    axes.set_xscale("log")
    exponents = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    ticks = [2.0**exponent for exponent in exponents if exponent % max(1, len(exponents) // 8) == 0]
    axes.set_xticks(ticks, [f"{_plain(x)}x" for x in ticks])
    axes.minorticks_off()
    top = 100 if all(case.points <= 100 for case in found.cases) else 150
    axes.set(ylim=(0, top), xlim=(low, high), xlabel="times faster than the judge's baseline", ylabel="points")
    axes.grid(color=_PALE)
    axes.set_title(f"score {found.points:.2f}, total {found.total_ms:.3f} ms", fontsize=10)
    _draw_named(figure, axes, dots)
    return figure, (
        f"Points rise steeply up to the baseline's speed (50 points) and flatten towards 100. {'; '.join(words)}. "
        f"Score {found.points:.2f}, the mean of the whole points."
    )
