"""The rules that a submission must obey, checked on its text before anything runs.

The rules are data (``data/rules.json``: sentence, reason, remedy, source, confidence, examples, and ``finds``: the
names that break it). Everything that a file uses is spelled as one dotted name: ``torch.matmul``, ``any.__class__``,
``tensor.item``, ``import.os``, ``syntax.Match``, ``option.num_stages=2``. This module spells a text's names, the
sandbox those of the values that it meets, and :mod:`moe_lab.judge.rulings` those of what a kernel launches.
"""

import ast
import difflib
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field, TypeAdapter

from moe_lab.judge.names import Names, Scope, carried, parameters
from moe_lab.problem.contract import ARGUMENTS, ENTRY_POINT, Profile, data_dir
from moe_lab.problem.errors import DataError, RuleError, SubmissionError
from moe_lab.problem.submission import Submission

Kind = Literal["sandbox", "contract", "ruling", "limit"]
Level = Literal["violation", "advice"]
Confidence = Literal["stated", "reported", "observed", "inferred"]
Text = Annotated[str, Field(min_length=1)]
#: A name that is used, where, and whether there is no doubt.
_Spelled: TypeAlias = tuple[str, ast.AST, bool]

#: Kinds that only the contest enforces: under the open profile they are advice.
_CONTEST_ONLY = ("ruling", "limit")


@dataclass(frozen=True)
class Find:
    """Names that break a rule, and what is said of them."""

    name: str  # a pattern; <words> stands for one of a list of words
    says: str  # with {name}, its {last} part, its {value} after =, or the {text} of the place
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
    finds: tuple[Find, ...]


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


try:
    _POLICY = TypeAdapter(_Policy).validate_json((data_dir() / "rules.json").read_bytes())
except (OSError, ValueError) as error:
    raise DataError(f"{data_dir() / 'rules.json'} cannot be read: {error}") from None
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
def broken(name: str, where: str) -> tuple[tuple[Rule, Level, str], ...]:
    """The rules that a name breaks in "host" code or in a "kernel", their levels, and what is said but for the {text}.

    >>> [(rule.id, said) for rule, _, said in broken("torch.cuda", "host")]
    [('torch-name', 'got torch.cuda')]
    """
    short = name.removeprefix("import.")
    last, value = short.rpartition(".")[2], short.rpartition("=")[2]
    return tuple(
        (rule, find.level or rule.level, find.says.format(name=short, last=last, value=value, text="{text}"))
        for pattern, rule, find in _PATTERNS
        if find.where in (None, where) and pattern.fullmatch(name)
    )


def explain(rule_id: str | None = None) -> str:
    """A rule for people, or the list of all rules. Raises RuleError for an unknown id, with the nearest ones."""
    if rule_id is None:
        width = max(map(len, RULES))
        lines = [f"{rule.id:{width}}  {rule.kind:8}  {rule.sentence}" for rule in RULES.values()]
        return "\n".join([*lines, "", "moe-lab explain RULE says why, what to do, and where it is known from."])
    if rule_id not in RULES:
        near = difflib.get_close_matches(rule_id, RULES, n=3, cutoff=0.4) or list(RULES)[:3]
        raise RuleError(f"got rule {rule_id!r}, expected an id such as {', '.join(near)}; `moe-lab explain` lists all")
    rule = RULES[rule_id]
    scope = "the contest's own: advice under --profile open" if rule.kind in _CONTEST_ONLY else "under every profile"
    return "\n".join([
        f"{rule.id} ({rule.kind}, {rule.level}; {scope})", "", rule.sentence, "",
        f"Why     {rule.why}", f"Do      {rule.fix}", f"Known   {rule.confidence}: {rule.source}", "",
        "Breaks it:", *("    " + line for line in rule.bad.splitlines()), "",
        "Fine:", *("    " + line for line in rule.good.splitlines()),
    ])  # fmt: skip


def told(message: str, rule_id: str, others: int = 0) -> str:
    """A finding as the one sentence of a verdict or an error, with the way to more and to ``others``.

    >>> told("got x. It is refused.", "some-rule", 2)
    'got x. It is refused (and 2 more); `moe-lab explain some-rule` says why'
    """
    more = f" (and {others} more)" if others else ""
    return f"{message.removesuffix('.')}{more}; `moe-lab explain {rule_id}` says why"


