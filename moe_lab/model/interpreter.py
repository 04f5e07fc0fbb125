"""Reading a submission without running it: a small interpreter over its syntax tree.

The host code is followed from ``run_kernel`` with tensors that have a shape and nothing else, so that the tile sizes
arrive in the kernels the way they really do: through literals, defaults, arguments and small helper functions. What
only exists at run time (a block's index, a value inside a tensor) is *unknown* and keeps its reason; it does no harm
until a shape, a grid or a loop depends on it, and then the reason is what the user is told.

Nothing of the file is executed, and the number of steps is limited.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_lab.model.anatomy import Branch, Buffer, Launch, Loop, Node, Op, Region, Tensor, Unknown, dtype_bits, product
from moe_lab.problem.contract import ARGUMENTS, ENTRY_POINT, Case
from moe_lab.problem.errors import SubmissionError
from moe_lab.problem.layout import GroupedLayout
from moe_lab.problem.submission import Submission

#: Statements followed in one file before giving up: more than any real one, less than a second.
_MOST_STEPS = 50_000
_MOST_DEPTH = 40
#: Items of a container and bits of a number that are kept.
_MOST_ITEMS = 10_000
_MOST_BITS = 4096
#: Sizes of grids, blocks and tiles are 32-bit integers.
_EXTENTS = 2**31


def launches(submission: Submission, case: Case, layout: GroupedLayout) -> list[Launch]:
    """Follow ``run_kernel`` for one case and list what it launches.

    Args:
        submission: with the literals wanted.
        case: sizes.
        layout: group sizes of the case; the tensors get P rows and P/128 blocks from it.

    Returns:
        The launches in the order of the calls; an empty list if none was reached.

    Raises:
        SubmissionError: if the file cannot be parsed, has no ``run_kernel``, or cannot be followed to its end.
    """
    return _Interpreter(submission, case, layout).run()


# ---- values of the interpreter ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Module:
    """A name of torch, tilelang or math, as a dotted path."""

    path: str

    @property
    def last(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(eq=False)
class _Symbol:
    """``T.dynamic("n")``: bound when the kernel is called."""

    name: str
    value: int | None = None


@dataclass(frozen=True)
class _TensorSpec:
    shape: tuple[Any, ...]


@dataclass(eq=False)
class _Function:
    node: ast.FunctionDef | ast.Lambda
    scope: _Scope
    kind: str = "plain"  # plain, builder, prim_func or macro
    pass_configs: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class _Kernel:
    """What a builder returns: a compiled kernel, callable with tensors."""

    func: Any
    pass_configs: dict[str, Any]


@dataclass(eq=False)
class _Frame:
    """A loop or launch object: ``T.Pipelined(...)``, ``T.Kernel(...)``."""

    kind: str
    args: list[Any]
    kwargs: dict[str, Any]


class _Scope:
    def __init__(self, parent: _Scope | None = None) -> None:
        self.vars: dict[str, Any] = {}
        self.parent = parent
        self.globals: _Scope = parent.globals if parent else self

    def get(self, name: str) -> Any:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.vars:
                return scope.vars[name]
            scope = scope.parent
        return _BUILTINS.get(name, Unknown(f"`{name}` is not defined in this file"))


class _ReturnSignal(Exception):  # noqa: N818 (control flow, no error)
    def __init__(self, value: Any) -> None:
        self.value = value


class _BreakSignal(Exception):  # noqa: N818 (control flow, no error)
    pass


class _ContinueSignal(Exception):  # noqa: N818 (control flow, no error)
    pass


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda item, box: item in box, ast.NotIn: lambda item, box: item not in box,
}  # fmt: skip
_BUILTINS: dict[str, Any] = {
    function.__name__: function
    for function in (
        abs, all, any, bool, dict, divmod, enumerate, float, int, len, list, max, min, range, reversed, round, set,
        sorted, str, sum, tuple, zip,
    )
}  # fmt: skip
#: Functions of torch, tilelang and math whose value follows from plain numbers.
_PURE: dict[str, Callable[..., Any]] = {
    "ceildiv": lambda a, b: -(-a // b), "cdiv": lambda a, b: -(-a // b), "floordiv": lambda a, b: a // b,
    "floormod": lambda a, b: a % b, "truncdiv": lambda a, b: int(a / b), "min": min, "max": max, "ceil": math.ceil,
    "floor": math.floor, "log2": math.log2, "sqrt": math.sqrt, "gcd": math.gcd, "lcm": math.lcm, "prod": math.prod,
    "isqrt": math.isqrt, "log": math.log, "exp": math.exp,
}  # fmt: skip
#: Methods of plain containers and texts that host code uses.
_METHODS = {
    "get", "setdefault", "items", "keys", "values", "update", "append", "extend", "pop", "index", "count", "insert",
    "startswith", "endswith", "lower", "upper", "bit_length", "copy",
}  # fmt: skip
_MAKES_TENSOR = {"empty", "zeros", "ones", "full", "rand", "randn"}
_SCOPES = {"alloc_fragment": "fragment", "alloc_local": "local", "alloc_reducer": "fragment"}
_LOOPS = {"Pipelined", "serial", "Serial", "Parallel", "unroll", "Unroll", "vectorized", "Vectorized", "grid",
          "Persistent", "range"}  # fmt: skip


class _Interpreter:
    def __init__(self, submission: Submission, case: Case, layout: GroupedLayout) -> None:
        self.submission = submission
        self.sizes = {
            "E": case.num_experts, "E+1": case.num_experts + 1, "H": case.hidden, "I": case.intermediate,
            "N": layout.num_rows, "P": layout.num_padded_rows, "P/128": len(layout.block_map),
        }  # fmt: skip
        self.found: list[Launch] = []
        self.launch: Launch | None = None  # the one being read
        self.nodes: list[Node] = []  # where its next statement goes
        self.pass_configs: dict[str, Any] = {}
        # Ways out of the function, the loop or the turn at hand that only run time takes, and where they part.
        self.returned: list[tuple[Any, ast.If | ast.For]] = []
        self.broken: list[tuple[dict[str, Any], ast.If | ast.For]] = []
        self.continued: list[tuple[dict[str, Any], ast.If | ast.For]] = []
        self.steps = 0
        self.depth = 0

    def run(self) -> list[Launch]:
        scope = _Scope()
        try:
            self.block(self.submission.tree.body, scope)
            entry = scope.get(ENTRY_POINT)
            if not isinstance(entry, _Function):
                raise SubmissionError(f"got no function {ENTRY_POINT} in {self.submission.name}, expected one")
            tensors = [
                Tensor(item.name, tuple(self.sizes[extent] for extent in item.shape), item.dtype) for item in ARGUMENTS
            ]
            self.call_function(entry, tensors, {})
        except RecursionError:
            raise self.lost(self.submission.tree.body[0], "it is nested too deeply") from None
        return self.found

    def lost(self, node: ast.AST, why: str) -> SubmissionError:
        return SubmissionError(
            f"{self.submission.name}, line {getattr(node, 'lineno', 1)}: cannot be followed by reading: {why}"
        )

    def step(self, node: ast.AST) -> None:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise self.lost(node, f"more than {_MOST_STEPS} statements, a loop may have no end")

    # ---- statements

    def block(self, body: Sequence[ast.stmt], scope: _Scope) -> None:
        for statement in body:
            self.step(statement)
            handler = getattr(self, "do_" + type(statement).__name__.lower(), None)
            if handler is not None:
                handler(statement, scope)

    def do_import(self, node: ast.Import, scope: _Scope) -> None:
        for alias in node.names:
            path = alias.name if alias.asname else alias.name.partition(".")[0]
            scope.vars[alias.asname or path] = _Module(path)

    def do_importfrom(self, node: ast.ImportFrom, scope: _Scope) -> None:
        for alias in node.names:
            scope.vars[alias.asname or alias.name] = _Module(f"{node.module}.{alias.name}")

    def do_functiondef(self, node: ast.FunctionDef, scope: _Scope) -> None:
        function = _Function(node, scope)
        for decorator in node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            target = self.value(call.func if call else decorator, scope)
            name = target.last if isinstance(target, _Module) else ""
            if name in ("jit", "lazy_jit"):
                function.kind = "builder"
                keywords = call.keywords if call else []
                configs = [self.value(item.value, scope) for item in keywords if item.arg == "pass_configs"]
                function.pass_configs = _config_names(configs[0]) if configs else {}
            elif name in ("prim_func", "macro"):
                function.kind = name
        scope.vars[node.name] = function

    def do_assign(self, node: ast.Assign, scope: _Scope) -> None:
        before = len(self.nodes)
        value = self.value(node.value, scope)
        for target in node.targets:
            if self.launch is not None and isinstance(target, ast.Subscript):
                if len(self.nodes) == before:
                    self.nodes.append(self.accesses([node], scope, 1))
            else:
                self.bind(target, value, scope, node.lineno)
        # A scalar read from shared memory keeps the buffer alive.
        if self.launch is not None and len(self.nodes) == before:
            self.note_reads(node.value, scope)

    def do_annassign(self, node: ast.AnnAssign, scope: _Scope) -> None:
        if node.value is not None:
            self.bind(node.target, self.value(node.value, scope), scope, node.lineno)

    def do_augassign(self, node: ast.AugAssign, scope: _Scope) -> None:
        if self.launch is not None and isinstance(node.target, ast.Subscript):
            self.nodes.append(self.accesses([node], scope, 1))
            return
        value = self.binary(type(node.op), self.value(node.target, scope), self.value(node.value, scope), node)
        self.bind(node.target, value, scope, node.lineno)

    def bind(self, target: ast.expr, value: Any, scope: _Scope, line: int) -> None:
        if isinstance(target, ast.Name):
            if isinstance(value, Buffer) and not value.name:
                value.name = target.id
            scope.vars[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            values = list(value) if isinstance(value, (tuple, list)) else None
            for position, item in enumerate(target.elts):
                if values is not None and position < len(values) and not isinstance(item, ast.Starred):
                    self.bind(item, values[position], scope, line)
                else:
                    why = value if isinstance(value, Unknown) else Unknown(f"line {line} unpacks what cannot be read")
                    self.bind(item.value if isinstance(item, ast.Starred) else item, why, scope, line)
        elif isinstance(target, ast.Subscript):
            box = self.value(target.value, scope)
            key = self.value(target.slice, scope)
            if isinstance(box, (dict, list)) and _hashable(key):
                try:
                    box[key] = value
                except (IndexError, TypeError):
                    raise self.lost(target, f"`{ast.unparse(target)}` cannot be assigned to") from None

    def do_expr(self, node: ast.Expr, scope: _Scope) -> None:
        before = len(self.nodes)
        self.value(node.value, scope)
        if self.launch is not None and len(self.nodes) == before and not self.is_hint(node.value, scope):
            self.note_reads(node.value, scope)

    def do_return(self, node: ast.Return, scope: _Scope) -> None:
        raise _ReturnSignal(self.value(node.value, scope) if node.value else None)

    def do_break(self, node: ast.Break, scope: _Scope) -> None:
        if self.launch is None:
            raise _BreakSignal

    def do_continue(self, node: ast.Continue, scope: _Scope) -> None:
        if self.launch is None:
            raise _ContinueSignal

    def once(self, body: Sequence[ast.stmt], scope: _Scope) -> bool:
        """One turn of a loop of the host; False if it ended the loop."""
        outer, self.continued = self.continued, []
        try:
            self.block(body, scope)
        except _ContinueSignal:
            pass
        except _BreakSignal:
            if not self.continued:
                return False
            found, node = self.continued.pop()
            self.broken.append((scope.vars, node))
            scope.vars = found
        finally:
            continued, self.continued = self.continued, outer
        self.join(continued, scope)
        return True

    def do_if(self, node: ast.If, scope: _Scope) -> None:
        test = self.value(node.test, scope)
        if not isinstance(test, (Unknown, Tensor, Buffer, Region)):
            self.block(node.body if test else node.orelse, scope)
            return
        if self.launch is not None:
            self.note_reads(node.test, scope)
            branch = Branch(node.lineno, [], [])
            self.inside(branch.body, node.body, scope)
            self.inside(branch.orelse, node.orelse, scope)
            self.nodes.append(branch)
            return
        self.either(node, scope)

    def either(self, node: ast.If, scope: _Scope) -> None:
        """A host condition that only run time decides: follow both ways, keep what they agree on."""
        before = dict(scope.vars)
        going_on, broken, continued = [], [], []
        returned = []
        for body in (node.body, node.orelse):
            scope.vars = dict(before)
            try:
                self.block(body, scope)
                going_on.append((scope.vars, node))
            except _ReturnSignal as signal:
                returned.append(signal.value)
            except _BreakSignal:
                broken.append((scope.vars, node))
            except _ContinueSignal:
                continued.append((scope.vars, node))
        if len(returned) == 2:
            raise _ReturnSignal(self.agreed(returned, node))
        self.returned += [(value, node) for value in returned]
        # The way that goes on furthest is followed; one that ends the turn or the loop waits for where they meet again.
        if going_on:
            self.continued += continued
            self.broken += broken
            self.follow(going_on, scope)
        elif continued:
            self.broken += broken
            self.follow(continued, scope)
            raise _ContinueSignal
        else:
            self.follow(broken, scope)
            raise _BreakSignal

    def follow(self, ways: Sequence[tuple[dict[str, Any], ast.If | ast.For]], scope: _Scope) -> None:
        """Go on with what these ways agree on, at least one."""
        scope.vars = ways[0][0]
        self.join(ways[1:], scope)

    def join(self, ways: Sequence[tuple[dict[str, Any], ast.If | ast.For]], scope: _Scope) -> None:
        """Keep what a scope and other ways to the same place agree on."""
        for found, node in ways:
            missing = Unknown(f"line {node.lineno}: `{_asked(node)}` is known at run time only")
            scope.vars = {
                name: self.agreed([scope.vars.get(name, missing), found.get(name, missing)], node)
                for name in {**scope.vars, **found}
            }

    def agreed(self, values: list[Any], node: ast.If | ast.For) -> Any:
        first = values[0]
        if all(value is first or (_plain(value) and _plain(first) and value == first) for value in values):
            return first
        return Unknown(f"line {node.lineno}: depends on `{_asked(node)}`, which is known at run time only")

    def result(self, value: Any) -> Any:
        """What a function returns, if some of its ways out were only possible."""
        for other, node in self.returned:
            # A cache that cannot be read holds what was once built for it.
            built = [way for way in (value, other) if isinstance(way, (_Kernel, _Function, Tensor))]
            unread = any(isinstance(way, Unknown) for way in (value, other))
            value = built[0] if len(built) == 1 and unread else self.agreed([value, other], node)
        return value

    def do_for(self, node: ast.For, scope: _Scope) -> None:
        source = self.value(node.iter, scope)
        if self.launch is not None and not isinstance(source, (list, tuple)):
            self.device_loop(node, source, scope)
            return
        outer, self.broken = self.broken, []
        try:
            if isinstance(source, (range, list, tuple, dict, zip, enumerate, reversed, set)):
                self.turns(node, source, scope)
            else:
                self.perhaps(node, source, scope)
        finally:
            broken, self.broken = self.broken, outer
        self.join(broken, scope)

    def turns(self, node: ast.For, source: Any, scope: _Scope) -> None:
        """A loop of the host whose items are known."""
        for item in itertools.islice(source, _MOST_STEPS):
            self.bind(node.target, item, scope, node.lineno)
            if not self.once(node.body, scope):
                return
        self.block(node.orelse, scope)

    def perhaps(self, node: ast.For, source: Any, scope: _Scope) -> None:
        """A loop of the host whose items only run time knows: one turn, which may never come."""
        before = dict(scope.vars)
        why = source if isinstance(source, Unknown) else Unknown(f"`{ast.unparse(node.iter)}` cannot be read")
        self.bind(node.target, why, scope, node.lineno)
        try:
            self.once(node.body, scope)
        except _ReturnSignal as signal:
            self.returned.append((signal.value, node))
            scope.vars = before
            return
        # A name that only the loop binds is used by nobody whose loop has no turn.
        fresh = {name: value for name, value in scope.vars.items() if name not in before}
        self.join([({**before, **fresh}, node)], scope)

    def do_while(self, node: ast.While, scope: _Scope) -> None:
        if self.launch is None:
            outer, self.broken = self.broken, []
            try:
                test = self.value(node.test, scope)
                if isinstance(test, Unknown):
                    raise self.lost(node, f"`while {ast.unparse(node.test)}` depends on a value of run time")
                while test and not isinstance(test, Unknown) and self.once(node.body, scope):
                    test = self.value(node.test, scope)
            finally:
                broken, self.broken = self.broken, outer
            self.join(broken, scope)
            return
        trips = Unknown(f"line {node.lineno}: `while {ast.unparse(node.test)}` ends at run time")
        loop = Loop(node.lineno, trips, None, "", [])
        self.inside(loop.body, node.body, scope)
        self.nodes.append(loop)

    def do_try(self, node: ast.Try, scope: _Scope) -> None:
        self.block([*node.body, *node.orelse, *node.finalbody], scope)

    def do_with(self, node: ast.With, scope: _Scope) -> None:
        for item in node.items:
            frame = self.value(item.context_expr, scope)
            if isinstance(frame, _Frame) and frame.kind in ("Kernel", "ClusterKernel") and self.launch is None:
                self.kernel(node, frame, item.optional_vars, scope)
                return
            if item.optional_vars is not None:
                why = Unknown(f"`{ast.unparse(item.context_expr)}` cannot be read")
                self.bind(item.optional_vars, why, scope, node.lineno)
        self.block(node.body, scope)

    def kernel(self, node: ast.With, frame: _Frame, target: ast.expr | None, scope: _Scope) -> None:
        grid = frame.args[0] if len(frame.args) == 1 and isinstance(frame.args[0], (tuple, list)) else frame.args
        threads = frame.kwargs.get("threads", 128)
        if isinstance(threads, (tuple, list)):
            threads = product(threads)
        launch = Launch(
            node.lineno, tuple(_extent(extent) for extent in grid), _extent(threads), dict(self.pass_configs)
        )
        if target is not None:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    scope.vars[name.id] = Unknown(f"`{name.id}` is the index of a block")
        self.found.append(launch)
        self.launch = launch
        try:
            self.inside(launch.body, node.body, scope)
        finally:
            self.launch = None

    def inside(self, nodes: list[Node], body: Sequence[ast.stmt], scope: _Scope) -> None:
        """Follow statements of a launch and put what they do into ``nodes``."""
        outer, self.nodes = self.nodes, nodes
        try:
            self.block(body, scope)
        finally:
            self.nodes = outer

    def device_loop(self, node: ast.For, source: Any, scope: _Scope) -> None:
        for name in ast.walk(node.target):
            if isinstance(name, ast.Name):
                scope.vars[name.id] = Unknown(f"`{name.id}` counts a loop of the device")
        frame = source if isinstance(source, _Frame) else _Frame("range", [source], {})
        trips = self.trips(node, frame)
        if frame.kind in ("Parallel", "vectorized", "Vectorized"):
            self.nodes.append(self.accesses(node.body, scope, trips))
            return
        stages = frame.kwargs.get("num_stages", frame.args[2] if len(frame.args) > 2 else 0)
        pipelined = frame.kind == "Pipelined"
        unmodelled = ""
        if pipelined and any(frame.kwargs.get(key) for key in ("order", "stage", "sync", "group")):
            unmodelled = f"line {node.lineno}: T.Pipelined with an explicit order is not modelled"
        loop = Loop(node.lineno, trips, _number(stages) if pipelined else None, unmodelled, [])
        self.inside(loop.body, node.body, scope)
        self.nodes.append(loop)

    def trips(self, node: ast.For, frame: _Frame) -> int | Unknown:
        """How often the body of a device loop runs."""
        args = list(frame.args)
        if args and isinstance(args[0], range):
            return len(args[0])
        if frame.kind == "Persistent" and len(args) > 1:
            total = product(args[0]) if isinstance(args[0], (list, tuple)) else _number(args[0])
            args = [total, args[1]]
        numbers: list[int] = []
        for value in args:
            number = _number(value)
            if isinstance(number, Unknown):
                return Unknown(f"line {node.lineno}: `{ast.unparse(node.iter)}`: {number.reason}")
            numbers.append(number)
        if not numbers:
            return Unknown(f"line {node.lineno}: `{ast.unparse(node.iter)}` has no extent")
        if frame.kind == "Persistent":
            return -(-numbers[0] // max(1, numbers[1]))
        if frame.kind in ("grid", "Parallel", "vectorized", "Vectorized"):
            return product([max(0, number) for number in numbers])
        if len(numbers) == 1:
            return max(0, numbers[0])
        # T.Pipelined(start, stop, num_stages) has no step.
        step = numbers[2] if len(numbers) > 2 and frame.kind != "Pipelined" else 1
        return max(0, -(-(numbers[1] - numbers[0]) // step)) if step else 0

    # ---- what a statement touches

    def touched(self, node: ast.AST, scope: _Scope) -> list[Buffer | Tensor]:
        found: list[Buffer | Tensor] = []
        for name in ast.walk(node):
            if isinstance(name, ast.Name):
                value = scope.get(name.id)
                base = value.base if isinstance(value, Region) else value
                if isinstance(base, (Buffer, Tensor)) and not any(base is item for item in found):
                    found.append(base)
        return found

    def is_hint(self, node: ast.expr, scope: _Scope) -> bool:
        """Whether a call only tells the compiler something: it keeps no buffer alive."""
        target = self.value(node.func, scope) if isinstance(node, ast.Call) else None
        return isinstance(target, _Module) and target.last.startswith(("annotate_", "assume", "use_swizzle"))

    def note_reads(self, node: ast.expr, scope: _Scope) -> None:
        reads: list[Buffer | Tensor] = [item for item in self.touched(node, scope) if isinstance(item, Buffer)]
        if reads:
            self.nodes.append(Op(node.lineno, "other", reads))

    def accesses(self, body: Sequence[ast.stmt], scope: _Scope, times: int | Unknown) -> Op:
        """A loop nest over single elements: everything it reads and writes, as one statement."""
        op = Op(body[0].lineno, "other")
        pure = [True]
        self.elementwise(body, scope, times, op, pure)
        op.pure_copy = pure[0] and bool(op.moved) and bool(op.writes)
        return op

    def elementwise(
        self, body: Sequence[ast.stmt], scope: _Scope, times: int | Unknown, op: Op, pure: list[bool]
    ) -> None:
        for node in body:
            if isinstance(node, ast.For):
                frame = self.value(node.iter, scope)
                frame = frame if isinstance(frame, _Frame) else _Frame("range", [frame], {})
                self.elementwise(node.body, scope, product((times, self.trips(node, frame))), op, pure)
            elif isinstance(node, ast.If):
                self.reads_of(node.test, scope, times, op)
                self.elementwise(node.body, scope, times, op, pure)
                self.elementwise(node.orelse, scope, times, op, pure)
            elif isinstance(node, (ast.Assign, ast.AugAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    written = self.touched(target.value, scope) if isinstance(target, ast.Subscript) else []
                    op.writes += [item for item in written if not any(item is w for w in op.writes)]
                    if isinstance(target, ast.Subscript):
                        self.reads_of(target.slice, scope, times, op)
                        to_shared = any(isinstance(w, Buffer) and w.scope.startswith("shared") for w in written)
                        pure[0] &= to_shared and isinstance(node, ast.Assign) and self.is_load(node.value, scope)
                self.reads_of(node.value, scope, times, op)
                if isinstance(node, ast.AugAssign):
                    self.reads_of(node.target, scope, times, op)
            elif isinstance(node, (ast.Expr, ast.AnnAssign)) and node.value is not None:
                self.reads_of(node.value, scope, times, op)
                pure[0] = False

    def is_load(self, node: ast.expr, scope: _Scope) -> bool:
        """Whether an expression is one element of a tensor, cast or not."""
        while isinstance(node, ast.Call) and len(node.args) in (1, 2):
            node = node.args[-1]
        return isinstance(node, ast.Subscript) and any(
            isinstance(item, Tensor) for item in self.touched(node.value, scope)
        )

    def reads_of(self, node: ast.expr, scope: _Scope, times: int | Unknown, op: Op) -> None:
        op.reads += [item for item in self.touched(node, scope) if not any(item is r for r in op.reads)]
        for part in ast.walk(node):
            if isinstance(part, ast.Subscript):
                for item in self.touched(part.value, scope):
                    if isinstance(item, Tensor):
                        op.moved[item.name] = _sum(op.moved.get(item.name, 0), times)

    # ---- expressions

    def value(self, node: ast.expr, scope: _Scope) -> Any:
        handler = getattr(self, "value_" + type(node).__name__.lower(), None)
        return handler(node, scope) if handler else Unknown(f"`{ast.unparse(node)}` is not read")

    def value_constant(self, node: ast.Constant, scope: _Scope) -> Any:
        return node.value

    def value_name(self, node: ast.Name, scope: _Scope) -> Any:
        value = scope.get(node.id)
        return value.value if isinstance(value, _Symbol) and value.value is not None else value

    def value_tuple(self, node: ast.Tuple, scope: _Scope) -> Any:
        items: list[Any] = []
        for item in node.elts:
            if isinstance(item, ast.Starred):
                value = self.value(item.value, scope)
                readable = isinstance(value, (tuple, list, range)) and not _too_large(value)
                items += list(value) if readable else [Unknown("a starred value")]
            else:
                items.append(self.value(item, scope))
        return tuple(items)

    def value_list(self, node: ast.List, scope: _Scope) -> Any:
        return list(self.value_tuple(ast.Tuple(node.elts, ast.Load()), scope))

    def value_set(self, node: ast.Set, scope: _Scope) -> Any:
        items = self.value_tuple(ast.Tuple(node.elts, ast.Load()), scope)
        return set(items) if _plain(items) else Unknown(f"`{ast.unparse(node)}` is not read")

    def value_dict(self, node: ast.Dict, scope: _Scope) -> Any:
        pairs = [(self.value(k, scope), self.value(v, scope)) for k, v in zip(node.keys, node.values, strict=True) if k]
        return {key: value for key, value in pairs if _hashable(key)}

    def value_joinedstr(self, node: ast.JoinedStr, scope: _Scope) -> Any:
        parts = [self.value(v.value if isinstance(v, ast.FormattedValue) else v, scope) for v in node.values]
        if not all(_plain(part) and not _too_large(part) for part in parts):
            return Unknown(f"`{ast.unparse(node)}` is not read")
        return "".join(map(str, parts))

    def value_namedexpr(self, node: ast.NamedExpr, scope: _Scope) -> Any:
        value = self.value(node.value, scope)
        self.bind(node.target, value, scope, node.lineno)
        return value

    def value_lambda(self, node: ast.Lambda, scope: _Scope) -> Any:
        return _Function(node, scope)

    def value_unaryop(self, node: ast.UnaryOp, scope: _Scope) -> Any:
        value = self.value(node.operand, scope)
        if isinstance(node.op, ast.Not):
            return value if isinstance(value, Unknown) else not value
        if isinstance(value, (int, float)):
            return -value if isinstance(node.op, ast.USub) else +value if isinstance(node.op, ast.UAdd) else ~int(value)
        return value if isinstance(value, Unknown) else Unknown(f"`{ast.unparse(node)}` is known at run time only")

    def value_binop(self, node: ast.BinOp, scope: _Scope) -> Any:
        return self.binary(type(node.op), self.value(node.left, scope), self.value(node.right, scope), node)

    def binary(self, kind: type, left: Any, right: Any, node: ast.AST) -> Any:
        for side in (left, right):
            if isinstance(side, Unknown):
                return side
        if not (_plain(left) and _plain(right)) and not (isinstance(left, (list, tuple)) and kind is ast.Add):
            return Unknown(f"`{ast.unparse(node)}` is known at run time only")
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        # A stranger's file must not be able to ask for a number or a text that fills memory.
        if kind in (ast.Pow, ast.LShift) and not (numbers and abs(left) < 2**32 and abs(right) <= 64):
            return Unknown(f"`{ast.unparse(node)}` is too large")
        if kind is ast.Mult and not numbers and max(_length(left), 1) * max(_length(right), 1) > _MOST_ITEMS:
            return Unknown(f"`{ast.unparse(node)}` is too large")
        try:
            result = _BINARY[kind](left, right)
            return Unknown(f"`{ast.unparse(node)}` is too large") if _too_large(result) else result
        except (ArithmeticError, TypeError, ValueError, KeyError) as error:
            return Unknown(f"`{ast.unparse(node)}` fails: {error}")

    def value_boolop(self, node: ast.BoolOp, scope: _Scope) -> Any:
        stop = isinstance(node.op, ast.Or)
        unknown = None
        value: Any = not stop
        for item in node.values:
            value = self.value(item, scope)
            if isinstance(value, Unknown):
                unknown = value
            elif bool(value) is stop:
                return value
        return unknown if unknown is not None else value

    def value_compare(self, node: ast.Compare, scope: _Scope) -> Any:
        left = self.value(node.left, scope)
        for kind, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.value(right_node, scope)
            for side in (left, right):
                if isinstance(side, Unknown):
                    return side
            if isinstance(left, (Buffer, Region)) or isinstance(right, (Buffer, Region)):
                return Unknown(f"`{ast.unparse(node)}` is known at run time only")
            try:
                if not _COMPARE[type(kind)](_comparable(left), _comparable(right)):
                    return False
            except TypeError:
                return Unknown(f"`{ast.unparse(node)}` compares what cannot be read")
            left = right
        return True

    def value_ifexp(self, node: ast.IfExp, scope: _Scope) -> Any:
        test = self.value(node.test, scope)
        if isinstance(test, Unknown):
            first, second = self.value(node.body, scope), self.value(node.orelse, scope)
            same = _plain(first) and _plain(second) and first == second
            return first if same else Unknown(f"`{ast.unparse(node)}` depends on a value of run time")
        return self.value(node.body if test else node.orelse, scope)

    def comprehension(self, node: Any, scope: _Scope) -> list[Any] | Unknown:
        results: list[Any] = []
        inner = _Scope(scope)

        def descend(depth: int) -> Unknown | None:
            if depth == len(node.generators):
                element = node.elt if hasattr(node, "elt") else ast.Tuple([node.key, node.value], ast.Load())
                results.append(self.value(element, inner))
                return None
            generator = node.generators[depth]
            source = self.value(generator.iter, inner)
            if not isinstance(source, (list, tuple, range, dict, zip, enumerate, set, reversed)):
                return Unknown(f"`{ast.unparse(generator.iter)}` is known at run time only")
            for item in itertools.islice(source, _MOST_STEPS):
                self.step(generator.iter)
                self.bind(generator.target, item, inner, generator.iter.lineno)
                tests = [self.value(test, inner) for test in generator.ifs]
                if all(test and not isinstance(test, Unknown) for test in tests):
                    unknown = descend(depth + 1)
                    if unknown is not None:
                        return unknown
            return None

        unknown = descend(0)
        return results if unknown is None else unknown

    value_listcomp = value_generatorexp = comprehension

    def value_setcomp(self, node: ast.SetComp, scope: _Scope) -> Any:
        items = self.comprehension(node, scope)
        return set(items) if isinstance(items, list) and _plain(items) else Unknown("a set that is not read")

    def value_dictcomp(self, node: ast.DictComp, scope: _Scope) -> Any:
        items = self.comprehension(node, scope)
        return items if isinstance(items, Unknown) else {key: value for key, value in items if _hashable(key)}

    def value_attribute(self, node: ast.Attribute, scope: _Scope) -> Any:
        base = self.value(node.value, scope)
        if isinstance(base, _Module):
            return _Module(f"{base.path}.{node.attr}")
        if isinstance(base, (Tensor, Buffer)):
            known = {"shape": base.shape, "dtype": base.dtype, "ndim": len(base.shape), "is_cuda": True}
            return known.get(node.attr, Unknown(f"`{ast.unparse(node)}` is known at run time only"))
        return base if isinstance(base, Unknown) else Unknown(f"`{ast.unparse(node)}` is not read")

    def value_slice(self, node: ast.Slice, scope: _Scope) -> Any:
        parts = [self.value(part, scope) if part else None for part in (node.lower, node.upper, node.step)]
        unknown = next((part for part in parts if isinstance(part, Unknown)), None)
        return unknown if unknown is not None else slice(*parts)

    def value_subscript(self, node: ast.Subscript, scope: _Scope) -> Any:
        base = self.value(node.value, scope)
        index = self.value(node.slice, scope)
        if isinstance(base, (Buffer, Tensor)):
            return Region(base, self.extent(base, node.slice, scope))
        if isinstance(base, _Module):
            # T.Tensor[(rows, columns), "float16"] is another spelling of a call.
            parts = index if isinstance(index, tuple) else (index,)
            return self.known_call(base, list(parts), {}, node)
        if isinstance(base, Unknown) or isinstance(index, Unknown):
            return base if isinstance(base, Unknown) else index
        if isinstance(base, (tuple, list, dict, str)):
            try:
                return base[index]
            except (KeyError, IndexError, TypeError):
                return Unknown(f"`{ast.unparse(node)}` does not exist")
        return Unknown(f"`{ast.unparse(node)}` is not read")

    def extent(self, base: Buffer | Tensor, index: ast.expr, scope: _Scope) -> int | Unknown:
        """Elements of a region: exact if every index is a full or constant slice or a single element."""
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        if not any(isinstance(part, ast.Slice) for part in parts):
            return Unknown("a start without an end")
        counts: list[Any] = []
        for position, extent in enumerate(base.shape):
            part = parts[position] if position < len(parts) else ast.Slice()
            if not isinstance(part, ast.Slice):
                counts.append(1)
                continue
            lower = self.value(part.lower, scope) if part.lower else 0
            upper = self.value(part.upper, scope) if part.upper else extent
            known = isinstance(lower, int) and isinstance(upper, int)
            counts.append(upper - lower if known else Unknown(f"`{ast.unparse(part)}` is known at run time only"))
        return product(counts)

    # ---- calls

    def value_call(self, node: ast.Call, scope: _Scope) -> Any:
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, scope)
            if not isinstance(owner, _Module):
                return self.method(owner, node, scope)
        target = self.value(node.func, scope)
        args = list(self.value_tuple(ast.Tuple(node.args, ast.Load()), scope))
        kwargs = self.keywords(node, scope)
        if isinstance(target, _Function):
            return self.call_function(target, args, kwargs)
        if isinstance(target, _Kernel):
            return self.call_kernel(target, args)
        if isinstance(target, _Module):
            return self.known_call(target, args, kwargs, node)
        if isinstance(target, Unknown):
            return target
        if target is len and len(args) == 1 and isinstance(args[0], Tensor) and args[0].shape:
            return args[0].shape[0]
        if callable(target):
            flat = [*args, *kwargs.values()]
            unknown = next((value for value in flat if isinstance(value, Unknown)), None)
            if unknown is not None:
                return unknown
            if target is not len and any(_too_large(value) for value in flat):
                return Unknown(f"`{ast.unparse(node)}` is too large")
            try:
                return target(*args, **kwargs)
            except (ArithmeticError, TypeError, ValueError) as error:
                return Unknown(f"`{ast.unparse(node)}` fails: {error}")
        return Unknown(f"`{ast.unparse(node)}` is not read")

    def keywords(self, node: ast.Call, scope: _Scope) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for item in node.keywords:
            value = self.value(item.value, scope)
            if item.arg:
                found[item.arg] = value
            elif isinstance(value, dict):
                found |= {str(key): part for key, part in value.items()}
        return found

    def method(self, owner: Any, node: ast.Call, scope: _Scope) -> Any:
        assert isinstance(node.func, ast.Attribute)
        name = node.func.attr
        args = [self.value(item, scope) for item in node.args]
        if isinstance(owner, Tensor):
            if name == "size":
                which = args[0] if args else self.keywords(node, scope).get("dim")
                if which is None:
                    return owner.shape
                inside = isinstance(which, int) and -len(owner.shape) <= which < len(owner.shape)
                return owner.shape[which] if inside else Unknown(f"`{ast.unparse(node)}` is no axis of {owner.name}")
            if name in ("numel", "nelement"):
                return product(owner.shape)
            if name in ("dim", "ndimension"):
                return len(owner.shape)
            if name == "element_size":
                bits = dtype_bits(owner.dtype)
                return bits if isinstance(bits, Unknown) else bits // 8
            if name in ("contiguous", "to", "cuda", "clone", "zero_"):
                return owner
        if isinstance(owner, str) and name == "join" and args and isinstance(args[0], (list, tuple)):
            parts = args[0]
            # Sizes first: a text of many long texts could fill memory.
            if all(isinstance(part, str) for part in parts) and sum(map(len, parts)) + len(owner) * len(parts) < (
                _MOST_ITEMS
            ):
                return owner.join(parts)
        if isinstance(owner, (dict, list, str, int, tuple)) and name in _METHODS:
            if any(_too_large(value) for value in (owner, *args)):
                return Unknown(f"`{ast.unparse(node)}` is too large")
            try:
                found = getattr(owner, name)(*args)
                return list(found) if name in ("items", "keys", "values") else found
            except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
                return Unknown(f"`{ast.unparse(node)}` fails: {error}")
        if isinstance(owner, _Kernel):
            return Unknown(f"`{ast.unparse(node)}` is known at run time only")
        if isinstance(owner, _Function) and owner.kind == "builder" and name in ("compile", "__call__"):
            return self.call_function(owner, args, self.keywords(node, scope))
        return owner if isinstance(owner, Unknown) else Unknown(f"`{ast.unparse(node)}` is known at run time only")

    def known_call(self, target: _Module, args: list[Any], kwargs: dict[str, Any], node: ast.expr) -> Any:
        name, root = target.last, target.path.partition(".")[0]
        if root in ("tilelang", "torch", "math") and name in _PURE:
            unknown = next((value for value in args if isinstance(value, Unknown)), None)
            if unknown is not None:
                return unknown
            try:
                return _PURE[name](*args)
            except (ArithmeticError, TypeError, ValueError):
                return Unknown(f"`{ast.unparse(node)}` is known at run time only")
        if root == "torch":
            if name in _MAKES_TENSOR and args:
                shape = args[0] if isinstance(args[0], (tuple, list)) else args
                dtype = kwargs.get("dtype", "float32")
                return Tensor(f"made at line {node.lineno}", tuple(shape), _dtype(dtype))
            if name.endswith("_like") and args and isinstance(args[0], Tensor):
                return Tensor(f"made at line {node.lineno}", args[0].shape, args[0].dtype)
            return Unknown(f"`{ast.unparse(node)}` is known at run time only")
        if name in ("dynamic", "symbolic", "Var", "var"):
            return _Symbol(str(args[0]) if args else "")
        if name == "Tensor" or name == "Buffer":
            shape = args[0] if args and isinstance(args[0], (tuple, list)) else args[:1]
            return _TensorSpec(tuple(shape))
        if name in ("Kernel", "ClusterKernel", *_LOOPS):
            return _Frame(name, args, kwargs)
        if name == "compile" and args and isinstance(args[0], _Function):
            return _Kernel(args[0], _config_names(kwargs.get("pass_configs", {})))
        if name.startswith("alloc_") and self.launch is not None:
            return self.allocate(name, args, kwargs, node)
        if self.launch is not None:
            return self.device_call(name, args, kwargs, node)
        return Unknown(f"`{ast.unparse(node)}` is known at run time only")

    def allocate(self, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.expr) -> Any:
        assert self.launch is not None
        if name not in ("alloc_shared", *_SCOPES):
            return Unknown(f"`{ast.unparse(node)}` is no array")
        shape = args[0] if args else kwargs.get("shape", ())
        dtype = _dtype(args[1] if len(args) > 1 else kwargs.get("dtype", "float32"))
        scope = _SCOPES.get(name, "shared.dyn")
        if name == "alloc_shared":
            scope = str(args[2] if len(args) > 2 else kwargs.get("scope", "shared.dyn"))
            scope = "shared" if dtype == "bool" else scope
        extents = shape if isinstance(shape, (tuple, list)) else (shape,)
        reasoned = tuple(
            Unknown(f"line {node.lineno}: `{ast.unparse(node)}`: {extent.reason}")
            if isinstance(extent, Unknown) else _extent(extent) for extent in extents
        )  # fmt: skip
        buffer = Buffer("", scope, reasoned, dtype, node.lineno)
        self.launch.buffers.append(buffer)
        self.nodes.append(Op(node.lineno, "alloc", allocates=buffer))
        return buffer

    def device_call(self, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.expr) -> Any:
        """A tile operator, or an expression of the device."""
        values = [*args, *kwargs.values()]
        places = [value.base if isinstance(value, Region) else value for value in values]
        places = [value for value in places if isinstance(value, (Buffer, Tensor))]
        result = Unknown(f"`{ast.unparse(node)}` is known at run time only")
        if not places:
            return result
        op = Op(node.lineno, "other", list(places), list(places))
        if name in ("copy", "async_copy", "tma_copy"):
            source = kwargs.get("src", args[0] if args else None)
            target = kwargs.get("dst", args[1] if len(args) > 1 else None)
            op = self.copy(source, target, node.lineno)
        elif name in ("gemm", "gemm_v1", "gemm_v2", "wgmma_gemm") and len(places) >= 3:
            op = Op(node.lineno, "gemm", places[:3], [places[2]])
            op.flops = _gemm_flops(args, kwargs)
        elif name in ("clear", "fill"):
            op = Op(node.lineno, "other", [], places[:1])
        elif name.startswith(("reduce", "cumsum", "cummax")):
            op.kind = "reduce"
        elif name not in _TILE_CALLS and not name.startswith(("atomic_", "finalize_")):
            # T.if_then_else(i < n, A[i], 0) and the like: an expression, whose statement notes what it reads.
            return result
        self.nodes.append(op)
        return result

    def copy(self, source: Any, target: Any, line: int) -> Op:
        op = Op(line, "copy")
        ends = []
        for value, places in ((source, op.reads), (target, op.writes)):
            base = value.base if isinstance(value, Region) else value
            if isinstance(base, (Buffer, Tensor)):
                places.append(base)
            ends.append((base, value))
        (read, read_value), (written, written_value) = ends
        if isinstance(read, Tensor):
            counts = [v.elements if isinstance(v, Region) else product(v.shape) for v in (written_value, read_value)
                      if isinstance(v, (Region, Buffer, Tensor))]  # fmt: skip
            known = [count for count in counts if isinstance(count, int)]
            op.moved[read.name] = known[0] if known else Unknown(f"line {line}: the size of a copy is not constant")
            op.pure_copy = isinstance(written, Buffer) and written.scope.startswith("shared")
        return op

    def call_function(self, function: _Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise self.lost(function.node, "functions call each other too deeply")
        try:
            if function.kind == "builder" and self.launch is None:
                outer, self.pass_configs = self.pass_configs, function.pass_configs
                try:
                    built = self.body_of(function, args, kwargs)
                finally:
                    self.pass_configs = outer
                return built if isinstance(built, (Unknown, type(None))) else _Kernel(built, function.pass_configs)
            if function.kind == "prim_func":
                return self.call_kernel(_Kernel(function, self.pass_configs), args)
            return self.body_of(function, args, kwargs)
        finally:
            self.depth -= 1

    def body_of(self, function: _Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
        scope = _Scope(function.scope)
        node = function.node
        names = [item.arg for item in (*node.args.posonlyargs, *node.args.args)]
        defaults = dict(zip(names[len(names) - len(node.args.defaults) :], node.args.defaults, strict=True))
        defaults |= {
            item.arg: default
            for item, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            if default is not None
        }
        for name, default in defaults.items():
            scope.vars[name] = self.value(default, function.scope)
        scope.vars |= dict(zip(names, args, strict=False))
        if node.args.vararg:
            scope.vars[node.args.vararg.arg] = tuple(args[len(names) :])
        extra = {key: value for key, value in kwargs.items() if key in names or key in defaults or not node.args.kwarg}
        scope.vars |= extra
        if node.args.kwarg:
            scope.vars[node.args.kwarg.arg] = {key: value for key, value in kwargs.items() if key not in extra}
        if isinstance(node, ast.Lambda):
            return self.value(node.body, scope)
        outer, self.returned = self.returned, []
        try:
            self.block(node.body, scope)
            return self.result(None)
        except _ReturnSignal as signal:
            return self.result(signal.value)
        finally:
            self.returned = outer

    def call_kernel(self, kernel: _Kernel, args: list[Any]) -> Any:
        function = kernel.func[0] if isinstance(kernel.func, (tuple, list)) and kernel.func else kernel.func
        if not isinstance(function, _Function) or isinstance(function.node, ast.Lambda):
            return Unknown("a kernel that cannot be read")
        for parameter, value in zip(function.node.args.args, args, strict=False):
            spec = self.value(parameter.annotation, function.scope) if parameter.annotation else None
            if isinstance(spec, _TensorSpec) and isinstance(value, Tensor):
                for extent, actual in zip(spec.shape, value.shape, strict=False):
                    if isinstance(extent, _Symbol) and isinstance(actual, int):
                        extent.value = actual
        outer, self.pass_configs = self.pass_configs, kernel.pass_configs
        try:
            return self.body_of(function, args, {})
        finally:
            self.pass_configs = outer


#: Tile operators that are statements; any other call inside a launch is an expression or a hint.
_TILE_CALLS = {"transpose", "im2col", "c2d_im2col", "view", "reshape", "ptx_mma", "store",
               "mma", "print"}  # fmt: skip


def _asked(node: ast.If | ast.For) -> str:
    """What decides at run time."""
    return ast.unparse(node.test if isinstance(node, ast.If) else node.iter)


def _plain(value: Any) -> bool:
    """Whether a value is a plain number, text or container of such."""
    if isinstance(value, (tuple, list)):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, (int, float, str, bool, range))


def _hashable(value: Any) -> bool:
    # A key may hold what only run time knows, such as a device's index: it still equals itself.
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _comparable(value: Any) -> Any:
    # dtypes and devices are compared by name: torch.float16 against tensor.dtype.
    return value.last if isinstance(value, _Module) else value


def _too_large(value: Any) -> bool:
    """Whether a value of a stranger's file could grow until it fills memory."""
    if isinstance(value, int):
        return value.bit_length() > _MOST_BITS
    if isinstance(value, range):
        return abs(value.stop - value.start) > _MOST_ITEMS  # its len() fails beyond 2**63
    return isinstance(value, (str, tuple, list, dict, set)) and len(value) > _MOST_ITEMS


