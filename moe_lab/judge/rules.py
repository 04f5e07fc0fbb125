"""The rules that a submission must obey, checked on its text before anything runs.

The rules are data (``data/rules.json``: sentence, reason, remedy, source, confidence, examples, and ``finds``: the
names that break it). Everything that a file uses is spelled as one dotted name: ``torch.matmul``, ``any.__class__``,
``tensor.item``, ``import.os``, ``syntax.Match``, ``option.num_stages=2``. This module spells a text's names, and the
sandbox those of the values that it meets; both look them up in the same table. What a kernel launches is not read
here: see :func:`moe_lab.judge.rulings.rulings`.

A finding is a violation, which rejects the file, or advice. Where the sources are silent, or the text alone cannot
decide, a finding is advice.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter

from moe_lab.judge.names import Names, Scope, carried, parameters
from moe_lab.problem.contract import ARGUMENTS, ENTRY_POINT, Profile, data_dir
from moe_lab.problem.errors import DataError, RuleError, SubmissionError
from moe_lab.problem.submission import Submission

Kind = Literal["sandbox", "contract", "ruling", "limit"]
Level = Literal["violation", "advice"]
Confidence = Literal["stated", "reported", "observed", "inferred"]

#: Kinds that only the contest enforces: under the open profile they are advice.
CONTEST_ONLY: frozenset[str] = frozenset({"ruling", "limit"})
#: What the annotation of a prim_func's parameter is made of.
_ANNOTATION = (
    ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.List, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div,
    ast.FloorDiv, ast.Mod, ast.UnaryOp, ast.USub,
)  # fmt: skip
Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class Find:
    """Names that break a rule, and what is said of them."""

    name: str  # a pattern; <words> stands for one of a list of words
    says: str  # with {name}, its {last} part, the {value} of an option, or the {text} of the place
    where: Literal["host", "kernel"] | None = None  # nothing: everywhere
    level: Literal["advice"] | None = None  # nothing: the rule's own


@dataclass(frozen=True)
class Rule:
    """One rule, as a contestant reads it."""

    id: Text  # short name, for ``moe-lab explain``
    kind: Kind  # "sandbox" and "contract" hold everywhere; "ruling" and "limit" are the contest's
    level: Level  # what a certain breach is
    sentence: Text  # what the rule says
    why: Text
    fix: Text
    source: Text  # where it is known from
    confidence: Confidence  # stated or reported by whom: see data/README.md
    where: Literal["module", "run_kernel", "prim_func", "file"]  # where the examples go
    bad: Text
    good: Text
    finds: tuple[Find, ...]  # none for a rule about the shape of a file


@dataclass(frozen=True)
class Finding:
    """One place where a file breaks a rule, or may."""

    rule_id: str
    level: Level  # "violation" rejects the file, "advice" does not
    message: str  # what was found, then the rule's sentence
    line: int  # in the file, from 1, as the column
    column: int


@dataclass(frozen=True)
class _Policy:
    words: dict[str, list[str]]
    rules: list[Rule]


def _read() -> _Policy:
    path = data_dir() / "rules.json"
    try:
        return TypeAdapter(_Policy).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


_POLICY = _read()
#: Lists of words by name.
WORDS = {name: " ".join(lines).split() for name, lines in _POLICY.words.items()}
#: Every rule by id, in the order of ``data/rules.json``.
RULES = {rule.id: rule for rule in _POLICY.rules}
_PATTERNS = [
    (re.compile(re.sub(r"<(\w+)>", lambda found: "|".join(WORDS[found[1]]), find.name)), rule, find)
    for rule in _POLICY.rules
    for find in rule.finds
]


@functools.lru_cache(1 << 16)
def broken(name: str, where: str) -> tuple[tuple[Rule, Find], ...]:
    """The rules that the use of a name breaks.

    Args:
        name: as this module spells it.
        where: "host" for code that runs in the sandbox, "kernel" for what TileLang traces.

    Returns:
        Each rule, and what was found of it.

    >>> [rule.id for rule, _ in broken("torch.cuda.synchronize", "host")]
    ['torch-name']
    """
    return tuple(
        (rule, find) for pattern, rule, find in _PATTERNS
        if find.where in (None, where) and pattern.fullmatch(name)
    )  # fmt: skip


def what(find: Find, name: str, text: str = "") -> str:
    """What is said of a name that breaks a rule.

    Args:
        find: from :func:`broken`.
        name: as it was looked up.
        text: of the place that uses it.
    """
    name = name.removeprefix("import.")
    last, value = name.rpartition(".")[2], name.rpartition("=")[2]
    return find.says.format(name=name, last=last, value=value, text=text)


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


class _Checker:
    """One pass over one file."""

    def __init__(self, submission: Submission, profile: Profile) -> None:
        self.profile = profile
        self.tree = submission.tree
        # Bytes split where Python's lines end and nowhere else.
        self.lines = submission.source.encode().splitlines()
        self.names = Names(self.tree)
        self.findings: dict[tuple[str, int, int], Finding] = {}

    def run(self) -> list[Finding]:
        self._module_level()
        self._entry()
        for node, scope in self.names.nodes:
            where = "kernel" if scope in self.names.kernels else "host"
            for name, place, sure in self._spelled(node, scope):
                for rule, find in broken(name, where):
                    text = self.text(place) if "{text}" in find.says else ""
                    self.found(rule.id, place, what(find, name, text), sure=sure and find.level is None)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._function(node, scope)
            self._kept(node, scope)
            torch_tensor = isinstance(node, ast.Constant) and "torch.Tensor" in str(node.value)
            if node in self.names.annotated and (torch_tensor or "torch.Tensor" in self.names.library(node, scope)):
                self.found("torch-tensor-annotation", node, f"got the annotation `{self.text(node)}`")
        return sorted(self.findings.values(), key=lambda item: (item.line, item.column, item.rule_id))

    def found(self, rule_id: str, node: ast.AST, what: str, *, sure: bool = True) -> None:
        """Record a finding; one that is not sure is advice."""
        rule = RULES[rule_id]
        line = getattr(node, "lineno", 1)
        before = self.lines[line - 1][: getattr(node, "col_offset", 0)] if line <= len(self.lines) else b""
        column = len(before.decode(errors="ignore")) + 1
        enforced = sure and not (self.profile == "open" and rule.kind in CONTEST_ONLY)
        level: Level = rule.level if enforced else "advice"
        key = (rule_id, line, column)
        if key not in self.findings or (level == "violation" and self.findings[key].level == "advice"):
            self.findings[key] = Finding(rule_id, level, f"{what}. {rule.sentence}", line, column)

    def text(self, node: Any) -> str:
        """The first words of a node in one line."""
        first, last, start, end = node.lineno - 1, node.end_lineno - 1, node.col_offset, node.end_col_offset
        lines = [*self.lines[first : min(last, first + 2) + 1]]
        lines[-1] = lines[-1][: end if last < first + 3 else None]
        lines[0] = lines[0][start:]
        text = " ".join(b" ".join(lines).decode(errors="ignore").split())
        return text if len(text) <= 60 else text[:57] + "..."

    # -- names -------------------------------------------------------------------------------------------------------

    def _spelled(self, node: ast.AST, scope: Scope) -> Iterator[tuple[str, ast.AST, bool]]:
        """The names that a node uses, where, and whether there is no doubt."""
        for name in self._names_of(node, scope):
            yield name, node, True
        if isinstance(node, ast.Call):
            yield from self._call(node, scope)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is not None:
                    keys = {mark[1:] for mark in self.names.marks(key, scope) if mark[0] == "="}
                    for name in sorted(keys | self.names.tilelang(key, scope)):
                        yield from self._option(name, value, key, scope)

    def _names_of(self, node: ast.AST, scope: Scope) -> Iterator[str]:
        names = self.names
        match node:
            case ast.Import() | ast.ImportFrom():
                base = "." * node.level + (node.module or "") + "." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    yield f"import.{base}{alias.name}"
                    yield f"{base}{alias.name}"
                    yield f"name.{alias.asname or alias.name}"
            case ast.Attribute(value=value, attr=attribute):
                yield f"any.{attribute}"
                libraries = names.library(node, scope)
                if node not in names.annotated or "torch.Tensor" not in libraries:  # that has a rule of its own
                    yield from libraries
                if not libraries:
                    yield f"object.{attribute}"
                    if carried(names.marks(value, scope)):
                        yield f"tensor.{attribute}"
                if scope is not names.module:
                    yield f"syntax.Attribute.{type(node.ctx).__name__}"
            case ast.Name(id=name):
                yield f"name.{name}"
                if node not in names.annotated:
                    yield from names.library(node, scope) if isinstance(node.ctx, ast.Load) else ()
                owner = scope.owner(name)
                outside = owner is not None and owner not in names.kernels
                if outside and isinstance(node.ctx, ast.Load) and carried(names.marks(node, scope)) - {"@fresh"}:
                    yield f"traced.{name}"
            case ast.arg(arg=name):
                yield f"name.{name}"
            case ast.BinOp(left=left, op=op, right=right) | ast.AugAssign(target=left, op=op, value=right):
                yield f"syntax.{type(node).__name__}.{type(op).__name__}"
                if isinstance(node, ast.AugAssign):
                    yield f"syntax.AugAssign.{type(left).__name__}"
                if carried(names.marks(left, scope) | names.marks(right, scope)):
                    yield "arithmetic.tensor"
            case ast.Assign(targets=[ast.Subscript(value=target), *_]) if carried(names.marks(target, scope)):
                yield "write.tensor"
            case ast.AnnAssign() if scope is names.module:
                pass  # no statement of the module level at all
            case _:
                yield f"syntax.{type(node).__name__}"
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield f"name.{node.name}"

    def _call(self, node: ast.Call, scope: Scope) -> Iterator[tuple[str, ast.AST, bool]]:
        names = self.names
        libraries, given = names.library(node.func, scope), [names.marks(item, scope) for item in node.args]
        options = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
        last = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if any(name.startswith("torch.") and not broken(name, "sandbox") for name in libraries):
            yield from ((f"keyword.{name}", value, True) for name, value in options.items())
        if any(carried(marks) - {"@fresh"} for marks in given):
            yield from ((f"read.{name[9:]}", node, True) for name in libraries if name.startswith("builtins."))
        if last == "to" and carried(names.marks(node.func, scope)) and any("=cpu" in marks for marks in given):
            yield "read.to_cpu", node, True
        known = names.tilelang(node.func, scope)
        if "Pipelined" in known and len(node.args) > 2:
            options["num_stages"] = node.args[2]
        for name, value in options.items() if known else ():
            yield from self._option(name, value, node, scope)

    def _option(
        self, name: str, value: ast.expr, place: ast.AST, scope: Scope
    ) -> Iterator[tuple[str, ast.AST, bool]]:  # fmt: skip
        """Values that an option may have; those that break a rule do so for sure if no other does not."""
        spelled = [f"option.{name}{mark}" for mark in sorted(self.names.marks(value, scope)) if mark[0] == "="]
        bad = [item for item in spelled if broken(item, "host")]
        yield from ((item, place, len(bad) == len(spelled)) for item in bad)

    # -- the shape of a file -----------------------------------------------------------------------------------------

    def _module_level(self) -> None:
        defined: set[str] = set()
        for position, node in enumerate(self.tree.body):
            match node:
                case ast.FunctionDef(name=name):
                    if name in defined:
                        self.found("duplicate-definition", node, f"got a second definition of {name}")
                    defined.add(name)
                case ast.Import() | ast.ImportFrom() | ast.ClassDef():
                    continue
                case ast.Expr(value=ast.Constant(value=str())) if position == 0:
                    continue
                case ast.Assign():
                    for target in node.targets:
                        items = target.elts if isinstance(target, ast.Tuple) else [target]
                        if not all(isinstance(item, ast.Name) for item in items):
                            self.found("module-target", target, f"got the target `{self.text(target)}`")
                    try:
                        ast.literal_eval(node.value)
                    except (ValueError, TypeError, SyntaxError, MemoryError):
                        self.found("module-literal", node.value, f"got `{self.text(node.value)}`")
                case _:
                    self.found("module-statement", node, f"got `{self.text(node)}`")

    def _entry(self) -> None:
        found = [node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name == ENTRY_POINT]
        if not found:
            self.found("entry-missing", self.tree, f"got no function {ENTRY_POINT}")
            return
        node, arguments, rule = found[-1], found[-1].args, "entry-signature"
        listed = parameters(node)
        names, wanted = [parameter.arg for parameter in listed], [argument.name for argument in ARGUMENTS]
        if node.decorator_list:
            self.found(rule, node.decorator_list[0], f"{ENTRY_POINT} has a decorator")
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
            self.found(rule, node, f"{ENTRY_POINT} has *, / or ** parameters")
        elif len(names) != len(wanted):
            self.found(rule, node, f"got {len(names)} parameters, expected {len(wanted)}")
        elif names != wanted:
            wrong = [pair for pair in zip(names, wanted, strict=True) if pair[0] != pair[1]]
            swapped = any(got in wanted for got, _ in wrong)
            self.found(rule, node, f"parameter {wrong[0][0]} stands where {wrong[0][1]} belongs", sure=swapped)
        if arguments.defaults or any(parameter.annotation for parameter in listed) or node.returns:
            self.found(rule, node, f"{ENTRY_POINT} has default values or annotations")
        for child, scope in self.names.nodes:
            if scope.node is node and isinstance(child, (ast.Yield, ast.YieldFrom)):
                self.found(rule, child, f"{ENTRY_POINT} is a generator, so calling it runs nothing")

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        decorators = self.names.decorators(node, scope)
        known = {name for _, names in decorators for name in names}
        for decorator, names in decorators:
            if not names & {"jit", "prim_func"} and not (node.name == ENTRY_POINT and scope is self.names.module):
                sure = not names & {"macro", "autotune"}
                self.found("decorator", decorator, f"got @{self.text(decorator)} on {node.name}", sure=sure)
        if "prim_func" in known:
            for parameter in parameters(node):
                self._annotation(parameter, scope)
        elif "jit" in known and self.names.scopes[node] in self.names.kernels:
            self.found("eager-kernel", node, f"{node.name} holds a kernel itself")

    def _annotation(self, parameter: ast.arg, scope: Scope) -> None:
        """The judge reads what annotates a prim_func's parameter without running it."""
        whole, rule = parameter.annotation, "prim-func-annotation"
        head = whole.func if isinstance(whole, ast.Call) else whole.value if isinstance(whole, ast.Subscript) else None
        if whole is None or head is None or "Tensor" not in self.names.tilelang(head, scope):
            shown = f"`{self.text(whole)}`" if whole else "no annotation"
            self.found(rule, whole or parameter, f"parameter {parameter.arg} has {shown}")
            return
        for part in (node for node in ast.walk(whole) if isinstance(node, ast.expr) and node is not whole):
            name = getattr(part, "id", "") or getattr(part, "attr", "")
            foreign = isinstance(part, ast.Attribute) and not self.names.tilelang(part, scope)
            known = isinstance(part, _ANNOTATION) and isinstance(getattr(part, "op", ast.Add()), _ANNOTATION)
            if not known or foreign or name.startswith("_"):
                self.found(rule, part, f"`{self.text(part)}` in the annotation of {parameter.arg}")
                return

    # -- what is kept between calls ----------------------------------------------------------------------------------

    def _kept(self, node: ast.AST, scope: Scope) -> None:
        """Report what a statement puts into a container or a name that outlives the call."""
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target, ast.Subscript):
                        self._keep(node, target.value, target.slice, [value], scope)
                    elif isinstance(target, ast.Name) and target.id in scope.globals:
                        self._keep(node, target, None, [value], scope)
            case ast.Call(func=ast.Attribute(value=base, attr="setdefault" | "insert"), args=[key, value]):
                self._keep(node, base, key, [value], scope)
            case ast.Call(func=ast.Attribute(value=base, attr="append" | "add" | "update" | "extend"), args=values):
                self._keep(node, base, None, values, scope)

    def _keep(
        self, node: ast.AST, base: ast.expr, key: ast.expr | None, values: list[ast.expr], scope: Scope
    ) -> None:  # fmt: skip
        stores = [mark[6:] for mark in self.names.marks(base, scope) if mark.startswith("store:")]
        store = base.id if isinstance(base, ast.Name) and base.id in scope.globals else next(iter(stores), "")
        if not store:
            return
        kept = {mark[1:] for value in values for mark in carried(self.names.marks(value, scope))} - {"fresh"}
        said = []
        if kept and "out" not in kept:
            said.append(f"{store} keeps values of {', '.join(sorted(kept))} for later calls")
        if key is not None and "identity:" in self.names.marks(key, scope):
            said.append(f"{store} is keyed by `{self.text(key)}`, the identity or the values of something")
        inside = [part for value in values for part in ast.walk(value)]
        if any(isinstance(part, ast.Name) and part.id == store for part in inside) and any(
            isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add) for part in inside
        ):
            said.append(f"{store} counts calls")
        if "out" in kept:
            self.found("result-cache", node, f"{store} keeps the result of this call")
        for what in said:
            self.found("result-cache", node, what, sure=False)
