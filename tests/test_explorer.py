import json
import subprocess
import sys
import textwrap
import threading
import time

import pandas as pd
import pytest

from moe_lab.errors import ExplorerError
from moe_lab.explorer import FIRST_CASE_RIGHT, Background, History, Stopped, Trial, choices, grid, offered
from moe_lab.steps import STEPS, step
from moe_lab.submission import Submission


def trial(value=64, verdict="accepted", **more):
    fields = {
        "step": "s0_baseline", "values": {"BLOCK_K": value, "POLICY": "Square"}, "source_hash": f"hash {value}",
        "device": "c500", "case": "case 1", "routing": "balanced", "verdict": verdict, "bound_ms": 1.0,
    }  # fmt: skip
    return Trial(**{**fields, **more})


# --- choices


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


# --- history


def test_a_history_survives_its_process(tmp_path):
    path = tmp_path / "new" / "history.jsonl"
    first = History(path)
    first.add(trial(64, values={"BLOCK_K": 64, "TILE": (128, 64), "FLAG": True, "NOTHING": None}))
    first.add(trial(32, "wrong_answer"))
    again = History(path)
    assert again.problem == ""
    assert again.trials() == first.trials()
    assert again.trials()[0].values == {"BLOCK_K": 64, "TILE": (128, 64), "FLAG": True, "NOTHING": None}
    assert len(path.read_bytes().splitlines()) == 2


def test_a_corrupt_line_is_named_and_stays(tmp_path):
    path = tmp_path / "history.jsonl"
    history = History(path)
    history.add(trial(64))
    with path.open("ab") as file:
        file.write(b'{"step": 3}\n\xff\xfe\n{"step": "s0_base')
    history = History(path)
    assert [item.values["BLOCK_K"] for item in history.trials()] == [64]
    assert "3 of 4 lines" in history.problem
    assert "line 2, 3, 4" in history.problem
    # The broken write had no line end: the next trial must not be swallowed by it.
    history.add(trial(32))
    assert [item.values["BLOCK_K"] for item in History(path).trials()] == [64, 32]
    assert b"\xff\xfe" in path.read_bytes()


@pytest.mark.parametrize(
    "change", [{"values": []}, {"time_ms": "fast"}, {"step": None}, {"extra": 1}, {"bound_ms": float("nan")}]
)
def test_a_line_of_another_kind_is_refused(tmp_path, change):
    path = tmp_path / "history.jsonl"
    History(path).add(trial())
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, **change}) + "\n")
    history = History(path)
    assert history.trials() == []
    assert "1 of 1 lines" in history.problem


def test_a_history_that_cannot_be_written_keeps_the_trial_and_says_so(tmp_path):
    path = tmp_path / "taken"
    path.mkdir()
    history = History(path)
    assert "cannot be read" in history.problem
    with pytest.raises(ExplorerError, match=r"taken cannot be written: .*kept until the kernel stops"):
        history.add(trial())
    assert len(history.trials()) == 1


def test_a_configuration_keeps_its_verdict_when_it_is_timed_and_the_other_way_round(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.add(trial(64, "accepted", reason="right", judged_on="cpu"))
    history.add(trial(64, "", time_ms=2.0, baseline_ms=4.0, timed_on="small, cpu", bound_ms=None))
    (merged,) = history.trials()
    assert (merged.verdict, merged.reason, merged.judged_on) == ("accepted", "right", "cpu")
    assert (merged.time_ms, merged.speed, merged.bound_ms) == (2.0, 2.0, 1.0)
    history.add(trial(64, "wrong_answer", reason="wrong"))
    (merged,) = history.trials()
    assert (merged.verdict, merged.time_ms, merged.timed_on) == ("wrong_answer", 2.0, "small, cpu")
    history.add(trial(64, case="case 2"))
    assert len(history.trials()) == 2


def test_one_right_case_does_not_replace_the_judges_yes(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.add(trial(64, "accepted"))
    history.add(trial(64, FIRST_CASE_RIGHT))
    assert history.trials()[0].verdict == "accepted"
    history.add(trial(32, FIRST_CASE_RIGHT))
    history.add(trial(32, "wrong_answer"))
    assert history.trials()[1].verdict == "wrong_answer"


def test_the_best_is_the_fastest_accepted_one_of_the_same_machine_and_sizes(tmp_path):
    history = History(tmp_path / "history.jsonl")
    assert history.best("s0_baseline") is None
    history.add(trial(16, "wrong_answer", time_ms=1.0, baseline_ms=9.0, timed_on="here"))
    assert history.best("s0_baseline") is None
    history.add(trial(32, bound_ms=3.0))
    history.add(trial(64, bound_ms=2.0))
    assert history.best("s0_baseline").values["BLOCK_K"] == 64
    history.add(trial(128, time_ms=1.0, baseline_ms=8.0, timed_on="elsewhere"))
    history.add(trial(256, time_ms=3.0, baseline_ms=4.5, timed_on="here"))
    history.add(trial(512, time_ms=2.0, baseline_ms=2.0, timed_on="here"))
    assert history.best("s0_baseline").values["BLOCK_K"] == 256
    assert history.best("s0_baseline", "elsewhere").values["BLOCK_K"] == 128
    assert history.best("another step") is None


def test_the_csv_holds_every_configuration(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.add(trial(64, reason='a "quoted", reason'))
    history.add(trial(32, time_ms=2.0, baseline_ms=5.0))
    history.add(trial(16, step="other"))
    table = pd.read_csv(history.save_csv(tmp_path / "table.csv", "s0_baseline"))
    assert table["BLOCK_K"].tolist() == [64, 32]
    assert table["speed"].tolist()[1] == 2.5
    assert table["reason"][0] == 'a "quoted", reason'
    assert History(tmp_path / "none.jsonl").table().empty


# --- long work


def test_a_second_start_is_refused_while_the_first_runs():
    work, going, ran = Background(), threading.Event(), []

    def first():
        ran.append("first")
        going.wait(10)

    assert work.start(first)
    assert not work.start(lambda: ran.append("second"))
    assert work.busy
    going.set()
    assert work.wait(10)
    assert ran == ["first"]
    assert work.start(lambda: ran.append("third"))
    assert work.wait(10)
    assert ran == ["first", "third"]


def test_work_waits_while_paused_and_ends_when_stopped():
    work, steps, reached = Background(), [], threading.Semaphore(0)

    def endless():
        while True:
            steps.append(len(steps))
            reached.release()
            work.checkpoint()
            time.sleep(0.001)

    work.start(endless)
    assert reached.acquire(timeout=10)
    work.pause()
    assert work.paused
    while reached.acquire(timeout=0.2):
        pass
    count = len(steps)
    work.resume()
    assert reached.acquire(timeout=10)
    assert len(steps) > count
    work.pause()
    work.stop()
    assert work.wait(10)


def test_stop_passes_handlers_of_errors():
    work, seen = Background(), []

    def swallowing():
        try:
            while True:
                work.checkpoint()
        except Exception:  # noqa: BLE001
            seen.append("swallowed")
        finally:
            seen.append("cleaned up")

    work.start(swallowing)
    work.stop()
    assert work.wait(10)
    assert seen == ["cleaned up"]
    assert not issubclass(Stopped, Exception)


def test_the_end_of_the_interpreter_stops_the_work():
    code = """
        import time
        from moe_lab.explorer import Background
        work = Background()
        def endless():
            try:
                while True:
                    work.checkpoint()
                    time.sleep(0.01)
            finally:
                print("cleaned up", flush=True)
        work.start(endless)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "cleaned up\n"
