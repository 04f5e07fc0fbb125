"""Run the notebooks from the first cell, and keep the committed ones reviewable.

    python -m moe_lab.lesson.notebooks              execute all, write them back normalised (make notebooks)
    python -m moe_lab.lesson.notebooks update 02    the same for the named ones
    python -m moe_lab.lesson.notebooks run 02       execute only; the file stays as it is

``run`` without a name is the one command that shows that the whole series works on this machine, GPU or not.

How to write a notebook
-----------------------
The .ipynb is the source: edit it in JupyterLab, then run ``update`` on it. :func:`problems` lists what the series asks
of each notebook and :func:`normalise` what a committed file may hold; the tests call both. In short:

- The first cell is Markdown: ``# NN Title``, then "**You will be able to** ...", "**Minutes:** ... **Needs:** ...".
- The first code cell has the tag ``setup``: imports and constants, nothing that takes long.
- An idea is a question, a picture, about ten lines of code (never over 40, apart from the cell tagged
  ``submission``), a line that begins with "**Predict**", the run, and a check that raises. About one text cell a code
  cell. A term is explained where it is first used. A number comes with its device.
- A figure is shown with :func:`moe_lab.lesson.display.show`, which puts its description beside it.
- An exercise is written in :mod:`moe_lab.lesson.exercises`. Here it is one Markdown cell with the tag ``task:KEY``;
  ``update`` fills it in and puts the gap (tag ``gap:KEY``) and the hints with the folded solution (tag
  ``solution:KEY``) below it.
- The last cell is Markdown: ``## Recap``, then "**Next:** ..." and "**Sources:** ...".
- Progress bars: ``tqdm(..., leave=False)``, so that none is left in the output.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import html
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat

from moe_lab.lesson.exercises import EXERCISES, Exercise, of_notebook
from moe_lab.lesson.export import TAG as SUBMISSION_TAG
from moe_lab.problem.errors import MoeLabError, NotebookError
from moe_lab.problem.submission import write_atomic

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"

#: A committed notebook stays below this, so that a code host still draws it.
MAX_BYTES = 400_000
MAX_CELL_LINES = 40
#: One cell may take this long; the judge compiles and runs a whole submission in one.
CELL_TIMEOUT_S = 300

_SETUP_TAG = "setup"
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_MACHINE_PATH = re.compile(r"(?<![\w.:/<~])/(?!opt/maca\b)(?:[\w.-]+/){2,}[\w.-]*|site-packages")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}\b")
_READABLE_ID = re.compile(r"[a-z0-9_]+(?:-[a-z0-9_]+)+")


# --- files -----------------------------------------------------------------------------------------------------------


def find(names: Sequence[str] = ()) -> list[Path]:
    """Paths of the notebooks, in order.

    Args:
        names: each the path of a notebook, its stem or the beginning of it ("02"); none means all.

    Raises:
        NotebookError: for a name that fits no notebook.
    """
    everything = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
    if not names:
        return everything
    found = []
    for name in names:
        path = Path(name)
        fitting = [path] if path.is_file() else [each for each in everything if each.name.startswith(path.name)]
        if not fitting:
            raise NotebookError(f"got {name!r}, expected one of {', '.join(each.stem for each in everything)}")
        found += fitting
    return found


def read(path: Path) -> NotebookNode:
    """Read one notebook.

    Raises:
        NotebookError: if it is missing or no notebook.
    """
    try:
        notebook = nbformat.v4.reads(path.read_text(encoding="utf-8"))
        nbformat.validate(notebook)
    except FileNotFoundError:
        raise NotebookError(f"got no file {path}, expected a notebook") from None
    except (OSError, ValueError, TypeError, AttributeError, KeyError, nbformat.ValidationError):
        raise NotebookError(f"{path} is no notebook of format 4, usually because a save broke off") from None
    return notebook


def to_bytes(notebook: NotebookNode) -> bytes:
    """The file's content."""
    return (nbformat.writes(notebook).rstrip("\n") + "\n").encode()


# --- execution -------------------------------------------------------------------------------------------------------


