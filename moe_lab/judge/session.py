"""A submission at work: one worker, the calls made in it, and what each call did."""

from __future__ import annotations

import contextlib
import errno
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import psutil
import torch

from moe_lab.judge.arena import Arena, Edit
from moe_lab.judge.compare import Comparison, compare
from moe_lab.judge.plan import Call, Group, call_inputs, fill_out
from moe_lab.judge.process import Limits, Message, Worker, WorkerEnded
from moe_lab.judge.rules import told
from moe_lab.judge.verdict import Verdict
from moe_lab.problem.contract import ARGUMENTS
from moe_lab.problem.errors import BackendError
from moe_lab.problem.inputs import Inputs
from moe_lab.problem.reference import fused_truth
from moe_lab.problem.submission import Submission

Progress = Callable[[str], None]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
#: Room on the device beside the arguments: what a comparison holds at a time, workspaces, the compiled kernels.
_DEVICE_SPARE_BYTES = 3 << 30


class Stopped(Exception):  # noqa: N818 - an outcome, never seen by callers of the judge
    """The submission cannot go on."""

    def __init__(self, verdict: Verdict, sentence: str, *, alive: bool = False) -> None:
        # What a submission raises may hold characters that no encoding has.
        self.sentence = sentence.encode("utf-8", "replace").decode()
        super().__init__(self.sentence)
        self.verdict = verdict
        self.alive = alive  # whether the worker could take another call, as after an exception


@dataclass(frozen=True)
class Made:
    """One call that came back."""

    number: int  # in its group, from 0
    call: Call  # what was asked
    inputs: Inputs  # the ten tensors as they were before the call, on the judge's side
    out_before: torch.Tensor  # (P, H) fp16
    out: torch.Tensor  # (P, H) fp16, after the call
    truth: torch.Tensor  # (N, H) fp32, raw order
    comparison: Comparison  # of ``out`` with the truth
    edits: list[Edit]  # bytes that changed outside ``out``
    returned: str | None  # type of what run_kernel returned; None if it returned None
    seconds: float  # the worker's clock around the call
    launches: int  # TileLang kernels launched
    threads_before: int  # Python threads alive in the worker once the file was loaded
    threads: int  # the same after the call


