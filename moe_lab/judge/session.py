"""A submission at work: one worker, the calls made in it, and what each call did."""

import errno
import functools
import itertools
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import psutil
import torch

from moe_lab.judge.arena import Arena, Edit
from moe_lab.judge.compare import Comparison, compare
from moe_lab.judge.plan import Call, Group, Plan, call_inputs, fill_out
from moe_lab.judge.process import Message, Progress, Stopped, Worker
from moe_lab.judge.rules import RULES, told
from moe_lab.judge.verdict import Verdict
from moe_lab.problem.contract import ARGUMENTS
from moe_lab.problem.errors import BackendError
from moe_lab.problem.inputs import Inputs
from moe_lab.problem.reference import fused_truth
from moe_lab.problem.submission import Submission

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
#: Room on the device beside the arguments: what a comparison holds at a time, workspaces, the compiled kernels.
_DEVICE_SPARE_BYTES = 3 << 30


_Problem: TypeAlias = tuple[Call, Inputs, torch.Tensor]  # with the truth, (N, H) fp32


@dataclass(frozen=True)
class Made:
    """One call that came back."""

    number: int  # in its group, from 0
    call: Call  # what was asked
    inputs: Inputs  # the ten tensors as they were before the call, on the judge's side
    out: torch.Tensor  # (P, H) fp16, after the call
    truth: torch.Tensor  # (N, H) fp32, raw order
    comparison: Comparison  # of ``out`` with the truth
    edits: list[Edit]  # bytes that changed outside ``out``
    returned: str | None  # type of what run_kernel returned; None if it returned None
    seconds: float  # the worker's clock around the call
    launches: int  # TileLang kernels launched
    threads: int  # Python threads alive after the call that the file has started


