"""The exercises of the notebooks: data beside each notebook, and the check of what the reader filled in.

``notebooks/exercises/NN_name.yaml`` lists the exercises of one notebook; the README beside it says what each field
means. :mod:`moe_lab.lesson.notebooks` writes the cells from there, so that a gap and its solution cannot drift apart.

A check compares behaviour, never text. The reader's answer is observed, the solution is observed in the same way, and
the two must agree. If they do not, every known mistake is observed too, and the one that behaves like the reader's
answer names it.
"""

import ast
import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
import yaml

import moe_lab
from moe_lab.lesson import kernels
from moe_lab.problem.contract import CASES, Case, data_dir
from moe_lab.problem.errors import DataError, ExerciseError

#: What a gap, a solution and a mistake may use.
_NAMES: dict[str, Any] = {"math": math, "torch": torch, "F": F, "CASES": CASES}
#: What an exercise looks at: (what was asked, what came back) for each probe.
Observation = list[tuple[str, Any]]


@dataclass(frozen=True)
class Exercise:
    """One exercise; ``solution`` and each mistake (by its name) are whole source."""

    notebook: str
    key: str
    kind: str
    title: str
    task: str
    answer: str
    gap: str
    hints: list[str]
    solution: str
    mistakes: dict[str, str]
    lesson: str
    probes: Sequence[str] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)  # of a kernel, as Python over the names of a probe
    build: str = ""  # what its builder is called with
    reference: str = ""  # what its last argument holds afterwards

    def run(self, code: str) -> Any:
        """Execute ``code`` and return what it bound to ``answer``; kernels and submissions stay source."""
        if self.kind in ("kernel", "submission"):
            return code
        namespace = dict(_NAMES)
        exec(code, namespace)
        return namespace[self.answer]

    def observe(self, answer: Any) -> Observation:
        """What ``answer`` does, in the way of this kind of exercise."""
        return KINDS[self.kind](self, answer)


def _read(path: Path) -> list[Exercise]:
    try:
        entries = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return [_exercise(path.stem, **entry) for entry in entries]
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path.name}: got {' '.join(str(error).split())}, expected exercises") from None


def _exercise(notebook: str, *, fill: Any = None, code: str = "", mistakes: list[dict], **rest: Any) -> Exercise:
    texts: dict[str, Any] = {name: item.rstrip("\n") if isinstance(item, str) else item for name, item in rest.items()}
    named = {each.pop("name"): _source(texts["gap"], **each) for each in mistakes}
    return Exercise(notebook, solution=_source(texts["gap"], fill, code), mistakes=named, **texts)


def _source(gap: str, fill: Any = None, code: str = "") -> str:
    """Whole source: ``code``, or the gap with a ``fill`` in the place of each ``...``, at its indentation."""
    if code:
        return code.rstrip("\n")
    source, *pieces = gap.split("...")
    for text, piece in zip(fill if isinstance(fill, list) else [fill], pieces, strict=True):
        line = source.rpartition("\n")[2]
        margin = line[: len(line) - len(line.lstrip())]
        source += str(text).rstrip("\n").replace("\n", f"\n{margin}") + piece
    return source


# --- what is compared ------------------------------------------------------------------------------------------------


def _of_a_value(exercise: Exercise, answer: Any) -> Observation:
    return [(exercise.answer, answer)]


def _of_a_function(exercise: Exercise, answer: Any) -> Observation:
    if not callable(answer):
        raise TypeError(f"{exercise.answer} is {_show(answer)}, expected a function")
    # Made anew for each answer, so that one that edits its arguments spoils nothing.
    calls = [eval(f"({probe},)", dict(_NAMES)) for probe in exercise.probes]
    return [(f"{exercise.answer}({', '.join(map(_show, call))})", answer(*call)) for call in calls]


@dataclass(frozen=True)
class _Outcome:
    """What became of an edited submission, and what the judge said of it, which is not compared."""

    kind: str
    said: str = field(default="", compare=False)


def _of_a_cheat(exercise: Exercise, answer: Any) -> Observation:
    """Observe a function that edits the baseline's text, by what the judge says to the result."""
    from moe_lab.steps import step

    source = step("s0_baseline").source
    edited = answer(source)
    if isinstance(edited, str):
        edited = _Outcome("the same text") if edited == source else _judged(edited)
    return [(f"{exercise.answer}(source)", edited)]


def _of_a_submission(exercise: Exercise, answer: Any) -> Observation:
    return [(exercise.answer, _judged(answer.partition("\n")[2]))]  # below the cell magic


