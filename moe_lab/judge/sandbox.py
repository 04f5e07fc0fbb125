"""Run a submission's host code under the guards that the contest's guide describes.

Everything outside a prim_func is rewritten by RestrictedPython: attributes, items and in-place operations go through
the functions below, ``import torch`` gives a whitelist instead of the module, and built-ins are the safe ones. Each
guard spells what it meets as the rules do and looks it up in their table (:func:`moe_lab.judge.rules.broken`). What
TileLang traces is left as it is, so the text must be on disk under the path that is given.

Tensors stay real: host code cannot read an attribute without passing :meth:`_Guards.getattr`, which knows a tensor
when it sees one, and a kernel sees exactly what the judge passed.

What this does not defend: it is a replica of the contest's rules and a help against mistakes, no security boundary.
A prim_func is traced as plain Python, and TileLang's own functions write files and start compilers. The judge's
separate process is what contains a hostile file.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import linecache
import operator
import string
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from RestrictedPython import Guards, RestrictingNodeTransformer

from moe_lab.judge import rules
from moe_lab.judge.names import Names
from moe_lab.problem.contract import ENTRY_POINT
from moe_lab.problem.errors import SandboxError, SubmissionError
from moe_lab.problem.submission import Submission, write_atomic

#: Built-ins beside RestrictedPython's safe ones. It leaves out those that iterate without a guard; nothing that is
#: iterated here needs one.
_MORE_BUILTINS = (
    "all", "any", "bytes", "dict", "enumerate", "filter", "format", "frozenset", "iter", "list", "map", "max", "min",
    "next", "reversed", "set", "sorted", "sum", "tuple", "zip",
)  # fmt: skip
_IN_PLACE = {
    "+=": operator.iadd, "-=": operator.isub, "*=": operator.imul, "/=": operator.itruediv, "//=": operator.ifloordiv,
    "%=": operator.imod, "**=": operator.ipow, "<<=": operator.ilshift, ">>=": operator.irshift, "&=": operator.iand,
    "|=": operator.ior, "^=": operator.ixor, "@=": operator.imatmul,
}  # fmt: skip
#: Where a function, class or module may come from that is reached as an attribute of a library. moe_lab.machine.cpu
#: gives TileLang's names their meaning on a machine with no GPU.
_HOMES = frozenset(
    {"tilelang", "tvm", "tvm_ffi", "torch", "math", "builtins", "typing", "collections", "enum", "types"}
)
_MODULES = ("tilelang.", "math.", "tvm.tir.", "tvm.tirx.", "tvm.ir.", "tvm.arith.")


def load(source: str, path: str | Path) -> Callable[..., Any]:
    """Execute a submission's module level in the sandbox and return its ``run_kernel``.

    On a machine with no GPU call :func:`moe_lab.machine.backend.prepare` first.

    Args:
        source: the text.
        path: where the text is, since TileLang reads a prim_func's source from disk; written if nothing is there.

    Returns:
        ``run_kernel``. Calling it raises what the submission raises, with the submission's own line numbers, or a
        SandboxError that names the rule and the line.

    Raises:
        SandboxError: for a rule of the sandbox or of the contract that the text breaks.
        SubmissionError: if the text is no Python, or the file at ``path`` holds another text.
    """
    path = Path(path)
    submission = Submission(source, path.name)
    if not path.exists():
        write_atomic(path, source.encode())
    elif path.read_text(encoding="utf-8-sig") != source:
        raise SubmissionError(
            f"got a file {path} with another text, expected the submission itself, usually because it was edited since"
        )
    for finding in rules.check(submission, "open"):
        if finding.level == "violation":
            raise SandboxError(f"line {finding.line}: {finding.message}", finding.rule_id, finding.line)
    try:
        code = compile(_restricted(submission), str(path), "exec", dont_inherit=True)
    except RecursionError:
        raise SubmissionError(f"got a file nested too deeply to be compiled ({submission.name})") from None
    except SyntaxError as error:
        # What only the compiler sees, such as a break outside a loop.
        raise SubmissionError(f"{submission.name}, line {error.lineno}: {error.msg}") from None
    linecache.checkcache(str(path))
    namespace = _Guards(str(path)).namespace()
    exec(code, namespace)
    entry: Callable[..., Any] = namespace[ENTRY_POINT]
    return entry


def _restricted(submission: Submission) -> ast.Module:
    """The module with every host function rewritten; a tree of its own.

    Raises:
        SandboxError: for syntax that RestrictedPython refuses.
    """
    tree = ast.parse(submission.source, submission.name)
    transformer = _Transformer({scope.node for scope in Names(tree).kernels})
    tree = transformer.visit(tree)
    if transformer.errors:
        place, _, text = transformer.errors[0].partition(": ")
        line = int(place.removeprefix("Line ")) if place.removeprefix("Line ").isdigit() else None
        raise _error("restricted-syntax", text.rstrip("."), line)
    return ast.fix_missing_locations(tree)


def _error(rule_id: str, what: str, line: int | None) -> SandboxError:
    place = f"line {line}: " if line else ""
    return SandboxError(f"{place}{what}. {rules.RULES[rule_id].sentence}", rule_id, line)


class _Transformer(RestrictingNodeTransformer):
    """RestrictedPython's rewriting, except inside what TileLang traces."""

    def __init__(self, kernels: set[ast.AST]) -> None:
        super().__init__()
        self._kernels = kernels

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:  # noqa: N802 - the base class dispatches by it
        if node not in self._kernels:
            return super().visit_FunctionDef(node)
        # Decorators and default values run in the builder, so they are host code; the body is not.
        self.check_name(node, node.name)
        node.decorator_list = [self.visit(item) for item in node.decorator_list]
        node.args.defaults = [self.visit(item) for item in node.args.defaults]
        node.args.kw_defaults = [item and self.visit(item) for item in node.args.kw_defaults]
        return node

    def check_name(self, node: ast.AST, name: str | None, allow_magic_methods: bool = False) -> None:
        """One leading underscore is fine: the judge's own baseline has ``_get_kernel``."""
        if name is not None and rules.broken(f"name.{name}", "host"):
            self.error(node, f"{name!r} is a reserved name")


