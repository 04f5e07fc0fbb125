"""The tooling on small notebooks, then every committed notebook: normalised, complete, and running."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import itertools
import re
from collections.abc import Iterator

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from moe_lab.lesson import notebooks
from moe_lab.lesson.exercises import EXERCISES, PREDICTIONS, of_notebook
from moe_lab.machine import backend
from moe_lab.problem.errors import NotebookError

PATHS = notebooks.find()
EACH = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
#: A committed notebook stays below this, so that a code host still draws it.
MAX_BYTES = 400_000
MAX_CELL_LINES = 40
_MACHINE_PATH = re.compile(r"(?<![\w.:/<~])/(?!opt/maca\b)(?:[\w.-]+/){2,}[\w.-]*|site-packages")
PICTURE = {"image/png": "iVBORw0KGgo=", "text/plain": "a line"}


def _notebook(*cells):
    return new_notebook(cells=list(cells))


def _code(source: str, *outputs, tags=()):
    return new_code_cell(source, outputs=list(outputs), metadata={"tags": list(tags)} if tags else {})


def _good():
    """The smallest notebook that the series would take."""
    draft = _notebook(
        new_markdown_cell(
            "# 02 Padding\n\n**You will be able to** pad.\n\n**Minutes:** 1. **Needs:** no GPU.", id="title-cell"
        ),
        _code("import math", tags=["setup"]),
        new_markdown_cell("What is the number?"),
        _code("1 + 1", new_output("display_data", data=PICTURE, metadata={"image/png": {"alt": "a line"}})),
        *(new_markdown_cell("", metadata={"tags": [f"task:{key}"]}) for key in _keys("02_grouped_padding")),
        new_markdown_cell("## Recap\n\n**Next:** 03.\n\n**Sources:** none.", id="recap-cell"),
    )
    return notebooks.normalise(notebooks.fill_exercises(draft, "02_grouped_padding"))


def _keys(name: str) -> list[str]:
    return [exercise.key for exercise in EXERCISES.values() if exercise.notebook == name]


# --- normalise -------------------------------------------------------------------------------------------------------


def test_normalise_keeps_the_text_and_drops_the_machine_and_the_moment() -> None:
    progress = "\r  0%| | 0/2\r100%|##| 2/2\r         \r"
    messy = _notebook(
        new_markdown_cell("hello  \n"),
        new_code_cell(
            "x",
            execution_count=17,
            metadata={"tags": ["kept"], "execution": {"iopub.status.busy": "2026-01-01T00:00:00Z"}, "trusted": True},
            outputs=[
                new_output("stream", name="stderr", text=progress),
                new_output("stream", name="stdout", text=f"saved {notebooks.ROOT}/data/x.csv\n"),
                new_output("stream", name="stdout", text="<f at 0x7f00deadbeef>\n"),
                new_output("display_data", data={notebooks._WIDGET_VIEW: {"model_id": "1"}, "text/plain": "Box()"}),
                new_output("execute_result", data={"text/plain": "3"}, execution_count=17),
            ],
        ),
    )
    messy.metadata = nbformat.from_dict(
        {"widgets": {"state": {}}, "language_info": {"name": "python", "version": "3.11.2"}}
    )
    clean = notebooks.normalise(messy)
    cell = clean.cells[1]
    assert clean.cells[0].source == "hello"
    assert clean.metadata == notebooks._METADATA
    assert cell.metadata == {"tags": ["kept"]}
    assert [output.output_type for output in cell.outputs] == ["stream", "execute_result"]
    assert cell.outputs[0].text == "saved data/x.csv\n<f at 0x...>\n"
    assert (cell.execution_count, cell.outputs[1].execution_count) == (1, 1)
    assert messy.cells[1].execution_count == 17, "the original must stay as it was"


def test_normalise_twice_is_normalise_once() -> None:
    once = notebooks.normalise(_good())
    assert notebooks.to_bytes(notebooks.normalise(once)) == notebooks.to_bytes(once)


# --- exercises -------------------------------------------------------------------------------------------------------


def test_one_tagged_cell_becomes_task_gap_and_solution() -> None:
    tagged = new_markdown_cell("old text", metadata={"tags": ["task:flops"]})
    bound = new_markdown_cell("", metadata={"tags": ["task:bound"]})
    filled = notebooks.fill_exercises(_notebook(tagged, bound), "03_roofline")
    assert [cell.id for cell in filled.cells[:3]] == ["task-flops", "gap-flops", "solution-flops"]
    task, gap, solution = (cell.source for cell in filled.cells[:3])
    assert task.startswith("### Exercise 1 · Count the work\n")
    assert gap.endswith('check("flops", flops)')
    assert solution.count("<details>") == solution.count("</details>") == 4
    assert EXERCISES["flops"].solution in solution
    assert EXERCISES["flops"].solution not in gap
    assert "<code>2 * 3 * case.hidden * case.intermediate</code>" in solution
    assert filled.cells[3].source.startswith("### Exercise 2")
    assert notebooks.fill_exercises(filled, "03_roofline") == filled


def test_a_fold_survives_a_solution_with_blank_lines_and_angle_brackets() -> None:
    exercise = dataclasses.replace(EXERCISES["flops"], solution="a = 1 < 2\n\nb = a", lesson="so `a < b`, *nearly*")
    fold = notebooks._cells(exercise, 1)[2].source.split("\n\n")[-1]
    assert "a = 1 &lt; 2\n<!-- -->\nb = a" in fold
    assert "so <code>a &lt; b</code>, <em>nearly</em>" in fold


def test_an_answer_is_not_lost_until_its_cell_is_deleted() -> None:
    tagged = new_markdown_cell("", metadata={"tags": ["task:flops"]})
    filled = notebooks.fill_exercises(_notebook(tagged), "03_roofline")
    gap = filled.cells[1].source
    filled.cells[1].source = gap.replace("...", "6 * case.hidden")
    with pytest.raises(NotebookError, match="flops holds an answer"):
        notebooks.fill_exercises(filled, "03_roofline")
    del filled.cells[1]
    assert notebooks.fill_exercises(filled, "03_roofline").cells[1].source == gap


def test_an_unknown_exercise_is_named() -> None:
    tagged = new_markdown_cell("", metadata={"tags": ["task:flops"]})
    with pytest.raises(NotebookError, match="task:flops, expected an exercise of this notebook"):
        notebooks.fill_exercises(_notebook(tagged), "02_grouped_padding")


# --- problems --------------------------------------------------------------------------------------------------------


def _problems(notebook, name: str) -> list[str]:
    """What the series asks of an executed notebook and this one lacks, one sentence each."""
    first, last, code = notebook.cells[0], notebook.cells[-1], notebooks.code_cells(notebook)
    keys = [key for part, key in map(notebooks.exercise_tag, notebook.cells) if part == "task"]
    kept = keys == [exercise.key for exercise in of_notebook(name)] and 1 <= len(keys) <= 7
    setup = ["setup" in _tags(cell) for cell in code]
    size = len(notebooks.to_bytes(notebook))
    fine = {
        f"the first line is no title '# {name[:2]} ...'": re.match(rf"# {name[:2]} \w", first.source),
        "expected the tag 'setup' on the first code cell and on no other": setup == [True] + [False] * (len(code) - 1),
        f"got the exercises {keys}, expected one to seven, as exercises/{name}.yaml has them": kept,
        "there is no figure": any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs),
        f"got {size} bytes, expected less than {MAX_BYTES}": size < MAX_BYTES,
    }
    for cell, words in ((first, ("**You will be able to**", "**Minutes:**", "**Needs:**")),
                        (last, ("## Recap", "**Next:**", "**Sources:**"))):  # fmt: skip
        fine |= {f"{word!r} is missing from the cell {cell.id}": word in cell.source for word in words}
    missing = [sentence for sentence, holds in fine.items() if not holds]
    return missing + [sentence for cell in code for sentence in _problems_of(cell)]


def _problems_of(cell) -> Iterator[str]:
    lines = cell.source.count("\n") + 1
    if lines > MAX_CELL_LINES and not cell.source.startswith("%%submission"):
        yield f"cell {cell.id} has {lines} lines, expected at most {MAX_CELL_LINES}"
    for output in cell.outputs:
        if output.output_type == "error" or output.get("name") == "stderr":
            yield f"cell {cell.id} left an error or a warning: {(output.get('text') or output.get('evalue'))[:80]!r}"
        if "image/png" in output.get("data", {}) and not output.metadata.get("image/png", {}).get("alt"):
            yield f"a figure of cell {cell.id} has no description; show it with moe_lab.lesson.display.show"
    for texts, kind in notebooks.shown_texts(cell):
        for match in _MACHINE_PATH.finditer(texts[kind]):
            yield f"cell {cell.id} shows a path of one machine: {match.group()}"


def _tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def test_a_good_notebook_has_no_problems() -> None:
    assert _problems(_good(), "02_grouped_padding") == []


def _without_alt(notebook) -> None:
    notebook.cells[3].outputs[0].metadata = {}


def _with_output(**fields):
    def spoil(notebook) -> None:
        notebook.cells[3].outputs.append(new_output(**fields))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda n: n.cells.pop(), "'## Recap' is missing"),
        (lambda n: n.cells.pop(0), "no title"),
        (lambda n: n.cells.pop(1), "the tag 'setup'"),
        (lambda n: n.cells[3].outputs.clear(), "there is no figure"),
        (_without_alt, "has no description"),
        (lambda n: n.cells[3].update(source="x\n" * 40 + "x"), "has 41 lines"),
        (lambda n: n.cells.pop(4), "got the exercises"),
        (_with_output(output_type="stream", name="stderr", text="Warning"), "an error or a warning"),
        (_with_output(output_type="error", ename="E", evalue="no", traceback=[]), "an error or a warning"),
        (
            _with_output(output_type="stream", name="stdout", text="in /home/me/x/y.py"),
            "a path of one machine: /home/me",
        ),
        (_with_output(output_type="stream", name="stdout", text="x" * 400_000), "expected less than 400000"),
    ],
)
def test_what_is_missing_is_said(spoil, sentence: str) -> None:
    notebook = _good()
    spoil(notebook)
    assert any(sentence in problem for problem in _problems(notebook, "02_grouped_padding"))


def test_long_submission_cells_web_addresses_and_the_vendor_path_are_fine() -> None:
    notebook = _good()
    notebook.cells[3].source = "%%submission f.py" + "\nx" * 200
    text = "https://github.com/tile-ai/tilelang/blob/main/x.py, a/b/c, /opt/maca/mxgpu_llvm/lib"
    notebook.cells[3].outputs.append(new_output("stream", name="stdout", text=text))
    assert _problems(notebook, "02_grouped_padding") == []


# --- files and execution ---------------------------------------------------------------------------------------------


def test_find_takes_stems_numbers_and_paths(tmp_path) -> None:
    assert notebooks.find(["00"]) == [PATHS[0]] == notebooks.find([PATHS[0].stem]) == notebooks.find([str(PATHS[0])])
    with pytest.raises(NotebookError, match="got 'nonsense', expected one of 00_start_here"):
        notebooks.find(["nonsense"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 3}'])
def test_what_is_no_notebook_is_one_sentence(tmp_path, text: str, capsys) -> None:
    path = tmp_path / "broken.ipynb"
    path.write_text(text)
    assert notebooks.main(["run", str(path)]) == 2
    assert capsys.readouterr().err.startswith("moe_lab.lesson.notebooks: ")


@pytest.mark.notebooks
def test_update_executes_in_order_and_a_failing_cell_leaves_the_file_alone(tmp_path, capsys) -> None:
    path = tmp_path / "99_small.ipynb"
    path.write_bytes(notebooks.to_bytes(_notebook(_code("x = 20"), _code("x + 1"))))
    assert notebooks.main(["update", str(path)]) == 0
    done = notebooks.read(path)
    assert [cell.execution_count for cell in done.cells] == [1, 2]
    assert done.cells[1].outputs[0].data["text/plain"] == "21"

    done.cells[1].source = "raise ValueError('no good')"
    path.write_bytes(notebooks.to_bytes(done))
    before = path.read_bytes()
    assert notebooks.main(["update", str(path)]) == 2
    assert path.read_bytes() == before
    assert "99_small, cell 2: ValueError: no good" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "shown"), [("cpu", "on this machine's CPU"), ("cuda", "on Chip 9000")])
def test_a_processor_is_not_named_and_a_gpu_is(kind: str, shown: str, monkeypatch) -> None:
    monkeypatch.setattr(backend, "detect", lambda: backend.Backend(kind, "Chip 9000", "cpu"))
    notebook = _notebook(
        _code("1", new_output("stream", name="stdout", text="on Chip 9000")),
        _code("2", new_output("display_data", data={"text/html": "<b>on Chip 9000</b>", "image/png": "AAAA"})),
    )
    notebooks.without_processor(notebook)
    assert notebook.cells[0].outputs[0].text == shown
    assert notebook.cells[1].outputs[0].data == {"text/html": f"<b>{shown}</b>", "image/png": "AAAA"}


# --- the series ------------------------------------------------------------------------------------------------------


@EACH
def test_committed_notebook_is_normalised_and_complete(path) -> None:
    notebook = notebooks.read(path)
    assert notebooks.to_bytes(notebooks.normalise(notebook)) == path.read_bytes(), "run: make notebooks"
    filled = notebooks.fill_exercises(notebook, path.stem)
    assert [cell.source for cell in filled.cells] == [cell.source for cell in notebook.cells], "run: make notebooks"
    assert _problems(notebook, path.stem) == []


@EACH
def test_setup_cell_imports_what_the_exercises_use(path) -> None:
    setup = next(cell for cell in notebooks.read(path).cells if "setup" in cell.metadata.get("tags", []))
    lines = [line for line in setup.source.splitlines() if not line.startswith("%")]
    here = {alias.asname or alias.name for node in ast.walk(ast.parse("\n".join(lines))) for alias in _aliases(node)}
    known = here | set(dir(builtins))
    for exercise in of_notebook(path.stem):
        if exercise.kind == "submission":  # a whole file, with its own imports
            continue
        names = [node for node in ast.walk(ast.parse(exercise.solution)) if isinstance(node, (ast.Name, ast.arg))]
        functions = {node.name for node in ast.walk(ast.parse(exercise.solution)) if isinstance(node, ast.FunctionDef)}
        bound = functions | {
            _name(node) for node in names if isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store)
        }
        assert {_name(node) for node in names} - bound <= known, exercise.key


def test_every_prediction_is_asked_once_and_no_notebook_asks_many() -> None:
    asked = {
        path.stem: re.findall(r'predict\("(\w+)", \.\.\.\)', path.read_text().replace('\\"', '"')) for path in PATHS
    }
    assert max(map(len, asked.values())) <= 5
    assert sorted(itertools.chain(*asked.values())) == sorted(PREDICTIONS)


def _aliases(node: ast.AST) -> list[ast.alias]:
    return node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else []


def _name(node: ast.Name | ast.arg) -> str:
    return node.arg if isinstance(node, ast.arg) else node.id


def test_readme_and_map_of_the_series_name_every_notebook_and_its_minutes() -> None:
    start, *others = (notebooks.read(path) for path in PATHS)
    text = "\n".join(cell.source for cell in start.cells)
    readme = (notebooks.ROOT / "README.md").read_text(encoding="utf-8")
    for path, notebook in zip(PATHS[1:], others, strict=True):
        first = notebook.cells[0].source
        title, minutes = first.splitlines()[0].removeprefix("# "), first.partition("**Minutes:** ")[2].partition(".")[0]
        assert f"| [{title}]({path.name}) | {minutes} |" in text
        assert re.search(rf"\(notebooks/{path.name}\) \|.*\| {minutes} \|", readme), path.name


@pytest.mark.notebooks
@EACH
def test_notebook_runs_from_the_first_cell_with_no_answers(path) -> None:
    done = notebooks.normalise(notebooks.execute(notebooks.read(path), path.stem))
    assert _problems(done, path.stem) == []
    assert len(path.read_bytes()) < MAX_BYTES


@EACH
def test_links_to_other_notebooks_lead_somewhere(path) -> None:
    text = "\n".join(cell.source for cell in notebooks.read(path).cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#\w+)?\)", text)
    assert [target for target in targets if not (path.parent / target).exists()] == []
