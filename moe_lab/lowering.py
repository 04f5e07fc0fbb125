"""What TileLang makes of a submission for a device that is not here: shared memory, threads, generated code.

A submission's ``run_kernel`` is called in a child process with tensors that have shapes but no storage, and say
``is_cuda`` if the target is a GPU; the kernels it asks for are lowered for the wanted target instead of compiled and
run. That takes seconds and no GPU. The host code of the submission runs in the child as it is: check a stranger's file
against the rules first.

``sm_80`` shows what a kernel needs without a Hopper's special treatment, ``sm_90a`` what an H200 gets. ``gfx90a`` has
64 lanes in a wave and 64 KiB of shared memory for a block, as the C500 has: the nearest public stand-in for its
layout inference, and no more than a stand-in. ``cpu`` shows what runs on a machine with no GPU (:mod:`moe_lab.cpu`).
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_lab import cpu
from moe_lab.contract import ARGUMENTS, BLOCK_TOKEN, ENTRY_POINT, Case
from moe_lab.errors import BackendError
from moe_lab.submission import Submission

#: TileLang's description of each target that can be lowered for, by the name used here.
TARGETS: dict[str, dict[str, str]] = {
    "sm_80": {"kind": "cuda", "arch": "sm_80"},
    "sm_90a": {"kind": "cuda", "arch": "sm_90a"},
    "gfx90a": {"kind": "hip", "mcpu": "gfx90a"},
    "cpu": {"kind": "c"},
}

_MARK = "moe_lab lowered "


@dataclass(frozen=True)
class LoweredKernel:
    """One launch of a submission, lowered.

    Attributes:
        name: function name in the generated code.
        shared_bytes: shared memory of one block, dynamic and static.
        threads: threads of one block, those of specialised warps included.
        grid: blocks along x, y and z; -1 for an extent that is known at run time only.
        local_bytes: arrays that one thread keeps, its share of every fragment: about what must fit into registers.
        source: generated CUDA or HIP code of the whole kernel file.
    """

    name: str
    shared_bytes: int
    threads: int
    grid: tuple[int, int, int]
    local_bytes: int
    source: str


@dataclass(frozen=True)
class Lowering:
    """One thing to lower.

    Attributes:
        submission: with the literals wanted.
        case: sizes.
        target: a key of :data:`TARGETS`.
        num_padded_rows: P, a multiple of 128; the grid follows from it. By default what equal groups need.
    """

    submission: Submission
    case: Case
    target: str = "sm_80"
    num_padded_rows: int | None = None

    def __post_init__(self) -> None:
        """Refuse a target that nobody knows how to lower for."""
        if self.target not in TARGETS:
            raise BackendError(f"got target {self.target!r}, expected one of {', '.join(TARGETS)}")
        if self.num_padded_rows is not None and self.num_padded_rows % BLOCK_TOKEN:
            raise BackendError(f"got {self.num_padded_rows} padded rows, expected a multiple of {BLOCK_TOKEN}")


def lower(
    submission: Submission, case: Case, target: str = "sm_80", *, num_padded_rows: int | None = None
) -> list[LoweredKernel]:
    """Lower every kernel that one call of ``run_kernel`` launches.

    Args:
        submission: with the literals wanted.
        case: sizes.
        target: a key of :data:`TARGETS`.
        num_padded_rows: see :class:`Lowering`.

    Returns:
        The kernels in the order of their launch.

    Raises:
        BackendError: if the submission or TileLang fails; the message holds TileLang's reason.
    """
    (result,) = lower_many([Lowering(submission, case, target, num_padded_rows)])
    if isinstance(result, BackendError):
        raise result
    return result


def lower_many(
    lowerings: Sequence[Lowering], *, python: str | os.PathLike[str] | None = None, timeout_s: float = 600
) -> list[list[LoweredKernel] | BackendError]:
    """Lower many in one child process, because starting TileLang takes longer than lowering.

    Args:
        lowerings: what to lower.
        python: interpreter of another environment, to lower with the TileLang that is installed there.
        timeout_s: seconds for all of them together.

    Returns:
        For each its kernels, or the error that it ended with.

    Raises:
        BackendError: if the time is over or the child cannot start at all.
    """
    results: list[list[LoweredKernel] | BackendError] = []
    while len(results) < len(lowerings):
        # What a name means on a CPU stays so in its process: no other target may share it.
        _, group = next(itertools.groupby(lowerings[len(results) :], key=lambda item: item.target == "cpu"))
        rest = list(group)
        answers, ending = _ask_child(rest, python or sys.executable, timeout_s)
        results += answers
        if len(answers) < len(rest):
            # The child died over this one; a new child goes on with the next.
            if not results and "No module named" in ending:
                raise BackendError(f"{python or sys.executable} cannot lower: {ending}")
            results.append(BackendError(f"{rest[len(answers)].submission.name}: TileLang ended its process: {ending}"))
    return results


def _ask_child(
    lowerings: Sequence[Lowering], python: str | os.PathLike[str], timeout_s: float
) -> tuple[list[list[LoweredKernel] | BackendError], str]:
    requests = "".join(
        json.dumps(
            {
                "source": item.submission.source,
                "name": item.submission.name,
                "target": item.target,
                "sizes": _sizes(item),
            }
        )
        + "\n"
        for item in lowerings
    )
    root = str(Path(__file__).resolve().parent.parent)
    environment = {key: value for key, value in os.environ.items() if key != "TILELANG_DEFAULT_TARGET"}
    environment["PYTHONPATH"] = os.pathsep.join(part for part in (root, environment.get("PYTHONPATH", "")) if part)
    environment["TILELANG_PRINT_ON_COMPILATION"] = "0"
    try:
        done = subprocess.run(
            [str(python), "-m", "moe_lab.lowering"], input=requests, capture_output=True, text=True, check=False,
            timeout=timeout_s, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BackendError(f"got no answer in {timeout_s:.0f} s for {len(lowerings)} lowerings") from None
    except OSError as error:
        raise BackendError(f"got python={python}, expected an interpreter that can be run ({error.strerror})") from None
    answers: list[list[LoweredKernel] | BackendError] = []
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            answer = json.loads(line[len(_MARK) :])
            if "error" in answer:
                answers.append(BackendError(answer["error"]))
            else:
                answers.append([LoweredKernel(**{**item, "grid": tuple(item["grid"])}) for item in answer["kernels"]])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return answers, lines[-1] if lines else f"exit code {done.returncode}"


def _sizes(item: Lowering) -> dict[str, int]:
    case = item.case
    rows = item.num_padded_rows
    if rows is None:
        share, rest = divmod(case.num_tokens, case.num_experts)
        sizes = [share + (expert < rest) for expert in range(case.num_experts)]
        rows = sum(-(-size // BLOCK_TOKEN) * BLOCK_TOKEN for size in sizes)
    return {
        "E": case.num_experts,
        "E+1": case.num_experts + 1,
        "H": case.hidden,
        "I": case.intermediate,
        "N": case.num_tokens,
        "P": rows,
        "P/128": rows // BLOCK_TOKEN,
    }


def _answer_requests() -> None:
    """The child: one request a line in, one answer a line out."""
    # TileLang and its C++ parts may print; answers keep the real stdout to themselves.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    importlib.import_module("tilelang")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"kernels": [asdict(kernel) for kernel in _lower_here(**request)]}
        # Anything can come out of a stranger's file and of a compiler; it belongs to this request only.
        except Exception as error:  # noqa: BLE001
            reason = next((text for text in str(error).splitlines() if text.strip()), type(error).__name__)
            answer = {"error": f"{request['name']} for {request['target']}: {type(error).__name__}: {reason.strip()}"}
        answers.write(_MARK + json.dumps(answer) + "\n")
        answers.flush()


def _lower_here(source: str, name: str, target: str, sizes: dict[str, int]) -> list[LoweredKernel]:
    import tilelang
    from tilelang import tvm

    if target == "cpu":
        cpu.apply()
    else:
        _accept_vendor_files()
    where = tvm.target.Target(TARGETS[target])
    known = tvm.transform.PassContext.list_configs()
    lowered: list[LoweredKernel] = []
    with where:
        asked = _kernels_asked_for(source, sizes, on_gpu=target != "cpu")
    if not asked:
        raise BackendError(f"{name} launches no kernel")
    for func, pass_configs in asked:
        config = {str(getattr(key, "value", key)): value for key, value in (pass_configs or {}).items()}
        config = {key: value for key, value in config.items() if key in known}
        with tvm.transform.PassContext(opt_level=3, config=config), where:
            artifact = tilelang.lower(func, target=where)
        for device_function in artifact.device_mod.functions.values():
            lowered.append(_describe(device_function, artifact.kernel_source))
    return lowered


@functools.cache
def _accept_vendor_files() -> None:
    """Let files for a vendor's build be lowered: their keys, and their layouts, which change no sizes."""
    language: Any = importlib.import_module("tilelang.language")
    annotate = language.annotate_layout

    def vendor_name(module: str, name: str) -> Any:
        if name.endswith("_layout"):
            return lambda *args, **kwargs: None
        return cpu.Refused(f"got {module}.{name}, which only the vendor's own TileLang can lower", BackendError)

    def annotate_known(layouts: Any) -> Any:
        known = {buffer: layout for buffer, layout in layouts.items() if layout is not None}
        return annotate(known) if known else None

    cpu.install_vendor_modules(vendor_name)
    cpu.accept_unknown_pass_configs()
    language.annotate_layout = annotate_known


