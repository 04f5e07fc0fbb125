import textwrap

import pytest

from moe_lab.model.choices import choices, grid, offered
from moe_lab.problem.submission import Submission
from moe_lab.steps import STEPS, step


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("BLOCK_N", 16, (16, 32, 64)),
        ("BLOCK_N", 256, (32, 64, 128, 256, 512, 1024)),
        ("TOKEN_TILE", 192, tuple(range(32, 385, 32))),
        ("TOKEN_TILE", 48, (16, 32, 48, 64, 80, 96)),
        ("PANEL", 10, (1, 2, 4, 6, 8, 10, 12, 16)),
        ("STAGE1_PANEL", 5, (1, 2, 4, 5, 6, 8, 10, 12, 16)),
        ("NUM_STAGES", 6, (1, 2, 3, 4, 6)),
        ("THREADS", 96, (64, 96, 128, 256, 384, 512, 1024)),
        ("COPY_WIDTH", 8, (1, 2, 4, 8)),
        ("SWIZZLE_VECTOR", 0, (0, 2, 4, 8)),
        ("PANEL_ORDER", "column", ("row", "column")),
        ("STAGE1_POLICY", "FullRow", ("Square", "FullRow", "FullCol")),
        ("POLICY", None, (None,)),
        ("SPLITS", 3, (1, 2, 3, 4, 5, 6)),
        ("ROWS", 1000, (1000,)),
        ("OFFSET", 0, (0,)),
        ("OFFSET", -1, (-1,)),
        ("FLAG", True, (False, True)),
        ("STAGES", True, (False, True)),
        ("DTYPE", "float16", ("float16",)),
        ("LOG2_E", 1.5, (1.5,)),
        ("SHAPE", (128, 64), ((128, 64),)),
    ],
)
def test_offered_values_follow_the_word_or_are_neighbours_of_the_same_kind(name, value, expected):
    assert offered(name, value) == expected


@pytest.mark.parametrize("name", STEPS)
def test_every_literal_of_every_step_has_its_own_value_among_those_offered(name):
    submission = step(name)
    found = choices(submission)
    assert [choice.name for choice in found] == list(submission.literals)
    for choice in found:
        assert choice.value in choice.values
        assert submission.with_literals(**{choice.name: choice.values[-1]}).values[choice.name] == choice.values[-1]


def test_a_choice_carries_the_comment_above_its_run_of_literals():
    source = textwrap.dedent(
        """
        # Rows of a block.
        # The contract fixes it.
        BLOCK_M = 128
        # Columns and depth.
        BLOCK_N = 64
        BLOCK_K = 32

        PANEL = 4
        """
    )
    comments = {choice.name: choice.comment for choice in choices(Submission(source))}
    assert comments == {
        "BLOCK_M": "Rows of a block. The contract fixes it.",
        "BLOCK_N": "Columns and depth.",
        "BLOCK_K": "Columns and depth.",
        "PANEL": "",
    }


def test_a_grid_holds_every_combination_once():
    found = list(grid({"A": (1, 2, 3), "B": (True, False)}))
    assert len(found) == 6
    assert found[0] == {"A": 1, "B": True}
    assert found[-1] == {"A": 3, "B": False}
    assert len({tuple(item.items()) for item in found}) == 6
