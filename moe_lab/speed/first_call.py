"""What the first call of a submission pays for, and what later calls find ready.

TileLang keeps what it has compiled in a folder. So a kernel is met in three states: nowhere, in that folder, and in the
process that runs it. Two new processes in a row show all three, with a folder that is empty when they begin.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from moe_lab.machine import backend
from moe_lab.machine.child import Child, ChildError
from moe_lab.problem.contract import Case
from moe_lab.problem.errors import BackendError, ContractError
from moe_lab.problem.submission import Submission


@dataclass(frozen=True)
class Calls:
    """Calls of one new process, each with the same tensors."""

    times_ms: tuple[float, ...]  # wall time of each call in order, until its result is there
    kernels: int  # compiled kernels that the process added to TileLang's folder


def first_calls(
    submission: Submission, case: Case, sizes: Sequence[int], *, calls: int = 3,
    say: Callable[[str], object] = lambda text: None,
) -> tuple[Calls, Calls]:  # fmt: skip
    """Call a submission in one new process, then in another that finds what the first one compiled.

    Importing torch and TileLang and drawing the inputs happen before the clock starts. There is no sandbox: it is for
    your own code. Raises ContractError for no calls, BackendError with the reason if it does not run here.
    """
    if calls < 1:
        raise ContractError(f"got calls={calls}, expected at least 1")
    request = asdict(submission) | {"case": astuple(case), "sizes": list(sizes), "calls": calls}
    with tempfile.TemporaryDirectory(prefix="moe_lab_first_call_") as folder:
        runs, there = [], 0
        for words in ("with nothing compiled", "with the kernel on disk"):
            say(f"{submission.name}: a new process {words}")
            try:
                with Child("moe_lab.speed.first_call:times_ms", environment={"TILELANG_CACHE_DIR": folder}) as child:
                    times = child.ask(request)
            except ChildError as error:
                raise BackendError(f"{submission.name} does not run here: {error}") from None
            # Each complete kernel in TileLang's folder has a description of its parameters beside the code.
            kernels = {path.parent for path in Path(folder).rglob("params.json") if ".staging" not in path.parts}
            runs.append(Calls(tuple(times), len(kernels) - there))
            there = len(kernels)
    return runs[0], runs[1]


def times_ms(say: object, source: str, name: str, case: list[int], sizes: list[int], calls: int) -> list[float]:
    """In the child: wall times of calls in milliseconds."""
    import torch

    from moe_lab.problem.inputs import make_inputs

    where = backend.prepare()
    inputs = make_inputs(Case(*case), sizes, device=where.torch_device)  # type: ignore[arg-type]
    entry, times = backend.load(Submission(source, name)), []
    finish = (lambda: None) if where.kind == "cpu" else torch.cuda.synchronize
    finish()
    for _ in range(calls):
        start = time.perf_counter()
        entry(*inputs.args)
        finish()
        times.append((time.perf_counter() - start) * 1e3)
    return times
