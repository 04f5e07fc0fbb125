"""A submission at work: one worker, the calls made in it, and what each call did."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from moe_lab.judge.arena import Arena, Edit, MappedArena, WindowArena, map_file, pin, private_folder, unpin
from moe_lab.judge.channel import Message
from moe_lab.judge.compare import Comparison, compare
from moe_lab.judge.plan import Call, Group, call_inputs, fill_out
from moe_lab.judge.process import Limits, Worker, WorkerEnded
from moe_lab.judge.rules import told
from moe_lab.judge.verdict import Verdict
from moe_lab.problem.contract import ARGUMENTS
from moe_lab.problem.errors import BackendError
from moe_lab.problem.inputs import Inputs
from moe_lab.problem.reference import fused_truth
from moe_lab.problem.submission import Submission

Progress = Callable[[str], None]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
#: Room through which the bytes of a GPU's memory pass, a few hundred times for the contest's largest case.
_WINDOW_BYTES = 32 << 20
#: Room on the device beside the arguments: what a comparison holds at a time, workspaces, the compiled kernels.
_DEVICE_SPARE_BYTES = 3 << 30


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
        self._worker: Worker | None = None
        self._window: torch.Tensor | None = None
        self._pinned = False
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
        mapped = [group.size_bytes for group in self._groups if not self._windowed(group)]
        self._held = private_folder(max(mapped, default=0) + _WINDOW_BYTES)
        self._folder = self._held.__enter__()
        try:
            if len(mapped) < len(self._groups):
                with (self._folder / "window").open("wb") as file:
                    file.truncate(_WINDOW_BYTES)
                self._window = map_file(self._folder / "window")
                self._pinned = self._device != "cpu" and pin(self._window)
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
        if self._pinned and self._window is not None:
            unpin(self._window)
        self._held.__exit__(None, None, None)

    def calls(self, group: Group) -> Iterator[Made]:
        """Make the calls of a group, one for each step of the iterator.

        Timed calls come before the last one, whose new input is answered wrong by a file that has begun to replay.

        Raises:
            Stopped: if a call raises, runs too long or ends the worker.
        """
        arenas: dict[int, tuple[int, Arena]] = {}
        before: Made | None = None
        tensors: dict[str, torch.Tensor] = {}
        self._check_room(group)
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
                out, edits = arena.read()
                before = Made(
                    number, call, inputs, out_before, out, truth, compare(inputs, out, truth), edits,
                    answer["returned"], answer["seconds"], answer["launches"], self._threads,
                    answer["threads"],
                )  # fmt: skip
                yield before
                timed = group.timed_rounds and number == max(0, len(group.calls) - 2)
                if timed and before.comparison.passed:
                    self._time(group, before, tensors, arena, identity)
        finally:
            for _, arena in arenas.values():
                arena.close()
        for identity, _ in arenas.values():
            self._request({"event": "close", "arena": identity}, self._limits.call_s)

    def compile(self, tensors: list[tuple[tuple[int, ...], str, list[int] | None]], *, baseline: bool) -> None:
        """Run the host code without a launch, for the sake of what it compiles.

        Args:
            tensors: shape, dtype and, of the index arrays, values of each argument.
            baseline: of the baseline instead of the submission.

        Raises:
            Stopped: if that ends the worker or takes too long.
        """
        self._request({"event": "compile", "tensors": tensors, "baseline": baseline}, self._limits.first_call_s)

    def interrupt(self) -> None:
        """End the worker, from any thread; whatever was asked of it ends with :class:`Stopped` or a BackendError."""
        if self._worker is not None:
            self._worker.interrupt()

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
        out, edits = arena.read()
        if edits or not compare(last.inputs, out, last.truth).passed:
            raise Stopped(
                Verdict.WRONG_ANSWER, f"{group.name}: right when called alone, wrong when timed calls follow each other"
            )
        if sum(answer["candidate"]) + sum(answer["baseline"]) > wall_ms:
            raise BackendError(
                f"{group.name}: got {sum(answer['candidate']):.1f} ms of timed calls within {wall_ms:.1f} ms by the "
                "judge's own clock, expected less: the times are not to be trusted"
            )
        self.times_ms[group.name] = (answer["candidate"], answer["baseline"])

    def _windowed(self, group: Group) -> bool:
        """Whether the worker has the arguments of a group to itself."""
        return self._device != "cpu" or group.on_device

    def _check_room(self, group: Group) -> None:
        """A GPU holds the arguments three times: the judge's of this call and of the last, and the worker's."""
        if self._device == "cpu" or not group.on_device:
            return
        free, _ = torch.cuda.mem_get_info()
        needed = 3 * group.size_bytes + _DEVICE_SPARE_BYTES
        if free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < needed:
            raise BackendError(
                f"{group.name}: got {free / 2**30:.1f} GiB of free memory on the device, expected at least "
                f"{needed / 2**30:.1f} GiB, which its full size takes: end what else uses the device, or judge on a "
                "larger one"
            )

    def _open(self, group: Group, tensors: dict[str, torch.Tensor], inputs: Inputs) -> tuple[int, Arena]:
        self._opened += 1
        identity = self._opened
        arena: Arena
        if self._windowed(group):
            assert self._window is not None

            def move(direction: str, start: int, size: int) -> None:
                message = {"event": "move", "arena": identity, "direction": direction, "start": start, "size": size}
                self._request(message, self._limits.call_s)

            arena = WindowArena(tensors, self._window, move)
        else:
            experts = [expert for expert, size in enumerate(inputs.layout.sizes) if size] if group.sparse else None
            arena = MappedArena(tensors, self._folder / f"{identity}.arena", experts)
        opened = self._request({"event": "open", "arena": identity, **arena.describe()}, self._limits.call_s)
        if opened["event"] == "failed":
            raise BackendError(f"{group.name}: got no room for its arguments on the device: {opened['message']}")
        return identity, arena

    def _tick(self, seconds: float) -> None:
        self._say(f"{self._doing} ({seconds:.0f} s)")

    def _start(self, source: Path) -> None:
        self._doing = "starting a fresh process"
        self._say(self._doing)
        limits = self._limits
        # Sparse files count with their full length as address space.
        mapped = 2 * max((group.mapped_bytes for group in self._groups), default=0) + _WINDOW_BYTES
        start = {
            "event": "start",
            "memory_bytes": limits.memory_bytes + mapped,
            "file_bytes": limits.file_bytes,
            "window": None if self._window is None else str(self._folder / "window"),
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
            raise Stopped(verdict, sentence, alive=answer["alive"])
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
    # Words of the submission: no control character of them may reach a terminal.
    message = " ".join(_CONTROL.sub(" ", answer["message"]).split())
    short = message if len(message) <= 400 else message[:200] + " ... " + message[-180:]
    text = f"{answer['kind']}: {short}" if short else answer["kind"]
    if answer["rule_id"]:
        return (Verdict.RULE_VIOLATION, f"{where}: {told(text, answer['rule_id'])}")
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
