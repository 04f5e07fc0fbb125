"""What TileLang's names mean on a machine with no GPU, where its C backend alone cannot carry out a GPU's kernel.

A block runs from start to end before the next one begins, and its threads become loops: shared memory and fragments are
local arrays, ``T.Parallel`` and ``T.Pipelined`` serial loops, ``T.gemm`` a loop nest (one sum per element, in order of
k); barriers, layouts and hints change nothing, which is said once by a warning. What only hardware can do is refused by
name when it is used, not when it is imported: a file may pick its kernel by device. Speed means nothing here, and what
goes wrong between threads (a missing barrier) cannot show.
"""

import difflib
import functools
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moe_lab.problem.contract import data_dir
from moe_lab.problem.errors import BackendError, UnsupportedOnCPUError

#: Optimise, for this machine. Never -ffast-math: it assumes there is no NaN, and NaN is what the judge poisons with.
COMPILE_FLAGS: tuple[str, ...] = ("-O3", "-march=native")

_OLDEST = (0, 1, 15)  # the first TileLang whose C backend this module was written for and tested with
# Namespaces that a submission reads names from.
_FACADES = ("tilelang.language", "tilelang.language.common", "tilelang.cuda.language", "tilelang.rocm.language")


# Functions that the C backend has for fp32 only.
_NARROW = {
    "exp", "exp2", "log", "log2", "log10", "sigmoid", "tanh", "sqrt", "rsqrt", "erf", "floor", "ceil", "round", "trunc",
    "sin", "cos", "tan", "pow",
}  # fmt: skip


_REDUCTIONS = ("sum", "max", "min", "abssum", "absmax")


class CPUMeaningWarning(UserWarning):
    """Something of a kernel was dropped because it means nothing on a CPU."""


@functools.cache
def _say(message: str) -> None:
    warnings.warn(message, CPUMeaningWarning, stacklevel=4)


class Refused:
    """A name that exists but cannot be used here: it fails when it is used, not when it is imported."""

    def __init__(self, message: str, error: type[BackendError] = UnsupportedOnCPUError) -> None:
        self._error, self._message = error, message

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Raise."""
        raise self._error(self._message)

    def __getattr__(self, name: str) -> None:
        """Raise for any use, but let Python itself look for its own names."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error(self._message)


@functools.cache
def _table() -> dict[str, Any]:
    """``data/cpu_names.json``."""
    return json.loads((data_dir() / "cpu_names.json").read_text(encoding="utf-8"))


@functools.cache
def _names() -> tuple[dict[re.Pattern[str], str], list[str]]:
    """What does the job of names without a CPU meaning, and hints without an effect."""
    table = _table()
    return {re.compile("|".join(row["names"])): row["instead"] for row in table["refused"]}, table["nothing"]


def _instead(name: str) -> str | None:
    return next((instead for pattern, instead in _names()[0].items() if pattern.fullmatch(name)), None)


def _refuse(name: str, module: str = "T", use: str = "") -> Refused:
    instead = use or _instead(name)
    reason = f"use {instead}" if instead else "it runs on its own card only"
    return Refused(f"got {module}.{name}, which has no meaning on a CPU: {reason}")


def compiler() -> str:
    """The C++ compiler that TileLang will call (CXX, CC, or from the PATH); raises BackendError if there is none."""
    named = os.environ.get("CXX") or os.environ.get("CC")
    found = next(filter(None, map(shutil.which, [named] if named else ["g++", "clang++", "c++"])), None)
    if found is None and named:
        raise BackendError(f"got CXX or CC = {named!r}, expected one program that can be run: unset it or correct it")
    if found is None:
        raise BackendError(
            "got no C++ compiler, expected g++ or clang++ on the PATH (TileLang compiles kernels for the CPU with it): "
            "`apt-get install g++`, `dnf install gcc-c++` or `conda install gxx`, or point CXX at one"
        )
    return found


