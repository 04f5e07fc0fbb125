"""How long a slider move takes until the panel shows it: ``python tests/browser/benchmark.py [MOVES]``.

In this process: from the new value to readout and picture. In JupyterLab: from the key press to the new figures, and to
the new picture. Seen: a configuration that was shown before, or read ahead. New: nobody has asked for it, and nothing
is read ahead. No test: on a busy machine these numbers mean nothing.
"""

import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from conftest import open_lab

from moe_lab.lesson import widgets
from moe_lab.model import tir

#: The panel keeps pictures that it has drawn once; here each is drawn anew.
CELL = """from moe_lab.lesson import widgets
from moe_lab.model import tir

widgets._roofline_png = widgets._roofline_png.__wrapped__
tir.ahead = {ahead}
widgets.TileExplorer()"""

# A move that leaves the roofline as it is brings no new picture, only new figures.
WAIT = """([key]) => new Promise((resolve, reject) => {
  const panel = document.querySelector('.moe-lab-panel');
  const start = performance.now();
  let figures = null, picture = null;
  const end = () => {
    observer.disconnect();
    figures === null ? reject('nothing moved') : resolve([figures, picture]);
  };
  const limit = setTimeout(end, 5000);
  const drawn = () => { picture = performance.now() - start; clearTimeout(limit); end(); };
  panel.querySelector('img').addEventListener('load', drawn, {once: true});
  const observer = new MutationObserver(() => { figures ??= performance.now() - start; });
  observer.observe(panel.querySelector('.moe-lab-gauges').closest('.widget-html-content'),
                   {childList: true, subtree: true, characterData: true});
  document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
})"""


def in_process(moves, folder):
    """Milliseconds of each move of one slider without a browser, to what was seen and to what is new."""
    widgets._roofline_png = widgets._roofline_png.__wrapped__
    panel = widgets.TileExplorer(history=folder / "history.jsonl")

    def move(name, value):
        panel.redraw.wait()
        start = time.perf_counter()
        panel.values = {name: value}
        panel.redraw.wait()
        return 1000 * (time.perf_counter() - start)

    seen = [move("STAGE1_BLOCK_K", 128 if number % 2 else 256) for number in range(moves + 2)][2:]
    ahead, tir.ahead = tir.ahead, lambda questions: None
    # To and fro over a grid: each place differs from the one before by one slider, and none comes twice.
    sliders = [each for each in panel.session.choices if "_BLOCK_" in each.name]
    places = [{}]
    for slider in sliders:
        places = [
            {**place, slider.name: value}
            for number, place in enumerate(places)
            for value in slider.values[:: -1 if number % 2 else 1]
        ]
    panel.values = places[0]
    changes = [dict(after.items() - before.items()) for before, after in itertools.pairwise(places[: moves + 1])]
    new = [move(*change.popitem()) for change in changes]
    tir.ahead = ahead
    return seen, new


def in_browser(moves, folder, ahead):
    """Milliseconds of each move until the figures and until the picture changed in JupyterLab."""
    found = []
    with open_lab(folder) as lab:
        cell = nbformat.v4.new_code_cell(CELL.format(ahead="tir.ahead" if ahead else "lambda questions: None"))
        notebook = nbformat.v4.new_notebook(cells=[cell])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
        nbformat.write(notebook, lab.folder / "benchmark.ipynb")
        lab.open("benchmark.ipynb")
        lab.run_all()
        # To and fro; or two steps up one slider after another, each to a configuration that is new.
        sliders = ("STAGE1_BLOCK_N", "STAGE1_BLOCK_K", "STAGE2_BLOCK_N", "STAGE2_BLOCK_K")
        for name in sliders[1:2] if ahead else sliders:
            row = lab.page.locator(".widget-hslider", has=lab.page.get_by_text(name, exact=True))
            row.locator(".noUi-handle").focus()
            for number in range(moves if ahead else 2):
                lab.page.wait_for_timeout(500)
                found.append(lab.page.evaluate(WAIT, ["ArrowLeft" if ahead and number % 2 else "ArrowRight"]))
    figures, pictures = zip(*found, strict=True)
    return figures, [time_ms for time_ms in pictures if time_ms is not None]


def line(name, times):
    """One aligned row."""
    times = sorted(times)
    return f"{name:40} median {statistics.median(times):6.1f} ms   slowest {times[-1]:6.1f} ms   {len(times)} moves"


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    with tempfile.TemporaryDirectory() as scratch:
        for kind, times in zip(("seen", "new"), in_process(count, Path(scratch)), strict=True):
            print(line(f"in this process, {kind}", times))
        for kind, ahead in (("seen", True), ("new", False)):
            (Path(scratch) / kind).mkdir()
            first, second = in_browser(count, Path(scratch) / kind, ahead)
            print(line(f"in JupyterLab, {kind}, figures", first))
            print(line(f"in JupyterLab, {kind}, picture", second))
