"""Run the notebooks from the first cell, and keep the committed ones reviewable.

    python -m moe_lab.lesson.notebooks              execute all, write them back normalised (make notebooks)
    python -m moe_lab.lesson.notebooks update 02    the same for the named ones
    python -m moe_lab.lesson.notebooks run 02       execute only; the file stays as it is

``run`` without a name is the one command that shows that the whole series works on this machine, GPU or not.

The .ipynb is the source: edit it in JupyterLab, then run ``update`` on it. :func:`problems` lists what the series asks
of each notebook, :func:`normalise` what a committed file may hold. The rest is custom: an idea is a question, a
picture, about ten lines of code, a line that begins with "**Predict**", the run, and a check that raises; about one
text cell a code cell; a term is explained where it is first used; a number comes with its device; a progress bar is
``tqdm(..., leave=False)``. An exercise is written in ``notebooks/exercises/``, see :mod:`moe_lab.lesson.exercises`.
Here it is one Markdown cell with the tag ``task:KEY``, which ``update`` fills in; it puts the gap and the solution
below.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import html
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat

from moe_lab.lesson.exercises import Exercise, of_notebook
from moe_lab.lesson.export import TAG as SUBMISSION_TAG
from moe_lab.machine import backend
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

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_MACHINE_PATH = re.compile(r"(?<![\w.:/<~])/(?!opt/maca\b)(?:[\w.-]+/){2,}[\w.-]*|site-packages")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}\b")
_READABLE_ID = re.compile(r"[a-z0-9_]+(?:-[a-z0-9_]+)+")


def find(names: Sequence[str] = ()) -> list[Path]:
    """Paths of the notebooks, in order.

    Args:
        names: each the path of a notebook, its stem or the beginning of it ("02"); none means all.

    Raises:
        NotebookError: for a name that fits no notebook.
    """
    everything = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
    found = [] if names else everything
    for path in map(Path, names):
        fitting = [path] if path.is_file() else [each for each in everything if each.name.startswith(path.name)]
        if not fitting:
            raise NotebookError(f"got {str(path)!r}, expected one of {', '.join(each.stem for each in everything)}")
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


def execute(notebook: NotebookNode, name: str) -> NotebookNode:
    """Run a copy of a notebook from the first cell, in ``notebooks/``, with a progress bar on stderr.

    Raises:
        NotebookError: with the cell and its error, at the first one that raises or takes longer than CELL_TIMEOUT_S.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from tqdm import tqdm

    notebook = copy.deepcopy(notebook)
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


def update(path: Path, *, reset: bool = False) -> None:
    """Fill in the exercises, execute, normalise and write back one notebook.

    Args:
        path: the notebook.
        reset: replace an answer in an exercise by the gap.

    Raises:
        NotebookError: if a cell fails, or an exercise holds an answer and ``reset`` is False; the file is unchanged.
    """
    notebook = fill_exercises(read(path), path.stem, reset=reset)
    write_atomic(path, to_bytes(without_processor(normalise(execute(notebook, path.stem)))))


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
    own = {exercise.key: _cells(exercise, number) for number, exercise in enumerate(of_notebook(name), start=1)}
    for cell in notebook.cells:
        part, key = _exercise_tag(cell)
        if part and key not in own:
            raise NotebookError(f"{name}: got the tag {part}:{key}, expected an exercise of this notebook")
        if part == "gap" and cell.source != own[key][1].source and not reset:
            raise NotebookError(
                f"{name}: exercise {key} holds an answer, which would be lost; keep a copy, then use --reset"
            )
        filled.cells += own[key] if part == "task" else [] if part else [cell]
    return filled


def _cells(exercise: Exercise, number: int) -> list[NotebookNode]:
    """The cells of an exercise: its task, the gap with the check, hints and solution.

    The folds are HTML without blank lines: Markdown inside ``<details>`` falls out of the fold in nbconvert.
    """
    code = html.escape(exercise.solution, quote=False)
    code = "\n".join(line or "<!-- -->" for line in code.split("\n"))
    folds = {f"Hint {hint}": f"<p>{_inline_html(text)}</p>" for hint, text in enumerate(exercise.hints, start=1)}
    folds["Solution"] = f"<pre><code>{code}</code></pre><p>{_inline_html(exercise.lesson)}</p>"
    sources = {
        "task": f"### Exercise {number} · {exercise.title}\n\n{exercise.task}",
        "gap": f'{exercise.gap}\n\n\ncheck("{exercise.key}", {exercise.answer})',
        "solution": "\n\n".join(
            f"<details><summary>{title}</summary>{text}</details>" for title, text in folds.items()
        ),
    }
    made = []
    for part, source in sources.items():
        new = nbformat.v4.new_code_cell if part == "gap" else nbformat.v4.new_markdown_cell
        made.append(new(source, id=f"{part}-{exercise.key}", metadata={"tags": [f"{part}:{exercise.key}"]}))
    return made


def _inline_html(text: str) -> str:
    """Markdown's code spans and emphasis, as HTML."""
    pieces = html.escape(text, quote=False).split("`")
    pieces[::2] = [re.sub(r"\*(?!\s)([^*]+)(?<!\s)\*", r"<em>\1</em>", piece) for piece in pieces[::2]]
    pieces[1::2] = [f"<code>{piece}</code>" for piece in pieces[1::2]]
    return "".join(pieces)


