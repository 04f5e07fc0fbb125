"""Drawings say what they are given: their labels are compared with the numbers behind them."""

from __future__ import annotations

import pytest
from matplotlib.patches import Rectangle

from moe_lab import pictures
from moe_lab.errors import ContractError
from moe_lab.layout import GroupedLayout


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
    assert _texts(right) == [f"wave {number}" for number in range(8)]


def test_blocks_show_valid_rows_of_each_block() -> None:
    layout = GroupedLayout((142, 0, 100))
    (axes,) = pictures.blocks(layout, 256, 128).axes
    assert [text for text in _texts(axes) if text.endswith("rows")] == ["128 rows", "14 rows", "100 rows"]
    assert "bx 2, expert 2" in _texts(axes)
    # The coloured part of block 1 is as high as its share of valid rows.
    assert any(box.get_height() == pytest.approx(14 / 128) for box in _rectangles(axes))


def test_two_stages_cut_both_results_into_blocks() -> None:
    (axes,) = pictures.two_stages(hidden=256, intermediate=512, block_n=128).axes
    assert len(_rectangles(axes)) == 1 + 512 // 128 + 256 // 128


def test_heat_maps_show_every_number_and_hatch_what_does_not_fit() -> None:
    figure = pictures.heat_maps(
        {"KiB": [[1.0, 2.0], [3.0, 4.0]]}, [[True, False], [True, True]], ("N", (32, 64)), ("K", (16, 128))
    )
    (axes,) = figure.axes
    assert _texts(axes) == ["1", "2", "3", "4"]
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


def test_memories_are_drawn_to_one_scale() -> None:
    (axes,) = pictures.memories({"large": ({"a": 32 * 1024}, None), "small": ({"b": 8 * 1024}, 16 * 1024)}).axes
    widths = [box.get_width() for box in _rectangles(axes)]
    assert widths[1] == 32
    assert widths[2:] == [16, 8]
    assert "small, 16 KiB" in _texts(axes)
