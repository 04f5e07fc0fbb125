"""Notebook 06 as a learner uses it: in JupyterLab, in a browser, with the keyboard."""

import json
import re

import psutil
import pytest
from PIL import Image

from moe_lab.lesson.explorer import FIRST_CASE_RIGHT, Session, Setting
from moe_lab.machine import backend
from moe_lab.problem.submission import Submission
from moe_lab.steps import step

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1200)]

NOTEBOOK = "06_tile_explorer.ipynb"
#: The judge compiles for each shape; on a busy machine with two cores that is minutes.
JUDGE_MS = 600_000


class Panel:
    """The tile explorer on the page."""

    def __init__(self, lab):
        self.page = lab.page
        self.root = lab.page.locator(".moe-lab-panel", has_text="Compile and check")
        self.root.wait_for(timeout=60_000)
        self.root.scroll_into_view_if_needed()
        self.verdict = self.root.locator(".moe-lab-note").first
        self.message = self.root.locator(".moe-lab-note").nth(1)
        self.picture = self.root.locator("img").first

    def slider(self, name):
        row = self.root.locator(".widget-hslider", has=self.page.get_by_text(name, exact=True))
        return row.locator(".noUi-handle")

    def button(self, name):
        return self.root.get_by_role("button", name=name, exact=True)

    def tab_to(self, target):
        """Press Tab until a control has the focus."""
        for _ in range(120):
            if target.evaluate("element => element === document.activeElement"):
                return
            self.page.keyboard.press("Tab")
        pytest.fail(f"no number of Tabs leads to {target}")

    def start(self):
        """Put the focus on the first control; everything after it is the keyboard."""
        self.root.locator("select").first.focus()

    def press(self, name):
        self.start()
        self.tab_to(self.button(name))
        self.page.keyboard.press("Enter")

    def move(self, name, key):
        self.start()
        self.tab_to(self.slider(name))
        self.page.keyboard.press(key)


def wait_for_text(locator, text, timeout_ms=15_000):
    locator.filter(has_text=text).wait_for(timeout=timeout_ms)


def test_the_keyboard_alone_explores_checks_and_exports(lab):
    lab.open(NOTEBOOK)
    lab.run_all()
    panel = Panel(lab)
    lab.picture("explorer_1_opened", panel.root)
    wait_for_text(panel.verdict, "Fits the MetaX C500")
    before = panel.picture.screenshot()

    panel.move("STAGE1_BLOCK_N", "ArrowLeft")
    wait_for_text(panel.root, "32 of 64 KiB")
    for _ in range(2):
        panel.page.wait_for_timeout(200)
        panel.move("NUM_STAGES", "ArrowRight")
    wait_for_text(panel.verdict, "Does not fit: stage 1 needs 98304 bytes of shared memory")
    assert "a block of the MetaX C500 has 65536" in panel.verdict.inner_text()
    panel.page.wait_for_timeout(500)
    assert panel.picture.screenshot() != before
    panel.press("Diff")
    wait_for_text(panel.root, "+NUM_STAGES = 3")
    lab.picture("explorer_2_does_not_fit", panel.root)
    panel.press("Diff")

    panel.move("NUM_STAGES", "Home")
    wait_for_text(panel.verdict, "Fits the MetaX C500")
    panel.press("Compile and check")
    wait_for_text(panel.message, re.compile("fresh process|call"), 60_000)
    assert panel.button("Compile and check").is_disabled()
    # The judge runs elsewhere: the panel still answers.
    panel.move("STAGE2_BLOCK_N", "ArrowLeft")
    wait_for_text(panel.root, "16 of 64 KiB")
    panel.move("STAGE2_BLOCK_N", "ArrowRight")
    lab.picture("explorer_3_checking", panel.root)
    wait_for_text(panel.message, re.compile("accepted: "), JUDGE_MS)
    wait_for_text(panel.root, "STAGE1_BLOCK_N 64")
    lab.picture("explorer_4_accepted", panel.root)

    panel.press("Export")
    wait_for_text(panel.message, "submission.py. accepted", JUDGE_MS)
    written = Submission.from_file(lab.folder.parent / "submission.py")
    wanted = step("s0").with_literals(STAGE1_BLOCK_N=64)
    assert written.source == wanted.source
    lines = (lab.folder / ".moe_lab" / "history.jsonl").read_text().splitlines()
    accepted = [record["source_hash"] for record in map(json.loads, lines) if record["verdict"] == "accepted"]
    assert accepted == [wanted.source_hash]

    lab.open(NOTEBOOK)
    lab.run_all()
    panel = Panel(lab)
    wait_for_text(panel.root, "STAGE1_BLOCK_N 64")
    panel.press("Restore best")
    wait_for_text(panel.message, "Restored: STAGE1_BLOCK_N 64")
    wait_for_text(panel.root, "32 of 64 KiB")
    lab.picture("explorer_5_reopened", panel.root)


