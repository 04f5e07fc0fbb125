"""The judge from outside: broken files, reports, replay, exit codes, and failures of the judge itself."""

import errno
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from IPython.lib.pretty import pretty
from rich.console import Console
from typer.testing import CliRunner

from moe_lab import cli
from moe_lab.judge import Report, Verdict, judge
from moe_lab.judge import local as judging
from moe_lab.judge.plan import Call, Group, Plan, call_inputs, contest_groups, default_plan, state_group
from moe_lab.judge.rules import RULES
from moe_lab.judge.verdict import CaseReport, Failure, FindingReport, VariantReport
from moe_lab.problem.contract import CASES
from moe_lab.problem.errors import SubmissionError
from moe_lab.problem.submission import Submission
from moe_lab.steps import step

EXPLOITS = Path(__file__).parent.parent / "exploits"
SIGNATURE = (
    "def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights, group_sizes, group_offsets,\n"
    "               group_padded_offsets, group_idx_for_bx, out):\n"
)
BROKEN = {
    "missing": (None, "contract_error", "got no file"),
    "empty": (b"", "contract_error", "empty file"),
    "only a byte order mark": (b"\xef\xbb\xbf\n", "contract_error", "empty file"),
    "not UTF-8": ("def run_kernel(): 'é'".encode("latin-1"), "contract_error", "not UTF-8"),
    "binary": (bytes(range(256)) * 8, "contract_error", "not UTF-8"),
    "NUL byte": (SIGNATURE.encode() + b"    pass\0\n", "compile_error", "null byte"),
    "syntax error": (SIGNATURE.encode() + b"    out[0] ==== 1\n", "compile_error", "line 3"),
    "bad indentation": (SIGNATURE.encode() + b"pass\n", "compile_error", "expected an indented block"),
    "return outside a function": (b"return 1\n", "compile_error", "'return' outside function"),
    "nested too deeply": (b"x = " + b"(" * 5000 + b")" * 5000, "compile_error", "nested"),
    "long chain": (b"x = " + b"-" * 100_000 + b"1", "compile_error", "cannot be|nested"),
    "huge": (b"# " + b"x" * (2 << 20), "contract_error", "expected at most 1048576"),
    "no run_kernel": (b"def kernel():\n    pass\n", "contract_error", "run_kernel"),
    "run_kernel is a number": (b"run_kernel = 3\n", "contract_error", "run_kernel"),
}


def small_plan(seed: int = 0) -> Plan:
    calls = (Call((3, 129, 0), seed), Call((3, 129, 0), seed + 1, change="nothing"))
    return Plan((Group("uneven groups", 256, 256, calls),), variants=False, fit=False)


