"""Compiling ahead: further workers run the host code on the shapes that later calls have, while earlier ones run.

A GPU's compiler takes seconds for each kernel of each case. What these workers compile lands in TileLang's disk cache,
where the calls find it. They launch nothing, and nothing that happens to them says anything about the submission.
"""

import contextlib
import functools
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from moe_lab.judge.plan import Group, Plan
from moe_lab.judge.process import Progress
from moe_lab.judge.session import Session
from moe_lab.problem.contract import ARGUMENTS
from moe_lab.problem.inputs import make_inputs
from moe_lab.problem.submission import Submission

#: Shape, dtype and, of an index array, values of one argument.
_Spec = tuple[tuple[int, ...], str, "tuple[int, ...] | None"]
#: Calls do not wait longer than this; then the workers are ended and the calls compile for themselves.
_PATIENCE_S = 120.0


class Ahead(contextlib.AbstractContextManager["Ahead"]):
    """Workers, ``processes`` at most, that compile what the groups of a plan need; a context manager that ends them."""

    def __init__(self, submission: Submission, plan: Plan, device: str, processes: int) -> None:
        self._new = lambda: Session(submission, replace(plan, groups=()), device, lambda text: None)
        self._limit_s = plan.limits.first_call_s
        self._sessions: list[Session] = []
        self._idle: list[Session] = []
        self._pool = ThreadPoolExecutor(max(1, processes), "compile ahead")
        self.jobs: list[Future[None]] = []
        self._by_group: dict[str, list[Future[None]]] = {}
        # What several groups need is compiled once.
        submit = functools.cache(lambda *job: self._pool.submit(self._compile, *job))
        for group in plan.groups if processes else ():
            needed = specs(group)
            self._by_group[group.name] = [submit(needed, baseline) for baseline in {False, group.timed_rounds > 0}]
            self.jobs += self._by_group[group.name]

    def __exit__(self, *_: object) -> None:
        """End the workers, wherever they are."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        # A cancelled job is never "done" for those who wait. Again and again: a worker may only just be starting.
        begun = [job for job in self.jobs if not job.cancelled()]
        while wait(begun, timeout=0.1).not_done:
            for session in self._sessions:
                session.worker.interrupt()
        self._pool.shutdown()
        for session in self._sessions:
            session.__exit__()

    def wait(self, group: Group, say: Progress) -> None:
        """Wait until the kernels of a group are compiled, or will not be; one on the device has it to itself then."""
        start = time.monotonic()
        jobs = self.jobs if group.on_device else self._by_group.get(group.name, [])
        while wait(jobs, timeout=0.1).not_done and (waited_s := time.monotonic() - start) <= _PATIENCE_S:
            if waited_s >= 1:
                say(f"{group.name}: compiling ({waited_s:.0f} s)")
        if group.on_device or not all(job.done() for job in jobs):
            self.__exit__()

    def _compile(self, tensors: tuple[_Spec, ...], baseline: bool) -> None:
        """One job, in a worker that waits for one or in a new one. What is wrong with the file shows in its calls."""
        with contextlib.suppress(Exception):
            try:
                session = self._idle.pop()
            except IndexError:
                session = self._new()
                self._sessions.append(session)
                session.__enter__()
            session.request("compile", self._limit_s, tensors=tensors, baseline=baseline)
            self._idle.append(session)


def specs(group: Group) -> tuple[_Spec, ...]:
    """The ten arguments of a group's first call: shapes, dtypes, and the index arrays themselves."""
    call, wide = group.calls[0], {"H": group.hidden, "I": group.intermediate}
    thin = make_inputs(replace(group.case, hidden=1, intermediate=1), call.sizes, variant=group.variant)
    found: list[_Spec] = []
    for argument, tensor in zip(ARGUMENTS, thin.args, strict=True):
        shape = tuple(wide.get(symbol, size) for symbol, size in zip(argument.shape, tensor.shape, strict=True))
        values = None if tensor.is_floating_point() else tuple(tensor.tolist())
        found.append((shape, str(tensor.dtype).removeprefix("torch."), values))
    return tuple(found)
