import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from moe_lab.machine.timing import Measurement, measurements, record, summarise
from moe_lab.model.roofline import work
from moe_lab.problem.contract import CASES, Case
from moe_lab.problem.errors import ContractError, DataError, SubmissionError
from moe_lab.problem.inputs import group_sizes, make_inputs
from moe_lab.problem.reference import fused_truth
from moe_lab.problem.routings import routings
from moe_lab.speed import bench
from moe_lab.speed.bench import CPU_CASE, Candidate, bound_ms, render, summary, summary_rows
from moe_lab.speed.peers import PEERS, Peer
from moe_lab.steps import STEPS, find, step

TINY = Case("tiny", 3, 64, 32, 9)
#: I below H and above it: the route weight goes to the smaller side.
ODD = Case("odd", 3, 32, 64, 9)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measurements")
    said = []
    rows = bench.run(steps=["s0"], rounds=2, folder=folder, say=said.append)
    return rows, said, folder


def test_a_cpu_runs_a_small_case_checked_recorded_and_labelled(recorded):
    rows, said, folder = recorded
    assert measurements(folder) == rows
    assert {row.case for row in rows} == {CPU_CASE.name}
    assert {row.kind for row in rows} == {"step", "peer", "roof"}
    step = next(row for row in rows if row.kind == "step")
    assert step.error < 2e-3
    assert step.cache == "uncontrolled"
    assert step.flops == 6 * CPU_CASE.hidden * CPU_CASE.intermediate * CPU_CASE.num_tokens
    assert "tilelang=" in step.versions
    assert any("says nothing about a GPU" in line for line in said)
    assert any("QuACK" in line and "needs a CUDA GPU" in line for line in said)


def test_no_cpu_run_reaches_the_summary(recorded):
    with pytest.raises(DataError, match="no recorded GPU run"):
        summary(recorded[2])


