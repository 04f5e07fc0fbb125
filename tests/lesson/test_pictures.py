"""Drawings say what they are given: their labels are compared with the numbers behind them."""

from __future__ import annotations

import io
import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from moe_lab.lesson import pictures
from moe_lab.problem.errors import ContractError
from moe_lab.problem.layout import GroupedLayout


def _texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def _rectangles(axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def test_tile_walk_has_every_step_once_for_each_matrix() -> None:
    (axes,) = pictures.tile_walk(128, 64, 512, 128, step=3).axes
    assert [_texts(axes).count(f"k = {number}") for number in range(4)] == [2, 2, 2, 2]
    assert "c   128 x 64\nfp32 sums" in _texts(axes)
    chosen = [box.get_x() for box in _rectangles(axes) if box.get_width() == 128 and box.get_height() in (128, 64)]
    assert chosen.count(3 * 128.0) == 2


def test_step_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ContractError, match="got step 4, expected 0 to 3"):
        pictures.tile_walk(128, 128, 512, 128, step=4)


def test_waves_in_one_row_hold_the_same_rows() -> None:
    left, right = pictures.waves_of_gemm(128, 128, 64, wave_rows=2, wave_columns=4).axes
    assert _texts(left) == ["in the registers\nof waves 0, 2, 4, 6", "in the registers\nof waves 1, 3, 5, 7"]
    assert _texts(right) == ["0", "2", "4", "6", "1", "3", "5", "7"]


def test_blocks_show_valid_rows_of_each_block() -> None:
    layout = GroupedLayout((142, 0, 100))
    (axes,) = pictures.blocks(layout, 256, 128, chosen=(1, 1)).axes
    assert [text for text in _texts(axes) if text.endswith("rows")] == ["128 rows", "14 rows", "100 rows"]
    assert "bx 2, expert 2" in _texts(axes)
    # The coloured part of block 1 is as high as its share of valid rows.
    (whole,) = {round(box.get_height(), 6) for box in _rectangles(axes) if box.get_hatch()}
    assert any(box.get_height() == pytest.approx(14 / 128 * whole) for box in _rectangles(axes))


@pytest.mark.parametrize("columns", [384, 8192])
def test_blocks_of_one_expert_stand_apart(columns: int) -> None:
    (axes,) = pictures.blocks(GroupedLayout((142, 256)), columns, 128, chosen=(1, 1)).axes
    frames = [box.get_bbox() for box in _rectangles(axes) if box.get_hatch()]
    assert len(frames) == 4 * columns // 128
    assert not any(one.overlaps(other) for one, other in itertools.combinations(frames, 2))
    above, below = (next(box for box in frames if box.x0 < 1 and row < box.y0 < row + 1) for row in (3, 2))
    assert above.y0 - below.y1 > 0.05


def test_two_stages_cut_both_results_into_blocks() -> None:
    (axes,) = pictures.two_stages(hidden=256, intermediate=512, block_n=128).axes
    assert len(_rectangles(axes)) == 1 + 512 // 128 + 256 // 128 + 2  # one in each stage is marked


def test_heat_maps_show_every_number_and_hatch_what_does_not_fit() -> None:
    figure = pictures.heat_maps(
        {"KiB": [[1.0, 2.0], [1234.5, 131072.0]]}, [[True, False], [True, True]], ("N", (32, 64)), ("K", (16, 128))
    )
    (axes,) = figure.axes
    assert _texts(axes) == ["1", "2", "1234", "131072"]
    (hatched,) = [box for box in _rectangles(axes) if box.get_hatch()]
    assert (hatched.get_x(), hatched.get_y()) == (0.5, -0.5)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["16", "128"]


def test_problem_shows_every_token_twice_and_padding_once_on_each_side() -> None:
    choices = [0, 2, 0, 2, 0, 1]
    layout = GroupedLayout.from_choices(choices, num_experts=3, block=2)
    shown = [text.get_text() for text in pictures.problem(choices, layout).axes[0].texts]
    assert [shown.count(f"token {token}") for token in range(6)] == [2] * 6
    assert [shown.count(f"result {token}") for token in range(6)] == [1] * 6
    assert shown.count("anything") == shown.count("must be 0") == layout.num_padded_rows - layout.num_rows