def test_a_broken_rule_is_said_once_and_well(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("x = 1\n")
    report = judge(path)
    assert report.sentence == (
        "line 1, column 1: got no function run_kernel. The file must define a function run_kernel at module level; "
        "`moe-lab explain entry-missing` says why"
    )
    assert " ".join(report.render().split()).count("got no function run_kernel") == 1
    path.write_text("import os\nimport sys\n" + SIGNATURE + "    class A:\n        pass\n")
    report = judge(path)
    assert report.sentence.endswith(" (and 2 more); `moe-lab explain import-root` says why")
    text = " ".join(report.render().split())
    assert text.count("got `import os`") == text.count("got `class A: pass`") == 1
    assert "violation import-root: line 1, column 1: see above (also line 2)" in text
    assert "violation class-definition: line 5, column 5: got `class A: pass`. " in text


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_get_a_named_verdict_and_one_sentence(name: str, tmp_path: Path) -> None:
    content, verdict, says = BROKEN[name]
    path = tmp_path / "submission.py"
    if content is not None:
        path.write_bytes(content)
    report = judge(path)
    assert str(report.verdict) == verdict, report.sentence
    assert any(part in report.sentence for part in says.split("|")), report.sentence
    assert "\n" not in report.sentence
    assert "Traceback" not in report.render()
    assert Report.model_validate_json(report.to_json()) == report


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    report = judge(tmp_path)
    assert report.verdict is Verdict.CONTRACT_ERROR
    assert "cannot be read: Is a directory" in report.sentence
    assert judge(Submission("x = '\ud800'\n")).verdict is Verdict.CONTRACT_ERROR


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ZeroDivisionError("the judge is wrong"), "ZeroDivisionError: the judge is wrong"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/full"), "/tmp/full: No space left on device; look at"),
    ],
)
def test_a_failure_of_the_judge_is_never_a_pass(error: Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise error

    monkeypatch.setattr(judging.rules, "check", broken)
    report = judge(step("s0_baseline"), plan=small_plan())
    assert report.verdict is Verdict.JUDGE_ERROR
    assert not report.accepted
    assert f"says nothing about the file: {says}" in report.sentence


def test_the_same_seed_replays_the_same_calls() -> None:
    assert default_plan(5, "cpu") == default_plan(5, "cpu")
    assert default_plan(5, "cpu") != default_plan(6, "cpu")


def test_the_plan_holds_every_structural_case() -> None:
    plan = default_plan(0, "cpu")
    sizes = {size for group in plan.groups for call in group.calls for size in call.sizes}
    assert {0, 1, 127, 128, 129, 256} <= sizes
    assert max(sizes) > 1024, "more blocks of one expert than a routing like the contest's has"
    blocks = max(sum(-(-size // 128) for size in call.sizes) for group in plan.groups for call in group.calls)
    assert blocks > 104, "more blocks than a C500 has processors"
    firsts = {call.sizes[0] == 0 for group in plan.groups for call in group.calls}
    lasts = {call.sizes[-1] == 0 for group in plan.groups for call in group.calls}
    assert firsts == lasts == {True, False}
    assert any(sum(call.sizes) == 1 for group in plan.groups for call in group.calls)
    assert any(len(call.sizes) & (len(call.sizes) - 1) for group in plan.groups for call in group.calls)
    values = {call.values for group in plan.groups for call in group.calls}
    assert values == {"normal", "large", "tiny", "mixed"}
    for group in plan.groups:
        shapes = {
            (len(call.sizes), sum(call.sizes), sum(-(-size // 128) for size in call.sizes)) for call in group.calls
        }
        assert len(shapes) == 1, "a group of calls is compiled once"


def test_every_kind_of_call_meets_poisoned_and_plain_padding_and_memory() -> None:
    for seed in range(5):
        plan = default_plan(seed, "cpu")
        for group in plan.groups:
            if len(group.calls) > 1:
                poisons = {call.token_poison for call in group.calls}
                assert "zeros" in poisons, group.name
                assert poisons & {"nan", "large"}, group.name
        assert {"zeros", "untouched", "nan", "noise", "large"} == {group.garbage for group in plan.groups}


def test_one_expert_takes_up_to_all_rows_of_case_1_and_nobody_knows_how_many() -> None:
    most = set()
    for seed in range(20):
        (group,) = (group for group in default_plan(seed, "cpu").groups if group.name == "one expert takes all")
        assert len({tuple(sorted(call.sizes)) for call in group.calls}) == 1
        most.add(max(group.calls[0].sizes))
    assert len(most) > 10
    assert 1300 <= min(most) < 1600 < 2000 < max(most) <= CASES[1].num_tokens


def test_the_state_group_changes_every_argument_alone_and_repeats() -> None:
    for seed in range(20):
        group = state_group(random.Random(seed), 32, 16)
        changes = [call.change for call in group.calls]
        assert set(changes) >= {
            "everything", "weights", "gate_w", "up_w", "down_w", "one token", "route weights", "routing", "nothing",
        }  # fmt: skip
        assert len(changes) > 15
        before = None
        for call in group.calls:
            inputs = call_inputs(group, call, before)
            if before is not None and call.change in ("gate_w", "up_w", "down_w"):
                differing = [
                    name
                    for name in ("gate_w", "up_w", "down_w")
                    if not getattr(inputs, name).equal(getattr(before, name))
                ]
                assert differing == [call.change]
                now, then = (getattr(each, call.change).sort(dim=1).values for each in (inputs, before))
                assert now.equal(then), "no sum and no extreme shows it"
            if before is not None and call.change == "route weights":
                now, then = inputs.routed_expert_weights, before.routed_expert_weights
                assert int((now != then).sum()) == 2
                assert now.sort().values.equal(then.sort().values)
            if before is not None and call.change == "one token":
                changed = (inputs.stacked_expert_tokens != before.stacked_expert_tokens).any(dim=1)
                changed &= ~inputs.stacked_expert_tokens.isnan().any(dim=1)
                assert int(changed[inputs.valid_rows].sum()) == 1
                changed &= (inputs.stacked_expert_tokens != before.stacked_expert_tokens).sum(dim=1) == 2
                assert int(changed[inputs.valid_rows].sum()) == 1
            before = inputs


def test_contest_shapes_cost_no_memory_on_a_cpu() -> None:
    groups = contest_groups(random.Random(1))
    assert [(group.case.num_experts, group.hidden, group.intermediate) for group in groups] == [
        (16, 2048, 8192), (32, 7168, 2048), (64, 7168, 2048),
    ]  # fmt: skip
    assert all(group.size_bytes < 400 << 20 < group.mapped_bytes for group in groups)


def test_reports_are_strict_json_and_validated(tmp_path: Path) -> None:
    report = judge(tmp_path / "missing.py")
    report.cases = [
        CaseReport(
            name="a", num_experts=1, hidden=2, intermediate=3, sizes=(1,), values=("normal",), max_abs_error=None,
            failure=Failure(call=0, what="valid rows hold NaN or Inf", got=None, expected=1.0),
        )
    ]  # fmt: skip
    path = report.save(tmp_path / "report.json")

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    data = json.loads(path.read_text(), parse_constant=refuse)
    assert {"verdict", "device", "cases", "seed", "versions", "judge_sha256", "submission"} <= set(data)
    assert data["cases"][0]["max_abs_error"] is None
    assert Report.model_validate_json(path.read_bytes()) == report
    with pytest.raises(ValueError, match="finite"):
        CaseReport(name="a", num_experts=1, hidden=2, intermediate=3, sizes=(1,), values=(), max_abs_error=float("nan"))
    path.write_text(path.read_text().replace('"contract_error"', '"fine"'))
    with pytest.raises(ValueError, match="Input should be 'accepted'"):
        Report.model_validate_json(path.read_bytes())
    with pytest.raises(SubmissionError, match="cannot be written"):
        report.save(tmp_path / "nowhere" / "report.json")


def test_the_report_says_what_matters_in_text_and_html(monkeypatch: pytest.MonkeyPatch) -> None:
    report = judge(Path("/nonexistent/submission.py"))
    report.verdict, report.sentence = Verdict.WRONG_ANSWER, "it is wrong"
    report.findings = [FindingReport(rule_id="async-copy", level="advice", message="careful", line=3, column=1)]
    failure = Failure(
        call=1, what="valid rows are wrong", expert=2, row_in_group=3, column=4, block=5, padded_row=6, raw_row=7,
        got=1.5, expected=2.5, wrong_rows=8, rows=9, pattern="exactly the last row", cause="SiLU is <missing>",
    )  # fmt: skip
    report.cases = [
        CaseReport(name="one", num_experts=1, hidden=2, intermediate=3, sizes=(1,), values=(), failure=failure, calls=2)
    ]
    report.variants = [VariantReport(name="a variant", robust=False, sentence="because")]
    report.not_measured = ["speed (no GPU)"]
    text = report.render()
    for part in (
        "expert 2, row 3 of its group", "padded row 6, raw row 7", "column 4, block 5", "got 1.5, expected 2.5",
        "8 of 9 rows: exactly the last row", "Likely cause: SiLU is <missing>", "advice async-copy: line 3",
        "a variant", "Not measured here: speed (no GPU)",
    ):  # fmt: skip
        assert part in " ".join(text.split()), part
    assert max(map(len, text.splitlines())) <= 120
    assert "SiLU is &lt;missing&gt;" in report._repr_html_()
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert report.render(100).startswith(pretty(report))
    assert report.render() == text, "in a notebook the text would go to the page and leave the box empty"
    assert "SiLU is &lt;missing&gt;" in report._repr_html_()


def test_progress_starts_at_once_and_leaves_the_verdict_to_the_report() -> None:
    said: list[str] = []
    judge(EXPLOITS / "mistake_no_entry.py", progress=said.append)
    assert said[0] == "reading mistake_no_entry.py"
    assert not any("contract_error" in text for text in said)


def test_torch_that_computes_is_said_and_not_rejected_under_the_open_profile() -> None:
    report = judge(EXPLOITS / "cheat_torch_elementwise.py", profile="open", seed=1, plan=small_plan())
    assert report.accepted, report.sentence
    (found,) = (finding for finding in report.findings if finding.message.startswith("torch computed with "))
    assert (found.rule_id, found.level) == ("torch-compute", "advice")


def test_text_that_cannot_be_written_is_said_all_the_same(tmp_path: Path) -> None:
    """An exception may say what no encoding has, and a path may hold bytes that are no text."""
    source = SIGNATURE + "    raise ValueError('half of a character: \\ud800')\n"
    raised = judge(Submission(source), plan=small_plan())
    assert "half of a character: ?" in raised.sentence
    missing = judge(tmp_path / os.fsdecode(b"caf\xe9.py"))
    for report in (raised, missing):
        assert Report.model_validate_json(report.to_json()) == report
        report.render().encode()


def test_a_wrong_answer_says_cause_and_line_first_on_a_narrow_screen() -> None:
    right = step("s0").source
    wrong = right.replace("raw_start = group_offsets[expert]", "raw_start = group_padded_offsets[expert]")
    report = judge(Submission(wrong, "wrong.py"), seed=1, plan=small_plan())
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(report)
    lines = console.file.getvalue().splitlines()
    place = next(number for number, line in enumerate(wrong.splitlines(), 1) if "routed_expert_weights[" in line)
    first = " ".join(" ".join(lines[:6]).split())
    assert lines[0].startswith("wrong_answer  uneven groups, call 1: ")
    assert "Likely cause: the route weight is read at the padded row" in first
    assert f"Look at line {place} of wrong.py:" in first
    assert list(report.excerpt) == [*range(place - 2, place + 3)]
    assert report.excerpt[place] == wrong.splitlines()[place - 1]
    assert max(map(len, lines)) <= 80
    assert "E, H, I" not in "".join(lines)
    assert "<details>" in report._repr_html_()


def test_a_refused_file_shows_its_line_and_that_it_was_not_run() -> None:
    source = f"import os\n\n\n{SIGNATURE}    out[0] ==== 1\n"
    report = judge(Submission(source, "bad.py"))
    assert (report.line, report.excerpt) == (
        6,
        {4: source.splitlines()[3], 5: source.splitlines()[4], 6: "    out[0] ==== 1"},
    )
    report = judge(Submission(source.replace(" ==== ", " = "), "bad.py"))
    assert report.line == 1
    assert report.remedy == RULES["import-root"].fix
    assert "Nothing of it was run." in report.render()


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moe_lab", "judge", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_exit_codes_for_usage_and_rejection(tmp_path: Path) -> None:
    missing = run_cli(str(tmp_path / "missing.py"))
    assert missing.returncode == 2
    assert missing.stderr.startswith("moe-lab: got no file")
    assert len(missing.stderr.splitlines()) == 1
    path = tmp_path / "submission.py"
    path.write_text(SIGNATURE + "    out[0] ==== 1\n")
    rejected = run_cli(str(path), "--json", str(tmp_path / "report.json"))
    assert rejected.returncode == 1
    assert rejected.stdout.startswith("compile_error")
    assert rejected.stderr.splitlines()[0] == "starting the judge"
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "compile_error"
    assert run_cli(str(path), "--json", str(tmp_path / "no" / "report.json")).returncode == 2
    os.mkfifo(tmp_path / "pipe")
    assert "a device or a pipe" in run_cli(str(tmp_path / "pipe")).stderr
    long = tmp_path / ("x" * 300)
    assert run_cli(str(long)).stderr.startswith("moe-lab: got no file")
    for target, says in ((tmp_path, "got a folder"), (long, "File name too long")):
        unwritten = run_cli(str(path), "--json", str(target))
        assert unwritten.returncode == 2
        assert says in unwritten.stderr.splitlines()[-1]
        assert "Traceback" not in unwritten.stderr
    assert unwritten.stdout.startswith("compile_error")


def test_exit_codes_for_acceptance_and_judge_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = step("s0_baseline").save(tmp_path / "submission.py")
    monkeypatch.setattr(judging, "default_plan", lambda seed, device: small_plan(seed))
    accepted = CliRunner().invoke(cli.app, ["judge", str(path), "--seed", "4"])
    assert accepted.exit_code == 0, accepted.output
    assert "seed 4" in accepted.output

    def broken(*args: object) -> None:
        raise OSError("no disk")

    monkeypatch.setattr(judging, "check_group", broken)
    assert CliRunner().invoke(cli.app, ["judge", str(path)]).exit_code == 2