def _kernels_asked_for(source: str, sizes: dict[str, int], on_gpu: bool) -> list[tuple[Any, Any]]:
    """Run the host code once, and note each kernel at the moment it would be compiled."""
    import torch

    asked: list[tuple[Any, Any]] = []

    def note(func: Any = None, out_idx: Any = None, *args: Any, pass_configs: Any = None, **other: Any) -> Any:
        asked.append((func, pass_configs))
        outputs = [out_idx] if isinstance(out_idx, int) else list(out_idx or ())

        def launch(*tensors: Any) -> Any:
            made = []
            for index in outputs:
                buffer = func.buffer_map[func.params[index]]
                shape = [int(extent) for extent in buffer.shape]
                made.append(torch.empty(shape, dtype=getattr(torch, str(buffer.dtype)), device="meta"))
            return made[0] if len(made) == 1 else made or None

        return launch

    jit: Any = sys.modules["tilelang.jit"]
    cached, jit.cached = jit.cached, note
    try:
        with tempfile.TemporaryDirectory(prefix="moe_lab_") as folder:
            # TileLang reads the source of a kernel from its file.
            path = Path(folder, "submission.py")
            path.write_text(source, encoding="utf-8")
            module = types.ModuleType("submission")
            module.__file__ = str(path)
            exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
            module.__dict__[ENTRY_POINT](*_shapes_only(sizes, on_gpu))
    finally:
        jit.cached = cached
    return asked


