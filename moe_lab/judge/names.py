"""What the names of a submission may stand for, read from its text in time that grows with its length only.

Marks of an expression say what it *may* be, since no branch and no order is followed: a library's dotted name
(``tilelang.language.copy``, ``builtins.len``), the argument of ``run_kernel`` whose values it carries (``@out``, or
``@fresh`` for a new tensor), a constant (``=2``), a container that outlives the call (``store:``), or ``identity:`` for
what tells one tensor from another. What a kernel really does is read from what TileLang makes of it.
"""

import ast
import itertools
import re
from collections import defaultdict
from typing import TypeAlias

from moe_lab.problem.contract import ENTRY_POINT

Function: TypeAlias = ast.FunctionDef | ast.Lambda
Marks: TypeAlias = frozenset[str]

_NONE: Marks = frozenset()
#: How often marks flow through the file: a name that is used above its definition needs one round more.
_ROUNDS = 6
#: How many marks an expression keeps, and how long a library's name may grow: ``a = a.b`` has no end.
_MAX_MARKS, _MAX_DOTS = 24, 12
#: What a tensor tells without its values, and what tells one tensor from another.
_FACTS = frozenset({"shape", "dtype", "device", "ndim", "numel", "size", "is_cuda", "dim", "stride"})
_IDENTITY = frozenset({"id", "hash", "item", "tolist", "data_ptr", "sum"})
_CREATES = re.compile(r"torch\.((zeros|ones|empty|full|rand|randn)(_like)?|randint|arange|linspace|eye|diag|tensor)")
#: Expressions that may stand for whatever stands in them.
_ONE_OF = (
    ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.Starred, ast.Tuple, ast.ListComp, ast.SetComp, ast.GeneratorExp,
)  # fmt: skip


class Scope:
    """The module or one function."""

    def __init__(self, node: ast.Module | Function, parent: "Scope | None" = None) -> None:
        self.node = node
        self.chain: list[Scope] = [self, *(parent.chain if parent else [])]  # this scope and those around it
        self.names: dict[str, Marks] = {}  # that are bound here
        self.globals: set[str] = set()  # names that a ``global`` statement hands to the module

    def home(self, name: str) -> "Scope":
        """The scope in which an assignment binds a name."""
        return self.chain[-1 if name in self.globals else 0]

    def owner(self, name: str) -> "Scope | None":
        """The scope that binds a name seen from here; None for a built-in or an unknown name."""
        return next((scope for scope in self.home(name).chain if name in scope.names), None)