class Session:
    """One worker with a submission loaded; a context manager that leaves no process and no file behind.

    ``say`` gets a line of text whenever something starts, and twice a second while it lasts. The groups of the plan
    decide the room that is set aside.
    """

    def __init__(self, submission: Submission, plan: Plan, device: str, say: Progress) -> None:
        self.plan, self.worker = plan, Worker(plan.limits, say)
        #: Of the submission and of the baseline by group, for groups that ask for it.
        self.times_ms: dict[str, tuple[list[float], list[float]]] = {}
        #: Operations by which torch computed what belongs in a kernel, of every call so far; only under the sandbox.
        self.computed: set[str] = set()
        self._submission, self._device = submission, device
        self._thread = ThreadPoolExecutor(1)
        self._begun: dict[str, Callable[[], _Problem]] = {}  # first calls of groups to come, by name

    def __enter__(self) -> "Session":
        """Start the worker and load the file.

        Raises :class:`Stopped` if loading fails, BackendError if the worker itself does not start.
        """
        limits = self.plan.limits
        try:
            self.worker.do("starting a fresh process")
            source = self._submission.save(self.worker.start() / "submission.py")
            self._import()
            self.worker.do("loading the file")
            loaded = self.request("load", limits.load_s, path=str(source), sandboxed=self.plan.sandboxed)
            self._threads: int = loaded["threads"]
        except BaseException:
            self.worker.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the worker and remove its folder."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.worker.end()

    def request(self, event: str, limit_s: float, **message: Any) -> Message:
        """Ask the worker for something; raises :class:`Stopped` for what the submission raises, and if it ends."""
        answer = self.worker.request(event, limit_s, **message)
        if "error" in answer:
            raise _raised(answer["error"], self._submission.source)
        return answer

    def calls(self, group: Group) -> Iterator[Made]:
        """Make the calls of a group, one for each step of the iterator.

        Timed calls come before the last one, whose new input is answered wrong by a file that has begun to replay.
        Raises :class:`Stopped` if a call raises, runs too long or ends the worker.
        """
        limits, arenas = self.plan.limits, dict[int, Arena]()
        before: Made | None = None
        self._check_room(group)
        groups = self.plan.groups
        place = f" ({groups.index(group) + 1} of {len(groups)})" if group in groups else ""
        try:
            for number, (call, inputs, truth) in enumerate(self._problems(group)):
                self.worker.do(f"{group.name}{place}: call {number + 1} of {len(group.calls)}")
                arena = arenas.get(call.slot)
                if arena is None:
                    arenas[call.slot] = arena = Arena(inputs, sparse=group.sparse)
                    opened = self.request("open", limits.call_s, arena=call.slot, **arena.shared)
                    if "failed" in opened:
                        what = f"got no room for its arguments on the device: {opened['failed']}"
                        raise BackendError(f"{group.name}: {what}")
                    arena.attach(opened["handle"])
                arena.write(inputs)
                limit_s = limits.call_s if before else limits.first_call_s
                answer = self.request("call", limit_s, arena=call.slot, garbage=group.garbage, seed=call.seed)
                answer["threads"] -= self._threads
                self.computed |= set(answer.pop("computed"))
                out, edits = arena.read()
                before = Made(number, call, inputs, out, truth, compare(inputs, out, truth), edits, **answer)
                yield before
                timed = group.timed_rounds and number == max(0, len(group.calls) - 2)
                if timed and before.comparison.passed:
                    self._time(group, before, arena)
        finally:
            for arena in arenas.values():
                arena.close()
        for slot in arenas:
            self.request("close", limits.call_s, arena=slot)

    def _problems(self, group: Group) -> Iterator[_Problem]:
        """The calls of a group, each with its inputs and their truth; on a CPU the next one is made meanwhile."""

        def soon(of: Group, call: Call, *before: Any) -> Callable[[], _Problem]:
            # A device may have no room for two.
            if of.on_device:
                return functools.partial(self._make, of, call, *before)
            return self._thread.submit(self._make, of, call, *before).result

        made = self._begun.pop(group.name, functools.partial(self._make, group, group.calls[0]))()
        for call in group.calls[1:]:
            following = soon(group, call, *made[1:])
            yield made
            made = following()
        for now, later in itertools.pairwise(self.plan.groups):
            if now is group:
                self._begun[later.name] = soon(later, later.calls[0])
        yield made

    def _make(
        self, group: Group, call: Call, inputs: Inputs | None = None, truth: torch.Tensor | None = None
    ) -> _Problem:
        """One call with its inputs and their truth, from those of the call before."""
        inputs = call_inputs(group, call, inputs, self._device)
        inputs = replace(inputs, out=fill_out(inputs, call, truth))
        return call, inputs, truth if truth is not None and call.change == "nothing" else _truth(inputs)

    def _time(self, group: Group, last: Made, arena: Arena) -> None:
        """Time the submission beside the baseline on the inputs of the last call, and look at the answer again."""
        self.worker.do(f"{group.name}: {group.timed_rounds} timed calls")
        arena.write(last.inputs)
        start, limit_s = time.monotonic(), self.plan.limits.first_call_s
        times = self.request("time", limit_s, arena=last.call.slot, rounds=group.timed_rounds)
        wall_ms = 1e3 * (time.monotonic() - start)
        out, edits = arena.read()
        if edits or not compare(last.inputs, out, last.truth).passed:
            what = "right when called alone, wrong when timed calls follow each other"
            raise Stopped(Verdict.WRONG_ANSWER, f"{group.name}: {what}")
        total_ms = sum(times["candidate"]) + sum(times["baseline"])
        if total_ms > wall_ms:
            raise BackendError(
                f"{group.name}: got {total_ms:.1f} ms of timed calls within {wall_ms:.1f} ms by the judge's own clock, "
                "expected less: the times are not to be trusted"
            )
        self.times_ms[group.name] = (times["candidate"], times["baseline"])

    def _check_room(self, group: Group) -> None:
        """Both sides share the arguments; the judge also holds those of this call, and of the last or the next."""
        where, free, needed = "memory", psutil.virtual_memory().available, 3 * group.size_bytes
        if self._device != "cpu" and group.on_device:
            where, needed = "memory on the device", needed + _DEVICE_SPARE_BYTES
            free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if free < needed:
            has, needs = (f"{size / 2**30:.1f} GiB" for size in (free, needed))
            raise BackendError(
                f"{group.name}: got {has} of free {where}, expected at least {needs}, which its full size takes: end "
                "what else uses it, or judge on a larger machine"
            )

    def _import(self) -> None:
        """Limit the process and import what the file will need."""
        limits = self.plan.limits
        # Sparse files count with their full length as address space.
        memory_bytes = limits.memory_bytes + 2 * max((group.mapped_bytes for group in self.plan.groups), default=0)
        # A file that never names TileLang does not wait for its import.
        needs = {"tilelang": "tilelang" in self._submission.source, "file_bytes": limits.file_bytes}
        try:
            started = self.worker.request("start", limits.start_s, memory_bytes=memory_bytes, **needs)
        except Stopped as stop:
            self.worker.end()
            words = (self.worker.log.strip() or "none").splitlines()[-1][-300:]
            raise BackendError(
                f"the worker did not start ({stop.sentence.partition(',')[0]}), usually because torch or TileLang "
                f"cannot be imported: run `moe-lab doctor`. Its last words: {words}"
            ) from None
        if "failed" in started:
            raise BackendError(started["failed"])


