"""Drawings that explain: what a tile is, who holds it, which block computes what. Plots of numbers are in ``plots``.

All is drawn from sizes and layouts that are passed in. Text that does not fit its box is turned, shortened or moved."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moe_lab.lesson.display import BLUE, GREEN, ORANGE, PALE, PURPLE, RED, SKY, canvas, short_number, text_size
from moe_lab.problem.errors import ContractError
from moe_lab.problem.layout import GroupedLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EXPERT_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, "#A89A00")
_LINE = "#555555"
_PAGE = 648  #: points, 9 inches: the widest picture that a notebook page shows without shrinking it


def _blank(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure, axes = canvas(width, height, columns)
    for each in axes:
        each.set_axis_off()
    return figure, axes


def _fits(text: str, size: float, width: float, height: float = float("inf")) -> bool:
    wide, high = text_size(text, size)
    return wide <= width and high <= height


def _colour(expert: int) -> str:
    return _EXPERT_COLOURS[expert % len(_EXPERT_COLOURS)]


def _text(axes: Axes, x: float, y: float, text: str, size: float = 9, **style: Any) -> None:
    axes.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": size, **style})


def _beside(axes: Axes, x: float, y: float, text: str, size: float = 9, *, left: bool = False) -> None:
    """Text some points right of a place, or left of it."""
    side, away = ("right", -6) if left else ("left", 6)
    axes.annotate(text, (x, y), (away, 0), textcoords="offset points", ha=side, va="center", fontsize=size)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "", **style: Any) -> None:
    axes.annotate(text, end, start, arrowprops={"arrowstyle": "->", **style}, va="center")


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, colour: str, text: str = "", size: float = 8,
    turn: float = 0, **style: Any,
) -> None:  # fmt: skip
    """A rectangle with its lower left corner at a place, and a text in its middle, turned by some degrees."""
    from matplotlib.patches import Rectangle

    settings = {"facecolor": colour, "edgecolor": _LINE, "linewidth": 0.8, **style}
    axes.add_patch(Rectangle((x, y), width, height, **settings))
    if text:
        ink = "white" if colour == BLUE else "black"
        _text(axes, x + width / 2, y + height / 2, text, size, color=ink, rotation=turn)


def problem(choices: Sequence[int], layout: GroupedLayout) -> Figure:
    """The whole problem: tokens (``choices`` has the expert of each) are grouped and padded, and meet their expert."""
    top = layout.num_padded_rows
    figure, (axes,) = _blank(9, 0.9 + 0.42 * top)
    arrival = sorted(range(len(choices)), key=lambda token: choices[token])  # stable: order of arrival in a group
    lift = (top - len(choices)) / 2
    for row in set(range(top)) - set(layout.raw_to_padded):
        for x, content in ((2.6, "anything"), (8.0, "must be 0")):
            _box(axes, x, top - row - 0.9, 1.2, 0.8, "white", content, hatch="////", edgecolor="#DDDDDD")
    for token, row in sorted(zip(arrival, layout.raw_to_padded, strict=True)):
        start, end, colour = top - lift - token - 0.5, top - row - 0.5, _colour(choices[token])
        for x, y, what in ((0, start, "token"), (2.6, end, "token"), (8.0, end, "result")):
            _box(axes, x, y - 0.4, 1.2, 0.8, colour, f"{what} {token}")
        _arrow(axes, (1.25, start), (2.55, end), color=colour)
    for expert in set(layout.block_map):
        high, low = (top - layout.padded_offsets[expert + step] for step in (0, 1))
        text, colour = f"expert {expert}\nsilu(gate) * up, down", _colour(expert)
        _box(axes, 4.6, low + 0.1, 2.6, high - low - 0.2, PALE, text, 9, edgecolor=colour, linewidth=2)
        for x in (3.85, 7.25):
            _arrow(axes, (x, (low + high) / 2), (x + 0.7, (low + high) / 2))
    heads = {0.6: "as they arrive", 3.2: "grouped, padded", 5.9: "one expert per group", 8.6: "times route weight"}
    for x, text in heads.items():
        _text(axes, x, top + 0.35, text)
    axes.set(xlim=(-0.1, 9.3), ylim=(-0.1, top + 0.7))
    return figure


def index_spaces(layout: GroupedLayout) -> Figure:
    """Every row of a small layout twice, with its raw and its padded number, and a line between the two."""
    rows = layout.num_padded_rows
    figure, (axes,) = _blank(9, 2.5)
    valid = dict(zip(layout.raw_to_padded, range(layout.num_rows), strict=True))
    unit = 0.85 * _PAGE / rows
    size = next((size for size in (11, 10, 9, 8) if _fits(str(rows), size, 0.95 * unit)), 7)
    every = 1 + int(text_size(str(rows), size)[0] / unit)  # of very many rows some keep their number
    names = ["" if number % every else str(number) for number in range(rows)]
    for row in range(rows):
        if row not in valid:
            _box(axes, row + 0.04, 0, 0.92, 0.6, "white", names[row], size, hatch="////", edgecolor="#BBBBBB")
            continue
        raw, colour = valid[row], _colour(layout.block_map[row // layout.block])
        _box(axes, raw + 0.04, 1.6, 0.92, 0.6, colour, names[raw], size)
        _box(axes, row + 0.04, 0.0, 0.92, 0.6, colour, names[row], size)
        axes.plot((raw + 0.5, row + 0.5), (1.55, 0.65), color=colour, linewidth=1.5)
    for expert, valid_rows in enumerate(layout.sizes):
        _text(axes, layout.padded_offsets[expert] + valid_rows / 2, -0.25, str(expert) if valid_rows else "")
    for y, text in {1.9: "raw rows:\nroute weights", 0.3: "padded rows:\ntokens, out", -0.25: "expert:"}.items():
        _beside(axes, 0, y, text, left=True)
    for start in range(0, rows + 1, layout.block):
        axes.plot((start, start), (-0.1, 0.7), color="black", linewidth=1.2)
    axes.set(xlim=(-0.1, rows + 0.1), ylim=(-0.4, 2.3))
    return figure


def tile_walk(rows: int, columns: int, depth: int, block_k: int, step: int) -> Figure:
    """One step of the K loop of ``c = a @ b.T``: two tiles are read, and all of c is updated.

    ``rows``, ``columns`` and ``depth`` are M, N and K; ContractError for a step not in [0, depth / block_k).
    """
    steps = depth // block_k
    if not 0 <= step < steps:
        raise ContractError(f"got step {step}, expected 0 to {steps - 1}")
    figure, (axes,) = _blank(8, 3.4)
    gap = max(0.35 * rows, 0.05 * max(depth, rows, columns))
    top = columns + gap + rows
    left, bottom = depth + max(0.16 * (depth + columns), 0.26 * top), (gap + rows) / 2  # room for an arrow
    unit = min(500 / (left + columns), 240 / top)  # points a column: 8 inches less the names at the left, or 3.4 inches
    named = _fits(f"k = {steps - 1}", 8, block_k * unit)
    for name, y, height, colour in (("a", columns + gap, rows, BLUE), ("b", 0.0, columns, ORANGE)):
        for number in range(steps):
            fill = colour if number == step else PALE
            _box(axes, number * block_k, y, block_k, height, fill, f"k = {number}" if named else "")
        _beside(axes, 0, y + height / 2, f"{name}\n{height} rows", left=True)
    filled = "" if named else f", filled: k = {step}"
    _text(axes, depth / 2, columns + gap / 2, f"K = {depth}, in {steps} steps of {block_k}{filled}")
    _box(axes, left, bottom, columns, rows, GREEN)
    _text(axes, left + columns / 2, bottom - 4 / unit, f"c   {rows} x {columns}\nfp32 sums", va="top")
    _arrow(axes, (depth + 10 / unit, bottom + rows / 2), (left - 6 / unit, bottom + rows / 2), "+=")
    axes.set(xlim=(0, left + columns), ylim=(-0.05 * rows, top + rows * 0.05), aspect="equal")
    return figure


def waves_of_gemm(rows: int, columns: int, block_k: int, wave_rows: int, wave_columns: int) -> Figure:
    """Which wave computes which part of c (rows, columns), and which part of a's tile (rows, block_k) it needs."""
    figure, (tile, result) = _blank(8, 3.2, 2)
    height, width = rows / wave_rows, columns / wave_columns
    for down in range(wave_rows):
        y, waves = rows - (down + 1) * height, range(down, wave_rows * wave_columns, wave_rows)
        for across, number in enumerate(waves):
            _box(result, across * width, y, width, height, _colour(down), str(number), 9)
        _box(tile, 0, y, block_k, height, _colour(down))
        text = f"in the registers\nof wave{'s' * (wave_columns > 1)} {', '.join(map(str, waves))}"
        _beside(tile, block_k, y + height / 2, text)
    tile.set_title(f"tile of a, {rows} x {block_k}", fontsize=9)
    result.set_title(f"tile of c, {rows} x {columns}, by wave", fontsize=9)
    for each, right in ((tile, block_k), (result, columns)):
        each.set(xlim=(-0.02 * right, right * 1.02), ylim=(-0.02 * rows, rows * 1.02), aspect="equal")
    return figure


