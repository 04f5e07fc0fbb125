"""A submission at work: one worker, the calls made in it, and what each call did."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from moe_lab.contract import ARGUMENTS
from moe_lab.errors import BackendError
from moe_lab.inputs import Inputs
from moe_lab.judge.arena import Arena, Edit, private_folder
from moe_lab.judge.channel import Message
from moe_lab.judge.compare import Comparison, compare
from moe_lab.judge.plan import Call, Group, call_inputs, fill_out
from moe_lab.judge.process import Limits, Worker, WorkerEnded
from moe_lab.judge.verdict import Verdict
from moe_lab.reference import fused_truth
from moe_lab.submission import Submission

Progress = Callable[[str], None]


class Stopped(Exception):  # noqa: N818 - an outcome, never seen by callers of the judge
    """The submission cannot go on.

    Attributes:
        verdict: what that means.
        sentence: why, for people.
        alive: whether the worker could take another call, as after an exception.
    """

    def __init__(self, verdict: Verdict, sentence: str, *, alive: bool = False) -> None:
        # What a submission raises may hold characters that no encoding has.
        self.sentence = sentence.encode("utf-8", "replace").decode()
        super().__init__(self.sentence)
        self.verdict = verdict
        self.alive = alive


@dataclass(frozen=True)
class Made:
    """One call that came back.

    Attributes:
        number: in its group, from 0.
        call: what was asked.
        inputs: the ten tensors as they were before the call, on the judge's side.
        out_before, out: (P, H) fp16, ``out`` before and after.
        truth: (N, H) fp32, raw order.
        comparison: of ``out`` with the truth.
        edits: bytes that changed outside ``out``.
        returned: type of what run_kernel returned; None if it returned None.
        seconds: the worker's clock around the call.
        launches: TileLang kernels launched.
        threads_before, threads: Python threads alive in the worker once the file was loaded and after the call.
    """

    number: int
    call: Call
    inputs: Inputs
    out_before: torch.Tensor
    out: torch.Tensor
    truth: torch.Tensor
    comparison: Comparison
    edits: list[Edit]
    returned: str | None
    seconds: float
    launches: int
    threads_before: int
    threads: int


class Session:
    """One worker with a submission loaded; a context manager that leaves no process and no file behind.

    Args:
        submission: what to run.
        groups: what it will be called on; decides the room that is set aside.
        limits: of the worker.
        sandboxed: whether the run-time sandbox applies.
        say: called with a line of text whenever something starts, and every second while it lasts.
        device: torch device of the kernels.
    """

    def __init__(
        self, submission: Submission, groups: tuple[Group, ...], limits: Limits, *, sandboxed: bool,
        say: Progress, device: str,
    ) -> None:  # fmt: skip
        self._submission = submission
        self._groups = groups
        self._limits = limits
        self._sandboxed = sandboxed
        self._say = say
        self._device = device
        self._doing = ""
        self._opened = 0
        #: Times of the submission and of the baseline by group, for groups that ask for it.
        self.times_ms: dict[str, tuple[list[float], list[float]]] = {}
        #: Operations by which torch computed what belongs in a kernel, of every call so far; only under the sandbox.
        self.computed: set[str] = set()
        #: What the submission printed; complete once the session has ended.
        self.log = ""
        #: Processes that the submission left running; complete once the session has ended.
        self.strangers: list[str] = []

    def __enter__(self) -> Session:
        """Start the worker and load the file.

        Raises:
            Stopped: if loading fails.
            BackendError: if the worker itself does not start.
        """
        self._folder = private_folder(max((group.size_bytes for group in self._groups), default=0) + (64 << 20))
        self._worker: Worker | None = None
        try:
            source = self._folder / "submission.py"
            self._submission.save(source)
            (self._folder / "cwd").mkdir()
            self._worker = Worker(self._folder / "cwd", self._limits, self._tick).__enter__()
            self._start(source)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the worker and remove the folder."""
        if self._worker is not None:
            self.strangers = self._worker.strangers()
            self._worker.kill()
            self.strangers += self._worker.survivors
            self.log = self._worker.log
        shutil.rmtree(self._folder, ignore_errors=True)

    def calls(self, group: Group) -> Iterator[Made]:
        """Make the calls of a group, one for each step of the iterator.

        Raises:
            Stopped: if a call raises, runs too long or ends the worker.
        """
        arenas: dict[int, tuple[int, Arena]] = {}
        before: Made | None = None
        tensors: dict[str, torch.Tensor] = {}
        try:
            for number, call in enumerate(group.calls):
                self._doing = f"{group.name}: call {number + 1} of {len(group.calls)}"
                self._say(self._doing)
                inputs = call_inputs(group, call, before.inputs if before else None, self._device)
                out_before = fill_out(inputs, call, before.truth if before else None)
                tensors = dict(zip((argument.name for argument in ARGUMENTS), inputs.args, strict=True))
                tensors["out"] = out_before
                if call.slot not in arenas:
                    arenas[call.slot] = self._open(group, tensors, inputs)
                identity, arena = arenas[call.slot]
                arena.write(tensors)
                answer = self._request(
                    {"event": "call", "arena": identity, "garbage": group.garbage, "seed": call.seed},
                    self._limits.call_s if before else self._limits.first_call_s,
                )
                self.computed |= set(answer["computed"])
                truth = _truth(inputs)
                out = arena.out.to(truth.device, copy=True)
                before = Made(
                    number, call, inputs, out_before, out, truth, compare(inputs, out, truth), arena.edits(),
                    answer["returned"], answer["seconds"], answer["launches"], self._threads,
                    answer["threads"],
                )  # fmt: skip
                yield before
            if group.timed_rounds and before and before.comparison.passed:
                self._time(group, before, tensors, arena, identity)
        finally:
            for _, arena in arenas.values():
                arena.path.unlink(missing_ok=True)
        for identity, _ in arenas.values():
            self._request({"event": "close", "arena": identity}, self._limits.call_s)

    def _time(
        self, group: Group, last: Made, tensors: dict[str, torch.Tensor], arena: Arena, identity: int
    ) -> None:  # fmt: skip
        """Time the submission beside the baseline on the inputs of the last call, and look at the answer again."""
        self._doing = f"{group.name}: {group.timed_rounds} timed calls"
        self._say(self._doing)
        arena.write(tensors)
        start = time.monotonic()
        answer = self._request(
            {"event": "time", "arena": identity, "rounds": group.timed_rounds}, self._limits.first_call_s
        )
        wall_ms = 1e3 * (time.monotonic() - start)
        out = arena.out.to(last.truth.device, copy=True)
        if not compare(last.inputs, out, last.truth).passed or arena.edits():
            raise Stopped(
                Verdict.WRONG_ANSWER, f"{group.name}: right when called alone, wrong when timed calls follow each other"
            )
        if sum(answer["candidate"]) + sum(answer["baseline"]) > wall_ms:
            raise BackendError(
                f"{group.name}: got {sum(answer['candidate']):.1f} ms of timed calls within {wall_ms:.1f} ms by the "
                "judge's own clock, expected less: the times are not to be trusted"
            )
        self.times_ms[group.name] = (answer["candidate"], answer["baseline"])

    def _open(self, group: Group, tensors: dict[str, torch.Tensor], inputs: Inputs) -> tuple[int, Arena]:
        self._opened += 1
        experts = None
        if group.sparse:
            experts = [expert for expert, size in enumerate(inputs.layout.sizes) if size]
        arena = Arena(tensors, self._folder / f"{self._opened}.arena", experts)
        self._request({"event": "open", "arena": self._opened, **arena.describe()}, self._limits.call_s)
        return self._opened, arena

    def _tick(self, seconds: float) -> None:
        self._say(f"{self._doing} ({seconds:.0f} s)")

    def _start(self, source: Path) -> None:
        self._doing = "starting a fresh process"
        self._say(self._doing)
        limits = self._limits
        # Sparse files count with their full length as address space.
        mapped = 2 * max((group.mapped_bytes for group in self._groups), default=0)
        start = {
            "event": "start",
            "memory_bytes": limits.memory_bytes + mapped,
            "file_bytes": limits.file_bytes,
            # A file that never names TileLang does not wait for its import.
            "tilelang": "tilelang" in self._submission.source,
        }
        assert self._worker is not None
        try:
            started = self._worker.request(start, limits.start_s)
        except WorkerEnded as end:
            words = (self._worker.log.strip() or "none").splitlines()[-1][-300:]
            raise BackendError(
                f"the worker did not start ({end}), usually because torch or TileLang cannot be imported: run "
                f"`moe-lab doctor`. Its last words: {words}"
            ) from None
        if started["event"] == "failed":
            raise BackendError(started["message"])
        self._doing = "loading the file"
        self._say(self._doing)
        loaded = self._request({"event": "load", "path": str(source), "sandboxed": self._sandboxed}, limits.load_s)
        self._threads: int = loaded["threads"]

    def _request(self, message: Message, timeout_s: float) -> Message:
        assert self._worker is not None
        try:
            answer = self._worker.request(message, timeout_s)
        except WorkerEnded as end:
            raise _ended(end, self._doing, self._limits) from None
        if answer["event"] == "error":
            verdict, sentence = _raised(answer)
            # A GPU's context does not survive a fault in a kernel, and which exceptions are faults is hard to tell.
            raise Stopped(verdict, sentence, alive=answer["phase"] == "call" and self._device == "cpu")
        return answer


