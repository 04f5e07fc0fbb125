"""The rules that a submission must obey, checked on its text before anything runs.

The rules themselves are data (``data/rules.json``: sentence, reason, remedy, source, confidence, examples); this module
finds where a file breaks them. A finding is a violation, which rejects the file, or advice. Where the sources are
silent, or the text alone cannot decide, a finding is advice.
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from moe_lab.judge.names import Definition, Names, Scope, default_of, parameters
from moe_lab.problem.contract import ARGUMENTS, ENTRY_POINT, data_dir
from moe_lab.problem.errors import DataError, RuleError, SubmissionError
from moe_lab.problem.submission import Submission

Kind = Literal["sandbox", "contract", "ruling", "limit"]
Level = Literal["violation", "advice"]
Profile = Literal["contest", "open"]
Confidence = Literal["stated", "reported", "observed", "inferred"]

#: Kinds that only the contest enforces: under the open profile they are advice.
CONTEST_ONLY: frozenset[str] = frozenset({"ruling", "limit"})

#: Import roots (evaluation guide 5.1, 6.1).
IMPORT_ROOTS = frozenset({"torch", "tilelang", "math"})
#: Built-ins that the guide bans by name (5.6).
BANNED_BUILTINS = frozenset({"exec", "eval", "compile", "__import__", "getattr", "setattr", "delattr", "type"})
#: Built-ins that RestrictedPython does not offer (``RestrictedPython.Guards``, "intentionally disabled").
UNAVAILABLE_BUILTINS = frozenset({
    "open", "input", "globals", "locals", "vars", "dir", "hasattr", "object", "super", "property", "classmethod",
    "staticmethod", "memoryview", "bytearray", "breakpoint", "help", "exit", "quit", "aiter", "anext",
})  # fmt: skip
#: Attributes of frames, code objects, generators and tracebacks (``RestrictedPython.transformer``).
INSPECT_ATTRIBUTES = frozenset({
    "tb_frame", "tb_next", "f_back", "f_builtins", "f_code", "f_generator", "f_globals", "f_locals", "f_trace",
    "co_code", "gi_frame", "gi_code", "gi_yieldfrom", "cr_await", "cr_frame", "cr_code", "cr_origin", "ag_await",
    "ag_frame", "ag_code",
})  # fmt: skip
#: Names that RestrictedPython's rewritten code calls: binding one would switch a guard off.
GUARD_NAMES = frozenset({
    "_getattr_", "_getitem_", "_getiter_", "_write_", "_apply_", "_inplacevar_", "_unpack_sequence_",
    "_iter_unpack_sequence_", "_print_", "_print", "printed",
})  # fmt: skip

# torch, as far as the guide names it (5.5): "creation, about 50 maths and reductions, shape, activations, dtypes". The
# full list is not public, so each family is filled with its obvious members.
_TORCH_CREATE = frozenset({
    "zeros", "ones", "empty", "zeros_like", "ones_like", "empty_like", "rand", "randn", "rand_like", "randn_like",
    "randint", "full", "full_like", "arange", "linspace", "eye", "diag", "tensor",
})  # fmt: skip
_TORCH_MATMUL = frozenset({
    "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "einsum", "tensordot", "dot", "vdot", "mv", "inner", "outer",
    "linear",
})  # fmt: skip
_TORCH_ACTIVATE = frozenset({"softmax", "log_softmax", "sigmoid", "relu", "gelu", "silu", "elu", "leaky_relu", "tanh"})
_TORCH_MATHS = frozenset({
    "add", "sub", "mul", "div", "floor_divide", "true_divide", "remainder", "pow", "square", "neg", "sign",
    "reciprocal", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "abs", "clamp", "clamp_min",
    "clamp_max", "floor", "ceil", "round", "trunc", "maximum", "minimum", "max", "min", "amax", "amin", "sum", "mean",
    "prod", "std", "var", "norm", "cumsum", "cumprod", "argmax", "argmin", "argsort", "sort", "topk", "bincount",
    "unique", "where", "all", "any", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite",
    "logical_and", "logical_or", "logical_not",
})  # fmt: skip
_TORCH_SHAPE = frozenset({
    "cat", "stack", "split", "chunk", "reshape", "view", "transpose", "permute", "flatten", "squeeze", "unsqueeze",
    "contiguous", "clone", "narrow", "gather", "scatter", "index_select", "masked_select", "masked_fill",
    "repeat_interleave", "tile", "roll", "flip", "unbind", "broadcast_to", "tril", "triu", "t", "numel",
})  # fmt: skip
TORCH_DTYPES = frozenset({
    "float64", "double", "float32", "float", "float16", "half", "bfloat16", "int64", "long", "int32", "int", "int16",
    "short", "int8", "uint8", "bool",
})  # fmt: skip
TORCH_FUNCTIONS = _TORCH_CREATE | _TORCH_MATMUL | _TORCH_ACTIVATE | _TORCH_MATHS | _TORCH_SHAPE | {"device"}
#: Refused by another contest's sandbox, or simply not named by the guide.
_TORCH_UNCERTAIN = frozenset({"argsort", "cumsum", "repeat_interleave", "index_select", "clamp_min", "device"})
TORCH_KEYWORDS = frozenset({
    "dtype", "device", "size", "fill_value", "start", "end", "step", "steps", "low", "high", "input", "other", "dim",
    "dims", "keepdim", "min", "max", "alpha", "exponent", "index", "diagonal", "tensors", "shape", "repeats", "k",
    "largest", "sorted", "descending", "stable", "split_size_or_sections", "split_size", "chunks", "start_dim",
    "end_dim", "dim0", "dim1", "mat2", "condition", "approximate", "n", "m", "unbiased", "correction", "p", "length",
})  # fmt: skip
#: Tensor members that the guide names (5.5).
TENSOR_MEMBERS = frozenset({
    "shape", "dtype", "device", "ndim", "numel", "size", "is_cuda", "T",
    "contiguous", "clone", "to", "cpu", "cuda", "view", "reshape", "float", "half",
})  # fmt: skip
#: Tensor members that reach storage, gradients or hooks.
TENSOR_REFUSED = frozenset({
    "data_ptr", "data", "grad", "grad_fn", "storage", "untyped_storage", "storage_type", "numpy", "record_stream",
    "register_hook", "register_post_accumulate_grad_hook", "backward", "retain_grad", "requires_grad_",
    "share_memory_", "storage_offset", "set_", "resize_", "resize_as_", "apply_", "map_", "map2_", "module_load",
    "pin_memory",
})  # fmt: skip
#: The refused members whose name leaves no doubt that a tensor is meant.
_TENSOR_ONLY = TENSOR_REFUSED - {"data", "grad", "storage", "backward", "apply_", "map_"}
_TENSOR_FACTS = frozenset({"shape", "dtype", "device", "ndim", "numel", "size", "is_cuda", "dim", "stride"})
_READS_BACK = frozenset({"item", "tolist", "cpu"})

#: Parts of tilelang through which a file reaches processes, files or an interpreter.
ESCAPE_MODULES = (
    "tilelang.env", "tilelang.contrib", "tilelang.engine", "tilelang.cache", "tilelang.libinfo", "tilelang.tools",
    "tilelang.testing", "tilelang.autodd", "tilelang.autotuner", "tilelang.instrumentation", "tilelang.jit.adapter",
    "tilelang.language.eager", "tilelang.language.parser", "tilelang.language.ast", "tilelang.tvm",
)  # fmt: skip
#: Attributes of a compiled kernel behind which the loaded library, and with it the C library, lies open.
KERNEL_REFUSED = frozenset({"adapter", "rt_mod", "libpath", "torch_function"})
FOREIGN_MODULES = frozenset({
    "os", "sys", "subprocess", "socket", "pickle", "ctypes", "shutil", "importlib", "builtins", "inspect", "io",
    "pathlib", "tempfile", "threading", "multiprocessing", "gc", "types", "linecache",
})  # fmt: skip

_ASYNC = re.compile(
    r"async_copy|tma_\w+|create_tma_descriptor|(ptx_)?cp_async\w*|ptx_(commit|wait)_group|\w*mbarrier\w*"
    r"|(named_)?barrier_(arrive|wait)|create_barriers|alloc_(cluster_)?barrier|ptx_\w*barrier\w*|\w+_bsm|\w*_bsm_\w+"
    r"|arrive(_\w+)?|wait(_\w+)?|fence_proxy_async|copy_cluster"
)
_DEVICE_SOURCE = re.compile(
    r"import_source|call_(pure_)?extern|(tvm_)?call_c?packed(_lowered)?|\w*SourceCodeKernel"
    r"|register_\w+_postproc(_callback)?"
)
_ASYNC_PASS = {"tl.enable_async_copy", "TL_ENABLE_ASYNC_COPY"}
_ENTRY_NAMES = tuple(argument.name for argument in ARGUMENTS)


@dataclass(frozen=True)
class Rule:
    """One rule, as a contestant reads it.

    Attributes:
        id: short name, for ``moe-lab explain``.
        kind: "sandbox" and "contract" hold everywhere; "ruling" and "limit" are the contest's and become advice under
            the open profile.
        level: what a certain breach is.
        sentence: what the rule says.
        why: why it exists.
        fix: what to do.
        source: where it is known from.
        confidence: "stated" by the organisers' page or guide, "reported" from the organisers by contestants,
            "observed" on the judge, or "inferred".
        where: where the examples go: "module", "run_kernel", "prim_func", or "file" for a whole file.
        bad, good: examples.
    """

    id: str
    kind: Kind
    level: Level
    sentence: str
    why: str
    fix: str
    source: str
    confidence: Confidence
    where: Literal["module", "run_kernel", "prim_func", "file"]
    bad: str
    good: str


@dataclass(frozen=True)
class Finding:
    """One place where a file breaks a rule, or may.

    Attributes:
        rule_id: the rule.
        level: "violation" rejects the file, "advice" does not.
        message: what was found, then the rule's sentence.
        line, column: position in the file, from 1.
    """

    rule_id: str
    level: Level
    message: str
    line: int
    column: int


@functools.cache
def _rules() -> dict[str, Rule]:
    path = data_dir() / "rules.json"
    columns = [item.name for item in fields(Rule)]
    allowed = {"kind": get_args(Kind), "level": get_args(Level), "confidence": get_args(Confidence)}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        table = {}
        for row in rows:
            if list(row) != columns or not all(isinstance(text, str) and text for text in row.values()):
                raise DataError(f"{path.name}: got {row}, expected the texts {', '.join(columns)}, none of them empty")
            for column, values in allowed.items():
                if row[column] not in values:
                    raise DataError(f"{path.name}, rule {row['id']}: got {column} {row[column]!r}, expected {values}")
            table[row["id"]] = Rule(**row)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read: {error}") from None
    return table


class _Rules(Mapping[str, Rule]):
    """The rules by id, read from ``data/rules.json`` when first used."""

    def __getitem__(self, rule_id: str) -> Rule:
        return _rules()[rule_id]

    def __iter__(self) -> Iterator[str]:
        return iter(_rules())

    def __len__(self) -> int:
        return len(_rules())


#: Every rule by id, in the order of ``data/rules.json``.
RULES: Mapping[str, Rule] = _Rules()


def explain(rule_id: str | None = None) -> str:
    """A rule for people, or the list of all rules.

    Raises:
        RuleError: for an unknown id, with the nearest ones.
    """
    if rule_id is None:
        width = max(map(len, RULES))
        lines = [f"{rule.id:{width}}  {rule.kind:8}  {rule.sentence}" for rule in RULES.values()]
        return "\n".join([*lines, "", "moe-lab explain RULE says why, what to do, and where it is known from."])
    if rule_id not in RULES:
        near = difflib.get_close_matches(rule_id, RULES, n=3, cutoff=0.4) or list(RULES)[:3]
        raise RuleError(f"got rule {rule_id!r}, expected an id such as {', '.join(near)}; `moe-lab explain` lists all")
    rule = RULES[rule_id]
    scope = "the contest's own: advice under --profile open" if rule.kind in CONTEST_ONLY else "under every profile"
    return "\n".join([
        f"{rule.id} ({rule.kind}, {rule.level}; {scope})", "", rule.sentence, "",
        f"Why     {rule.why}", f"Do      {rule.fix}", f"Known   {rule.confidence}: {rule.source}", "",
        "Breaks it:", *("    " + line for line in rule.bad.splitlines()), "",
        "Fine:", *("    " + line for line in rule.good.splitlines()),
    ])  # fmt: skip


def told(message: str, rule_id: str, others: int = 0) -> str:
    """A finding as the one sentence of a verdict or an error, with the way to more.

    Args:
        message: of the finding.
        rule_id: its rule.
        others: how many findings more there are.

    >>> told("got x. It is refused.", "some-rule", 2)
    'got x. It is refused (and 2 more); `moe-lab explain some-rule` says why'
    """
    more = f" (and {others} more)" if others else ""
    return f"{message.removesuffix('.')}{more}; `moe-lab explain {rule_id}` says why"


def check(submission: Submission, profile: Profile = "contest") -> list[Finding]:
    """Find every place where a file breaks a rule, without running it.

    Args:
        submission: the file.
        profile: "contest" enforces every rule; "open" turns the contest's rulings and limits into advice.

    Returns:
        Findings in the order of the file. The file is rejected if one of them is a violation.

    Raises:
        SubmissionError: if the text is no Python, or nested too deeply to be read.
        RuleError: for an unknown profile.
    """
    if profile not in get_args(Profile):
        raise RuleError(f"got profile {profile!r}, expected one of {', '.join(get_args(Profile))}")
    try:
        return _Checker(submission, profile).run()
    except RecursionError:
        raise SubmissionError(
            f"got a file nested too deeply to be checked ({submission.name}), usually because one expression has "
            "thousands of terms"
        ) from None


def kernels(submission: Submission) -> frozenset[tuple[int, int]]:
    """Where the functions begin that TileLang traces (prim_funcs, macros), as (line, byte column) of their ``def``.

    The sandbox leaves them alone. A function inside one of them is not listed.

    Raises:
        SubmissionError: if the text is no Python.
    """
    return _Checker(submission, "open").kernels()


class _Checker:
    """One pass over one file; each method holds one family of rules."""

    def __init__(self, submission: Submission, profile: Profile) -> None:
        self.profile = profile
        self.tree = submission.tree
        # Bytes split where Python's lines end and nowhere else.
        self.lines = submission.source.encode().splitlines()
        self.names = Names(self.tree)
        self.findings: dict[tuple[str, int, int], Finding] = {}
        self._kernels: dict[ast.AST, bool] = {}
        self._dotted: dict[ast.AST, set[str]] = {}
        self._origins: dict[ast.AST, set[str]] = {}
        self._stores = self._module_stores()
        annotations = [*self.names.annotations]
        annotations += [node.annotation for node, _ in self.names.nodes if isinstance(node, ast.AnnAssign)]
        self._annotated = {part for annotation in annotations for part in ast.walk(annotation)}

    def run(self) -> list[Finding]:
        self._check_module_level()
        self._check_entry()
        for node, scope in self.names.nodes:
            self._check_everywhere(node, scope)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._check_function(node, scope)
            if self._is_kernel(scope):
                self._check_kernel(node, scope)
            else:
                self._check_host(node, scope)
        return sorted(self.findings.values(), key=lambda item: (item.line, item.column, item.rule_id))

    def kernels(self) -> frozenset[tuple[int, int]]:
        """Where the outermost traced functions begin."""
        return frozenset(
            (node.lineno, node.col_offset)
            for node, scope in self.names.nodes
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and self._is_kernel(self.names.scopes[node])
            and not self._is_kernel(scope)
        )

    def add(self, rule_id: str, node: ast.AST, what: str, *, sure: bool = True) -> None:
        """Record a finding; one that is not sure is advice."""
        rule = RULES[rule_id]
        line = getattr(node, "lineno", 1)
        text = self.lines[line - 1] if line <= len(self.lines) else b""
        column = len(text[: getattr(node, "col_offset", 0)].decode(errors="ignore")) + 1
        enforced = sure and not (self.profile == "open" and rule.kind in CONTEST_ONLY)
        level: Level = rule.level if enforced else "advice"
        key = (rule_id, line, column)
        if key not in self.findings or (level == "violation" and self.findings[key].level == "advice"):
            self.findings[key] = Finding(rule_id, level, f"{what}. {rule.sentence}", line, column)

    # -- what a name stands for --------------------------------------------------------------------------------------

    def dotted(self, node: ast.AST, scope: Scope) -> set[str]:
        """Library names of an expression, with torch reached through tilelang counted as torch."""
        if node not in self._dotted:
            found = self.names.dotted(node, scope)
            self._dotted[node] = {re.sub(r"^tilelang\.(.*\.)?torch(?=\.|$)", "torch", name) for name in found}
        return self._dotted[node]

    def tilelang(self, node: ast.AST, scope: Scope) -> set[str]:
        """Last parts of the tilelang names that an expression stands for."""
        return {name.rpartition(".")[2] for name in self.dotted(node, scope) if name.startswith("tilelang.")}

    def decorators(self, function: ast.AST, scope: Scope) -> Iterator[tuple[ast.expr, set[str]]]:
        """Each decorator without its arguments, and the tilelang names it may be."""
        for node in getattr(function, "decorator_list", []):
            target = node.func if isinstance(node, ast.Call) else node
            yield node, self.tilelang(target, scope)

    def _is_kernel(self, scope: Scope | None) -> bool:
        """Whether a scope is the body of a prim_func (or macro), which the sandbox leaves alone."""
        if scope is None or scope.parent is None:
            return False
        if scope.node not in self._kernels:
            known = {name for _, found in self.decorators(scope.node, scope.parent) for name in found}
            own = bool(known & {"prim_func", "macro"}) or self._is_eager(scope.node, scope.parent)
            self._kernels[scope.node] = own or self._is_kernel(scope.parent)
        return self._kernels[scope.node]

    def _is_eager(self, function: ast.AST, scope: Scope) -> bool:
        """Whether a jit function is a kernel itself: it opens T.Kernel and holds no prim_func."""
        if not any("jit" in found for _, found in self.decorators(function, scope)):
            return False
        inner = self.names.scopes[function]
        nested = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef) and node is not function]
        if any("prim_func" in found for node in nested for _, found in self.decorators(node, inner)):
            return False
        calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
        return any("Kernel" in self.tilelang(call, inner) for call in calls)

    def origin(self, node: ast.AST, scope: Scope) -> set[str]:
        """Arguments of run_kernel whose values an expression carries; "fresh" for a tensor without values yet."""
        if node not in self._origins:
            self._origins[node] = set()  # what a value made from itself adds to itself
            for item in self.names.definitions(node, scope)[0]:
                self._origins[node] |= self._origin_of(item)
        return self._origins[node]

    def _origin_of(self, item: Definition) -> set[str]:
        node, scope = item.node, item.scope

        def of(inner: ast.AST) -> set[str]:
            return self.origin(inner, scope)

        match node:
            case ast.arg(arg=name):
                entry = isinstance(scope.node, ast.FunctionDef) and scope.node.name == ENTRY_POINT
                return {name} if entry and scope.parent is self.names.module else set()
            case ast.Attribute(value=value, attr=attribute):
                return set() if attribute in _TENSOR_FACTS else of(value)
            case ast.Subscript(value=value):
                return of(value)
            case ast.BinOp(left=left, right=right):
                return of(left) | of(right)
            case ast.UnaryOp(operand=operand):
                return of(operand)
            case ast.Call(func=function, args=arguments):
                torch_names = {name.partition(".")[2] for name in self.dotted(function, scope) if _is_torch(name)}
                if torch_names & _TORCH_CREATE:
                    return {"fresh"}
                if torch_names:
                    return {name for argument in arguments for name in of(argument)}
                if isinstance(function, ast.Attribute) and function.attr not in _TENSOR_FACTS | {"item", "tolist"}:
                    return of(function.value)
        return set()

    # -- rules of the whole file -------------------------------------------------------------------------------------

    def _check_module_level(self) -> None:
        for position, node in enumerate(self.tree.body):
            match node:
                case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.ClassDef():
                    continue
                case ast.Expr(value=ast.Constant(value=str())) if position == 0:
                    continue
                case ast.Assign():
                    for target in node.targets:
                        items = target.elts if isinstance(target, ast.Tuple) else [target]
                        if not all(isinstance(item, ast.Name) for item in items):
                            self.add("module-target", target, f"got the target `{_text(target)}`")
                    try:
                        ast.literal_eval(node.value)
                    except (ValueError, TypeError, SyntaxError, MemoryError):
                        self.add("module-literal", node.value, f"got `{_text(node.value)}`")
                case _:
                    self.add("module-statement", node, f"got `{_text(node)}`")
        defined: dict[str, ast.AST] = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                if node.name in defined:
                    self.add("duplicate-definition", node, f"got a second definition of {node.name}")
                defined[node.name] = node

    def _check_entry(self) -> None:
        found = [node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name == ENTRY_POINT]
        if not found:
            self.add("entry-missing", self.tree, f"got no function {ENTRY_POINT}")
            return
        node = found[-1]
        listed, arguments = parameters(node), node.args
        names = tuple(parameter.arg for parameter in listed)
        if node.decorator_list:
            self.add("entry-signature", node.decorator_list[0], f"{ENTRY_POINT} has a decorator")
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
            self.add("entry-signature", node, f"{ENTRY_POINT} has *, / or ** parameters")
        elif len(names) != len(_ENTRY_NAMES):
            self.add("entry-signature", node, f"got {len(names)} parameters, expected {len(_ENTRY_NAMES)}")
        elif names != _ENTRY_NAMES:
            got, expected = next(pair for pair in zip(names, _ENTRY_NAMES, strict=True) if pair[0] != pair[1])
            swapped = set(names) & set(_ENTRY_NAMES) - {
                name for name, want in zip(names, _ENTRY_NAMES, strict=True) if name == want
            }
            self.add("entry-signature", node, f"parameter {got} stands where {expected} belongs", sure=bool(swapped))
        if arguments.defaults or any(parameter.annotation for parameter in listed) or node.returns:
            self.add("entry-signature", node, f"{ENTRY_POINT} has default values or annotations")
        inner = self.names.scopes[node]
        for child, scope in self.names.nodes:
            if scope is inner and isinstance(child, (ast.Yield, ast.YieldFrom)):
                self.add("entry-signature", child, f"{ENTRY_POINT} is a generator, so calling it runs nothing")

    # -- rules of every line -----------------------------------------------------------------------------------------

    def _check_everywhere(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._check_import(node)
            case ast.ClassDef():
                self.add("class-definition", node, f"got class {node.name}")
            case ast.Attribute(attr=attribute):
                if attribute.startswith("__") or attribute in INSPECT_ATTRIBUTES:
                    self.add("dunder-attribute", node, f"got .{attribute}")
                if attribute in KERNEL_REFUSED:
                    self.add("host-escape", node, f"got .{attribute}")
                if not isinstance(node.ctx, ast.Load) and scope.parent is not None:
                    self.add("attribute-write", node, f"got `{_text(node)}` as a target")
                self._check_library_name(node, scope)
            case ast.Name(id=name):
                if isinstance(node.ctx, ast.Load) and name in BANNED_BUILTINS and scope.owner(name) is None:
                    self.add("banned-builtin", node, f"got {name}")
                if is_reserved(name) and name not in BANNED_BUILTINS:
                    self.add("reserved-name", node, f"got the name {name}")
                self._check_library_name(node, scope)
            case ast.arg(arg=name) | ast.FunctionDef(name=name) if is_reserved(name):
                self.add("reserved-name", node, f"got the name {name}")
            case ast.Call():
                self._check_call(node, scope)
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if key is not None and self._is_async_pass(key, scope):
                        held, known = self.names.constants(value, scope)
                        if any(held) or not known:
                            self.add("async-copy", key, "got a pass that turns copies asynchronous", sure=any(held))
        if node in self.names.annotations or isinstance(node, ast.AnnAssign):
            annotation = node.annotation if isinstance(node, ast.AnnAssign) else node
            for part in ast.walk(annotation):
                named = isinstance(part, ast.Constant) and isinstance(part.value, str) and "torch.Tensor" in part.value
                reached = isinstance(part, (ast.Name, ast.Attribute)) and "torch.Tensor" in self.dotted(part, scope)
                if named or reached:
                    self.add("torch-tensor-annotation", part, f"got the annotation `{_text(annotation)}`")

    def _check_import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.ImportFrom) and node.level:
            self.add("import-relative", node, f"got `{_text(node)}`")
            return
        for alias in node.names:
            base = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            dotted = f"{base}.{alias.name}" if base else alias.name
            root = dotted.partition(".")[0]
            if alias.name == "*":
                self.add("import-star", node, f"got `{_text(node)}`")
            if root not in IMPORT_ROOTS:
                self.add("import-root", node, f"got `{_text(node)}`")
            elif alias.name != "*":
                self._check_dotted(dotted, node)
                if base == "torch" and alias.name in _TORCH_MATMUL | _TORCH_ACTIVATE:
                    self.add("torch-compute", node, f"got {dotted}")
            if is_reserved(alias.asname or alias.name):
                self.add("reserved-name", node, f"got the name {alias.asname or alias.name}")
            elif any(part.startswith("_") for part in dotted.split(".")[1:]):
                self.add("private-attribute", node, f"got `{_text(node)}`")

    def _check_library_name(self, node: ast.Attribute | ast.Name, scope: Scope) -> None:
        if node in self.names.annotations and not isinstance(node, ast.Attribute):
            return
        for dotted in sorted(self.dotted(node, scope)):
            if isinstance(node, ast.Attribute) or scope.owner(node.id) is not None:
                self._check_dotted(dotted, node)
            last = dotted.rpartition(".")[2]
            if not dotted.startswith("tilelang."):
                continue
            if _ASYNC.fullmatch(last):
                self.add("async-copy", node, f"got T.{last}")
            elif last in ("warp_specialize", "ws", "WarpSpecialize"):
                self.add("async-copy", node, f"got T.{last}, which usually feeds asynchronous copies", sure=False)
            elif _DEVICE_SOURCE.fullmatch(last):
                self.add("device-source", node, f"got T.{last}")

    def _check_dotted(self, dotted: str, node: ast.AST) -> None:
        """Check a library name itself: torch by its whitelist, tilelang by the ways that lead out of it."""
        parts = dotted.split(".")
        # torch.cuda.synchronize is one finding, made where torch.cuda is seen; an import shows the whole name at once.
        whole = len(parts) == 2 or (len(parts) > 2 and isinstance(node, (ast.Import, ast.ImportFrom)))
        if parts[0] == "torch" and whole:
            if dotted == "torch.Tensor" and node in self._annotated:
                return  # a rule of its own
            if len(parts) > 2 or parts[1] not in TORCH_FUNCTIONS | TORCH_DTYPES:
                self.add("torch-name", node, f"got {dotted}")
            elif parts[1] in _TORCH_UNCERTAIN:
                self.add("torch-uncertain", node, f"got {dotted}")
        elif parts[0] == "tilelang" and (
            dotted.startswith(tuple(f"{module}." for module in ESCAPE_MODULES))
            or dotted in ESCAPE_MODULES
            or FOREIGN_MODULES & set(parts)
        ):
            self.add("host-escape", node, f"got {dotted}")

    def _check_call(self, node: ast.Call, scope: Scope) -> None:
        known = self.tilelang(node.func, scope)
        if "Pipelined" in known:
            self._check_pipelined(node, scope)
        elif known or (self._is_kernel(scope) and not self.dotted(node.func, scope)):
            self._check_stages(node, scope, {keyword.arg: keyword.value for keyword in node.keywords}.get("num_stages"))
        for keyword in node.keywords:
            if keyword.arg == "annotations" and known:
                self._check_annotations(keyword.value, scope)
        if "Kernel" in known:
            threads = {keyword.arg: keyword.value for keyword in node.keywords}.get("threads")
            for count in self.names.constants(threads, scope)[0] if threads is not None else ():
                if isinstance(count, int) and (count > 2048 or count % 64):
                    self.add("block-threads", node, f"got threads={count}", sure=count > 2048)
        if any("call_intrin" in name or "call_llvm" in name for name in known):
            texts = [part for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            for text in texts:
                if re.search("async|bsm", str(text.value)):
                    self.add("async-copy", text, f"got the intrinsic {text.value!r}")
                elif _DEVICE_SOURCE.fullmatch(str(text.value).rpartition(".")[2]):
                    self.add("device-source", text, f"got the intrinsic {text.value!r}")

    def _check_pipelined(self, node: ast.Call, scope: Scope) -> None:
        given: dict[str, ast.expr] = {}
        for name, argument in zip(("start", "stop", "num_stages", "order", "stage"), node.args, strict=False):
            if isinstance(argument, ast.Starred):
                self.add("async-copy", argument, "the stages of T.Pipelined(*...) cannot be seen", sure=False)
                break
            given[name] = argument
        for keyword in node.keywords:
            if keyword.arg is not None:
                given[keyword.arg] = keyword.value
                continue
            for item in self.names.definitions(keyword.value, scope)[0]:
                if isinstance(item.node, ast.Dict):
                    for key, value in zip(item.node.keys, item.node.values, strict=True):
                        if isinstance(key, ast.Constant) and key.value == "num_stages":
                            self._check_stages(node, item.scope, value)
                else:
                    self.add("async-copy", node, "the stages of T.Pipelined(**...) cannot be seen", sure=False)
        self._check_stages(node, scope, given.get("num_stages"))
        if "stage" in given:
            for item in self.names.definitions(given["stage"], scope)[0]:
                steps = item.node.elts if isinstance(item.node, (ast.List, ast.Tuple)) else []
                if any(value not in (0, -1) for step in steps for value in self.names.constants(step, item.scope)[0]):
                    self.add("async-copy", node, "T.Pipelined has a hand-written pipeline of more than one stage")

    def _check_stages(self, node: ast.AST, scope: Scope, stages: ast.expr | None) -> None:
        if stages is None:
            return
        values, known = self.names.constants(stages, scope)
        deep = [value for value in values if isinstance(value, (int, float)) and value >= 2]
        if deep:
            self.add("async-copy", node, f"num_stages may be {max(deep):g}")
        elif not known:
            self.add("async-copy", node, f"num_stages={_text(stages)} cannot be seen in the text", sure=False)

    def _check_annotations(self, node: ast.expr, scope: Scope) -> None:
        for item in self.names.definitions(node, scope)[0]:
            if isinstance(item.node, ast.Dict):
                for key, value in zip(item.node.keys, item.node.values, strict=True):
                    if isinstance(key, ast.Constant) and "num_stages" in str(key.value):
                        self._check_stages(value, item.scope, value)
                    elif isinstance(key, ast.Constant) and "pipeline" in str(key.value):
                        self.add("async-copy", value, f"got the loop annotation {key.value!r}", sure=False)

    def _is_async_pass(self, key: ast.expr, scope: Scope) -> bool:
        values, _ = self.names.constants(key, scope)
        return bool(_ASYNC_PASS & ({value for value in values if isinstance(value, str)} | self.tilelang(key, scope)))

    # -- rules of functions ------------------------------------------------------------------------------------------

    def _check_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        is_entry = node.name == ENTRY_POINT and scope is self.names.module
        kernel = self._is_kernel(self.names.scopes[node])
        for decorator, known in self.decorators(node, scope):
            if known & {"jit", "prim_func"} or is_entry:
                continue
            uncertain = bool(known & {"macro", "autotune"})
            self.add("decorator", decorator, f"got @{_text(decorator)} on {node.name}", sure=not uncertain)
        if kernel and any("prim_func" in known for _, known in self.decorators(node, scope)):
            self._check_prim_func(node, scope)
        elif kernel and any("jit" in known for _, known in self.decorators(node, scope)):
            self.add("eager-kernel", node, f"{node.name} holds a kernel itself")

    def _check_prim_func(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        for parameter in parameters(node):
            annotation = parameter.annotation
            if isinstance(annotation, ast.Call):
                head, parts = annotation.func, [*annotation.args, *(keyword.value for keyword in annotation.keywords)]
            elif isinstance(annotation, ast.Subscript):
                head, parts = annotation.value, [annotation.slice]
            else:
                shown = f"`{_text(annotation)}`" if annotation else "no annotation"
                self.add("prim-func-annotation", annotation or parameter, f"parameter {parameter.arg} has {shown}")
                continue
            if "Tensor" not in self.tilelang(head, scope):
                self.add("prim-func-annotation", annotation, f"parameter {parameter.arg} has `{_text(annotation)}`")
            for part in parts:
                self._check_annotation_part(part, parameter, scope)

    def _check_annotation_part(self, node: ast.expr, parameter: ast.arg, scope: Scope) -> None:
        allowed_operators = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
        match node:
            case ast.Constant():
                return
            case ast.Name(id=name) if not name.startswith("_"):
                return
            case ast.Attribute(attr=attribute) if not attribute.startswith("_") and self.tilelang(node, scope):
                return
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, allowed_operators):
                self._check_annotation_part(left, parameter, scope)
                self._check_annotation_part(right, parameter, scope)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                self._check_annotation_part(operand, parameter, scope)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                for item in items:
                    self._check_annotation_part(item, parameter, scope)
            case _:
                self.add("prim-func-annotation", node, f"`{_text(node)}` in the annotation of {parameter.arg}")

    def _check_kernel(self, node: ast.AST, scope: Scope) -> None:
        """A kernel is traced as plain Python, so a tensor that reaches it could be computed with there."""
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.MatMult):
            self.add("torch-compute", node, "got the operator @")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            owner = scope.owner(node.id)
            outside = owner is not None and not self._is_kernel(owner)
            if outside and self.origin(node, scope) - {"fresh"}:
                self.add("torch-compute", node, f"the tensor {node.id} is used while a kernel is traced")

    # -- rules of host code ------------------------------------------------------------------------------------------

    def _check_host(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Name(id=name) if isinstance(node.ctx, ast.Load):
                if name in UNAVAILABLE_BUILTINS and scope.owner(name) is None:
                    self.add("unavailable-builtin", node, f"got {name}")
            case ast.Attribute():
                self._check_host_attribute(node, scope)
            case ast.AsyncFunctionDef() | ast.AsyncFor() | ast.AsyncWith() | ast.Await() | ast.Nonlocal() | ast.Match():
                self.add("restricted-syntax", node, f"got `{_text(node)}`")
            case ast.AnnAssign() if scope.parent is not None:
                self.add("restricted-syntax", node, f"got `{_text(node)}`")
            case ast.AugAssign(target=ast.Attribute() | ast.Subscript()):
                self.add("restricted-syntax", node, f"got `{_text(node)}`")
            case ast.Try():
                self.add("try-except", node, "got try")
            case ast.BinOp() | ast.AugAssign():
                self._check_arithmetic(node, scope)
            case ast.Call():
                self._check_host_call(node, scope)
            case ast.Global(names=names):
                for name in names:
                    self._check_counter(name, node)
            case _ if type(node).__name__ in ("TryStar", "TypeAlias", "TemplateStr"):
                self.add("restricted-syntax", node, f"got `{_text(node)}`")
        if isinstance(node, ast.Assign):
            self._check_store(node, scope)

    def _check_host_attribute(self, node: ast.Attribute, scope: Scope) -> None:
        name = node.attr
        if name.startswith("_") and not name.startswith("__") and name != "_":
            self.add("private-attribute", node, f"got .{name}")
        known = self.dotted(node, scope)
        # Nobody names a matrix product except to call it, now or through another name.
        products = _TORCH_MATMUL | _TORCH_ACTIVATE
        banned = {dotted for dotted in known if _is_torch(dotted) and dotted.partition(".")[2] in products}
        if banned:
            self.add("torch-compute", node, f"got {min(banned)}")
        elif not known and name.rstrip("_") in _TORCH_MATMUL - {"linear", "dot", "inner", "outer"}:
            self.add("torch-compute", node, f"got .{name}")
        if known:
            return
        if name in _TENSOR_ONLY:
            self.add("tensor-member", node, f"got .{name}")
        elif name not in TENSOR_MEMBERS and self.origin(node.value, scope):
            if name in TENSOR_REFUSED:
                self.add("tensor-member", node, f"got .{name} of a tensor")
            elif name not in _TORCH_MATMUL | _TORCH_ACTIVATE | _READS_BACK and not name.startswith("_"):
                self.add("tensor-unlisted", node, f"got .{name} of a tensor")

    def _check_arithmetic(self, node: ast.BinOp | ast.AugAssign, scope: Scope) -> None:
        if isinstance(node.op, ast.MatMult):
            self.add("torch-compute", node, "got the operator @")
            return
        left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
        if self.origin(left, scope) or self.origin(right, scope):
            self.add("torch-compute", node, f"`{_text(node)}` is arithmetic on a tensor", sure=False)

    def _check_host_call(self, node: ast.Call, scope: Scope) -> None:
        found = self.dotted(node.func, scope)
        for dotted in sorted(found):
            _, _, name = dotted.partition(".")
            if not _is_torch(dotted):
                continue
            if name in _TORCH_MATMUL | _TORCH_ACTIVATE or name.startswith("nn.functional."):
                self.add("torch-compute", node, f"got {dotted}")
            elif name in _TORCH_MATHS:
                self.add("torch-compute", node, f"got {dotted}", sure=False)
            if name in TORCH_FUNCTIONS:
                for keyword in node.keywords:
                    if keyword.arg is not None and keyword.arg not in TORCH_KEYWORDS:
                        self.add("torch-keyword", keyword.value, f"got {keyword.arg}= in {dotted}")
        builtin = {name.rpartition(".")[2] for name in found if name.startswith("builtins.")}
        if builtin & {"int", "float", "bool"} and any(
            self.origin(argument, scope) - {"fresh"} for argument in node.args
        ):
            self.add("synchronise", node, f"got `{_text(node)}`")
        if isinstance(node.func, ast.Attribute) and not found:
            self._check_method(node, node.func, scope)

    def _check_method(self, node: ast.Call, function: ast.Attribute, scope: Scope) -> None:
        name = function.attr
        if name in ("format", "format_map"):
            self.add("str-format", node, f"got .{name}(...)")
        if name in _TORCH_MATMUL - {"linear", "dot", "inner", "outer"}:
            self.add("torch-compute", node, f"got .{name}(...)")
            return
        origin = self.origin(function.value, scope)
        if not origin:
            self._check_store_method(node, function, scope)
            return
        to_host = name == "to" and any("cpu" in self.names.constants(argument, scope)[0] for argument in node.args)
        if name in _READS_BACK or to_host:
            self.add("synchronise", node, f"got .{name}(...) of a tensor")
        elif name in _TORCH_MATMUL | _TORCH_ACTIVATE:
            self.add("torch-compute", node, f"got .{name}(...) of a tensor")
        elif name in _TORCH_MATHS:
            self.add("torch-compute", node, f"got .{name}(...) of a tensor", sure=False)

    # -- what is kept between calls ----------------------------------------------------------------------------------

    def _module_stores(self) -> set[str]:
        """Module-level names that hold a dictionary, list or set."""
        literals = (ast.Dict, ast.List, ast.Set)
        return {
            target.id
            for node in self.tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, literals)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def _store_name(self, node: ast.AST, scope: Scope) -> str | None:
        """The container that outlives a call which an expression stands for."""
        if not isinstance(node, ast.Name):
            return None
        owner = scope.owner(node.id)
        if owner is self.names.module and node.id in self._stores:
            return node.id
        if owner is not None and isinstance(owner.node, (ast.FunctionDef, ast.Lambda)):
            default = default_of(owner.node, node.id)
            return node.id if isinstance(default, (ast.Dict, ast.List, ast.Set)) else None
        return None

    def _check_store(self, node: ast.Assign, scope: Scope) -> None:
        for target in node.targets:
            if isinstance(target, ast.Subscript) and self._store_name(target.value, scope):
                store = self._store_name(target.value, scope) or ""
                self._check_kept(node, target.slice, node.value, store, scope)
            elif isinstance(target, ast.Subscript) and self.origin(target.value, scope):
                self.add("torch-compute", node, f"`{_text(node)}` writes a tensor from the host", sure=False)
            elif isinstance(target, ast.Name) and target.id in scope.globals:
                self._check_kept(node, None, node.value, target.id, scope)

    def _check_store_method(self, node: ast.Call, function: ast.Attribute, scope: Scope) -> None:
        store = self._store_name(function.value, scope)
        if store is None or function.attr not in ("append", "add", "setdefault", "insert", "update", "extend"):
            return
        keyed = function.attr in ("setdefault", "insert") and len(node.args) == 2
        key = node.args[0] if keyed else None
        for value in node.args[1:] if keyed else node.args:
            self._check_kept(node, key, value, store, scope)

    def _check_kept(self, node: ast.AST, key: ast.expr | None, value: ast.expr, store: str, scope: Scope) -> None:
        kept = {name for part in _parts(value) for name in self.origin(part, scope)}
        if "out" in kept:
            self.add("result-cache", node, f"{store} keeps the result of this call")
        elif kept - {"fresh"}:
            names = ", ".join(sorted(kept - {"fresh"}))
            self.add("result-cache", node, f"{store} keeps values of {names} for later calls", sure=False)
        for part in (part for item in self._spread(key, scope) for part in ast.walk(item)):
            if isinstance(part, ast.Call) and _asks_identity(part.func):
                what = f"{store} is keyed by `{_text(part)}`, the identity or the values of something"
                self.add("result-cache", node, what, sure=False)
        inside = list(ast.walk(value))
        reads_itself = any(isinstance(part, ast.Name) and part.id == store for part in inside)
        if reads_itself and any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add) for part in inside):
            self.add("result-cache", node, f"{store} counts calls", sure=False)

    def _spread(self, node: ast.expr | None, scope: Scope) -> Iterator[ast.AST]:
        """An expression and the expressions that its names stand for."""
        if node is None:
            return
        yield node
        for item in self.names.definitions(node, scope)[0]:
            if isinstance(item.node, ast.expr) and not isinstance(item.node, ast.Lambda):
                yield item.node

    def _check_counter(self, name: str, node: ast.Global) -> None:
        for binding in self.names.module.bindings.get(name, []):
            value = binding.node
            if isinstance(value, ast.BinOp) and any(isinstance(p, ast.Name) and p.id == name for p in ast.walk(value)):
                self.add("result-cache", node, f"{name} counts calls", sure=False)


def _parts(value: ast.expr) -> Iterator[ast.expr]:
    """An expression, or the items of a literal container."""
    if isinstance(value, (ast.Tuple, ast.List)):
        for item in value.elts:
            yield from _parts(item)
    elif isinstance(value, ast.Dict):
        for item in value.values:
            yield from _parts(item)
    else:
        yield value


def _asks_identity(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in ("id", "hash")
    return isinstance(function, ast.Attribute) and function.attr in ("item", "tolist", "data_ptr", "sum")


def _is_torch(dotted: str) -> bool:
    return dotted.startswith("torch.")


def is_reserved(name: str) -> bool:
    """Whether a name belongs to Python or to the sandbox's guards."""
    guard = name in GUARD_NAMES or re.fullmatch(r"_tmp\d+", name)
    return name.startswith("__") or name.endswith("__roles__") or bool(guard)


def _text(node: Any) -> str:
    """Source text of a node in one short line."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."
