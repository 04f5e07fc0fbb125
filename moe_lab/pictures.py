"""Drawings that explain: what a tile is, who holds it, which block computes what.

Plots of numbers are in :mod:`moe_lab.plots`. Everything here is drawn from sizes and layouts that are passed in, so a
drawing cannot disagree with what a notebook computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moe_lab.errors import ContractError
from moe_lab.layout import GroupedLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by colour-blind readers, and in grey by lightness and by the labels.
BLUE, ORANGE, GREEN, RED, SKY, YELLOW, PURPLE = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#F0E442", "#CC79A7",
)  # fmt: skip
_EXPERT_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW)
_PALE, _LINE = "#F2F2F2", "#555555"


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for each in axes:
        each.set_axis_off()
    return figure, list(axes)


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
        axes.annotate("", (2.55, end), (1.25, start), arrowprops={"arrowstyle": "->", "color": colour})
    for expert, blocks_of in enumerate(layout.num_blocks_of):
        if not blocks_of:
            continue
        high, low = (top - layout.padded_offsets[expert + step] for step in (0, 1))
        _box(axes, 4.6, low + 0.1, 2.6, high - low - 0.2, _PALE, edgecolor=_EXPERT_COLOURS[expert % 7], linewidth=2)
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
    for row in range(rows):
        expert = layout.block_map[row // layout.block]
        colour = _EXPERT_COLOURS[expert % len(_EXPERT_COLOURS)]
        ink = "white" if colour == BLUE else "black"
        if row in valid:
            raw = valid[row]
            for x, y, number in ((raw, 1.6, raw), (row, 0.0, row)):
                _box(axes, x + 0.04, y, 0.92, 0.6, colour)
                axes.text(x + 0.5, y + 0.3, str(number), ha="center", va="center", fontsize=11, color=ink)
            axes.plot((raw + 0.5, row + 0.5), (1.55, 0.65), color=colour, linewidth=1.5)
        else:
            _box(axes, row + 0.04, 0.0, 0.92, 0.6, "white", hatch="////", edgecolor="#BBBBBB")
            axes.text(row + 0.5, 0.3, str(row), ha="center", va="center", fontsize=11)
    for expert, size in enumerate(layout.sizes):
        if size:
            middle = layout.padded_offsets[expert] + size / 2
            axes.text(middle, -0.25, f"expert {expert}", ha="center", va="center", fontsize=9)
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
    gap = 0.35 * rows
    for name, top, height, colour in (("a", columns + gap, rows, BLUE), ("b", 0.0, columns, ORANGE)):
        for number in range(steps):
            chosen = number == step
            _box(axes, number * block_k, top, block_k, height, colour if chosen else _PALE)
            axes.text(
                (number + 0.5) * block_k, top + height / 2, f"k = {number}", ha="center", va="center", fontsize=8,
                color="white" if chosen and colour == BLUE else "black",
            )  # fmt: skip
        axes.text(-0.1 * block_k, top + height / 2, f"{name}\n{height} rows", ha="right", va="center", fontsize=9)
    axes.text(
        depth / 2,
        columns + gap / 2,
        f"K = {depth}, in {steps} steps of {block_k}",
        ha="center",
        va="center",
        fontsize=9,
    )
    left, bottom = depth + 1.4 * block_k, (gap + rows) / 2
    _box(axes, left, bottom, columns, rows, GREEN)
    axes.text(
        left + columns / 2, bottom + rows / 2, f"c   {rows} x {columns}\nfp32 sums", ha="center", va="center",
        fontsize=9, color="white",
    )  # fmt: skip
    axes.annotate(
        "+=", (left - 0.15 * block_k, bottom + rows / 2), (depth + 0.25 * block_k, bottom + rows / 2),
        arrowprops={"arrowstyle": "->"}, va="center", fontsize=11,
    )  # fmt: skip
    axes.set_xlim(-1.4 * block_k, left + columns + 0.2 * block_k)
    axes.set_ylim(-0.05 * rows, columns + gap + rows * 1.05)
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
    number = 0
    for across in range(wave_columns):
        for down in range(wave_rows):
            y = rows - (down + 1) * height
            colour = _EXPERT_COLOURS[down % len(_EXPERT_COLOURS)]
            _box(axes[1], across * width, y, width, height, colour, alpha=0.75)
            axes[1].text((across + 0.5) * width, y + height / 2, f"wave {number}", ha="center", va="center", fontsize=9)
            number += 1
    for down in range(wave_rows):
        y = rows - (down + 1) * height
        holders = ", ".join(str(across * wave_rows + down) for across in range(wave_columns))
        _box(axes[0], 0, y, block_k, height, _EXPERT_COLOURS[down % len(_EXPERT_COLOURS)], alpha=0.75)
        axes[0].text(
            block_k / 2, y + height / 2, f"in the registers\nof waves {holders}", ha="center", va="center", fontsize=9
        )
    axes[0].set_title(f"tile of a, {rows} x {block_k}", fontsize=9)
    axes[1].set_title(f"tile of c, {rows} x {columns}", fontsize=9)
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
    figure, (axes,) = _figure(min(9.0, 2.6 + 0.55 * across), 0.8 + 0.62 * rows_of_blocks)
    for bx, expert in enumerate(layout.block_map):
        valid = layout.actual_rows(bx) / layout.block
        y = rows_of_blocks - bx - 1
        for by in range(across):
            colour = _EXPERT_COLOURS[expert % len(_EXPERT_COLOURS)]
            _box(axes, by, y, 1, 1, "white", hatch="////", edgecolor="#BBBBBB", linewidth=0)
            _box(axes, by, y + 1 - valid, 1, valid, colour, linewidth=0)
            _box(axes, by, y, 1, 1, "none")
        axes.text(-0.15, y + 0.5, f"bx {bx}, expert {expert}", ha="right", va="center", fontsize=9)
        axes.text(across + 0.15, y + 0.5, f"{layout.actual_rows(bx)} rows", ha="left", va="center", fontsize=9)
    for by in range(across):
        axes.text(by + 0.5, rows_of_blocks + 0.2, f"{by}", ha="center", va="center", fontsize=8)
    axes.text(-0.15, rows_of_blocks + 0.2, "by", ha="right", va="center", fontsize=8)
    if chosen is not None:
        bx, by = chosen
        _box(axes, by, rows_of_blocks - bx - 1, 1, 1, "none", edgecolor="black", linewidth=2.5)
    axes.set_xlim(-2.6, across + 1.6)
    axes.set_ylim(-0.1, rows_of_blocks + 0.5)
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
    for (name, columns, piece, mark, shape), y in zip(strips, tops, strict=True):
        for number in range(columns // piece):
            _box(axes, number * piece, y, piece, 0.5, GREEN if number == mark else SKY)
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

    figure = Figure(figsize=(4.4 * len(maps), 3.6), layout="constrained")
    for axes, (title, table) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps.items(), strict=True):
        top = max(max(row) for row in table)
        axes.imshow(table, cmap="cividis_r", vmin=0, vmax=top, aspect="auto")
        for y, row in enumerate(table):
            for x, value in enumerate(row):
                if not fits[y][x]:
                    _box(axes, x - 0.5, y - 0.5, 1, 1, "none", hatch="///", edgecolor=RED, linewidth=0)
                axes.text(
                    x, y, f"{value:.3g}", ha="center", va="center", fontsize=10,
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
    figure, (axes,) = _figure(9, 0.5 + 0.85 * len(places))
    sums = [sum(buffers.values()) for buffers, _ in places.values()]
    limits = [limit for _, limit in places.values() if limit is not None]
    width = max(*sums, *limits) / 1024
    for row, (name, (buffers, limit)) in enumerate(places.items()):
        y, left = len(places) - row - 1, 0.0
        end = width * 1.04 if limit is None else limit / 1024
        _box(axes, 0, y + 0.2, end, 0.6, _PALE, linewidth=0 if limit is None else 1.2)
        if limit is None:
            axes.annotate("", (end * 1.03, y + 0.5), (end * 0.985, y + 0.5), arrowprops={"arrowstyle": "->"})
        for number, (buffer, size) in enumerate(buffers.items()):
            _box(axes, left, y + 0.2, size / 1024, 0.6, (SKY, "#F5D08A", "#8FD3B6")[number % 3])
            label = f"{buffer}\n{size / 1024:g} KiB"
            wide = size / 1024 > 0.075 * width
            axes.text(
                left + size / 2048, y + 0.5, label if wide else buffer, ha="center", va="center", fontsize=8,
                rotation=0 if wide else 90,
            )  # fmt: skip
            left += size / 1024
        free = "" if limit is None else f", {limit / 1024:g} KiB"
        axes.text(-0.01 * width, y + 0.5, f"{name}{free}", ha="right", va="center", fontsize=9)
    axes.set_xlim(-0.27 * width, width * 1.09)
    axes.set_ylim(0, len(places))
    return figure
