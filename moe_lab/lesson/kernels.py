"""Kernels that a reader writes: compiled and run in another process, on several sizes, beside a torch reference.

A kernel exercise asks for a builder, a function below ``@tilelang.jit`` whose kernel writes its last argument. Every
probe is a set of sizes. Inputs are drawn anew from the probe's text, so each answer to it sees the same numbers; the
destination arrives full of NaN, and working memory that nobody wrote holds a pattern of the compiler's, so what a
wrong kernel leaves is the same each time. That is how a mistake is told by what it does.
"""

from __future__ import annotations

import ast
import functools
import linecache
import subprocess
import threading
import traceback
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from matplotlib.colors import ListedColormap

from moe_lab.lesson.display import PALE, RED, canvas, show
from moe_lab.machine.child import Child, ChildError
from moe_lab.problem.errors import ExerciseError
from moe_lab.problem.layout import GroupedLayout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from moe_lab.lesson.exercises import Exercise

_FILE = "<kernel>"
_TIMEOUT_S = 60.0
#: Two processes compile side by side, one for each thread.
_POOL, _THREAD = ThreadPoolExecutor(2), threading.local()


def solved(exercise: Exercise, answer: Any) -> bool:
    """Whether a builder's kernel writes what the reference says; False while a ``...`` stands in it.

    Raises:
        ExerciseError: for any other kernel, with the name of the mistake if it is a usual one.
    """
    source = _source(answer)
    # A compiler drops a line that says `...` alone.
    if gaps(source):
        return False
    got, expected = observe(exercise, answer), observe(exercise, exercise.solution)
    if agree(got, expected):
        return True
    raise _explain(exercise, source, got, dict(expected))


