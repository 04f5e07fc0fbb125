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

WAIT = """([key]) => new Promise(resolve => {
  const panel = document.querySelector('.moe-lab-panel');
  const start = performance.now();
  let text = null;
  const picture = panel.querySelector('img');
  picture.addEventListener('load', () => { observer.disconnect(); resolve([text, performance.now() - start]); },
                           {once: true});
  const observer = new MutationObserver(() => { text ??= performance.now() - start; });
  observer.observe(panel.querySelector('.moe-lab-gauges').closest('.widget-html-content'),
                   {childList: true, subtree: true, characterData: true});
  const down = new KeyboardEvent('keydown', {key, bubbles: true});
  document.activeElement.dispatchEvent(down);
})"""


def in_process(moves, folder):
    """Milliseconds of each move without a browser, to what was seen and to what is new."""
    widgets._roofline_png = widgets._roofline_png.__wrapped__
    panel = widgets.TileExplorer(history=folder / "history.jsonl")
    depths = panel.session.base.with_literals(STAGE1_BLOCK_K=256), panel.session.base

    def move(values):
        start = time.perf_counter()
        panel.values = values
        panel.redraw.wait()
        return 1000 * (time.perf_counter() - start)

    seen = [move(depths[number % 2].values) for number in range(moves + 2)][2:]
    ahead, tir.ahead = tir.ahead, lambda questions: None
    choices = {choice.name: choice.values for choice in panel.session.choices if choice.name.startswith("STAGE")}
    grid = itertools.islice(itertools.product(*choices.values()), 0, None, 97)
    new = [move(dict(zip(choices, values, strict=True))) for values in itertools.islice(grid, moves)]
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
        # To and fro, or through all values of one slider after another, each step a new configuration.
        names = (
            ["STAGE1_BLOCK_K"] if ahead else ["STAGE1_BLOCK_N", "STAGE1_BLOCK_K", "STAGE2_BLOCK_N", "STAGE2_BLOCK_K"]
        )
        for name in names:
            row = lab.page.locator(".widget-hslider", has=lab.page.get_by_text(name, exact=True))
            row.locator(".noUi-handle").focus()
            for number in range(moves if ahead else 2):
                lab.page.wait_for_timeout(500)
                found.append(lab.page.evaluate(WAIT, ["ArrowRight" if ahead and number % 2 else "ArrowLeft"]))
    return list(zip(*found, strict=True))


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
