"""Run the notebooks from the first cell, and keep the committed ones reviewable (make notebooks; see ``--help``).

The .ipynb is the source; notebooks/exercises/README.md says how the series is written."""

from __future__ import annotations

import argparse
import copy
import html
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from markdown_it import MarkdownIt

from moe_lab.lesson.exercises import Exercise, of_notebook
from moe_lab.machine import backend
from moe_lab.problem.errors import MoeLabError, NotebookError
from moe_lab.problem.submission import write_atomic

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
CELL_TIMEOUT_S = 300  #: the judge compiles and runs a whole submission in one cell

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_MARKDOWN = MarkdownIt()


def find(names: Sequence[str] = ()) -> list[Path]:
    """Paths of all notebooks in order, or of those named by path, stem or start ("02"); NotebookError for others."""
    everything = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
    found = [] if names else everything
    for path in map(Path, names):
        fitting = [path] if path.is_file() else [each for each in everything if each.name.startswith(path.name)]
        if not fitting:
            raise NotebookError(f"got {str(path)!r}, expected one of {', '.join(each.stem for each in everything)}")
        found += fitting
    return found


def read(path: Path) -> NotebookNode:
    """Read one notebook. Raises NotebookError if it is none."""
    try:
        notebook = nbformat.v4.reads(path.read_text(encoding="utf-8"))
        nbformat.validate(notebook)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, nbformat.ValidationError):
        raise NotebookError(f"{path} is no notebook of format 4, usually because a save broke off") from None
    return notebook


def to_bytes(notebook: NotebookNode) -> bytes:
    """The file's content."""
    return (nbformat.writes(notebook).rstrip("\n") + "\n").encode()


