import io
import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from moe_lab.judge.score import baseline_times_ms, score
from moe_lab.lesson import plots
from moe_lab.lesson.plots import Point
from moe_lab.machine.devices import Roof, device
from moe_lab.machine.timing import Measurement
from moe_lab.problem.errors import ContractError
from moe_lab.problem.layout import GroupedLayout

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


def legend(figure):
    return [" ".join(text.get_text().split()) for text in figure.legends[0].get_texts()]


def dots(axes):
    """Every dot that has a name."""
    return [line for line in axes.lines if line.get_linestyle() == "None" and not line.get_label().startswith("_")]


def tick_labels(axes):
    both = (*axes.get_xticklabels(), *axes.get_yticklabels())
    return [label.get_text() for label in both if label.get_text()]


def column(axes):
    """Times in the column at the right, from the top down."""
    (right,) = axes.child_axes
    return [label.get_text() for label in right.get_yticklabels()]


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
    assert first.get_title() == "case 1, dashed: bound 0.396 ms"
    assert [list(line.get_xdata()) for line in first.lines if line.get_linestyle() == "--"] == [[0.396, 0.396]]
    assert (column(first), column(second)) == (["2.00", "0.500", "1.00"], ["0.900"])
    assert (len(second.containers), second.get_title()) == (1, "case 2")
    assert "case 1: s0_baseline 2.00 ms, h1_best 0.500 ms, a library 1.00 ms; bound 0.396 ms" in plot[1]
    assert "NVIDIA H200" in plot[1]


@pytest.mark.parametrize("cases", [1, 2, 3])
@pytest.mark.parametrize("scale", [0.01, 1.0, 50000.0])
def test_every_panel_is_within_the_page_and_holds_its_intervals_and_its_bound(cases, scale):
    rows = [
        replace(ROW, name=f"step number {n}", case=f"case {case}", median_ms=ms, low_ms=0.97 * ms, high_ms=1.05 * ms)
        for case in range(cases) for n, ms in enumerate(scale * (0.5 + n / 11) for n in range(12))
    ]  # fmt: skip
    plot = plots.timings(rows, {f"case {case}": 2.0 * scale for case in range(cases)})
    panels = drawn(plot)
    assert len(panels) == cases
    assert plot[0].get_tightbbox().width <= 9.1, "a notebook page would shrink it"
    for axes in panels:
        assert 0 < axes.get_xlim()[0] < 0.5 * scale
        assert axes.get_xlim()[1] > 2.0 * scale
        times = [float(text) for text in column(axes)]
        assert times == pytest.approx([scale * (0.5 + n / 11) for n in range(12)], rel=0.01)
        assert not axes.texts, "times and names stand beside the axes"


def test_long_names_and_devices_stay_on_the_page():
    row = replace(ROW, name="a library with a long name, its version and its dtype (bf16)", device="A processor " * 8)
    figure, _ = plot = plots.timings([row, replace(ROW, device=row.device)])
    drawn(plot)
    assert figure.get_tightbbox().width <= figure.get_figwidth() + 0.1


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
    assert legend(plot[0]) == [
        "NVIDIA H200 SXM, measured: 784 TFLOP/s, ridge at 182", "MetaX C500, specification: 280 TFLOP/s, ridge at 152",
        "NVIDIA A100 SXM 80 GB, specification: 312 TFLOP/s, ridge at 153", "case 1", "case 2",
    ]  # fmt: skip
    assert "NVIDIA H200 SXM, measured: 784 TFLOP/s, 4.31 TB/s, ridge at 182 FLOP per byte" in plot[1]
    assert "case 1: 89.7 TFLOP/s at 134 FLOP per byte" in plot[1]


LONG = "library number {} of some with a name that is far too long for one line, H200 (measured)"
PLACES = {
    "none": [],
    "one at a ridge": [(ROOFS[0].ridge, ROOFS[0].peak_tflops)],
    "two groups of three": [(134.2, 101.0), (134.0, 108.0), (134.1, 105.0), (134, 20), (134, 21.4), (134, 22)],
    "twelve at one place": [(134.0, 90.0)] * 12,
    "twelve in a row that touch": [(100.0 * 1.03**number, 90.0) for number in range(12)],
    "far above the roofs": [(134.0, 90.0), (134.0, 1e5)],
}