def test_fast_drags_leave_no_backlog_and_stop_leaves_no_process(lab):
    lab.open(NOTEBOOK)
    lab.run_all()
    panel = Panel(lab)
    handle = panel.slider("STAGE1_BLOCK_K")
    box = handle.locator("xpath=ancestor::*[contains(@class, 'noUi-target')]").bounding_box()
    y = box["y"] + box["height"] / 2
    handle.hover()
    panel.page.mouse.down()
    for round_trip in range(6):
        to, back = (box["x"] + box["width"], box["x"]) if round_trip % 2 else (box["x"], box["x"] + box["width"])
        panel.page.mouse.move(to, y, steps=25)
        panel.page.mouse.move(back, y, steps=25)
    panel.page.mouse.move(box["x"], y, steps=25)
    panel.page.mouse.up()
    # The leftmost value is 16: two weight tiles of 128 x 16 fp16 numbers.
    wait_for_text(panel.root, "8 of 64 KiB", 5_000)
    panel.page.get_by_text("| Idle").wait_for(timeout=5_000)

    panel.press("Compile and check")
    wait_for_text(panel.message, re.compile("fresh process|loading|call"), 60_000)
    panel.press("Stop")
    wait_for_text(panel.message, "Stopped", 60_000)
    kernels = psutil.Process(lab.server_pid).children(recursive=True)
    commands = [" ".join(process.cmdline()) for process in kernels if process.status() != psutil.STATUS_ZOMBIE]
    assert any("ipykernel" in command for command in commands)
    # What all workers are forked from stays.
    assert sum("judge" in command for command in commands) <= 1, commands
    assert panel.button("Compile and check").is_enabled()

    panel.start()
    panel.tab_to(panel.root.get_by_title("Vary STAGE1_PANEL in a sweep"))
    panel.page.keyboard.press("Space")
    panel.page.locator("button:has-text('Sweep 8')").wait_for(timeout=10_000)
    panel.press("Sweep 8")
    wait_for_text(panel.root, FIRST_CASE_RIGHT, JUDGE_MS)
    lab.picture("explorer_6_sweep", panel.root)
    panel.press("Stop")
    wait_for_text(panel.message, "Stopped", 60_000)
    wait_for_text(panel.root, FIRST_CASE_RIGHT)


def test_picture_of_the_readme(lab):
    """Makes the README's picture: `make test-browser`, then copy test-output/tile_explorer.png to notebooks/images."""
    history = lab.folder / ".moe_lab" / "history.jsonl"
    setting = Setting("c500", 1, "multinomial-0")
    session = Session("s0_baseline", history, lab.folder / "submission.py")
    session.sweep(
        [{"STAGE1_BLOCK_K": 64}, {"STAGE1_BLOCK_N": 256}], setting, say=lambda done, text: None, tried=lambda: None
    )
    session.check(session.base.with_literals(STAGE1_BLOCK_K=64), setting, say=lambda text: None)
    # The README names no processor: its times are no figures of this project.
    history.write_text(history.read_text().replace(backend.detect().name, "this machine's CPU"))

    lab.page.set_viewport_size({"width": 1440, "height": 1800})
    lab.open(NOTEBOOK)
    lab.run_all()
    panel = Panel(lab)
    panel.root.locator("select").nth(2).select_option(setting.routing)
    panel.move("STAGE1_BLOCK_N", "ArrowRight")
    wait_for_text(panel.verdict, "Does not fit: stage 1 needs 131072 bytes of shared memory")
    wait_for_text(panel.root, "1.88")
    panel.page.wait_for_timeout(500)
    table = panel.root.locator(".moe-lab-scroll").last
    assert table.evaluate("element => element.scrollHeight <= element.clientHeight"), "the table is cut"
    box = panel.root.bounding_box()
    assert box["height"] < 1800, f"the panel is {box['height']} high"
    picture = lab.picture("tile_explorer", panel.root)
    with Image.open(picture) as image:  # as moe_lab.lesson.display keeps figures
        image.convert("RGB").quantize(128, method=Image.Quantize.MEDIANCUT).save(picture, optimize=True)