def blocks(layout: GroupedLayout, columns: int, block_n: int, chosen: tuple[int, int]) -> Figure:
    """The grid of one launch over (padded rows, columns): one rectangle per block, coloured by expert, padding hatched.

    ``columns`` is I for stage 1 and H for stage 2; ``chosen`` is (bx, by) of the block to mark.
    """
    count, across = len(layout.block_map), -(-columns // block_n)
    unit = min(0.55 * 72, (_PAGE - 160) / across)  # points; 160 are for the words on either side
    high = min(0.62, max(0.22, 9 / max(1, count)))
    figure, (axes,) = _blank((160 + across * unit) / 72, 1.1 + high * count)
    # Blocks stand apart, also those of one expert: a full block and the rows of the next must not look like one.
    left, low = (min(6, 0.15 * side) / 2 / side for side in (unit, 72 * high))
    wide, tall = 1 - 2 * left, 1 - 2 * low
    for bx, expert in enumerate(layout.block_map):
        y, valid = count - bx - 1, tall * layout.actual_rows(bx) / layout.block
        for by in range(across):
            frame = 2.5 if (bx, by) == chosen else 0.8
            _box(axes, by + left, y + low, wide, tall, "white", hatch="////", edgecolor="#BBBBBB", linewidth=0)
            _box(axes, by + left, y + low + tall - valid, wide, valid, _colour(expert), linewidth=0)
            _box(axes, by + left, y + low, wide, tall, "none", edgecolor="black", linewidth=frame)
        _beside(axes, 0, y + 0.5, f"bx {bx}, expert {expert}", left=True)
        _beside(axes, across, y + 0.5, f"{layout.actual_rows(bx)} rows")
    level = count + 0.12 / high
    for by in range(0, across, 1 + int(text_size(f" {across - 1}", 8)[0] / unit)):  # of very many some keep theirs
        _text(axes, by + 0.5, level, str(by), 8)
    _beside(axes, 0, level, "by", 8, left=True)
    notes = "filled: valid\nhatched: padding\nthick frame: bx {}, by {}".format(*chosen)
    _text(axes, across / 2, -0.06 / high, notes, 8, va="top")
    axes.set(xlim=(0, across), ylim=(-0.46 / high, count + 0.3 / high))
    return figure


def two_stages(hidden: int, intermediate: int, block_n: int) -> Figure:
    """The 128 rows of one block on their way: tokens, hidden activation, result; what a block of each stage reads."""
    figure, (axes,) = _blank(8.5, 3.6)
    width = max(hidden, intermediate)
    strips = (  # y, name, columns, columns of a piece, number of the piece to mark, shape
        (2.4, "tokens", hidden, hidden, -1, "P x H"),
        (1.2, "hidden activation\n(workspace)", intermediate, block_n, 2, "P x I"),
        (0.0, "out", hidden, block_n, 1, "P x H"),
    )
    frame = 250 / width * block_n / 8  # of thin blocks it must not hide what is in them
    for y, name, columns, piece, marked, shape in strips:
        for number in range(columns // piece):
            _box(axes, number * piece, y, piece, 0.5, SKY, linewidth=min(0.8, frame))
        if marked >= 0:
            _box(axes, marked * piece, y, piece, 0.5, GREEN, edgecolor="black", linewidth=min(2, 2 * frame))
        _beside(axes, 0, y + 0.25, name, left=True)
        _beside(axes, columns, y + 0.25, f"128 rows of {shape}")
    for stage, (source, target) in enumerate(itertools.pairwise(strips), start=1):
        for side, x in enumerate((0, source[2])):
            ends = [x, (target[4] + side) * block_n], [source[0], target[0] + 0.5]
            axes.plot(*ends, color=_LINE, linestyle="--", linewidth=1)
        text = f"stage {stage}: one block reads the\nwhole row, writes {block_n} columns"
        _beside(axes, width, source[0] - 0.35, text)
    axes.set(xlim=(0, width), ylim=(-0.1, 3.0))
    return figure


def heat_maps(
    maps: Mapping[str, Sequence[Sequence[float]]], fits: Sequence[Sequence[bool]],
    rows: tuple[str, Sequence[object]], columns: tuple[str, Sequence[object]],
) -> Figure:  # fmt: skip
    """Tables of positive numbers, by title, as shades side by side; every cell shows its number and, hatched, no fit.

    ``fits`` has the shape of each table; ``rows`` and ``columns`` are the name of an axis and its values.
    """
    width = min(4.4 * len(maps), 9.0)
    figure, panels = canvas(width, 3.6, len(maps))
    # A panel's ticks and the name of its axis take some 50 points.
    cell = 0.9 * (72 * width / len(maps) - 50) / len(columns[1])
    texts = [short_number(value) for table in maps.values() for row in table for value in row]
    size = next((size for size in (10, 9, 8) if all(_fits(text, size, cell) for text in texts)), 7)
    for axes, (title, table) in zip(panels, maps.items(), strict=True):
        top = max(map(max, table))
        axes.imshow(table, cmap="cividis_r", vmin=0, vmax=top, aspect="auto")
        for y, x in itertools.product(range(len(rows[1])), range(len(columns[1]))):
            style: dict[str, Any] = {"color": "white" if table[y][x] > 0.55 * top else "black"}
            if not fits[y][x]:
                _box(axes, x - 0.5, y - 0.5, 1, 1, "none", hatch="///", edgecolor=RED, linewidth=0)
                style = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9}}
            _text(axes, x, y, short_number(table[y][x]), size, **style)
        axes.set_title(title, fontsize=10)
        axes.set(ylabel=rows[0], yticks=range(len(rows[1])), yticklabels=rows[1])
        axes.set(xlabel=columns[0], xticks=range(len(columns[1])), xticklabels=columns[1])
    return figure