def test_a_contest_case_on_a_cpu_is_refused_and_nothing_is_recorded(tmp_path):
    with pytest.raises(ContractError, match="a CPU would need hours"):
        bench.run(cases=[1], folder=tmp_path)
    with pytest.raises(SubmissionError, match="got step 's99'"):
        bench.run(steps=["s99"], folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_exist_is_named_before_anything_else_is_said(tmp_path):
    said: list[str] = []
    for options, error, says in (
        ({"routing": "flat"}, ContractError, "got routing 'flat' for .*, expected one of balanced, multinomial-0, "),
        # Of a shape made by hand only the contest's cases have one.
        ({"routing": "empty half"}, ContractError, "got routing 'empty half' for .* one_expert$"),
        ({"steps": []}, SubmissionError, "got no step, expected one or more of s0_baseline, "),
        ({"cases": [9]}, ContractError, "got a contest case" if not torch.cuda.is_available() else "got case 9"),
    ):
        with pytest.raises(error, match=says):
            bench.run(**{"steps": ["s0"], "folder": tmp_path, "say": said.append, **options})
    assert said == []
    assert list(tmp_path.iterdir()) == []


def test_a_routing_means_its_recorded_sizes_or_the_same_draw_for_another_case():
    for row in routings():
        assert bench._sizes(CASES[row.case], row.name) == row.sizes
    assert bench._sizes(CPU_CASE, "skewed-1") == group_sizes("skewed", CPU_CASE.num_experts, CPU_CASE.num_tokens, 1)
    with pytest.raises(
        ContractError, match=r"got routing 'multinomial-9' for case 1, expected one of balanced, .*empty half"
    ):
        bench._sizes(CASES[1], "multinomial-9")


def test_the_help_names_the_routings_that_there_are():
    done = subprocess.run(
        [sys.executable, "-m", "moe_lab", "bench", "--help"], capture_output=True, text=True, check=True
    )
    text = " ".join(done.stdout.replace("│", " ").split())
    assert "balanced, multinomial-0 to -2, skewed-0, skewed-1 or one_expert; on a GPU also" in text
    drawn = [row.name for row in routings() if row.case == 1 and row.distribution != "edge"]
    assert drawn == ["balanced", *(f"multinomial-{n}" for n in range(3)), "skewed-0", "skewed-1", "one_expert"]
    assert "empty half" in {row.name for row in routings()}


@pytest.mark.parametrize("case", [TINY, ODD])
@pytest.mark.parametrize("peer", [peer for peer in PEERS if not peer.needs_gpu], ids=lambda peer: peer.name)
@pytest.mark.parametrize("sizes", [(4, 0, 5), (0, 9, 0)])
def test_every_peer_computes_the_same_operator(peer, case, sizes):
    inputs = make_inputs(case, sizes, seed=3)
    call = peer.prepare(inputs)
    truth = fused_truth(inputs)
    first = call().clone()
    assert torch.allclose(first.float(), truth, atol=0.03, rtol=0.03)
    # Nothing of the inputs is spent: a second call gives the same.
    assert torch.equal(call(), first)


def test_a_peer_says_what_is_missing():
    peer = Peer("nobody's library", "no-such-distribution-of-anybody", False, lambda inputs: inputs)
    assert peer.missing(has_gpu=True) == "not installed (`pip install no-such-distribution-of-anybody`)"
    assert replace(peer, needs_gpu=True).missing(has_gpu=False) == "needs a CUDA GPU"
    assert replace(peer, package="torch").missing(has_gpu=False) == ""


def test_a_peer_that_does_not_get_ready_is_left_out_and_the_others_are_measured(monkeypatch):
    def endless(inputs):
        while True:
            time.sleep(0.01)

    peers = (Peer("an endless library", "torch", False, endless), *(peer for peer in PEERS if "loop" in peer.name))
    monkeypatch.setattr(bench, "PEERS", peers)
    monkeypatch.setattr(bench, "_READY_S", 3.0)
    handler = signal.getsignal(signal.SIGALRM)
    said = []
    timed = bench.time_case(CPU_CASE, (142, 142, 142, 142), 0, {}, 1, said.append)
    assert [candidate.kind for candidate, _, _ in timed] == ["peer", "roof", "roof"]
    assert f"{CPU_CASE.name}: an endless library left out: TimeoutError: not ready after 3 s" in said
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.gpu
def test_a_gpu_times_steps_peers_and_roofs_in_turns():
    case = Case("on a GPU", 4, 512, 256, 427)
    said: list[str] = []
    rungs = {find(name).name: step(name) for name in ("s0", "h1", "h6")}
    timed = bench.time_case(case, (1, 0, 300, 126), 0, rungs, 3, said.append)
    names = [candidate.name for candidate, _, _ in timed]
    assert names[:3] == ["s0_baseline", "h1_pipelined", "h6_matrix_stores"], said
    assert {"torch loop over experts (fp16)", "torch grouped_mm (bf16)"} <= set(names), said
    assert [candidate.kind for candidate, _, _ in timed][-2:] == ["roof", "roof"]
    for candidate, timing, error in timed:
        assert timing.cache == "cold"
        assert len(timing.times_ms) == 3
        if candidate.kind == "step":
            assert error is not None
            assert error < 2e-3
    # No card of today reaches 10 PFLOP/s or 100 TB/s, and none that has both is as slow as a processor.
    matmul, copy = ((candidate, timing) for candidate, timing, _ in timed[-2:])
    assert 20 < matmul[0].flops / matmul[1].median_ms / 1e9 < 10_000
    assert 0.1 < copy[0].bytes / copy[1].median_ms / 1e9 < 100


def candidate(result):
    return Candidate("peer", "x", None, (), 1, 1, kept={0: result})


def test_a_run_cut_short_keeps_the_cases_that_are_done(monkeypatch, tmp_path):
    def time_case(case, *rest):
        if case == CASES[2]:
            raise KeyboardInterrupt
        candidate = Candidate("step", "s0_baseline", "aa", (), 10, 10)
        return [(candidate, summarise("s0_baseline", [1.0, 2.0], device="d", cache="cold"), 1e-4)]

    here = bench.backend.detect()
    monkeypatch.setattr(bench.backend, "prepare", lambda: replace(here, kind="cuda", name="a GPU"))
    monkeypatch.setattr(bench, "time_case", time_case)
    monkeypatch.setattr(bench, "render", lambda rows: [])
    with pytest.raises(KeyboardInterrupt):
        bench.run(cases=[1, 2, 3], steps=["s0_baseline"], folder=tmp_path, say=lambda line: None)
    assert [(row.case, row.name, row.median_ms) for row in measurements(tmp_path)] == [("case 1", "s0_baseline", 1.5)]


def test_a_wrong_result_is_left_out_with_its_place():
    truth = torch.ones(4, 3)
    assert bench._check(candidate(truth.half() * 1.01), [truth]) == ("", pytest.approx(0.01, rel=0.05))
    wrong = truth.clone()
    wrong[2, 1] = 2.0
    said, _ = bench._check(candidate(wrong), [truth])
    assert "1 elements outside the tolerance, the first at row 2, column 1: 2 instead of 1" in said
    wrong[2, 1] = float("nan")
    assert "row 2, column 1: nan" in bench._check(candidate(wrong), [truth])[0]
    assert "expected (4, 3)" in bench._check(candidate(truth[:2]), [truth])[0]


def rows_of(run, case, ours_ms, peer_ms, device="NVIDIA H200", routing="multinomial-0"):
    done = work(case).whole

    def row(kind, name, time_ms, flops, moved, source_hash=None):
        return Measurement(
            run=run, recorded_at="2026-11-29T00:00:00+00:00", device=device, driver="1", versions="x=1", kind=kind,
            name=name, source_hash=source_hash, case=case.name, num_experts=case.num_experts, hidden=case.hidden,
            intermediate=case.intermediate, num_tokens=case.num_tokens, routing=routing, seed=0, cache="cold", rounds=9,
            median_ms=time_ms, low_ms=time_ms, high_ms=time_ms, flops=flops, bytes=moved, error=None,
        )  # fmt: skip

    return [
        row("step", "s0_baseline", 2.0, done.flops, int(done.bytes), "aa"),
        row("step", "h3_best", ours_ms, done.flops, int(done.bytes), "bb"),
        row("peer", "a library", peer_ms, done.flops, int(done.bytes)),
        row("peer", "a slow library", 9.0, done.flops, int(done.bytes)),
        row("roof", "dense matmul, float16 8192^3", 1.0, 706_000_000_000, 1),
        row("roof", "large copy, 4096 MiB", 1.0, 0, 4_300_000_000),
    ]


def test_the_bound_is_the_larger_of_the_two_roofs():
    rows = rows_of("r", CASES[1], 0.42, 0.52)
    done = work(CASES[1]).whole
    assert (
        bound_ms(rows) == pytest.approx(max(done.flops / 706e9, done.bytes / 4.3e9)) == pytest.approx(0.396, rel=0.01)
    )
    with pytest.raises(DataError, match="without both roofs"):
        bound_ms(rows[:-1])
    with pytest.raises(DataError, match="nothing else"):
        bound_ms(rows[-2:])


def test_a_disturbed_roof_does_not_flatter():
    rows = rows_of("r", CASES[1], 0.42, 0.52)
    disturbed = [replace(row, median_ms=1.2, high_ms=1.4) if row.name.startswith("large copy") else row for row in rows]
    assert bound_ms(disturbed) == bound_ms(rows)


def test_the_summary_gives_the_median_ratio_over_the_complete_runs_and_its_extremes(tmp_path):
    for run, ours_ms, peer_ms in (("1", 0.44, 0.55), ("2", 0.42, 0.52), ("3", 0.48, 0.54)):
        record(rows_of(f"2026010{run}T000000Z-aaaaaa", CASES[1], ours_ms, peer_ms), tmp_path)
    # Without a roof, with another routing or on another device: none of them counts beside the newest.
    record(rows_of("20260104T000000Z-aaaaaa", CASES[1], 0.10, 0.50)[:-1], tmp_path)
    record(rows_of("20260105T000000Z-aaaaaa", CASES[1], 0.10, 0.50, routing="one_expert"), tmp_path)
    elsewhere = rows_of("20251231T000000Z-aaaaaa", CASES[1], 0.10, 0.50)
    record([replace(row, device="NVIDIA H100") for row in elsewhere], tmp_path)
    record(rows_of("20260106T000000Z-aaaaaa", CASES[3], 1.50, 1.73), tmp_path)
    bound = bound_ms(rows_of("r", CASES[1], 0.42, 0.52))
    first, third = summary(tmp_path)
    assert first.startswith(
        f"case 1 bound_ratio={0.44 / bound:.3f} [{0.42 / bound:.3f} to {0.48 / bound:.3f}, 3 runs] "
        f"vs_best_peer={0.52 / 0.42:.3f} [{0.54 / 0.48:.3f} to {0.55 / 0.44:.3f}, 3 runs] NVIDIA H200; "
    )
    assert first.endswith(
        f"run 20260103T000000Z-aaaaaa: h3_best 0.4800 ms = {0.48 / bound:.3f} x bound {bound:.4f} ms, best peer "
        "a library 0.5400 ms = 1.125 x h3_best"
    )
    assert third.startswith("case 3 bound_ratio=1.080 [1.080 to 1.080, 1 run] vs_best_peer=1.153 ")


def test_a_run_of_fewer_steps_counts_for_the_ratios_and_does_not_stand_for_the_ladder(tmp_path):
    record(rows_of("20260101T000000Z-aaaaaa", CASES[1], 0.42, 0.52), tmp_path)
    record(rows_of("20260102T000000Z-bbbbbb", CASES[1], 0.44, 0.52)[1:], tmp_path)
    assert {row.run for row in summary_rows(tmp_path)} == {"20260101T000000Z-aaaaaa"}
    assert "2 runs]" in summary(tmp_path)[0]


def test_a_run_without_the_recommended_step_does_not_count(tmp_path):
    old = rows_of("20260101T000000Z-aaaaaa", CASES[1], 0.42, 0.52)
    best = next(name for name, entry in STEPS.items() if entry.recommended and entry.branch == "hopper")
    record([replace(row, name=best) if row.name == "h3_best" else row for row in old], tmp_path)
    record(rows_of("20260102T000000Z-bbbbbb", CASES[1], 0.10, 0.52), tmp_path)
    (line,) = summary(tmp_path)
    assert f"bound_ratio={0.42 / bound_ms(old):.3f} [" in line
    assert "1 run]" in line
    assert {row.run for row in summary_rows(tmp_path)} == {"20260101T000000Z-aaaaaa"}


def test_the_best_peer_is_the_fastest_known_even_beside_an_older_step_which_is_named(tmp_path):
    old = rows_of("20260101T000000Z-aaaaaa", CASES[1], 0.50, 0.60)
    library = next(row for row in old if row.kind == "peer")
    record([*old, replace(library, name="a faster library", median_ms=0.55, low_ms=0.55, high_ms=0.55)], tmp_path)
    best = next(name for name, entry in STEPS.items() if entry.recommended and entry.branch == "hopper")
    new = rows_of("20260102T000000Z-bbbbbb", CASES[1], 0.44, 0.60)
    record([replace(row, name=best) if row.name == "h3_best" else row for row in new], tmp_path)
    assert {row.run for row in summary_rows(tmp_path)} == {"20260102T000000Z-bbbbbb"}
    (line,) = summary(tmp_path)
    assert line.startswith(f"case 1 bound_ratio={0.44 / bound_ms(new):.3f} [")
    assert f" vs_best_peer={0.55 / 0.50:.3f} [" in line
    assert line.endswith(
        "best peer a faster library 0.5500 ms = 1.100 x h3_best 0.5000 ms in run 20260101T000000Z-aaaaaa"
    )


def test_lines_are_aligned_fastest_first_with_the_bound(recorded):
    lines = render(rows_of("r", CASES[1], 0.42, 0.52))
    assert [line.split()[0] for line in lines[2:5]] == ["h3_best", "a", "s0_baseline"]
    assert "1.06" in lines[2]
    assert lines[-1].startswith("bound, roofs at their fast ends")
    assert len({line.index("-") for line in lines[2:5]}) == 1


def test_a_cpu_has_no_bound_that_something_could_beat(recorded):
    lines = render(recorded[0])
    assert lines == recorded[1][-1 - len(lines) : -1]
    assert not any("bound" in line for line in lines)
    assert lines[1].split()[-2:] == ["GB/s", "error"]
    step = next(line for line in lines if line.startswith("s0_baseline"))
    assert lines[1].index("error") + len("error") == len(step)
