"""Run a submission's host code under the guards that the contest's guide describes.

Everything outside a prim_func is rewritten by RestrictedPython: attributes, items and in-place operations go through
the functions below, ``import torch`` gives a whitelist instead of the module, and built-ins are the safe ones. What
TileLang traces is left as it is, so the text must be on disk under the path that is given.

Tensors stay real. Host code cannot read an attribute without passing :meth:`_Guards.getattr`, which knows a tensor
when it sees one, so no stand-in has to be taken off again where a kernel is launched, and a kernel sees exactly what
the judge passed.

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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from RestrictedPython import Guards, RestrictingNodeTransformer

from moe_lab.judge import rules
from moe_lab.problem.contract import ENTRY_POINT
from moe_lab.problem.errors import SandboxError, SubmissionError
from moe_lab.problem.submission import Submission, write_atomic

#: Built-ins beside RestrictedPython's safe ones. It leaves out those that iterate without a guard; nothing that is
#: iterated here needs one.
_MORE_BUILTINS = (
    "all", "any", "bytes", "dict", "enumerate", "filter", "format", "frozenset", "iter", "list", "map", "max", "min",
    "next", "reversed", "set", "sorted", "sum", "tuple", "zip",
)  # fmt: skip
_IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    "+=": operator.iadd, "-=": operator.isub, "*=": operator.imul, "/=": operator.itruediv, "//=": operator.ifloordiv,
    "%=": operator.imod, "**=": operator.ipow, "<<=": operator.ilshift, ">>=": operator.irshift, "&=": operator.iand,
    "|=": operator.ior, "^=": operator.ixor, "@=": operator.imatmul,
}  # fmt: skip
#: Where a function or class may come from that is reached as an attribute of a library module.
_LIBRARY_ROOTS = frozenset(
    {"tilelang", "tvm", "tvm_ffi", "torch", "math", "builtins", "typing", "collections", "enum", "types"}
)
_LIBRARY_MODULES = ("tvm.tir", "tvm.tirx", "tvm.ir", "tvm.arith")
_REFUSED_OBJECTS = [
    getattr(builtins, name)
    for name in sorted(rules.BANNED_BUILTINS | rules.UNAVAILABLE_BUILTINS)
    if hasattr(builtins, name) and name not in ("object", "property", "classmethod", "staticmethod", "super")
]


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
    """The module with every host function rewritten.

    Raises:
        SandboxError: for syntax that RestrictedPython refuses.
    """
    transformer = _Transformer(rules.kernels(submission))
    # A tree of its own: the transformer changes what it visits.
    tree: ast.Module = transformer.visit(ast.parse(submission.source, submission.name))
    if transformer.errors:
        place, _, text = transformer.errors[0].partition(": ")
        line = int(place.removeprefix("Line ")) if place.removeprefix("Line ").isdigit() else None
        raise SandboxError(_sentence("restricted-syntax", text.rstrip("."), line), "restricted-syntax", line)
    return ast.fix_missing_locations(tree)


def _sentence(rule_id: str, what: str, line: int | None) -> str:
    place = f"line {line}: " if line else ""
    return f"{place}{what}. {rules.RULES[rule_id].sentence}"


class _Transformer(RestrictingNodeTransformer):
    """RestrictedPython's rewriting, except inside what TileLang traces."""

    def __init__(self, kernels: frozenset[tuple[int, int]]) -> None:
        super().__init__()
        self._kernels = kernels

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:  # noqa: N802 - the base class dispatches by it
        if (node.lineno, node.col_offset) not in self._kernels:
            return super().visit_FunctionDef(node)
        # Decorators and default values run in the builder, so they are host code; the body is not.
        self.check_name(node, node.name)
        node.decorator_list = [self.visit(item) for item in node.decorator_list]
        node.args.defaults = [self.visit(item) for item in node.args.defaults]
        node.args.kw_defaults = [item and self.visit(item) for item in node.args.kw_defaults]
        return node

    def check_name(self, node: ast.AST, name: str | None, allow_magic_methods: bool = False) -> None:
        """One leading underscore is fine: the judge's own baseline has ``_get_kernel``."""
        if name is not None and rules.is_reserved(name):
            self.error(node, f"{name!r} is a reserved name")