@functools.cache
def _judged(source: str) -> _Outcome:
    """What one routing of the judge says to a text."""
    from moe_lab.judge import Verdict, judge
    from moe_lab.judge.plan import Plan, structural_groups
    from moe_lab.problem.submission import Submission

    plan = Plan(structural_groups(random.Random(0))[:1], variants=False, fit=False)
    report = judge(Submission(source, "cheat.py"), seed=1, plan=plan)
    match report.verdict, any(case.calls for case in report.cases):
        case Verdict.ACCEPTED, _:
            return _Outcome("an accepted file")
        case ((Verdict.WRONG_ANSWER | Verdict.RULE_VIOLATION), True):
            return _Outcome("a file that is caught by what it does")
        case Verdict.RULE_VIOLATION, False:  # Nothing was computed: the text is refused, not what it does.
            return _Outcome("a text that a rule refuses", f" ({report.sentence})")
    return _Outcome("a file that does not run", f" ({report.sentence})")


#: What each kind of exercise compares: given the exercise and an answer, what was asked and what came back for each
#: probe. The reader's answer, the solution and each mistake go through it alike.
KINDS: dict[str, Callable[[Exercise, Any], Observation]] = {
    "value": _of_a_value,
    "function": _of_a_function,
    "cheat": _of_a_cheat,
    "kernel": kernels.observe,
    "submission": _of_a_submission,
}


# --- the check -------------------------------------------------------------------------------------------------------


def check(key: str, answer: Any) -> None:
    """Say whether an exercise is solved: print one sentence, or raise with the name of the mistake.

    Args:
        key: the exercise.
        answer: the function or value of the reader.

    Raises:
        ExerciseError: for a wrong answer, with what came, what was expected and, if it is a usual mistake, its name;
            for an unknown key.

    >>> check("flops", ...)
    Not filled in yet: replace the ... above and run this cell again. Three hints and the solution are below.
    """
    exercise = EXERCISES.get(key)
    if exercise is None:
        raise ExerciseError(f"got exercise {key!r}, expected one of {', '.join(EXERCISES)}")
    solved = kernels.solved if exercise.kind == "kernel" else _solved
    if solved(exercise, answer):
        print(f"Right. {exercise.lesson}")
    else:
        print(
            "Not filled in yet: replace the ... above and run this cell again. Three hints and the solution are below."
        )


def _solved(exercise: Exercise, answer: Any) -> bool:
    """Whether the gap is filled with what behaves like the solution; anything else that fills it raises."""
    got, gap = _try(exercise, answer), _has_gap(answer)
    # A solution may take a run of the judge to observe: not for a gap that says so itself.
    untouched = gap and (isinstance(got, Exception) or any(item is ... for _, item in got))
    if not untouched and _same(got, expected := exercise.observe(exercise.run(exercise.solution))):
        return True
    if gap:
        return False
    raise _explain(exercise, got, expected)


def _try(exercise: Exercise, answer: Any) -> Observation | Exception:
    try:
        return exercise.observe(answer)
    except Exception as error:  # noqa: BLE001 -- whatever a reader's code raises becomes one sentence
        return error


def _explain(exercise: Exercise, got: Observation | Exception, expected: Observation) -> ExerciseError:
    made = (name for name, code in exercise.mistakes.items() if _same(got, _try(exercise, exercise.run(code))))
    mistake = next(made, None)
    if isinstance(got, Exception):
        sentence = f"{exercise.title}: your code raised {type(got).__name__}: {got}"
        if mistake is None:
            return ExerciseError(sentence, type(got).__name__)
        return ExerciseError(f"{sentence.rstrip('.')}. This is what comes out if {mistake}.", mistake)
    pairs = zip(got, expected, strict=True)
    asked, value, wanted = next((*each, item) for each, (_, item) in pairs if not _same(each[1], item))
    sentence = f"{exercise.title}: got {_show(value)}, {_miss(value, wanted)}"
    if exercise.kind != "value":
        sentence = f"{exercise.title}: for {asked} got {_show(value)}, expected {_show(wanted)}"
    if mistake is not None:
        return ExerciseError(f"{sentence}. This is what comes out if {mistake}.", mistake)
    if value is None and exercise.gap.startswith("def "):
        return ExerciseError(f"{sentence}, usually because the function has no return.")
    return ExerciseError(f"{sentence}. It is none of the usual mistakes; the hints below may help.")