def _truth(inputs: Inputs) -> torch.Tensor:
    """The fp32 truth, also where the process allows shorter formats in fp32 products."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return fused_truth(inputs)
    finally:
        torch.set_float32_matmul_precision(precision)


def _raised(answer: Message) -> tuple[Verdict, str]:
    """The verdict for an exception inside the submission."""
    where = f"line {answer['line']}" if answer["line"] else "the file"
    if answer["function"] not in (None, "<module>"):
        where += f" in {answer['function']}"
    message = " ".join(answer["message"].split())
    short = message if len(message) <= 400 else message[:200] + " ... " + message[-180:]
    text = f"{answer['kind']}: {short}" if short else answer["kind"]
    if answer["rule_id"]:
        return (Verdict.RULE_VIOLATION, f"{where}: {text}; `moe-lab explain {answer['rule_id']}`")
    if answer["kind"] in ("MemoryError", "OutOfMemoryError") or "can't allocate memory" in message:
        return (Verdict.RESOURCE_ERROR, f"{where}: ran out of the memory that one run may use ({text})")
    if message.startswith(f"[Errno {errno.EFBIG}]"):
        return (Verdict.RESOURCE_ERROR, f"{where}: wrote a larger file than one run may, expected none at all")
    if answer["kind"] == "UnsupportedOnCPUError" and "no meaning on a CPU" in message:
        return (
            Verdict.JUDGE_ERROR,
            f"{where}: it cannot be judged on a machine with no GPU, which says nothing about the file: {message}",
        )
    if answer["stage"] == "compile":
        return (Verdict.COMPILE_ERROR, f"{where}: TileLang could not compile the kernel: {text}")
    if answer["stage"] == "launch":
        return (Verdict.CONTRACT_ERROR, f"{where}: the kernel does not take the contract's tensors: {text}")
    when = "while the file was loaded" if answer["phase"] == "load" else "inside run_kernel"
    return (
        Verdict.RUNTIME_ERROR,
        f"{where}: {text}, raised {when}; the contest shows every exception as a wrong answer",
    )


def _ended(end: WorkerEnded, doing: str, limits: Limits) -> Stopped:
    """The verdict for a worker that stopped answering."""
    if end.kind == "timeout":
        return Stopped(
            Verdict.TIMEOUT,
            f"no answer within {end.detail} s while {doing}, usually an endless loop or far too much work for one call",
        )
    if end.kind == "output":
        return Stopped(
            Verdict.RESOURCE_ERROR,
            f"printed more than {limits.output_bytes >> 20} MiB while {doing}, expected next to nothing: remove the "
            "prints",
        )
    if end.kind == "forged":
        return Stopped(
            Verdict.RULE_VIOLATION,
            f"wrote on the judge's own channel while {doing} ({end.detail}); results are only read from out",
        )
    if end.kind == "signal":
        usual = {
            "SIGSEGV": "usually a kernel that reads or writes outside its tensors",
            "SIGBUS": "usually a kernel that reads or writes outside its tensors",
            "SIGKILL": "usually because the machine ran out of memory",
            "SIGABRT": "usually a failed check inside a library, see its last lines",
            "SIGXFSZ": "because it wrote a larger file than one run may",
        }.get(end.detail, "which it sent itself or got from a library")
        return Stopped(Verdict.RUNTIME_ERROR, f"the process died of {end.detail} while {doing}, {usual}")
    return Stopped(
        Verdict.RUNTIME_ERROR,
        f"the process ended itself with exit code {end.detail} while {doing}, expected run_kernel to return",
    )
