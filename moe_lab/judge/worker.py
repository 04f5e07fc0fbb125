"""The process that loads and calls a submission. It holds the inputs of a call and never the truth.

Started by :mod:`moe_lab.judge.process` as ``python -m moe_lab.judge.worker FD``. Nothing it says can turn a wrong
answer into a right one: the judge compares the bytes of ``out`` and of the inputs itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moe_lab.judge.channel import KEY_BYTES, Channel, ChannelClosedError, Message
from moe_lab.problem.errors import BackendError, MoeLabError

_PR_SET_PDEATHSIG = 1
_MESSAGE_CHARS = 4_000
_KIND_CHARS = 80
_TAIL_LINES = 12


class _Garbage:
    """What freshly allocated memory holds: ``torch.empty`` promises nothing, so the judge fills it on purpose."""

    def __init__(self) -> None:
        self.kind = "untouched"
        self.seed = 0
        self.filling = False

    def install(self) -> None:
        import torch

        def filled(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
                made = create(*args, **kwargs)
                self.filling = True
                try:
                    return self.fill(made)
                finally:
                    self.filling = False

            wrapper.__name__ = create.__name__
            wrapper.__doc__ = create.__doc__
            return wrapper

        # The wrappers replace the functions before the sandbox takes its own references.
        torch.empty = filled(torch.empty)
        torch.empty_like = filled(torch.empty_like)

    def fill(self, tensor: Any) -> Any:
        import torch

        if self.kind == "untouched" or tensor.numel() == 0:
            return tensor
        generator = torch.Generator(device=tensor.device).manual_seed(self.seed)
        self.seed += 1
        if self.kind == "zeros":
            return tensor.zero_()
        if tensor.is_floating_point():
            if self.kind == "nan":
                return tensor.fill_(float("nan"))
            scale = {"noise": 3.0, "large": 2.0e4}[self.kind]
            return tensor.copy_(torch.randn(tensor.shape, generator=generator, device=tensor.device).mul_(scale))
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        return tensor.random_(generator=generator)


class _TorchCompute:
    """What torch computes in a call, however the file reaches it: the text cannot show every way.

    A few passes over the activations are small host-side uses, which the contest does not rule out; a matrix product
    is not small, and neither is one that is spelt out element by element.
    """

    PASSES = 8

    def __init__(self, garbage: _Garbage) -> None:
        self._garbage = garbage
        self._elements = 0
        self._pointwise: set[str] = set()
        self._products: set[str] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look at every operation that torch dispatches."""
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        compute = self
        compute._elements, compute._pointwise, compute._products = 0, set(), set()

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                # Attention and operations on lists of tensors return several.
                made = [
                    item
                    for item in (result if isinstance(result, (tuple, list)) else [result])
                    if isinstance(item, torch.Tensor) and (item.is_floating_point() or item.is_complex())
                ]
                if made:
                    elements = sum(item.numel() for item in made)
                    compute._saw(func._schema.name.partition("::")[2].rstrip("_"), elements, func.tags)
                return result

        with Watch():
            yield

    def _saw(self, name: str, elements: int, tags: Any) -> None:
        import torch

        if name in PRODUCTS:
            self._products.add(name)
        elif torch.Tag.pointwise in tags and name not in MOVES and not self._garbage.filling:
            self._pointwise.add(name)
            self._elements += elements

    def names(self, activations: int) -> list[str]:
        """Operations of the call that are more than host-side work.

        Args:
            activations: elements of one pass, P * (H + I).
        """
        many = self._elements > self.PASSES * activations
        return sorted(self._products | (self._pointwise if many else set()))


#: Operations of torch that multiply matrices, and those that are called pointwise and compute nothing.
PRODUCTS = frozenset({
    "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "dot", "vdot", "addr", "linear", "convolution",
    "_addmm_activation", "_scaled_mm", "_int_mm", "_cdist_forward", "_trilinear", "_grouped_mm", "_scaled_grouped_mm",
    "cudnn_convolution", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_flash_attention_forward",
    "_efficient_attention_forward",
})  # fmt: skip
MOVES = frozenset({"copy", "_to_copy", "fill", "zero", "clone", "where", "masked_fill", "lift_fresh", "detach"})


class _Launches:
    """Counts kernel launches, so that an answer without a launch shows; or leaves them out."""

    def __init__(self) -> None:
        self.count = 0
        self.left_out = False

    def install(self) -> None:
        from tilelang.jit import JITKernel

        original = JITKernel.__call__

        def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return None if self.left_out else original(kernel, *args, **kwargs)

        JITKernel.__call__ = counted