@pytest.mark.parametrize("roofs", [ROOFS, [ROOFS[0]] * 3], ids=["three roofs", "one roof thrice"])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES.keys())
def test_every_dot_of_a_roofline_can_be_told_from_the_others(places, roofs):
    points = [Point(LONG.format(number), *place) for number, place in enumerate(places)]
    plot = plots.roofline(roofs, points)
    (axes,) = drawn(plot)
    assert not axes.texts, "names stand in the legend"
    assert legend(plot[0])[len(roofs) :] == [point.label for point in points]
    found = dots(axes)
    assert [(dot.get_xdata()[0], dot.get_ydata()[0]) for dot in found] == places
    assert len({(dot.get_marker(), to_hex(dot.get_markeredgecolor()), to_hex(dot.get_markerfacecolor()))
                for dot in found}) == len(points)  # fmt: skip
    assert plot[0].get_tightbbox().width <= 9
    frame, box = axes.get_window_extent(), plot[0].legends[0].get_window_extent()
    assert not frame.overlaps(box)
    assert all(axes.viewLim.contains(x, y) for x, y in places)


def test_dots_in_one_place_are_rings_in_one_another():
    (axes,) = drawn(plots.roofline(ROOFS, [Point(f"point {number}", 134, 90) for number in range(4)]))
    sizes = [dot.get_markersize() for dot in dots(axes)]
    assert all(large >= small + 3 for large, small in itertools.pairwise(sizes))
    assert [dot.get_markerfacecolor() == "none" for dot in dots(axes)] == [True, True, True, False]
    assert len({dot.get_marker() for dot in dots(axes)}) == 4


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


@pytest.mark.parametrize(("draw", "said"), [
    (lambda: plots.timings([ROW, replace(ROW, run="other")]), "got rows of 2 runs"),
    (lambda: plots.timings([]), "got no rows"),
    (lambda: plots.roofline([]), "above 0"),
    (lambda: plots.roofline([Roof("x", 1, 1, "measured")], [Point("none", 0, 1)]), "above 0"),
])  # fmt: skip
def test_what_cannot_be_compared_or_shown_is_refused(draw, said):
    with pytest.raises(ContractError, match=said):
        draw()


def test_the_layout_shows_valid_padding_and_blocks_of_padding_alone():
    layout = GroupedLayout((128, 5, 0, 130), padding_rule="plus_one")
    plot = plots.layout_picture(layout)
    (axes,) = drawn(plot)
    filled = [patch for patch in axes.patches if to_hex(patch.get_facecolor()) == "#0072b2"]
    hatched = [patch for patch in axes.patches if patch.get_hatch()]
    assert [patch.get_width() for patch in filled] == [128, 5, 0, 130]
    assert [patch.get_width() for patch in hatched] == [256, 128, 128, 256], "valid rows are drawn over it"
    crosses = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines]
    assert crosses == [(192, 0), (64, 2)], "two blocks hold padding alone"
    assert "263 valid rows in 768 padded rows, 6 blocks of 128" in plot[1]
    assert "2 blocks hold padding alone" in plot[1]
    empty = plots.layout_picture(GroupedLayout((0, 0)))
    drawn(empty)
    assert "0 valid rows in 0 padded rows, 0 blocks of 128" in empty[1]


def test_frames_of_thin_blocks_do_not_hide_what_is_in_them():
    (axes,) = drawn(plots.layout_picture(GroupedLayout((9000, 88), block=16)))
    wide = axes.transData.transform((16, 0))[0] - axes.transData.transform((0, 0))[0]
    assert sum(len(each.get_paths()) for each in axes.collections) == 569
    assert max(float(each.get_linewidth()[0]) for each in axes.collections) * axes.figure.dpi / 72 < wide / 4


def test_the_score_curve_passes_through_the_baseline_and_the_cases():
    found = score([2.551, 4.489, 8.853])
    plot = plots.score_curve(found)
    (axes,) = drawn(plot)
    curve = next(line for line in axes.lines if len(line.get_xdata()) > 10)
    for x, y in zip(curve.get_xdata(), curve.get_ydata(), strict=True):
        assert y == pytest.approx(100 * x / (1 + x))
    named = {dot.get_label()[:6]: dot for dot in dots(axes)}
    for case in found.cases:
        dot = named[f"case {case.case}"]
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
    plot = plots.score_curve(score(list(times)))
    (axes,) = drawn(plot)
    assert not axes.texts
    names = ("case 1: ", "case 2: ", "case 3: ", "the judge's baseline: 50 points")
    assert all(text.startswith(name) for text, name in zip(legend(plot[0]), names, strict=True))
    assert 3 <= len(axes.get_xticks()) <= 12
    labels = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert not any(one.overlaps(other) for one, other in itertools.pairwise(labels))


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
