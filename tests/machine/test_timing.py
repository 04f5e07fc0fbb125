import re
from dataclasses import replace

import pytest

from moe_lab.machine.timing import (
    Measurement,
    faster,
    interleave,
    measurements,
    new_run,
    newest_runs,
    record,
    summarise,
)
from moe_lab.problem.errors import ContractError, DataError

ROW = Measurement(
    run="20260101T000000Z-abc123", recorded_at="2026-01-01T00:00:00+00:00", device="NVIDIA H200", driver="1.2",
    versions="torch=2.11.0 tilelang=0.1.15", kind="step", name="s0_baseline", source_hash="ab" * 32, case="case 1",
    num_experts=16, hidden=2048, intermediate=8192, num_tokens=2272, routing="multinomial-0", seed=0, cache="cold",
    rounds=25, median_ms=2.0, low_ms=1.9, high_ms=2.2, flops=4_000_000_000, bytes=6_000_000, error=3e-4,
)  # fmt: skip


def test_the_interval_encloses_the_median_and_shrinks_with_rounds():
    few = summarise("x", [1.0, 2.0, 3.0, 4.0], device="d", cache="cold")
    many = summarise("x", [1.0, 2.0, 3.0, 4.0] * 50, device="d", cache="cold")
    assert few.median_ms == many.median_ms == 2.5
    assert few.low_ms <= 2.5 <= few.high_ms
    assert many.high_ms - many.low_ms < few.high_ms - few.low_ms
    assert summarise("x", [1.5], device="d", cache="cold").low_ms == 1.5
    assert summarise("x", [1.5] * 9, device="d", cache="cold").high_ms == 1.5


def test_an_outlier_does_not_move_the_median():
    calm = summarise("x", [1.0] * 20, device="d", cache="cold")
    busy = summarise("x", [1.0] * 20 + [500.0], device="d", cache="cold")
    assert busy.median_ms == calm.median_ms
    assert busy.high_ms == 1.0


@pytest.mark.parametrize("times", [[], [0.0], [1.0, -1.0], [1.0, float("nan")]])
def test_times_that_are_none_are_refused(times):
    with pytest.raises(ContractError, match="each above 0 ms"):
        summarise("x", times, device="d", cache="cold")


def test_candidates_take_turns_and_inputs_rotate():
    calls = []
    timings = interleave(
        {"a": lambda index: calls.append(("a", index)), "b": lambda index: calls.append(("b", index))},
        rounds=3, warmup=1, sets=2,
    )  # fmt: skip
    # Forwards, then backwards; the set of inputs changes with each round, the first round is not timed.
    assert calls == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert {name: len(timing.times_ms) for name, timing in timings.items()} == {"a": 3, "b": 3}


@pytest.mark.gpu
def test_a_gpu_times_the_work_and_not_the_queue():
    import torch

    one = torch.randn(4096, 4096, dtype=torch.float16, device="cuda")
    timings = interleave({"one": lambda _: one @ one, "four": lambda _: [one @ one for _ in range(4)]}, rounds=9)
    assert timings["four"].median_ms / timings["one"].median_ms == pytest.approx(4, rel=0.4)
    assert timings["one"].cache == "cold"


@pytest.mark.parametrize("settings", [{"rounds": 0}, {"sets": 0}, {"warmup": -1}])
def test_settings_that_time_nothing_are_refused(settings):
    with pytest.raises(ContractError, match="expected at least"):
        interleave({"a": print}, **settings)


def test_only_what_lies_outside_the_noise_is_faster():
    slow = summarise("slow", [4.0, 4.1, 3.9, 4.0], device="d", cache="cold")
    fast = summarise("fast", [2.0, 2.1, 1.9, 2.0], device="d", cache="cold")
    same = summarise("same", [3.9, 4.1, 3.8, 4.0], device="d", cache="cold")
    assert faster(fast, slow)
    assert not any(faster(*pair) for pair in ((slow, fast), (same, slow), (slow, slow)))


def test_devices_and_cache_states_are_never_compared():
    here = summarise("a", [1.0], device="NVIDIA H200", cache="cold")
    with pytest.raises(ContractError, match="a on NVIDIA H200 and b on MetaX C500, expected one device"):
        faster(here, summarise("b", [1.0], device="MetaX C500", cache="cold"))
    with pytest.raises(ContractError, match="a cold cache and b with a dirty one"):
        faster(here, summarise("b", [1.0], device="NVIDIA H200", cache="dirty"))


def test_a_record_comes_back_as_it_was_written(tmp_path):
    roof = replace(ROW, kind="roof", name="copy, with a comma", source_hash=None, error=None, flops=0)
    path = record([ROW, roof], tmp_path)
    assert path.name == f"{ROW.run}.csv"
    assert measurements(tmp_path) == [ROW, roof]
    assert ROW.rate_tflops == pytest.approx(2.0)
    assert ROW.rate_gbps == pytest.approx(3.0)


def test_a_run_is_added_and_no_other_is_touched(tmp_path):
    first = record([ROW], tmp_path)
    before = first.read_bytes()
    later = replace(ROW, run="20260102T000000Z-abc124")
    record([later], tmp_path)
    assert first.read_bytes() == before
    assert [row.run for row in measurements(tmp_path)] == [ROW.run, later.run]
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".csv"]


def test_rows_of_two_runs_are_no_record(tmp_path):
    with pytest.raises(ContractError, match="rows of 2 runs"):
        record([ROW, replace(ROW, run="other")], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (",2.0,1.9,2.2,", ",2.0,2.1,2.2,", "line 2: got median_ms=2.0 in 2.1 to 2.2"),
        (",2.0,1.9,2.2,", ",fast,1.9,2.2,", "line 2: column median_ms: got 'fast'"),
        (",step,", ",ours,", "line 2: column kind: got 'ours'"),
        ("ab" * 32, "", "line 2: got source_hash=None for a step"),
    ],
)
def test_a_damaged_record_is_named(tmp_path, old, new, message):
    path = record([ROW], tmp_path)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(DataError) as error:
        measurements(tmp_path)
    assert message in str(error.value)
    assert path.name in str(error.value)


def test_runs_have_their_own_ids():
    ids = {new_run()[0] for _ in range(20)}
    assert len(ids) == 20
    assert all(re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", name) for name in ids)


def test_the_recorded_measurements_of_this_checkout_can_be_read():
    rows = measurements()
    assert all(row.device and row.versions for row in rows)


def test_the_newest_run_of_each_case_that_timed_a_step_on_a_device_is_found(tmp_path):
    def row(run, **changes):
        return replace(ROW, **{"run": run, "routing": "even", **changes})

    runs = [
        [row("1", name="base", median_ms=2.0), row("1", name="other", median_ms=1.0, low_ms=0.5, high_ms=1.5)],
        [row("2", name="other")],
        [row("3", name="base", device="Another")],
        [row("4", name="base", routing="odd")],
        [row("5", name="base", cache="uncontrolled")],
        [row("6", name="base", case="case 3"), row("6", name="third", case="case 2")],
    ]
    for rows in runs:
        record(rows, tmp_path)
    assert [found.name for found in newest_runs("H200", "base", "even", tmp_path)] == ["base", "other", "base"]
    assert [found.run for found in newest_runs("H200", "base", "even", tmp_path)] == ["1", "1", "6"]
    assert [found.run for found in newest_runs("H200", "other", "even", tmp_path)] == ["2"]
    assert newest_runs("H200", "missing", "even", tmp_path) == []