@dataclass
class Session:
    """One worker with a submission loaded; a context manager that leaves no process and no file behind."""

    submission: Submission
    groups: tuple[Group, ...]  # what it will be called on; decides the room that is set aside
    limits: Limits  # of the worker
    _: KW_ONLY
    sandboxed: bool  # whether the run-time sandbox applies
    say: Progress  # called with a line of text whenever something starts, and every second while it lasts
    device: str  # torch device of the kernels
    #: Of the submission and of the baseline by group, for groups that ask for it.
    times_ms: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    #: Operations by which torch computed what belongs in a kernel, of every call so far; only under the sandbox.
    computed: set[str] = field(default_factory=set)
    _held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _worker: Worker | None = None
    _doing: str = ""
    _opened: int = 0

    def __enter__(self) -> Session:
        """Start the worker and load the file.

        Raises:
            Stopped: if loading fails.
            BackendError: if the worker itself does not start.
        """
        with contextlib.ExitStack() as stack:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="moe_lab_", ignore_cleanup_errors=True))
            )
            source = folder / "submission.py"
            self.submission.save(source)
            (folder / "cwd").mkdir()
            self._worker = stack.enter_context(Worker(folder / "cwd", self.limits, self._tick))
            self._start(source)
            self._held = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End the worker and remove the folder."""
        self._held.close()

    @property
    def log(self) -> str:
        """What the submission printed; complete once the session has ended."""
        return self._worker.log if self._worker else ""

    @property
    def strangers(self) -> list[str]:
        """Names of the processes that the submission left running; known once the session has ended."""
        return self._worker.strangers if self._worker else []

    def calls(self, group: Group) -> Iterator[Made]:
        """Make the calls of a group, one for each step of the iterator.

        Timed calls come before the last one, whose new input is answered wrong by a file that has begun to replay.

        Raises:
            Stopped: if a call raises, runs too long or ends the worker.
        """
        arenas: dict[int, tuple[int, Arena]] = {}
        before: Made | None = None
        self._check_room(group)
        try:
            for number, call in enumerate(group.calls):
                self._do(f"{group.name}: call {number + 1} of {len(group.calls)}")
                inputs = call_inputs(group, call, before.inputs if before else None, self.device)
                out_before = fill_out(inputs, call, before.truth if before else None)
                tensors = dict(zip((argument.name for argument in ARGUMENTS), inputs.args, strict=True))
                tensors["out"] = out_before
                if call.slot not in arenas:
                    arenas[call.slot] = self._open(group, tensors, inputs)
                identity, arena = arenas[call.slot]
                arena.write(tensors)
                answer = self._request(
                    {"event": "call", "arena": identity, "garbage": group.garbage, "seed": call.seed},
                    self.limits.call_s if before else self.limits.first_call_s,
                )
                self.computed |= set(answer["computed"])
                truth = _truth(inputs)
                out, edits = arena.read()
                before = Made(
                    number, call, inputs, out_before, out, truth, compare(inputs, out, truth), edits,
                    answer["returned"], answer["seconds"], answer["launches"], self._threads, answer["threads"],
                )  # fmt: skip
                yield before
                timed = group.timed_rounds and number == max(0, len(group.calls) - 2)
                if timed and before.comparison.passed:
                    self._time(group, before, tensors, identity, arena)
        finally:
            for _, arena in arenas.values():
                arena.close()
        for identity, _ in arenas.values():
            self._request({"event": "close", "arena": identity}, self.limits.call_s)

    def compile(self, tensors: list[tuple[tuple[int, ...], str, list[int] | None]], *, baseline: bool) -> None:
        """Run the host code without a launch, for the sake of what it compiles.

        Args:
            tensors: shape, dtype and, of the index arrays, values of each argument.
            baseline: of the baseline instead of the submission.

        Raises:
            Stopped: if that ends the worker or takes too long.
        """
        self._request({"event": "compile", "tensors": tensors, "baseline": baseline}, self.limits.first_call_s)

    def interrupt(self) -> None:
        """End the worker, from any thread; whatever was asked of it ends with :class:`Stopped` or a BackendError."""
        if self._worker is not None:
            self._worker.interrupt()

    def _time(self, group: Group, last: Made, tensors: dict[str, torch.Tensor], identity: int, arena: Arena) -> None:
        """Time the submission beside the baseline on the inputs of the last call, and look at the answer again."""
        self._do(f"{group.name}: {group.timed_rounds} timed calls")
        arena.write(tensors)
        start = time.monotonic()
        times = self._request(
            {"event": "time", "arena": identity, "rounds": group.timed_rounds}, self.limits.first_call_s
        )
        wall_ms = 1e3 * (time.monotonic() - start)
        out, edits = arena.read()
        if edits or not compare(last.inputs, out, last.truth).passed:
            raise Stopped(
                Verdict.WRONG_ANSWER, f"{group.name}: right when called alone, wrong when timed calls follow each other"
            )
        total_ms = sum(times["candidate"]) + sum(times["baseline"])
        if total_ms > wall_ms:
            raise BackendError(
                f"{group.name}: got {total_ms:.1f} ms of timed calls within {wall_ms:.1f} ms by the judge's own clock, "
                "expected less: the times are not to be trusted"
            )
        self.times_ms[group.name] = (times["candidate"], times["baseline"])

    def _check_room(self, group: Group) -> None:
        """Both sides share the arguments; a GPU also holds the judge's of this call and of the last."""
        if self.device == "cpu" or not group.on_device:
            where, free, needed = "memory", psutil.virtual_memory().available, 2 * group.size_bytes
        else:
            where, needed = "memory on the device", 3 * group.size_bytes + _DEVICE_SPARE_BYTES
            free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if free < needed:
            raise BackendError(
                f"{group.name}: got {free / 2**30:.1f} GiB of free {where}, expected at least "
                f"{needed / 2**30:.1f} GiB, which its full size takes: end what else uses it, or judge on a larger "
                "machine"
            )

    def _open(self, group: Group, tensors: dict[str, torch.Tensor], inputs: Inputs) -> tuple[int, Arena]:
        self._opened += 1
        experts = [expert for expert, size in enumerate(inputs.layout.sizes) if size] if group.sparse else None
        arena = Arena(tensors, experts)
        opened = self._request({"event": "open", "arena": self._opened, **arena.describe()}, self.limits.call_s)
        if "failed" in opened:
            raise BackendError(f"{group.name}: got no room for its arguments on the device: {opened['failed']}")
        arena.attach(opened["handle"])
        return self._opened, arena

    def _do(self, what: str) -> None:
        self._doing = what
        self.say(what)

    def _tick(self, seconds: float) -> None:
        self.say(f"{self._doing} ({seconds:.0f} s)")

    def _start(self, source: Path) -> None:
        assert self._worker is not None
        self._do("starting a fresh process")
        limits = self.limits
        start = {
            "event": "start",
            # Sparse files count with their full length as address space.
            "memory_bytes": limits.memory_bytes + 2 * max((group.mapped_bytes for group in self.groups), default=0),
            "file_bytes": limits.file_bytes,
            # A file that never names TileLang does not wait for its import.
            "tilelang": "tilelang" in self.submission.source,
        }
        try:
            started = self._worker.request(start, limits.start_s)
        except WorkerEnded as end:
            words = (self._worker.log.strip() or "none").splitlines()[-1][-300:]
            raise BackendError(
                f"the worker did not start ({end}), usually because torch or TileLang cannot be imported: run "
                f"`moe-lab doctor`. Its last words: {words}"
            ) from None
        if "failed" in started:
            raise BackendError(started["failed"])
        self._do("loading the file")
        loaded = self._request({"event": "load", "path": str(source), "sandboxed": self.sandboxed}, limits.load_s)
        self._threads: int = loaded["threads"]

    def _request(self, message: Message, timeout_s: float) -> Message:
        assert self._worker is not None
        try:
            answer = self._worker.request(message, timeout_s)
        except WorkerEnded as end:
            raise _ended(end, self._doing, self.limits) from None
        if "error" in answer:
            verdict, sentence = _raised(answer["error"])
            raise Stopped(verdict, sentence, alive=answer["error"]["alive"])
        return answer


