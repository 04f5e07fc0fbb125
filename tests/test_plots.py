import io
import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from moe_lab import plots
from moe_lab.contract import CASES
from moe_lab.devices import Roof, device
from moe_lab.errors import ContractError
from moe_lab.judge.score import score
from moe_lab.layout import GroupedLayout
from moe_lab.plots import Point
from moe_lab.steps import step
from moe_lab.tiles import resources
from moe_lab.timing import Measurement

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


def texts_that_overlap(axes):
    boxes = [(text.get_text(), text.get_window_extent()) for text in axes.texts if text.get_text()]
    return [(a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2) if one.overlaps(other)]


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
    assert "case 1: s0_baseline 2 ms, h1_best 0.5 ms, a library 1 ms; bound 0.396 ms" in plot[1]
    assert "NVIDIA H200" in plot[1]


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
    assert sorted(text.get_text() for text in axes.texts) == ["ridge 152", "ridge 153", "ridge 164"]
    assert texts_that_overlap(axes) == []
    assert "NVIDIA H200 SXM, measured: 706 TFLOP/s, 4.3 TB/s, ridge at 164 FLOP per byte" in plot[1]
    assert "case 1: 89.7 TFLOP/s at 134 FLOP per byte" in plot[1]


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


def test_no_global_state_is_touched():
    program = (
        "import sys; from moe_lab import plots; from moe_lab.layout import GroupedLayout\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plots.layout_picture(GroupedLayout((1,)))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