def compile_flags() -> list[str]:
    """Flags for the C++ compiler; they are part of TileLang's cache key.

    The last one, a macro that no code reads, carries what else a kernel depends on: this file, the compiler and the
    processor that ``-march=native`` stands for. A cache folder that two machines share stays right.
    """
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=False).stdout
    processor = [platform.machine(), platform.processor(), *cpuinfo("model name", "flags", "Features")]
    key = _key(Path(__file__).read_text(encoding="utf-8"), version, processor)
    return [*COMPILE_FLAGS, *_precompiled_header(version, processor), f"-DMOE_LAB_KEY=0x{key}"]


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _precompiled_header(version: str, processor: list[str]) -> list[str]:
    """Flags that include the header of TileLang's C backend parsed already: two thirds of a kernel's compilation.

    None for Clang, whose precompiled headers work in another way, or where nothing can be written.
    """
    import tilelang

    headers = sorted((Path(tilelang.__file__).parent / "src/tl_templates/cpp").glob("*.h*"))
    if "clang" in version or not headers:
        return []
    folder = cache_folder() / "headers" / _key(COMPILE_FLAGS, version, processor, *map(Path.read_bytes, headers))
    header, made = folder / "common.h", folder / "common.h.gch"
    try:
        if not made.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as own:
                # Whole before anybody sees them: another process may do the same now.
                text, new = Path(own, "common.h"), Path(own, "common.h.gch")
                text.write_text(f'#include "{headers[0]}"\n', encoding="utf-8")
                # The flags that TileLang compiles a kernel with: the compiler passes over a header made with others.
                options = ["-std=c++17", "-fPIC", *COMPILE_FLAGS, "-x", "c++-header", "-o", str(new)]
                subprocess.run([compiler(), *options, str(text)], check=True, capture_output=True)
                text.replace(header)
                new.replace(made)
    except (OSError, subprocess.CalledProcessError):
        return []
    return ["-include", str(header)]


def cache_folder() -> Path:
    """The folder of what this package keeps between runs, the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_lab"


def cpuinfo(*names: str) -> list[str]:
    """What Linux says of these fields of its processors, each once; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return list(dict.fromkeys(line.partition(":")[2].strip() for line in lines if line.startswith(names)))


@functools.cache
def apply() -> None:
    """Give TileLang's names their CPU meaning, in this process, once and for good.

    Raises BackendError for no C++ compiler or a TileLang whose C backend this was not written for.
    """
    flags = compile_flags()
    import tilelang

    if tuple(map(int, re.findall(r"\d+", tilelang.__version__)[:3])) < _OLDEST:
        raise BackendError(
            f"got tilelang {tilelang.__version__}, expected at least {'.'.join(map(str, _OLDEST))}: older ones cannot "
            "run kernels on a CPU; `pip install tilelang==0.1.15 apache-tvm-ffi==0.1.12`"
        )
    facades = [importlib.import_module(name) for name in _FACADES]
    _replace_everywhere(_meanings(facades[0]))
    for facade in facades:
        for name in [name for name in dir(facade) if _instead(name)]:
            setattr(facade, name, _refuse(name))
        for name in _NARROW & vars(facade).keys():
            setattr(facade, name, _in_float32(facades[0], getattr(facade, name)))
        facade.__dict__["__getattr__"] = functools.partial(_unknown_name, facade)
    tilelang.autotune = _refuse("autotune", "tilelang")
    accept_other_builds(lambda module, name: _refuse(name, module))
    _patch_gemm()
    _patch_jit(flags)
    tilelang.env.TILELANG_DEFAULT_TARGET = "c"
    tilelang.env.TILELANG_DEFAULT_EXECUTION_BACKEND = "cython"


def _replace_everywhere(new: Mapping[int, object]) -> None:
    """Put ``new[id(value)]`` wherever a TileLang module binds that value, however a submission imports it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").partition(".")[0] == "tilelang":
            for attribute, value in list(vars(module).items()):
                if id(value) in new:
                    setattr(module, attribute, new[id(value)])


def _meanings(T: types.ModuleType) -> dict[int, object]:  # noqa: N803
    """CPU functions by the id of what they stand in for."""
    from tvm import tirx

    common = importlib.import_module("tilelang.language.common")
    new: dict[int, object] = {}
    for name, function in {**_structure(T, common), **_arithmetic(T)}.items():
        for original in [vars(facade)[name] for facade in (T, common) if name in vars(facade)]:
            # A plain TIR function keeps its own module: TVM's passes call those too.
            if original is not getattr(tirx, name, None) or name in ("abs", "fabs", "exp10"):
                new[id(original)] = _as_declared(name, getattr(T, name, original), function)
    return new


def _as_declared(name: str, original: Any, function: Any) -> Any:
    """``function`` for the arguments that TileLang's own ``original`` takes: a misspelt keyword is an error."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = [keyword for keyword in kwargs if keyword not in signature.parameters]
            near = difflib.get_close_matches(unknown[0], signature.parameters, n=1) if unknown else []
            raise TypeError(f"T.{name}() {error}" + "".join(f"; did you mean {each}?" for each in near)) from None
        return function(*args, **kwargs)

    return call


