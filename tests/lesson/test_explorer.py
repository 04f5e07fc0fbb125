import json
import random
import subprocess
import sys
import textwrap
import threading
import time

import pandas as pd
import psutil
import pytest

from moe_lab.judge import Report, Verdict, process
from moe_lab.judge.verdict import SubmissionReport
from moe_lab.lesson.explorer import (
    DOES_NOT_FIT,
    FIRST_CASE_RIGHT,
    HERE,
    Background,
    History,
    Session,
    Setting,
    Stopped,
    Trial,
)
from moe_lab.lesson.readout import draw_trials
from moe_lab.lesson.stopwatch import Times
from moe_lab.machine import backend
from moe_lab.model.choices import grid
from moe_lab.problem.errors import ExportError, SubmissionError
from moe_lab.problem.submission import Submission

STEP = "s0_baseline"


def trial(value=64, verdict="accepted", **more):
    fields = {
        "step": "s0_baseline", "values": {"BLOCK_K": value, "POLICY": "Square"}, "source_hash": f"hash {value}",
        "device": "c500", "case": "case 1", "routing": "balanced", "verdict": verdict, "bound_ms": 1.0,
    }  # fmt: skip
    return Trial(**{**fields, **more})


@pytest.fixture
def history(tmp_path):
    return History(tmp_path / "history.jsonl", STEP)


# --- history


def test_a_history_survives_its_process(tmp_path):
    path = tmp_path / "new" / "history.jsonl"
    first = History(path, STEP)
    first.add(trial(64, values={"BLOCK_K": 64, "TILE": (128, 64), "FLAG": True, "NOTHING": None}))
    first.add(trial(32, "wrong_answer"))
    again = History(path, STEP)
    assert again.problem == ""
    assert again.trials() == first.trials()
    assert again.trials()[0].values == {"BLOCK_K": 64, "TILE": (128, 64), "FLAG": True, "NOTHING": None}
    assert len(path.read_bytes().splitlines()) == 2


def test_a_corrupt_line_is_named_and_stays(tmp_path):
    path = tmp_path / "history.jsonl"
    history = History(path, STEP)
    history.add(trial(64))
    with path.open("ab") as file:
        file.write(b'{"step": 3}\n\xff\xfe\n{"step": "s0_base')
    history = History(path, STEP)
    assert [item.values["BLOCK_K"] for item in history.trials()] == [64]
    assert "3 of 4 lines" in history.problem
    assert "line 2, 3, 4" in history.problem
    # The broken write had no line end: the next trial must not be swallowed by it.
    history.add(trial(32))
    assert [item.values["BLOCK_K"] for item in History(path, STEP).trials()] == [64, 32]
    assert b"\xff\xfe" in path.read_bytes()


@pytest.mark.parametrize(
    "change", [{"values": []}, {"time_ms": "fast"}, {"step": None}, {"extra": 1}, {"bound_ms": float("nan")}]
)
def test_a_line_of_another_kind_is_refused(tmp_path, change):
    path = tmp_path / "history.jsonl"
    History(path, STEP).add(trial())
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, **change}) + "\n")
    history = History(path, STEP)
    assert history.trials() == []
    assert "1 of 1 lines" in history.problem


def test_a_history_that_cannot_be_written_keeps_the_trial_and_says_so(tmp_path):
    path = tmp_path / "taken"
    path.mkdir()
    history = History(path, STEP)
    assert "cannot be read" in history.problem
    history.add(trial())
    assert "taken cannot be written" in history.problem
    assert "kept until the kernel stops" in history.problem
    assert len(history.trials()) == 1


def test_a_configuration_keeps_its_verdict_when_it_is_timed_and_the_other_way_round(history):
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


def test_one_right_case_does_not_replace_the_judges_yes(history):
    history.add(trial(64, "accepted"))
    history.add(trial(64, FIRST_CASE_RIGHT))
    assert history.trials()[0].verdict == "accepted"
    history.add(trial(32, FIRST_CASE_RIGHT))
    history.add(trial(32, "wrong_answer"))
    assert history.trials()[1].verdict == "wrong_answer"


def test_the_best_is_the_fastest_accepted_one_of_the_same_machine_and_sizes(history):
    assert history.best() is None
    history.add(trial(16, "wrong_answer", time_ms=1.0, baseline_ms=9.0, timed_on="here"))
    assert history.best() is None
    history.add(trial(32, bound_ms=3.0))
    history.add(trial(64, bound_ms=2.0))
    assert history.best().values["BLOCK_K"] == 64
    history.add(trial(128, time_ms=1.0, baseline_ms=8.0, timed_on="elsewhere"))
    history.add(trial(256, time_ms=3.0, baseline_ms=4.5, timed_on="here"))
    history.add(trial(512, time_ms=2.0, baseline_ms=2.0, timed_on="here"))
    assert history.best().values["BLOCK_K"] == 256
    assert History(history.path, "another step").best() is None