def execute(notebook: NotebookNode, name: str) -> NotebookNode:
    """Run a copy of a notebook from the first cell, in ``notebooks/``, with a progress bar on stderr.

    Raises:
        NotebookError: with the cell and its error, at the first one that raises or takes longer than CELL_TIMEOUT_S.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from tqdm import tqdm

    notebook = copy.deepcopy(notebook)
    running = 0
    with tqdm(total=len(_code_cells(notebook)), desc=name, unit="cell", file=sys.stderr) as bar:

        def started(cell: NotebookNode, cell_index: int) -> None:
            nonlocal running
            running = cell_index

        def done(cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
            bar.update()

        client = NotebookClient(
            notebook, kernel_name="python3", timeout=CELL_TIMEOUT_S, record_timing=False,
            # The kernel says on stderr that loopback is not encrypted; only its errors are of use here.
            extra_arguments=["--log-level=40"], resources={"metadata": {"path": str(FOLDER)}},
            on_cell_execute=started, on_cell_executed=done,
        )  # fmt: skip
        try:
            client.execute()
        except CellExecutionError as error:
            raise NotebookError(f"{name}, cell {running + 1}: {error.ename}: {error.evalue}") from None
        except CellTimeoutError:
            raise NotebookError(f"{name}, cell {running + 1}: still running after {CELL_TIMEOUT_S} s") from None
        except DeadKernelError:
            raise NotebookError(f"{name}, cell {running + 1}: the kernel died, usually for lack of memory") from None
    return notebook


def update(path: Path, *, reset: bool = False) -> None:
    """Fill in the exercises, execute, normalise and write back one notebook.

    Args:
        path: the notebook.
        reset: replace an answer in an exercise by the gap.

    Raises:
        NotebookError: if a cell fails, or an exercise holds an answer and ``reset`` is False; the file is unchanged.
    """
    notebook = fill_exercises(read(path), path.stem, reset=reset)
    done = normalise(execute(notebook, path.stem))
    _forget_processor(done)
    write_atomic(path, to_bytes(done))


def _forget_processor(notebook: NotebookNode) -> None:
    """A committed output names no processor: its times are no figures of this project. A GPU keeps its name."""
    from moe_lab.machine import backend

    here = backend.detect()
    if here.kind != "cpu":
        return
    for output in (output for cell in _code_cells(notebook) for output in cell.outputs):
        texts = output if output.output_type == "stream" else output.get("data", {})
        for kind in [kind for kind in texts if kind.startswith("text")]:
            texts[kind] = texts[kind].replace(here.name, "this machine's CPU")


# --- exercises -------------------------------------------------------------------------------------------------------


def fill_exercises(notebook: NotebookNode, name: str, *, reset: bool = False) -> NotebookNode:
    """Write the three cells of every exercise: task, gap, and hints with the solution.

    Args:
        notebook: a notebook with a cell tagged ``task:KEY`` for each of its exercises.
        name: its stem.
        reset: replace an answer by the gap.

    Raises:
        NotebookError: for a key that is no exercise of this notebook, or an answer that would be lost.
    """
    filled = copy.deepcopy(notebook)
    filled.cells = []
    numbers = {exercise.key: number for number, exercise in enumerate(of_notebook(name), start=1)}
    for cell in notebook.cells:
        part, key = _exercise_tag(cell)
        if part and key not in numbers:
            raise NotebookError(f"{name}: got the tag {part}:{key}, expected an exercise of this notebook")
        if part == "gap" and cell.source != gap_cell(EXERCISES[key]) and not reset:
            raise NotebookError(
                f"{name}: exercise {key} holds an answer, which would be lost; keep a copy, then use --reset"
            )
        if part == "task":
            exercise = EXERCISES[key]
            filled.cells += [
                _tagged(nbformat.v4.new_markdown_cell(task_cell(exercise, numbers[key])), "task", key),
                _tagged(nbformat.v4.new_code_cell(gap_cell(exercise)), "gap", key),
                _tagged(nbformat.v4.new_markdown_cell(solution_cell(exercise)), "solution", key),
            ]
        elif not part:
            filled.cells.append(cell)
    return filled


def task_cell(exercise: Exercise, number: int) -> str:
    """Markdown of the task."""
    return f"### Exercise {number} · {exercise.title}\n\n{exercise.task}"


def gap_cell(exercise: Exercise) -> str:
    """Code with the gap and the check."""
    return f'{exercise.gap}\n\n\ncheck("{exercise.key}", {exercise.answer})'


def solution_cell(exercise: Exercise) -> str:
    """Hints and solution, each folded.

    In HTML without blank lines: Markdown inside ``<details>`` falls out of the fold in nbconvert.
    """
    folds = [
        f"<details><summary>Hint {number}</summary><p>{_inline_html(hint)}</p></details>"
        for number, hint in enumerate(exercise.hints, start=1)
    ]
    code = html.escape(exercise.solution, quote=False)
    code = "\n".join(line or "<!-- -->" for line in code.split("\n"))
    folds.append(
        f"<details><summary>Solution</summary><pre><code>{code}</code></pre>"
        f"<p>{_inline_html(exercise.lesson)}</p></details>"
    )
    return "\n\n".join(folds)


def _inline_html(text: str) -> str:
    """Markdown's code spans and emphasis, as HTML."""
    pieces = html.escape(text, quote=False).split("`")
    pieces[::2] = [re.sub(r"\*(?!\s)([^*]+)(?<!\s)\*", r"<em>\1</em>", piece) for piece in pieces[::2]]
    pieces[1::2] = [f"<code>{piece}</code>" for piece in pieces[1::2]]
    return "".join(pieces)