class Names:
    """Scopes of one module and the marks of its expressions; the tree is not changed."""

    def __init__(self, tree: ast.Module) -> None:
        self.module = Scope(tree)
        self.nodes: list[tuple[ast.AST, Scope]] = []  # every node with the scope that evaluates it
        self.scopes: dict[ast.AST, Scope] = {tree: self.module}
        self.annotated: set[ast.AST] = set()  # nodes of annotations, which nobody evaluates or TileLang does
        self._functions: dict[str, list[Function]] = defaultdict(list)
        self._flows: list[tuple[Scope, str, ast.expr, Scope]] = []  # a name, its scope, a value of it and that one's
        self._marks: dict[ast.AST, Marks] = {}
        self._visit(tree, self.module)
        # What a call may give each parameter of a function of the file.
        for call, scope in [(node, scope) for node, scope in self.nodes if isinstance(node, ast.Call)]:
            placed = [*itertools.takewhile(lambda value: not isinstance(value, ast.Starred), call.args)]
            for function in self._functions.get(getattr(call.func, "id", ""), ()):
                known = [parameter.arg for parameter in parameters(function)]
                given = [*zip(known, placed, strict=False), *((word.arg, word.value) for word in call.keywords)]
                self._flows += [(self.scopes[function], name, value, scope) for name, value in given if name in known]
        for _ in range(_ROUNDS):
            self._marks = {}
            for home, name, value, scope in self._flows:
                # Libraries first, constants last.
                marks = sorted(home.names[name] | self.marks(value, scope), reverse=True)
                home.names[name] = frozenset(marks[:_MAX_MARKS])
        self._marks = {}
        self.kernels = self._find_kernels()  # scopes that TileLang traces and the sandbox leaves alone

    # -- scopes and bindings -----------------------------------------------------------------------------------------

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        self.nodes.append((node, scope))
        self._bind(node, scope)
        for annotation in filter(None, (getattr(node, "annotation", None), getattr(node, "returns", None))):
            self.annotated.update(ast.walk(annotation))
        if not isinstance(node, Function):
            for child in ast.iter_child_nodes(node):
                self._visit(child, scope)
            return
        inner = self.scopes[node] = Scope(node, scope)
        name, arguments, listed = getattr(node, "name", ""), node.args, parameters(node)
        self._functions[name].append(node)
        entry = name == ENTRY_POINT and scope is self.module
        inner.names |= {item.arg: frozenset({f"@{item.arg}"} if entry else ()) for item in listed}
        pairs = [*zip([*arguments.posonlyargs, *arguments.args][::-1], arguments.defaults[::-1], strict=False)]
        for item, default in [*pairs, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]:
            self._flows += [(inner, item.arg, default, scope)] if default else []
        inside = {*listed, *([node.body] if isinstance(node, ast.Lambda) else node.body)}
        for child in [*ast.iter_child_nodes(arguments), *ast.iter_child_nodes(node)]:
            if child is not arguments:
                self._visit(child, inner if child in inside else scope)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    root = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._add(scope, alias.asname or root, root)
            case ast.ImportFrom(names=names, module=module, level=level):
                for alias in names:
                    self._add(scope, alias.asname or alias.name, f"{'.' * level}{module or ''}.{alias.name}")
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
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
                | ast.comprehension(target=target, iter=value)
                | ast.withitem(optional_vars=ast.expr() as target, context_expr=value)
            ):
                self._bind_target(target, value, scope)

    def _add(self, scope: Scope, name: str, *marks: str) -> None:
        names = scope.home(name).names
        names[name] = names.get(name, _NONE) | set(marks)

    def _bind_target(self, target: ast.AST, value: ast.expr, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            self._add(scope, target.id)
            self._flows.append((scope.home(target.id), target.id, value, scope))
        elif isinstance(target, (ast.Tuple, ast.List)):
            given: list[ast.expr] = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            pairs = len(given) == len(target.elts) and not any(isinstance(e, ast.Starred) for e in target.elts + given)
            for item, part in zip(target.elts, given if pairs else [value] * len(target.elts), strict=True):
                self._bind_target(item, part, scope)
        elif isinstance(target, ast.Starred):
            self._bind_target(target.value, value, scope)

    # -- marks -------------------------------------------------------------------------------------------------------

    def marks(self, node: ast.AST, scope: Scope) -> Marks:
        """What an expression may stand for."""
        if node not in self._marks:
            self._marks[node] = self._marks_of(node, scope)
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
                found = _NONE if attribute in _FACTS else carried(marks)
                # torch that is reached through tilelang is torch.
                return found.union(re.sub(r"^tilelang\.(.*\.)?torch(?=\.|$)", "torch", name) for name in dotted)
            case ast.Subscript(value=value):
                return of(value) - {"store:"}
            case ast.BinOp() | ast.UnaryOp():
                return carried(of(*ast.iter_child_nodes(node)))
            case ast.List(elts=values) | ast.Set(elts=values) | ast.Dict(values=values):
                return of(*values) | ({"store:"} if scope is self.module else _NONE)
            case ast.Call(func=function, args=arguments):
                return self._result(function, of(function), of(*arguments))
            case ast.expr() if isinstance(node, _ONE_OF):
                return of(*ast.iter_child_nodes(node))
        return _NONE

    def _result(self, function: ast.expr, known: Marks, given: Marks) -> Marks:
        """The marks of what a call gives."""
        if any(_CREATES.fullmatch(mark) for mark in known):
            return frozenset({"@fresh"})
        if any(mark.startswith("torch.") for mark in known):
            return carried(given)
        last = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        found = carried(known) if last not in ("item", "tolist") else _NONE
        return found | {"identity:"} if last in _IDENTITY or "identity:" in given else found

    # -- answers -----------------------------------------------------------------------------------------------------

    def library(self, node: ast.AST, scope: Scope) -> list[str]:
        """Library names that an expression may stand for, such as ``["tilelang.language.Pipelined"]``."""
        return sorted(mark for mark in self.marks(node, scope) if is_library(mark))

    def tilelang(self, node: ast.AST, scope: Scope) -> set[str]:
        """Last parts of the TileLang names that an expression may stand for."""
        return {name.rpartition(".")[2] for name in self.library(node, scope) if name.startswith("tilelang.")}

    def decorators(self, function: ast.AST, scope: Scope) -> list[tuple[ast.expr, set[str]]]:
        """Each decorator, and the TileLang names that it may be."""
        nodes = getattr(function, "decorator_list", [])
        return [(node, self.tilelang(node.func if isinstance(node, ast.Call) else node, scope)) for node in nodes]

    def _find_kernels(self) -> set[Scope]:
        """Bodies of prim_funcs and macros, and jit functions that open a T.Kernel and hold no prim_func."""
        opens = {outer for node, scope in self.nodes if isinstance(node, ast.Call)
                 and "Kernel" in self.tilelang(node.func, scope) for outer in scope.chain}  # fmt: skip
        known = {
            scope: {name for _, names in self.decorators(node, scope.chain[:2][-1]) for name in names}
            for node, scope in self.scopes.items()
        }
        builders = {outer for scope, names in known.items() if "prim_func" in names for outer in scope.chain}
        return {
            scope for scope in known for outer in scope.chain
            if known[outer] & {"prim_func", "macro"} or ("jit" in known[outer] and outer in opens - builders)
        }  # fmt: skip


def is_library(mark: str) -> bool:
    """Whether a mark is the name of a library or of a part of it."""
    return mark[0] not in "@=" and ":" not in mark


def carried(marks: Marks) -> Marks:
    """The tensors among some marks."""
    return frozenset(mark for mark in marks if mark[0] == "@")


def parameters(function: Function) -> list[ast.arg]:
    """All parameters, ``*`` and ``**`` among them, in source order."""
    return [child for child in ast.iter_child_nodes(function.args) if isinstance(child, ast.arg)]
