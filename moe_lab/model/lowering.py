"""What a submission's host code asks TileLang for, and what TileLang makes of it for a device that is not here.

``run_kernel`` is called in a child process with tensors that have a shape and no storage, which takes seconds and no
GPU. Check a stranger's file against the rules first.
"""

import functools
import importlib
import json
import math
import os
import pkgutil
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from moe_lab.machine import backend, cpu
from moe_lab.machine.child import Child, ChildError
from moe_lab.model.roofline import balanced
from moe_lab.problem.contract import ARGUMENTS, ENTRY_POINT, Case, data_dir
from moe_lab.problem.errors import BackendError, SubmissionError
from moe_lab.problem.layout import GroupedLayout
from moe_lab.problem.submission import Submission

#: TileLang's description of each target. sm_80 shows what a kernel needs without a Hopper's special treatment. gfx90a
#: has 64 lanes in a wave and 64 KiB of shared memory for a block: the nearest public stand-in for the C500, no more.
TARGETS: dict[str, dict[str, str]] = {
    "sm_80": {"kind": "cuda", "arch": "sm_80"},
    "sm_90a": {"kind": "cuda", "arch": "sm_90a"},
    "gfx90a": {"kind": "hip", "mcpu": "gfx90a"},
    "cpu": {"kind": "c"},
}

_NO_TILELANG = "there is no TileLang"
_COPY = re.compile(r"[^\s\"']*/moe_lab_\w+/submission\.py")  # a file in a folder of ours that is gone when it is named


class LoweringError(BackendError):
    """A submission that did not lower: the first line said instead of kernels, and all of the message.

    >>> LoweringError("s0", "sm_80", "InternalError: T.wgmma_gemm() requires Hopper WGMMA lowering, but ...").feature
    'matrix products of a warpgroup (WGMMA)'
    """

    def __init__(self, name: str, target: str, said: str, message: str = "") -> None:
        self.name, self.target, self.said, self.message = name, target, said, message or said
        # On a target that has it the same refusal has another reason, so it is shown as it is.
        rows = json.loads((data_dir() / "refusals.json").read_text(encoding="utf-8"))
        refused = ((re.search(row["pattern"], said), row["words"]) for row in rows if target not in row["has"])
        #: What it uses and TileLang does not have for the target, in words; None if that is not the reason.
        self.feature: str | None = next((found.expand(words) for found, words in refused if found), None)
        #: Whether the compiler looked at the kernel and said no.
        self.refused = not self.feature and said.startswith("InternalError")
        known = f"{name} uses {self.feature}, which TileLang does not have for {target}"
        super().__init__(known if self.feature else f"{name} for {target}: {said}")


@dataclass(frozen=True)
class LoweredKernel:
    """One launch of a submission, lowered."""

    name: str  # of the function in the generated code
    shared_bytes: int  # shared memory of one block, dynamic and static
    threads: int  # of one block, those of specialised warps included
    grid: tuple[int, int, int]  # blocks along x, y and z; -1 for an extent that is known at run time only
    local_bytes: int  # arrays of one thread, its share of every fragment: about what must fit into registers
    source: str  # generated CUDA or HIP code of the whole kernel file


@dataclass(frozen=True)
class Lowering:
    """One thing to lower."""

    submission: Submission  # with the literals wanted
    case: Case  # sizes; groups are equal
    target: str = "sm_80"  # a key of TARGETS

    def __post_init__(self) -> None:
        """Refuse a target that nobody knows how to lower for."""
        if self.target not in TARGETS:
            raise BackendError(f"got target {self.target!r}, expected one of {', '.join(TARGETS)}")


