import base64
import threading
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from moe_lab.judge import Report, Verdict
from moe_lab.judge.verdict import SubmissionReport
from moe_lab.lesson import explorer
from moe_lab.lesson.explorer import FIRST_CASE_RIGHT, HERE
from moe_lab.lesson.notebooks import normalise
from moe_lab.lesson.readout import best_roof, read_out
from moe_lab.lesson.stopwatch import Times
from moe_lab.lesson.widgets import LayoutExplorer, RooflineExplorer, TileExplorer
from moe_lab.machine import backend
from moe_lab.machine.devices import device, reported_as
from moe_lab.model.roofline import work
from moe_lab.problem.contract import CASES
from moe_lab.problem.errors import ContractError, DataError, SubmissionError
from moe_lab.problem.routings import routings
from moe_lab.problem.submission import Submission
from moe_lab.steps import STEPS, step


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A tile explorer whose files lie in a folder of the test."""
    monkeypatch.chdir(tmp_path)

    def made(*args, **kwargs):
        files = {"history": tmp_path / "history.jsonl", "target": tmp_path / "submission.py"}
        return TileExplorer(*args, **{**files, **kwargs})

    return made


@pytest.fixture
def judged(monkeypatch):
    """Replaces the judge by one that waits to be let go, then says yes."""
    go = threading.Event()

    def judge(submission, *, profile, progress, plan=None):
        progress("checking")
        while not go.wait(0.01):
            progress("still checking")
        return Report(
            verdict=Verdict.ACCEPTED, sentence="all is <well>", profile="contest", judge_sha256="0", device="a device",
            submission=SubmissionReport(name="x"), seed=1, started="now",
        )  # fmt: skip

    monkeypatch.setattr("moe_lab.judge.judge", judge, raising=False)
    return go


@pytest.fixture
def shown(monkeypatch):
    """What was displayed."""
    found = []
    monkeypatch.setattr("IPython.display.display", lambda data, **kwargs: found.append(data))
    return found


def press(panel, key):
    panel._buttons[key].click()


def run(panel, key):
    press(panel, key)
    assert panel.session.work.wait(200), panel._message.value


def move(panel, **controls):
    """Give literals or menus a value and wait for what is drawn."""
    for name, value in controls.items():
        (panel._literals[name] if name.isupper() else getattr(panel, f"_{name}")).value = value
    assert panel.redraw.wait()


def test_a_move_changes_readout_and_picture(make):
    panel = make("s0", case=1, device="c500", routing="balanced")
    before = panel._words.value, panel._rows.value
    assert "Fits the MetaX C500" in before[0]
    assert "64 of 64 KiB" in panel._gauges.value
    move(panel, STAGE1_BLOCK_N=64)
    assert "32 of 64 KiB" in panel._gauges.value
    assert "32 × 128 = 4096" in panel._rows.value
    picture = panel._picture.value
    move(panel, case=3)
    assert panel._picture.value != picture
    assert panel._picture.value[:8] == b"\x89PNG\r\n\x1a\n"


def test_what_does_not_fit_names_the_limit_and_another_device_may_take_it(make):
    panel = make("s0", device="c500")
    move(panel, NUM_STAGES=2)
    assert "stage 1 needs 131072 bytes of shared memory, a block of the MetaX C500 has 65536" in panel._words.value
    assert "too much" in panel._gauges.value
    move(panel, device="h200")
    assert "Fits the NVIDIA H200" in panel._words.value
    assert "too much" not in panel._gauges.value


def test_every_literal_of_every_step_has_a_control_or_is_shown_as_a_constant(make):
    for name in STEPS:
        panel = make(name)
        constants = [choice.name for choice in panel.session.choices if len(choice.values) == 1]
        assert sorted([*panel._literals, *constants]) == sorted(step(name).literals)
        assert panel.submission.source == step(name).source
        assert panel.setting.device == ("h200" if STEPS[name].branch == "hopper" else "c500")


def test_every_routing_of_the_menu_exists_for_every_case(make):
    panel = make()
    names = set(panel._routing.options)
    assert all({each.name for each in routings() if each.case == number} == names for number in CASES)


@pytest.mark.gpu
def test_this_machine_may_be_a_gpu(make):
    panel = make("h1", case=1, device=HERE, routing="multinomial-0")
    if reported_as(backend.detect().name) is not None:
        assert "Fits the" in panel._words.value
    panel.values = {"NUM_STAGES": 3}
    panel.session.check(panel.submission, panel.setting, lambda text: None, quick=True)
    run(panel, "time")
    (tried,) = panel.session.history.trials()
    assert (tried.verdict, tried.judged_on) == (FIRST_CASE_RIGHT, backend.detect().name), tried.reason
    assert tried.timed_on == f"case 1, multinomial-0, {backend.detect().name}", panel._message.value
    # Three times as fast on an H200, and it was written for no other card.
    assert tried.time_ms < tried.baseline_ms


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"step": "s99"}, SubmissionError, "got step 's99'"),
        ({"device": "abacus"}, DataError, "got device 'abacus'"),
        ({"case": 4}, ContractError, "got case 4, expected one of 1, 2, 3"),
        ({"routing": "none"}, DataError, "got routing 'none'"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(make, asked, error, message):
    with pytest.raises(error, match=message):
        make(**asked)


def test_a_device_that_is_not_in_the_menu_joins_it(make):
    assert make(device="C500").setting.device == "c500"
    panel = make(device="NVIDIA A100 SXM 80 GB")
    assert "Fits the NVIDIA A100" in panel._words.value
    assert [value for _, value in panel._device.options] == ["a100", "c500", "h200", "here"]


def test_a_file_that_cannot_be_followed_is_a_sentence_in_the_panel(make, shown):
    panel = make(Submission("BLOCK = 32\n", "mine.py"))
    assert "run_kernel" in panel._words.value
    assert "Traceback" not in panel._words.value
    with pytest.raises(SubmissionError):
        panel.static_figure()
    panel._ipython_display_()
    assert "application/vnd.jupyter.widget-view+json" in shown[0]
    assert "run_kernel" in shown[1]["text/plain"]


def test_a_mistake_of_ours_is_a_sentence_with_the_details_folded(make, monkeypatch):
    panel = make()

    def broken(*args):
        raise ZeroDivisionError("<broken>")

    monkeypatch.setattr(panel.session, "read", broken)
    move(panel, NUM_STAGES=3)
    assert "mistake in moe_lab" in panel._words.value
    assert "<details>" in panel._words.value
    assert "&lt;broken&gt;" in panel._words.value
    monkeypatch.undo()
    move(panel, NUM_STAGES=1)
    assert "Fits" in panel._words.value
    monkeypatch.setattr(panel.session, "summary", broken)
    panel._device.value = "h200"
    assert "mistake in moe_lab" in panel._message.value


def test_a_second_click_starts_nothing_and_the_verdict_is_shown(make, judged):
    panel = make()
    press(panel, "check")
    assert panel._buttons["check"].disabled
    assert not panel._buttons["stop"].disabled
    press(panel, "check")
    assert "Something still runs" in panel._message.value
    press(panel, "export")
    assert "Something still runs" in panel._message.value
    judged.set()
    assert panel.session.work.wait(30)
    assert "accepted: all is &lt;well&gt;" in panel._message.value
    assert len(panel.session.history.trials()) == 1
    assert not panel._buttons["check"].disabled
    assert panel._buttons["stop"].disabled
    assert "accepted" in panel._table.value


def test_stop_ends_the_run_and_the_panel_goes_on(make, judged):
    panel = make()
    press(panel, "check")
    run(panel, "stop")
    assert "Stopped" in panel._message.value
    assert panel.session.history.trials() == []
    assert not panel._buttons["check"].disabled
    judged.set()
    run(panel, "check")
    assert "accepted" in panel._message.value


def test_a_sweep_takes_the_ticked_literals_and_can_be_paused(make, judged):
    panel = make(device="c500")
    judged.set()
    assert panel._buttons["sweep"].disabled
    panel._swept["STAGE1_BLOCK_N"].value = True
    panel._swept["NUM_STAGES"].value = True
    count = len(panel._literals["STAGE1_BLOCK_N"].options) * len(panel._literals["NUM_STAGES"].options)
    assert panel._buttons["sweep"].description == f"Sweep {count}"
    panel._literals["STAGE1_BLOCK_K"].value = 32
    assert panel._buttons["pause"].disabled
    press(panel, "sweep")
    assert not panel._buttons["pause"].disabled
    press(panel, "pause")
    assert panel._buttons["pause"].description == "Go on"
    run(panel, "pause")
    assert panel._buttons["pause"].description == "Pause"
    trials = panel.session.history.trials()
    assert len(trials) == count
    assert {trial.values["STAGE1_BLOCK_K"] for trial in trials} == {32}
    assert {trial.verdict for trial in trials} == {explorer.DOES_NOT_FIT, explorer.FIRST_CASE_RIGHT}
    assert f"Tried {count}:" in panel._message.value
    assert panel._progress.max == count


def test_a_time_stands_beside_the_baselines(make, monkeypatch):
    monkeypatch.setattr(
        "moe_lab.lesson.stopwatch.time_against_baseline", lambda *args, **kwargs: Times(2.0, 3.0, "a case, a device")
    )
    panel = make()
    run(panel, "time")
    assert "2.000 ms, the baseline 3.000 ms: 1.50 times as fast (a case, a device)" in panel._message.value
    assert "a case, a device" in panel._table.value


def test_source_and_diff_are_what_is_exported(make, judged):
    panel = make()
    judged.set()
    press(panel, "diff")
    assert "No difference" in panel._text.value
    move(panel, STAGE1_BLOCK_K=64)
    assert "-STAGE1_BLOCK_K = 128\n+STAGE1_BLOCK_K = 64" in panel._text.value
    press(panel, "source")
    assert "STAGE1_BLOCK_K = 64" in panel._text.value
    press(panel, "source")
    assert panel._text.value == ""
    run(panel, "export")
    assert panel.session.target.read_text() == step("s0").with_literals(STAGE1_BLOCK_K=64).source
    assert "submission.py" in panel._message.value
    assert "accepted" in panel._message.value


def test_another_text_is_replaced_only_when_asked_twice(make, judged):
    panel = make()
    judged.set()
    panel.session.target.write_text("mine")
    press(panel, "export")
    assert "Press Export again" in panel._message.value
    assert panel.session.target.read_text() == "mine"
    panel._literals["STAGE1_BLOCK_K"].value = 64
    press(panel, "export")
    assert panel.session.target.read_text() == "mine"
    run(panel, "export")
    assert "STAGE1_BLOCK_K = 64" in panel.session.target.read_text()


def test_a_broken_rule_is_the_message(make, judged):
    panel = make()
    panel._literals["NUM_STAGES"].value = 2
    run(panel, "export")
    assert "nothing was written" in panel._message.value
    assert not panel.session.target.exists()


def test_the_history_comes_back_and_the_best_can_be_restored(make, judged):
    panel = make()
    assert panel._buttons["best"].disabled
    judged.set()
    panel._literals["STAGE1_BLOCK_N"].value = 64
    run(panel, "check")
    again = make()
    assert "STAGE1_BLOCK_N 64" in again._table.value
    assert again._trials.value[:4] == b"\x89PNG"
    assert again.values["STAGE1_BLOCK_N"] == 128
    press(again, "best")
    assert again.values["STAGE1_BLOCK_N"] == 64
    press(again, "reset")
    assert again.values == {name: value for name, value in step("s0").values.items() if name != "LOG2_E"}
    press(again, "csv")
    assert "Wrote tile_explorer.csv" in again._message.value
    assert "STAGE1_BLOCK_N" in Path("tile_explorer.csv").read_text()


def test_a_best_one_of_an_older_text_is_restored_with_a_warning(make, judged):
    panel = make()
    panel.session.history.add(
        explorer.Trial(
            step="s0_baseline", values={"STAGE1_BLOCK_N": 64, "GONE": 1}, source_hash="older", device="c500",
            case="case 1", routing="balanced", verdict="accepted", bound_ms=1.0,
        )
    )  # fmt: skip
    press(panel, "best")
    assert panel.values["STAGE1_BLOCK_N"] == 64
    assert "the step has changed since" in panel._message.value


def test_a_sweep_of_too_many_is_refused_and_a_long_history_is_cut(make, judged):
    panel = make()
    for tick in panel._swept.values():
        tick.value = True
    press(panel, "sweep")
    assert "expected at most 1000" in panel._message.value
    assert not panel.session.work.busy
    for number in range(130):
        panel.session.remember(panel.submission, explorer.Setting("c500", 1, "balanced"), reason=f"reason {number}")
        panel.session.history._trials[-1] = panel.session.history._trials[-1].model_copy(
            update={"source_hash": str(number)}
        )
    panel._show_history()
    assert "100 of 130" in panel._table.value
    assert panel._table.value.count("<tr") == 101
    assert "reason 129" in panel._table.value


def test_a_corrupt_history_is_said_when_the_panel_opens(make, tmp_path):
    (tmp_path / "history.jsonl").write_text("{]\n")
    panel = make()
    assert "1 of 1 lines" in panel._table.value
    assert (tmp_path / "history.jsonl").read_text() == "{]\n"


def test_a_verdict_is_shown_even_if_the_history_cannot_keep_it(make, judged, tmp_path):
    (tmp_path / "file").write_text("")
    panel = make(history=tmp_path / "file" / "history.jsonl")
    judged.set()
    run(panel, "check")
    assert "accepted: all is" in panel._message.value
    assert "cannot be written" in panel._table.value
    assert "accepted" in panel._table.value


def test_a_panel_leaves_a_figure_and_its_words(make, shown):
    make("s0", case=2, device="h200", routing="balanced")._ipython_display_()
    widget, picture, words = shown
    assert "application/vnd.jupyter.widget-view+json" in widget
    assert base64.b64decode(picture["image/png"])[:4] == b"\x89PNG"
    expected = read_out(step("s0"), 2, "balanced", device("h200")).description
    assert picture["text/plain"] == words["text/plain"] == expected
    assert "This figure in words" in words["text/html"]


def test_a_notebook_that_is_converted_or_committed_keeps_the_figure_and_its_words(tmp_path):
    code = f"from moe_lab.lesson.widgets import TileExplorer\nTileExplorer(history={str(tmp_path / 'h.jsonl')!r})"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert page.count('src="data:image/png;base64,') == 1
    assert page.count("Fits the MetaX C500") >= 1
    clean = normalise(notebook)
    kinds = [kind for output in clean.cells[0].outputs for kind in output.data]
    assert kinds == ["image/png", "text/plain", "text/html", "text/plain"]
    assert "widgets" not in clean.metadata


# --- layout and roofline


def test_the_layout_explorer_shows_the_layout_of_its_controls():
    panel = LayoutExplorer((3, 0, 2))
    move(panel, block=16)
    assert "5 valid rows in 32 padded rows, 2 blocks of 16" in panel._words.value
    move(panel, rule="plus_one")
    assert "5 valid rows in 48 padded rows, 3 blocks of 16" in panel._words.value
    picture = panel._picture.value
    move(panel, sizes="128, 5", block=128)
    assert "133 valid rows in 384 padded rows, 3 blocks of 128" in panel._words.value
    assert panel._picture.value != picture


def test_sizes_that_are_none_are_a_sentence():
    panel = LayoutExplorer()
    for text, message in (("3 many", "got &#x27;3 many&#x27;"), ("", "no group sizes"), ("3 -1", "got size -1")):
        panel._sizes.value = text
        assert panel.redraw.wait()
        assert message in panel._words.value
    with pytest.raises(ContractError):
        LayoutExplorer((3, -1))


def test_the_roofline_explorer_gives_the_bounds_of_a_case():
    panel = RooflineExplorer("h200", case=1, block=160)
    whole, roof = work(CASES[1]).whole, best_roof(device("h200"))
    memory = whole.bytes / (roof.bandwidth_tbps * 1e9)
    assert f"the case itself: {memory:.3f} ms, memory binds" in panel._words.value
    # 160 rows cover the 142 of an expert: one block, so one read; 160 rows of arithmetic still hide behind the memory.
    assert f"with padded rows computed: {memory:.3f} ms, memory binds" in panel._words.value
    assert f"each weight read once: {memory:.3f} ms" in panel._words.value
    move(panel, block=128)
    arithmetic = whole.padded_flops / (roof.peak_tflops * 1e9)
    assert f"with padded rows computed: {arithmetic:.3f} ms, arithmetic binds" in panel._words.value
    twice = (2 * whole.weight_bytes + whole.activation_bytes) / (roof.bandwidth_tbps * 1e9)
    assert f"each weight read 2 times: {twice:.3f} ms" in panel._words.value
    move(panel, device="c500")
    assert "MetaX C500, specification" in panel._words.value
    with pytest.raises(DataError):
        RooflineExplorer("abacus")
    with pytest.raises(ContractError):
        RooflineExplorer(case=0)


@pytest.mark.parametrize("panel", [LayoutExplorer, RooflineExplorer])
def test_small_panels_leave_a_figure_and_its_words(panel, shown):
    made = panel()
    made._ipython_display_()
    assert "application/vnd.jupyter.widget-view+json" in shown[0]
    assert base64.b64decode(shown[1]["image/png"])[:4] == b"\x89PNG"
    assert shown[2]["text/plain"] == made.static_figure()[1]
