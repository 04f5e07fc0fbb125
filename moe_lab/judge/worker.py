"""The process that loads and calls a submission. It holds the inputs of a call and never the truth.

:mod:`moe_lab.judge.process` starts ``python -m moe_lab.judge.worker FD``, which imports torch and TileLang once
and is forked for each worker. Nothing that a worker says can turn a wrong answer into a right one: the judge compares
the bytes of ``out`` and of the inputs itself.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_lab.judge import sandbox
from moe_lab.judge.arena import share, tensors_in
from moe_lab.judge.rules import WORDS
from moe_lab.machine import backend
from moe_lab.machine.timing import interleave
from moe_lab.problem.contract import ENTRY_POINT
from moe_lab.problem.errors import BackendError, MoeLabError
from moe_lab.problem.submission import Submission
from moe_lab.steps import step

_LIBC = ctypes.CDLL(None)
_LIBC.getenv.restype = ctypes.c_void_p
_PR_SET_PDEATHSIG = 1
#: More than a request of the judge holds.
_REQUEST_BYTES = 1 << 20
_TEXT_CHARS = 4_000
#: Requests during which code of the submission runs: what it raises is an answer.
_SUBMISSION_RUNS = ("load", "call", "time")

Answer = dict[str, Any]


class _Garbage:
    """What freshly allocated memory holds: ``torch.empty`` promises nothing, so the judge fills it on purpose."""

    kind, seed, filling = "untouched", 0, False

    def install(self) -> None:
        """Replace the functions before the sandbox takes its own references."""
        torch.empty, torch.empty_like = self._filled(torch.empty), self._filled(torch.empty_like)

    def _filled(self, create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = create(*args, **kwargs)
            self.filling = True
            try:
                return self._fill(made)
            finally:
                self.filling = False

        wrapper.__name__ = create.__name__
        return wrapper

    def _fill(self, tensor: Any) -> Any:
        if self.kind == "untouched" or tensor.numel() == 0:
            return tensor
        if self.kind == "zeros":
            return tensor.zero_()
        generator = torch.Generator(device=tensor.device).manual_seed(self.seed)
        self.seed += 1
        if not tensor.is_floating_point():
            return tensor.fill_(True) if tensor.dtype == torch.bool else tensor.random_(generator=generator)
        scale = {"noise": 3.0, "large": 2.0e4, "nan": float("nan")}[self.kind]
        return tensor.copy_(torch.randn(tensor.shape, generator=generator, device=tensor.device).mul_(scale))


class _TorchCompute(TorchDispatchMode):
    """What torch computes in one call, however the file reaches it: the text cannot show every way.

    A few passes over the activations are small host-side uses, which the contest does not rule out; a matrix product
    is not small, and neither is one that is spelt out element by element.
    """

    PASSES = 8

    def __init__(self, garbage: _Garbage) -> None:
        super().__init__()
        self._garbage, self._elements = garbage, 0
        self._pointwise: set[str] = set()
        self._products: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to do so, torch would import its compiler, a second for each worker; no submission may use it anyway."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operation that torch dispatches, and let it happen."""
        result = func(*args, **(kwargs or {}))
        # Attention and operations on lists of tensors return several.
        made = [
            item.numel()
            for item in (result if isinstance(result, (tuple, list)) else [result])
            if isinstance(item, torch.Tensor) and (item.is_floating_point() or item.is_complex())
        ]
        name = func._schema.name.partition("::")[2].rstrip("_")
        if made and name in WORDS["dispatched_products"]:
            self._products.add(name)
        elif torch.Tag.pointwise in func.tags and name not in WORDS["dispatched_moves"] and not self._garbage.filling:
            self._pointwise |= {name} if made else set()
            self._elements += sum(made)
        return result

    def names(self, activations: int) -> list[str]:
        """Operations of the call that are more than host-side work; ``activations`` of one pass are P * (H + I)."""
        many = self._elements > self.PASSES * activations
        return sorted(self._products | (self._pointwise if many else set()))