def _miss(value: Any, wanted: Any) -> str:
    """What is wrong with a value, without the right one, which is the whole solution."""
    if isinstance(wanted, tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(wanted):
            return f"expected {len(wanted)} values"
        return f"of which {sum(map(_same, value, wanted))} of {len(wanted)} are right"
    return "expected another one" if type(value) is type(wanted) else f"expected a {type(wanted).__name__}"


def predict(key: str, guess: Any) -> None:
    """Say how far a guess is from the answer, which ``notebooks/exercises/predictions.yaml`` computes.

    Args:
        key: the prediction.
        guess: a number, or one of the words that the question offers; ``...`` for none yet.

    Raises:
        ExerciseError: for an unknown key, or a guess that is neither.

    >>> predict("rows_of_out", ...)
    No guess yet: put yours in the place of the ... and run this cell.
    >>> predict("rows_of_out", 256)
    Your guess 256, the answer 384 rows: 1.5 times your guess.
    """
    if (entry := PREDICTIONS.get(key)) is None:
        raise ExerciseError(f"got prediction {key!r}, expected one of {', '.join(PREDICTIONS)}")
    words = entry.get("words", [])
    if guess is ...:
        choose = f" Choose one of {', '.join(map(repr, words))}." if words else ""
        print(f"No guess yet: put yours in the place of the ... and run this cell.{choose}")
        return
    if guess not in words if words else isinstance(guess, bool) or not isinstance(guess, (int, float)):
        raise ExerciseError(f"got {guess!r}, expected {' or '.join(map(repr, words)) or 'a number'}")
    names = {node.id for node in ast.walk(ast.parse(entry["answer"])) if isinstance(node, ast.Name)}
    known = {name: getattr(moe_lab, name) for name in names if hasattr(moe_lab, name)}
    answer = eval(entry["answer"], {**_NAMES, **known})
    if words:
        print("Right." if guess == answer else f"The answer is {answer!r}. See below why.")
        return
    said = f"Your guess {_show(guess)}, the answer {answer:.3g} {entry['unit']}"
    if math.isclose(guess, answer, rel_tol=0.01):
        print(f"{said}: right.")
    elif guess > 0 < answer and (ratio := answer / guess):
        print(f"{said}: {ratio:{'.2g' if ratio < 10 else '.0f'}} times your guess.{' Close!' * (0.8 < ratio < 1.25)}")
    else:
        print(f"{said}.")


def _has_gap(answer: Any) -> bool:
    """Whether ``...`` is still the answer or somewhere in the code of a function."""

    def in_code(code: CodeType) -> bool:
        return any(item is ... or (isinstance(item, CodeType) and in_code(item)) for item in code.co_consts)

    if isinstance(answer, (tuple, list)):
        return any(item is ... for item in answer)
    if isinstance(answer, str) and answer.startswith("%%"):
        return bool(kernels.gaps(answer.partition("\n")[2]))
    code = getattr(answer, "__code__", None)
    return answer is ... or (isinstance(code, CodeType) and in_code(code))


def _same(got: Any, expected: Any) -> bool:
    """Equality that forgives list for tuple, int for float and rounding; never a wrong shape or a NaN."""
    if isinstance(expected, torch.Tensor) or isinstance(got, torch.Tensor):
        got, expected = (torch.as_tensor(item) if isinstance(item, (int, float)) else item for item in (got, expected))
        if not (isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor)) or got.shape != expected.shape:
            return False
        return torch.allclose(got.double(), expected.double(), rtol=1e-3, atol=1e-5)
    if isinstance(expected, (tuple, list)):
        alike = isinstance(got, (tuple, list)) and len(got) == len(expected)
        return alike and all(map(_same, got, expected))
    if isinstance(expected, (int, float)) and isinstance(got, (int, float)):
        return math.isclose(got, expected, rel_tol=1e-6)
    if isinstance(expected, Exception):
        got, expected = (f"{type(item).__name__}: {item}" for item in (got, expected))
    return type(got) is type(expected) and bool(got == expected)


def _show(item: Any) -> str:
    """A short text for a message."""
    if isinstance(item, torch.Tensor):
        if item.numel() <= 8:
            return str([round(number, 4) for number in item.flatten().tolist()])
        head = ", ".join(f"{number:.4g}" for number in item.flatten()[:3].tolist())
        return f"a tensor of shape {tuple(item.shape)} that begins {head}"
    if isinstance(item, Case):
        return item.name
    if isinstance(item, _Outcome):
        return item.kind + item.said
    if isinstance(item, float):
        return f"{item:.6g}"
    if isinstance(item, (tuple, list)):
        return f"({', '.join(map(_show, item))})"
    if callable(item):
        return getattr(item, "__name__", type(item).__name__)
    text = repr(item)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- the exercises ---------------------------------------------------------------------------------------------------

_FOLDER = data_dir().parent / "notebooks" / "exercises"
#: Every exercise by key, in the order of the notebooks.
EXERCISES: dict[str, Exercise] = {
    exercise.key: exercise for path in sorted(_FOLDER.glob("[0-9]*.yaml")) for exercise in _read(path)
}
#: What is predicted, by key: ``answer`` (Python over the names of :mod:`moe_lab`), its ``unit`` or the ``words`` to
#: choose from.
PREDICTIONS: dict[str, dict[str, Any]] = yaml.safe_load((_FOLDER / "predictions.yaml").read_text(encoding="utf-8"))


def of_notebook(notebook: str) -> list[Exercise]:
    """The exercises of one notebook (its stem), in order."""
    return [exercise for exercise in EXERCISES.values() if exercise.notebook == notebook]
