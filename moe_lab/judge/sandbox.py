"""Run a submission's host code under the guards that the contest's guide describes.

Everything outside a prim_func is rewritten by RestrictedPython: attributes, items and imports go through the functions
below, ``import torch`` gives a whitelist, and built-ins are the safe ones. What a text shows for certain
(:func:`moe_lab.judge.rules.check`) is refused before; a guard spells what it meets and looks it up in the same table.
Tensors stay real, and what TileLang traces is left as it is, so the text must be on disk under the path given.

This is a replica of the contest's rules and a help against mistakes, no security boundary: TileLang's own functions
write files and start compilers. The judge's separate process is what contains a hostile file.
"""

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

import torch
from RestrictedPython import Guards, RestrictingNodeTransformer

from moe_lab.judge import rules
from moe_lab.judge.names import Names
from moe_lab.problem.contract import ENTRY_POINT
from moe_lab.problem.errors import SandboxError, SubmissionError
from moe_lab.problem.submission import Submission

#: Built-ins that no library may hand on.
_CLOSED = frozenset(rules.WORDS["banned_builtins"] + rules.WORDS["unavailable_builtins"])


def load(source: str, path: str | Path) -> Callable[..., Any]:
    """Write a submission to ``path``, execute its module level in the sandbox, and return its ``run_kernel``.

    With no GPU call :func:`moe_lab.machine.backend.prepare` first. TileLang reads a prim_func's source from the file.

    Raises:
        SandboxError: for a rule of the sandbox or of the contract that the text breaks; so does ``run_kernel``.
        SubmissionError: if the text is no Python.
    """
    submission = Submission(source, Path(path).name)
    submission.save(path)
    for finding in rules.check(submission, "open"):
        if finding.level == "violation":
            raise SandboxError(f"line {finding.line}: {finding.message}", finding.rule_id, finding.line)
    tree = ast.parse(source, submission.name)
    transformer = _Transformer({scope.node for scope in Names(tree).kernels})
    try:
        tree = ast.fix_missing_locations(transformer.visit(tree))
        for place, text in (error.split(": ", 1) for error in transformer.errors):
            line = place.removeprefix("Line ")
            raise _error("restricted-syntax", text.rstrip("."), int(line) if line.isdigit() else None)
        code = compile(tree, str(path), "exec", dont_inherit=True)
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
        node.decorator_list = [self.visit(item) for item in node.decorator_list]
        node.args.defaults = [self.visit(item) for item in node.args.defaults]
        node.args.kw_defaults = [item and self.visit(item) for item in node.args.kw_defaults]
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:  # noqa: N802 - the rules let only names through
        return self.node_contents_visit(node)

    def check_name(self, node: ast.AST, name: str | None, allow_magic_methods: bool = False) -> None:
        """The rules have refused reserved names; the others may begin with an underscore."""


