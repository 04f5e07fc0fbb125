"""What TileLang makes of a submission for a device that is not here: shared memory, threads, generated code.

A submission's ``run_kernel`` is called in a child process with tensors that have shapes but no storage, and say
``is_cuda`` if the target is a GPU; the kernels it asks for are lowered for the wanted target instead of compiled and
run. That takes seconds and no GPU. The host code of the submission runs in the child as it is: check a stranger's file
against the rules first.

``sm_80`` shows what a kernel needs without a Hopper's special treatment, ``sm_90a`` what an H200 gets. ``gfx90a`` has
64 lanes in a wave and 64 KiB of shared memory for a block, as the C500 has: the nearest public stand-in for its
layout inference, and no more than a stand-in. ``cpu`` shows what runs with no GPU (:mod:`moe_lab.machine.cpu`).
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_lab.machine import cpu
from moe_lab.problem.contract import ARGUMENTS, BLOCK_TOKEN, ENTRY_POINT, Case
from moe_lab.problem.errors import BackendError
from moe_lab.problem.submission import Submission

#: TileLang's description of each target that can be lowered for, by the name used here.
TARGETS: dict[str, dict[str, str]] = {
    "sm_80": {"kind": "cuda", "arch": "sm_80"},
    "sm_90a": {"kind": "cuda", "arch": "sm_90a"},
    "gfx90a": {"kind": "hip", "mcpu": "gfx90a"},
    "cpu": {"kind": "c"},
}

#: How TileLang refuses what only some targets have: a pattern, the thing in words, and the targets that have it. There
#: the same refusal has another reason, so it is shown as it is.
_REFUSALS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("TMA atomic.?add", "atomic additions by the Tensor Memory Accelerator (TMA)", ("sm_90a",)),
    ("requires TMA-capable|descriptor-based TMA", "copies by the Tensor Memory Accelerator (TMA)", ("sm_90a",)),
    ("cluster-copy support", "copies between the blocks of a cluster", ("sm_90a",)),
    ("`cluster_dims` is not supported", "clusters of blocks", ("sm_80", "sm_90a")),
    ("requires Hopper WGMMA", "matrix products of a warpgroup (WGMMA)", ("sm_90a",)),
    ("requires Blackwell", "Blackwell's matrix products (tcgen05)", ()),
    (r"T\.alloc_barrier\(\) requires sm_90", "barriers of T.alloc_barrier", ("sm_90a",)),
    ("PDL is not supported", "programmatic dependent launches (PDL)", ("sm_90a",)),
    (r"Unresolved call ir\.Op\(.*?name=\"tl\.(\w+)\"", r"the operation \1", ()),
)

_MARK = "moe_lab lowered "
#: A compiler may say the whole kernel.
_MESSAGE_CHARS = 20_000


class LoweringError(BackendError):
    """A submission that did not lower.

    Attributes:
        name: of the submission.
        target: key of :data:`TARGETS`.
        feature: what it uses and TileLang does not have for the target, in words; None if that is not the reason.
        said: the first line of what came instead of kernels.
        message: all of it, at most 20000 characters.
    """

    def __init__(self, name: str, target: str, said: str, message: str | None = None) -> None:
        """Find the words for a well-known refusal."""
        self.name, self.target, self.said, self.message = name, target, said, message or said
        self.feature = _feature(said, target)
        known = f"{name} uses {self.feature}, which TileLang does not have for {target}"
        super().__init__(known if self.feature else f"{name} for {target}: {said}")


def _feature(said: str, target: str) -> str | None:
    """What a refusal is about, in words.

    >>> _feature("InternalError: T.wgmma_gemm() requires Hopper WGMMA lowering, but ...", "sm_80")
    'matrix products of a warpgroup (WGMMA)'
    >>> _feature("ValueError: got 3, expected 4", "sm_80")
    """
    for pattern, words, targets in _REFUSALS:
        found = re.search(pattern, said)
        if found and target not in targets:
            return found.expand(words)
    return None


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
        LoweringError: if the submission or TileLang fails; it holds TileLang's reason.
    """
    (result,) = lower_many([Lowering(submission, case, target, num_padded_rows)])
    if isinstance(result, LoweringError):
        raise result
    return result