def execute(notebook: NotebookNode, name: str) -> NotebookNode:
    """Run a notebook in place, in ``notebooks/``, and return it; NotebookError names a cell that fails or hangs."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from tqdm import tqdm

    os.environ["MOE_LAB_OWN_KERNEL"] = ""  # what is committed is the series, whatever its reader has written
    client = NotebookClient(
        notebook, kernel_name="python3", timeout=CELL_TIMEOUT_S, record_timing=False,
        # The kernel says on stderr that loopback is not encrypted; only its errors are of use here.
        extra_arguments=["--log-level=40"], resources={"metadata": {"path": str(FOLDER)}},
    )  # fmt: skip
    with client.setup_kernel():
        for index, cell in enumerate(tqdm(notebook.cells, desc=name, unit="cell", file=sys.stderr)):
            try:
                client.execute_cell(cell, index)
                continue
            except CellExecutionError as error:
                why = f"{error.ename}: {error.evalue}"
            except CellTimeoutError:
                why = f"still running after {CELL_TIMEOUT_S} s"
            except DeadKernelError:
                why = "the kernel died, usually for lack of memory"
            raise NotebookError(f"{name}, cell {index + 1}: {why}")
    return notebook


def update(path: Path) -> None:
    """Fill in the exercises, execute, normalise and write back one notebook; on NotebookError it stays as it is."""
    notebook = fill_exercises(read(path), path.stem)
    write_atomic(path, to_bytes(without_processor(normalise(execute(notebook, path.stem)))))


def fill_exercises(notebook: NotebookNode, name: str) -> NotebookNode:
    """A copy with the cells of every exercise written where a cell is tagged ``task:KEY``: task, gap, hints, solution.

    ``name`` is the notebook's stem. Raises NotebookError for an unknown exercise or an answer that would be lost.
    """
    cells: list[NotebookNode] = []
    own = {exercise.key: _cells(exercise, number) for number, exercise in enumerate(of_notebook(name), start=1)}
    for cell in notebook.cells:
        part, key = exercise_tag(cell)
        if part and key not in own:
            raise NotebookError(f"{name}: got the tag {part}:{key}, expected an exercise of this notebook")
        if part == "gap" and cell.source != own[key][1].source:
            raise NotebookError(
                f"{name}: exercise {key} holds an answer, which would be lost; keep a copy, then delete that cell"
            )
        cells += own[key] if part == "task" else [] if part else [cell]
    return nbformat.from_dict({**notebook, "cells": cells})


def _cells(exercise: Exercise, number: int) -> list[NotebookNode]:
    """Task, gap with check, and folds of HTML without blank lines: nbconvert drops Markdown out of ``<details>``."""
    code = re.sub("^$", "<!-- -->", html.escape(exercise.solution, quote=False), flags=re.MULTILINE)
    texts = [_MARKDOWN.renderInline(text).replace("&quot;", '"') for text in (*exercise.hints, exercise.lesson)]
    folds = {f"Hint {hint}": f"<p>{text}</p>" for hint, text in enumerate(texts[:-1], start=1)}
    folds["Solution"] = f"<pre><code>{code}</code></pre><p>{texts[-1]}</p>"
    details = [f"<details><summary>{title}</summary>{text}</details>" for title, text in folds.items()]
    check = f'\n\n\ncheck("{exercise.key}", {exercise.answer})'
    markdown, python = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    cells = {
        "task": markdown(f"### Exercise {number} · {exercise.title}\n\n{exercise.task}"),
        "gap": python(exercise.gap if exercise.kind == "submission" else exercise.gap + check),
        "solution": markdown("\n\n".join(details)),
    }
    for part, cell in cells.items():
        cell.update(id=f"{part}-{exercise.key}", metadata=nbformat.from_dict({"tags": [f"{part}:{exercise.key}"]}))
    return list(cells.values())


def exercise_tag(cell: NotebookNode) -> tuple[str, str]:
    """Which part of which exercise a cell is, by its tag; two empty texts for any other cell."""
    found = re.search(r"^(task|gap|solution):(.*)", "\n".join(cell.metadata.get("tags", [])), re.MULTILINE)
    return (found[1], found[2]) if found else ("", "")


def normalise(notebook: NotebookNode) -> NotebookNode:
    """A copy that holds nothing of the machine or the moment: tags for metadata, execution counts from 1, no paths of
    this checkout, addresses, widgets or finished progress bars. Normalising it again changes nothing."""
    clean = copy.deepcopy(notebook)
    clean.update(metadata=nbformat.from_dict(_METADATA), nbformat=4, nbformat_minor=5)
    for cell in clean.cells:
        kept = {key: value for key, value in cell.metadata.items() if key in ("tags", "jupyter")}
        cell.update(metadata=nbformat.from_dict(kept), source=cell.source.rstrip())
        cell.pop("attachments", None)
    for count, cell in enumerate(code_cells(clean), start=1):
        cell.update(execution_count=count, outputs=_joined(cell.outputs))
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    for texts, kind in shown_texts(*code_cells(clean)):
        text = texts[kind].replace(f"{ROOT}/", "").replace(str(ROOT), ".")
        texts[kind] = re.sub(r"\b0x[0-9a-f]{8,}\b", "0x...", text)
    return clean


def _joined(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """Neighbouring pieces of a stream as one, as a terminal would show it at the end; no widgets, no empty text."""
    kept: list[NotebookNode] = []
    for output in outputs:
        if kept and output.output_type == kept[-1].output_type == "stream" and output.name == kept[-1].name:
            kept[-1].text += output.text
        elif _WIDGET_VIEW not in output.get("data", {}):
            kept.append(output)
    for output in (output for output in kept if output.output_type == "stream"):
        lines = output.text.split("\n")  # a carriage return overwrites the line
        output.text = "\n".join(line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines)
    return [output for output in kept if output.output_type != "stream" or output.text.strip()]


def without_processor(notebook: NotebookNode) -> NotebookNode:
    """A committed output names no processor: its times are no figures of this project. A GPU keeps its name."""
    here = backend.detect()
    for texts, kind in shown_texts(*code_cells(notebook)) if here.kind == "cpu" else ():
        texts[kind] = texts[kind].replace(here.name, "this machine's CPU")
    return notebook


def shown_texts(*cells: NotebookNode) -> Iterator[tuple[NotebookNode, str]]:
    """Every text that the outputs of code cells show: what holds it, and its key there."""
    for output in (output for cell in cells for output in cell.outputs):
        texts = output if output.output_type == "stream" else output.get("data", {})
        yield from [(texts, kind) for kind in texts if kind.startswith("text")]


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; ``run`` shows that the series works on this machine. Returns 0, or 2 with a sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m moe_lab.lesson.notebooks", description="Execute the notebooks.")
    help = "update: write them back normalised, with their exercises filled in; run: leave the files as they are"
    parser.add_argument("action", nargs="?", choices=("update", "run"), default="update", help=help)
    parser.add_argument("names", nargs="*", help="notebooks, such as 02; all if none is named")
    chosen = parser.parse_args(arguments)
    try:
        for path in find(chosen.names):
            update(path) if chosen.action == "update" else execute(read(path), path.stem)
    except MoeLabError as error:
        print(f"moe_lab.lesson.notebooks: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
