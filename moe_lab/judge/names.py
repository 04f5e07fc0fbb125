"""What the names of a submission may stand for, read from its text in time that grows with its length only.

Each expression has a set of marks: a library's dotted name (``tilelang.language.Pipelined``, ``builtins.len``), the
argument of ``run_kernel`` whose values it carries (``@out``, or ``@fresh`` for a new tensor), a constant (``=2``), a
function of the file (``def:3``), a container that outlives the call (``store:CACHE``) or ``identity:`` for what tells
one tensor from another. Marks flow through assignments, containers, arguments and results of the file's own
functions, a few rounds over the whole file; no branch and no order is followed. So a mark says what a name *may* be:
what a kernel really does is read from what TileLang makes of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from moe_lab.problem.contract import ENTRY_POINT

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Marks: TypeAlias = frozenset[str]

_NONE: Marks = frozenset()
#: How often marks flow through the file: a helper of a helper needs one round more.
_ROUNDS = 6
#: How many marks an expression keeps, and how long a library's name may grow: ``a = a.b`` has no end.
_MAX_MARKS, _MAX_DOTS = 24, 12
#: What a tensor tells without its values, and what tells one tensor from another.
_FACTS = frozenset({"shape", "dtype", "device", "ndim", "numel", "size", "is_cuda", "dim", "stride"})
_IDENTITY = frozenset({"id", "hash", "item", "tolist", "data_ptr", "sum"})
_CREATES = re.compile(r"torch\.((zeros|ones|empty|full|rand|randn)(_like)?|randint|arange|linspace|eye|diag|tensor)")
_CONTAINERS = (ast.Dict, ast.List, ast.Set)


@dataclass(eq=False)
class Scope:
    """The module or one function."""

    node: ast.Module | Function
    parent: Scope | None  # None for the module
    number: int = 0  # of the function in the file
    names: dict[str, Marks] = field(default_factory=dict)  # that are bound here
    globals: set[str] = field(default_factory=set)  # names that a ``global`` statement hands to the module
    returned: list[ast.expr] = field(default_factory=list)
    gives: Marks = _NONE  # what a call may stand for

    def chain(self) -> Iterator[Scope]:
        """This scope and those around it."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def owner(self, name: str) -> Scope | None:
        """The scope that binds a name seen from here; None for a built-in or an unknown name."""
        homes = [*self.chain()][-1 if name in self.globals else 0 :]
        return next((scope for scope in homes if name in scope.names), None)


