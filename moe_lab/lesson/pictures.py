"""Drawings that explain: what a tile is, who holds it, which block computes what.

Plots of numbers are in :mod:`moe_lab.lesson.plots`. Everything here is drawn from sizes and layouts that are passed
in, so a drawing cannot disagree with what a notebook computes. Text that does not fit its box is turned, shortened
or moved beside it, never laid over another.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moe_lab.problem.errors import ContractError
from moe_lab.problem.layout import GroupedLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by colour-blind readers, and in grey by lightness and by the labels.
BLUE, ORANGE, GREEN, RED, SKY, YELLOW, PURPLE = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#F0E442", "#CC79A7",
)  # fmt: skip
_EXPERT_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW)
_PALE, _LINE = "#F2F2F2", "#555555"
#: Width of the widest picture, in points of text: 9 inches, what a notebook page shows without shrinking it.
_PAGE = 648
#: Between blocks of a grid, in points, where there is room.
_GAP = 6


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for each in axes:
        each.set_axis_off()
    return figure, list(axes)


def text_size(text: str, size: float) -> tuple[float, float]:
    """Width and height of text in points, before anything is drawn; what is drawn is not larger but by a hair.

    Args:
        text: of one or more lines.
        size: of its type, in points.
    """
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    lines, kind = text.split("\n"), FontProperties(size=size)
    widths = [text_to_path.get_text_width_height_descent(line, kind, ismath=False)[0] for line in lines]
    # Type is set on whole pixels, so some letters are wider than their outlines.
    return 1.08 * max(widths), 1.25 * size * len(lines)


def short_number(value: float, *, zeros: bool = False) -> str:
    """Three digits that count, and never a power of ten.

    Args:
        value: what to write.
        zeros: keep those at the end, as of something that was measured.

    >>> [short_number(value) for value in (0.42204, 0.5, 12.34, 100, 1999.6)]
    ['0.422', '0.5', '12.3', '100', '2000']
    >>> [short_number(value, zeros=True) for value in (0.5, 100.2)]
    ['0.500', '100']
    """
    if abs(value) >= 999.5:
        return f"{value:.0f}"
    return f"{value:#.3g}".rstrip(".") if zeros else f"{value:.3g}"


def _fits(text: str, size: float, width: float, height: float = float("inf")) -> bool:
    wide, high = text_size(text, size)
    return wide <= width and high <= height


def _on_white(colour: str) -> str:
    """The colour for a line on white, where the palette's yellow would not be seen."""
    return "#A89A00" if colour == YELLOW else colour


def _box(axes: Axes, x: float, y: float, width: float, height: float, colour: str, **style: object) -> None:
    from matplotlib.patches import Rectangle

    settings = {"facecolor": colour, "edgecolor": _LINE, "linewidth": 0.8, **style}
    axes.add_patch(Rectangle((x, y), width, height, **settings))  # type: ignore[arg-type]