def _exercise_tag(cell: NotebookNode) -> tuple[str, str]:
    found = re.search(r"^(task|gap|solution):(.*)", "\n".join(_tags(cell)), re.MULTILINE)
    return (found[1], found[2]) if found else ("", "")


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
        kept = {key: value for key, value in cell.metadata.items() if key in ("tags", "jupyter")}
        cell.metadata = nbformat.from_dict(kept)
        cell.source = cell.source.rstrip()
        cell.id = _stable_id(cell, taken)
        taken.add(cell.id)
        cell.pop("attachments", None)
    for count, cell in enumerate(_code_cells(clean), start=1):
        cell.execution_count = count
        cell.outputs = _joined(cell.outputs)
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    for texts, kind in _texts(*_code_cells(clean)):
        texts[kind] = _ADDRESS.sub("0x...", texts[kind].replace(f"{ROOT}/", "").replace(str(ROOT), "."))
    return clean


def _stable_id(cell: NotebookNode, taken: set[str]) -> str:
    """Keep a readable id, else derive one from the text, so that inserting a cell leaves the others' ids alone."""
    base = cell.get("id", "")
    if not _READABLE_ID.fullmatch(base) or base in taken:
        base = f"{cell.cell_type}-{hashlib.sha256(cell.source.encode()).hexdigest()[:8]}"
    copies = (f"{base}-{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([base], copies) if each not in taken)


def _joined(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """Neighbouring pieces of a stream as one, as a terminal would show it at the end; no widgets, no empty text."""
    kept: list[NotebookNode] = []
    for output in outputs:
        if kept and output.output_type == kept[-1].output_type == "stream" and output.name == kept[-1].name:
            kept[-1].text += output.text
        elif _WIDGET_VIEW not in output.get("data", {}):
            kept.append(output)
    for output in kept:
        if output.output_type == "stream":
            # A carriage return overwrites the line.
            lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in output.text.split("\n")]
            output.text = "\n".join(lines)
    return [output for output in kept if output.output_type != "stream" or output.text.strip()]


def without_processor(notebook: NotebookNode) -> NotebookNode:
    """A committed output names no processor: its times are no figures of this project. A GPU keeps its name."""
    here = backend.detect()
    for texts, kind in _texts(*_code_cells(notebook)) if here.kind == "cpu" else ():
        texts[kind] = texts[kind].replace(here.name, "this machine's CPU")
    return notebook


def _texts(*cells: NotebookNode) -> Iterator[tuple[NotebookNode, str]]:
    """Every text that the outputs of code cells show: what holds it, and its key there."""
    for output in (output for cell in cells for output in cell.outputs):
        texts = output if output.output_type == "stream" else output.get("data", {})
        yield from [(texts, kind) for kind in texts if kind.startswith("text")]


def problems(notebook: NotebookNode, name: str) -> list[str]:
    """What is missing from an executed notebook, one sentence each; an empty list is what the tests want."""
    first, last, code = notebook.cells[0], notebook.cells[-1], _code_cells(notebook)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    keys = [key for part, key in map(_exercise_tag, notebook.cells) if part == "task"]
    own = [exercise.key for exercise in of_notebook(name)]
    setup = ["setup" in _tags(cell) for cell in code]
    size = len(to_bytes(notebook))
    fine = {
        f"the first line is no title '# {name[:2]} ...'": re.match(rf"# {name[:2]} \w", first.source),
        "nothing is predicted before it is run: '**Predict**' is missing": "**Predict**" in text,
        "expected the tag 'setup' on the first code cell and on no other": setup == [True] + [False] * (len(code) - 1),
        f"got the exercises {keys}, expected one to three, as exercises/{name}.yaml has them": 1 <= len(keys) <= 3
        and keys == own,
        "there is no figure": any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs),
        f"got {size} bytes, expected less than {MAX_BYTES}": size < MAX_BYTES,
    }
    begin, end = ("**You will be able to**", "**Minutes:**", "**Needs:**"), ("## Recap", "**Next:**", "**Sources:**")
    fine |= {f"{word!r} is missing from the cell {first.id}": word in first.source for word in begin}
    fine |= {f"{word!r} is missing from the cell {last.id}": word in last.source for word in end}
    return [sentence for sentence, holds in fine.items() if not holds] + [
        sentence for cell in code for sentence in _problems_of(cell)
    ]


def _problems_of(cell: NotebookNode) -> Iterator[str]:
    lines = cell.source.count("\n") + 1
    if lines > MAX_CELL_LINES and SUBMISSION_TAG not in _tags(cell):
        yield f"cell {cell.id} has {lines} lines, expected at most {MAX_CELL_LINES}"
    for output in cell.outputs:
        if output.output_type == "error" or output.get("name") == "stderr":
            yield f"cell {cell.id} left an error or a warning: {(output.get('text') or output.get('evalue'))[:80]!r}"
        if "image/png" in output.get("data", {}) and not output.metadata.get("image/png", {}).get("alt"):
            yield f"a figure of cell {cell.id} has no description; show it with moe_lab.lesson.display.show"
    for texts, kind in _texts(cell):
        for match in _MACHINE_PATH.finditer(texts[kind]):
            yield f"cell {cell.id} shows a path of one machine: {match.group()}"


def _code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


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
