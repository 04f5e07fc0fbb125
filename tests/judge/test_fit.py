"""Whether a file fits a C500, as the report says it: known refusals in words, equal reasons once."""

from collections.abc import Sequence
from typing import Any

import pytest

from moe_lab.judge import Report, fit, judge
from moe_lab.judge.fit import c500_fit
from moe_lab.judge.plan import Call, Group, Plan
from moe_lab.model.lowering import LoweredKernel, Lowering, LoweringError
from moe_lab.problem.errors import BackendError
from moe_lab.problem.submission import Submission
from moe_lab.steps import step

#: Tiles that no text tells, so every case is lowered by itself.
OPEN = Submission("def run_kernel(*args):\n    pass\n", "open.py")
TMA = (
    "InternalError: Check failed: (result.supported) is false: T.tma_copy() requires TMA-capable target and "
    "global<->shared copy pattern, but TMA is not available for src=gate_w, dst=weights_shared"
)


def lowered(monkeypatch: pytest.MonkeyPatch, *answers: list[LoweredKernel] | str | BackendError) -> fit.FitResult:
    """The fit of a file whose three cases get these answers, a text being what the compiler said."""

    def lower_many(asked: Sequence[Lowering], **options: Any) -> list[Any]:
        if [item.target for item in asked] == ["gfx90a"]:
            return [[kernel(1)]]
        assert [item.case.name for item in asked] == ["case 1", "case 2", "case 3"]
        if isinstance(answers[0], BackendError):
            raise answers[0]
        return [
            LoweringError("open.py", "sm_80", answer, f"{answer}\n  --> open.py:{number}:1")
            if isinstance(answer, str)
            else answer
            for number, answer in enumerate(answers)
        ]

    monkeypatch.setattr(fit, "lower_many", lower_many)
    monkeypatch.setattr(fit, "rulings", lambda submission: ())
    return c500_fit(OPEN)


def kernel(shared_bytes: int, threads: int = 256) -> LoweredKernel:
    return LoweredKernel("main", shared_bytes, threads, (1, 1, 1), 0, "")


def test_a_hopper_step_is_told_in_one_sentence_why_it_cannot_be_counted() -> None:
    plan = Plan((Group("uneven groups", 256, 256, (Call((3, 129, 0), 1),)),), variants=False)
    report = judge(step("h6"), profile="open", seed=1, plan=plan)
    assert report.accepted, report.sentence
    sentence = (
        "resources on a C500 (case 1, case 2, case 3), because h6_matrix_stores.py uses copies by the Tensor Memory "
        "Accelerator (TMA), which TileLang does not have for sm_80, the stand-in for the C500"
    )
    assert report.not_measured[0] == sentence
    text = " ".join(report.render().split())
    assert f"Not measured here: {sentence}; speed (no GPU);" in text
    assert "Check failed" not in text
    # What the compiler said stays in the JSON, in full and once.
    (message,) = Report.model_validate_json(report.to_json()).compiler_messages
    assert message.splitlines()[0] == TMA
    assert message.splitlines()[1].strip().startswith("--> h6_matrix_stores.py:")


def test_equal_reasons_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lowered(monkeypatch, TMA, "ValueError: got 3, expected 4", TMA)
    assert found.unknown == (
        "resources on a C500 (case 1, case 3), because open.py uses copies by the Tensor Memory Accelerator (TMA), "
        "which TileLang does not have for sm_80, the stand-in for the C500",
        "resources on a C500 (case 2), because open.py cannot be lowered for sm_80, the stand-in for the C500: "
        "ValueError: got 3, expected 4",
    )
    assert found.messages == (
        f"{TMA}\n  --> open.py:0:1", "ValueError: got 3, expected 4\n  --> open.py:1:1", f"{TMA}\n  --> open.py:2:1",
    )  # fmt: skip
    assert (found.lines, found.problems) == ((), ())


