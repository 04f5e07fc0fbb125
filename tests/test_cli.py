"""The command line where its streams, its folder, its limits or itself fail: one sentence, and no verdict is lost."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_lab import cli
from moe_lab.judge import Report, Verdict

SIGNATURE = (
    "def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights, group_sizes, group_offsets,\n"
    "               group_padded_offsets, group_idx_for_bx, out):\n"
)


def run_main(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moe_lab", *arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, text=True, timeout=120, check=False, **options)


@pytest.mark.parametrize("arguments", [("steps",), ("explain",), ("score", "1", "1", "1")])
def test_output_that_cannot_be_written_is_one_sentence(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = run_main(*arguments, stdout=full)
    assert (done.returncode, done.stderr) == (2, "moe-lab: the output cannot be written: No space left on device\n")
    closed = run_main(*arguments, preexec_fn=lambda: os.close(1))
    assert (closed.returncode, closed.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [("steps",), ("explain",), ("score", "1", "1", "1")])
def test_a_reader_that_has_read_enough_is_no_rejection(arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = run_main(*arguments, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_verdict_needs_no_open_streams_and_no_unicode(tmp_path: Path) -> None:
    path = tmp_path / "\u2603.py"
    path.write_text(SIGNATURE + "    raise ValueError('\u2603')\n")

    def close_all() -> None:
        for number in (0, 1, 2):
            os.close(number)

    report = tmp_path / "report.json"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    arguments = ("judge", str(path), "--profile", "open", "--json", str(report))
    assert run_main(*arguments, stdout=None, stderr=None, preexec_fn=close_all).returncode == 1
    assert Report.model_validate_json(report.read_bytes()).verdict is Verdict.RUNTIME_ERROR
    done = run_main(*arguments, env=environment)
    assert done.returncode == 1
    assert "\\u2603" in done.stdout


@pytest.fixture
def no_python(tmp_path: Path) -> str:
    """A file that is rejected at once."""
    path = tmp_path / "submission.py"
    path.write_text(SIGNATURE + "    out[0] ==== 1\n")
    return str(path)


REJECTED = "compile_error  submission.py, line 3, column 14: invalid syntax"


def test_progress_that_cannot_be_shown_loses_no_verdict(no_python: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "w") as full:
        for where in ({"stderr": full}, {"stderr": writing}, {"preexec_fn": lambda: os.close(2)}):
            done = run_main("judge", no_python, **where)
            assert (done.returncode, done.stdout.splitlines()[0]) == (1, REJECTED)
        # Nor does it turn another ending into this one.
        assert run_main("judge", no_python + ".py", stderr=full).returncode == 2
        assert run_main("judge", "--no-such-option", stderr=full).returncode == 2
        done = run_main("score", "1", "1", "1", stderr=full)
        assert done.returncode == 0
        assert "mean of the whole points" in done.stdout
    os.close(writing)


def test_a_verdict_that_cannot_be_written_is_one_sentence_and_a_report(no_python: str, tmp_path: Path) -> None:
    json_file = tmp_path / "report.json"
    arguments = ("judge", no_python, "--json", str(json_file))
    with open("/dev/full", "w") as full:
        done = run_main(*arguments, stdout=full)
        assert done.returncode == 2
        *progress, last = done.stderr.splitlines()
        assert last == "moe-lab: the output cannot be written: No space left on device"
        assert progress[-1] == "compile_error: submission.py, line 3, column 14: invalid syntax"
        assert Report.model_validate_json(json_file.read_bytes()).verdict is Verdict.COMPILE_ERROR
        json_file.unlink()
        assert run_main(*arguments, stdout=full, stderr=full).returncode == 2
        assert Report.model_validate_json(json_file.read_bytes()).verdict is Verdict.COMPILE_ERROR


@pytest.mark.parametrize(("limit", "says"), [("RLIMIT_FSIZE", "ulimit -f"), ("RLIMIT_AS", "ulimit -v")])
def test_a_limit_of_the_shell_is_not_blamed_on_the_file(limit: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "submission.py"
    path.write_text(SIGNATURE + "    raise ValueError\n")

    def tighten() -> None:
        amount = 64 << 20 if limit == "RLIMIT_FSIZE" else 5 << 30
        resource.setrlimit(getattr(resource, limit), (amount, amount))

    done = run_main("judge", str(path), "--profile", "open", preexec_fn=tighten)
    assert done.returncode == 2
    assert done.stdout.startswith("judge_error  got a limit of ")
    assert says in done.stdout


def test_a_folder_that_is_gone_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    remove = "import os; os.chdir('gone'); os.rmdir(os.getcwd()); from moe_lab.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", remove, "doctor"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "moe-lab: the current folder: No such file or directory\n"


def test_a_fault_of_the_tool_is_one_sentence_and_no_rejection(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise KeyError("a\nb")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("moe-lab: the tool itself failed, which says nothing about your files: KeyError: ")


@pytest.mark.parametrize("command", ["judge", "fit", "tune"])
def test_a_submission_is_a_file_or_a_step(command: str, tmp_path: Path) -> None:
    for given, says in (
        ("h9", "got no file h9, expected a Python file with run_kernel or the name of a step"),
        ("h6.py", "got no file h6.py, expected a Python file with run_kernel"),
    ):
        done = run_main(command, given, cwd=tmp_path)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"moe-lab: {says}")


def test_a_step_is_fitted_and_judged_by_its_name_unless_a_file_has_it(tmp_path: Path) -> None:
    fitted = run_main("fit", "h6", cwd=tmp_path)
    assert (fitted.returncode, fitted.stdout.splitlines()[0]) == (
        1, "h6_matrix_stores.py, case 1, balanced, MetaX C500: does not fit"
    )  # fmt: skip
    judged = run_main("judge", "h6_matrix_stores", cwd=tmp_path)
    assert judged.returncode == 1
    assert judged.stdout.startswith("rule_violation")
    (tmp_path / "h6").write_text(SIGNATURE + "    out[0] ==== 1\n")
    assert run_main("judge", "h6", cwd=tmp_path).stdout.startswith("compile_error  h6, line 3, column 14")


def test_tune_has_nothing_good_to_say_of_a_file_without_run_kernel(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = 1\n")
    done = run_main("tune", "bad.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "moe-lab: got no function run_kernel in bad.py, expected one at module level\n"


def test_help_says_what_a_profile_allows() -> None:
    text = " ".join(run_main("judge", "--help").stdout.replace("│", " ").split())
    assert "contest: every rule rejects" in text
    assert "are advice, for kernels of other cards" in text


def test_a_file_may_be_named_and_may_speak_like_markup(tmp_path: Path) -> None:
    (tmp_path / "x[").mkdir()
    (tmp_path / "x[" / "b] [red].py").write_text("x = [\n")
    done = run_main("judge", "x[/b] [red].py", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "[red].py, line 1" in " ".join(done.stdout.split())