def check(submission: Submission, profile: Profile = "contest") -> list[Finding]:
    """Find every place where a file breaks a rule, without running it, in the order of the file.

    The file is rejected if a finding is a violation. What the sources or the text alone leave open is advice, and
    under "open" the contest's rulings and limits are.

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
        self.profile, self.tree = profile, submission.tree
        # Bytes split where Python's lines end and nowhere else.
        self.lines = submission.source.encode().splitlines()
        self.names = Names(self.tree)
        self.findings: dict[tuple[str, int, int], Finding] = {}

    def run(self) -> list[Finding]:
        self._look_up([*self._module_level(), *self._entry()], "host")
        for node, scope in self.names.nodes:
            self._look_up(self._spelled(node, scope), "kernel" if scope in self.names.kernels else "host")
        return sorted(self.findings.values(), key=lambda item: (item.line, item.column, item.rule_id))

    def _look_up(self, spelled: Iterable[_Spelled], where: str) -> None:
        for name, place, sure in spelled:
            for rule, level, said in broken(name, where):
                if not sure or (self.profile == "open" and rule.kind in _CONTEST_ONLY):
                    level = "advice"
                line = getattr(place, "lineno", 1)
                before = self.lines[line - 1][: getattr(place, "col_offset", 0)] if line <= len(self.lines) else b""
                key = (rule.id, line, len(before.decode(errors="ignore")) + 1)
                if key not in self.findings or (level == "violation" and self.findings[key].level == "advice"):
                    text = " ".join(ast.unparse(place).split()) if "{text}" in said else ""
                    said = said.replace("{text}", text if len(text) <= 60 else text[:57] + "...")
                    self.findings[key] = Finding(rule.id, level, f"{said}. {rule.sentence}", *key[1:])

    # -- the shape of a file -----------------------------------------------------------------------------------------

    def _module_level(self) -> Iterator[_Spelled]:
        defined: set[str] = set()
        for position, node in enumerate(self.tree.body):
            match node:
                case ast.FunctionDef(name=name):
                    if name in defined:
                        yield f"module.again.{name}", node, True
                    defined.add(name)
                case ast.Expr(value=ast.Constant(value=str())) if position == 0:
                    pass
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        items = target.elts if isinstance(target, ast.Tuple) else [target]
                        yield from ((f"module.target.{type(item).__name__}", target, True) for item in items)
                    try:
                        ast.literal_eval(value)
                    except (ValueError, TypeError, SyntaxError, MemoryError):
                        yield "module.value", value, True
                case _:
                    yield f"module.{type(node).__name__}", node, True

    def _entry(self) -> Iterator[_Spelled]:
        found = [node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name == ENTRY_POINT]
        if not found:
            yield "entry.missing", self.tree, True
            return
        node, scope = found[-1], self.names.scopes[found[-1]]
        names, wanted = [item.arg for item in parameters(node)], [argument.name for argument in ARGUMENTS]
        problems = {
            "decorator": node.decorator_list,
            f"parameters={len(names)}": len(names) != len(wanted),
            "form": node.returns or ast.unparse(node.args) != ", ".join(names),
            "generator": any(isinstance(item, (ast.Yield, ast.YieldFrom)) and home is scope
                             for item, home in self.names.nodes),
        }  # fmt: skip
        yield from ((f"entry.{problem}", node, True) for problem, there in problems.items() if there)
        for got, name in zip(names, wanted, strict=False):
            if got != name:
                yield f"entry.{'order' if got in wanted else 'name'}.{got} where {name} belongs", node, True

    # -- names -------------------------------------------------------------------------------------------------------

    def _spelled(self, node: ast.AST, scope: Scope) -> Iterator[_Spelled]:
        yield from ((name, node, True) for name in self._names_of(node, scope))
        yield from self._kept(node, scope)
        if isinstance(node, ast.Call):
            yield from self._call(node, scope)
        elif isinstance(node, ast.FunctionDef):
            yield from self._function(node, scope)
        elif isinstance(node, ast.Dict):
            for key, value in [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key]:
                known = {mark[1:] for mark in self.names.marks(key, scope) if mark[0] == "="}
                for name in sorted(known | self.names.tilelang(key, scope)):
                    yield from self._option(name, value, key, scope)

    def _names_of(self, node: ast.AST, scope: Scope) -> Iterator[str]:
        names, kind = self.names, "annotation." if node in self.names.annotated else ""
        match node:
            case ast.Import() | ast.ImportFrom():
                base = "." * node.level + (node.module or "") + "." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    dotted = base + alias.name
                    yield from (f"import.{dotted}", dotted, f"name.{alias.asname or alias.name}")
            case ast.Attribute(value=value, attr=attribute):
                yield f"any.{attribute}"
                libraries = names.library(node, scope)
                yield from (kind + library for library in libraries)
                if not libraries:
                    yield f"object.{attribute}"
                    if carried(names.marks(value, scope)):
                        yield f"tensor.{attribute}"
                if scope is not names.module:
                    yield f"syntax.Attribute.{type(node.ctx).__name__}"
            case ast.Name(id=name):
                yield f"name.{name}"
                if isinstance(node.ctx, ast.Load):
                    yield from (kind + library for library in names.library(node, scope))
                    if scope.owner(name) not in names.kernels and carried(names.marks(node, scope)) - {"@fresh"}:
                        yield f"traced.{name}"
            case ast.Constant(value=str(text)) if kind:
                yield f"{kind}text.{text}"
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
            case _:
                yield f"syntax.{type(node).__name__}"
                yield from (f"name.{name}" for name in [getattr(node, "name", None)] if name)

    def _call(self, node: ast.Call, scope: Scope) -> Iterator[_Spelled]:
        names = self.names
        libraries, given = names.library(node.func, scope), [names.marks(item, scope) for item in node.args]
        options = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
        if any(name.startswith("torch.") for name in libraries):
            yield from ((f"keyword.{name}", value, True) for name, value in options.items())
        if any(carried(marks) - {"@fresh"} for marks in given):
            yield from ((f"read.{name[9:]}", node, True) for name in libraries if name.startswith("builtins."))
        if carried(names.marks(node.func, scope)) and any("=cpu" in marks for marks in given):
            yield "read.to_cpu", node, True
        known = names.tilelang(node.func, scope)
        if "Pipelined" in known and len(node.args) > 2:
            options["num_stages"] = node.args[2]
        for name, value in options.items() if known else ():
            yield from self._option(name, value, node, scope)

    def _option(self, name: str, value: ast.expr, place: ast.AST, scope: Scope) -> Iterator[_Spelled]:
        """Values that an option may have; those that break a rule do so for sure if no other does not."""
        spelled = [f"option.{name}{mark}" for mark in sorted(self.names.marks(value, scope)) if mark[0] == "="]
        bad = [item for item in spelled if broken(item, "host")]
        yield from ((item, place, len(bad) == len(spelled)) for item in bad)

    def _function(self, node: ast.FunctionDef, scope: Scope) -> Iterator[_Spelled]:
        known: set[str] = set()
        for decorator, names in self.names.decorators(node, scope):
            known |= names
            # One of several names that it may have is enough.
            best = next((name for name in ("jit", "prim_func", "macro", "autotune") if name in names), "other")
            yield f"decorator.{best}", decorator, True
        if "jit" in known and "prim_func" not in known and self.names.scopes[node] in self.names.kernels:
            yield f"eager.{node.name}", node, True
        # The judge reads what annotates a prim_func's parameter without running it.
        for parameter in parameters(node) if "prim_func" in known else ():
            whole = parameter.annotation
            head = (
                whole.func if isinstance(whole, ast.Call) else whole.value if isinstance(whole, ast.Subscript) else None
            )
            if whole is None or head is None or "Tensor" not in self.names.tilelang(head, scope):
                yield "parameter.other", parameter, True
                continue
            for part in ast.walk(whole):
                if isinstance(part, ast.expr) and part is not whole:
                    kind = type(getattr(part, "op", part)).__name__
                    foreign = isinstance(part, ast.Attribute) and not self.names.tilelang(part, scope)
                    private = (getattr(part, "id", "") or getattr(part, "attr", "")).startswith("_")
                    yield f"parameter.{'foreign' if foreign or private else kind}", part, True

    def _kept(self, node: ast.AST, scope: Scope) -> Iterator[_Spelled]:
        """What a statement puts into a container or a name that outlives the call."""
        places: list[tuple[ast.expr, ast.expr | None]] = []
        values: list[ast.expr] = []
        match node:
            case ast.Assign(targets=targets, value=value):
                values = [value]
                places += [(target.value, target.slice) for target in targets if isinstance(target, ast.Subscript)]
                places += [(target, None) for target in targets if getattr(target, "id", "") in scope.globals]
            case ast.Call(func=ast.Attribute(value=base, attr="setdefault" | "insert"), args=[key, value]):
                places, values = [(base, key)], [value]
            case ast.Call(func=ast.Attribute(value=base, attr="append" | "add" | "update" | "extend"), args=given):
                places, values = [(base, None)], given
        for base, index in places:
            name = getattr(base, "id", "")
            if name not in scope.globals and "store:" not in self.names.marks(base, scope):
                continue
            kept = {mark[1:] for value in values for mark in carried(self.names.marks(value, scope))} - {"fresh"}
            yield from ((f"kept.{item}", node, True) for item in sorted(kept))
            if index is not None and "identity:" in self.names.marks(index, scope):
                yield "kept_by_identity", node, True
            if {name, ast.Add} <= {getattr(part, "id", type(part)) for value in values for part in ast.walk(value)}:
                yield "kept_count", node, True
