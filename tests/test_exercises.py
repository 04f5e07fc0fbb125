"""Every exercise: its solution passes, its gap is met kindly, its usual mistakes are named."""

from __future__ import annotations

import itertools

import pytest
import torch

from moe_lab.errors import ExerciseError
from moe_lab.exercises import EXERCISES, Exercise, check, of_notebook

EACH = pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES.keys())
MISTAKES = [
    pytest.param(exercise, mistake, id=f"{exercise.key}-{number}")
    for exercise in EXERCISES.values()
    for number, mistake in enumerate(exercise.mistakes)
]


@EACH
def test_solution_passes(exercise: Exercise, capsys: pytest.CaptureFixture[str]) -> None:
    check(exercise.key, exercise.run(exercise.solution))
    assert capsys.readouterr().out == f"Right. {exercise.lesson}\n"


@EACH
def test_untouched_gap_is_met_kindly(exercise: Exercise, capsys: pytest.CaptureFixture[str]) -> None:
    assert "..." in exercise.gap
    check(exercise.key, exercise.run(exercise.gap))
    assert capsys.readouterr().out.startswith("Not filled in yet")


@pytest.mark.parametrize(("exercise", "mistake"), MISTAKES)
def test_usual_mistake_is_named(exercise: Exercise, mistake) -> None:
    with pytest.raises(ExerciseError, match=r"got .*, expected") as caught:
        check(exercise.key, exercise.run(mistake.code))
    assert caught.value.mistake == mistake.name
    assert mistake.name in str(caught.value)


@EACH
def test_is_complete_and_its_mistakes_differ(exercise: Exercise) -> None:
    assert len(exercise.mistakes) >= 2
    assert len(set(exercise.hints)) == 3
    assert exercise.answer in exercise.gap
    # The cell shows the gap, so the solution must start from the same lines.
    assert exercise.gap.splitlines()[0].split("=")[0] == exercise.solution.splitlines()[0].split("=")[0]
    seen = [
        repr(exercise.observe(exercise.run(code))) for code in (exercise.solution, *(m.code for m in exercise.mistakes))
    ]
    assert all(a != b for a, b in itertools.combinations(seen, 2))


def test_mistakes_are_named_by_behaviour_not_by_text() -> None:
    def padded_offsets(sizes, block):
        starts, total = torch.tensor([size // block for size in sizes]).cumsum(0) * block, [0]
        return total + starts.tolist()

    with pytest.raises(ExerciseError, match="rounded down"):
        check("padded_offsets", padded_offsets)

    def combine(num_tokens, rows, weights, results):
        out = torch.zeros(num_tokens, results.shape[1])
        for row, result in zip(rows, results, strict=True):
            out[row] = out[row] + result
        return out

    with pytest.raises(ExerciseError, match="route weight is left out"):
        check("combine", combine)


def test_other_right_answers_pass(capsys: pytest.CaptureFixture[str]) -> None:
    def route_weights(logits, top_k):
        kept, choices = logits.topk(top_k, dim=-1)
        return choices, torch.softmax(kept, dim=-1)

    check("route_weights", route_weights)
    check("actual_rows", lambda bx, size, start, block=128: sorted((0, size - bx * block + start, block))[1])
    check("padded_offsets", lambda sizes, block: (0, *itertools.accumulate(-(-n // block) * block for n in sizes)))
    assert capsys.readouterr().out.count("Right.") == 3


def test_an_ellipsis_in_a_right_answer_is_no_gap(capsys: pytest.CaptureFixture[str]) -> None:
    def combine(num_tokens, rows, weights, results):
        out = torch.zeros(num_tokens, results.shape[1])
        return out.index_add(0, rows, weights[..., None] * results)

    check("combine", combine)
    assert capsys.readouterr().out.startswith("Right.")


@pytest.mark.parametrize(
    ("key", "answer", "sentence"),
    [
        ("padded_offsets", lambda sizes, block: [7] * (len(sizes) + 1), "none of the usual mistakes"),
        ("padded_offsets", lambda sizes, block: None, "no return"),
        ("padded_offsets", lambda sizes: sizes, "your code raised TypeError"),
        ("padded_offsets", lambda sizes, block: 1 / 0, "your code raised ZeroDivisionError: division by zero"),
        ("padded_offsets", [0, 4, 4, 6], "expected a function"),
        ("route_weights", lambda logits, top_k: (logits, logits), "expected"),
        ("combine", lambda *a: torch.full((3, 2), float("nan")), "expected"),
        ("raw_argument", 4, "expected 'routed_expert_weights'"),
        ("bound", lambda *a: (1.0, 2.0), "expected"),
        ("no_such_exercise", 1, "expected one of raw_argument, route_weights"),
    ],
)
def test_anything_else_gets_one_sentence(key: str, answer, sentence: str) -> None:
    with pytest.raises(ExerciseError) as caught:
        check(key, answer)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value._render_traceback_() == [str(caught.value)]


def test_a_probe_cannot_be_spoilt_by_an_answer_that_edits_it(capsys: pytest.CaptureFixture[str]) -> None:
    def combine(num_tokens, rows, weights, results):
        results.mul_(0)
        return torch.zeros(num_tokens, results.shape[1])

    with pytest.raises(ExerciseError):
        check("combine", combine)
    check("combine", EXERCISES["combine"].run(EXERCISES["combine"].solution))
    assert capsys.readouterr().out.startswith("Right.")


def test_each_notebook_has_one_to_three_exercises() -> None:
    for notebook in {exercise.notebook for exercise in EXERCISES.values()}:
        assert 1 <= len(of_notebook(notebook)) <= 3