class _Guards:
    """The functions that a rewritten submission calls; ``path`` finds its line in a traceback."""

    def __init__(self, path: str) -> None:
        self._path = path
        # What ``import torch`` gives a submission.
        self._torch = type("Torch", (), {"__getattr__": lambda _, name: self.torch_attribute(name)})()
        self._formatter = _Formatter(self.getattr)

    def namespace(self) -> dict[str, Any]:
        """Globals of the submission."""
        left_out = {*rules.WORDS["banned_builtins"], "__build_class__", "_getattr_"}
        safe = {name: value for name, value in Guards.safe_builtins.items() if name not in left_out}
        # RestrictedPython leaves out those that iterate without a guard; nothing that is iterated here needs one.
        safe |= {name: vars(builtins)[name] for name in rules.WORDS["iterating_builtins"]}
        return {
            "__builtins__": safe | {"__import__": self.load},
            "__name__": "submission",
            "_apply_": lambda function, *args, **kwargs: function(*args, **kwargs),
            "_getattr_": self.getattr,
            "_getitem_": operator.getitem,
            "_getiter_": lambda items: items,
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
        if isinstance(value, torch.Tensor):
            self.pass_by(f"tensor.{name}")
            found = getattr(value, name)
            return self._called(found, f".{name}") if callable(found) else found
        if name in ("format", "format_map") and (isinstance(value, str) or value is str):
            bound = () if value is str else (value,)
            return lambda *args, **kwargs: self._formatter.of(name, *bound, *args, **kwargs)
        if isinstance(value, type) and issubclass(value, torch.Tensor):
            self.refuse("dunder-attribute", f"got {value.__name__}.{name}")
        found = getattr(value, name)
        modules = isinstance(value, types.ModuleType) or isinstance(found, types.ModuleType)
        return self.library(found, f"{getattr(value, '__name__', type(value).__name__)}.{name}") if modules else found

    def torch_attribute(self, name: str) -> Any:
        """``torch.name``: a dtype, or a function that refuses keyword arguments it does not know."""
        self.pass_by(f"torch.{name}")
        found = getattr(torch, name)
        return found if isinstance(found, torch.dtype) else self._called(found, f"torch.{name}")

    def _called(self, found: Callable[..., Any], text: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            for keyword in kwargs:
                self.pass_by(f"keyword.{keyword}", text)
            return found(*args, **kwargs)

        return function

    def library(self, found: Any, dotted: str) -> Any:
        """What an attribute of a library module gives, if it leads nowhere that the sandbox closes."""
        if found is torch:
            return self._torch
        if isinstance(found, types.ModuleType):
            self.pass_by(found.__name__)
            if not f"{found.__name__}.".startswith(tuple(rules.WORDS["open_modules"])):
                self.refuse("host-escape", f"got the module {found.__name__} through {dotted}")
            return found
        home = getattr(found, "__module__", None)
        root = home.partition(".")[0] if isinstance(home, str) else "builtins"
        closed = root == "builtins" and getattr(found, "__name__", "") in _CLOSED
        # moe_lab.machine.cpu gives TileLang's names their meaning on a machine with no GPU.
        if closed or (root not in rules.WORDS["library_homes"] and home != "moe_lab.machine.cpu"):
            self.refuse("host-escape", f"got {dotted}, which belongs to {root}")
        return found

    def load(self, name: str, _globals: Any = None, _locals: Any = None, fromlist: Any = (), _level: int = 0) -> Any:
        """``__import__`` of the submission: the rules have looked at the statement, this looks at what it gives."""
        if isinstance(fromlist, list):
            # No import statement makes a list: this is C code that was called from host code and needs a module.
            return importlib.import_module(name)
        if name == "torch":
            return self._torch
        module = self.library(importlib.import_module(name), name)
        for item in fromlist or ():
            if not hasattr(module, item) and hasattr(module, "__path__"):
                importlib.import_module(f"{name}.{item}")
            if hasattr(module, item) and self.library(getattr(module, item), f"{name}.{item}") is self._torch:
                self.refuse("torch-name", f"got torch through {name}")
        return module if fromlist else sys.modules[name.partition(".")[0]]

    def write(self, value: Any) -> Any:
        """``value`` whose item host code assigns or deletes; the rules have refused attributes as targets."""
        if type(value) not in (dict, list) and not isinstance(value, torch.Tensor):
            self.refuse("attribute-write", f"got an item of a {type(value).__name__} as a target")
        return value


class _Formatter(string.Formatter):
    """``str.format`` whose fields read attributes through the guard."""

    def __init__(self, read: Callable[[Any, str], Any]) -> None:
        self._read = read

    def of(self, method: str, template: str, /, *args: Any, **kwargs: Any) -> str:
        """``template.format(...)`` or ``template.format_map(...)``."""
        return self.vformat(template, *((args, kwargs) if method == "format" else ((), args[0])))

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        first, rest = string._string.formatter_field_name_split(field_name)  # type: ignore[attr-defined]
        value = self.get_value(first, args, kwargs)
        for is_attribute, name in rest:
            value = self._read(value, name) if is_attribute else value[name]
        return value, first
