import json

import pytest

from moe_lab.machine.devices import device, reported_as
from moe_lab.problem.contract import CASES, Case
from moe_lab.problem.errors import ContractError, SubmissionError
from moe_lab.problem.submission import Submission
from moe_lab.speed import autotune
from moe_lab.steps import step

CASE = Case("tiny", 2, 128, 128, 150)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_rows_of_a_block_are_never_offered():
    found = autotune.offers(step("s0"))
    assert "BLOCK_M" not in found
    assert 64 in found["STAGE1_BLOCK_K"]


def test_a_name_without_a_choice_is_named():
    with pytest.raises(ContractError, match="got LOG2_E, expected literals with a choice: "):
        autotune.offers(step("s0"), ["LOG2_E"])


def test_the_resource_model_prunes_before_the_compiler():
    c500 = device("C500")
    two_stages = step("s0").with_literals(NUM_STAGES=2)
    assert "131072 bytes of shared memory" in autotune.why_not(two_stages, CASES[1], (142,) * 16, c500)
    assert autotune.why_not(step("s0"), CASES[1], (142,) * 16, c500) == ""


ENTRY = "def run_kernel(x, gate_w, up_w, down_w, weights, sizes, offsets, padded, blocks, out):\n"


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("x = 1\n", SubmissionError, "got no function run_kernel in bad.py"),
        ("BLOCK_K = 64\n", SubmissionError, "got no function run_kernel in bad.py"),
        ("BLOCK_K = (\n", SubmissionError, r"bad.py, line 1, column 11: '\(' was never closed"),
        ("import nothing_here\n", SubmissionError, "bad.py cannot be loaded: ModuleNotFoundError"),
        ("raise SystemExit(0)\n", SubmissionError, "bad.py cannot be loaded: SystemExit: 0"),
        (ENTRY + "    out.zero_()\n", SubmissionError, "got no literal with a choice in bad.py"),
        ("BLOCK_K = 64\n" + ENTRY + "    out.zero_()\n", ContractError, r"got bad.py, .*\(wrong result: \d+ elements"),
        ("BLOCK_K = 64\n" + ENTRY + "    raise SystemExit(0)\n", ContractError, r"got bad.py, .*\(run_kernel ends"),
        (step("s0").source.replace("T.gemm(", "T.gemmm("), ContractError, r"got bad.py, which does not run .*T\.gemmm"),
    ],
)
def test_a_source_that_cannot_be_tuned_is_refused_and_nothing_is_remembered(text, error, says, tmp_path):
    with pytest.raises(error, match=f"^{says}"):
        autotune.tune(Submission(text, "bad.py"), CASE, rounds=1)
    assert not list(tmp_path.rglob("*.json"))


def test_what_was_found_is_said_though_it_cannot_be_kept(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    lines: list[str] = []
    result = autotune.tune(step("s0"), CASE, names=["STAGE1_PANEL"], rounds=1, say=lines.append)
    assert result.timed >= 1
    assert lines[-1].startswith("fused_moe will not find this again: ")


def test_a_search_ends_with_what_it_timed_and_is_found_again():
    source = step("s0")
    lines: list[str] = []
    result = autotune.tune(source, CASE, names=["STAGE1_BLOCK_N"], rounds=2, say=lines.append)
    offered = len(autotune.offers(source, ["STAGE1_BLOCK_N"])["STAGE1_BLOCK_N"]) - 1
    assert result.timed + result.failed + result.pruned == offered
    assert result.timed >= 2
    assert result.median_ms > 0
    assert set(result.values) <= {"STAGE1_BLOCK_N"}
    assert autotune.tuned(source, CASE).values == source.values | result.values
    assert json.loads(autotune.cache_file(source, CASE).read_text())["values"] == result.values


@pytest.mark.gpu
def test_a_search_on_a_gpu_drops_what_its_figures_rule_out():
    source, case = step("h1"), Case("on a GPU", 2, 512, 256, 300)
    lines: list[str] = []
    result = autotune.tune(source, case, names=["BLOCK_K"], rounds=3, say=lines.append)
    assert result.timed + result.failed + result.pruned == len(autotune.offers(source, ["BLOCK_K"])["BLOCK_K"]) - 1
    assert result.timed >= 1, lines
    if reported_as(autotune.backend.detect().name) is not None:
        # Four tiles in flight of 384 rows and 128 columns would take 384 KiB, twice as wide ones 768.
        assert [line.partition(" pruned")[0] for line in lines if "pruned" in line] == ["BLOCK_K=128", "BLOCK_K=256"]
    assert 0 < result.median_ms <= result.source_ms
    assert autotune.tuned(source, case).values == source.values | result.values


def keep(text):
    path = autotune.cache_file(step("s0"), CASE)
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_another_source_or_shape_is_another_entry(monkeypatch):
    source = step("s0")
    keep(json.dumps({"values": {"STAGE2_BLOCK_N": 64}}))
    assert autotune.tuned(source, CASE).values["STAGE2_BLOCK_N"] == 64
    assert autotune.tuned(source, Case("other", 2, 256, 128, 150)) is source
    other = source.with_literals(STAGE1_PANEL=4)
    assert autotune.tuned(other, CASE) is other
    monkeypatch.setattr(autotune.backend, "versions", lambda: {"tilelang": "another"})
    assert autotune.tuned(source, CASE) is source


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"values": {"NO_SUCH": 1}}', '{"values": 3}'])
def test_a_broken_cache_is_no_cache(text):
    source = step("s0")
    keep(text)
    assert autotune.tuned(source, CASE) is source