def problem(choices: Sequence[int], layout: GroupedLayout) -> Figure:
    """The whole problem: tokens are grouped by expert and padded, each group meets its expert, results keep the place.

    Args:
        choices: expert of each token, in the order the tokens arrive (one expert a token).
        layout: built from the same choices; rows of a group are in the order of arrival.
    """
    figure, (axes,) = _figure(9, 0.9 + 0.42 * layout.num_padded_rows)
    rows, top = layout.num_padded_rows, layout.num_padded_rows
    arrival = sorted(range(len(choices)), key=lambda token: choices[token])  # stable: order of arrival in a group
    padded_row = dict(zip(arrival, layout.raw_to_padded, strict=True))
    lift = (rows - len(choices)) / 2
    for row in set(range(rows)) - set(layout.raw_to_padded):
        for x, content in ((2.6, "anything"), (8.0, "must be 0")):
            _box(axes, x, top - row - 0.9, 1.2, 0.8, "white", hatch="////", edgecolor="#DDDDDD")
            axes.text(x + 0.6, top - row - 0.5, content, ha="center", va="center", fontsize=8)
    for token, expert in enumerate(choices):
        colour = _EXPERT_COLOURS[expert % len(_EXPERT_COLOURS)]
        start, end = top - lift - token - 0.5, top - padded_row[token] - 0.5
        for x, y in ((0, start), (2.6, end), (8.0, end)):
            _box(axes, x, y - 0.4, 1.2, 0.8, colour)
            axes.text(
                x + 0.6, y, f"{'token' if x < 5 else 'result'} {token}", ha="center", va="center", fontsize=8,
                color="white" if colour == BLUE else "black",
            )  # fmt: skip
        axes.annotate("", (2.55, end), (1.25, start), arrowprops={"arrowstyle": "->", "color": _on_white(colour)})
    for expert, blocks_of in enumerate(layout.num_blocks_of):
        if not blocks_of:
            continue
        high, low = (top - layout.padded_offsets[expert + step] for step in (0, 1))
        colour = _on_white(_EXPERT_COLOURS[expert % len(_EXPERT_COLOURS)])
        _box(axes, 4.6, low + 0.1, 2.6, high - low - 0.2, _PALE, edgecolor=colour, linewidth=2)
        text = f"expert {expert}\nsilu(gate) * up, down"
        axes.text(5.9, (low + high) / 2, text, ha="center", va="center", fontsize=9)
        for x in (3.85, 7.25):
            axes.annotate("", (x + 0.7, (low + high) / 2), (x, (low + high) / 2), arrowprops={"arrowstyle": "->"})
    heads = {0.6: "as they arrive", 3.2: "grouped, padded", 5.9: "one expert a group", 8.6: "times route weight"}
    for x, text in heads.items():
        axes.text(x, top + 0.35, text, ha="center", va="center", fontsize=9)
    axes.set_xlim(-0.1, 9.3)
    axes.set_ylim(-0.1, top + 0.7)
    return figure