def memories(places: Mapping[str, tuple[Mapping[str, int], float | None]]) -> Figure:
    """Buffers in the memories they live in, all to one scale.

    ``places`` has for each memory the bytes of its buffers and of itself; None is too large and ends in an arrow.
    """
    figure, (axes,) = _blank(9, 0.3 + 0.95 * len(places))
    width = max(max(sum(buffers.values()), limit or 0) for buffers, limit in places.values()) / 1024
    names = [name if limit is None else f"{name}, {_size(limit)}" for name, (_, limit) in places.items()]
    unit = 0.97 * (_PAGE - max(text_size(name, 9)[0] for name in names) - 12) / (1.09 * width)
    for y, name, (buffers, limit) in zip(reversed(range(len(names))), names, places.values(), strict=True):
        left, below = 0.0, []
        end = width * 1.04 if limit is None else limit / 1024
        _box(axes, 0, y + 0.3, end, 0.6, PALE, linewidth=0 if limit is None else 1.2)
        if limit is None:
            _arrow(axes, (end * 0.985, y + 0.6), (end * 1.03, y + 0.6))
        for number, (buffer, size) in enumerate(buffers.items()):
            both, across = f"{buffer}\n{_size(size)}", size / 1024
            room = across * unit - 2, 0.6 * 0.95 * 72 - 2
            tried = itertools.product((both, buffer), ((0, room), (90, room[::-1])))
            text, turn = next(((text, turn) for text, (turn, free) in tried if _fits(text, 8, *free)), ("", 0))
            _box(axes, left, y + 0.3, across, 0.6, (SKY, "#F5D08A", "#8FD3B6")[number % 3], text, turn=turn)
            below += [] if text == both else [f"{buffer}: {_size(size)}"]
            left += across
        _text(axes, 0, y + 0.26, textwrap.fill(", ".join(below), 100), 8, ha="left", va="top", linespacing=1.0)
        _beside(axes, 0, y + 0.6, name, left=True)
    axes.set(xlim=(0, width * 1.09), ylim=(0, len(places)))
    return figure


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:g} MiB" if size_bytes >= 2**20 else f"{size_bytes / 1024:g} KiB"