def _exercise_tag(cell: NotebookNode) -> tuple[str, str]:
    for tag in cell.metadata.get("tags", []):
        part, colon, key = tag.partition(":")
        if colon and part in ("task", "gap", "solution"):
            return part, key
    return "", ""


def _tagged(cell: NotebookNode, part: str, key: str) -> NotebookNode:
    cell.metadata["tags"] = [f"{part}:{key}"]
    cell.id = f"{part}-{key}"
    return cell


# --- what is committed -----------------------------------------------------------------------------------------------


def normalise(notebook: NotebookNode) -> NotebookNode:
    """A copy that holds nothing of the machine or the moment; normalising it again changes nothing.

    Execution counts start at 1, ids are stable, metadata is tags only, widget state and finished progress bars are
    gone, and paths of this checkout and memory addresses are cut out of the outputs' text.
    """
    clean = copy.deepcopy(notebook)
    clean.metadata = nbformat.from_dict(_METADATA)
    clean.nbformat, clean.nbformat_minor = 4, 5
    taken: set[str] = set()
    for cell in clean.cells:
        cell.metadata = nbformat.from_dict(
            {key: value for key, value in cell.metadata.items() if key in ("tags", "jupyter")}
        )
        cell.source = cell.source.rstrip()
        cell.id = _stable_id(cell, taken)
        if cell.cell_type == "markdown":
            cell.pop("attachments", None)
    for count, cell in enumerate(_code_cells(clean), start=1):
        cell.execution_count = count
        cell.outputs = list(_clean_outputs(cell.outputs, count))
    return clean


def _stable_id(cell: NotebookNode, taken: set[str]) -> str:
    """Keep a readable id, else derive one from the text, so that inserting a cell leaves the others' ids alone."""
    old = cell.get("id", "")
    if not _READABLE_ID.fullmatch(old) or old in taken:
        old = f"{cell.cell_type}-{hashlib.sha256(cell.source.encode()).hexdigest()[:8]}"
    new, copies = old, 1
    while new in taken:
        copies += 1
        new = f"{old}-{copies}"
    taken.add(new)
    return new


def _clean_outputs(outputs: Sequence[NotebookNode], count: int) -> Iterator[NotebookNode]:
    previous = None
    for output in outputs:
        if output.output_type == "stream":
            if previous is not None and previous.output_type == "stream" and previous.name == output.name:
                previous.text += output.text
                continue
        elif "data" in output:
            if _WIDGET_VIEW in output.data:
                continue
            for kind, text in output.data.items():
                if kind.startswith("text/"):
                    output.data[kind] = _clean_text(text)
            if output.output_type == "execute_result":
                output.execution_count = count
        if previous is not None:
            yield from _finished(previous)
        previous = output
    if previous is not None:
        yield from _finished(previous)