def index_spaces(layout: GroupedLayout) -> Figure:
    """Every row twice: with its raw number, without gaps, and with its padded number, and a line between the two.

    Args:
        layout: a small one, some tens of rows.
    """
    rows = layout.num_padded_rows
    figure, (axes,) = _figure(9, 2.5)
    valid = dict(zip(layout.raw_to_padded, range(layout.num_rows), strict=True))
    unit = _PAGE / (1.22 * rows + 0.1)
    size = next((size for size in (11, 10, 9, 8) if _fits(str(rows), size, 0.95 * unit)), 7)
    every = 1 + int(text_size(str(rows), size)[0] / unit)  # of very many rows some keep their number
    for row in range(rows):
        expert = layout.block_map[row // layout.block]
        colour = _EXPERT_COLOURS[expert % len(_EXPERT_COLOURS)]
        ink = "white" if colour == BLUE else "black"
        if row in valid:
            raw = valid[row]
            for x, y, number in ((raw, 1.6, raw), (row, 0.0, row)):
                _box(axes, x + 0.04, y, 0.92, 0.6, colour)
                if number % every == 0:
                    axes.text(x + 0.5, y + 0.3, str(number), ha="center", va="center", fontsize=size, color=ink)
            axes.plot((raw + 0.5, row + 0.5), (1.55, 0.65), color=_on_white(colour), linewidth=1.5)
        else:
            _box(axes, row + 0.04, 0.0, 0.92, 0.6, "white", hatch="////", edgecolor="#BBBBBB")
            if row % every == 0:
                axes.text(row + 0.5, 0.3, str(row), ha="center", va="center", fontsize=size)
    middles = {
        expert: layout.padded_offsets[expert] + number / 2 for expert, number in enumerate(layout.sizes) if number
    }
    # Numbers alone if the names of neighbours would touch.
    apart = min((unit * (after - before) for before, after in itertools.pairwise(middles.values())), default=_PAGE)
    name = "expert {}" if _fits(f"expert {layout.num_experts} ", 9, apart) else "{}"
    for expert, middle in middles.items():
        axes.text(middle, -0.25, name.format(expert), ha="center", va="center", fontsize=9)
    if name == "{}":
        axes.text(-0.2, -0.25, "expert:", ha="right", va="center", fontsize=9)
    for y, text in ((1.9, "raw rows:\nroute weights"), (0.3, "padded rows:\ntokens, out")):
        axes.text(-0.2, y, text, ha="right", va="center", fontsize=9)
    for block in range(rows // layout.block + 1):
        axes.plot((block * layout.block,) * 2, (-0.1, 0.7), color="black", linewidth=1.2)
    axes.set_xlim(-0.22 * rows, rows + 0.1)
    axes.set_ylim(-0.4, 2.3)
    return figure


def tile_walk(rows: int, columns: int, depth: int, block_k: int, step: int) -> Figure:
    """One step of the K loop of ``c = a @ b.T``: two tiles are read, and all of c is updated.

    Args:
        rows: M, rows of a and of c.
        columns: N, rows of b and columns of c.
        depth: K, columns of a and b.
        block_k: columns of one tile; divides ``depth``.
        step: which tile, in [0, depth / block_k).

    Raises:
        ContractError: for a step that does not exist.
    """
    steps = depth // block_k
    if not 0 <= step < steps:
        raise ContractError(f"got step {step}, expected 0 to {steps - 1}")
    figure, (axes,) = _figure(8, 3.4)
    part = max(depth, rows, columns) / 8
    gap = max(0.35 * rows, 0.4 * part)
    top, unit = columns + gap + rows, 0.0
    for _ in range(3):  # the scale leaves room for texts, whose size does not depend on it
        before, between = (max(1.4 * part, points / unit) if unit else 1.4 * part for points in (56, 58))
        left = depth + between
        unit = min(8 * 72 / (before + left + columns + 0.2 * part), 3.4 * 72 / top)
    wide = block_k * unit
    turned = not _fits(f"k = {steps - 1}", 8, wide)
    # Of tiles thinner than a line of text the chosen one alone is named.
    named = range(steps) if wide > text_size("k", 8)[1] or not turned else [step]
    for name, y, height, colour in (("a", columns + gap, rows, BLUE), ("b", 0.0, columns, ORANGE)):
        for number in range(steps):
            chosen = number == step
            _box(axes, number * block_k, y, block_k, height, colour if chosen else _PALE)
            if number not in named:
                continue
            axes.text(
                (number + 0.5) * block_k, y + height / 2, f"k = {number}", ha="center", va="center", fontsize=8,
                color="white" if chosen and colour == BLUE and len(named) > 1 else "black",
                rotation=90 if turned else 0,
                bbox=None if len(named) > 1 else {"facecolor": "white", "edgecolor": "none", "pad": 1},
            )  # fmt: skip
        axes.text(-5 / unit, y + height / 2, f"{name}\n{height} rows", ha="right", va="center", fontsize=9)
    axes.text(
        depth / 2,
        columns + gap / 2,
        f"K = {depth}, in {steps} steps of {block_k}",
        ha="center",
        va="center",
        fontsize=9,
    )
    bottom = (gap + rows) / 2
    _box(axes, left, bottom, columns, rows, GREEN)
    inside = _fits(f"c   {rows} x {columns}\nfp32 sums", 9, columns * unit, rows * unit)
    axes.text(
        left + columns / 2, bottom + rows / 2 if inside else bottom - 4 / unit,
        f"c   {rows} x {columns}\nfp32 sums", ha="center", va="center" if inside else "top", fontsize=9,
    )  # fmt: skip
    axes.annotate(
        "+=", (left - 6 / unit, bottom + rows / 2), (depth + 10 / unit, bottom + rows / 2),
        arrowprops={"arrowstyle": "->"}, va="center", fontsize=11,
    )  # fmt: skip
    axes.set_xlim(-before, left + columns + 0.2 * part)
    axes.set_ylim(-0.05 * rows, top + rows * 0.05)
    axes.set_aspect("equal")
    return figure


def waves_of_gemm(rows: int, columns: int, block_k: int, wave_rows: int, wave_columns: int) -> Figure:
    """Which wave computes which part of c, and which part of the tile of a it therefore needs.

    Args:
        rows, columns: size of the tile of c.
        block_k: columns of the tile of a.
        wave_rows, wave_columns: how the waves of the block are arranged over c.
    """
    figure, axes = _figure(8, 3.2, 2)
    height, width = rows / wave_rows, columns / wave_columns
    # A panel is half of 8 inches wide and, below its title, some 2.8 inches high.
    unit = min(3.7 * 72 / columns, 2.8 * 72 / rows)
    name = "wave {}" if _fits(f"wave {wave_rows * wave_columns - 1}", 9, width * unit) else "{}"
    number = 0
    for across in range(wave_columns):
        for down in range(wave_rows):
            y = rows - (down + 1) * height
            colour = _EXPERT_COLOURS[down % len(_EXPERT_COLOURS)]
            _box(axes[1], across * width, y, width, height, colour, alpha=0.75)
            axes[1].text(
                (across + 0.5) * width, y + height / 2, name.format(number), ha="center", va="center", fontsize=9
            )
            number += 1
    unit = min(3.7 * 72 / block_k, 2.8 * 72 / rows)
    for down in range(wave_rows):
        y = rows - (down + 1) * height
        holders = ", ".join(str(across * wave_rows + down) for across in range(wave_columns))
        text = f"in the registers\nof wave{'s' if wave_columns > 1 else ''} {holders}"
        inside = _fits(text, 9, block_k * unit, height * unit)
        _box(axes[0], 0, y, block_k, height, _EXPERT_COLOURS[down % len(_EXPERT_COLOURS)], alpha=0.75)
        axes[0].text(
            block_k / 2 if inside else block_k + 4 / unit, y + height / 2,
            text if inside else textwrap.fill(text.replace("\n", " "), 34), ha="center" if inside else "left",
            va="center", fontsize=9,
        )  # fmt: skip
    axes[0].set_title(f"tile of a, {rows} x {block_k}", fontsize=9)
    axes[1].set_title(f"tile of c, {rows} x {columns}{', by wave' if name == '{}' else ''}", fontsize=9)
    for each, right in zip(axes, (block_k, columns), strict=True):
        each.set_xlim(-0.02 * right, right * 1.02)
        each.set_ylim(-0.02 * rows, rows * 1.02)
        each.set_aspect("equal")
    return figure


def blocks(layout: GroupedLayout, columns: int, block_n: int, chosen: tuple[int, int] | None = None) -> Figure:
    """The grid of one launch over (padded rows, columns): one rectangle a block, coloured by expert, padding hatched.

    Args:
        layout: the rows.
        columns: I for stage 1, H for stage 2.
        block_n: columns of one block.
        chosen: (bx, by) of a block to mark.
    """
    rows_of_blocks, across = len(layout.block_map), -(-columns // block_n)
    names = [f"bx {bx}, expert {expert}" for bx, expert in enumerate(layout.block_map)]
    before, after = (max(text_size(text, 9)[0] for text in texts) + 10 for texts in ([*names, "by"], ["128 rows"]))
    unit = min(0.55 * 72, (_PAGE - before - after) / across)
    high = min(0.62, max(0.22, 9 / max(1, rows_of_blocks)))
    figure, (axes,) = _figure((before + across * unit + after) / 72, 1.1 + high * rows_of_blocks)
    # Blocks stand apart, also those of one expert: a full block and the rows of the next must not look like one.
    left, low = (min(_GAP, 0.15 * side) / 2 / side for side in (unit, 72 * high))
    wide, tall = 1 - 2 * left, 1 - 2 * low
    for bx, expert in enumerate(layout.block_map):
        valid = layout.actual_rows(bx) / layout.block
        y = rows_of_blocks - bx - 1
        for by in range(across):
            colour = _EXPERT_COLOURS[expert % len(_EXPERT_COLOURS)]
            _box(axes, by + left, y + low, wide, tall, "white", hatch="////", edgecolor="#BBBBBB", linewidth=0)
            _box(axes, by + left, y + low + (1 - valid) * tall, wide, valid * tall, colour, linewidth=0)
            _box(axes, by + left, y + low, wide, tall, "none", edgecolor="black")
        axes.text(-6 / unit, y + 0.5, names[bx], ha="right", va="center", fontsize=9)
        axes.text(across + 6 / unit, y + 0.5, f"{layout.actual_rows(bx)} rows", ha="left", va="center", fontsize=9)
    level = rows_of_blocks + 0.12 / high
    every = 1 + int(text_size(f" {across - 1}", 8)[0] / unit)  # of very many columns some keep their number
    for by in range(0, across, every):
        axes.text(by + 0.5, level, f"{by}", ha="center", va="center", fontsize=8)
    axes.text(-6 / unit, level, "by", ha="right", va="center", fontsize=8)
    notes = ["filled: valid", "hatched: padding"]
    if chosen is not None:
        bx, by = chosen
        _box(axes, by + left, rows_of_blocks - bx - 1 + low, wide, tall, "none", edgecolor="black", linewidth=2.5)
        notes.append(f"thick frame: bx {bx}, by {by}")
    for line, note in enumerate(notes):
        axes.text(across / 2, -(0.1 + 0.14 * line) / high, note, ha="center", va="center", fontsize=8)
    axes.set_xlim(-before / unit, across + after / unit)
    axes.set_ylim(-(0.04 + 0.14 * len(notes)) / high, rows_of_blocks + 0.3 / high)
    return figure


def two_stages(hidden: int, intermediate: int, block_n: int, chosen: tuple[int, int] = (2, 1)) -> Figure:
    """The 128 rows of one block on their way: tokens, hidden activation, result; what one block of each stage reads.

    Args:
        hidden: H; columns of the tokens and of the result.
        intermediate: I; columns of the hidden activation.
        block_n: columns that a block of either stage computes.
        chosen: number of the block of stage 1 and of stage 2 to mark.
    """
    figure, (axes,) = _figure(8, 3.6)
    width = max(hidden, intermediate)
    strips = (
        ("tokens", hidden, hidden, None, "P x H"),
        ("hidden activation\n(workspace)", intermediate, block_n, chosen[0], "P x I"),
        ("out", hidden, block_n, chosen[1], "P x H"),
    )
    tops = [2.4, 1.2, 0.0]
    # Frames of thin blocks must not hide what is in them.
    frame = 8 * 72 / (2.07 * width) * block_n / 8
    for (name, columns, piece, mark, shape), y in zip(strips, tops, strict=True):
        for number in range(columns // piece):
            if number != mark:
                _box(axes, number * piece, y, piece, 0.5, SKY, linewidth=min(0.8, frame))
        if mark is not None:
            _box(axes, mark * piece, y, piece, 0.5, GREEN, edgecolor="black", linewidth=min(2, 2 * frame))
        axes.text(-0.02 * width, y + 0.25, name, ha="right", va="center", fontsize=9)
        axes.text(columns + 0.02 * width, y + 0.25, f"128 rows of {shape}", ha="left", va="center", fontsize=9)
    for (source, target), stage in zip(((0, 1), (1, 2)), (1, 2), strict=True):
        left, right = 0, strips[source][1]
        number = chosen[stage - 1]
        for x in (left, right):
            axes.plot(
                [x, (number + (0 if x == left else 1)) * block_n], [tops[source], tops[target] + 0.5], color=_LINE,
                linestyle="--", linewidth=1,
            )  # fmt: skip
        axes.text(
            1.02 * width, tops[source] - 0.35,
            f"stage {stage}: one block reads the whole row, writes {block_n} columns", ha="left", va="center",
            fontsize=9,
        )  # fmt: skip
    axes.set_xlim(-0.32 * width, 1.75 * width)
    axes.set_ylim(-0.1, 3.0)
    return figure


def heat_maps(
    maps: Mapping[str, Sequence[Sequence[float]]],
    fits: Sequence[Sequence[bool]],
    row_labels: tuple[str, Sequence[object]],
    column_labels: tuple[str, Sequence[object]],
) -> Figure:
    """Tables of numbers as shades side by side; what does not fit is hatched, and every cell shows its number.

    Args:
        maps: a table of positive numbers by title; all have the same shape.
        fits: whether the configuration of each cell fits.
        row_labels, column_labels: name of the axis and its values.
    """
    from matplotlib.figure import Figure

    width = min(4.4 * len(maps), 9.0)
    figure = Figure(figsize=(width, 3.6), layout="constrained")
    # A panel's ticks and the name of its axis take some 50 points.
    cell = 0.9 * (72 * width / len(maps) - 50) / len(column_labels[1])
    texts = [short_number(value) for table in maps.values() for row in table for value in row]
    size = next((size for size in (10, 9, 8) if all(_fits(text, size, cell) for text in texts)), 7)
    for axes, (title, table) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps.items(), strict=True):
        top = max(max(row) for row in table)
        axes.imshow(table, cmap="cividis_r", vmin=0, vmax=top, aspect="auto")
        for y, row in enumerate(table):
            for x, value in enumerate(row):
                if not fits[y][x]:
                    _box(axes, x - 0.5, y - 0.5, 1, 1, "none", hatch="///", edgecolor=RED, linewidth=0)
                axes.text(
                    x, y, short_number(value), ha="center", va="center", fontsize=size,
                    color="white" if value > 0.55 * top else "black",
                    bbox=None if fits[y][x] else {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9},
                )  # fmt: skip
                if not fits[y][x]:
                    axes.texts[-1].set_color("black")
        axes.set_title(title, fontsize=10)
        axes.set(ylabel=row_labels[0], xlabel=column_labels[0])
        axes.set_yticks(range(len(row_labels[1])), [str(label) for label in row_labels[1]])
        axes.set_xticks(range(len(column_labels[1])), [str(label) for label in column_labels[1]])
    return figure


def memories(places: Mapping[str, tuple[Mapping[str, int], float | None]]) -> Figure:
    """Buffers in the memories they live in, all to one scale.

    Args:
        places: for each memory its buffers (name: bytes) and how many bytes there are; None for a memory too large to
            draw, which ends in an arrow.
    """
    figure, (axes,) = _figure(9, 0.3 + 0.95 * len(places))
    sums = [sum(buffers.values()) for buffers, _ in places.values()]
    limits = [limit for _, limit in places.values() if limit is not None]
    width = max(*sums, *limits) / 1024
    names = [name + ("" if limit is None else f", {_size(limit)}") for name, (_, limit) in places.items()]
    before = max(text_size(name, 9)[0] for name in names) + 10
    unit = (_PAGE - before) / (1.09 * width)
    for row, (name, (buffers, limit)) in enumerate(zip(names, places.values(), strict=True)):
        y, left = len(places) - row - 1, 0.0
        end = width * 1.04 if limit is None else limit / 1024
        _box(axes, 0, y + 0.3, end, 0.6, _PALE, linewidth=0 if limit is None else 1.2)
        if limit is None:
            axes.annotate("", (end * 1.03, y + 0.6), (end * 0.985, y + 0.6), arrowprops={"arrowstyle": "->"})
        below = []
        for number, (buffer, size) in enumerate(buffers.items()):
            _box(axes, left, y + 0.3, size / 1024, 0.6, (SKY, "#F5D08A", "#8FD3B6")[number % 3])
            both = f"{buffer}\n{_size(size)}"
            wide, high = size / 1024 * unit - 2, 0.6 * 0.95 * 72 - 2
            shown = [
                (text, turn) for text, turn in ((both, 0), (both, 90), (buffer, 0), (buffer, 90))
                if (_fits(text, 8, high, wide) if turn else _fits(text, 8, wide, high))
            ]  # fmt: skip
            for text, turn in shown[:1]:
                middle = left + size / 2048
                axes.text(middle, y + 0.6, text, ha="center", va="center", fontsize=8, rotation=turn)
            if not shown or shown[0][0] != both:
                below.append(f"{buffer}: {_size(size)}")
            left += size / 1024
        if below:
            note = textwrap.fill(", ".join(below), 100)
            axes.text(0, y + 0.26, note, ha="left", va="top", fontsize=8, linespacing=1.0)
        axes.text(-6 / unit, y + 0.6, name, ha="right", va="center", fontsize=9)
    axes.set_xlim(-before / unit, width * 1.09)
    axes.set_ylim(0, len(places))
    return figure


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:g} MiB" if size_bytes >= 2**20 else f"{size_bytes / 1024:g} KiB"