def _in_float32(T: types.ModuleType, function: Any) -> Any:  # noqa: N803
    """``function``, for the 16-bit types in fp32 and rounded once, as a GPU's library computes it."""

    @functools.wraps(function)
    def wide(x: Any, *others: Any, **more: Any) -> Any:
        if str(getattr(x, "dtype", "")) not in ("float16", "bfloat16"):
            return function(x, *others, **more)
        given = [T.cast(each, "float32") for each in (x, *others)]
        return T.cast(function(*given, **more), x.dtype)

    return wide


def _structure(T: types.ModuleType, common: types.ModuleType) -> dict[str, Any]:  # noqa: N803
    """Memory, loops, tile operators and launches; hints that only a GPU takes are left out."""
    alloc_local, serial, grid, launch = T.alloc_local, T.serial, T.grid, T.Kernel
    common_copy, common_gemm = common.copy, common.gemm

    def gemm(
        A: Any, B: Any, C: Any, transpose_A: Any = False, transpose_B: Any = False, policy: Any = None,  # noqa: N803
        clear_accum: Any = False, *hints: Any, **more: Any,
    ) -> Any:  # fmt: skip
        return common_gemm(A, B, C, transpose_A=transpose_A, transpose_B=transpose_B, clear_accum=clear_accum)

    @functools.wraps(launch)
    def kernel(*blocks: Any, threads: Any = None, prelude: str | None = None, **hints: Any) -> Any:
        if prelude is not None:
            _refuse("Kernel(prelude=...)", use="TileLang's own operators")()
        return launch(*blocks, threads=threads)

    def use_swizzle(panel_size: int, order: str = "row", enable: bool = True) -> None:
        if order not in ("row", "column", "mlx"):
            raise ValueError(f"got T.use_swizzle(order={order!r}), expected 'row' or 'column'")

    def reduce(function: Any) -> Any:
        @functools.wraps(function)
        def between_types(buffer: Any, out: Any, dim: int = -1, clear: bool = True, **hints: Any) -> None:
            if buffer.dtype == out.dtype:
                return function(buffer, out, dim, clear)
            dtype = max(buffer.dtype, out.dtype, key=lambda each: (each.bits, "float" in str(each)))
            wide, total = alloc_local(buffer.shape, dtype), alloc_local(out.shape, dtype)
            T.evaluate(common_copy(buffer, wide))
            if not clear:
                T.evaluate(common_copy(out, total))
            function(wide, total, dim, clear)
            return common_copy(total, out)

        return between_types

    return {
        "gemm": gemm, "Kernel": kernel, "use_swizzle": use_swizzle,
        **{f"reduce_{kind}": reduce(getattr(common, f"reduce_{kind}")) for kind in _REDUCTIONS},
        **dict.fromkeys(("alloc_shared", "alloc_fragment"), lambda shape, dtype, scope="": alloc_local(shape, dtype)),
        "Parallel": lambda *extents, **hints: serial(extents[0]) if len(extents) == 1 else grid(*extents),
        "Pipelined": lambda start, stop=None, *hints, **more: serial(start, stop),
        "copy": lambda src, dst, *hints, **more: common_copy(src, dst),
        "print": lambda *args, **options: _say("T.print is dropped on a CPU"),
        "device_assert": lambda *args, **options: _say("T.device_assert is dropped on a CPU"),
        **dict.fromkeys(_names()[1], lambda *args, **options: None),
    }  # fmt: skip


