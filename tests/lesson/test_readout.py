import math
import random

import pytest

from moe_lab.lesson.readout import Gauge, draw, read_out
from moe_lab.machine.devices import device
from moe_lab.model.choices import choices
from moe_lab.model.roofline import bound, work
from moe_lab.problem.contract import CASES
from moe_lab.problem.errors import DataError, SubmissionError
from moe_lab.problem.routings import routing
from moe_lab.problem.submission import Submission
from moe_lab.steps import STEPS, step

C500, H200 = device("c500"), device("h200")


def baseline(card=C500, case=1, routing_name="balanced", **values):
    return read_out(step("s0").with_literals(**values), case, routing_name, card)


def gauge(readout, label):
    return next(item for item in readout.gauges if item.label == label)


def row(readout, label):
    return next(item[1:] for item in readout.rows if item[0] == label)


def test_the_baseline_fills_the_shared_memory_of_a_c500_and_fits():
    found = baseline()
    assert found.fits is True
    assert found.sentence.startswith("Fits the MetaX C500.")
    assert gauge(found, "stage 1: shared memory") == Gauge("stage 1: shared memory", 65536, 65536, "64 of 64 KiB")
    assert gauge(found, "stage 2: shared memory").need == 32768
    assert row(found, "accumulators") == ("128 registers", "64 registers")
    # 142 rows per expert are 2 blocks of 128 for each of 16 experts: 256 of 142 rows, and each weight read twice.
    assert row(found, "blocks") == ("32 × 64 = 2048", "32 × 16 = 512")
    assert row(found, "rounds")[0] == f"{2048 / 104:.2f} in 20 (98%)"
    assert row(found, "reads of a weight") == ("2.00", "2.00")
    assert row(found, "work with padding")[0] == f"{256 / 142:.2f} × useful"


def test_two_stages_do_not_fit_a_c500_and_the_limit_is_named():
    found = baseline(NUM_STAGES=2)
    assert found.fits is False
    assert found.sentence == (
        "Does not fit: stage 1 needs 131072 bytes of shared memory, a block of the MetaX C500 has 65536."
    )
    assert gauge(found, "stage 1: shared memory").share == 2
    assert baseline(H200, NUM_STAGES=2).fits is True


def test_the_bound_counts_padding_the_fullest_processor_and_each_stage():
    found = baseline()
    case = CASES[1]
    roof = C500.roof()
    # Stage 1: 2048 blocks on 104 processors, so one of them gets 20; stage 2: 512 blocks, so 5.
    flops = [4 * case.hidden * case.intermediate * 4096, 2 * case.hidden * case.intermediate * 4096]
    busy = [flops[0] / 2048 * 20 * 104, flops[1] / 512 * 5 * 104]
    parts = work(case, routing(1, "balanced").sizes)
    expected = sum(
        max(value / (roof.peak_tflops * 1e9), part.bytes / (roof.bandwidth_tbps * 1e9))
        for value, part in zip(busy, (parts.stage1, parts.stage2), strict=True)
    )
    assert found.bound_ms == pytest.approx(expected, rel=1e-6)
    assert found.case_ms == pytest.approx(bound(parts.stage1, roof).time_ms + bound(parts.stage2, roof).time_ms)
    assert found.case_ms < found.bound_ms < found.uncached_ms
    assert found.weight_reads == 2
    assert found.intensity == pytest.approx(parts.whole.flops / (2 * parts.whole.weight_bytes + 2272 * 2 * 2 * 10240))


def test_the_h200_bound_of_the_cases_uses_what_was_measured():
    times = [baseline(H200, case).case_ms for case in CASES]
    assert times == pytest.approx([0.396, 0.694, 1.389], rel=0.01)
    assert baseline(H200).roof.basis == "measured"
    assert baseline().roof.basis == "specification"


def test_a_tile_that_leaves_rows_out_is_no_configuration_of_any_device():
    for card in (C500, H200, device("laptop"), None):
        found = baseline(card, BLOCK_M=64)
        assert found.fits is False
        assert "Computes only 90% of what case 1 needs" in found.sentence


def test_a_machine_without_limits_shows_needs_alone():
    found = baseline(None)
    assert found.fits is None
    assert gauge(found, "stage 1: shared memory") == Gauge("stage 1: shared memory", 65536, None, "64 KiB")
    assert found.bound_ms is None
    assert "no bound" in found.bound_sentence
    laptop = baseline(device("laptop"))
    assert laptop.fits is None
    assert laptop.bound_ms > 100


def test_a_kernel_that_decides_at_run_time_what_it_computes_gets_no_bound_of_its_own():
    exact = read_out(step("c4"), 1, "balanced", C500)
    assert exact.bound_ms is not None
    found = read_out(step("h2"), 1, "balanced", H200)
    assert found.fits is True
    assert (found.bound_ms, found.uncached_ms) == (None, None)
    assert row(found, "work with padding")[0].startswith("at most ")
    assert "no bound of its own" in found.bound_sentence
    assert found.case_ms == pytest.approx(0.396, rel=0.01)
    # The case's own mark is left, and nothing else is claimed.
    assert len(draw(found, gauges=False).axes[0].lines) == 3


def test_what_cannot_be_followed_is_one_sentence():
    with pytest.raises(SubmissionError, match="run_kernel"):
        read_out(Submission("BLOCK = 1\n"), 1, "balanced", C500)
    with pytest.raises(DataError, match="got routing 'none' for case 1"):
        baseline(routing_name="none")


def test_figures_and_their_words_say_the_same():
    found = baseline(NUM_STAGES=2, STAGE1_BLOCK_N=256)
    figure = draw(found)
    gauges, roof = figure.axes
    texts = [text.get_text() for text in gauges.texts]
    assert "256 of 64 KiB, too much" in texts
    assert "64 of 64 KiB" in texts
    hatched = [patch for patch in gauges.patches if patch.get_hatch()]
    assert len(hatched) == sum(item.share > 1 for item in found.gauges) == 2
    labels = [text.get_text() for text in roof.get_legend().get_texts()]
    assert f"each weight read once: {found.bound_ms:.3f} ms" in labels
    assert f"each weight read 2.00 times: {found.uncached_ms:.3f} ms" in labels
    assert "256 of 64 KiB" in found.description
    assert f"{found.bound_ms:.3f} ms" in found.description
    # The marker lies under the roof.
    for line in roof.lines[2:]:
        for at, rate in zip(line.get_xdata(), line.get_ydata(), strict=True):
            assert rate <= min(found.roof.peak_tflops, at * found.roof.bandwidth_tbps) * 1.0001
    assert len(draw(found, gauges=False).axes) == 1
    assert len(draw(baseline(None), gauges=False).axes) == 1


def test_fifty_random_configurations_each_have_a_reason_or_fit():
    rng = random.Random(6)
    fits = 0
    for number in range(50):
        submission = step(rng.choice(list(STEPS)))
        values = {choice.name: rng.choice(choice.values) for choice in choices(submission)}
        found = read_out(submission.with_literals(**values), rng.choice([1, 2, 3]), "multinomial-0", C500)
        assert found.sentence.endswith("."), number
        starts = {True: ("Fits the ",), False: ("Does not fit: ", "Computes only "), None: ("It cannot be told ",)}
        assert found.sentence.startswith(starts[found.fits]), (number, found.sentence)
        assert found.bound_ms is None or math.isfinite(found.bound_ms)
        fits += found.fits is True
    assert 0 < fits < 50