def test_a_long_message_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "InternalError: no rule for " + "buffer " * 100
    found = lowered(monkeypatch, long, long, long)
    (sentence,) = found.unknown
    assert sentence.startswith(
        "resources on a C500 (case 1, case 2, case 3), because open.py cannot be lowered for sm_80, the stand-in for "
        "the C500: InternalError: no rule for buffer buffer"
    )
    assert sentence.endswith(" buffer ... (the JSON report holds all of it)")
    assert len(sentence) < 400
    assert all(message.startswith(long) for message in found.messages)


def test_what_does_not_fit_is_said_once_for_equal_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lowered(
        monkeypatch, [kernel(65536), kernel(131072)], [kernel(65536), kernel(131072, threads=4096)],
        [kernel(65536), kernel(131072)],
    )  # fmt: skip
    assert found.problems == (
        "case 1, case 2, case 3, launch 2: needs 131072 bytes of shared memory, a block of the MetaX C500 has 65536: "
        "make a tile smaller, or keep fewer copies in flight",
        "case 2, launch 2: has 4096 threads per block, the MetaX C500 takes 2048",
    )
    assert found.lines == (
        "case 1, case 3: launch 1 takes 65536 of 65536 bytes shared, 256 threads; launch 2 takes 131072 of 65536 bytes "
        "shared, 256 threads (lowered for sm_80, a stand-in)",
        "case 2: launch 1 takes 65536 of 65536 bytes shared, 256 threads; launch 2 takes 131072 of 65536 bytes shared, "
        "4096 threads (lowered for sm_80, a stand-in)",
    )
    assert found.unknown == found.messages == ()


def test_a_compiler_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lowered(monkeypatch, BackendError("got no answer in 120 s for 3 lowerings"))
    assert found.unknown == ("resources on a C500: got no answer in 120 s for 3 lowerings",)


def narrow(columns: int) -> Submission:
    return step("s0").with_literals(STAGE1_BLOCK_N=columns)


def test_what_neither_stand_in_can_have_is_refused_and_a_vendors_argument_is_not() -> None:
    found = c500_fit(narrow(7))
    assert found.hopeless
    assert not found.lines
    assert "neither for sm_80 nor for gfx90a" in found.refused
    assert "got 7" in found.refused
    lines = step("s0").source.splitlines()
    gemms = [number for number, line in enumerate(lines, 1) if "T.gemm(" in line]
    assert f"(T.gemm in line {', '.join(map(str, gemms))})" in found.refused
    packed = Submission(
        step("s0").source.replace("gate_acc, transpose_B=True)", "gate_acc, transpose_B=True, k_pack=2)")
    )
    found = c500_fit(packed)
    assert not found.refused
    assert not found.unknown
    assert len(found.lines) == 1


def test_a_hopeless_file_is_no_accepted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan((Group("uneven groups", 256, 256, (Call((3, 129, 0), 1),)),), variants=False)
    for hopeless, verdict in ((True, "compile_error"), (False, "accepted")):
        said = fit.FitResult(refused="TileLang says no", hopeless=hopeless)
        monkeypatch.setattr("moe_lab.judge.local.c500_fit", lambda submission, said=said: said)
        report = judge(step("s0"), seed=1, plan=plan)
        assert report.verdict == verdict
        assert "TileLang says no" in report.sentence


def test_what_only_the_cpu_cannot_compile_is_no_fault_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan((Group("uneven groups", 256, 256, (Call((3, 129, 0), 1),)),), variants=False)
    wrong = Submission(step("s0").source.replace("T.clear(gate_acc)", "T.clear(gate_acc, 1)"), "wrong.py")
    for lines, verdict in (((), "compile_error"), (("fits",), "judge_error")):
        monkeypatch.setattr("moe_lab.judge.local.c500_fit", lambda submission, lines=lines: fit.FitResult(lines=lines))
        report = judge(wrong, seed=1, plan=plan)
        assert report.verdict == verdict, report.sentence