def _finished(output: NotebookNode) -> Iterator[NotebookNode]:
    if output.output_type == "stream":
        # A carriage return overwrites the line: what a terminal would show at the end is what stays.
        lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in output.text.split("\n")]
        output.text = _clean_text("\n".join(lines))
        if not output.text.strip():
            return
    yield output


def _clean_text(text: str) -> str:
    return _ADDRESS.sub("0x...", text.replace(f"{ROOT}/", "").replace(str(ROOT), "."))


# --- what the series asks --------------------------------------------------------------------------------------------


def problems(notebook: NotebookNode, name: str) -> list[str]:
    """What is missing from an executed notebook, one sentence each; an empty list is what the tests want."""
    found = [*_anatomy(notebook, name), *_outputs_found_wrong(notebook)]
    size = len(to_bytes(notebook))
    if size >= MAX_BYTES:
        found.append(f"got {size} bytes, expected less than {MAX_BYTES}")
    return found


def _anatomy(notebook: NotebookNode, name: str) -> Iterator[str]:
    first, last = notebook.cells[0], notebook.cells[-1]
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    if not re.match(rf"# {name[:2]} \w", first.source):
        yield f"the first line is no title '# {name[:2]} ...'"
    for cell, words in ((first, ("**You will be able to**", "**Minutes:**", "**Needs:**")),
                        (last, ("## Recap", "**Next:**", "**Sources:**"))):  # fmt: skip
        yield from (f"{word!r} is missing from the cell {cell.id}" for word in words if word not in cell.source)
    if "**Predict**" not in text:
        yield "nothing is predicted before it is run: '**Predict**' is missing"
    code = _code_cells(notebook)
    if [_SETUP_TAG in cell.metadata.get("tags", []) for cell in code] != [True] + [False] * (len(code) - 1):
        yield f"expected the tag {_SETUP_TAG!r} on the first code cell and on no other"
    for cell in code:
        lines = cell.source.count("\n") + 1
        if lines > MAX_CELL_LINES and SUBMISSION_TAG not in cell.metadata.get("tags", []):
            yield f"cell {cell.id} has {lines} lines, expected at most {MAX_CELL_LINES}"
    keys = [key for part, key in map(_exercise_tag, notebook.cells) if part == "task"]
    if keys != [exercise.key for exercise in of_notebook(name)] or not 1 <= len(keys) <= 3:
        yield f"got the exercises {keys}, expected one to three: those of {name} in exercises.py, in order"


def _outputs_found_wrong(notebook: NotebookNode) -> Iterator[str]:
    pictures = 0
    for cell in _code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                said = output.get("text") or output.get("evalue")
                yield f"cell {cell.id} left an error or a warning: {said[:80]!r}"
            data = output.get("data", {})
            if "image/png" in data:
                pictures += 1
                if not output.metadata.get("image/png", {}).get("alt"):
                    yield f"a figure of cell {cell.id} has no description; show it with moe_lab.lesson.display.show"
            texts = [output.get("text", ""), *(data[kind] for kind in data if kind.startswith("text/"))]
            yield from (
                f"cell {cell.id} shows a path of one machine: {match.group()}"
                for text in texts for match in _MACHINE_PATH.finditer(text)
            )  # fmt: skip
    if not pictures:
        yield "there is no figure"


def _code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the top of this file. Returns 0, or 2 with one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m moe_lab.lesson.notebooks", description="Execute the notebooks.")
    parser.add_argument("action", nargs="?", choices=("update", "run"), default="update")
    parser.add_argument("names", nargs="*", help="notebooks, such as 02; all if none is named")
    parser.add_argument("--reset", action="store_true", help="put the gap back where an exercise holds an answer")
    chosen = parser.parse_args(arguments)
    try:
        for path in find(chosen.names):
            if chosen.action == "run":
                execute(read(path), path.stem)
            else:
                update(path, reset=chosen.reset)
    except MoeLabError as error:
        print(f"moe_lab.lesson.notebooks: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
