import threading

import psutil
import pytest

from moe_lab.lesson.stopwatch import time_against_baseline
from moe_lab.machine import backend
from moe_lab.machine.child import ChildError
from moe_lab.problem.submission import Submission
from moe_lab.speed.bench import CPU_CASE
from moe_lab.steps import step


def time_it(source, say=lambda text: None, checkpoint=lambda: None):
    return time_against_baseline(Submission(source, "mine.py"), 1, "balanced", say=say, checkpoint=checkpoint)


def test_a_submission_is_timed_in_turns_with_the_baseline_on_this_machine():
    said = []
    times = time_it(step("s0").with_literals(STAGE1_BLOCK_K=64).source, said.append)
    assert 0.1 < times.time_ms / times.baseline_ms < 10
    assert times.where.endswith(backend.detect().name)
    if backend.detect().kind == "cpu":
        assert times.where.startswith(f"{CPU_CASE.name}, ")
    assert any("this configuration ready" in line for line in said)


def test_a_wrong_answer_is_not_timed():
    source = step("s0").source.replace("routed_expert_weights[raw_start + i]", "routed_expert_weights[0]")
    with pytest.raises(ChildError, match="this configuration left out: wrong result"):
        time_it(source)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("raise ValueError('no luck')", "this configuration left out: ValueError: no luck"),
        ("import os; print('bye'); os._exit(3)", "ended with exit code 3; its last words: bye"),
        ("print('[\"answer\", {}]')", "got no function run_kernel"),
    ],
)
def test_what_goes_wrong_in_the_process_is_one_sentence(end, message):
    with pytest.raises(ChildError, match=message):
        time_it(f"# mine\n\n{end}\n")


def test_what_the_checkpoint_raises_ends_the_process():
    started = threading.Event()

    def checkpoint():
        if started.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        time_it("while True: pass\n", lambda text: started.set(), checkpoint)
    commands = [child.cmdline() for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert not [command for command in commands if "moe_lab.lesson.stopwatch" in command]
