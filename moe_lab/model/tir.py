"""What a submission launches, read from the TIR that TileLang's own front end builds; nothing is lowered.

One warm child process calls ``run_kernel`` with tensors that have no storage (:mod:`moe_lab.model.lowering`), bounded
in time and memory, and walks each PrimFunc: about 60 ms for an ordinary file, 0.4 s for the largest step.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import TypeAdapter

from moe_lab.machine import backend
from moe_lab.machine.child import Child, ChildError
from moe_lab.model import lowering
from moe_lab.problem.contract import Case
from moe_lab.problem.errors import SubmissionError
from moe_lab.problem.layout import GroupedLayout
from moe_lab.problem.submission import Submission

_TIMEOUT_S, _START_S = 10.0, 40.0  # for one file; a child that has to start first gets more
_MEMORY_BYTES = 4 << 30  # address space that host code may take


@dataclass(frozen=True)
class Unknown:
    """A value that only run time knows; so is what is reckoned from it, but nothing times it is nothing."""

    reason: str  # naming the expression

    def _same(self, other: Number) -> Unknown:
        return self

    def _times(self, other: Number) -> Number:
        return 0 if other == 0 else self

    __add__ = __radd__ = __floordiv__ = _same
    __mul__ = __rmul__ = _times


Number = int | Unknown


@dataclass(frozen=True)
class Buffer:
    """A tensor in device memory, or one ``T.alloc_*``."""

    name: str  # of the argument of run_kernel, else in the kernel
    scope: str  # "global", "shared", "shared.dyn", "fragment" or "local" (an array of each thread)
    shape: tuple[Number, ...]
    bits: int  # of one element

    @property
    def size_bytes(self) -> Number:
        """Bytes of one copy of it."""
        return (math.prod(self.shape) * self.bits + 7) // 8


@dataclass(frozen=True)
class Op:
    """One statement of a block. Buffers are named by their places in :attr:`Launch.buffers`."""

    ways: ClassVar[tuple[tuple[Node, ...], ...]] = ()
    kind: str  # "copy", "gemm", "reduce" or "other"
    reads: tuple[int, ...] = ()  # buffers, each once
    writes: tuple[int, ...] = ()
    moved: dict[int, Number] = field(default_factory=dict)  # elements read from each tensor in device memory
    flops: int = 0  # of a gemm
    pure_copy: bool = False  # whether it only moves data from device memory into shared memory


@dataclass(frozen=True)
class Loop:
    """A loop of a block."""

    name: str  # its variable; empty for `while`
    trips: Number
    num_stages: int | None  # of T.Pipelined; None for any other loop
    notes: tuple[str, ...]  # names of its annotations, such as "tl_pipeline_order"
    ways: tuple[tuple[Node, ...]]  # what runs inside


@dataclass(frozen=True)
class Branch:
    """An ``if`` that only the device can decide."""

    ways: tuple[tuple[Node, ...], tuple[Node, ...]]  # what runs if it holds, and if it does not


Node = Op | Loop | Branch


@dataclass(frozen=True)
class Call:
    """One intrinsic that a launch calls, other than arithmetic."""

    name: str  # of TileLang's operator, such as "tl.tileop.async_copy" or "tirx.call_extern"
    text: str  # its first argument that is text, such as the function's name


@dataclass(frozen=True)
class Launch:
    """One ``with T.Kernel(...)`` that ``run_kernel`` reaches."""

    name: str  # of the kernel's function
    grid: tuple[Number, ...]  # blocks along each axis
    threads: int  # of a block
    pass_configs: dict[str, Any]  # of its @tilelang.jit, by name, in lower case with "_" for "."
    source: str  # device code that the kernel brings along (T.import_source); empty as a rule
    calls: tuple[Call, ...]  # its intrinsics, each once
    buffers: tuple[Buffer, ...]  # the tensors it is given, then what it allocates, in order
    body: tuple[Node, ...]  # what one block does


Kind = TypeVar("Kind", Op, Loop, Branch)
Value = TypeVar("Value")


def every(nodes: Sequence[Node], kind: type[Kind]) -> Iterator[Kind]:
    """Every statement, loop or branch; what stands inside another comes before it."""
    for node in nodes:
        for way in node.ways:
            yield from every(way, kind)
        if isinstance(node, kind):
            yield node


def total(nodes: Sequence[Node], count: Callable[[Op], Number]) -> Number:
    """Sum over statements, loops multiplied out; of two branches the larger."""
    found: Number = 0
    for node in nodes:
        if isinstance(node, Op):
            found += count(node)
        else:
            ways = [total(way, count) for way in node.ways]
            most = max(ways, key=lambda way: math.inf if isinstance(way, Unknown) else way)
            found += node.trips * most if isinstance(node, Loop) else most
    return found


def moved(nodes: Sequence[Node]) -> dict[int, Number]:
    """Elements read from each tensor in device memory, all loops run; see :func:`total`."""

    def of(place: int) -> Number:
        return total(nodes, lambda op: op.moved.get(place, 0))

    return {place: of(place) for place in _once(place for op in every(nodes, Op) for place in op.moved)}


Question = tuple[Submission, Case, GroupedLayout]
Answer = tuple[Launch, ...]
_ANSWER = TypeAdapter(Answer)

_child = Child("moe_lab.model.tir:read", environment={"TILELANG_DEFAULT_TARGET": "c"})
atexit.register(_child.close)
_asking = threading.Lock()
_known: dict[object, Answer | SubmissionError] = {}
_todo: list[Question] = []  # for when nobody waits


def launches(submission: Submission, case: Case, layout: GroupedLayout, *, load: str = "") -> Answer:
    """Everything that one call of ``run_kernel`` launches, in order.

    Host code may read the group sizes of ``layout``. ``load``, a "module:function", makes ``run_kernel`` of a text and
    its path; plain execution by default. Raises SubmissionError for a file that cannot be parsed, fails, ends its
    process or does not come to an end.
    """
    if (found := peek(submission, case, layout, load=load)) is not None:
        return found
    _ = submission.tree  # what is no Python needs no process
    _todo.clear()
    return _answer(submission, case, layout, load)


def peek(submission: Submission, case: Case, layout: GroupedLayout, *, load: str = "") -> Answer | None:
    """What :func:`launches` would answer or raise, if that is known by now; never waits."""
    found = _known.get((submission, case, layout, load))
    if isinstance(found, SubmissionError):
        raise found
    return found


def ahead(questions: Sequence[Question]) -> None:
    """Work these out until somebody has to wait, the last one first; what was asked before is forgotten."""

    def work() -> None:
        with contextlib.suppress(IndexError):  # nothing is left
            while True:
                with contextlib.suppress(SubmissionError):
                    _answer(*_todo.pop(), "")

    _todo[:] = questions
    threading.Thread(target=work, name="moe_lab reader", daemon=True).start()


def _answer(submission: Submission, case: Case, layout: GroupedLayout, load: str) -> Answer:
    integers = {
        "group_sizes": layout.sizes, "group_offsets": layout.offsets,
        "group_padded_offsets": layout.padded_offsets, "group_idx_for_bx": layout.block_map,
    }  # fmt: skip
    sizes = case.extents(layout.num_padded_rows)
    request = {"source": submission.source, "sizes": sizes, "integers": integers, "load": load}
    with _asking:
        if (known := peek(submission, case, layout, load=load)) is not None:
            return known
        found: Answer | SubmissionError
        try:
            answer = _child.ask(request, timeout_s=_TIMEOUT_S if _child.running else _START_S)
            found = _ANSWER.validate_python(answer)
        except ChildError as error:
            why = f"{error}: a loop may have no end" if error.ending.startswith("no answer") else str(error)
            found = SubmissionError(f"{submission.name} cannot be followed: {why}")
        _known[submission, case, layout, load] = found
    if isinstance(found, SubmissionError):
        raise found
    return found


def read(
    say: Callable[[str], None], source: str, sizes: dict[str, int], integers: dict[str, list[int]], load: str = ""
) -> Any:
    """Answer one question, as JSON. Call it in a process where no CPU meaning was applied."""
    _prepare()
    asked = lowering.asked_for(source, sizes, integers, load=load)
    # A slice of an argument reads the argument.
    names = {tensor.untyped_storage()._cdata: name for name, tensor in asked.arguments.items()}
    found = tuple(each for kernel, tensors in asked.launches for each in _Walk(kernel, tensors, names).found)
    return _ANSWER.dump_python(found, mode="json")


@functools.cache
def _prepare() -> None:
    backend.usable_cache_dir()
    import tilelang  # noqa: F401

    lowering.accept_vendor_files()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, resource.RLIM_INFINITY))


def _kind(node: Any) -> str:
    return type(node).__name__


def _operator(node: Any) -> str:
    """Name of what a call calls; empty for what is no call."""
    return str(getattr(getattr(node, "op", None), "name", ""))


def _once(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(values))


class _Walk:
    """One PrimFunc with the tensors of one launch."""

    def __init__(self, kernel: lowering.Kernel, tensors: Sequence[Any], names: dict[int, str]) -> None:
        from tvm import DataType, arith, tirx

        self.functor, self.simplify, self.dtype = tirx.stmt_functor, arith.Analyzer().simplify, DataType
        self.kernel, self.found = kernel, list[Launch]()
        self.tensors: dict[Any, str] = {}  # names of the buffers that stand for arguments
        self.extents: dict[Any, int] = {}  # of their shapes
        self.elements = 0  # loops over single elements around a statement
        for param, tensor in zip(kernel.function.params, tensors, strict=False):
            buffer = kernel.function.buffer_map[param]
            self.tensors[buffer] = names.get(tensor.untyped_storage()._cdata, str(buffer.name))
            shape = zip(buffer.shape, tensor.shape, strict=False)
            self.extents |= {dim: size for dim, size in shape if _kind(dim) == "Var"}
        self.launches(kernel.function.body, ())

    def number(self, expr: Any) -> Number:
        if isinstance(expr, int):
            return expr
        value = self.simplify(self.functor.substitute(expr, self.extents))
        if ways := self.ways(value):
            # At most: which of the two it is, the device decides.
            return max(ways, key=lambda way: math.inf if isinstance(way, Unknown) else way)
        if _kind(value) != "IntImm":
            return Unknown(f"`{expr}` is known at run time only")
        return int(value.value) if value.value >= 0 else Unknown(f"`{expr}` is {value.value}, which is no size")

    def ways(self, expr: Any) -> list[Number]:
        """Both values of ``T.if_then_else(condition, one, other)``; none of anything else."""
        return [self.number(each) for each in expr.args[1:]] if _operator(expr).endswith("if_then_else") else []

    def launches(self, node: Any, grid: tuple[Number, ...]) -> None:
        """Each nest of loops over blockIdx is a launch."""
        kind = _kind(node)
        if kind == "SBlockRealize" and "tl.launch_threads" in node.block.annotations:
            self.found.append(self.launch(node, grid))
        elif kind == "For" and node.thread_binding is not None:
            self.launches(node.body, (*grid, self.number(node.extent)))
        else:
            inner = node.block if kind == "SBlockRealize" else node
            for each in node.seq if kind == "SeqStmt" else [inner.body] if hasattr(inner, "body") else []:
                self.launches(each, grid)

    def launch(self, node: Any, grid: tuple[Number, ...]) -> Launch:
        self.places: dict[Any, int] = {}
        self.buffers: list[Buffer] = []
        for tensor, name in self.tensors.items():
            self.add(tensor, name, "global")
        body, notes, attributes = tuple(self.nodes(node)), node.block.annotations, dict(self.kernel.function.attrs)
        calls = [
            Call(name, next((str(each.value) for each in call.args if _kind(each) == "StringImm"), ""))
            for call in self.inside(node, "Call")
            if (name := _operator(call)) and not name.endswith(("region", "access_ptr", "type_annotation"))
        ]
        return Launch(
            str(attributes.get("global_symbol", "")), grid, math.prod(map(int, notes["tl.launch_threads"])),
            {name.lower().replace(".", "_"): value for name, value in self.kernel.pass_configs.items()},
            str(notes.get("pragma_import_c", "")), _once(calls), tuple(self.buffers), body,
        )  # fmt: skip

    def add(self, buffer: Any, name: str, scope: str) -> None:
        kind = self.dtype(str(buffer.dtype))
        self.places[buffer] = len(self.buffers)
        self.buffers.append(Buffer(name, scope, tuple(map(self.number, buffer.shape)), kind.bits * kind.lanes))

    def nodes(self, node: Any) -> list[Node]:
        match _kind(node):
            case "SeqStmt":
                return [each for part in node.seq for each in self.nodes(part)]
            case "SBlockRealize":
                for each in node.block.alloc_buffers:
                    scope = each.scope().replace("local.fragment", "fragment")
                    if scope in ("fragment", "local", "shared", "shared.dyn"):  # no barriers, no single variables
                        self.add(each, str(each.name), scope)
                return self.nodes(node.block.body)
            case "IfThenElse":
                ways = tuple(self.nodes(node.then_case)), tuple(self.nodes(node.else_case))
                return [*self.reads(node.condition), Branch(ways)]
            case "While":
                trips = Unknown(f"`while {node.condition}` ends at run time")
                return [Loop("", trips, None, (), (tuple(self.nodes(node.body)),))]
            case "For":
                return [self.loop(node)]
            case "BufferStore":
                return [self.store(node)]
            case "Evaluate":
                return self.call(node.value)
            case "Bind":
                return self.reads(node.value)
        return self.nodes(node.body) if hasattr(node, "body") else []

    def loop(self, node: Any) -> Node:
        trips, elements = self.number(node.extent), int(node.kind) in (1, 2)  # T.Parallel, T.vectorized
        self.elements += elements
        body = self.nodes(node.body)
        self.elements -= elements
        if self.ways(node.extent):
            body = [Branch((tuple(body), ()))]
        if not elements:
            notes = dict(node.annotations or {})
            stages = int(notes["num_stages"]) if "num_stages" in notes else None
            return Loop(str(node.loop_var.name), trips, stages, tuple(map(str, notes)), (tuple(body),))
        # A loop nest over single elements is one statement.
        ops = list(every(body, Op))
        reads, writes = (_once(place for op in ops for place in getattr(op, way)) for way in ("reads", "writes"))
        reading = {place: trips * count for place, count in moved(body).items()}
        pure = bool(reading) and bool(writes) and all(op.pure_copy or not op.writes for op in ops)
        return Op("other", reads, writes, reading, 0, pure)

    def inside(self, node: Any, kind: str) -> list[Any]:
        found: list[Any] = []
        self.functor.post_order_visit(node, lambda each: found.append(each) if _kind(each) == kind else None)
        return found

    def scope(self, buffer: Any) -> str:
        """Empty for what is no memory of a block and no argument, as a barrier is."""
        return self.buffers[self.places[buffer]].scope if buffer in self.places else ""

    def loads(self, *exprs: Any) -> list[Any]:
        """Buffers that expressions load from, one for each load."""
        found = [load.buffer for expr in exprs for load in self.inside(expr, "BufferLoad")]
        return [buffer for buffer in found if buffer in self.places]

    def other(self, loads: Sequence[Any], writes: tuple[int, ...] = (), pure_copy: bool = False) -> Op:
        moved = Counter(self.places[buffer] for buffer in loads if self.scope(buffer) == "global")
        return Op("other", _once(self.places[buffer] for buffer in loads), writes, dict(moved), 0, pure_copy)

    def reads(self, expr: Any) -> list[Node]:
        """What an expression reads; of device memory only where every element reads it."""
        found = [buffer for buffer in self.loads(expr) if self.elements or self.scope(buffer) != "global"]
        return [self.other(found)] if found else []

    def store(self, node: Any) -> Op:
        target, value = node.buffer, node.value
        loads = self.loads(value, *node.indices)
        while _kind(value) == "Cast":
            value = value.value
        source = self.scope(value.buffer) if _kind(value) == "BufferLoad" else ""
        pure = self.scope(target).startswith("shared") and source == "global"
        return self.other(loads, (self.places[target],) if target in self.places else (), pure)

    def call(self, call: Any) -> list[Node]:
        regions = [arg.args for arg in getattr(call, "args", ()) if _operator(arg).endswith("region")]
        if not regions:
            return self.reads(call)
        reads, writes, moved = [], [], {}
        for load, access, *extents in regions:
            if (place := self.places.get(load.buffer)) is not None:
                reads += [place] * (int(access) & 1)
                writes += [place] * (int(access) >> 1)
                if int(access) == 1 and self.scope(load.buffer) == "global":
                    moved[place] = math.prod(map(self.number, extents))
        kind = next((kind for kind in ("gemm", "reduce", "copy") if kind in _operator(call)), "other")
        flops = 2 * math.prod(int(call.args[i]) for i in (5, 6, 7)) if kind == "gemm" else 0
        pure = kind == "copy" and bool(moved) and all(self.buffers[at].scope.startswith("shared") for at in writes)
        return [Op(kind, _once(reads), _once(writes), moved, flops, pure)]