def _truth(inputs: Inputs) -> torch.Tensor:
    """The fp32 truth, also where the process allows shorter formats in fp32 products."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return fused_truth(inputs)
    finally:
        torch.set_float32_matmul_precision(precision)


def _raised(error: Message, source: str) -> Stopped:
    """What an exception inside the submission means."""
    line, fix = error["line"], RULES[error["rule_id"]].fix if error["rule_id"] else ""
    where = f"line {error['line']}" if error["line"] else "the file"
    if error["function"] not in (None, "<module>"):
        where += f" in {error['function']}"
    # Words of the submission: no control character of them may reach a terminal.
    message = " ".join(_CONTROL.sub(" ", error["message"]).split())
    short = message if len(message) <= 400 else message[:200] + " ... " + message[-180:]
    text = f"{error['kind']}: {short}" if short else error["kind"]
    if error["rule_id"]:
        verdict, what = Verdict.RULE_VIOLATION, told(text, error["rule_id"])
    elif error["kind"] in ("MemoryError", "OutOfMemoryError") or "can't allocate memory" in message:
        verdict, what = Verdict.RESOURCE_ERROR, f"ran out of the memory that one run may use ({text})"
    elif message.startswith(f"[Errno {errno.EFBIG}]"):
        verdict, what = Verdict.RESOURCE_ERROR, "wrote a larger file than one run may, expected none at all"
    elif error["kind"] == "UnsupportedOnCPUError" and "no meaning on a CPU" in message:
        what = f"it cannot be judged on a machine with no GPU, which says nothing about the file: {message}"
        verdict = Verdict.JUDGE_ERROR
    elif error["stage"] == "compile":
        verdict, what = Verdict.COMPILE_ERROR, f"TileLang could not compile the kernel: {text}"
    elif error["stage"] == "launch":
        verdict, what = Verdict.CONTRACT_ERROR, f"the kernel does not take the contest's tensors: {text}"
        named = re.findall(r"(?:parameter|input) (\w+)", text)
        for argument in [argument for argument in ARGUMENTS if argument.name in named]:
            if declared := re.search(rf"^ *{argument.name} *: *T\.\w+\(", source, re.MULTILINE):
                # What a kernel declares is wrong where it is declared, not where it is launched.
                line = source.count("\n", 0, declared.start()) + 1
                passed = f"{argument.dtype} of shape ({', '.join(argument.shape)})"
                fix = f"Line {line} declares {argument.name}: declare what the contest passes, {passed}."
    else:
        when = "while the file was loaded" if error["loading"] else "inside run_kernel"
        what = f"{text}, raised {when}; the contest shows every exception as a wrong answer"
        verdict = Verdict.RUNTIME_ERROR
    return Stopped(verdict, f"{where}: {what}", line=line, remedy=fix, alive=error["alive"])