def _shapes_only(sizes: dict[str, int], on_gpu: bool) -> list[Any]:
    """The ten tensors: large ones without storage; the index arrays are real, for host code that reads them."""
    import torch

    class OnGpu(torch.Tensor):
        """Host code that keeps another kernel for a machine with no GPU asks ``is_cuda``."""

        is_cuda = True

    def make(argument: Any) -> Any:
        device = "cpu" if argument.dtype == "int32" else "meta"
        shape = [sizes[extent] for extent in argument.shape]
        tensor = torch.zeros(shape, dtype=getattr(torch, argument.dtype), device=device)
        return tensor.as_subclass(OnGpu) if on_gpu else tensor

    return [make(argument) for argument in ARGUMENTS]


def _thread_extents(function: Any) -> list[tuple[Any, Any]]:
    """Blocks and threads by axis; code for a CPU has none."""
    return list(function.attrs["thread_extent"].items()) if "thread_extent" in function.attrs else []


def _describe(function: Any, source: str) -> LoweredKernel:
    from tilelang import tvm

    tirx = importlib.import_module("tvm.tirx")
    extents = {str(axis): int(getattr(extent, "value", -1)) for axis, extent in _thread_extents(function)}
    static_bytes, local_bytes = 0, 0

    def count(node: Any) -> None:
        nonlocal static_bytes, local_bytes
        if type(node).__name__ != "AllocBuffer":
            return
        dtype = tvm.DataType(node.buffer.dtype)
        size = (dtype.bits * dtype.lanes + 7) // 8
        for extent in node.buffer.shape:
            size *= int(extent)
        scope = node.buffer.scope()
        if scope == "shared":
            static_bytes += size
        elif scope.startswith("local"):
            local_bytes += size

    tirx.stmt_functor.post_order_visit(function.body, count)
    threads = 1
    for axis in "xyz":
        threads *= extents.get(f"threadIdx.{axis}", 1)
    attributes = function.attrs
    dynamic = int(attributes["dyn_shared_memory_buf"]) if "dyn_shared_memory_buf" in attributes else 0
    return LoweredKernel(
        name=str(attributes["global_symbol"]),
        shared_bytes=dynamic + static_bytes,
        threads=threads,
        grid=(extents.get("blockIdx.x", 1), extents.get("blockIdx.y", 1), extents.get("blockIdx.z", 1)),
        local_bytes=local_bytes,
        source=source,
    )


if __name__ == "__main__":
    _answer_requests()