def _length(value: Any) -> int:
    """How much a factor of a product multiplies: items of a sequence, or the number itself."""
    if isinstance(value, (str, tuple, list)):
        return len(value)
    return abs(value) if isinstance(value, int) else 1


def _number(value: Any) -> int | Unknown:
    if isinstance(value, _Symbol):
        value = value.value if value.value is not None else Unknown(f"T.dynamic({value.name!r}) is not bound yet")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or int(value) != value:
        return value if isinstance(value, Unknown) else Unknown(f"{value!r} is no whole number")
    return int(value)


def _extent(value: Any) -> int | Unknown:
    """A size of a grid, a block or a tile."""
    number = _number(value)
    if isinstance(number, Unknown) or 0 < number < _EXTENTS:
        return number
    return Unknown(f"{number} is no size, expected 1 or more" if number <= 0 else "it is too large for a size")


def _sum(left: int | Unknown, right: int | Unknown) -> int | Unknown:
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        return left if isinstance(left, Unknown) else right
    return left + right


def _dtype(value: Any) -> str:
    return value.last if isinstance(value, _Module) else str(value)


def _config_names(configs: Any) -> dict[str, Any]:
    if not isinstance(configs, dict):
        return {}
    names = {(key.last if isinstance(key, _Module) else str(key)): value for key, value in configs.items()}
    return {name.lower().replace("tl.", "tl_").replace(".", "_"): value for name, value in names.items()}


def _gemm_flops(args: list[Any], kwargs: dict[str, Any]) -> int | Unknown:
    """2 * M * N * K of ``T.gemm(a, b, c)``."""
    whole: list[Buffer | Tensor | None] = [item if isinstance(item, (Buffer, Tensor)) else None for item in args[:3]]
    result = args[2].base if isinstance(args[2], Region) else args[2]
    reduced: Any = Unknown("the reduction length of a gemm on parts of buffers is not known")
    if whole[0] is not None and len(whole[0].shape) >= 2:
        reduced = whole[0].shape[-2 if kwargs.get("transpose_A", False) else -1]
    elif whole[1] is not None and len(whole[1].shape) >= 2:
        reduced = whole[1].shape[-1 if kwargs.get("transpose_B", False) else -2]
    return product((2, *result.shape[-2:], reduced))
