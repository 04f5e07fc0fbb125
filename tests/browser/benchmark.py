"""How long a slider move takes until the panel shows it: ``python tests/browser/benchmark.py [MOVES]``.

In this process: from the new value to readout and figure. In JupyterLab: from the key press to the first change of the
text, and to the new picture. No test: on a busy machine these numbers mean nothing.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from conftest import open_lab

from moe_lab.lesson import widgets

#: Depths of stage 1 to go through; every second one does not fit, so text, bars and picture all change.
DEPTHS = (128, 256)
#: The panel keeps pictures that it has drawn once; here each is drawn anew.
CELL = """from moe_lab.lesson import widgets

widgets._roofline_png = widgets._roofline_png.__wrapped__
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
    """Milliseconds of each move, without a browser."""
    widgets._roofline_png = widgets._roofline_png.__wrapped__
    panel, times = widgets.TileExplorer(history=folder / "history.jsonl"), []
    for number in range(moves):
        start = time.perf_counter()
        panel.values = {"STAGE1_BLOCK_K": DEPTHS[(number + 1) % 2]}
        panel.redraw.settle()
        times.append(1000 * (time.perf_counter() - start))
    return times


def in_browser(moves, folder):
    """Milliseconds of each move until the text and until the picture changed in JupyterLab."""
    texts, pictures = [], []
    with open_lab(folder) as lab:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
        nbformat.write(notebook, lab.folder / "benchmark.ipynb")
        lab.open("benchmark.ipynb")
        lab.run_all()
        row = lab.page.locator(".widget-hslider", has=lab.page.get_by_text("STAGE1_BLOCK_K", exact=True))
        row.locator(".noUi-handle").focus()
        for number in range(moves):
            text, picture = lab.page.evaluate(WAIT, ["ArrowLeft" if number % 2 else "ArrowRight"])
            texts.append(text)
            pictures.append(picture)
            lab.page.wait_for_timeout(100)
    return texts, pictures


def line(name, times):
    """One aligned row."""
    times = sorted(times)
    return f"{name:34} median {statistics.median(times):6.1f} ms   slowest {times[-1]:6.1f} ms   {len(times)} moves"


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    with tempfile.TemporaryDirectory() as scratch:
        print(line("in this process, text and picture", in_process(count, Path(scratch))))
        first, second = in_browser(count, Path(scratch))
        print(line("in JupyterLab, text", first))
        print(line("in JupyterLab, picture", second))