class Names:
    """Scopes of one module and the marks of its expressions.

    Args:
        tree: the parsed module; it is not changed.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.module = Scope(tree, None)
        self.nodes: list[tuple[ast.AST, Scope]] = []  # every node with the scope that evaluates it, in source order
        self.scopes: dict[ast.AST, Scope] = {tree: self.module}
        self.annotated: set[ast.AST] = set()  # nodes of annotations, which nobody evaluates or TileLang does
        self._functions: list[Scope] = []
        self._flows: list[tuple[Scope, str, ast.AST, Scope]] = []
        self._marks: dict[ast.AST, Marks] = {}
        stack: list[tuple[ast.AST, Scope]] = [(tree, self.module)]
        while stack:
            node, scope = stack.pop()
            self.nodes.append((node, scope))
            self._bind(node, scope)
            if isinstance(node, Function):
                stack += reversed([*self._enter(node, scope)])
            else:
                stack += reversed([(child, scope) for child in ast.iter_child_nodes(node)])
            annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
            if annotation is not None:
                self.annotated.update(ast.walk(annotation))
        self._flow()
        self.kernels = self._find_kernels()  # scopes that TileLang traces and the sandbox leaves alone

    # -- scopes and bindings -----------------------------------------------------------------------------------------

    def _enter(self, node: Function, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
        inner = self.scopes[node] = Scope(node, scope, len(self._functions))
        self._functions.append(inner)
        arguments = node.args
        for child in [*getattr(node, "decorator_list", []), *arguments.defaults, *filter(None, arguments.kw_defaults)]:
            yield child, scope
        entry = getattr(node, "name", "") == ENTRY_POINT and scope is self.module
        for parameter in parameters(node):
            inner.names[parameter.arg] = frozenset({f"@{parameter.arg}"}) if entry else _NONE
            yield parameter, inner
        positional = [*arguments.posonlyargs, *arguments.args]
        pairs = [*zip(reversed(positional), reversed(arguments.defaults), strict=False)]
        for parameter, default in [*pairs, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]:
            if default is not None:
                self._bind_target(ast.Name(parameter.arg), default, inner, scope)
        if isinstance(node, ast.Lambda):
            inner.returned.append(node.body)
            yield node.body, inner
        else:
            yield from ((child, scope) for child in filter(None, [node.returns]))
            yield from ((child, inner) for child in node.body)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    root = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._add(scope, alias.asname or root, root)
            case ast.ImportFrom(names=names, module=module, level=level):
                for alias in names:
                    self._add(scope, alias.asname or alias.name, f"{'.' * level}{module or ''}.{alias.name}")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self._add(scope, name, f"def:{len(self._functions)}")
            case ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                self._add(scope, name)
            case ast.Global(names=names):
                scope.globals.update(names)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind_target(target, value, scope)
            case ast.AugAssign(target=ast.Name() as target, op=op, value=value):
                self._bind_target(target, ast.BinOp(target, op, value), scope)
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.NamedExpr(target=target, value=value)
                | ast.For(target=target, iter=value)
                | ast.AsyncFor(target=target, iter=value)
                | ast.comprehension(target=target, iter=value)
                | ast.withitem(optional_vars=ast.expr() as target, context_expr=value)
            ):
                self._bind_target(target, value, scope)
            case ast.Return(value=ast.expr() as value):
                scope.returned.append(value)

    def _add(self, scope: Scope, name: str, *marks: str) -> None:
        home = self.module if name in scope.globals else scope
        home.names[name] = home.names.get(name, _NONE) | set(marks)

    def _bind_target(self, target: ast.AST, value: ast.expr, scope: Scope, origin: Scope | None = None) -> None:
        if isinstance(target, ast.Name):
            outlives = isinstance(value, _CONTAINERS) and (origin or scope is self.module)
            self._add(scope, target.id, *([f"store:{target.id}"] if outlives else []))
            home = self.module if target.id in scope.globals else scope
            self._flows.append((home, target.id, value, origin or scope))
        elif isinstance(target, (ast.Tuple, ast.List)):
            given: list[ast.expr] = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            pairs = len(given) == len(target.elts) and not any(isinstance(e, ast.Starred) for e in target.elts + given)
            for item, part in zip(target.elts, given if pairs else [value] * len(target.elts), strict=True):
                self._bind_target(item, part, scope)
        elif isinstance(target, ast.Starred):
            self._bind_target(target.value, value, scope)

    # -- marks -------------------------------------------------------------------------------------------------------

    def _flow(self) -> None:
        calls = [(node, scope) for node, scope in self.nodes if isinstance(node, ast.Call)]
        rounds, changed = 0, True
        while changed and rounds < _ROUNDS:
            self._marks, rounds, changed = {}, rounds + 1, False
            given = [(function, name, value, scope) for call, scope in calls
                     for function in self._called(self.marks(call.func, scope))
                     for name, value in _given(function.node, call)]  # fmt: skip
            for home, name, value, scope in [*self._flows, *given]:
                known = home.names[name]
                home.names[name] = _few(known | self.marks(value, scope))
                changed |= home.names[name] != known
            for function in self._functions:
                known = function.gives
                function.gives = _few(known.union(*(self.marks(value, function) for value in function.returned)))
                changed |= function.gives != known
        self._marks = {}

    def _called(self, marks: Marks) -> list[Scope]:
        return [self._functions[int(mark[4:])] for mark in sorted(marks) if mark.startswith("def:")]

    def marks(self, node: ast.AST, scope: Scope) -> Marks:
        """What an expression may stand for."""
        if node not in self._marks:
            self._marks[node] = _NONE  # what a value made from itself adds to itself
            self._marks[node] = _few(self._marks_of(node, scope))
        return self._marks[node]

    def _marks_of(self, node: ast.AST, scope: Scope) -> Marks:
        def of(*nodes: ast.AST) -> Marks:
            return _NONE.union(*(self.marks(inner, scope) for inner in nodes))

        match node:
            case ast.Constant(value=int() | float() | str() as value) if len(str(value)) < 40:
                return frozenset({f"={value}"})
            case ast.Name(id=name):
                owner = scope.owner(name)
                return frozenset({f"builtins.{name}"}) if owner is None else owner.names[name]
            case ast.Attribute(value=value, attr=attribute):
                marks = of(value)
                dotted = (f"{mark}.{attribute}" for mark in marks if is_library(mark) and mark.count(".") < _MAX_DOTS)
                # torch that is reached through tilelang is torch.
                found = frozenset(re.sub(r"^tilelang\.(.*\.)?torch(?=\.|$)", "torch", name) for name in dotted)
                return found | (carried(marks) if attribute not in _FACTS else _NONE)
            case ast.Subscript(value=value):
                return frozenset(mark for mark in of(value) if not mark.startswith("store:"))
            case ast.BinOp(left=left, right=right):
                return carried(of(left, right))
            case ast.UnaryOp(operand=value):
                return carried(of(value))
            case ast.IfExp(body=left, orelse=right):
                return of(left, right)
            case ast.NamedExpr(value=value) | ast.Starred(value=value):
                return of(value)
            case ast.ListComp(elt=value) | ast.SetComp(elt=value) | ast.GeneratorExp(elt=value):
                return of(value)
            case ast.Tuple(elts=values) | ast.List(elts=values) | ast.Set(elts=values):
                return of(*values)
            case ast.BoolOp(values=values) | ast.Dict(values=values):
                return of(*values)
            case ast.Lambda():
                return frozenset({f"def:{self.scopes[node].number}"})
            case ast.Call(func=function, args=arguments):
                return self._result(function, of(function), of(*arguments))
        return _NONE

    def _result(self, function: ast.expr, known: Marks, given: Marks) -> Marks:
        """The marks of what a call gives."""
        found = _NONE.union(*(own.gives for own in self._called(known)))
        if any(_CREATES.fullmatch(mark) for mark in known):
            return found | {"@fresh"}
        if any(mark.startswith("torch.") for mark in known):
            return found | carried(given)
        last = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if last in _IDENTITY or "identity:" in given:
            found |= {"identity:"}
        return found if last in ("item", "tolist") else found | carried(known)

    # -- answers -----------------------------------------------------------------------------------------------------

    def library(self, node: ast.AST, scope: Scope) -> list[str]:
        """Library names that an expression may stand for, such as ``["tilelang.language.Pipelined"]``."""
        return sorted(mark for mark in self.marks(node, scope) if is_library(mark))

    def tilelang(self, node: ast.AST, scope: Scope) -> set[str]:
        """Last parts of the TileLang names that an expression may stand for."""
        return {name.rpartition(".")[2] for name in self.library(node, scope) if name.startswith("tilelang.")}

    def decorators(self, function: ast.AST, scope: Scope) -> list[tuple[ast.expr, set[str]]]:
        """Each decorator, and the TileLang names that it may be."""
        return [
            (node, self.tilelang(node.func if isinstance(node, ast.Call) else node, scope))
            for node in getattr(function, "decorator_list", [])
        ]

    def _find_kernels(self) -> set[Scope]:
        """Bodies of prim_funcs and macros, and jit functions that open a T.Kernel and hold no prim_func."""
        opens = {outer for node, scope in self.nodes if isinstance(node, ast.Call)
                 and "Kernel" in self.tilelang(node.func, scope) for outer in scope.chain()}  # fmt: skip
        known = {
            scope: {name for _, names in self.decorators(scope.node, scope.parent or scope) for name in names}
            for scope in self._functions
        }
        builders = {outer for scope, names in known.items() if "prim_func" in names for outer in scope.chain()}
        kernels: set[Scope] = set()
        for scope, names in known.items():
            eager = "jit" in names and scope in opens and scope not in builders
            if names & {"prim_func", "macro"} or eager or scope.parent in kernels:
                kernels.add(scope)
        return kernels


def is_library(mark: str) -> bool:
    """Whether a mark is the name of a library or of a part of it."""
    return mark[0] not in "@=" and ":" not in mark


def carried(marks: Marks) -> Marks:
    """The tensors among some marks."""
    return frozenset(mark for mark in marks if mark[0] == "@")


def parameters(function: Function) -> list[ast.arg]:
    """All parameters, ``*`` and ``**`` among them, in source order."""
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return [parameter for parameter in listed if parameter is not None]


def _given(function: Function | ast.Module, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """What a call may give each parameter; ``*values`` may give it to every one that follows."""
    known = [parameter.arg for parameter in parameters(function)] if isinstance(function, Function) else []
    for index, value in enumerate(call.args):
        if isinstance(value, ast.Starred):
            # Only the tensors among them: which constant goes where is not known.
            yield from ((name, ast.UnaryOp(ast.UAdd(), value.value)) for name in known[index:])
        elif index < len(known):
            yield known[index], value
    yield from ((word.arg, word.value) for word in call.keywords if word.arg in known)


def _few(marks: Marks) -> Marks:
    if len(marks) <= _MAX_MARKS:
        return marks
    return frozenset(sorted(marks, key=lambda mark: (mark[0] == "=", mark))[:_MAX_MARKS])