def test_the_csv_holds_every_configuration(history):
    history.add(trial(64, reason='a "quoted", reason'))
    history.add(trial(32, time_ms=2.0, baseline_ms=5.0))
    history.add(trial(16, step="other"))
    history = History(history.path, STEP)
    table = pd.read_csv(history.save_csv(history.path.with_name("table.csv")))
    assert table["BLOCK_K"].tolist() == [64, 32]
    assert table["speed"].tolist()[1] == 2.5
    assert table["reason"][0] == 'a "quoted", reason'


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
    work.paused = True
    while reached.acquire(timeout=0.2):
        pass
    count = len(steps)
    work.paused = False
    assert reached.acquire(timeout=10)
    assert len(steps) > count
    work.paused = True
    work.stop()
    assert work.wait(10)


def test_requests_that_wait_for_others_are_served_once():
    entered, leave, served = threading.Semaphore(0), threading.Semaphore(0), []
    state = {"value": 0}

    def draw():
        served.append(state["value"])
        entered.release()
        leave.acquire()

    work = Background()
    assert work.start(draw, after=True)
    assert entered.acquire(timeout=10)
    for value in range(1, 200):
        state["value"] = value
        assert work.start(draw, after=True)
    leave.release(5)
    assert work.wait(10)
    assert served == [0, 199]
    assert work.start(draw, after=True)
    assert work.wait(10)
    assert served == [0, 199, 199]


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
        from moe_lab.lesson.explorer import Background
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


# --- what the buttons do

SETTING = Setting("c500", 1, "balanced")


@pytest.fixture
def found(tmp_path):
    """A session of the baseline whose files lie in a folder of the test."""
    return Session("s0", tmp_path / "history.jsonl", tmp_path / "submission.py")


def sweep(found, values, say=lambda done, text: None, tried=lambda: None):
    return found.sweep(values, SETTING, say, tried)


def quiet(text):
    """Says nothing."""


@pytest.fixture
def judged(monkeypatch):
    """Replaces the judge by one that says yes, and counts."""
    calls = []

    def judge(submission, *, profile, progress, plan=None):
        calls.append(submission)
        progress("checking")
        verdict = "wrong_answer" if submission.values["STAGE1_BLOCK_K"] == 32 else "accepted"
        return Report(
            verdict=Verdict(verdict), sentence=f"said {verdict}", profile="contest", judge_sha256="0",
            device="a device", submission=SubmissionReport(name="x"), seed=1, started="now",
        )  # fmt: skip

    monkeypatch.setattr("moe_lab.judge.judge", judge, raising=False)
    return calls


def test_a_check_is_remembered_with_its_verdict(found, judged):
    said = []
    report = found.check(found.base, SETTING, said.append)
    assert report.accepted
    assert said == ["checking"]
    (known,) = History(found.history.path, STEP).trials()
    assert (known.step, known.verdict, known.judged_on) == ("s0_baseline", "accepted", "a device")
    assert known.source_hash == found.base.source_hash
    assert known.bound_ms == found.read(found.base, SETTING).bound_ms


def test_one_case_alone_does_not_accept_anything(found, judged):
    found.check(found.base, SETTING, quiet, quick=True)
    assert found.history.trials()[0].verdict == FIRST_CASE_RIGHT
    assert found.history.best() is None


def test_a_sweep_judges_only_what_fits_and_keeps_everything(found, judged):
    said, tried = [], []
    values = list(grid({"STAGE1_BLOCK_K": (32, 64, 128), "NUM_STAGES": (1, 4)}))
    verdicts = sweep(found, values, lambda done, text: said.append(done), lambda: tried.append(1))
    # With four stages only a K of 32 fits: 4 * 2 * 128 * 32 * 2 bytes are all of 64 KiB in stage 1, but in stage 2
    # K is 128: 4 * 128 * 128 * 2 bytes.
    assert verdicts == {DOES_NOT_FIT: 3, FIRST_CASE_RIGHT: 2, "wrong_answer": 1}
    assert len(judged) == 3
    assert len(tried) == 6
    assert said[-1] == 5
    known = History(found.history.path, STEP).trials()
    assert [trial.values["STAGE1_BLOCK_K"] for trial in known] == [32, 32, 64, 64, 128, 128]
    assert all("65536" in trial.reason for trial in known if trial.verdict == DOES_NOT_FIT)


def test_times_are_remembered(found, monkeypatch):
    def time_it(submission, case, routing, *, say, checkpoint):
        checkpoint()
        assert (case, routing) == (1, "balanced")
        return Times(2.0, 3.0, "a case, a device")

    monkeypatch.setattr("moe_lab.lesson.stopwatch.time_against_baseline", time_it)
    assert found.time(found.base, SETTING, quiet).time_ms == 2.0
    (trial,) = found.history.trials()
    assert (trial.speed, trial.timed_on) == (1.5, "a case, a device")


def test_a_sweep_goes_on_where_nothing_can_be_read(tmp_path, judged):
    mine = Submission("STAGE1_BLOCK_K = 64\n", "mine.py")
    found = Session(mine, tmp_path / "history.jsonl", tmp_path / "submission.py")
    with pytest.raises(SubmissionError):
        found.read(mine, SETTING)
    verdicts = sweep(found, list(grid({"STAGE1_BLOCK_K": (32, 64)})))
    assert verdicts == {"wrong_answer": 1, FIRST_CASE_RIGHT: 1}


