import io
import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from moe_lab.judge.score import baseline_times_ms, score
from moe_lab.lesson import plots
from moe_lab.lesson.plots import Point
from moe_lab.machine.devices import Roof, device
from moe_lab.machine.timing import Measurement
from moe_lab.model.tiles import resources
from moe_lab.problem.contract import CASES
from moe_lab.problem.errors import ContractError
from moe_lab.problem.layout import GroupedLayout
from moe_lab.steps import step

ROW = Measurement(
    run="r", recorded_at="2026-11-29T00:00:00+00:00", device="NVIDIA H200", driver="1", versions="x=1", kind="step",
    name="s0_baseline", source_hash="ab", case="case 1", num_experts=16, hidden=2048, intermediate=8192,
    num_tokens=2272, routing="multinomial-0", seed=0, cache="cold", rounds=25, median_ms=2.0, low_ms=1.8,
    high_ms=2.5, flops=1, bytes=1, error=1e-4,
)  # fmt: skip
ROWS = [
    ROW,
    replace(ROW, name="a library", kind="peer", source_hash=None, median_ms=1.0, low_ms=0.9, high_ms=1.1),
    replace(ROW, name="h1_best", median_ms=0.5, low_ms=0.45, high_ms=0.55),
    replace(ROW, name="h1_best", case="case 2", median_ms=0.9, low_ms=0.85, high_ms=0.95),
    replace(ROW, name="dense matmul", kind="roof", source_hash=None, error=None),
]
ROOFS = [device("h200").roof("measured"), device("c500").roof(), device("a100").roof()]


def drawn(plot):
    """Draw it once and give the axes, so that every extent is known."""
    figure, words = plot
    assert words.endswith(".")
    FigureCanvasAgg(figure)
    figure.savefig(io.BytesIO(), format="png")
    return figure.axes


def extents(axes):
    """Where each text is, without the line from an annotation to its place."""
    return [(text.get_text(), Text.get_window_extent(text)) for text in axes.texts if text.get_text()]


def texts_that_overlap(axes):
    return [(a, b) for (a, one), (b, other) in itertools.combinations(extents(axes), 2) if one.overlaps(other)]


def texts_cut_off(axes):
    frame = axes.get_window_extent()
    return [
        text for text, box in extents(axes)
        if box.x0 < frame.x0 or box.y0 < frame.y0 or box.x1 > frame.x1 or box.y1 > frame.y1
    ]  # fmt: skip


def markers(axes):
    """Name and place of every dot, as large as it is drawn."""
    for line in axes.lines:
        if line.get_linestyle() == "None" and line.get_marker() not in ("None", None, "|"):
            x, y = axes.transData.transform((line.get_xdata()[0], line.get_ydata()[0]))
            half = line.get_markersize() / 2 * axes.figure.dpi / 72
            yield line.get_label(), Bbox([[x - half, y - half], [x + half, y + half]])


def texts_on_markers(axes):
    return [(text, name) for text, box in extents(axes) for name, dot in markers(axes) if box.overlaps(dot)]


def tick_labels(axes):
    both = (*axes.get_xticklabels(), *axes.get_yticklabels())
    return [label.get_text() for label in both if label.get_text()]


def test_timings_show_medians_spread_and_the_bound():
    plot = plots.timings(ROWS, {"case 1": 0.396})
    first, second = drawn(plot)
    assert [label.get_text() for label in first.get_yticklabels()] == ["s0_baseline", "h1_best", "a library"]
    bars = {round(float(c.lines[0].get_xdata()[0]), 3): c for c in first.containers}
    assert set(bars) == {2.0, 1.0, 0.5}
    low, high = (float(cap.get_xdata()[0]) for cap in bars[2.0].lines[1])
    assert (low, high) == pytest.approx((1.8, 2.5))
    # Peers differ by marker and filling, not by colour alone.
    assert bars[1.0].lines[0].get_marker() != bars[2.0].lines[0].get_marker()
    assert to_hex(bars[1.0].lines[0].get_markerfacecolor()) == "#ffffff"
    assert any("bound 0.396" in text.get_text() for text in first.texts)
    assert len(second.containers) == 1
    assert texts_that_overlap(first) == []
    assert "case 1: s0_baseline 2.00 ms, h1_best 0.500 ms, a library 1.00 ms; bound 0.396 ms" in plot[1]
    assert "NVIDIA H200" in plot[1]


NAMES = [f"step number {number}" for number in range(12)]
TIMES = {
    "at the bound": [1.0 + number / 1000 for number in range(12)],
    "on both sides of the bound": [0.5 + number / 11 for number in range(12)],
    "below the bound": [0.01 * (number + 1) for number in range(12)],
    "over decades": [10 ** (number / 2 - 2) for number in range(12)],
    "one": [1.04],
    "thousands": [1234.5, 99999.0],
}


