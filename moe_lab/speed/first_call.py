"""What the first call of a submission pays for, and what later calls find ready.

TileLang keeps what it has compiled in a folder. So a kernel can be met in three states: nowhere, in that folder, and
in the process that runs it. Two new processes in a row show all three, with a folder that is empty when they begin.
The submission runs as it is, without the judge's sandbox: it is for your own code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_lab.problem.contract import Case
from moe_lab.problem.errors import BackendError, ContractError, MoeLabError
from moe_lab.problem.submission import Submission

#: Begins the line that is ours: whatever else the process prints belongs to the submission or to TileLang.
_MARK = "moe_lab first call "


@dataclass(frozen=True)
class Calls:
    """Calls of one new process, each with the same tensors.

    Attributes:
        times_ms: wall time of each call in order, until its result is there.
        kernels: compiled kernels that the process added to TileLang's folder.
    """

    times_ms: tuple[float, ...]
    kernels: int


def first_calls(
    submission: Submission,
    case: Case,
    sizes: Sequence[int],
    *,
    calls: int = 3,
    say: Callable[[str], object] = lambda text: None,
) -> tuple[Calls, Calls]:
    """Call a submission in one new process, then in another that finds what the first one compiled.

    Importing torch and TileLang and drawing the inputs happen before the clock starts.

    Args:
        submission: whose ``run_kernel``.
        case: sizes.
        sizes: rows of each expert, which sum to ``case.num_tokens``.
        calls: of each process, at least 1.
        say: told what is being done.

    Returns:
        The process that began with an empty folder, and the one after it.

    Raises:
        ContractError: for no calls.
        BackendError: if the submission does not run here; the message holds the reason.
    """
    if calls < 1:
        raise ContractError(f"got calls={calls}, expected at least 1")
    request = {
        "source": submission.source, "name": submission.name, "calls": calls, "sizes": list(sizes),
        "case": [case.name, case.num_experts, case.hidden, case.intermediate, case.num_tokens],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="moe_lab_first_call_") as folder:
        runs, there = [], 0
        for words in ("with nothing compiled", "with the kernel on disk"):
            say(f"{submission.name}: a new process {words}")
            times_ms = _in_a_process(request, folder)
            before, there = there, _kernels(Path(folder))
            runs.append(Calls(times_ms, there - before))
    return runs[0], runs[1]


def _in_a_process(request: dict[str, Any], folder: str) -> tuple[float, ...]:
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part), "TILELANG_CACHE_DIR": folder,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "moe_lab.speed.first_call"], input=json.dumps(request), capture_output=True, text=True,
        check=False, env=environment,
    )  # fmt: skip
    answer = next((line for line in done.stdout.splitlines() if line.startswith(_MARK)), "")
    found: dict[str, Any] = json.loads(answer.removeprefix(_MARK) or "{}")
    if "times_ms" in found:
        return tuple(found["times_ms"])
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    reason = found.get("error") or " ".join([f"the process ended with exit code {done.returncode}", *last])
    raise BackendError(f"{request['name']} does not run here: {reason}")


def _kernels(folder: Path) -> int:
    """Complete kernels in a folder of TileLang's; each has a description of its parameters beside the code."""
    return len({path.parent for path in folder.rglob("params.json") if ".staging" not in path.parts})


# --- in the child ----------------------------------------------------------------------------------------------------


def _answer() -> None:
    request = json.loads(sys.stdin.read())
    try:
        found: dict[str, Any] = {"times_ms": _times_ms(**request)}
    except MoeLabError as error:
        found = {"error": str(error)}
    # Whatever a submission and a compiler raise becomes one line of the parent's error.
    except Exception as error:  # noqa: BLE001
        found = {"error": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"}
    print(f"\n{_MARK}{json.dumps(found)}", flush=True)


def _times_ms(source: str, name: str, calls: int, sizes: list[int], case: list[Any]) -> list[float]:
    import torch

    from moe_lab.machine import backend
    from moe_lab.problem.inputs import make_inputs

    where = backend.prepare()
    inputs = make_inputs(Case(*case), sizes, device=where.torch_device)

    def finish() -> None:
        if where.kind != "cpu":
            torch.cuda.synchronize()

    entry = backend.load(Submission(source, name))
    finish()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        entry(*inputs.args)
        finish()
        times.append((time.perf_counter() - start) * 1e3)
    return times


if __name__ == "__main__":
    _answer()
