"""Real kernels through the whole judge: honest files in other styles, and the baseline with one thing changed."""

from dataclasses import replace
from pathlib import Path

import pytest

from moe_lab.judge import Report, judge
from moe_lab.judge.plan import Call, Group, Plan
from moe_lab.problem.submission import Submission
from moe_lab.steps import step

HONEST = sorted((Path(__file__).parent.parent / "honest").glob("*.py"))


def small_plan(**options: object) -> Plan:
    """Two calls of three experts, one empty, with every poison: one compilation."""
    calls = (
        Call((3, 129, 0), 11, out_fill="noise"),
        Call((129, 0, 3), 12, out_fill="nan", values="mixed", slot=1),
        Call((129, 0, 3), 13, change="nothing", slot=1),
    )
    group = Group("uneven groups", 256, 256, calls, garbage="nan")
    plan = Plan((group,), stop_at_first=True, variants=False, fit=False)
    return replace(plan, **options)  # type: ignore[arg-type]


def changed(*edits: tuple[str, str]) -> Submission:
    """The baseline with some text replaced."""
    baseline = step("s0_baseline")
    source = baseline.source
    for old, new in edits:
        assert old in source, old
        source = source.replace(old, new)
    return Submission(source, "changed.py")


def run(submission: Submission | Path, **options: object) -> Report:
    return judge(submission, seed=3, plan=small_plan(**options))


@pytest.mark.parametrize("path", HONEST, ids=[path.stem for path in HONEST])
def test_honest_files_in_other_styles_are_accepted(path: Path) -> None:
    report = run(path)
    assert report.accepted, report.sentence
    assert report.cases[0].repeat == "same bits"


STORE = "out[block_start + i, by * STAGE2_BLOCK_N + j] = out_acc[i, j] * routed_expert_weights[raw_start + i]"
MASKED_STORE = f"if i < actual_rows:\n                    {STORE}"
MISTAKES = {
    "route weight missing": (
        [(" * routed_expert_weights[raw_start + i]", "")], "wrong_answer", "the route weight is missing",
    ),
    "route weight at the padded row": (
        [("raw_start = group_offsets[expert] + rows_before", "raw_start = block_start")],
        "wrong_answer", "read at the padded row",
    ),
    "next expert": (
        [(f"{name}_w[expert,", f"{name}_w[(expert + 1) % num_experts,") for name in ("gate", "up", "down")],
        "wrong_answer", "the next expert's weights are used",
    ),
    "last row dropped": (
        [(MASKED_STORE, MASKED_STORE.replace("actual_rows", "actual_rows - 1"))],
        "wrong_answer", "not written, out still holds what it held before the call",
    ),
    "gate and up swapped": (
        [("T.copy(gate_w[", "T.copy(XX["), ("T.copy(up_w[", "T.copy(gate_w["), ("T.copy(XX[", "T.copy(up_w[")],
        "wrong_answer", "gate and up are swapped",
    ),
    "log2(e) missing": ([("LOG2_E = 1.44269504", "LOG2_E = 1.0")], "wrong_answer", "without the factor log2(e)"),
    "last K step missing": (
        [("T.Pipelined(T.ceildiv(hidden, STAGE1_BLOCK_K),", "T.Pipelined(T.ceildiv(hidden, STAGE1_BLOCK_K) - 1,")],
        "wrong_answer", "128 of hidden",
    ),
    "padding times zero": (
        [(MASKED_STORE, STORE + " * T.if_then_else(i < actual_rows, 1.0, 0.0)")],
        "wrong_answer", "multiplying by a zero mask keeps NaN",
    ),
    "one block too far": (
        [("out[block_start + i,", "out[block_start + 128 + i,")],
        "wrong_answer", "the result is written one block too far",
    ),
    "fp16 route weights declared": (
        [('routed_expert_weights: T.Tensor((total_valid_tokens,), "float32")',
          'routed_expert_weights: T.Tensor((total_valid_tokens,), "float16")')],
        "contract_error", "Buffer dtype mismatch for parameter routed_expert_weights",
    ),
    "unknown TileLang name": ([("T.clear(out_acc)", "T.cleanse(out_acc)")], "compile_error", "cleanse"),
    "shapes that do not multiply": (
        [("alloc_shared((STAGE2_BLOCK_N, STAGE2_BLOCK_K)", "alloc_shared((STAGE2_BLOCK_N, 64)")],
        "compile_error", "could not compile the kernel",
    ),
    "no meaning on a CPU": (
        [("T.clear(out_acc)", "T.tvm_mfma(out_acc)")], "judge_error", "says nothing about the file: got T.tvm_mfma",
    ),
    "pipelined": ([("NUM_STAGES = 1", "NUM_STAGES = 2")], "rule_violation", "explain async-copy"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_changed_baseline_is_rejected_by_name(name: str) -> None:
    edits, verdict, says = MISTAKES[name]
    report = run(changed(*edits))
    assert str(report.verdict) == verdict, report.sentence
    assert says in report.sentence


def test_a_wrong_declaration_is_shown_where_it_is_declared() -> None:
    report = run(changed(*MISTAKES["fp16 route weights declared"][0]))
    declared = 'routed_expert_weights: T.Tensor((total_valid_tokens,), "float16")'
    assert report.line is not None
    assert declared in report.excerpt[report.line]
    assert report.remedy.endswith("declare what the contest passes, float32 of shape (N).")


def test_other_cards_may_pipeline() -> None:
    pipelined = changed(("NUM_STAGES = 1", "NUM_STAGES = 2"))
    report = judge(pipelined, profile="open", seed=3, plan=small_plan(fit=True))
    assert report.accepted, report.sentence
    found = [finding for finding in report.findings if finding.rule_id == "async-copy"]
    assert {finding.level for finding in found} == {"advice"}
    # The launches show the same stages: said once, at their line.
    assert all(finding.line is not None for finding in found), found


def test_weights_kept_inside_the_sandbox_are_caught_by_running() -> None:
    """Under the open profile the ruling is only advice; the answer gives the file away."""
    kept = changed(
        ("    up_logits = ", '    WORKSPACES.setdefault("gate", gate_w.clone())\n    up_logits = '),
        ("        stacked_expert_tokens, gate_w, up_w", '        stacked_expert_tokens, WORKSPACES["gate"], up_w'),
    )
    report = judge(kept, profile="open", seed=3, plan=small_plan())
    assert str(report.verdict) == "wrong_answer", report.sentence
    assert "computed with gate_w of call 1: they are kept from an earlier call" in report.sentence


def test_too_much_shared_memory_is_a_resource_error_in_the_contest_only() -> None:
    wide = changed(("STAGE1_BLOCK_N = 128", "STAGE1_BLOCK_N = 256"))
    report = run(wide, fit=True)
    assert str(report.verdict) == "resource_error", report.sentence
    assert "needs 131072 bytes of shared memory, a block of the MetaX C500 has 65536" in report.sentence
    report = judge(wide, profile="open", seed=3, plan=small_plan(fit=True))
    assert report.accepted, report.sentence
    assert any(line.startswith("does not fit: ") for line in report.fit)