@pytest.mark.parametrize("cases", [1, 3, 5])
@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES.keys())
def test_no_time_is_written_on_the_bound_a_marker_or_another_time(times, cases):
    rows = [
        replace(ROW, name=name, case=f"case {case}", median_ms=ms, low_ms=0.97 * ms, high_ms=1.05 * ms)
        for case in range(cases) for name, ms in zip(NAMES, times, strict=False)
    ]  # fmt: skip
    plot = plots.timings(rows, {f"case {case}": 1.0 for case in range(cases)})
    panels = drawn(plot)
    assert len(panels) == cases
    assert plot[0].get_figwidth() <= 9, "a notebook page would shrink it"
    for axes in panels:
        assert texts_that_overlap(axes) == []
        assert texts_cut_off(axes) == []
        (bound,) = (line for line in axes.lines if list(line.get_xdata()) == [1.0, 1.0])
        line = axes.transData.transform((1.0, 0))[0]
        assert [text for text, box in extents(axes) if box.x0 <= line + 1 and line - 1 <= box.x1] == []
        assert all(bound.get_zorder() < drawn_line.get_zorder() for drawn_line in axes.lines if drawn_line is not bound)
        for ms, (text, box) in zip(times, extents(axes), strict=False):
            assert float(text) == pytest.approx(ms, rel=0.01)
            assert box.x0 > axes.transData.transform((1.05 * ms, 0))[0], "a time is right of its interval"


def test_long_names_and_devices_stay_on_the_page():
    row = replace(ROW, name="a library with a long name, its version and its dtype (bf16)", device="A processor " * 8)
    figure, _ = plot = plots.timings([row, replace(ROW, device=row.device)])
    drawn(plot)
    assert figure.get_tightbbox().width <= figure.get_figwidth() + 0.1


def test_times_of_several_runs_are_not_put_side_by_side():
    with pytest.raises(ContractError, match="got rows of 2 runs"):
        plots.timings([ROW, replace(ROW, run="other")])
    with pytest.raises(ContractError, match="got no rows"):
        plots.timings([])


def test_a_roofline_bends_at_every_ridge_and_says_so():
    plot = plots.roofline(ROOFS, [Point("case 1", 134.2, 89.7), Point("case 2", 134.0, 89.2)])
    (axes,) = drawn(plot)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    lines = [line for line in axes.lines if len(line.get_xdata()) == 3]
    for roof, line in zip(ROOFS, lines, strict=True):
        assert line.get_xdata()[1] == pytest.approx(roof.ridge)
        assert line.get_ydata()[1] == line.get_ydata()[2] == roof.peak_tflops
        assert line.get_ydata()[0] == pytest.approx(line.get_xdata()[0] * roof.bandwidth_tbps)
    assert len({line.get_linestyle() for line in lines}) == len(ROOFS)
    dots = [line for line in axes.lines if line.get_label().startswith("case")]
    assert len({dot.get_marker() for dot in dots}) == 2
    assert dots[0].get_markersize() > dots[1].get_markersize()
    assert sorted(text.get_text() for text in axes.texts) == [
        "ridge 152", "ridge 153", "ridge 182", "■ case 2", "● case 1",
    ]  # fmt: skip
    assert texts_that_overlap(axes) == []
    assert [text.get_text() for text in plot[0].legends[0].get_texts()] == [
        f"{roof.title} ({roof.peak_tflops:.0f} TFLOP/s)" for roof in ROOFS
    ]
    assert "NVIDIA H200 SXM, measured: 784 TFLOP/s, 4.31 TB/s, ridge at 182 FLOP per byte" in plot[1]
    assert "case 1: 89.7 TFLOP/s at 134 FLOP per byte" in plot[1]


def spread(number, low, high, turn):
    """Places over decades, the same ones every time, that follow no line."""
    return [low * (high / low) ** ((index * turn) % 1) for index in range(1, number + 1)]


LONG = "library number {} of some, H200 (measured)"
PLACES = {
    "none": [],
    "one": [(134.0, 90.0)],
    "one at a ridge": [(ROOFS[0].ridge, ROOFS[0].peak_tflops)],
    "two at one place": [(134.0, 90.0)] * 2,
    "three nearly at one place": [(134.2, 101.0), (134.0, 108.0), (134.1, 105.0)],
    "two groups of three": [(134.2, 101.0), (134.0, 108.0), (134.1, 105.0), (134, 20), (134, 21.4), (134, 22)],
    "twelve at one place": [(134.0, 90.0)] * 12,
    "twelve in a row that touch": [(100.0 * 1.03**number, 90.0) for number in range(12)],
    "twelve near one another": list(zip(spread(12, 50, 200, 0.618), spread(12, 30, 400, 0.414), strict=True)),
    "twelve over decades": list(zip(spread(12, 1e-3, 1e3, 0.618), spread(12, 1e-4, 1e3, 0.414), strict=True)),
    "far above the roofs": [(134.0, 90.0), (134.0, 1e5)],
}


