"""What a submission launches, read from the TIR that TileLang's own front end builds.

    launches(submission, case, layout)   waits: about 60 ms for an ordinary file, 0.4 s for the largest step
    peek(submission, case, layout)       the answer if it is known by now, else None: never waits
    ahead([(submission, case, layout)])  work these out while nobody waits, the last one first

One warm child process (:class:`moe_lab.machine.child.Child`) calls ``run_kernel`` with tensors that have no storage
(:mod:`moe_lab.model.host`) and walks each PrimFunc; nothing is lowered. Host code runs there, bounded in time and
memory: pass ``load="moe_lab.judge.sandbox:load"`` for a stranger's file. Answers are kept by source and sizes.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import math
import re
import resource
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_lab.machine.child import Child, ChildError
from moe_lab.model import host
from moe_lab.problem.contract import Case
from moe_lab.problem.errors import SubmissionError
from moe_lab.problem.layout import GroupedLayout
from moe_lab.problem.submission import Submission

_TIMEOUT_S, _START_S = 10.0, 40.0  # for one file; a child that has to start first gets more
_MEMORY_BYTES = 4 << 30  # address space that host code may take
_KEPT = 1024  # answers


@dataclass(frozen=True)
class Unknown:
    """A value that only run time knows."""

    reason: str  # naming the expression


Number = int | Unknown


@dataclass(frozen=True)
class Buffer:
    """A tensor in device memory, or one ``T.alloc_*``."""

    name: str  # of the argument of run_kernel, else in the kernel
    scope: str  # "global", "shared", "shared.dyn", "fragment" or "local" (an array of each thread)
    shape: tuple[Number, ...]
    dtype: str  # such as "float16"

    @property
    def size_bytes(self) -> Number:
        """Bytes of one copy of it."""
        bits = product((*self.shape, dtype_bits(self.dtype)))
        return bits if isinstance(bits, Unknown) else -(-bits // 8)


@dataclass(frozen=True)
class Op:
    """One statement of a block. Buffers are named by their places in :attr:`Launch.buffers`."""

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
    body: tuple[Node, ...]

    @property
    def ways(self) -> tuple[tuple[Node, ...], ...]:
        """What may run inside."""
        return (self.body,)


@dataclass(frozen=True)
class Branch:
    """An ``if`` that only the device can decide."""

    body: tuple[Node, ...]
    orelse: tuple[Node, ...]

    @property
    def ways(self) -> tuple[tuple[Node, ...], ...]:
        """What may run inside, one of the two."""
        return (self.body, self.orelse)


Node = Op | Loop | Branch


@dataclass(frozen=True)
class Call:
    """One intrinsic that a launch calls, other than arithmetic."""

    name: str  # of TileLang's operator, such as "tl.tileop.async_copy" or "tirx.call_extern"
    text: str = ""  # its first argument that is text, such as the function's name
    buffers: tuple[str, ...] = ()  # names of what it touches


@dataclass(frozen=True)
class Launch:
    """One ``with T.Kernel(...)`` that ``run_kernel`` reaches."""

    name: str  # of the kernel's function
    grid: tuple[Number, ...]  # blocks along each axis
    threads: int  # of a block
    target: str  # that its @tilelang.jit names; empty if it names none
    pass_configs: dict[str, Any]  # of the same, by name, in lower case with "_" for "."
    source: str  # device code that the kernel brings along (T.import_source); empty as a rule
    calls: tuple[Call, ...]  # its intrinsics, each once
    buffers: tuple[Buffer, ...]  # the tensors it is given, then what it allocates, in order
    body: tuple[Node, ...]  # what one block does


def walk(nodes: Sequence[Node]) -> Iterator[Op]:
    """Every statement, those of loops and branches included."""
    for node in nodes:
        if isinstance(node, Op):
            yield node
        else:
            for way in node.ways:
                yield from walk(way)


def loops(nodes: Sequence[Node]) -> Iterator[Loop]:
    """Every loop, those inside another before it."""
    for node in nodes:
        if not isinstance(node, Op):
            for way in node.ways:
                yield from loops(way)
        if isinstance(node, Loop):
            yield node


def product(values: Sequence[Number]) -> Number:
    """Product of integers; unknown if one of them is.

    >>> product((2, 3))
    6
    """
    return next((value for value in values if isinstance(value, Unknown)), None) or math.prod(values)  # type: ignore[arg-type]


def total(values: Sequence[Number]) -> Number:
    """Sum of integers; unknown if one of them is."""
    return next((value for value in values if isinstance(value, Unknown)), None) or sum(values)  # type: ignore[arg-type]


def dtype_bits(dtype: str) -> Number:
    """Bits of one element.

    >>> dtype_bits("bfloat16"), dtype_bits("float8_e4m3")
    (16, 8)
    """
    match = re.match(r"(?:b?float|u?int|e\dm\d\w*?_float)(\d+)", "int8" if dtype == "bool" else dtype)
    return int(match[1]) if match else Unknown(f"the width of dtype {dtype!r} is not known")


# --- asking ----------------------------------------------------------------------------------------------------------

Question = tuple[Submission, Case, GroupedLayout]
Answer = tuple[Launch, ...]


class _Reader:
    """The warm child, and what it has answered."""

    def __init__(self) -> None:
        self._child = Child("moe_lab.model.tir:read", environment={"TILELANG_DEFAULT_TARGET": "c"})
        atexit.register(self._child.close)
        self._asking, self._warm = threading.Lock(), False
        self._known: collections.OrderedDict[object, Answer | SubmissionError] = collections.OrderedDict()
        self._todo: list[Question] = []
        self._wanted, self._waiting = threading.Condition(), 0
        self._thread: threading.Thread | None = None

    def peek(self, question: Question, load: str = "") -> Answer | None:
        submission, case, layout = question
        found = self._known.get((submission.source_hash, case, layout, load))
        if isinstance(found, SubmissionError):
            raise found
        return found

    def answer(self, question: Question, load: str) -> Answer:
        with self._wanted:
            self._waiting += 1
        try:
            with self._asking:
                return self.peek(question, load) or self._ask(question, load)
        finally:
            with self._wanted:
                self._waiting -= 1
                self._wanted.notify_all()

    def ahead(self, questions: Sequence[Question]) -> None:
        with self._wanted:
            self._todo = list(questions)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work_ahead, name="moe_lab reader", daemon=True)
                self._thread.start()
            self._wanted.notify_all()

    def _work_ahead(self) -> None:
        while True:
            with self._wanted:
                self._wanted.wait_for(lambda: self._todo and not self._waiting)
                question = self._todo.pop()
            with self._asking, contextlib.suppress(SubmissionError):
                if self.peek(question) is None:
                    self._ask(question, "")

    def _ask(self, question: Question, load: str) -> Answer:
        submission, case, layout = question
        request = {
            "source": submission.source, "sizes": case.extents(layout.num_padded_rows), "load": load,
            "integers": {
                "group_sizes": layout.sizes, "group_offsets": layout.offsets,
                "group_padded_offsets": layout.padded_offsets, "group_idx_for_bx": layout.block_map,
            },
        }  # fmt: skip
        timeout_s, self._warm = _TIMEOUT_S if self._warm else _START_S, False
        found: Answer | SubmissionError
        try:
            found = tuple(_adapter().validate_python(self._child.ask(request, timeout_s=timeout_s)))
            self._warm = True
        except ChildError as error:
            self._warm = not error.ending
            why = f"{error}: a loop may have no end" if error.ending.startswith("no answer") else str(error)
            found = SubmissionError(f"{submission.name} cannot be followed: {why}")
        self._known[(submission.source_hash, case, layout, load)] = found
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        if isinstance(found, SubmissionError):
            raise found
        return found


_reader = functools.cache(_Reader)


@functools.cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(list[Launch])


def launches(submission: Submission, case: Case, layout: GroupedLayout, *, load: str = "") -> Answer:
    """Everything that one call of ``run_kernel`` launches, in order.

    Args:
        submission: with the literals wanted.
        case: sizes.
        layout: group sizes, which host code may read.
        load: "module:function" that makes ``run_kernel`` of a text and its path; plain execution by default.

    Raises:
        SubmissionError: for a file that cannot be parsed, fails, ends its process or does not come to an end.
    """
    found = _reader().peek((submission, case, layout), load)
    if found is None:
        _ = submission.tree  # what is no Python needs no process
        found = _reader().answer((submission, case, layout), load)
    return found


def peek(submission: Submission, case: Case, layout: GroupedLayout) -> Answer | None:
    """What :func:`launches` would answer or raise, if that is known by now; never waits."""
    return _reader().peek((submission, case, layout))


def ahead(questions: Sequence[Question]) -> None:
    """Work these out while nobody waits, the last one first; what was asked before and is not done yet is forgotten."""
    _reader().ahead(questions)


# --- in the child ----------------------------------------------------------------------------------------------------


def read(
    say: Callable[[str], None], source: str, sizes: dict[str, int], integers: dict[str, list[int]], load: str = ""
) -> Any:
    """Answer one question, as JSON. Call it in a process where no CPU meaning was applied."""
    _prepare()
    found: list[Launch] = []
    asked = host.asked_for(source, sizes, integers, load=load)
    for kernel, tensors in asked.launches:
        names: list[tuple[Any, str]] = []
        extents: dict[Any, int] = {}
        for param, tensor in zip(kernel.function.params, tensors, strict=False):
            buffer = kernel.function.buffer_map[param]
            # A slice of an argument reads the argument.
            own = (name for name, each in asked.arguments.items() if _storage(each) == _storage(tensor))
            names.append((buffer, next(own, str(buffer.name))))
            extents |= {dim: size for dim, size in zip(buffer.shape, tensor.shape, strict=False) if _kind(dim) == "Var"}
        found += _Walk(kernel, names, extents).found
    return _adapter().dump_python(found, mode="json")


@functools.cache
def _prepare() -> None:
    import tilelang  # noqa: F401

    host.accept_vendor_files()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, resource.RLIM_INFINITY))


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _kind(node: Any) -> str:
    return type(node).__name__


def _operator(node: Any) -> str:
    """Name of what a call calls; empty for what is no call."""
    return str(getattr(getattr(node, "op", None), "name", ""))


def _once(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


class _Walk:
    """One PrimFunc with the tensors of one launch."""

    def __init__(self, kernel: host.Kernel, tensors: list[tuple[Any, str]], extents: dict[Any, int]) -> None:
        from tvm import arith, tirx

        self.functor, self.simplify = tirx.stmt_functor, arith.Analyzer().simplify
        self.kernel, self.extents, self.tensors = kernel, extents, tensors
        self.found: list[Launch] = []
        self.elements = 0  # loops over single elements around a statement
        self.launches(kernel.function.body, ())

    def number(self, expr: Any) -> Number:
        if isinstance(expr, int):
            return expr
        value = self.simplify(self.functor.substitute(expr, self.extents))
        if _kind(value) != "IntImm":
            return Unknown(f"`{expr}` is known at run time only")
        return int(value.value) if value.value >= 0 else Unknown(f"`{expr}` is {value.value}, which is no size")

    def launches(self, node: Any, grid: tuple[Number, ...]) -> None:
        """Each nest of loops over blockIdx is a launch."""
        kind = _kind(node)
        node = node.block if kind == "SBlockRealize" else node
        if kind == "SBlockRealize" and "tl.launch_threads" in node.annotations:
            self.found.append(self.launch(node, grid))
        elif kind == "For" and node.thread_binding is not None:
            self.launches(node.body, (*grid, self.number(node.extent)))
        else:
            for each in node.seq if kind == "SeqStmt" else [node.body] if hasattr(node, "body") else []:
                self.launches(each, grid)

    def launch(self, block: Any, grid: tuple[Number, ...]) -> Launch:
        self.places: dict[Any, int] = {}
        self.buffers: list[Buffer] = []
        for tensor, name in self.tensors:
            self.add(tensor, name, "global")
        body = tuple(self.block(block))
        attributes, configs = self.kernel.function.attrs, self.kernel.pass_configs
        return Launch(
            str(attributes["global_symbol"]) if "global_symbol" in attributes else "", grid,
            math.prod(map(int, block.annotations["tl.launch_threads"])), self.kernel.target,
            {name.lower().replace(".", "_"): value for name, value in configs.items()},
            str(block.annotations.get("pragma_import_c", "")), tuple(self.calls(block)), tuple(self.buffers), body,
        )  # fmt: skip

    def add(self, buffer: Any, name: str, scope: str) -> None:
        self.places[buffer] = len(self.buffers)
        self.buffers.append(Buffer(name, scope, tuple(map(self.number, buffer.shape)), str(buffer.dtype)))

    def calls(self, block: Any) -> dict[Call, None]:
        found: dict[Call, None] = {}

        def note(node: Any) -> None:
            name = _operator(node) if _kind(node) == "Call" else ""
            if name and not name.endswith(("region", "access_ptr", "type_annotation")):
                text = next((str(each.value) for each in node.args if _kind(each) == "StringImm"), "")
                touched = (self.buffers[place].name for place in self.touched(node))
                found.setdefault(Call(name, text, tuple(dict.fromkeys(touched))))

        self.functor.post_order_visit(block, note)
        return found

    def block(self, block: Any) -> list[Node]:
        for each in block.alloc_buffers:
            scope = each.scope().replace("local.fragment", "fragment")
            if scope in ("fragment", "local", "shared", "shared.dyn"):  # no barriers, no single variables
                self.add(each, str(each.name), scope)
        return self.nodes(block.body)

    def nodes(self, node: Any) -> list[Node]:
        kind = _kind(node)
        if kind == "SeqStmt":
            return [each for part in node.seq for each in self.nodes(part)]
        if kind == "SBlockRealize":
            return self.block(node.block)
        if kind == "IfThenElse":
            other = [] if node.else_case is None else self.nodes(node.else_case)
            return [*self.reads(node.condition), Branch(tuple(self.nodes(node.then_case)), tuple(other))]
        if kind == "While":
            trips = Unknown(f"`while {node.condition}` ends at run time")
            return [Loop("", trips, None, (), tuple(self.nodes(node.body)))]
        if kind == "For":
            return [self.loop(node)]
        if kind == "BufferStore":
            return [self.store(node)]
        if kind in ("Evaluate", "Bind"):
            return self.call(node.value) if kind == "Evaluate" else self.reads(node.value)
        return self.nodes(node.body) if hasattr(node, "body") else []

    def loop(self, node: Any) -> Node:
        elements = int(node.kind) in (1, 2)  # T.Parallel, T.vectorized
        self.elements += elements
        body = self.nodes(node.body)
        self.elements -= elements
        if elements:
            return _merged(body, self.number(node.extent))
        notes = dict(node.annotations or {})
        stages = int(notes["num_stages"]) if "num_stages" in notes else None
        return Loop(str(node.loop_var.name), self.number(node.extent), stages, tuple(map(str, notes)), tuple(body))

    def touched(self, node: Any) -> list[int]:
        """Places of all buffers that an expression loads from, one for each load."""
        found: list[Any] = []
        self.functor.post_order_visit(node, lambda n: found.append(n) if _kind(n) == "BufferLoad" else None)
        return [self.places[n.buffer] for n in found if n.buffer in self.places]

    def reads(self, expr: Any) -> list[Node]:
        """What an expression reads; of device memory only where every element reads it."""
        found = [place for place in self.touched(expr) if self.elements or not self.in_memory(place)]
        return [Op("other", _once(found), moved=self.loads(found))] if found else []

    def loads(self, places: Sequence[int]) -> dict[int, Number]:
        return dict(collections.Counter(filter(self.in_memory, places)))

    def in_memory(self, place: int | None) -> bool:
        return place is not None and self.buffers[place].scope == "global"

    def is_shared(self, place: int | None) -> bool:
        return place is not None and self.buffers[place].scope.startswith("shared")

    def store(self, node: Any) -> Op:
        target, value = self.places.get(node.buffer), node.value
        loads = [place for part in (value, *node.indices) for place in self.touched(part)]
        while _kind(value) == "Cast":
            value = value.value
        source = self.places.get(value.buffer) if _kind(value) == "BufferLoad" else None
        pure = self.is_shared(target) and self.in_memory(source)
        return Op("other", _once(loads), () if target is None else (target,), self.loads(loads), 0, pure)

    def call(self, call: Any) -> list[Node]:
        regions = [arg for arg in getattr(call, "args", ()) if _operator(arg).endswith("region")]
        if not regions:
            return self.reads(call)
        reads, writes, moved = [], [], {}
        for region in regions:
            place, access = self.places.get(region.args[0].buffer), int(region.args[1])
            if place is None:
                continue
            reads += [place] if access & 1 else []
            writes += [place] if access & 2 else []
            if access == 1 and self.in_memory(place):
                moved[place] = product(list(map(self.number, region.args[2:])))
        kind = next((kind for kind in ("gemm", "reduce", "copy") if kind in _operator(call)), "other")
        flops = 2 * math.prod(int(call.args[i]) for i in (5, 6, 7)) if kind == "gemm" else 0
        pure = kind == "copy" and bool(moved) and all(map(self.is_shared, writes))
        return [Op(kind, _once(reads), _once(writes), moved, flops, pure)]


def _merged(nodes: Sequence[Node], times: Number) -> Op:
    """A loop nest over single elements as one statement."""
    moved: dict[int, Number] = {}

    def add(nodes: Sequence[Node], times: Number) -> None:
        for node in nodes:
            if not isinstance(node, Op):
                for way in node.ways:
                    add(way, product((times, node.trips)) if isinstance(node, Loop) else times)
                continue
            for place, count in node.moved.items():
                moved[place] = total((moved.get(place, 0), product((times, count))))

    add(nodes, times)
    ops = list(walk(nodes))
    reads, writes = _once(place for op in ops for place in op.reads), _once(place for op in ops for place in op.writes)
    pure = bool(moved) and bool(writes) and all(op.pure_copy or not op.writes for op in ops)
    return Op("other", reads, writes, moved, 0, pure)