class _Arena:
    """The worker's side of the arguments: a file that the judge maps too, or memory of its own."""

    def __init__(self, path: str | None, size_bytes: int, regions: list[list[Any]], device: str) -> None:
        import torch

        from moe_lab.judge.arena import Region, map_file, view

        self.buffer = map_file(path) if path else torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.tensors = [
            view(self.buffer, Region(name, start, tuple(shape), dtype)) for name, start, shape, dtype in regions
        ]


class _Session:
    """Answers the judge's requests until the channel closes."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._arenas: dict[int, _Arena] = {}
        self._garbage = _Garbage()
        self._launches = _Launches()
        self._compute = _TorchCompute(self._garbage)
        self._sandboxed = False
        self._entry: Callable[..., Any] | None = None
        self._path = ""
        self._device = "cpu"

    def run(self) -> None:
        handlers: dict[str, Callable[..., Message]] = {
            "start": self._start,
            "load": self._load,
            "open": self._open,
            "close": self._close,
            "move": self._move,
            "call": self._call,
            "compile": self._compile,
            "time": self._time,
        }
        while True:
            message = self._channel.receive()
            answer = handlers[message.pop("event")](**message)
            for stream in (sys.stdout, sys.stderr):
                # The submission may have closed or replaced its streams; that is its own loss.
                with contextlib.suppress(Exception):
                    stream.flush()
            self._channel.send(answer)

    def _start(self, memory_bytes: int, file_bytes: int, tilelang: bool, window: str | None) -> Message:
        from moe_lab.judge.arena import map_file, pin
        from moe_lab.machine import backend

        self._device = backend.detect().torch_device
        self._garbage.install()
        if tilelang:
            # Its import belongs to the start, not to the submission's time.
            try:
                backend.prepare()
            except MoeLabError as error:
                return {"event": "failed", "message": str(error)}
            self._launches.install()
        if window:
            self._window = map_file(window)
            if self._device != "cpu":
                pin(self._window)
        try:
            _limit(resource.RLIMIT_CORE, 0)
            _limit(resource.RLIMIT_FSIZE, file_bytes, "of a file (ulimit -f)")
            if self._device == "cpu":
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                _limit(resource.RLIMIT_AS, used + memory_bytes, "of address space (ulimit -v)")
        except MoeLabError as error:
            return {"event": "failed", "message": str(error)}
        return {"event": "started"}

    def _load(self, path: str, sandboxed: bool) -> Message:
        # Counted before the file is executed: a thread that it starts while loading counts against it.
        self._threads = threading.active_count()
        self._path, self._sandboxed = path, sandboxed
        source = Path(path).read_text(encoding="utf-8")
        try:
            if sandboxed:
                from moe_lab.judge import sandbox

                self._entry = sandbox.load(source, path)
            else:
                namespace: dict[str, Any] = {"__name__": "submission", "__file__": path}
                exec(compile(source, path, "exec", dont_inherit=True), namespace)
                self._entry = namespace["run_kernel"]
        except BaseException as error:  # noqa: BLE001 - whatever the submission raises is an answer
            return self._error(error, "load")
        return {"event": "loaded", "threads": self._threads}

    def _open(self, arena: int, path: str | None, size_bytes: int, regions: list[list[Any]]) -> Message:
        try:
            self._arenas[arena] = _Arena(path, size_bytes, regions, self._device)
        except RuntimeError as error:
            return {"event": "failed", "message": _first_line(error)}
        return {"event": "opened"}

    def _close(self, arena: int) -> Message:
        del self._arenas[arena]
        if self._device != "cpu":
            import torch

            torch.cuda.empty_cache()
        return {"event": "closed"}

    def _move(self, arena: int, direction: str, start: int, size: int) -> Message:
        """Copy the first bytes of the window to an arena ("put"), or some of the arena to the window ("get")."""
        part, window = self._arenas[arena].buffer[start : start + size], self._window[:size]
        try:
            (part if direction == "put" else window).copy_(window if direction == "put" else part)
        except RuntimeError as error:
            # A GPU reports a fault in a kernel at whatever comes after it.
            return self._error(error, "call")
        return {"event": "moved"}

    def _synchronize(self) -> None:
        if self._device != "cpu":
            import torch

            torch.cuda.synchronize()

    def _call(self, arena: int, garbage: str, seed: int) -> Message:
        assert self._entry is not None
        memory = self._arenas[arena]
        self._garbage.kind, self._garbage.seed = garbage, seed
        launches, start = self._launches.count, time.perf_counter()
        # A fresh tensor object for each argument and call: an object that was seen before means nothing.
        fresh = [tensor.view(tensor.shape) for tensor in memory.tensors]
        activations = fresh[0].shape[0] * (fresh[1].shape[-1] + fresh[1].shape[-2])
        try:
            with self._compute.watching() if self._sandboxed else contextlib.nullcontext():
                returned = self._entry(*fresh)
            self._synchronize()
        except BaseException as error:  # noqa: BLE001 - whatever the submission raises is an answer
            return self._error(error, "call")
        finally:
            self._garbage.kind = "untouched"
        return {
            "event": "done",
            "returned": None if returned is None else type(returned).__name__,
            "seconds": time.perf_counter() - start,
            "launches": self._launches.count - launches,
            "computed": self._compute.names(activations),
            "threads": threading.active_count(),
        }

    def _compile(self, tensors: list[list[Any]], baseline: bool) -> Message:
        """Call run_kernel without launching anything, so that what it compiles is in TileLang's cache.

        Args:
            tensors: shape, dtype and values of each argument; no values for one that host code has no use for.
            baseline: whether the baseline is meant and not the submission.
        """
        import torch

        from moe_lab.machine import backend
        from moe_lab.steps import step

        entry = backend.load(step("s0_baseline")) if baseline else self._entry
        assert entry is not None
        self._launches.left_out = True
        # Without a launch the host code may stumble over its own answers; only calls say anything about a file.
        with contextlib.suppress(Exception):
            entry(*(
                torch.empty(shape, dtype=getattr(torch, dtype), device=self._device) if values is None
                else torch.tensor(values, dtype=getattr(torch, dtype), device=self._device).view(shape)
                for shape, dtype, values in tensors
            ))  # fmt: skip
        if self._device != "cpu":
            torch.cuda.empty_cache()
        return {"event": "compiled"}

    def _time(self, arena: int, rounds: int) -> Message:
        import torch

        from moe_lab.machine import backend
        from moe_lab.machine.timing import interleave
        from moe_lab.steps import step

        entry = self._entry
        assert entry is not None
        *inputs, out = self._arenas[arena].tensors
        baseline = backend.load(step("s0_baseline"))
        other_out = torch.zeros_like(out)
        try:
            timings = interleave(
                {"candidate": lambda _: entry(*inputs, out), "baseline": lambda _: baseline(*inputs, other_out)},
                rounds=rounds,
            )
            self._synchronize()
        except BaseException as error:  # noqa: BLE001 - whatever the submission raises is an answer
            return self._error(error, "call")
        return {"event": "timed", **{name: list(timing.times_ms) for name, timing in timings.items()}}

    def _error(self, error: BaseException, phase: str) -> Message:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == self._path]
        compiling = any(
            "/tilelang/" in frame.filename and frame.name in ("compile", "lower", "_compile_and_create_adapter")
            for frame in frames
        )
        launching = any("/tilelang/" in frame.filename for frame in frames) and not compiling
        try:
            text = str(error)
        except BaseException:  # noqa: BLE001 - the submission's own class, which may raise anything
            text = "its text cannot be made"
        return {
            "event": "error",
            "phase": phase,
            "stage": "compile" if compiling else "launch" if launching else "host",
            "kind": type(error).__name__[:_KIND_CHARS],
            "message": text[:_MESSAGE_CHARS],
            "tail": "\n".join(text.splitlines()[-_TAIL_LINES:])[-_MESSAGE_CHARS:],
            "line": own[-1].lineno if own else getattr(error, "lineno", None),
            "function": own[-1].name if own else None,
            "rule_id": getattr(error, "rule_id", None),
            "alive": phase == "call" and self._answers(),
        }

    def _answers(self) -> bool:
        """Whether another call can be made: a GPU's context does not survive a fault in a kernel."""
        try:
            self._synchronize()
        except RuntimeError:
            return False
        return True


def _limit(kind: int, amount: int, what: str = "") -> None:
    """Limit this process and its children.

    Raises:
        BackendError: where they may use less already, which would be blamed on the submission.
    """
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY and hard < amount:
        raise BackendError(
            f"got a limit of {hard / 2**30:.2f} GiB {what}, expected at least {amount / 2**30:.2f} GiB: raise it "
            "before the judge starts"
        )
    resource.setrlimit(kind, (amount, amount))


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:_MESSAGE_CHARS]


def main() -> None:
    """Serve one judge, then end without running what the submission left behind."""
    descriptor = int(sys.argv[1])
    # If the judge is killed, nobody would end this process: ask the kernel to.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sock = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    key = b""
    while len(key) < KEY_BYTES:
        part = sock.recv(KEY_BYTES - len(key))
        if not part:
            os._exit(0)
        key += part
    try:
        _Session(Channel(sock, key, "worker")).run()
    except ChannelClosedError:
        os._exit(0)


if __name__ == "__main__":
    main()