def lower_many(
    lowerings: Sequence[Lowering], *, python: str | os.PathLike[str] | None = None, timeout_s: float = 600,
    folder: str | os.PathLike[str] | None = None,
) -> list[list[LoweredKernel] | LoweringError]:  # fmt: skip
    """Lower many in one child process, because starting TileLang takes longer than lowering.

    Args:
        lowerings: what to lower.
        python: interpreter of another environment, to lower with the TileLang that is installed there.
        timeout_s: seconds for all of them together.
        folder: where temporary files go; by default where the system keeps them.

    Returns:
        For each its kernels, or the error that it ended with.

    Raises:
        BackendError: if the time is over or the child cannot start at all.
    """
    results: list[list[LoweredKernel] | LoweringError] = []
    while len(results) < len(lowerings):
        # What a name means on a CPU stays so in its process: no other target may share it.
        _, group = next(itertools.groupby(lowerings[len(results) :], key=lambda item: item.target == "cpu"))
        rest = list(group)
        # The child may be killed: its folder is ours to remove.
        with tempfile.TemporaryDirectory(prefix="moe_lab_lowering_", dir=folder, ignore_cleanup_errors=True) as scratch:
            answers, ending, printed = _ask_child(rest, python or sys.executable, timeout_s, scratch)
        results += answers
        if len(answers) < len(rest):
            # The child died over this one; a new child goes on with the next.
            if not results and "No module named" in ending:
                raise BackendError(f"{python or sys.executable} cannot lower: {ending}")
            item = rest[len(answers)]
            said = f"the compiler's process ended: {ending}"
            results.append(LoweringError(item.submission.name, item.target, said, f"{said}\n{printed}"))
    return results


def _ask_child(
    lowerings: Sequence[Lowering], python: str | os.PathLike[str], timeout_s: float, scratch: str
) -> tuple[list[list[LoweredKernel] | LoweringError], str, str]:
    """The answers, how the child ended, and the last it printed."""
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
    root = str(Path(__file__).resolve().parents[2])
    environment = {key: value for key, value in os.environ.items() if key != "TILELANG_DEFAULT_TARGET"}
    environment["PYTHONPATH"] = os.pathsep.join(part for part in (root, environment.get("PYTHONPATH", "")) if part)
    environment |= {"TILELANG_PRINT_ON_COMPILATION": "0", "TMPDIR": scratch}
    try:
        done = subprocess.run(
            [str(python), "-m", "moe_lab.model.lowering"], input=requests, capture_output=True, encoding="utf-8",
            errors="replace", check=False, timeout=timeout_s, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BackendError(f"got no answer in {timeout_s:.0f} s for {len(lowerings)} lowerings") from None
    except OSError as error:
        raise BackendError(f"got python={python}, expected an interpreter that can be run ({error.strerror})") from None
    answers: list[list[LoweredKernel] | LoweringError] = []
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            answer = json.loads(line[len(_MARK) :])
            if "said" in answer:
                item = lowerings[len(answers)]
                answers.append(LoweringError(item.submission.name, item.target, answer["said"], answer["message"]))
            else:
                answers.append([LoweredKernel(**{**item, "grid": tuple(item["grid"])}) for item in answer["kernels"]])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode < 0:
        # What a compiler prints then are the addresses of its own code.
        ending = f"signal {-done.returncode} ({signal.strsignal(-done.returncode)})"
    else:
        # An exception that nobody catches ends Python with 1, and its text is the last line.
        ending = lines[-1].strip() if lines and done.returncode == 1 else f"exit code {done.returncode}"
    return answers, ending, done.stderr[-_MESSAGE_CHARS:]


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
        except (Exception, SystemExit) as error:  # noqa: BLE001
            answer = _refusal(error, request["name"])
        answers.write(_MARK + json.dumps(answer) + "\n")
        answers.flush()


def _refusal(error: BaseException, name: str) -> dict[str, str]:
    """What an error says, in a line and in full."""
    kind = type(error).__name__
    try:
        text = str(error).encode("utf-8", "replace").decode()
    # A stranger's error may not even have a text.
    except Exception:  # noqa: BLE001
        text = ""
    # The file lay in a folder of ours that nobody can look at any more.
    text = re.sub(r"[^\s\"']*/moe_lab_\w+/submission\.py", lambda found: name, text).strip()[:_MESSAGE_CHARS]
    first = text.partition("\n")[0].strip()
    return {"said": f"{kind}: {first}" if first else kind, "message": f"{kind}: {text}" if text else kind}


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