def test_a_stopped_sweep_keeps_what_it_tried(found, judged):

    def tried():
        if len(found.history.trials()) == 2:
            found.work.stop()

    values = list(grid({"STAGE1_BLOCK_K": (16, 32, 64, 128)}))
    found.work.start(lambda: sweep(found, values, tried=tried))
    assert found.work.wait(30)
    assert len(History(found.history.path, STEP).trials()) == 2


def test_an_export_is_the_text_that_was_looked_at_and_is_judged_once(found, judged):
    mine = found.base.with_literals(STAGE1_BLOCK_K=64)
    assert not found.would_replace(mine)
    assert found.export(mine, SETTING, quiet).accepted
    assert found.target.read_text() == mine.source
    assert len(judged) == 1
    assert not found.would_replace(mine)
    assert found.would_replace(found.base)
    found.export(mine, SETTING, quiet)
    assert len(judged) == 1


def test_an_export_that_breaks_a_rule_leaves_the_file_alone(found, judged):
    found.target.write_text("kept")
    with pytest.raises(ExportError, match=r"NUM_STAGES|num_stages"):
        found.export(found.base.with_literals(NUM_STAGES=2), SETTING, quiet)
    assert found.target.read_text() == "kept"
    assert judged == []


def test_the_summary_numbers_configurations_newest_first(found, judged, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert found.summary().empty
    for changed in ({}, {"STAGE1_BLOCK_K": 32}):
        found.check(found.base.with_literals(**changed), SETTING, quiet)
    table = found.summary()
    assert table["no."].tolist() == [2, 1]
    assert table["changed"].tolist() == ["STAGE1_BLOCK_K 32", "nothing"]
    assert table["verdict"].tolist() == ["wrong answer", "accepted"]
    assert "measured ms" not in table
    found.remember(found.base, SETTING, time_ms=2.0, baseline_ms=3.0, timed_on="here")
    assert found.summary()["times as fast as the baseline"].fillna(0).tolist() == [0, 1.5]
    assert pd.read_csv(found.history.save_csv("table.csv"))["STAGE1_BLOCK_K"].tolist() == [128, 32]


def test_trials_are_drawn_by_verdict_and_only_for_their_setting(tmp_path):
    history = [
        trial(16, DOES_NOT_FIT, bound_ms=4.0),
        trial(32, "accepted", bound_ms=3.0),
        trial(64, "wrong_answer", bound_ms=2.0),
        trial(128, "accepted", bound_ms=1.0, case="case 2"),
    ]
    (axes,) = draw_trials(history, Setting("c500", 1, "balanced")).axes
    history.append(trial(48, "timeout", bound_ms=5.0))
    figure = draw_trials(history, Setting("c500", 1, "balanced"))
    (axes,) = figure.axes
    places = [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines]
    assert places == [[(1, 4.0)], [(2, 3.0)], [(3, 2.0), (5, 5.0)]]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [DOES_NOT_FIT, "accepted", "refused by the judge"]
    assert len({line.get_marker() for line in axes.lines}) == 3
    history.append(trial(256, time_ms=2.0, baseline_ms=5.0, timed_on="case 1, a card"))
    _, speeds = draw_trials(history, Setting("c500", 1, "balanced")).axes
    assert speeds.lines[0].get_ydata()[0] == 2.5
    assert "a card" in speeds.get_title(loc="left")
    (axes,) = draw_trials([], Setting("c500", 1, "balanced")).axes
    assert axes.get_title(loc="left") == "predicted: least ms: nothing yet"


def test_this_machine_is_a_device_only_if_its_figures_are_known(monkeypatch):
    here = Setting(HERE, 1, "balanced")
    monkeypatch.setattr(backend, "detect", lambda: backend.Backend("cuda", "NVIDIA H200", "cuda"))
    assert here.figures.name == "h200"
    monkeypatch.setattr(backend, "detect", lambda: backend.Backend("cpu", "Some Processor", "cpu"))
    assert here.figures is None
    assert SETTING.figures.name == "c500"


def test_stop_ends_the_judge_and_everything_it_started(found):
    said = threading.Event()
    process.warm_up()  # what all workers are forked from stays
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def say(text):
        if "fresh process" in text:
            said.set()

    assert found.work.start(lambda: found.check(found.base, SETTING, say))
    assert said.wait(120)
    found.work.stop()
    assert found.work.wait(60)
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=5)
    assert [child.name() for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
    assert found.history.trials() == []


def test_random_configurations_get_a_verdict_from_the_real_judge(found):
    rng = random.Random(1)
    fitting = []
    while len(fitting) < 2:
        values = {choice.name: rng.choice(choice.values) for choice in found.choices if choice.name != "BLOCK_M"}
        if found.read(found.base.with_literals(**values), SETTING).fits:
            fitting.append(values)
    verdicts = sweep(found, [*fitting, {"NUM_STAGES": 2}])
    assert sum(verdicts.values()) == 3
    assert verdicts[DOES_NOT_FIT] == 1
    assert all(item.verdict and item.reason for item in found.history.trials())
    assert "judge_error" not in verdicts
