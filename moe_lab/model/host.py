"""What a submission's host code asks TileLang for: ``run_kernel`` called with tensors that have a shape and no storage.

Nothing is lowered, compiled or run. This belongs into a child process: the host code runs as it is, and what names
mean on a CPU (:mod:`moe_lab.machine.cpu`) must not have been applied.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_lab.machine import cpu
from moe_lab.problem.contract import ARGUMENTS, ENTRY_POINT
from moe_lab.problem.errors import BackendError, SubmissionError
from moe_lab.problem.submission import Submission


@dataclass
class Kernel:
    """One kernel that the host code would have compiled."""

    function: Any  # TileLang's PrimFunc
    pass_configs: dict[str, Any]  # of its @tilelang.jit, by their full names
    target: str  # that @tilelang.jit names; empty if it names none


@dataclass
class Asked:
    """All of it."""

    arguments: dict[str, Any]  # the ten tensors of the call, by name
    kernels: list[Kernel] = field(default_factory=list)  # in the order in which they would be compiled
    launches: list[tuple[Kernel, Sequence[Any]]] = field(default_factory=list)  # kernel and tensors, in order


def asked_for(
    source: str, sizes: Mapping[str, int], integers: Mapping[str, Sequence[int]], *, on_gpu: bool = True, load: str = ""
) -> Asked:
    """Call ``run_kernel`` once and note each kernel and each launch.

    Args:
        source: of the submission.
        sizes: what the symbols of :data:`moe_lab.problem.contract.ARGUMENTS` stand for.
        integers: contents of the index arrays by name, for host code that reads them; zeros where missing.
        on_gpu: what the tensors answer to ``is_cuda``: host code may keep another kernel for a machine with no GPU.
        load: "module:function" that makes ``run_kernel`` of a text and its path; plain execution by default.

    Raises:
        SubmissionError: for a file without ``run_kernel``.
    """
    asked = Asked(arguments=_arguments(sizes, integers, on_gpu))
    # TileLang reads the source of a kernel from its file.
    with tempfile.TemporaryDirectory(prefix="moe_lab_") as folder, _recorded(asked), _no_device():
        if load:
            path = Submission(source).save(Path(folder, "submission.py"))
            entry = pkgutil.resolve_name(load)(source, str(path))
        else:
            entry = Submission(source).execute(Path(folder)).get(ENTRY_POINT)
        if not callable(entry):
            raise SubmissionError(f"got no function {ENTRY_POINT}, expected one at module level")
        entry(*asked.arguments.values())
    return asked


def _arguments(sizes: Mapping[str, int], integers: Mapping[str, Sequence[int]], on_gpu: bool) -> dict[str, Any]:
    import torch

    class OnGpu(torch.Tensor):
        is_cuda = True

    made = {}
    for argument in ARGUMENTS:
        shape, dtype = [sizes[extent] for extent in argument.shape], getattr(torch, argument.dtype)
        tensor = torch.zeros(shape, dtype=dtype, device="cpu" if dtype is torch.int32 else "meta")
        if argument.name in integers:
            tensor.copy_(torch.tensor(integers[argument.name], dtype=dtype))
        made[argument.name] = tensor.as_subclass(OnGpu) if on_gpu else tensor
    return made


@contextmanager
def _recorded(asked: Asked) -> Iterator[None]:
    """Note a kernel where TileLang would compile it, and hand out something that notes its launches."""
    import torch

    jit: Any = sys.modules["tilelang.jit"]

    def record(
        func: Any, out_idx: Any = None, *args: Any, pass_configs: Any = None, target: Any = None, **other: Any
    ) -> Any:
        configs = {str(getattr(key, "value", key)): value for key, value in (pass_configs or {}).items()}
        kernel = Kernel(func, configs, "" if target in (None, "auto") else str(target))
        asked.kernels.append(kernel)
        outputs = [out_idx] if isinstance(out_idx, int) else list(out_idx or ())

        def launch(*tensors: Any) -> Any:
            given, fresh = list(tensors), []
            for index in outputs:
                buffer = func.buffer_map[func.params[index]]
                dtype = getattr(torch, str(buffer.dtype))
                fresh.append(torch.empty([int(extent) for extent in buffer.shape], dtype=dtype, device="meta"))
                given.insert(index % len(func.params), fresh[-1])
            asked.launches.append((kernel, given))
            return fresh[0] if len(fresh) == 1 else fresh or None

        return launch

    cached, jit.cached = jit.cached, record
    try:
        yield
    finally:
        jit.cached = cached


def _no_device() -> Any:
    """Host code that names a GPU gets tensors without storage, too."""
    from torch.overrides import TorchFunctionMode

    class NoDevice(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "meta"
            return func(*args, **kwargs)

    return NoDevice()


@functools.cache
def accept_vendor_files() -> None:
    """Let files for a vendor's build be read: their keys, and their layouts, which change no sizes."""
    language: Any = importlib.import_module("tilelang.language")
    annotate = language.annotate_layout

    def refuse(module: str, name: str) -> cpu.Refused:
        return cpu.Refused(f"got {module}.{name}, which only the vendor's own TileLang can lower", BackendError)

    def annotate_known(layouts: Any) -> Any:
        known = {buffer: layout for buffer, layout in layouts.items() if layout is not None}
        return annotate(known) if known else None

    cpu.accept_other_builds(refuse)
    language.annotate_layout = annotate_known
