"""Does a submission also lower under TileLang 0.1.10, the version that the contest's judge runs?

The judge's own build is a vendor's and needs its card. Upstream 0.1.10 cannot run kernels on a CPU, but it lowers them
to CUDA and HIP source on a machine with no GPU, so what it refuses is worth knowing before a queue of 25 minutes. A
process holds one TileLang, so that one lives in an environment of its own: ``make test-compat`` creates
``.venv-compat``.

The host code of the submission runs in a child process as it is: check a stranger's file against the rules first.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_lab.judge.names import Names
from moe_lab.model.lowering import LoweredKernel, Lowering, lower_many
from moe_lab.problem.contract import CASES, data_dir
from moe_lab.problem.errors import BackendError, MoeLabError
from moe_lab.problem.submission import Submission

#: Sizes and targets to lower: two shapes, since files choose kernels by shape, and the stand-in for 64-lane waves.
_PROBES = ((1, "sm_80"), (2, "sm_80"), (1, "gfx90a"))
#: The target that decides. Upstream 0.1.10's HIP generator lacks things that the C500's own has (vectorised exp2), so
#: gfx90a is shown and decides nothing.
_DECIDES = "sm_80"
#: Parts of a vendor's build that upstream never had.
_VENDOR = ("tilelang.maca", "tilelang.intrinsics")

# Runs under the other TileLang; reads names, answers with those that do not exist, each cut where it stops existing.
_FIND_MISSING = """
import importlib, json, sys
import tilelang
missing = {}
for name in json.load(sys.stdin):
    parts = name.split(".")
    value, path = tilelang, "tilelang"
    for part in parts[1:]:
        path += "." + part
        if not hasattr(value, part):
            try:
                importlib.import_module(path)
            except ImportError:
                missing[name] = path
                break
        value = getattr(value, part)
print("missing " + json.dumps([tilelang.__version__, missing]))
"""


@dataclass(frozen=True)
class MissingName:
    """A TileLang name that the contest's version does not have."""

    name: str  # as written out, such as ``tilelang.language.fast_rcp``
    line: int  # where the submission first uses it


@dataclass(frozen=True)
class Compatibility:
    """What another TileLang makes of a submission."""

    submission: str  # its name
    version: str  # of the other TileLang
    missing: tuple[MissingName, ...]  # names it does not have
    #: For each contest case and target the kernels, or TileLang's reason for giving none.
    lowered: dict[tuple[int, str], list[LoweredKernel] | str]

    @property
    def ok(self) -> bool:
        """Whether every name exists and every case lowers for the target that decides."""
        deciding = [result for (_, target), result in self.lowered.items() if target == _DECIDES]
        return not self.missing and not any(isinstance(result, str) for result in deciding)

    def render(self) -> str:
        """Lines for people."""
        verdict = "lowers" if self.ok else "does not lower as it is"
        lines = [f"{self.submission} under TileLang {self.version}: {verdict}"]
        lines += [f"  line {item.line}: {item.name} does not exist there" for item in self.missing]
        for (case, target), result in self.lowered.items():
            if isinstance(result, str):
                shown = result if target == _DECIDES else f"{result} (upstream's HIP generator; decides nothing)"
            else:
                shown = ", ".join(
                    f"{item.name} {item.shared_bytes} B shared, {item.threads} threads" for item in result
                )
            lines.append(f"  case {case}, {target}: {shown}")
        return "\n".join(lines)


def interpreter() -> Path:
    """Python of the environment with TileLang 0.1.10; raises BackendError if there is none."""
    path = data_dir().parent / ".venv-compat" / "bin" / "python"
    if not path.exists():
        raise BackendError(
            f"got no {path}, expected an environment with TileLang 0.1.10: `make test-compat` creates it"
        )
    return path


def check(submissions: Sequence[Submission], python: Path | None = None) -> list[Compatibility]:
    """Look for names that the contest's TileLang lacks, then lower; one answer for each submission.

    Host code runs in a child process of ``python``, by default :func:`interpreter`. Raises SubmissionError for text
    that is no Python and BackendError if the other environment does not work.
    """
    python = python or interpreter()
    used = [_tilelang_names(submission) for submission in submissions]
    version, absent = _find_missing(sorted({name for names in used for name in names}), python)
    lowerings = [Lowering(submission, CASES[case], target) for submission in submissions for case, target in _PROBES]
    results = iter(lower_many(lowerings, python=python))
    answers = []
    for submission, names in zip(submissions, used, strict=True):
        missing: dict[str, int] = {}
        for name, line in names.items():
            if name in absent:
                missing[absent[name]] = min(line, missing.get(absent[name], line))
        lowered: dict[tuple[int, str], list[LoweredKernel] | str] = {}
        for probe in _PROBES:
            result = next(results)
            lowered[probe] = str(result) if isinstance(result, BackendError) else result
        found = tuple(MissingName(name, line) for name, line in sorted(missing.items(), key=lambda item: item[1]))
        answers.append(Compatibility(submission.name, version, found, lowered))
    return answers


def _tilelang_names(submission: Submission) -> dict[str, int]:
    """Every TileLang name that a file uses, with its first line; a vendor's modules are left out."""
    names = Names(submission.tree)
    used: dict[str, int] = {}
    for node, scope in names.nodes:
        if isinstance(node, ast.ImportFrom) and not node.level:
            found = {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found = set(names.library(node, scope))
        else:
            continue
        for name in found:
            if name.startswith("tilelang.") and not f"{name}.".startswith(tuple(f"{vendor}." for vendor in _VENDOR)):
                used[name] = min(node.lineno, used.get(name, node.lineno))
    return used


def _find_missing(names: list[str], python: Path) -> tuple[str, dict[str, str]]:
    try:
        done = subprocess.run(
            [str(python), "-c", _FIND_MISSING], input=json.dumps(names), capture_output=True, text=True, check=False,
            timeout=300,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"got {python}, expected an interpreter with TileLang that answers ({error})") from None
    answer = next((line for line in done.stdout.splitlines() if line.startswith("missing ")), None)
    if answer is None:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise BackendError(f"got {python}, expected an interpreter with TileLang: {reason}")
    version, missing = json.loads(answer.removeprefix("missing "))
    return version, missing


def main(paths: Sequence[str]) -> int:
    """Print what TileLang 0.1.10 makes of each file; 0 if all lower, 1 if not, 2 if that cannot be found out."""
    if not paths:
        print("moe-lab: got no file, expected one or more Python files with run_kernel", file=sys.stderr)
        return 2
    try:
        answers = check([Submission.from_file(path) for path in paths])
    except MoeLabError as error:
        print(f"moe-lab: {error}", file=sys.stderr)
        return 2
    print("\n".join(answer.render() for answer in answers))
    return 0 if all(answer.ok for answer in answers) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