class _Guards:
    """The functions that a rewritten submission calls.

    Args:
        path: file name of the submission's code, to find its line in a traceback.
    """

    def __init__(self, path: str) -> None:
        import torch

        self._path = path
        self._real_torch = torch
        # What ``import torch`` gives a submission.
        self._torch = type("Torch", (), {"__getattr__": lambda _, name: self.torch_attribute(name)})()
        self._formatter = _Formatter(self)
        closed = {*rules.WORDS["banned_builtins"], *rules.WORDS["unavailable_builtins"]}
        kept = {"object", "property", "classmethod", "staticmethod", "super"}
        self._closed = [vars(builtins)[name] for name in closed - kept if name in vars(builtins)]

    def namespace(self) -> dict[str, Any]:
        """Globals of the submission."""
        left_out = {*rules.WORDS["banned_builtins"], "__build_class__", "_getattr_"}
        safe = {name: value for name, value in Guards.safe_builtins.items() if name not in left_out}
        return {
            "__builtins__": safe | {name: vars(builtins)[name] for name in _MORE_BUILTINS} | {"__import__": self.load},
            "__name__": "submission",
            "_apply_": lambda function, *args, **kwargs: function(*args, **kwargs),
            "_getattr_": self.getattr,
            "_getitem_": operator.getitem,
            "_getiter_": lambda items: items,
            "_inplacevar_": lambda symbol, left, right: _IN_PLACE[symbol](left, right),
            "_iter_unpack_sequence_": Guards.guarded_iter_unpack_sequence,
            "_print_": lambda _getattr_=None: types.SimpleNamespace(_call_print=print),
            "_unpack_sequence_": Guards.guarded_unpack_sequence,
            "_write_": self.write,
        }

    def refuse(self, rule_id: str, what: str) -> NoReturn:
        """Name the rule and the line of the submission, not the guard."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self._path:
            frame = frame.f_back
        raise _error(rule_id, what, frame.f_lineno if frame else None) from None

    def pass_by(self, name: str, text: str = "") -> None:
        """Refuse a name, spelled as the rules spell it, if the sandbox refuses it for certain."""
        for rule, level, said in rules.broken(name, "host"):
            if rule.kind == "sandbox" and level == "violation":
                self.refuse(rule.id, said.replace("{text}", text))

    # -- reading -----------------------------------------------------------------------------------------------------

    def getattr(self, value: Any, name: str) -> Any:
        """``value.name`` in host code."""
        self.pass_by(f"any.{name}")
        if isinstance(value, self._real_torch.Tensor):
            self.pass_by(f"tensor.{name}")
            found = getattr(value, name)
            return self._called(lambda: found, f".{name}") if callable(found) else found
        if name in ("format", "format_map") and (isinstance(value, str) or value is str):
            return self._formatter.method(value, name)
        if isinstance(value, type) and (name == "mro" or issubclass(value, self._real_torch.Tensor)):
            self.refuse("dunder-attribute", f"got {value.__name__}.{name}")
        found = getattr(value, name)
        if isinstance(value, types.ModuleType):
            return self.library(found, f"{value.__name__}.{name}")
        return self.library(found, name) if isinstance(found, types.ModuleType) else found

    def torch_attribute(self, name: str) -> Any:
        """``torch.name``: a dtype, or a function that refuses keyword arguments it does not know."""
        self.pass_by(f"torch.{name}")
        found = getattr(self._real_torch, name)
        # Looked up at each call: the judge fills what torch.empty returns.
        is_dtype = isinstance(found, self._real_torch.dtype)
        return found if is_dtype else self._called(lambda: getattr(self._real_torch, name), f"torch.{name}")

    def _called(self, find: Callable[[], Callable[..., Any]], text: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            for keyword in kwargs:
                self.pass_by(f"keyword.{keyword}", text)
            return find()(*args, **kwargs)

        return function

    def library(self, found: Any, dotted: str) -> Any:
        """What an attribute of a library module gives, if it leads nowhere that the sandbox closes."""
        if found is self._real_torch:
            return self._torch
        if isinstance(found, types.ModuleType):
            self.pass_by(found.__name__)
            if not f"{found.__name__}.".startswith(_MODULES):
                self.refuse("host-escape", f"got the module {found.__name__} through {dotted}")
            return found
        home = getattr(found, "__module__", None)
        root = home.partition(".")[0] if isinstance(home, str) else "builtins"
        if (root not in _HOMES and home != "moe_lab.machine.cpu") or any(found is item for item in self._closed):
            self.refuse("host-escape", f"got {dotted}, which belongs to {root}")
        return found

    def load(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:  # fmt: skip
        """``__import__`` of the submission."""
        if isinstance(fromlist, list):
            # No import statement makes a list: this is C code that was called from host code and needs a module.
            return importlib.import_module(name)
        for item in fromlist or [""]:
            dotted = f"{'.' * level}{name}" + (f".{item}" if item else "")
            self.pass_by(f"import.{dotted}", f"import {dotted}")
        if name == "torch":
            return self._torch
        module = self.library(importlib.import_module(name), name)
        for item in fromlist or ():
            if not hasattr(module, item) and hasattr(module, "__path__"):
                importlib.import_module(f"{name}.{item}")
            if hasattr(module, item) and self.library(getattr(module, item), f"{name}.{item}") is self._torch:
                self.refuse("torch-name", f"got torch through {name}")
        return module if fromlist else sys.modules[name.partition(".")[0]]

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, value: Any) -> Any:
        """``value`` as the target of an assignment or deletion in host code."""
        if type(value) in (dict, list):
            return value
        if isinstance(value, self._real_torch.Tensor):
            return _target(value, self.refuse)
        self.refuse("attribute-write", f"got an item or attribute of a {type(value).__name__} as a target")


def _target(tensor: Any, refuse: Callable[[str, str], NoReturn]) -> object:
    """A tensor as a target: its items may be written, its attributes may not."""

    class Target:
        def __setitem__(self, index: Any, value: Any) -> None:
            tensor[index] = value

        def __setattr__(self, name: str, value: Any = None) -> None:
            refuse("attribute-write", f"got the attribute {name} of a tensor as a target")

        __delattr__ = __setattr__

    return Target()


class _Formatter(string.Formatter):
    """``str.format`` whose fields read attributes through the guard."""

    def __init__(self, guards: _Guards) -> None:
        self._guards = guards

    def method(self, value: Any, name: str) -> Callable[..., str]:
        """``value.format`` or ``value.format_map``, where ``value`` is a text or ``str`` itself."""

        def formatted(*args: Any, **kwargs: Any) -> str:
            template, rest = (args[0], args[1:]) if value is str else (value, args)
            return self.vformat(template, *((rest, kwargs) if name == "format" else ((), rest[0])))

        return formatted

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        first, rest = string._string.formatter_field_name_split(field_name)  # type: ignore[attr-defined]
        value = self.get_value(first, args, kwargs)
        for is_attribute, name in rest:
            value = self._guards.getattr(value, name) if is_attribute else value[name]
        return value, first