def gaps(source: str) -> list[int]:
    """The lines where ``...`` is still to be replaced; in an index, as in ``x[..., 0]``, it says something."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    indices = {part for node in ast.walk(tree) if isinstance(node, ast.Subscript) for part in ast.walk(node.slice)}
    left = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value is ...]
    return sorted(node.lineno for node in left if node not in indices)


def observe(exercise: Exercise, answer: Any) -> list[tuple[str, Any]]:
    """What a kernel leaves in its destination.

    Args:
        exercise: of the kind "kernel".
        answer: a builder, or its source; the exercise's own solution stands for the torch reference.

    Returns:
        For each probe, such as "M=96, N=70", the destination, or an :class:`ExerciseError` in its place. The later
        probes are left out where the first one is wrong.

    Raises:
        ExerciseError: for an answer that is no builder.
    """
    if answer == exercise.solution:
        return [(probe, _arguments(exercise, probe, reference=True)[1]) for probe in exercise.probes]
    if not (source := _source(answer)):
        raise ExerciseError(f"{exercise.answer} is {answer!r}, expected a function below @tilelang.jit")
    first, *others = exercise.probes
    found = _ask(exercise, source, first)
    if not same(found, _arguments(exercise, first, reference=True)[1]):
        return [(first, found)]
    return [(first, found), *zip(others, _POOL.map(functools.partial(_ask, exercise, source), others), strict=True)]


def agree(got: Any, expected: list[tuple[str, Any]]) -> bool:
    """Whether an answer leaves in every probe what the reference says."""
    return len(got) == len(expected) and all(
        same(value, item) for (_, value), (_, item) in zip(got, expected, strict=True)
    )


def same(got: Any, expected: Any) -> bool:
    """Whether two destinations agree up to what fp16 rounds, or two errors say the same."""
    if isinstance(got, Exception) or isinstance(expected, Exception):
        return str(got) == str(expected)
    return got.shape == expected.shape and not bool(_wrong(got, expected).any())


def _explain(
    exercise: Exercise, source: str, got: list[tuple[str, Any]], wanted: dict[str, torch.Tensor]
) -> ExerciseError:
    """Draw where the first wrong destination is wrong, and say which usual mistake leaves the same one."""
    right = [probe for probe, value in got if same(value, wanted[probe])]
    probe, value = next((probe, value) for probe, value in got if probe not in right)
    if isinstance(value, Exception):
        what = str(value).rstrip(".")
    else:
        what = where_wrong(value, wanted[probe])
        show(*_error_map(_wrong(value, wanted[probe]), f"{exercise.title}: {probe}"))
    looks = _POOL.map(lambda code: _ask(exercise, code, probe), exercise.mistakes.values())
    alike = [name for name, look in zip(exercise.mistakes, looks, strict=True) if same(look, value)]
    for other in exercise.probes if len(alike) > 1 else ():  # two mistakes may do the same to one size
        mine = _ask(exercise, source, other)
        alike = [name for name in alike if same(_ask(exercise, exercise.mistakes[name], other), mine)] or alike
    mistake = next(iter(alike), None)
    named = f"This is what comes out if {mistake}." if mistake else "It is none of the usual mistakes; see the hints."
    also = f" (right for {'; '.join(right)})" if right else ""
    return ExerciseError(f"{exercise.title}: for {probe}{also}: {what}. {named}", mistake)


def _source(answer: Any) -> str:
    return answer if isinstance(answer, str) else getattr(answer, "func_source", "")


def _ask(exercise: Exercise, source: str, probe: str) -> torch.Tensor | ExerciseError:
    """What a kernel writes for one probe, from the process of this thread."""
    child = vars(_THREAD).setdefault("child", Child("moe_lab.lesson.kernels:run"))
    try:
        found = child.ask({"key": exercise.key, "source": source, "probe": probe}, timeout_s=_TIMEOUT_S)
    except ChildError as error:
        how = f"the kernel does not end: {error.ending}" if "no answer" in error.ending else f"{error}"
        return ExerciseError(how)
    return ExerciseError(found) if isinstance(found, str) else torch.tensor(found)


def where_wrong(got: torch.Tensor, expected: torch.Tensor) -> str:
    """How many places differ, in which rows and columns, and the first of them, for people.

    >>> where_wrong(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    '1 of 4 places is wrong (rows 1 to 1, columns 1 to 1); at [1, 1] got 0, expected 4'
    """
    wrong = _wrong(got, expected)
    places = wrong.nonzero()
    names = ("rows", "columns") if wrong.dim() > 1 else ("places",)
    spans = (f"{name} {int(at.min())} to {int(at.max())}" for name, at in zip(names, places.T, strict=True))
    first = tuple(places[0].tolist())
    return (
        f"{len(places)} of {wrong.numel()} places {'is' if len(places) == 1 else 'are'} wrong ({', '.join(spans)}); at "
        f"[{', '.join(map(str, first))}] got {float(got[first]):.4g}, expected {float(expected[first]):.4g}"
    )


def _wrong(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Where they differ; a NaN is equal to a NaN, as where nothing is written."""
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if len(finite) else 1.0
    return ~torch.isclose(got.float(), expected.float(), rtol=4e-3, atol=2e-3 * scale, equal_nan=True)


def _error_map(wrong: torch.Tensor, title: str) -> tuple[Figure, str]:
    places, colours = torch.atleast_2d(wrong).numpy(), ListedColormap([PALE, RED])
    figure, (axes,) = canvas(5.0, 0.8 if len(places) == 1 else 3.2)
    axes.imshow(places, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set(title=title, xlabel="column", ylabel="row")
    return figure, f"Map of the destination: {int(places.sum())} of {places.size} places are wrong, shown in red."


def _arguments(exercise: Exercise, probe: str, *, reference: bool = False) -> tuple[dict[str, Any], Any]:
    """The probe's names, arguments among them, and the reference's destination if it is asked for."""
    generator = torch.Generator().manual_seed(zlib.crc32(probe.encode()))

    def rand(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def nan(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)

    def valid_rows(sizes: Sequence[int], block: int = 32) -> torch.Tensor:
        return torch.cat([torch.arange(-(-size // block) * block) < size for size in sizes])

    names = {"torch": torch, "F": F, "rand": rand, "nan": nan, "valid_rows": valid_rows, "layout": GroupedLayout}
    names |= eval(f"dict({probe})", dict(names))
    for name, text in exercise.arguments.items():
        names[name] = eval(text, names)
    return names, eval(exercise.reference, names).float() if reference else None


# --- in the child ----------------------------------------------------------------------------------------------------


def run(say: Callable[[Any], object], key: str, source: str, probe: str) -> list[Any] | str:
    """Compile and run a kernel for a probe: the destination as nested lists, or what went wrong."""
    from moe_lab.lesson.exercises import EXERCISES

    _prepare()
    return _written(EXERCISES[key], source, probe)


@functools.cache
def _prepare() -> None:
    from moe_lab.machine import backend, cpu

    fill = "-ftrivial-auto-var-init=pattern"
    if backend.detect().kind == "cpu":
        command = [cpu.compiler(), fill, "-x", "c++", "-fsyntax-only", "-"]
        if subprocess.run(command, input=b"", capture_output=True, check=False).returncode == 0:
            cpu.COMPILE_FLAGS += (fill,)
    backend.prepare()


def _written(exercise: Exercise, source: str, probe: str) -> list[Any] | str:
    import tilelang
    import tilelang.language as T
    from tilelang.jit.kernel import JITKernel

    names = _arguments(exercise, probe)[0]
    module: dict[str, Any] = {"tilelang": tilelang, "T": T, "torch": torch}
    # TileLang reads the source of a kernel where Python looks for it, too.
    linecache.cache[_FILE] = (len(source), None, source.splitlines(keepends=True), _FILE)
    try:
        exec(compile(source, _FILE, "exec", dont_inherit=True), module)
        kernel = eval(f"{exercise.answer}({exercise.build})", {**names, exercise.answer: module[exercise.answer]})
        if not isinstance(kernel, JITKernel):
            return f"{exercise.answer} gave {type(kernel).__name__}, expected the kernel that it builds"
        device = "cuda" if torch.cuda.is_available() else "cpu"
        tensors = [names[name].to(device) for name in exercise.arguments]
        kernel(*tensors)
    except Exception as error:  # noqa: BLE001 - whatever a reader's kernel raises becomes one sentence
        return _sentence(error, source)
    written: list[Any] = tensors[-1].float().cpu().tolist()
    return written


def _sentence(error: Exception, source: str) -> str:
    """The first line of an error, at the line of the reader's own kernel that it comes from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, SyntaxError) and error.lineno:
        number = error.lineno
    elif frames:
        number = frames[-1].lineno or 0
    else:
        return f"TileLang cannot compile it: {said}"
    line = source.splitlines()[number - 1].strip()
    return f"at `{line}`: {type(error).__name__}: {said}"