def lower_many(
    lowerings: Sequence[Lowering], *, python: str | os.PathLike[str] = sys.executable, timeout_s: float = 600
) -> list[list[LoweredKernel] | LoweringError]:
    """Lower many in one child process, because starting TileLang takes longer than lowering.

    Each gives its kernels, in the order in which the host code asks for them, or the error that it ended with.
    ``python`` may be the interpreter of another environment, to lower with the TileLang installed there; ``timeout_s``
    is for all of them together. Raises BackendError if the time is over or the child cannot start at all.
    """
    results: list[list[LoweredKernel] | LoweringError] = []
    environment = {"TILELANG_DEFAULT_TARGET": None, "TILELANG_PRINT_ON_COMPILATION": "0"}
    deadline = time.monotonic() + timeout_s

    def child() -> Child:
        return Child(f"{__name__}:lower_here", python=str(python), environment=environment)

    # What a name means on a CPU stays so in its process: no other target may share it.
    with child() as gpu, child() as cpu_only:
        for item in lowerings:
            sizes = item.case.extents(GroupedLayout(balanced(item.case)).num_padded_rows)
            request = {"source": item.submission.source, "target": item.target, "sizes": sizes}
            try:
                answer = (cpu_only if item.target == "cpu" else gpu).ask(request, timeout_s=deadline - time.monotonic())
                results.append([LoweredKernel(**{**kernel, "grid": tuple(kernel["grid"])}) for kernel in answer])
            except ChildError as error:
                if error.ending.startswith("no answer"):
                    raise BackendError(f"got no answer in {timeout_s:.0f} s for {len(lowerings)} lowerings") from None
                if "No module named" in error.message and (error.ending or str(error).startswith(_NO_TILELANG)):
                    raise BackendError(f"{python} cannot lower: {error}") from None
                name = item.submission.name
                ended = f"the compiler's process ended: {error.ending}" if error.ending else ""
                texts = (ended or str(error), "\n".join(filter(None, [ended, error.message])))
                results.append(LoweringError(name, item.target, *(name.join(_COPY.split(text)) for text in texts)))
    return results