@pytest.mark.parametrize("roofs", [ROOFS, [ROOFS[0]], [ROOFS[0]] * 3], ids=["three roofs", "one", "one roof thrice"])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES.keys())
def test_every_dot_of_a_roofline_can_be_told_from_the_others(places, roofs):
    points = [Point(LONG.format(number), *place) for number, place in enumerate(places)]
    plot = plots.roofline(roofs, points)
    (axes,) = drawn(plot)
    assert texts_that_overlap(axes) == []
    assert texts_cut_off(axes) == []
    assert texts_on_markers(axes) == []
    assert plot[0].get_tightbbox().width <= 9
    for point in points:
        # Some names are in two lines, some begin with their marker.
        found = [text for text in axes.texts if " ".join(text.get_text().split()).endswith(point.label)]
        assert [text.xy for text in found] == [(point.intensity, point.rate_tflops)]
    assert len(axes.texts) == len(points) + len(roofs)
    assert len(list(markers(axes))) == len(points)
    frame = axes.get_window_extent()
    assert all(frame.x0 < dot.x0 and dot.x1 < frame.x1 and frame.y0 < dot.y0 and dot.y1 < frame.y1
               for _, dot in markers(axes))  # fmt: skip


def test_dots_in_one_place_are_rings_in_one_another():
    (axes,) = drawn(plots.roofline(ROOFS, [Point(f"point {number}", 134, 90) for number in range(4)]))
    dots = [line for line in axes.lines if line.get_label().startswith("point")]
    sizes = [dot.get_markersize() for dot in dots]
    assert all(large >= small + 3 for large, small in itertools.pairwise(sizes))
    assert [dot.get_markerfacecolor() == "none" for dot in dots] == [True, True, True, False]
    assert len({dot.get_marker() for dot in dots}) == 4
    names = [text for text in axes.texts if "point" in text.get_text()]
    assert [text.get_text() for text in names] == ["● point 0", "■ point 1", "▲ point 2", "◆ point 3"]
    assert all(text.arrow_patch is not None for text in names), "a line leads from each name to its dot"


def test_a_dot_alone_is_named_beside_it():
    (axes,) = drawn(plots.roofline(ROOFS[:1], [Point("alone", 20, 5)]))
    ((_, dot),) = markers(axes)
    ((_, box),) = (found for found in extents(axes) if found[0] == "alone")
    assert 0 < box.x0 - dot.x1 < 15
    assert box.y0 < (dot.y0 + dot.y1) / 2 < box.y1


@pytest.mark.parametrize("points", [[], [Point("slow", 1e-3, 1e-4)], [Point("fast", 1e4, 1e6)]])
def test_ticks_of_a_roofline_are_plain_numbers(points):
    for roofs in (ROOFS[:1], [Roof("small", 0.05, 0.02, "measured")]):
        (axes,) = drawn(plots.roofline(roofs, points))
        shown = tick_labels(axes)
        assert [float(label) for label in shown], "numbers, not powers of ten"
        assert all(set(label) <= set("0123456789.") for label in shown)
        for low, high, ticks in ((*axes.get_xlim(), axes.get_xticks()), (*axes.get_ylim(), axes.get_yticks())):
            assert sum(low <= tick <= high for tick in ticks) >= 3, "too few to read a value"
        assert [label for label in (*axes.get_xticklabels(minor=True), *axes.get_yticklabels(minor=True))
                if label.get_text()] == []  # fmt: skip


def test_a_roofline_refuses_what_a_logarithm_cannot_show():
    with pytest.raises(ContractError, match="above 0"):
        plots.roofline([])
    with pytest.raises(ContractError, match="above 0"):
        plots.roofline([Roof("x", 1, 1, "measured")], [Point("none", 0, 1)])


def test_the_layout_shows_valid_padding_and_blocks_of_padding_alone():
    layout = GroupedLayout((128, 5, 0, 130), padding_rule="plus_one")
    plot = plots.layout_picture(layout)
    (axes,) = drawn(plot)
    filled = [patch for patch in axes.patches if to_hex(patch.get_facecolor()) == "#0072b2"]
    hatched = [patch for patch in axes.patches if patch.get_hatch()]
    assert [patch.get_width() for patch in filled] == [128, 5, 0, 130]
    assert [patch.get_width() for patch in hatched] == [128, 123, 128, 126]
    assert len(axes.lines) == 2 * 2, "a cross has two strokes, and two blocks hold padding alone"
    assert "263 valid rows in 768 padded rows, 6 blocks of 128" in plot[1]
    assert "2 blocks hold padding alone" in plot[1]