class _Session:
    """Answers the judge's requests until the judge is gone; each ``on_`` method is one of them."""

    def __init__(self) -> None:
        self._arenas: dict[int, tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]] = {}
        self._garbage = _Garbage()
        self._launches, self._left_out = 0, False  # kernels launched so far, and whether launches are left out

    def answer(self, event: str, **request: Any) -> Answer:
        """The answer to one request: "failed" for what the submission is not to blame for, "error" for the rest."""
        try:
            answer: Answer = getattr(self, f"on_{event}")(**request)
            return answer
        except BaseException as error:
            if event in _SUBMISSION_RUNS:
                return {"error": self._raised(error, event)}
            if isinstance(error, MoeLabError):
                return {"failed": str(error)}
            raise

    def on_start(self, memory_bytes: int, file_bytes: int, tilelang: bool) -> Answer:
        """Import what the file will need, which is not the file's time, then limit this process."""
        self._device = backend.detect().torch_device
        self._garbage.install()
        if tilelang:
            backend.prepare()
            self._watch_launches()
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_FSIZE, file_bytes, "of a file (ulimit -f)")
        if self._device == "cpu":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            _limit(resource.RLIMIT_AS, used + memory_bytes, "of address space (ulimit -v)")
        return {}

    def _watch_launches(self) -> None:
        """Count launches, so that an answer without one shows; or leave them out."""
        from tilelang.jit import JITKernel

        original = JITKernel.__call__

        def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self._launches += 1
            return None if self._left_out else original(kernel, *args, **kwargs)

        JITKernel.__call__ = counted

    def on_load(self, path: str, sandboxed: bool) -> Answer:
        """Execute the file; a thread that it starts meanwhile counts against it."""
        threads, submission = threading.active_count(), Submission.from_file(path)
        self._path, self._sandboxed = path, sandboxed
        self._entry: Callable[..., Any] = (
            sandbox.load(submission.source, path) if sandboxed
            else submission.execute(Path(path).parent)[ENTRY_POINT]
        )  # fmt: skip
        return {"threads": threads}

    def on_open(self, arena: int, path: str, size_bytes: int, places: list[Any]) -> Answer:
        """Map the arguments, or make room for them on the device."""
        memory, handle, file = torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8), None, None
        if self._device != "cpu":
            file = memory
            try:
                memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            except RuntimeError as error:
                raise BackendError((str(error).strip() or type(error).__name__).splitlines()[0][:_TEXT_CHARS]) from None
            handle = share(memory)
        self._arenas[arena] = (memory, None if handle else file, list(tensors_in(memory, places)))
        return {"handle": handle}

    def on_close(self, arena: int) -> Answer:
        """Let go of an arena."""
        del self._arenas[arena]
        if self._device != "cpu":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        return {}

    @contextlib.contextmanager
    def _arguments(self, arena: int) -> Iterator[list[torch.Tensor]]:
        """The tensors of an arena; where the judge cannot see the device's memory, a file carries their bytes."""
        memory, file, tensors = self._arenas[arena]
        if file is not None:
            memory.copy_(file)
        yield tensors
        self._synchronize()
        if file is not None:
            file.copy_(memory)

    def on_call(self, arena: int, garbage: str, seed: int) -> Answer:
        """Call run_kernel once."""
        compute, launches = _TorchCompute(self._garbage), self._launches
        with self._arguments(arena) as tensors:
            # A fresh tensor object for each argument and call: an object that was seen before means nothing.
            fresh = [tensor.view(tensor.shape) for tensor in tensors]
            self._garbage.kind, self._garbage.seed, start = garbage, seed, time.perf_counter()
            try:
                with compute if self._sandboxed else contextlib.nullcontext():
                    returned = self._entry(*fresh)
                self._synchronize()
            finally:
                self._garbage.kind = "untouched"
            seconds = time.perf_counter() - start
        return {
            "returned": None if returned is None else type(returned).__name__,
            "seconds": seconds,
            "launches": self._launches - launches,
            "computed": compute.names(tensors[0].shape[0] * (tensors[1].shape[-1] + tensors[1].shape[-2])),
            "threads": threading.active_count(),
        }

    def on_compile(self, tensors: list[list[Any]], baseline: bool) -> Answer:
        """Call run_kernel, or the baseline, without a launch, so that what it compiles is in TileLang's cache.

        ``tensors`` has shape, dtype and values of each argument; no values for one that host code has no use for.
        """
        entry = backend.load(step("s0_baseline")) if baseline else self._entry
        self._left_out = True
        # Without a launch the host code may stumble over its own answers; only calls say anything about a file.
        with contextlib.suppress(Exception):
            entry(*(
                torch.empty(shape, dtype=getattr(torch, dtype), device=self._device) if values is None
                else torch.tensor(values, dtype=getattr(torch, dtype), device=self._device).view(shape)
                for shape, dtype, values in tensors
            ))  # fmt: skip
        if self._device != "cpu":
            torch.cuda.empty_cache()
        return {}

    def on_time(self, arena: int, rounds: int) -> Answer:
        """Time run_kernel and the baseline in turns on one input."""
        baseline = backend.load(step("s0_baseline"))
        with self._arguments(arena) as (*inputs, out):
            other_out = torch.zeros_like(out)
            timings = interleave(
                {"candidate": lambda _: self._entry(*inputs, out), "baseline": lambda _: baseline(*inputs, other_out)},
                rounds=rounds,
            )
        return {name: list(timing.times_ms) for name, timing in timings.items()}

    def _synchronize(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()

    def _raised(self, error: BaseException, event: str) -> Answer:
        """What the submission raised, and where."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == self._path]
        inside = {frame.name for frame in frames if "/tilelang/" in frame.filename}
        compiling = inside & {"compile", "lower", "_compile_and_create_adapter"}
        try:
            text = str(error)
        except BaseException:  # noqa: BLE001 - the submission's own class, which may raise anything
            text = "its text cannot be made"
        try:
            # A GPU's context does not survive a fault in a kernel.
            self._synchronize()
            alive = event != "load"
        except RuntimeError:
            alive = False
        return {
            "loading": event == "load",
            "stage": "compile" if compiling else "launch" if inside else "host",
            "kind": type(error).__name__[:_TEXT_CHARS],
            "message": text[:_TEXT_CHARS],
            "line": own[-1].lineno if own else getattr(error, "lineno", None),
            "function": own[-1].name if own else None,
            "rule_id": getattr(error, "rule_id", None),
            "alive": alive,
        }


def _limit(kind: int, amount: int, what: str = "") -> None:
    """Limit this process and its children; BackendError where less is allowed, since the submission would be blamed."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY and hard < amount:
        raise BackendError(
            f"got a limit of {hard / 2**30:.2f} GiB {what}, expected at least {amount / 2**30:.2f} GiB: raise it "
            "before the judge starts"
        )
    resource.setrlimit(kind, (amount, amount))


def serve(judge: socket.socket) -> NoReturn:
    """Answer one judge, one datagram a message, then end without running what the submission left behind."""
    session, owner = _Session(), os.getpid()
    while request := judge.recv(_REQUEST_BYTES):
        message = json.loads(request)
        number = message.pop("number")
        answer = session.answer(**message)
        # A forked copy of the worker must not speak for it.
        if os.getpid() != owner:
            break
        judge.send(json.dumps(answer | {"number": number}).encode())
    os._exit(0)


def breed(requests: socket.socket) -> None:
    """Import what submissions need, then make a worker by a fork for each request, until the judge is gone.

    A request has the worker's folder and environment, and three descriptors: its judge, its output and where its number
    and its end are to be said.
    """
    # What a machine lacks is said by the worker that needs it.
    with contextlib.suppress(MoeLabError, ImportError):
        if torch.cuda.is_available():
            importlib.import_module("tilelang")
        else:
            backend.prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            try:
                requests.close()
                judge, output, news = descriptors
                _guard(judge, output, news, **json.loads(request))
            except BaseException:  # noqa: BLE001 - nothing of the parent may run in its children
                traceback.print_exc()
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)


def _guard(judge: int, output: int, news: int, folder: str, environment: dict[str, str]) -> NoReturn:
    """Start a worker, say its number and, once it has ended, how: only a parent hears that."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _end_with_parent()
    worker = os.fork()
    with socket.socket(fileno=news) as told:
        if worker:
            os.close(judge)
            told.send(str(worker).encode())
            told.send(str(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])).encode())
            os._exit(0)
    _end_with_parent()
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(folder)
    for name, value in environment.items():
        # A mark of the run also in place, where /proc shows it: processes are found by it, however they were started.
        if (address := _LIBC.getenv(name.encode())) and len(ctypes.string_at(address)) == len(value):
            ctypes.memmove(address, value.encode(), len(value))
        os.environ[name] = value
    tempfile.tempdir = None
    serve(socket.socket(fileno=judge))


def _end_with_parent() -> None:
    """If the judge is killed, nobody would end this process: ask the kernel to."""
    with contextlib.suppress(OSError, AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    breed(socket.socket(fileno=int(sys.argv[1])))