class _Print:
    """What ``print`` becomes: RestrictedPython calls it through an object of this kind in each function."""

    def __init__(self, _getattr_: Any = None) -> None:
        pass

    def _call_print(self, *values: Any, **options: Any) -> None:
        print(*values, **{name: options[name] for name in ("sep", "end", "flush") if name in options})


class _Guards:
    """The functions that a rewritten submission calls.

    Args:
        path: file name of the submission's code, to find its line in a traceback.
    """

    def __init__(self, path: str) -> None:
        import torch

        self._path = path
        self._tensor = torch.Tensor
        self._torch_module = torch
        self._torch = _TorchProxy(self)
        self._formatter = _Formatter(self)

    def namespace(self) -> dict[str, Any]:
        """Globals of the submission."""
        safe = {
            name: value
            for name, value in Guards.safe_builtins.items()
            if name not in rules.BANNED_BUILTINS and name not in ("__build_class__", "_getattr_")
        }
        safe |= {name: getattr(builtins, name) for name in _MORE_BUILTINS}
        safe["__import__"] = self.import_
        return {
            "__builtins__": safe,
            "__name__": "submission",
            "_apply_": lambda function, *args, **kwargs: function(*args, **kwargs),
            "_getattr_": self.getattr,
            "_getitem_": operator.getitem,
            "_getiter_": lambda items: items,
            "_inplacevar_": lambda symbol, left, right: _IN_PLACE[symbol](left, right),
            "_iter_unpack_sequence_": Guards.guarded_iter_unpack_sequence,
            "_print_": _Print,
            "_unpack_sequence_": Guards.guarded_unpack_sequence,
            "_write_": self.write,
        }

    def refuse(self, rule_id: str, what: str) -> NoReturn:
        """Name the rule and the line of the submission, not the guard."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self._path:
            frame = frame.f_back
        line = frame.f_lineno if frame else None
        raise SandboxError(_sentence(rule_id, what, line), rule_id, line) from None

    # -- reading -----------------------------------------------------------------------------------------------------

    def getattr(self, value: Any, name: str) -> Any:
        """``value.name`` in host code."""
        if name.startswith("_") or name in rules.INSPECT_ATTRIBUTES:
            self.refuse("dunder-attribute" if name.startswith("__") else "private-attribute", f"got .{name}")
        if name in rules.KERNEL_REFUSED:
            self.refuse("host-escape", f"got .{name}")
        if isinstance(value, self._tensor):
            return self._of_tensor(value, name)
        if isinstance(value, types.ModuleType):
            return self.library(getattr(value, name), f"{value.__name__}.{name}")
        if name in ("format", "format_map") and (isinstance(value, str) or value is str):
            return self._format(value, name)
        if isinstance(value, type) and (name == "mro" or issubclass(value, self._tensor)):
            self.refuse("dunder-attribute", f"got {value.__name__}.{name}")
        found = getattr(value, name)
        return self.library(found, name) if isinstance(found, types.ModuleType) else found

    def _of_tensor(self, tensor: Any, name: str) -> Any:
        if name in rules.TENSOR_REFUSED:
            self.refuse("tensor-member", f"got .{name}")
        found = getattr(tensor, name)
        if not callable(found):
            return found

        def method(*args: Any, **kwargs: Any) -> Any:
            self._check_keywords(kwargs, f".{name}")
            return found(*args, **kwargs)

        return method

    def torch_attribute(self, name: str) -> Any:
        """``torch.name``: a dtype, or a function that refuses keyword arguments it does not know."""
        if name in rules.TORCH_DTYPES:
            return getattr(self._torch_module, name)
        if name not in rules.TORCH_FUNCTIONS:
            self.refuse("torch-name", f"got torch.{name}")

        def function(*args: Any, **kwargs: Any) -> Any:
            self._check_keywords(kwargs, f"torch.{name}")
            # Looked up at each call: the judge fills what torch.empty returns.
            return getattr(self._torch_module, name)(*args, **kwargs)

        return function

    def _check_keywords(self, keywords: Mapping[str, Any], what: str) -> None:
        for keyword in keywords:
            if keyword not in rules.TORCH_KEYWORDS:
                self.refuse("torch-keyword", f"got {keyword}= in {what}")

    def library(self, found: Any, dotted: str) -> Any:
        """What an attribute of a library module gives, if it leads nowhere that the sandbox closes."""
        if found is self._torch_module:
            return self._torch
        if isinstance(found, types.ModuleType):
            name = found.__name__
            inside = f"{name}.".startswith(("tilelang.", "math.", *(f"{module}." for module in _LIBRARY_MODULES)))
            if not inside or f"{name}.".startswith(tuple(f"{module}." for module in rules.ESCAPE_MODULES)):
                self.refuse("host-escape", f"got the module {name} through {dotted}")
            return found
        home = getattr(found, "__module__", None)
        root = home.partition(".")[0] if isinstance(home, str) else "builtins"
        # moe_lab.machine.cpu gives TileLang's names their meaning on a machine with no GPU.
        known = root in _LIBRARY_ROOTS or home == "moe_lab.machine.cpu"
        if not known or any(found is item for item in _REFUSED_OBJECTS):
            self.refuse("host-escape", f"got {dotted}, which belongs to {root}")
        return found

    def import_(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:  # fmt: skip
        """``__import__`` of the submission."""
        root = name.partition(".")[0]
        if isinstance(fromlist, list):
            # No import statement makes a list: this is C code that was called from host code and needs a module.
            return importlib.import_module(name)
        if level:
            self.refuse("import-relative", f"got a relative import of {name or 'the folder'}")
        if root not in rules.IMPORT_ROOTS:
            self.refuse("import-root", f"got the import of {name}")
        if root == "torch":
            if name != "torch":
                self.refuse("torch-name", f"got the import of {name}")
            return self._torch
        module = importlib.import_module(name)
        self.library(module, name)
        for item in fromlist or ():
            if item == "*":
                self.refuse("import-star", f"got the star import of {name}")
            if not hasattr(module, item) and hasattr(module, "__path__"):
                importlib.import_module(f"{name}.{item}")
            if hasattr(module, item):
                found = self.library(getattr(module, item), f"{name}.{item}")
                if found is self._torch:
                    self.refuse("torch-name", f"got torch through {name}")
        return module if fromlist else sys.modules[root]

    # -- writing and text --------------------------------------------------------------------------------------------

    def write(self, value: Any) -> Any:
        """``value`` as the target of an assignment or deletion in host code."""
        if type(value) in (dict, list):
            return value
        if isinstance(value, self._tensor):
            return _TensorTarget(value, self)
        self.refuse("attribute-write", f"got an item or attribute of a {type(value).__name__} as a target")

    def _format(self, value: Any, name: str) -> Callable[..., str]:
        def formatted(*args: Any, **kwargs: Any) -> str:
            template, rest = (args[0], args[1:]) if value is str else (value, args)
            return self._formatter.vformat(template, rest, kwargs) if name == "format" else (
                self._formatter.vformat(template, (), rest[0])
            )  # fmt: skip

        return formatted


class _TorchProxy:
    """What ``import torch`` gives a submission."""

    __slots__ = ("__attribute",)

    def __init__(self, guards: _Guards) -> None:
        self.__attribute = guards.torch_attribute

    def __getattr__(self, name: str) -> Any:
        return self.__attribute(name)

    def __repr__(self) -> str:
        return "<torch, as far as a submission may use it>"


class _TensorTarget:
    """A tensor as a target: its items may be written, its attributes may not."""

    __slots__ = ("guards", "tensor")
    guards: _Guards
    tensor: Any

    def __init__(self, tensor: Any, guards: _Guards) -> None:
        object.__setattr__(self, "tensor", tensor)
        object.__setattr__(self, "guards", guards)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tensor[index] = value

    def __setattr__(self, name: str, value: Any) -> None:
        self.guards.refuse("attribute-write", f"got the attribute {name} of a tensor as a target")

    def __delattr__(self, name: str) -> None:
        self.guards.refuse("attribute-write", f"got the attribute {name} of a tensor as a target")


class _Formatter(string.Formatter):
    """``str.format`` whose fields read attributes through the guard."""

    def __init__(self, guards: _Guards) -> None:
        self._guards = guards

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        first, rest = string._string.formatter_field_name_split(field_name)  # type: ignore[attr-defined]
        value = self.get_value(first, args, kwargs)
        for is_attribute, name in rest:
            value = self._guards.getattr(value, name) if is_attribute else value[name]
        return value, first
