import json
import os

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient

from moe_lab.lesson.export import export, load_ipython_extension, submission_cell
from moe_lab.problem.errors import ExportError
from moe_lab.problem.submission import Submission
from moe_lab.steps import step

SOURCE = step("s0_baseline").source


def _notebook(path, *cells):
    document = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {},
        "cells": [
            {"cell_type": kind, "metadata": {"tags": tags}, "source": source.splitlines(keepends=True)}
            for kind, tags, source in cells
        ],
    }
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_the_tagged_cell_is_the_file_byte_for_byte(tmp_path):
    text = SOURCE + "# Ünïcode, no newline at the end"
    notebook = _notebook(
        tmp_path / "n.ipynb", ("code", [], "1 + 1"), ("code", ["submission"], "%%submission ../x.py\n" + text)
    )
    path = export(Submission(submission_cell(notebook)), tmp_path / "submission.py")
    assert path.read_bytes() == text.encode()


def test_a_cell_without_the_magic_line_is_exported_whole(tmp_path):
    notebook = _notebook(tmp_path / "n.ipynb", ("code", ["submission", "other"], SOURCE))
    assert submission_cell(notebook) == SOURCE


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([("code", [], SOURCE)], "got 0 code cells"),
        ([("code", ["submission"], SOURCE)] * 2, "got 2 code cells"),
        ([("markdown", ["submission"], SOURCE)], "got 0 code cells"),
        ([("code", ["submission"], "%%submission x.py\n\n")], "got an empty cell"),
    ],
)
def test_none_two_or_empty_cells_are_named(tmp_path, cells, message):
    with pytest.raises(ExportError, match=message):
        submission_cell(_notebook(tmp_path / "n.ipynb", *cells))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 3}', '{"cells": [{"cell_type": "code"}]}', "[" * 100_000])
def test_what_is_no_notebook_is_named(tmp_path, text):
    path = tmp_path / "n.ipynb"
    path.write_text(text)
    with pytest.raises(ExportError):
        submission_cell(path)


def test_a_missing_notebook_and_a_folder_are_named(tmp_path):
    with pytest.raises(ExportError, match="got no file"):
        submission_cell(tmp_path / "n.ipynb")
    with pytest.raises(ExportError, match="cannot be read"):
        submission_cell(tmp_path)
    os.mkfifo(tmp_path / "pipe.ipynb")
    with pytest.raises(ExportError, match="cannot be read: it is a device or a pipe"):
        submission_cell(tmp_path / "pipe.ipynb")


@pytest.mark.parametrize("bad", ["import os\n", "x = 2 * 64\n", "class A:\n    pass\n", "def f(:\n"])
def test_a_rule_violation_leaves_the_existing_file_alone(tmp_path, bad):
    path = tmp_path / "submission.py"
    path.write_text("precious")
    with pytest.raises(ExportError, match="nothing was written"):
        export(Submission(SOURCE + bad), path)
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]


def test_a_rule_violation_is_one_sentence(tmp_path):
    with pytest.raises(ExportError) as caught:
        export(Submission("x = 1\nimport os\n"), tmp_path / "submission.py")
    assert str(caught.value) == (
        "nothing was written: line 1, column 1: got no function run_kernel. The file must define a function "
        "run_kernel at module level (and 1 more); `moe-lab explain entry-missing` says why"
    )


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(ExportError, match="cannot be written"):
        export(Submission(SOURCE), tmp_path / "missing" / "submission.py")


def test_the_magic_writes_the_cell_and_judges_the_file(tmp_path, monkeypatch):
    # The judge takes long; the notebook that ends with this magic is executed by another test.
    judged = []
    monkeypatch.setattr("moe_lab.judge.judge", lambda written, progress: judged.append(written), raising=False)
    shell = InteractiveShell.instance()
    load_ipython_extension(shell)
    path = tmp_path / "submission.py"
    shell.run_cell(f"%%submission {path}\n{SOURCE}").raise_error()
    assert path.read_text() == SOURCE
    assert [submission.source for submission in judged] == [SOURCE]


def test_a_cell_with_gaps_is_told_where_and_writes_nothing(tmp_path, capsys):
    shell = InteractiveShell.instance()
    load_ipython_extension(shell)
    shell.run_cell(f"%%submission {tmp_path / 'my_kernel.py'}\nx = 1\n...\ny = x[..., 0]\nz = ...\n").raise_error()
    assert "Not filled in yet: replace each ... and run this cell again (lines 3, 5)." in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("begins", ["the baseline", "something else"])
def test_a_cell_that_holds_the_baseline_takes_the_readers_own_kernel(tmp_path, monkeypatch, begins):
    judged = []
    monkeypatch.setattr("moe_lab.judge.judge", lambda written, progress: judged.append(written), raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOE_LAB_OWN_KERNEL", raising=False)
    own, other = SOURCE + "# mine\n", SOURCE + "# other\n"
    (tmp_path / "my_kernel.py").write_text(own)
    shell = InteractiveShell.instance()
    load_ipython_extension(shell)
    cell = SOURCE if begins == "the baseline" else other
    shell.run_cell(f"%%submission submission.py\n{cell}").raise_error()
    expected = own if begins == "the baseline" else other
    assert (tmp_path / "submission.py").read_text() == expected == judged[0].source
    assert (tmp_path / "my_kernel.py").read_text() == own


def test_the_magic_refuses_a_broken_cell_with_a_sentence(tmp_path, capsys):
    shell = InteractiveShell.instance()
    load_ipython_extension(shell)
    result = shell.run_cell(f"%%submission {tmp_path / 'submission.py'}\nimport os\n")
    assert "nothing was written" in str(result.error_in_exec)
    assert not (tmp_path / "submission.py").exists()


def test_the_magic_in_a_kernel_writes_the_bytes_that_the_notebook_holds(tmp_path):
    text = SOURCE + "# no newline at the end"
    path, cell = tmp_path / "submission.py", nbformat.v4.new_code_cell
    # The judge is not what is tested here, and it takes long.
    setup = "%load_ext moe_lab.lesson.export\nimport moe_lab.judge\nmoe_lab.judge.judge = lambda *a, **k: None"
    notebook = nbformat.v4.new_notebook(cells=[cell(setup), cell(f"%%submission {path}\n{text}")])
    notebook.cells[1].metadata["tags"] = ["submission"]
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    saved = tmp_path / "n.ipynb"
    nbformat.write(notebook, saved)
    assert path.read_bytes() == text.encode() == submission_cell(saved).encode()
