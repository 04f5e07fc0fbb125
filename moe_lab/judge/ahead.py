"""Compiling ahead: further workers run the host code on the shapes that later calls have, while earlier ones run.

A kernel is compiled anew for each case and a GPU's compiler takes seconds for one, so a run would mostly wait. What
these workers compile lands in TileLang's disk cache, where the worker that makes the calls finds it. They launch
nothing, and nothing that happens to them says anything about the submission.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType

from moe_lab.judge.plan import Group
from moe_lab.judge.process import Limits
from moe_lab.judge.session import Progress, Session
from moe_lab.problem.contract import ARGUMENTS, Case
from moe_lab.problem.inputs import make_inputs
from moe_lab.problem.submission import Submission
from moe_lab.steps import step

#: Shape, dtype and, of an index array, values of one argument.
_Spec = tuple[tuple[int, ...], str, "list[int] | None"]
#: Calls do not wait longer than this; then the workers are ended and the calls compile for themselves.
_PATIENCE_S = 120.0


@dataclass
class _Job:
    """Kernels of one set of shapes.

    Attributes:
        tensors: the ten arguments.
        baseline: compile the baseline's kernels instead of the submission's.
        done: set once they are compiled, or will not be.
    """

    tensors: list[_Spec]
    baseline: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class Ahead:
    """Workers that compile; a context manager that ends them.

    Args:
        submission: whose kernels.
        groups: what will be called, in that order.
        limits: of each worker.
        sandboxed: whether the run-time sandbox applies.
        device: torch device of the kernels.
        processes: how many workers at most; with 0 nothing is compiled ahead.
    """

    def __init__(
        self, submission: Submission, groups: Iterable[Group], limits: Limits, *, sandboxed: bool, device: str,
        processes: int,
    ) -> None:  # fmt: skip
        self._submission = submission
        self._limits = limits
        self._sandboxed = sandboxed
        self._device = device
        self._lock = threading.Lock()
        self._closed = False
        self._sessions: list[Session] = []
        self._by_group: dict[str, list[_Job]] = {}
        jobs: dict[object, _Job] = {}
        is_baseline = submission.source == step("s0_baseline").source
        for group in groups if processes else ():
            tensors = specs(group)
            mine = self._by_group.setdefault(group.name, [])
            mine.append(jobs.setdefault(repr(tensors), _Job(tensors)))
            if group.timed_rounds and not is_baseline:
                mine.append(jobs.setdefault(group.name, _Job(tensors, baseline=True)))
        self._jobs = deque(jobs.values())
        self._all = tuple(jobs.values())
        self._threads = [
            threading.Thread(target=self._serve, name=f"compile ahead {number}", daemon=True)
            for number in range(min(processes, len(self._all)))
        ]
        self._working = len(self._threads)

    def __enter__(self) -> Ahead:
        """Start the workers."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End them."""
        self.close()

    def close(self) -> None:
        """End the workers, wherever they are."""
        with self._lock:
            self._closed = True
        for thread in self._threads:
            while thread.is_alive():
                # Again and again: one of them may only just be starting.
                for session in self._sessions:
                    session.interrupt()
                thread.join(0.1)

    def wait(self, group: Group, say: Progress) -> None:
        """Wait until the kernels of a group are compiled, or will not be.

        Args:
            group: what is called next. One that fills the device or is timed has it to itself.
            say: progress.
        """
        start = time.monotonic()
        jobs = self._all if group.on_device else self._by_group.get(group.name, ())

        def busy() -> bool:
            alone = not group.on_device or not any(thread.is_alive() for thread in self._threads)
            return not (alone and all(job.done.is_set() for job in jobs))

        while busy():
            waited = time.monotonic() - start
            if waited > _PATIENCE_S:
                self.close()
                return
            say(f"{group.name}: compiling ({waited:.0f} s)")
            time.sleep(0.1)

    def _next(self) -> _Job | None:
        with self._lock:
            return self._jobs.popleft() if self._jobs and not self._closed else None

    def _serve(self) -> None:
        """One worker's life."""
        session = Session(
            self._submission, (), self._limits, sandboxed=self._sandboxed, say=lambda text: None, device=self._device
        )
        self._sessions.append(session)
        try:
            with session:
                while (job := self._next()) is not None:
                    try:
                        session.compile(job.tensors, baseline=job.baseline)
                    finally:
                        job.done.set()
        except Exception:  # noqa: BLE001 - what is wrong with the file shows in its calls
            pass
        finally:
            with self._lock:
                self._working -= 1
                if not self._working:
                    for job in self._all:
                        job.done.set()


def processes_for(device: str) -> int:
    """How many workers compile ahead: none where the calls themselves need the processor.

    Args:
        device: torch device of the kernels.
    """
    # A compiler keeps one core busy, and the judge, the worker and the driver want theirs.
    return 0 if device == "cpu" else len(os.sched_getaffinity(0)) * 3 // 4


def specs(group: Group) -> list[_Spec]:
    """The ten arguments of a group's first call: shapes, dtypes, and the index arrays themselves.

    Args:
        group: shapes and variant.
    """
    call, hidden, intermediate = group.calls[0], group.hidden, group.intermediate
    thin = make_inputs(
        Case(group.name, len(call.sizes), 1, 1, sum(call.sizes)), call.sizes, variant=group.variant, seed=call.seed
    )  # fmt: skip
    experts, rows = len(call.sizes), thin.out.shape[0]
    large = {
        "stacked_expert_tokens": (rows, hidden), "gate_w": (experts, intermediate, hidden),
        "up_w": (experts, intermediate, hidden), "down_w": (experts, hidden, intermediate), "out": (rows, hidden),
    }  # fmt: skip
    return [
        (
            large.get(argument.name, tuple(tensor.shape)), str(tensor.dtype).removeprefix("torch."),
            None if tensor.is_floating_point() else tensor.tolist(),
        )
        for argument, tensor in zip(ARGUMENTS, thin.args, strict=True)
    ]  # fmt: skip
