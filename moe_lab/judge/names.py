"""What a name in a submission may stand for, found in its text without running it.

The rules ask three questions of an expression: which dotted library name it may be (``P`` after
``from tilelang.language import Pipelined as P``), which constants it may hold (``stages`` of a builder called with 2),
and whether it is a tensor. All three follow assignments, imports, conditional expressions, literal containers,
default values and the call sites of the file's own functions. An answer that cannot be complete says so: a rule then
advises where it would otherwise refuse.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, TypeAlias

from moe_lab.problem.contract import ENTRY_POINT

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

#: How far a value is followed through names before the answer is called unknown.
_MAX_DEPTH = 24
#: How many values one expression may have before the answer is called unknown.
_MAX_VALUES = 64
#: How many expressions are looked at for one answer before it is called unknown: names fan out.
_MAX_STEPS = 2_000

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Div: operator.truediv, ast.USub: operator.neg, ast.UAdd: operator.pos,
    ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.Not: operator.not_,
}  # fmt: skip
_FOLDED: dict[str, Callable[..., Any]] = {"max": max, "min": min, "int": int, "abs": abs, "round": round}


@dataclass(eq=False)
class Scope:
    """The module or one function, and what its names are bound to.

    Attributes:
        node: the module, function or lambda.
        parent: the enclosing scope; None for the module.
        bindings: every binding of each name, in source order.
        globals: names that a ``global`` statement hands to the module.
    """

    node: ast.Module | FunctionNode
    parent: Scope | None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    globals: set[str] = field(default_factory=set)

    @property
    def module(self) -> Scope:
        """The outermost scope."""
        return self if self.parent is None else self.parent.module

    def owner(self, name: str) -> Scope | None:
        """The scope that binds a name seen from here; None for a built-in or an unknown name."""
        if name in self.globals:
            return self.module if name in self.module.bindings else None
        if name in self.bindings:
            return self
        return None if self.parent is None else self.parent.owner(name)


@dataclass(frozen=True)
class Binding:
    """One way a name gets its value.

    Attributes:
        kind: "import", "value" (an expression, or one item of it), "parameter", "function" or "unknown" (loop
            variables, with targets, unpacking that cannot be followed).
        dotted: the library name of an import.
        node: the expression, parameter or function.
        path: positions to take from the expression's value, for ``a, b = value``.
        scope: where the expression is evaluated.
    """

    kind: Literal["import", "value", "parameter", "function", "unknown"]
    dotted: str = ""
    node: ast.AST | None = None
    path: tuple[int, ...] = ()
    scope: Scope | None = None


@dataclass(frozen=True)
class Library:
    """A name of a library, such as ``tilelang.language.Pipelined``, or of a built-in, such as ``builtins.len``."""

    dotted: str


@dataclass(frozen=True)
class Definition:
    """Where a value comes from: a library name, a parameter that nothing is known of, or an expression in its scope."""

    node: Library | ast.AST
    scope: Scope


class Names:
    """Scopes of one module and the values that its expressions may have.

    Args:
        tree: the parsed module; it is not changed.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.module = Scope(tree, None)
        #: Every node with the scope that evaluates it, in source order.
        self.nodes: list[tuple[ast.AST, Scope]] = []
        self.scopes: dict[ast.AST, Scope] = {tree: self.module}
        #: Annotations are evaluated by nobody or by TileLang, so the rules treat them apart.
        self.annotations: set[ast.AST] = set()
        self._calls: dict[str, list[tuple[ast.Call, Scope]]] = {}
        self._returns: dict[Scope, list[ast.expr]] = {}
        self._answers: dict[ast.AST, tuple[list[Definition], bool]] = {}
        self._values: dict[ast.AST, tuple[set[Any], bool]] = {}
        self._steps: int | None = None
        self._escaped: set[str] = set()
        self._collect(tree)
        self._index_calls()

    # -- scopes ------------------------------------------------------------------------------------------------------

    def _collect(self, tree: ast.Module) -> None:
        stack: list[tuple[ast.AST, Scope]] = [(tree, self.module)]
        while stack:
            node, scope = stack.pop()
            self.nodes.append((node, scope))
            self._bind(node, scope)
            stack.extend(reversed(list(self._children(node, scope))))

    def _children(self, node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from ((child, scope) for child in ast.iter_child_nodes(node))
            return
        inner = Scope(node, scope)
        self.scopes[node] = inner
        arguments = node.args
        outside = [*getattr(node, "decorator_list", []), *arguments.defaults, *filter(None, arguments.kw_defaults)]
        yield from ((child, scope) for child in outside)
        for parameter in parameters(node):
            inner.bindings.setdefault(parameter.arg, []).append(Binding("parameter", node=parameter, scope=inner))
            if parameter.annotation is not None:
                self.annotations.add(parameter.annotation)
                yield parameter.annotation, scope
        returns = getattr(node, "returns", None)
        if returns is not None:
            self.annotations.add(returns)
            yield returns, scope
        yield from ((child, inner) for child in (node.body if isinstance(node.body, list) else [node.body]))

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        def add(name: str, binding: Binding) -> None:
            home = scope.module if name in scope.globals else scope
            home.bindings.setdefault(name, []).append(binding)

        match node:
            case ast.Import():
                for alias in node.names:
                    dotted = alias.name if alias.asname else alias.name.partition(".")[0]
                    add(alias.asname or dotted, Binding("import", dotted=dotted, node=node))
            case ast.ImportFrom():
                for alias in node.names:
                    dotted = f"{'.' * node.level}{node.module or ''}.{alias.name}"
                    add(alias.asname or alias.name, Binding("import", dotted=dotted, node=node))
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                add(node.name, Binding("function", node=node, scope=scope))
            case ast.Global():
                scope.globals.update(node.names)
            case ast.Assign():
                for target in node.targets:
                    self._bind_target(target, node.value, (), scope, add)
            case ast.AnnAssign() if node.value is not None:
                self._bind_target(node.target, node.value, (), scope, add)
            case ast.NamedExpr():
                self._bind_target(node.target, node.value, (), scope, add)
            case ast.AugAssign() if isinstance(node.target, ast.Name):
                value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
                add(node.target.id, Binding("value", node=ast.copy_location(value, node), scope=scope))
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                self._bind_target(node.target, None, (), scope, add)
            case ast.withitem() if node.optional_vars is not None:
                self._bind_target(node.optional_vars, None, (), scope, add)
            case ast.ExceptHandler() if node.name:
                add(node.name, Binding("unknown"))

    def _bind_target(
        self, target: ast.AST, value: ast.expr | None, path: tuple[int, ...], scope: Scope,
        add: Callable[[str, Binding], None],
    ) -> None:  # fmt: skip
        if isinstance(target, ast.Name):
            add(target.id, Binding("value", node=value, path=path, scope=scope) if value else Binding("unknown"))
        elif isinstance(target, (ast.Tuple, ast.List)):
            starred = any(isinstance(item, ast.Starred) for item in target.elts)
            for position, item in enumerate(target.elts):
                self._bind_target(item, None if starred else value, (*path, position), scope, add)
        elif isinstance(target, ast.Starred):
            self._bind_target(target.value, None, (), scope, add)

    def _index_calls(self) -> None:
        called = {node.func for node, _ in self.nodes if isinstance(node, ast.Call)}
        for node, scope in self.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                self._calls.setdefault(node.func.id, []).append((node, scope))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node not in called:
                self._escaped.add(node.id)
            elif isinstance(node, ast.Return) and node.value is not None:
                self._returns.setdefault(scope, []).append(node.value)

    # -- values ------------------------------------------------------------------------------------------------------

    def definitions(self, node: ast.AST, scope: Scope) -> tuple[list[Definition], bool]:
        """Where the value of an expression may come from.

        Returns:
            The sources that were found, and whether there can be no other.
        """
        if node not in self._answers:
            outermost = self._steps is None
            if outermost:
                self._steps = _MAX_STEPS
            found: list[Definition] = []
            complete = self._follow(node, scope, (), found, frozenset(), 0)
            exhausted = self._steps is not None and self._steps <= 0
            if outermost:
                self._steps = None
            elif exhausted:
                return found, False  # asked by another question that ran out: the next one may do better
            self._answers[node] = found, complete and not exhausted
        return self._answers[node]

    def _follow(
        self, node: ast.AST, scope: Scope, path: tuple[int, ...], found: list[Definition],
        seen: frozenset[tuple[ast.AST, tuple[int, ...]]], depth: int,
    ) -> bool:  # fmt: skip
        if self._steps is not None:
            self._steps -= 1
        if depth > _MAX_DEPTH or len(found) > _MAX_VALUES or (self._steps is not None and self._steps <= 0):
            return False
        if (node, path) in seen:
            return True
        seen |= {(node, path)}

        def follow(
            inner: ast.AST, where: Scope = scope, steps: tuple[int, ...] = path, into: list[Definition] = found
        ) -> bool:
            return self._follow(inner, where, steps, into, seen, depth + 1)

        match node:
            case ast.Name():
                return self._follow_name(node, scope, path, found, seen, depth)
            case ast.IfExp():
                body, orelse = follow(node.body), follow(node.orelse)
                return body and orelse
            case ast.BoolOp():
                # A list first: every value is followed, whatever the others were.
                answers = [follow(value) for value in node.values]
                return all(answers)
            case ast.NamedExpr():
                return follow(node.value)
            case ast.Tuple() | ast.List() if path:
                index = path[0]
                if any(isinstance(item, ast.Starred) for item in node.elts) or not -len(node.elts) <= index < len(
                    node.elts
                ):
                    return False
                return follow(node.elts[index], scope, path[1:])
            case ast.Subscript() if isinstance(node.ctx, ast.Load):
                return self._follow_item(node, scope, path, found, seen, depth)
            case ast.Attribute():
                bases: list[Definition] = []
                complete = follow(node.value, scope, (), bases)
                for base in bases:
                    if isinstance(base.node, Library):
                        found.append(Definition(Library(f"{base.node.dotted}.{node.attr}"), base.scope))
                    else:
                        found.append(Definition(node, scope))
                if not bases:
                    found.append(Definition(node, scope))
                return complete and not path
            case ast.Call() if isinstance(node.func, ast.Name):
                function = self.function(node.func, scope)
                if function is not None and function.decorator_list == []:
                    return self._follow_returns(function, path, found, seen, depth)
        if path:
            return False
        found.append(Definition(node, scope))
        return True

    def _follow_name(
        self, node: ast.Name, scope: Scope, path: tuple[int, ...], found: list[Definition],
        seen: frozenset[tuple[ast.AST, tuple[int, ...]]], depth: int,
    ) -> bool:  # fmt: skip
        owner = scope.owner(node.id)
        if owner is None:
            found.append(Definition(Library(f"builtins.{node.id}"), scope))
            return True
        complete = True
        for binding in owner.bindings[node.id]:
            if binding.kind == "import":
                found.append(Definition(Library(binding.dotted), owner))
            elif binding.kind == "value" and binding.node is not None and binding.scope is not None:
                complete &= self._follow(
                    binding.node, binding.scope, (*binding.path, *path), found, seen, depth + 1
                )  # fmt: skip
            elif binding.kind == "parameter" and isinstance(binding.node, ast.arg):
                complete &= self._follow_parameter(binding.node, owner, path, found, seen, depth)
            elif binding.kind == "function" and binding.node is not None:
                found.append(Definition(binding.node, owner))
            else:
                complete = False
        return complete

    def _follow_parameter(
        self, parameter: ast.arg, scope: Scope, path: tuple[int, ...], found: list[Definition],
        seen: frozenset[tuple[ast.AST, tuple[int, ...]]], depth: int,
    ) -> bool:  # fmt: skip
        function = scope.node
        assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        name = getattr(function, "name", "")
        calls = self._calls.get(name, [])
        outer = scope.parent or scope
        complete = bool(calls) and name not in self._escaped and name != ENTRY_POINT
        default = default_of(function, parameter.arg)
        if default is not None:
            complete &= self._follow(default, outer, path, found, seen, depth + 1)
        for call, where in calls:
            given, known = self._arguments(call, where, function, parameter.arg, seen, depth)
            complete &= known and bool(given or default is not None)
            for expression, origin, steps in given:
                complete &= self._follow(expression, origin, (*steps, *path), found, seen, depth + 1)
        if not complete and not path:
            found.append(Definition(parameter, scope))
        return complete

    def _arguments(
        self, call: ast.Call, scope: Scope, function: FunctionNode, name: str,
        seen: frozenset[tuple[ast.AST, tuple[int, ...]]], depth: int,
    ) -> tuple[list[tuple[ast.expr, Scope, tuple[int, ...]]], bool]:  # fmt: skip
        """What a call may give one parameter, and whether it can give nothing else; empty where the default holds."""
        for keyword in call.keywords:
            if keyword.arg == name:
                return [(keyword.value, scope, ())], True
        names = [parameter.arg for parameter in [*function.args.posonlyargs, *function.args.args]]
        if name in names:
            index = names.index(name)
            for position, item in enumerate(call.args[: index + 1]):
                if isinstance(item, ast.Starred):
                    return [(item.value, scope, (index - position,))], True
            if index < len(call.args):
                return [(call.args[index], scope, ())], True
        given: list[tuple[ast.expr, Scope, tuple[int, ...]]] = []
        complete = True
        for keyword in call.keywords:
            if keyword.arg is None:
                complete &= self._mapping_item(keyword.value, scope, name, given, seen, depth + 1)
        return given, complete

    def _mapping_item(
        self, node: ast.expr, scope: Scope, name: str, given: list[tuple[ast.expr, Scope, tuple[int, ...]]],
        seen: frozenset[tuple[ast.AST, tuple[int, ...]]], depth: int,
    ) -> bool:  # fmt: skip
        """Collect what ``**node`` may give a parameter; False if it may hold more than can be seen."""
        mappings: list[Definition] = []
        complete = self._follow(node, scope, (), mappings, seen, depth + 1)
        for item in mappings:
            if not isinstance(item.node, ast.Dict):
                return False
            for key, value in zip(item.node.keys, item.node.values, strict=True):
                if key is None:
                    complete &= self._mapping_item(value, item.scope, name, given, seen, depth + 1)
                elif not isinstance(key, ast.Constant):
                    complete = False
                elif key.value == name:
                    given.append((value, item.scope, ()))
        return complete

    def _follow_item(
        self, node: ast.Subscript, scope: Scope, path: tuple[int, ...], found: list[Definition],
        seen: frozenset[tuple[ast.AST, tuple[int, ...]]], depth: int,
    ) -> bool:  # fmt: skip
        containers: list[Definition] = []
        complete = self._follow(node.value, scope, (), containers, seen, depth + 1)
        if not containers or not all(isinstance(item.node, (ast.Dict, ast.Tuple, ast.List)) for item in containers):
            if not path:
                found.append(Definition(node, scope))
            return False
        keys, keys_known = self._constants(node.slice, scope, depth + 1)
        for container in containers:
            literal = container.node
            if isinstance(literal, ast.Dict):
                for key, value in zip(literal.keys, literal.values, strict=True):
                    if key is None:
                        complete = False
                        continue
                    held, held_known = self._constants(key, container.scope, depth + 1)
                    if not (keys_known and held_known) or keys & held:
                        complete &= self._follow(value, container.scope, path, found, seen, depth + 1)
            elif isinstance(literal, (ast.Tuple, ast.List)):
                chosen = [index for index in keys if isinstance(index, int)] if keys_known else range(len(literal.elts))
                for index in chosen:
                    complete &= self._follow(literal, container.scope, (index, *path), found, seen, depth + 1)
        return complete

    def _follow_returns(
        self, function: ast.FunctionDef, path: tuple[int, ...], found: list[Definition],
        seen: frozenset[tuple[ast.AST, tuple[int, ...]]], depth: int,
    ) -> bool:  # fmt: skip
        inner = self.scopes[function]
        answers = [
            self._follow(value, inner, path, found, seen, depth + 1) for value in self._returns.get(inner, [])
        ]  # fmt: skip
        return all(answers)

    # -- answers -----------------------------------------------------------------------------------------------------

    def dotted(self, node: ast.AST, scope: Scope) -> set[str]:
        """Library names that an expression may stand for, such as ``{"tilelang.language.Pipelined"}``."""
        return {item.node.dotted for item in self.definitions(node, scope)[0] if isinstance(item.node, Library)}

    def constants(self, node: ast.AST, scope: Scope) -> tuple[set[Any], bool]:
        """Constants that an expression may hold, and whether there can be no other value."""
        return self._constants(node, scope, 0)

    def _constants(self, node: ast.AST, scope: Scope, depth: int) -> tuple[set[Any], bool]:
        if node in self._values:
            return self._values[node]
        if depth > _MAX_DEPTH:
            return set(), False
        # Until the answer is there, a value that is made from itself is unknown.
        self._values[node] = set(), False
        found, complete = self.definitions(node, scope)
        values: set[Any] = set()
        for item in found:
            match item.node:
                case ast.Constant(value=value):
                    values.add(value)
                case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                    complete &= self._fold(_OPERATORS[type(op)], [operand], item.scope, values, depth)
                case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                    complete &= self._fold(_OPERATORS[type(op)], [left, right], item.scope, values, depth)
                case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if (
                    name in _FOLDED and item.scope.owner(name) is None
                ):
                    complete &= self._fold(_FOLDED[name], arguments, item.scope, values, depth)
                case _:
                    complete = False
        self._values[node] = values, complete
        return values, complete

    def _fold(
        self, function: Callable[..., Any], arguments: list[ast.expr], scope: Scope, values: set[Any], depth: int
    ) -> bool:
        sets = [self._constants(argument, scope, depth + 1) for argument in arguments]
        complete = all(known for _, known in sets)
        for count, combination in enumerate(product(*(held for held, _ in sets))):
            numbers = all(isinstance(value, (int, float)) and abs(value) < 2**64 for value in combination)
            if count >= _MAX_VALUES or not numbers:
                return False
            try:
                values.add(function(*combination))
            except (ArithmeticError, TypeError, ValueError):
                complete = False
        return complete

    def function(self, node: ast.AST, scope: Scope) -> ast.FunctionDef | None:
        """The file's own function that a name stands for, if that is certain."""
        if not isinstance(node, ast.Name):
            return None
        owner = scope.owner(node.id)
        bindings = owner.bindings[node.id] if owner else []
        if len(bindings) == 1 and isinstance(bindings[0].node, ast.FunctionDef):
            return bindings[0].node
        return None


def parameters(function: FunctionNode) -> list[ast.arg]:
    """All parameters, ``*`` and ``**`` among them, in source order."""
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return [parameter for parameter in listed if parameter is not None]


def default_of(function: FunctionNode, name: str) -> ast.expr | None:
    """The default value of a parameter."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    for parameter, default in zip(reversed(positional), reversed(arguments.defaults), strict=False):
        if parameter.arg == name:
            return default
    for parameter, keyword_default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if parameter.arg == name:
            return keyword_default
    return None
