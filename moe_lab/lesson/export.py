"""From a notebook's final cell to ``submission.py``: byte for byte, and never a half-written file.

In a notebook the cell magic ``%%submission FILE`` writes FILE and judges it; ``moe-lab export`` runs nothing.
"""

import json
import os
from pathlib import Path
from typing import Any

from moe_lab import judge
from moe_lab.judge import rules
from moe_lab.problem.contract import Profile
from moe_lab.problem.errors import ExportError, MoeLabError
from moe_lab.problem.submission import Submission, read_file
from moe_lab.steps import step

#: Cell tag and cell magic that mark the final cell.
TAG = "submission"
#: The kernel that a reader of notebook 05 wrote, beside the notebooks; notebook 08 begins with it.
OWN_KERNEL = "my_kernel.py"


def submission_cell(notebook: str | os.PathLike[str]) -> str:
    """The source of the one code cell of an .ipynb file tagged ``submission``, without its ``%%submission`` line.

    Raises ExportError if the notebook cannot be read, or does not hold exactly one tagged code cell with text in it.
    """
    path = Path(notebook)
    try:
        cells = [cell for cell in json.loads(read_file(path))["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells if TAG in cell.get("metadata", {}).get("tags", [])]
    except FileNotFoundError:
        raise ExportError(f"got no file {path}, expected a notebook") from None
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        why = "expected JSON with cells, usually because the save broke off"
        raise ExportError(f"{path} is no notebook, {why}") from None
    if len(sources) != 1:
        raise ExportError(
            f"got {len(sources)} code cells tagged '{TAG}' in {path}, expected exactly 1; set the tag in JupyterLab's "
            "property inspector (the gears at the top right)"
        )
    first, _, rest = sources[0].partition("\n")
    source = rest if first.startswith(f"%%{TAG}") else sources[0]
    if not source.strip():
        raise ExportError(f"got an empty cell tagged '{TAG}' in {path}, expected a whole submission")
    return source


def export(submission: Submission, target: str | os.PathLike[str], profile: Profile = "contest") -> Path:
    """Check a submission against the rules of a profile and write it; returns the path.

    Raises ExportError naming the first violated rule and its line, or a folder that cannot be written to; an existing
    file stays as it was then.
    """
    try:
        violations = [finding for finding in rules.check(submission, profile) if finding.level == "violation"]
        if not violations:
            return submission.save(target)
        first = violations[0]
        said = rules.told(first.message, first.rule_id, len(violations) - 1)
        raise ExportError(f"line {first.line}, column {first.column}: {said}")
    except MoeLabError as error:
        raise ExportError(f"nothing was written: {error}") from None


def load_ipython_extension(ipython: Any) -> None:
    """Register ``%%submission FILE``, called by ``%load_ext moe_lab.lesson.export``."""
    ipython.register_magic_function(_submission_magic, "cell", TAG)


def _submission_magic(line: str, cell: str) -> None:
    """``%%submission FILE``: write the cell to FILE, then judge that file and show the verdict.

    A cell that still holds the baseline takes the reader's own kernel, if there is one.
    """
    from IPython.core.error import UsageError
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    from moe_lab.lesson.kernels import gaps

    # IPython adds a last newline that the notebook, and so ``moe-lab export``, does not have.
    shell = get_ipython()
    kernel = getattr(shell, "kernel", None)
    typed = kernel.get_parent()["content"]["code"].partition("\n")[2] if kernel else cell
    source = typed if typed + "\n" == cell else cell
    target, own = Path(line.strip() or "submission.py"), Path(os.environ.get("MOE_LAB_OWN_KERNEL", OWN_KERNEL))
    try:
        if own.is_file() and source.strip() == step("s0_baseline").source.strip():
            source = Submission.from_file(own).source
            shell.set_next_input(f"%%{TAG} {line}\n{source}", replace=True)
            print(f"This cell now holds your own kernel, {own}, from notebook 05.")
        missing = [str(number + 1) for number in gaps(source)]  # the magic is line 1 of the cell
        if missing:
            print(f"Not filled in yet: replace each ... and run this cell again (lines {', '.join(missing)}).")
            return
        written = Submission.from_file(export(Submission(source, target.name), target))
        handle = display({"text/plain": "judging ..."}, raw=True, display_id=True)
        report = judge.judge(written, progress=lambda text: handle.update({"text/plain": text}, raw=True))
        handle.update(report)
    except MoeLabError as error:
        raise UsageError(str(error)) from None