def _arithmetic(T: types.ModuleType) -> dict[str, Any]:  # noqa: N803
    """Element-wise names that the C backend lacks, by others that it has; rounding modes are those of the CPU."""
    if_then_else = T.if_then_else
    return {
        **{f"__{name}": getattr(T, name) for name in ("exp", "log", "log2", "log10", "sin", "cos", "tan")},
        **dict.fromkeys(("abs", "fabs"), lambda x, span=None: if_then_else(x < 0, -x, x)),
        **dict.fromkeys(("exp10", "__exp10"), lambda x: T.exp2(x * 3.321928094887362)),
        **dict.fromkeys(("fma", "ieee_fmaf"), lambda x, y, z, *mode: x * y + z),
        **dict.fromkeys(("fmul", "ieee_mul"), lambda x, y, *mode: x * y),
        **dict.fromkeys(("fast_rcp", "ieee_frcp"), lambda x, *mode: 1.0 / x),
        "ieee_add": lambda x, y, *mode: x + y, "ieee_sub": lambda x, y, *mode: x - y,
        "ieee_fdiv": lambda x, y, *mode: x / y, "ieee_fsqrt": lambda x, *mode: T.sqrt(x),
        "ieee_frsqrt": lambda x, *mode: T.rsqrt(x), "__ldg": lambda value, *index: value[index] if index else value,
    }  # fmt: skip


def _unknown_name(facade: types.ModuleType, name: str) -> Refused:
    if name.startswith("_"):
        raise AttributeError(f"module {facade.__name__!r} has no attribute {name!r}")
    if _instead(name):
        return _refuse(name)
    import tilelang

    near = difflib.get_close_matches(name, dir(facade), n=1)
    hint = f"did you mean T.{near[0]}?" if near else "a name of a vendor's build runs on its own card only"
    return Refused(f"got T.{name}, which TileLang {tilelang.__version__} does not have: {hint}")


