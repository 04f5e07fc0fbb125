"""Which device is here, what it can run, and what is missing: a MetaX card (``maca``), an NVIDIA card (``cuda``) or
neither (``cpu``) runs the same submissions. torch and TileLang are imported when they are first needed.
"""

import atexit
import contextlib
import functools
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moe_lab.machine import cpu
from moe_lab.machine.child import Child, ChildError
from moe_lab.problem.contract import ENTRY_POINT, data_dir
from moe_lab.problem.errors import BackendError, SubmissionError
from moe_lab.problem.submission import Submission

Kind = Literal["cpu", "cuda", "maca"]

# Pairs of tilelang and apache-tvm-ffi that were seen working. A newer tvm-ffi under an older tilelang ends the process
# during import, with no Python error.
_PAIRS: Mapping[str, tuple[str, ...]] = {"0.1.10": ("0.1.10", "0.1.11"), "0.1.15": ("0.1.12",)}


@dataclass(frozen=True)
class Backend:
    """Where submissions run: the device's own name, and what torch calls it (MACA answers to "cuda")."""

    kind: Kind
    name: str
    torch_device: str


@dataclass(frozen=True)
class Check:
    """One line of :func:`doctor`."""

    name: str  # what was looked at
    ok: bool
    found: str  # what is there
    remedy: str = ""  # what to do about it if it is not ok
    required: bool = True  # whether submissions cannot run here without it


@functools.cache
def detect() -> Backend:
    """The device of this machine, the best one first; raises BackendError if torch is not installed."""
    try:
        import torch
    except ImportError as error:
        raise BackendError(f"got no torch ({error}), expected it installed: `pip install torch`") from None
    # AMD's torch answers to "cuda" too; nothing here was tried on it, so it counts as no GPU.
    if not torch.cuda.is_available() or torch.version.hip:
        names = [*cpu.cpuinfo("model name"), platform.processor(), platform.machine()]
        return Backend("cpu", next(filter(None, names)), "cpu")
    name = torch.cuda.get_device_name()
    maca = any(word in f"{torch.__version__} {name}".lower() for word in ("metax", "maca"))
    return Backend("maca" if maca else "cuda", name, "cuda")


def is_hopper() -> bool:
    """Whether the device has the instructions that the Hopper branch of the ladder uses."""
    import torch

    return detect().kind == "cuda" and torch.cuda.get_device_capability()[0] == 9


@functools.cache
def prepare() -> Backend:
    """Make TileLang ready in this process and return its device; call it before a submission is loaded.

    On a GPU only the environment is set (quiet compilation). With no GPU the names of TileLang get a CPU meaning, see
    :mod:`moe_lab.machine.cpu`. Raises BackendError if TileLang cannot be imported, or on a CPU for a missing compiler
    or a TileLang too old.
    """
    backend = detect()
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    usable_cache_dir()
    try:
        importlib.import_module("tilelang")
    except ImportError as error:
        raise BackendError(f"got no tilelang ({error}), expected it installed: see `moe-lab doctor`") from None
    # Pages of rewritten source before the error that matters, and every kernel that is found in memory again.
    logging.getLogger("tilelang.language.eager.builder").setLevel(logging.CRITICAL + 1)
    logging.getLogger("tilelang.cache.kernel_cache").setLevel(logging.ERROR)
    if backend.kind == "cpu":
        cpu.apply()
    return backend