def lower_here(say: Callable[[str], None], source: str, target: str, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """The child's part: lower everything that the host code asks for in this process."""
    backend.usable_cache_dir()
    try:
        import tilelang
        from tilelang import tvm
    except ImportError as error:
        raise BackendError(f"{_NO_TILELANG}: {error}") from None
    if target == "cpu":
        cpu.apply()
    else:
        accept_vendor_files()
    where = tvm.target.Target(TARGETS[target])
    known = tvm.transform.PassContext.list_configs()
    with where:
        asked = asked_for(source, sizes, {}, on_gpu=target != "cpu")
    if not asked.kernels:
        raise BackendError("it launches no kernel")
    lowered: list[dict[str, Any]] = []
    for kernel in asked.kernels:
        config = {key: value for key, value in kernel.pass_configs.items() if key in known}
        with tvm.transform.PassContext(opt_level=3, config=config), where:
            artifact = tilelang.lower(kernel.function, target=where)
        lowered += [_describe(each, artifact.kernel_source) for each in artifact.device_mod.functions.values()]
    return lowered


def _describe(function: Any, source: str) -> dict[str, Any]:
    """The fields of a LoweredKernel."""
    from tvm import DataType, tirx

    attributes = dict(function.attrs)
    extents = attributes.get("thread_extent", {}).items()  # code for a CPU has none
    extent = {str(axis): int(getattr(size, "value", -1)) for axis, size in extents}
    blocks, threads = ([extent.get(f"{kind}Idx.{axis}", 1) for axis in "xyz"] for kind in ("block", "thread"))
    sizes: Counter[str] = Counter()  # bytes by scope

    def count(node: Any) -> None:
        if type(node).__name__ == "AllocBuffer":
            dtype, scope = DataType(node.buffer.dtype), node.buffer.scope()
            size_bytes = (dtype.bits * dtype.lanes + 7) // 8 * math.prod(map(int, node.buffer.shape))
            sizes["local" if scope.startswith("local") else scope] += size_bytes

    tirx.stmt_functor.post_order_visit(function.body, count)
    shared_bytes = int(attributes.get("dyn_shared_memory_buf", 0)) + sizes["shared"]
    return {
        "name": str(attributes["global_symbol"]), "shared_bytes": shared_bytes, "threads": math.prod(threads),
        "grid": blocks, "local_bytes": sizes["local"], "source": source,
    }  # fmt: skip


@dataclass
class Kernel:
    """One kernel that the host code would have compiled."""

    function: Any  # TileLang's PrimFunc
    pass_configs: dict[str, Any]  # of its @tilelang.jit, by their full names


@dataclass
class Asked:
    """What one call of ``run_kernel`` asks for."""

    arguments: dict[str, Any]  # the ten tensors of the call, by name
    kernels: list[Kernel] = field(default_factory=list)  # in the order in which they would be compiled
    launches: list[tuple[Kernel, Sequence[Any]]] = field(default_factory=list)  # kernel and tensors, in order


def asked_for(
    source: str, sizes: Mapping[str, int], integers: Mapping[str, Sequence[int]], *, on_gpu: bool = True, load: str = ""
) -> Asked:
    """Call ``run_kernel`` once and note each kernel and each launch; nothing is lowered, compiled or run.

    ``sizes`` are what the symbols of :data:`moe_lab.problem.contract.ARGUMENTS` stand for, ``integers`` the contents of
    index arrays by name (zeros where missing). The tensors answer ``on_gpu`` to ``is_cuda``: host code may keep another
    kernel for a machine with no GPU. ``load``, a "module:function", makes ``run_kernel`` of a text and its path; plain
    execution by default. Raises SubmissionError for a file without ``run_kernel``.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class NoDevice(TorchFunctionMode):
        """Host code that names a GPU gets tensors without storage, too."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
                return on_gpu
            named = str((kwargs or {}).get("device", ""))
            return func(*args, **(kwargs or {}) | ({"device": "meta"} if named.startswith("cuda") else {}))

    asked = Asked({})
    for argument in ARGUMENTS:
        shape, dtype = [sizes[extent] for extent in argument.shape], getattr(torch, argument.dtype)
        tensor = torch.zeros(shape, dtype=dtype, device="cpu" if dtype is torch.int32 else "meta")
        if argument.name in integers:
            tensor.copy_(torch.tensor(integers[argument.name], dtype=dtype))
        asked.arguments[argument.name] = tensor
    # Noted where TileLang would compile; it reads the source of a kernel from its file.
    noted = mock.patch.object(importlib.import_module("tilelang.jit"), "cached", functools.partial(_note, asked))
    with tempfile.TemporaryDirectory(prefix="moe_lab_") as folder, noted, NoDevice():
        if load:
            path = Submission(source).save(Path(folder, "submission.py"))
            entry = pkgutil.resolve_name(load)(source, str(path))
        else:
            entry = Submission(source).execute(Path(folder)).get(ENTRY_POINT)
        if not callable(entry):
            raise SubmissionError(f"got no function {ENTRY_POINT}, expected one at module level")
        entry(*asked.arguments.values())
    return asked


def _note(asked: Asked, func: Any, out_idx: Any = None, *args: Any, pass_configs: Any = None, **other: Any) -> Any:
    """Note a kernel, and make what notes its launches."""
    import torch

    configs = {str(getattr(key, "value", key)): value for key, value in (pass_configs or {}).items()}
    asked.kernels.append(kernel := Kernel(func, configs))

    def launch(*tensors: Any) -> Any:
        given, fresh = list(tensors), []
        for index in [out_idx] if isinstance(out_idx, int) else out_idx or ():
            buffer = func.buffer_map[func.params[index]]
            shape, dtype = [int(extent) for extent in buffer.shape], getattr(torch, str(buffer.dtype))
            fresh.append(torch.empty(shape, dtype=dtype, device="meta"))
            given.insert(index % len(func.params), fresh[-1])
        asked.launches.append((kernel, given))
        return fresh[0] if len(fresh) == 1 else fresh or None

    return launch


@functools.cache
def accept_vendor_files() -> None:
    """Let files for a vendor's build be read: their keys, and their layouts, which change no sizes."""
    language: Any = importlib.import_module("tilelang.language")
    annotate = language.annotate_layout

    def annotate_known(layouts: Any) -> Any:
        known = {buffer: layout for buffer, layout in layouts.items() if layout is not None}
        return annotate(known) if known else None

    def refuse(module: str, name: str) -> cpu.Refused:
        return cpu.Refused(f"got {module}.{name}, which only the vendor's own TileLang can lower", BackendError)

    cpu.accept_other_builds(refuse)
    language.annotate_layout = annotate_known