def test_frames_of_thin_blocks_do_not_hide_what_is_in_them():
    (axes,) = drawn(plots.layout_picture(GroupedLayout((9000, 88), block=16)))
    wide = axes.transData.transform((16, 0))[0] - axes.transData.transform((0, 0))[0]
    frames = [patch.get_linewidth() for patch in axes.patches if patch.get_linewidth()]
    assert len(frames) == 569
    assert max(frames) * axes.figure.dpi / 72 < wide / 4


def test_a_layout_of_no_rows_is_drawn():
    plot = plots.layout_picture(GroupedLayout((0, 0)))
    drawn(plot)
    assert "0 valid rows in 0 padded rows, 0 blocks of 128" in plot[1]


def test_the_memory_map_is_to_scale_and_shows_the_limit():
    kernels = resources(step("s0").with_literals(NUM_STAGES=2), CASES[1]).kernels
    plot = plots.tile_memory(kernels, device("c500"))
    (axes,) = drawn(plot)
    boxes = [(patch.get_x(), patch.get_width(), bool(patch.get_hatch())) for patch in axes.patches]
    assert boxes == [(0, 32, False), (32, 32, False), (64, 32, True), (96, 32, True), (0, 32, False), (32, 32, False)]
    assert axes.lines[0].get_xdata()[0] == 64
    assert texts_that_overlap(axes) == []
    assert "stage 1 needs 131072 bytes and does not fit: gate_shared 65536 bytes in 2 copies" in plot[1]
    assert "stage 2 needs 65536 bytes and fits" in plot[1]


def test_a_memory_map_far_beyond_the_limit_keeps_its_words_inside():
    kernels = resources(step("s0").with_literals(NUM_STAGES=4), CASES[1]).kernels
    (axes,) = drawn(plots.tile_memory(kernels, device("c500")))
    assert texts_that_overlap(axes) == []
    assert texts_cut_off(axes) == []


def test_a_memory_map_of_an_unknown_size_is_refused():
    (kernel, _) = resources(step("s0"), CASES[1]).kernels
    with pytest.raises(ContractError, match="not known"):
        plots.tile_memory([replace(kernel, shared_bytes=None)], device("c500"))


def test_the_score_curve_passes_through_the_baseline_and_the_cases():
    found = score([2.551, 4.489, 8.853])
    plot = plots.score_curve(found)
    (axes,) = drawn(plot)
    curve = next(line for line in axes.lines if len(line.get_xdata()) > 10)
    for x, y in zip(curve.get_xdata(), curve.get_ydata(), strict=True):
        assert y == pytest.approx(100 * x / (1 + x))
    dots = {line.get_label()[:6]: line for line in axes.lines if line.get_label().startswith("case")}
    for case in found.cases:
        dot = dots[f"case {case.case}"]
        assert dot.get_xdata()[0] == pytest.approx(case.baseline_ms / case.time_ms)
        assert dot.get_ydata()[0] == case.points
    assert "Score 80.33" in plot[1]
    assert "case 1: 2.551 ms, 81 points, 82 at 2.470 ms" in plot[1]


@pytest.mark.parametrize(
    "times",
    [baseline_times_ms(), [2.551, 4.489, 8.853], [2.0, 2.4, 8.0], [400.0, 18.0, 0.5]],
    ids=["all at the baseline", "near one another", "apart", "over decades"],
)
def test_every_case_of_a_score_can_be_told_from_the_others(times):
    (axes,) = drawn(plots.score_curve(score(list(times))))
    assert texts_that_overlap(axes) == []
    assert texts_cut_off(axes) == []
    assert texts_on_markers(axes) == []
    for name in ("case 1: ", "case 2: ", "case 3: ", "the judge's baseline: 50 points"):
        assert sum(name in text.get_text() for text in axes.texts) == 1
    assert 3 <= len(axes.get_xticks()) <= 12


def test_no_global_state_is_touched():
    program = (
        "import sys; from moe_lab.lesson import plots; from moe_lab.problem.layout import GroupedLayout\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plots.layout_picture(GroupedLayout((1,)))\n"
        "from moe_lab.machine.devices import Roof\n"
        "plots.roofline([Roof('x', 1, 1, 'measured')], [plots.Point('y', 1, 1)])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
