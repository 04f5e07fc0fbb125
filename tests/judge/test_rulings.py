"""Rulings about kernels hold however a file spells what it launches, because TileLang spells it out."""

from __future__ import annotations

import pytest

from moe_lab.judge import judge, rules
from moe_lab.judge.plan import Call, Group, Plan
from moe_lab.judge.rulings import rulings
from moe_lab.problem.errors import SubmissionError
from moe_lab.problem.submission import Submission
from moe_lab.steps import step

BASELINE = step("s0_baseline").source
PIPELINED = "T.Pipelined(T.ceildiv(hidden, STAGE1_BLOCK_K), num_stages=NUM_STAGES)"
CLEAR = "T.clear(gate_acc)"
BUILD = "def _moe_forward_kernel("


def changed(old: str, new: str) -> Submission:
    assert old in BASELINE, old
    return Submission(BASELINE.replace(old, new))


STEPS_OF_K = "T.ceildiv(hidden, STAGE1_BLOCK_K)"
STAGES = {
    "arithmetic": (PIPELINED, f"T.Pipelined({STEPS_OF_K}, num_stages=hidden // hidden + 1)"),
    "conditional": (PIPELINED, f"T.Pipelined({STEPS_OF_K}, num_stages=1 if hidden > 4096 else 2)"),
    "tuple": (PIPELINED, f"T.Pipelined({STEPS_OF_K}, num_stages=(1, 3)[1])"),
    "dictionary": (PIPELINED, f"T.Pipelined({STEPS_OF_K}, **{{'num' + '_stages': 2}})"),
    "starred": (PIPELINED, f"T.Pipelined(*(0, {STEPS_OF_K}, 2))"),
    "annotation": (PIPELINED, f"T.serial({STEPS_OF_K}, annotations={{'num_' + 'stages': 2}})"),
    "stage list": (PIPELINED, f"T.Pipelined({STEPS_OF_K}, order=[0, 1, 2, 3, 4], stage=[0, 0, 1, 1, 1])"),
}


@pytest.mark.parametrize("how", STAGES)
def test_stages_however_written(how: str) -> None:
    submission = changed(*STAGES[how])
    assert not [found for found in rules.check(submission) if found.level == "violation"]
    ((rule_id, what),) = rulings(submission)
    assert rule_id == "async-copy"
    assert "launch 1 of moe_forward: " in what


CALLS = {
    "T.ptx_commit_group()": "async-copy",
    "T.evaluate(T.call_intrin('handle', 'tirx.ptx_' + 'commit_group'))": "async-copy",
    "T.evaluate(T.call_extern('int32', 'f'))": "device-source",
    "T.evaluate(T.call_intrin('int32', 'tirx.call_pure_' + 'extern', 'f'))": "device-source",
    "T.import_source('int f();')": "device-source",
}


@pytest.mark.parametrize("text", CALLS)
def test_intrinsics_however_named(text: str) -> None:
    submission = changed(CLEAR, f"{CLEAR}\n            {text}")
    found = {item.rule_id for item in rules.check(submission) if item.level == "violation"}
    # What the text shows for certain needs no reading of kernels.
    found = found or {rule_id for rule_id, _ in rulings(submission)}
    assert CALLS[text] in found


def test_the_pass_that_makes_copies_asynchronous() -> None:
    passes = "pass_configs={tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True"
    assert passes in BASELINE
    assert {rule_id for rule_id, _ in rulings(changed(passes, passes + ", 'tl.enable_' + 'async_copy': True"))} == {
        "async-copy"
    }
    assert rulings(changed(passes, passes + ", 'tl.enable_' + 'async_copy': False")) == ()


def test_a_kernel_that_no_call_launches_is_not_counted() -> None:
    unused = "\n\n@tilelang.jit\ndef unused(n):\n    stages = n + 1\n    return stages\n"
    assert rulings(Submission(BASELINE + unused)) == ()


def test_what_cannot_be_followed_is_no_ruling() -> None:
    with pytest.raises(SubmissionError, match="cannot be followed"):
        rulings(changed("def run_kernel(", "def other("))


def test_a_verdict_waits_for_the_rulings() -> None:
    group = Group("one", 128, 128, (Call((3, 129), 11),))
    plan = Plan((group,), stop_at_first=True, variants=False)
    report = judge(changed(*STAGES["arithmetic"]), seed=3, plan=plan)
    assert str(report.verdict) == "rule_violation", report.sentence
    assert "launch 1 of moe_forward: got num_stages=2" in report.sentence
    assert "explain async-copy" in report.sentence