class _OtherBuilds(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of other TileLang builds, after everything that is really installed."""

    def __init__(self, refuse: Callable[[str, str], Refused]) -> None:
        self._refuse = refuse

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        other_build = re.match(r"tilelang\.(maca|intrinsics)(\.|$)", name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if other_build else None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__getattr__"] = functools.partial(self._missing, module.__name__)

    def _missing(self, module: str, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        # A layout says where in shared memory an element lies: it changes neither sizes nor results.
        return (lambda *args, **kwargs: None) if name.endswith("layout") else self._refuse(module, name)


def other_arguments() -> dict[str, list[str]]:
    """The arguments that only other builds of TileLang take, by function: ``{"gemm": ["k_pack", "wg_wait"]}``."""
    return {name: list(arguments) for name, arguments in _table()["other_builds"].items()}


def _without_others(name: str, original: Any, others: list[str]) -> Any:
    known = inspect.signature(original).parameters

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        for argument in [each for each in kwargs if each in others and each not in known]:
            _say(f"T.{name}({argument}=...) is left out: this TileLang does not know it")
            del kwargs[argument]
        return original(*args, **kwargs)

    return call


def accept_other_builds(refuse: Callable[[str, str], Refused]) -> None:
    """Let files for other builds of TileLang be read, which name what this one does not have.

    ``tilelang.maca`` (a MetaX build) and ``tilelang.intrinsics`` (older builds) can be imported; ``refuse(module,
    name)`` says what a name of theirs is. An unknown ``tilelang.PassConfigKey.X`` is a text instead of an error, and
    arguments of other builds (``data/cpu_names.json``) are left out.
    """
    import tilelang
    import tilelang.language as T

    new = {
        id(getattr(T, name)): _without_others(name, getattr(T, name), more) for name, more in other_arguments().items()
    }
    _replace_everywhere(new)
    sys.meta_path.append(_OtherBuilds(refuse))
    keys: Any = tilelang.PassConfigKey
    kind: Any = type(keys)

    class Lenient(kind):
        def __getitem__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            return self.__members__.get(name, f"unknown.{name}")

        __getattr__ = __getitem__

    keys.__class__ = Lenient


def _known_pass_configs(pass_configs: Mapping[Any, Any] | None) -> dict[str, Any]:
    """The entries that this TileLang knows; fast maths is left out, it asks for instructions of a GPU."""
    from tilelang import tvm

    given = {str(getattr(key, "value", key)): value for key, value in (pass_configs or {}).items()}
    for name in given.keys() - (known := tvm.transform.PassContext.list_configs().keys()):
        _say(f"pass config {name.removeprefix('unknown.')} is dropped on a CPU: this TileLang does not know it")
    kept = {name: value for name, value in given.items() if name in known and name != "tl.enable_fast_math"}
    # The C backend's vector types cannot be converted from one dtype to another; the C++ compiler vectorises anyway.
    return kept | {"tirx.disable_vectorize": True}


def _patch_jit(flags: list[str]) -> None:
    """Compile everything for the C target with our flags, whatever target the file asks for."""
    jit = sys.modules["tilelang.jit"]
    cached, settle, decorate = jit.cached, jit.JITImpl.__post_init__, jit.jit

    def cpu_cached(func: Any = None, out_idx: Any = None, *args: Any, pass_configs: Any = None, **other: Any) -> Any:
        name = str(func.attrs["global_symbol"]) if func.attrs and "global_symbol" in func.attrs else "kernel"
        try:
            return cached(
                func, out_idx, *args, target="c", execution_backend="cython",
                pass_configs=_known_pass_configs(pass_configs), compile_flags=flags,
            )  # fmt: skip
        except Exception as error:
            raise _compile_error(name, error) from error

    def on_cpu(self: Any) -> None:
        self.target = self.target_host = self.execution_backend = self.compile_flags = None
        settle(self)

    accepted = inspect.signature(decorate).parameters

    @functools.wraps(decorate)
    def tolerant(func: Any = None, **options: Any) -> Any:
        for name in set(options) - set(accepted):
            _say(f"tilelang.jit({name}=...) is dropped on a CPU: this TileLang does not know it")
        return decorate(func, **{name: value for name, value in options.items() if name in accepted})

    jit.JITImpl.__post_init__ = on_cpu
    _replace_everywhere({id(cached): cpu_cached, id(decorate): tolerant})


def _compile_error(kernel: str, error: Exception) -> BackendError:
    if isinstance(error, BackendError):
        return error
    text = str(error).strip()
    if unresolved := re.search(r'Unresolved call.*?name="(?:tl|tirx)\.(\w+)"', text):
        instead = _instead(unresolved[1])
        advice = f": use {instead}" if instead else "; TileLang's C backend does not have it"
        return UnsupportedOnCPUError(f"kernel {kernel}: got T.{unresolved[1]}, which has no meaning on a CPU{advice}")
    if text.startswith("Compilation Failed"):
        said = f"the C++ compiler {compiler()} failed on TileLang's code; its own messages stand above"
    else:
        said = f"TileLang cannot compile it for the CPU: {(text or type(error).__name__).splitlines()[0].strip()}"
    return BackendError(f"kernel {kernel}: {said}")


def _patch_gemm() -> None:
    """A loop order that the C++ compiler vectorises: ten times faster than TileLang's own, the same sums in order."""
    import tilelang.language as T
    from tilelang.cpu.op.gemm.gemm_scalar import GemmScalar

    def lower(self: Any, *where: Any, **more: Any) -> Any:
        M, N, K = self.M, self.N, self.K  # noqa: N806
        operands = (self.ARegion, self.BRegion, self.CRegion)
        A, B, C = (operand.buffer for operand in operands)  # noqa: N806
        (a0, a1), (b0, b1), (c0, c1) = ([axis.min for axis in operand.region[-2:]] for operand in operands)
        trans_a, trans_b, clear_accum, dtype = self.trans_A, self.trans_B, self.clear_accum, self.accum_dtype

        @T.prim_func
        def gemm() -> None:
            # Operands are converted once, B is turned so that the innermost loop walks along a row.
            a = T.alloc_local((M, K), dtype)
            b = T.alloc_local((K, N), dtype)
            if clear_accum:
                T.clear(C)
            for i, k in T.grid(M, K):
                a[i, k] = T.cast(A[a0 + (k if trans_a else i), a1 + (i if trans_a else k)], dtype)
            for j, k in T.grid(N, K):
                b[k, j] = T.cast(B[b0 + (j if trans_b else k), b1 + (k if trans_b else j)], dtype)
            for i, k, j in T.grid(M, K, N):
                C[c0 + i, c1 + j] += a[i, k] * b[k, j]

        return gemm

    GemmScalar.lower = lower
