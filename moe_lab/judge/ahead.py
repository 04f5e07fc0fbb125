"""Compiling ahead: further workers run the host code on the shapes that later calls have, while earlier ones run.

A kernel is compiled anew for each case and a GPU's compiler takes seconds for one, so a run would mostly wait. What
these workers compile lands in TileLang's disk cache, where the worker that makes the calls finds it. They launch
nothing, and nothing that happens to them says anything about the submission.
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

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
        self._new = lambda: Session(
            submission, (), limits, sandboxed=sandboxed, say=lambda text: None, device=device
        )  # fmt: skip
        self._sessions: list[Session] = []
        self._idle: queue.SimpleQueue[Session] = queue.SimpleQueue()
        self._closed = False
        self._jobs: dict[str, list[Future[None]]] = {}
        self._pool = ThreadPoolExecutor(max(1, processes), "compile ahead")
        asked: dict[object, Future[None]] = {}
        is_baseline = submission.source == step("s0_baseline").source
        for group in groups if processes else ():
            tensors = specs(group)
            for baseline in (False, True) if group.timed_rounds and not is_baseline else (False,):
                if (key := (repr(tensors), baseline)) not in asked:
                    asked[key] = self._pool.submit(self._compile, tensors, baseline)
                self._jobs.setdefault(group.name, []).append(asked[key])

    def __enter__(self) -> Ahead:
        """Nothing more to do: the workers start by themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers, wherever they are."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        # Again and again: one of them may only just be starting.
        while wait(self._all(), timeout=0.1).not_done:
            for session in self._sessions:
                session.interrupt()
        self._pool.shutdown()
        for session in self._sessions:
            session.__exit__()
        self._sessions = []

    def wait(self, group: Group, say: Progress) -> None:
        """Wait until the kernels of a group are compiled, or will not be.

        Args:
            group: what is called next. One that fills the device or is timed has it to itself.
            say: progress.
        """
        start = time.monotonic()
        jobs = self._all() if group.on_device else self._jobs.get(group.name, [])
        while wait(jobs, timeout=0.1).not_done:
            waited = time.monotonic() - start
            if waited > _PATIENCE_S:
                self.__exit__()
                return
            say(f"{group.name}: compiling ({waited:.0f} s)")
        if group.on_device:
            self.__exit__()

    def _all(self) -> list[Future[None]]:
        return [job for jobs in self._jobs.values() for job in jobs]

    def _compile(self, tensors: list[_Spec], baseline: bool) -> None:
        """One job, in a worker that waits for one or in a new one."""
        if self._closed:
            return
        # What is wrong with the file shows in its calls.
        with contextlib.suppress(Exception):
            try:
                session = self._idle.get_nowait()
            except queue.Empty:
                session = self._new()
                self._sessions.append(session)
                session.__enter__()
            session.compile(tensors, baseline=baseline)
            self._idle.put(session)


def processes_for(device: str) -> int:
    """How many workers compile ahead: none where the calls themselves need the processor."""
    # A compiler keeps one core busy, and the judge, the worker and the driver want theirs.
    return 0 if device == "cpu" else len(os.sched_getaffinity(0)) * 3 // 4


def specs(group: Group) -> list[_Spec]:
    """The ten arguments of a group's first call: shapes, dtypes, and the index arrays themselves."""
    call, wide = group.calls[0], {"H": group.hidden, "I": group.intermediate}
    thin = make_inputs(
        Case(group.name, len(call.sizes), 1, 1, sum(call.sizes)), call.sizes, variant=group.variant, seed=call.seed
    )  # fmt: skip
    return [
        (
            tuple(wide.get(symbol, size) for symbol, size in zip(argument.shape, tensor.shape, strict=True)),
            str(tensor.dtype).removeprefix("torch."),
            None if tensor.is_floating_point() else tensor.tolist(),
        )
        for argument, tensor in zip(ARGUMENTS, thin.args, strict=True)
    ]