def _truth(inputs: Inputs) -> torch.Tensor:
    """The fp32 truth, also where the process allows shorter formats in fp32 products."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return fused_truth(inputs)
    finally:
        torch.set_float32_matmul_precision(precision)


def _raised(error: Message) -> tuple[Verdict, str]:
    """The verdict for an exception inside the submission."""
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
        verdict, what = Verdict.CONTRACT_ERROR, f"the kernel does not take the contract's tensors: {text}"
    else:
        when = "while the file was loaded" if error["loading"] else "inside run_kernel"
        what = f"{text}, raised {when}; the contest shows every exception as a wrong answer"
        verdict = Verdict.RUNTIME_ERROR
    return verdict, f"{where}: {what}"


#: Verdict and sentence for each way in which a worker stops answering.
_ENDINGS = {
    "timeout": (
        Verdict.TIMEOUT,
        "no answer within {detail} s while {doing}, usually an endless loop or far too much work for one call",
    ),
    "output": (
        Verdict.RESOURCE_ERROR,
        "printed more than {most_mib} MiB while {doing}, expected next to nothing: remove the prints",
    ),
    "forged": (
        Verdict.RULE_VIOLATION,
        "wrote on the judge's own channel while {doing} ({detail}); results are only read from out",
    ),
    "signal": (Verdict.RUNTIME_ERROR, "the process died of {detail} while {doing}, {usual}"),
    "exit": (
        Verdict.RUNTIME_ERROR,
        "the process ended itself with exit code {detail} while {doing}, expected run_kernel to return",
    ),
}
_SIGNALS = {
    "SIGSEGV": "usually a kernel that reads or writes outside its tensors",
    "SIGBUS": "usually a kernel that reads or writes outside its tensors",
    "SIGKILL": "usually because the machine ran out of memory",
    "SIGABRT": "usually a failed check inside a library, see its last lines",
    "SIGXFSZ": "because it wrote a larger file than one run may",
}


def _ended(end: WorkerEnded, doing: str, limits: Limits) -> Stopped:
    verdict, sentence = _ENDINGS[end.kind]
    usual = _SIGNALS.get(end.detail, "which it sent itself or got from a library")
    most_mib = limits.output_bytes >> 20
    return Stopped(verdict, sentence.format(detail=end.detail, doing=doing, usual=usual, most_mib=most_mib))
