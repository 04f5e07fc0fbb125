"""Every exercise: its solution passes, its gap is met kindly, its usual mistakes are named."""

from __future__ import annotations

import itertools

import pytest
import torch

from moe_lab.lesson import exercises
from moe_lab.lesson.exercises import EXERCISES, PREDICTIONS, Exercise, check, of_notebook, predict
from moe_lab.problem.contract import ARGUMENTS, data_dir
from moe_lab.problem.errors import DataError, ExerciseError

EACH = pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES.keys())
MISTAKES = [
    pytest.param(exercise, name, id=f"{exercise.key}-{number}")
    for exercise in EXERCISES.values()
    for number, name in enumerate(exercise.mistakes)
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
def test_usual_mistake_is_named(exercise: Exercise, mistake: str) -> None:
    with pytest.raises(ExerciseError, match=r"got .*, (expected|of which)|your code raised|: at `") as caught:
        check(exercise.key, exercise.run(exercise.mistakes[mistake]))
    assert caught.value.mistake == mistake
    assert str(caught.value).endswith(f". This is what comes out if {mistake}.")
    assert "\n" not in str(caught.value)


@EACH
def test_is_complete_and_its_mistakes_differ(exercise: Exercise) -> None:
    # What is wrong with a whole submission, the judge says.
    assert len(exercise.mistakes) >= (0 if exercise.kind == "submission" else 2)
    assert len(set(exercise.hints)) == 3
    assert exercise.answer in exercise.gap
    # The cell shows the gap, so the solution must start from the same lines.
    assert exercise.gap.splitlines()[0].split("=")[0] == exercise.solution.splitlines()[0].split("=")[0]
    if exercise.kind == "kernel":  # each mistake is named above, so no two do the same
        return
    seen = [_behaviour(exercise, code) for code in (exercise.solution, *exercise.mistakes.values())]
    assert all(a != b for a, b in itertools.combinations(seen, 2))


def _behaviour(exercise: Exercise, code: str) -> str:
    try:
        return repr(exercise.observe(exercise.run(code)))
    except Exception as error:  # noqa: BLE001 -- some mistakes raise
        return repr(error)


@pytest.mark.parametrize("exercise", [each for each in EXERCISES.values() if each.kind == "value"], ids=lambda e: e.key)
def test_a_wrong_value_is_not_answered_with_the_right_one(exercise: Exercise) -> None:
    right = exercise.run(exercise.solution)
    wrong = [exercise.run(code) for code in exercise.mistakes.values()]
    wrong += [None, 0, "", (), "no such thing", (None,) * (len(right) if isinstance(right, tuple) else 3)]
    for answer in wrong:
        with pytest.raises(ExerciseError) as caught:
            check(exercise.key, answer)
        said = str(caught.value)
        assert repr(right) not in said
        assert exercise.solution.partition(" = ")[2] not in said


def test_every_other_argument_is_a_named_mistake() -> None:
    wrong = {argument.name for argument in ARGUMENTS} - {"routed_expert_weights"}
    assert set(EXERCISES["raw_argument"].mistakes.values()) == {f'raw_argument = "{name}"' for name in wrong}


def test_a_rule_that_refuses_a_cheat_is_no_catch_and_is_told() -> None:
    with pytest.raises(ExerciseError, match="a rule refused the text before it ran") as caught:
        check("cheat", lambda source: "import os\n" + source)
    assert "moe-lab explain" in str(caught.value)


def test_a_cheat_that_runs_is_caught_by_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    grid = "T.Kernel(num_blocks_m, T.ceildiv(hidden, STAGE2_BLOCK_N)"
    check("cheat", lambda source: source.replace(grid, grid + " - 1"))
    assert capsys.readouterr().out.startswith("Right. It ran")


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
        ("raw_argument", 4, "got 4, expected a str. It is none of the usual mistakes"),
        ("raw_argument", "gate", "got 'gate', expected another one."),
        ("reads", 2, "got 2, expected 2 values"),
        ("reads", (2, 7), "got (2, 7), of which 1 of 2 are right"),
        ("raw_argument", None, "none of the usual mistakes"),
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


def test_each_notebook_has_one_to_seven_exercises() -> None:
    notebooks = [path.stem for path in (data_dir().parent / "notebooks").glob("*.ipynb")]
    assert sum(len(of_notebook(notebook)) for notebook in notebooks) == len(EXERCISES)
    assert all(1 <= len(of_notebook(notebook)) <= 7 for notebook in notebooks)


ENTRY = """
- key: k
  kind: value
  title: t
  task: |
    do
  answer: x
  gap: |
    def x(a):
        if a:
            ...
        return ...
  fill:
    - |
      b = 1
      a += b
    - a
  hints: [one, two, three]
  mistakes:
    - code: |
        x = 2
      name: two
  lesson: l
"""


def test_a_fill_of_several_lines_stands_at_the_indentation_of_its_gap(tmp_path) -> None:
    (tmp_path / "09_more.yaml").write_text(ENTRY)
    (exercise,) = exercises._read(tmp_path / "09_more.yaml")
    assert exercise.solution == "def x(a):\n    if a:\n        b = 1\n        a += b\n    return a"
    assert (exercise.task, exercise.mistakes) == ("do", {"two": "x = 2"})


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("  kind: value\n", "  colour: red\n", "unexpected keyword argument 'colour'"),
        ("  lesson: l\n", "", "'lesson'"),
        ("    - a\n", "    - a\n    - b\n", "shorter|longer"),
        ("title: t", "title: a: b", "mapping values are not allowed"),
    ],
)
def test_a_broken_file_of_exercises_is_named(tmp_path, old: str, new: str, sentence: str) -> None:
    (tmp_path / "09_more.yaml").write_text(ENTRY.replace(old, new))
    with pytest.raises(DataError, match=rf"09_more.yaml: got .*({sentence})"):
        exercises._read(tmp_path / "09_more.yaml")


# --- predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", PREDICTIONS)
def test_a_prediction_has_an_answer(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    entry = PREDICTIONS[key]
    predict(key, ...)
    assert capsys.readouterr().out.startswith("No guess yet")
    for guess in entry.get("words", [1.0]):
        predict(key, guess)
    said = capsys.readouterr().out.splitlines()
    assert said.count("Right.") == 1 if "words" in entry else entry["unit"] in said[0]


def test_a_guess_is_told_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for guess in (384, 400, 100, 0):
        predict("rows_of_out", guess)
    assert capsys.readouterr().out.splitlines() == [
        "Your guess 384, the answer 384 rows: right.",
        "Your guess 400, the answer 384 rows: 0.96 times your guess. Close!",
        "Your guess 100, the answer 384 rows: 3.8 times your guess.",
        "Your guess 0, the answer 384 rows.",
    ]
    for key, guess in (("rows_of_out", "many"), ("side", "left"), ("nonsense", 1)):
        with pytest.raises(ExerciseError, match="expected"):
            predict(key, guess)
