import pytest

from moe_lab.problem.contract import Case
from moe_lab.problem.errors import BackendError, ContractError
from moe_lab.problem.submission import Submission
from moe_lab.speed.first_call import first_calls
from moe_lab.steps import step

CASE = Case("tiny", 2, 64, 64, 5)
SIZES = (2, 3)


def test_one_process_compiles_and_the_next_one_finds_it():
    said = []
    first, second = first_calls(step("c3"), CASE, SIZES, calls=2, say=said.append)
    assert (first.kernels, second.kernels) == (1, 0)
    assert len(said) == len(first.times_ms) == len(second.times_ms) == 2
    assert all(time_ms > 0 for run in (first, second) for time_ms in run.times_ms)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ValueError('no luck')", "mine.py does not run here: ValueError: no luck"),
        ("import os; os._exit(3)", "the process ended with exit code 3"),
    ],
)
def test_what_does_not_run_is_one_sentence(source, reason):
    with pytest.raises(BackendError, match=reason):
        first_calls(Submission(source, "mine.py"), CASE, SIZES)


def test_no_calls_are_refused():
    with pytest.raises(ContractError, match="got calls=0"):
        first_calls(step("c3"), CASE, SIZES, calls=0)