def test_index_spaces_show_each_row_with_both_of_its_numbers() -> None:
    layout = GroupedLayout((3, 0, 2), block=2)
    axes = pictures.index_spaces(layout).axes[0]
    numbers = {(text.get_text(), round(text.get_position()[1], 1)) for text in axes.texts}
    assert {(str(raw), 1.9) for raw in range(5)} | {(str(row), 0.3) for row in range(6)} <= numbers
    # One line from each raw row to its padded row; the short vertical ones are block boundaries.
    joined = [line.get_xdata() for line in axes.lines if max(line.get_ydata()) > 1]
    assert [tuple(int(x) for x in xs) for xs in joined] == list(enumerate(layout.raw_to_padded))


def test_memories_are_drawn_to_one_scale_and_what_is_too_thin_for_its_name_is_named_below() -> None:
    places = {"large": ({"a": 32 * 1024}, None), "small": ({"b": 8 * 1024, "thin": 512, "bias": 256}, 16 * 1024)}
    (axes,) = pictures.memories(places).axes
    widths = [box.get_width() for box in _rectangles(axes)]
    assert widths[1:] == [32, 16, 8, 0.5, 0.25]
    assert {"small, 16 KiB", "a\n32 KiB", "b\n8 KiB", "thin: 0.5 KiB, bias: 0.25 KiB"} <= set(_texts(axes))


SIDES = (16, 32, 64, 128, 256, 512)
ONE_EACH = list(range(8))
AWKWARD = {
    "one token an expert": lambda: pictures.problem(ONE_EACH, GroupedLayout.from_choices(ONE_EACH, 8, block=1)),
    "much padding": lambda: pictures.problem(ONE_EACH, GroupedLayout.from_choices(ONE_EACH, 8, block=3)),
    "one row": lambda: pictures.index_spaces(GroupedLayout((1,), block=1)),
    "small groups": lambda: pictures.index_spaces(GroupedLayout((1, 2, 3, 1, 2, 1, 8, 2), block=2)),
    "52 rows": lambda: pictures.index_spaces(GroupedLayout((1, 12, 3, 11, 2, 1, 8, 2), block=4)),
    "120 rows": lambda: pictures.index_spaces(GroupedLayout((20, 20, 40, 40), block=20)),
    "32 steps": lambda: pictures.tile_walk(128, 128, 512, 16, 7),
    "128 steps": lambda: pictures.tile_walk(128, 128, 2048, 16, 7),
    "a flat tile": lambda: pictures.tile_walk(32, 16, 512, 64, 7),
    "two steps": lambda: pictures.tile_walk(128, 256, 128, 64, 1),
    "16 waves": lambda: pictures.waves_of_gemm(128, 128, 32, 2, 8),
    "waves in a column": lambda: pictures.waves_of_gemm(128, 128, 64, 8, 1),
    "64 columns of blocks": lambda: pictures.blocks(GroupedLayout((142, 0, 100)), 8192, 128, chosen=(1, 40)),
    "one block": lambda: pictures.blocks(GroupedLayout((5,)), 128, 128, chosen=(0, 0)),
    "32 rows of blocks": lambda: pictures.blocks(GroupedLayout((142,) * 16), 2048, 128, chosen=(0, 15)),
    "H above I": lambda: pictures.two_stages(7168, 2048, 128),
    "I above H": lambda: pictures.two_stages(2048, 8192, 128),
    "three maps": lambda: pictures.heat_maps(
        {name: [[n * k * scale for k in SIDES] for n in SIDES] for name, scale in (("a", 1e-3), ("b", 0.1), ("c", 1))},
        [[n * k < 9000 for k in SIDES] for n in SIDES], ("N", SIDES), ("K", SIDES),
    ),
    "memories of all sizes": lambda: pictures.memories(
        {"global memory": ({"weights": 2**26, "tokens": 2**20}, None), "shared": ({"a": 9, "b": 99}, 2**16)}
    ),
    "thin buffers": lambda: pictures.memories(
        {"registers of a processor": ({f"buffer_{number}": 2048 * number for number in range(1, 13)}, 2**19)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("draw", AWKWARD.values(), ids=AWKWARD.keys())
def test_no_text_lies_on_another_or_widens_the_page(draw) -> None:
    figure = draw()
    FigureCanvasAgg(figure)
    figure.savefig(io.BytesIO(), format="png")
    for axes in figure.axes:
        boxes = [(text.get_text(), Text.get_window_extent(text)) for text in axes.texts if text.get_text()]
        assert [(a, b) for (a, one), (b, two) in itertools.combinations(boxes, 2) if one.overlaps(two)] == []
    assert figure.get_tightbbox().width <= 9.1
    assert all(text.get_fontsize() >= 7 for axes in figure.axes for text in axes.texts)