def usable_cache_dir() -> None:
    """TileLang creates its cache folder when it is imported and dies if it cannot."""
    folder = Path(os.environ.get("TILELANG_CACHE_DIR") or Path.home() / ".tilelang" / "cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        other = tempfile.mkdtemp(prefix="moe_lab_tilelang_")
        atexit.register(shutil.rmtree, other, ignore_errors=True)
        warnings.warn(
            f"TileLang's cache folder {folder} cannot be written ({error.strerror}), so compiled kernels are kept in "
            f"{other}: set TILELANG_CACHE_DIR to a folder that can",
            stacklevel=3,
        )
        os.environ["TILELANG_CACHE_DIR"] = other


def installed(distribution: str) -> str | None:
    """Version of an installed package, None if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def versions(*more: str) -> dict[str, str]:
    """Versions of what a measurement or a verdict depends on, by name; what is not installed is left out."""
    import moe_lab

    found: dict[str, str | None] = {"moe_lab": moe_lab.__version__, "python": platform.python_version()}
    for name in ("torch", "tilelang", "apache-tvm-ffi", "numpy", "RestrictedPython", *more):
        found[name] = installed(name)
    # A vendor's TileLang may run from its source tree.
    if not found["tilelang"] and importlib.util.find_spec("tilelang"):
        found["tilelang"] = str(importlib.import_module("tilelang").__version__)
    if (kind := detect().kind) == "cpu":
        with contextlib.suppress(BackendError):
            found["compiler"] = _first_line([cpu.compiler(), "--version"])
    else:
        found[kind] = str(importlib.import_module("torch").version.cuda)
    return {name: version for name, version in found.items() if version}


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return next(iter((done.stdout or done.stderr).splitlines()), "no answer")


def load(submission: Submission) -> Callable[..., None]:
    """Execute a submission in this process and return its ``run_kernel``. For your own code: the judge uses a sandbox.

    Raises SubmissionError if the module has no callable ``run_kernel``, BackendError as :func:`prepare` does.
    """
    prepare()
    folder = Path(tempfile.mkdtemp(prefix="moe_lab_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    entry: Any = submission.execute(folder).get(ENTRY_POINT)
    if not callable(entry):
        raise SubmissionError(f"got no function {ENTRY_POINT} in {submission.name}, expected one at module level")
    return entry


# The smallest kernel that shows that TileLang compiles and runs here.
_PROBE = """
import tilelang, tilelang.language as T, torch

@tilelang.jit
def build(n):
    @T.prim_func
    def probe(a: T.Tensor((n, n), "float16"), b: T.Tensor((n, n), "float16")):
        with T.Kernel(1, threads=128) as bx:
            a_shared = T.alloc_shared((n, n), "float16")
            acc = T.alloc_fragment((n, n), "float32")
            T.clear(acc)
            T.copy(a, a_shared)
            T.gemm(a_shared, a_shared, acc, transpose_B=True)
            T.copy(acc, b)
    return probe

def run(device):
    a = torch.eye(64, dtype=torch.float16, device=device) * 3
    b = torch.zeros_like(a)
    build(64)(a, b)
    return float(b.sum()), tilelang.__version__
"""


def probe(say: object) -> tuple[float, str]:
    """In a child: the sum that the small kernel computes, 576, and TileLang's version."""
    device = prepare().torch_device
    found: tuple[float, str] = Submission(_PROBE).execute(Path.cwd())["run"](device)  # the child's own folder
    return found


def doctor() -> list[Check]:
    """Look at everything that submissions need here, in the order to read it: they can run if all required is ok."""
    checks = [Check("Python", sys.version_info >= (3, 10), platform.python_version(), "install Python 3.10 or newer")]
    torch = _package("torch", "")
    kind = detect().kind if torch.ok else None
    checks += [Check("device", True, f"{kind}: {detect().name}")] if kind else []
    checks += [torch, *_tilelang_checks()]
    checks += {"cpu": _compiler_checks, "cuda": _nvcc_checks, "maca": _maca_checks}[kind]() if kind else []
    if all(check.ok for check in checks if check.required):
        checks.append(_probe_check())
    checks.append(_package("RestrictedPython", ": the judge's sandbox needs it"))
    checks.append(_package("jupyterlab", ": the notebooks need it", required=False))
    return [replace(check, remedy="") if check.ok else check for check in checks]


def _package(name: str, why: str, required: bool = True) -> Check:
    version = installed(name)
    return Check(name, version is not None, version or "not installed", f"`pip install {name}`{why}", required)


def _tilelang_checks() -> list[Check]:
    tilelang, ffi = installed("tilelang"), installed("apache-tvm-ffi")
    if tilelang is None and importlib.util.find_spec("tilelang") is None:
        return [Check("tilelang", False, "not installed", "`pip install tilelang==0.1.15 apache-tvm-ffi==0.1.12`")]
    checks = [Check("tilelang", True, tilelang or "from a source tree")]
    if ffi and (fitting := _PAIRS.get((tilelang or "").partition("+")[0])):
        remedy = f"`pip install apache-tvm-ffi=={fitting[-1]}`: a pair that does not fit can end Python during import"
        # A vendor's build may pair other numbers, so the probe kernel decides.
        checks.append(Check("apache-tvm-ffi", ffi in fitting, ffi, remedy, required=False))
    return checks


def _compiler_checks() -> list[Check]:
    try:
        return [Check("C++ compiler", True, _first_line([cpu.compiler(), "--version"]))]
    except BackendError as error:
        return [Check("C++ compiler", False, "none", str(error))]


def _nvcc_checks() -> list[Check]:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    path = shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", os.defpath), f"{home}/bin"]))
    remedy = (
        "install the CUDA toolkit of your driver, or `pip install nvidia-cuda-nvcc`, and put nvcc on the PATH or its "
        "folder into CUDA_HOME; TileLang compiles kernels with it"
    )
    # TileLang also finds the compiler of a pip package, so the probe kernel decides.
    return [Check("nvcc", path is not None, _first_line([path, "--version"]) if path else "none", remedy, False)]


def maca_exports() -> str:
    """Shell lines for a TileLang built from source on a MetaX machine; the two places at the top are the machine's."""
    return (data_dir() / "maca_exports.sh").read_text(encoding="utf-8").rstrip()


def _maca_checks() -> list[Check]:
    """One for each variable of the exports but the checkout, whose place only its owner knows."""
    maca, missing = os.environ.get("MACA_PATH", "/opt/maca"), defaultdict[str, list[str]](list)
    for name, value in re.findall('export (.*)="(.*)"', maca_exports()):
        have = {os.path.normpath(part) for part in os.environ.get(name, "").split(os.pathsep)}
        needed = (part.replace("$MACA_PATH", maca) for part in re.findall(r"\$MACA_PATH/[^:]*", value))
        missing[name] += [folder for folder in map(os.path.normpath, needed) if folder not in have]
    del missing["TILELANG_ROOT"]
    remedy, checks = "set it before Python starts, see the exports below", []
    for name, folders in missing.items():
        value = os.environ.get(name, "")
        found = f"lacks {', '.join(folders)}" if folders else value or "not set"
        # A wheel of the vendor's needs none of them, so the probe kernel decides.
        checks.append(Check(f"${name}", bool(value) and not folders, found, remedy, required=False))
    return checks


def _probe_check() -> Check:
    """Compile and run one small kernel in a process of its own: a broken pair of packages ends only that one."""
    name, remedy = "a kernel compiles and runs", "reinstall tilelang and apache-tvm-ffi together"
    try:
        with Child("moe_lab.machine.backend:probe") as child:
            total, version = child.ask({}, timeout_s=300)
    except ChildError as error:
        if error.ending.startswith("no answer"):
            return Check(name, False, error.ending, "look for a compiler that hangs, then try again")
        return Check(name, False, str(error), f"mend what the lines above name; else {remedy}")
    found = f"yes, with tilelang {version}" if total == 576 else f"got {total}, expected 576, with tilelang {version}"
    return Check(name, total == 576, found, remedy)
