"""Widgets for the notebooks: the tile explorer, the layout explorer and the roofline explorer.

They are thin: what they show and do is in :mod:`moe_lab.lesson.readout` and :mod:`moe_lab.lesson.explorer` and runs
without a browser. Where widgets do not live (a code host, a PDF, nbconvert) each leaves a static figure and its
description.
"""

from __future__ import annotations

import functools
import html
import io
import math
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets

from moe_lab import steps
from moe_lab.lesson.display import show
from moe_lab.lesson.explorer import HERE, Session, Setting, Stopped, draw_trials
from moe_lab.lesson.readout import Gauge, Readout, best_roof, draw, draw_roofline
from moe_lab.machine.devices import device as find_device
from moe_lab.model.choices import Choice, grid
from moe_lab.model.roofline import bound, work
from moe_lab.problem.contract import CASES, PaddingRule
from moe_lab.problem.errors import ContractError, ExplorerError, MoeLabError
from moe_lab.problem.layout import GroupedLayout
from moe_lab.problem.routings import routing as find_routing
from moe_lab.problem.routings import routings
from moe_lab.problem.submission import LiteralValue, Submission

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from moe_lab.judge import Report

#: A sweep of more would take days.
_MOST_CONFIGURATIONS = 1000
#: Rows of the history that the panel shows; all are in the CSV.
_MOST_ROWS = 100

#: What the device menu offers, besides whatever this machine has.
_DEVICES = ("c500", "h200")

# The second rule hides the static figure below a panel that is alive; a code host has no live panel and shows it.
_STYLE = """<style>
.moe-lab-panel { border: 1px solid var(--jp-border-color2, #ccc); border-radius: 4px; padding: 8px 12px; }
.jp-OutputArea-child:has(.moe-lab-panel) ~ .jp-OutputArea-child { display: none; }
.moe-lab-panel .widget-html-content { line-height: 1.45; font-size: 13px; }
.moe-lab-note { padding: 5px 10px; border-left: 5px solid #999; background: var(--jp-layout-color2, #f4f4f4); }
.moe-lab-good { border-color: #0072b2; }
.moe-lab-bad { border-color: #d55e00; }
.moe-lab-gauges { display: grid; grid-template-columns: max-content minmax(120px, 1fr) max-content; gap: 4px 10px;
  align-items: center; }
.moe-lab-bar { position: relative; height: 15px; background: var(--jp-layout-color3, #e4e4e4); }
.moe-lab-bar > div { height: 100%; background: #0072b2; }
.moe-lab-bar > div.moe-lab-over { background: repeating-linear-gradient(135deg, #d55e00 0 6px, #fff 6px 8px); }
.moe-lab-bar > span { position: absolute; top: -2px; bottom: -2px;
  border-left: 2px solid var(--jp-ui-font-color1, #000); }
.moe-lab-panel table { border-collapse: collapse; font-size: 12px; }
.moe-lab-panel th, .moe-lab-panel td { padding: 1px 10px 1px 0; text-align: left !important; vertical-align: top; }
.moe-lab-panel .moe-lab-facts td, .moe-lab-panel .moe-lab-facts th { font-size: 11.5px; white-space: nowrap; }
.moe-lab-panel thead th { border-bottom: 1px solid var(--jp-border-color1, #999); }
.moe-lab-panel pre { max-height: 340px; overflow: auto; line-height: 1.3; font-size: 12px; margin: 4px 0; }
.moe-lab-scroll { max-height: 230px; overflow: auto; }
.moe-lab-panel .widget-label { font-size: 12px; }
</style>"""

_WRAP = {"flex_flow": "row wrap", "grid_gap": "4px 16px"}
_MARKS = {"good": "✓", "bad": "✗", "": ""}


# --- shared ----------------------------------------------------------------------------------------------------------


class Redraw:
    """Runs one function, in a thread of its own, for the latest of many requests.

    A fast drag asks for a redraw at every step of the slider; a request that is not served yet when the next one comes
    is never served. So nothing piles up in the kernel, and the last state is always drawn.

    Args:
        draw: draws the state at the time it is called; must not raise.
    """

    def __init__(self, draw: Callable[[], None]) -> None:
        self._draw = draw
        self._state = threading.Condition()
        self._wanted = 0
        self._drawn = 0
        self._running = False

    def request(self) -> None:
        """Ask for a redraw; returns at once."""
        with self._state:
            self._wanted += 1
            if not self._running:
                self._running = True
                threading.Thread(target=self._serve, name="moe_lab redraw", daemon=True).start()

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until the last request is served.

        Returns:
            Whether it is.
        """
        with self._state:
            return self._state.wait_for(lambda: self._drawn == self._wanted, timeout_s)

    def _serve(self) -> None:
        while True:
            with self._state:
                wanted = self._wanted
            self._draw()
            with self._state:
                self._drawn = wanted
                self._state.notify_all()
                if wanted == self._wanted:
                    self._running = False
                    return


class _Panel(ipywidgets.VBox):
    """A panel that is alive in JupyterLab and a figure elsewhere."""

    def __init__(self, children: Sequence[ipywidgets.Widget]) -> None:
        super().__init__([ipywidgets.HTML(_STYLE), *children])
        self.add_class("moe-lab-panel")

    def static_figure(self) -> tuple[Figure, str]:
        """What stays where widgets do not live: a figure and its description."""
        raise NotImplementedError

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self._repr_mimebundle_(), raw=True)
        try:
            show(*self.static_figure())
        except MoeLabError as error:
            display({"text/plain": str(error)}, raw=True)


def _png(figure: Figure, *, tight: bool = False) -> bytes:
    """A picture; ``tight`` widens it by what sticks out and takes twice as long."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110, bbox_inches="tight" if tight else None)
    return picture.getvalue()


@functools.lru_cache(maxsize=256)
def _roofline_png(readout: Readout) -> bytes:
    """The roofline of a readout without its words: most moves of a slider leave it as it is."""
    return _png(draw_roofline(readout))


def _note(text: str, kind: str = "", details: str = "") -> str:
    """A sentence with a mark and a folded rest; ``details`` is HTML."""
    folded = f"<details><summary>details</summary>{details}</details>" if details else ""
    return (
        f'<div role="status" class="moe-lab-note{f" moe-lab-{kind}" if kind else ""}">'
        f"{_MARKS[kind]} {html.escape(text)}{folded}</div>"
    )


def _pre(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def _menu(description: str, options: Sequence[tuple[str, Any]], value: Any) -> ipywidgets.Dropdown:
    return ipywidgets.Dropdown(
        options=list(options), value=value, description=description, layout={"width": "auto"},
        style={"description_width": "initial"},
    )  # fmt: skip


def _check_case(case: int) -> None:
    if case not in CASES:
        raise ContractError(f"got case {case!r}, expected one of {', '.join(map(str, CASES))}")


def _case_options() -> list[tuple[str, int]]:
    return [
        (
            f"{case.name}: {case.num_experts} experts, {case.hidden} × {case.intermediate}, {case.num_tokens} rows",
            number,
        )
        for number, case in CASES.items()
    ]


def _device_options(first: str) -> list[tuple[str, str]]:
    """The devices of the menu; one that is not among them comes first."""
    keys = _DEVICES if first in (*_DEVICES, HERE) else (first, *_DEVICES)
    return [(find_device(key).title, key) for key in keys]


# --- tile explorer ---------------------------------------------------------------------------------------------------


class TileExplorer(_Panel):
    """Turn the tiles of a step and see what it costs; then check, sweep and export what you like.

    Args:
        step: name of a step of the ladder, or any submission.
        case: number of the contest's case.
        device: "c500", "h200", or "here" for this machine; by default the one that the step is made for.
        routing: name of a routing, see :mod:`moe_lab.problem.routings`.
        history: file of what was tried, beside the notebook by default.
        target: file that the export button writes.

    Raises:
        SubmissionError: for a name that is no step, or text that is no Python.
        DataError: for a device or routing that does not exist.
        ContractError: for a case that is none of the contest's.
    """

    def __init__(
        self,
        step: str | Submission = "s0_baseline",
        case: int = 1,
        device: str | None = None,
        routing: str = "multinomial-0",
        *,
        history: str | Path = ".moe_lab/history.jsonl",
        target: str | Path = "submission.py",
    ) -> None:
        self.session = Session(step, history, target)
        if device is None:
            device = "c500" if isinstance(step, Submission) or steps.find(step).branch != "hopper" else "h200"
        if device != HERE:
            device = find_device(device).name
        _check_case(case)
        find_routing(case, routing)
        names = [each.name for each in routings() if each.case == case]
        self._device = _menu("device", [*_device_options(device), ("this machine", HERE)], device)
        self._case = _menu("case", _case_options(), case)
        self._routing = _menu("routing", [(name, name) for name in names], routing)
        self._literals = {choice.name: _literal(choice) for choice in self.session.choices if len(choice.values) > 1}
        self._swept = {name: _tick(name) for name in self._literals}
        self._readout = ipywidgets.HTML()
        self._roofline = ipywidgets.Image(format="png", layout={"width": "100%", "max_width": "726px"})
        self._bound = ipywidgets.HTML()
        self._rows = ipywidgets.HTML()
        self._message = ipywidgets.HTML()
        self._progress = ipywidgets.IntProgress(layout={"width": "100%", "display": "none"})
        self._text = ipywidgets.HTML()
        self._table = ipywidgets.HTML()
        self._trials = ipywidgets.Image(format="png", layout={"width": "100%", "max_width": "726px"})
        self._buttons = self._make_buttons()
        self._timed = ipywidgets.Checkbox(
            value=False, indent=False, description="time it, too", tooltip="Time what a sweep finds right",
            layout={"width": "auto"},
        )  # fmt: skip
        self._shown = ""
        self._asked_to_replace = False
        self.redraw = Redraw(self._update)
        super().__init__(self._layout())
        for control in (self._device, self._case, self._routing, *self._literals.values()):
            control.observe(self._moved, names="value")
        for control in (self._device, self._case, self._routing):
            control.observe(lambda change: self._guarded(self._show_history), names="value")
        for tick in self._swept.values():
            tick.observe(lambda change: self._enable(), names="value")
        self._update()
        self._show_history()
        self._enable()

    # ---- state

    @property
    def values(self) -> dict[str, LiteralValue]:
        """What the controls say, by literal."""
        return {name: control.value for name, control in self._literals.items()}

    @values.setter
    def values(self, values: dict[str, LiteralValue]) -> None:
        for name, control in self._literals.items():
            offered = [value for _, value in control.options] if hasattr(control, "options") else None
            if name in values and (offered is None or values[name] in offered):
                control.value = values[name]

    @property
    def submission(self) -> Submission:
        """The step with these values: what the buttons check, show and export."""
        return self.session.base.with_literals(**self.values)

    @property
    def setting(self) -> Setting:
        """Device, case and routing of the menus."""
        return Setting(self._device.value, self._case.value, self._routing.value)

    @property
    def readout(self) -> Readout:
        """What is said of the present state.

        Raises:
            MoeLabError: if nothing can be said.
        """
        return self.session.read(self.submission, self.setting)

    def static_figure(self) -> tuple[Figure, str]:
        """The readout as a figure."""
        readout = self.readout
        return draw(readout), readout.description

    # ---- layout

    def _make_buttons(self) -> dict[str, ipywidgets.Button]:
        buttons = {}
        for key, text, tooltip, action in (
            ("check", "Compile and check", "Let the judge compile and run this on this machine", self._check),
            ("time", "Time", "Time this on this machine, in turns with the baseline", self._time),
            ("sweep", "Sweep", "Try every value of the ticked literals", self._sweep),
            ("pause", "Pause", "Wait after the present configuration, or go on", self._pause),
            ("stop", "Stop", "End what runs; results so far are kept", self._stop),
            ("source", "Source", "Show the text, or hide it", lambda: self._show("source")),
            ("diff", "Diff", "Show what differs from the step, or hide it", lambda: self._show("diff")),
            ("export", "Export", f"Write {self.session.target} and judge it", self._export),
            ("reset", "Reset", "Back to the step's own values", self._reset),
            ("best", "Restore best", "Go to the best accepted configuration of the history", self._restore),
            ("csv", "Save CSV", "Write the history as a table", self._save_csv),
        ):
            button = ipywidgets.Button(description=text, tooltip=tooltip, layout={"width": "auto"})
            button.on_click(lambda _, action=action: self._guarded(action))
            buttons[key] = button
        buttons["check"].button_style = "primary"
        return buttons

    def _layout(self) -> list[ipywidgets.Widget]:
        rows = []
        group = ""
        for name, control in self._literals.items():
            first = name.partition("_")[0]
            if first != group and first.startswith("STAGE") and first[5:].isdigit():
                rows.append(ipywidgets.HTML(f"<b>Stage {first[5:]}</b>"))
            group = first
            rows.append(ipywidgets.HBox([self._swept[name], control]))
        constants = [choice for choice in self.session.choices if len(choice.values) == 1]
        if constants:
            text = ", ".join(f"{choice.name} = {choice.value!r}" for choice in constants)
            rows.append(ipywidgets.HTML(f"<small>Constants: {html.escape(text)}</small>"))
        head = ipywidgets.HTML(f"<b>Tiles of {html.escape(self.session.step)}</b>; tick what a sweep shall vary")
        left = ipywidgets.VBox([head, *rows, self._rows], layout={"width": "390px", "flex": "0 0 auto"})
        right = ipywidgets.VBox(
            [self._readout, self._roofline, self._bound], layout={"flex": "1 1 420px", "min_width": "0"}
        )
        return [
            ipywidgets.HBox([self._device, self._case, self._routing], layout=_WRAP),
            ipywidgets.HBox([left, right], layout=_WRAP),
            self._row("this configuration", "check", "time", "export", "source", "diff", "reset"),
            self._row("sweep and history", "sweep", "pause", "stop", "best", "csv", rest=[self._timed]),
            self._progress,
            self._message,
            self._text,
            self._table,
            self._trials,
        ]

    def _row(self, label: str, *keys: str, rest: Sequence[ipywidgets.Widget] = ()) -> ipywidgets.HBox:
        buttons = [self._buttons[key] for key in keys]
        head = ipywidgets.HTML(f"<small>{label}</small>", layout={"width": "120px"})
        return ipywidgets.HBox([head, *buttons, *rest], layout={"flex_flow": "row wrap"})

    # ---- readout

    def _moved(self, change: dict[str, Any]) -> None:
        self._asked_to_replace = False
        self.redraw.request()

    def _update(self) -> None:
        try:
            readout = self.readout
            self._readout.value = _readout_html(readout)
            self._rows.value = _rows_html(readout)
            self._bound.value = html.escape(readout.bound_sentence)
            self._roofline.value = _roofline_png(
                replace(readout, title="", sentence="", gauges=(), columns=(), rows=())
            )
            if self._shown:
                self._text.value = self._shown_html()
        except MoeLabError as error:
            self._readout.value = _note(str(error), "bad")
        except Exception:  # noqa: BLE001 - a dead widget would say nothing at all
            self._readout.value = _note("The readout failed; this is a mistake in moe_lab.", "bad", _trace())

    def _show(self, what: str) -> None:
        self._shown = "" if self._shown == what else what
        self._text.value = self._shown_html()

    def _shown_html(self) -> str:
        if self._shown == "source":
            return _pre(self.submission.source)
        if self._shown == "diff":
            mine = Submission(self.submission.source, "this configuration")
            return _pre(self.session.base.diff(mine) or "No difference: these are the step's own values.")
        return ""

    # ---- buttons

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except MoeLabError as error:
            self._say(str(error), "bad")
        except Exception:  # noqa: BLE001 - a dead widget would say nothing at all
            self._say("That failed; this is a mistake in moe_lab.", "bad", _trace())

    def _say(self, text: str, kind: str = "", details: str = "") -> None:
        self._message.value = _note(text, kind, details)

    def _start(self, work: Callable[[], None], *, pausable: bool = False) -> None:
        def run() -> None:
            try:
                self._guarded(work)
            except Stopped:
                self._say("Stopped; what was tried until then is in the history.")
            finally:
                self._progress.layout.display = "none"
                self._buttons["pause"].description = "Pause"
                self._guarded(self._show_history)
                self._enable(busy=False)

        if self.session.work.start(run):
            self._enable(busy=True)
            self._buttons["pause"].disabled = not pausable
        else:
            self._say("Something still runs: wait for it, or stop it.", "bad")

    def _enable(self, *, busy: bool | None = None) -> None:
        busy = self.session.work.busy if busy is None else busy
        for key in ("check", "time", "export"):
            self._buttons[key].disabled = busy
        self._buttons["stop"].disabled = not busy
        offers = self._offers()
        count = math.prod(map(len, offers.values()))
        self._buttons["sweep"].disabled = busy or not offers
        self._buttons["sweep"].description = f"Sweep {count}" if count > 1 else "Sweep"
        self._buttons["pause"].disabled = True
        self._buttons["best"].disabled = self.session.history.best(self.session.step) is None

    def _check(self) -> None:
        submission, setting = self.submission, self.setting

        def work() -> None:
            self._show_report(self.session.check(submission, setting, self._say))

        self._start(work)

    def _time(self) -> None:
        submission, setting = self.submission, self.setting

        def work() -> None:
            times = self.session.time(submission, setting, self._say)
            self._say(
                f"{times.time_ms:.3f} ms, the baseline {times.baseline_ms:.3f} ms: "
                f"{times.baseline_ms / times.time_ms:.2f} times as fast ({times.where}).",
                "good",
            )

        self._start(work)

    def _show_report(self, report: Report, before: str = "") -> None:
        self._say(
            f"{before}{str(report.verdict).replace('_', ' ')}: {report.sentence}",
            "good" if report.accepted else "bad", _pre(report.render()),
        )  # fmt: skip

    def _offers(self) -> dict[str, tuple[LiteralValue, ...]]:
        """Values of the ticked literals."""
        ticked = [name for name, tick in self._swept.items() if tick.value]
        return {choice.name: choice.values for choice in self.session.choices if choice.name in ticked}

    def _sweep(self) -> None:
        offers, now, setting, timed = self._offers(), self.values, self.setting, self._timed.value
        count = math.prod(map(len, offers.values()))
        if count > _MOST_CONFIGURATIONS:
            raise ExplorerError(
                f"got {count} configurations, expected at most {_MOST_CONFIGURATIONS}: tick fewer literals at a time"
            )
        values = [{**now, **changed} for changed in grid(offers)]
        self._progress.max = len(values)

        def say(done: int, text: str) -> None:
            self._progress.value = done
            pause = " (paused)" if self.session.work.paused else ""
            self._say(f"{done + 1} of {len(values)}{pause}: {text}")

        def work() -> None:
            self._progress.value = 0
            self._progress.layout.display = ""
            verdicts = self.session.sweep(values, setting, say, self._show_history, timed=timed)
            found = ", ".join(f"{count} {verdict.replace('_', ' ')}" for verdict, count in verdicts.most_common())
            self._say(f"Tried {len(values)}: {found}.", "good")

        self._start(work, pausable=True)

    def _pause(self) -> None:
        work = self.session.work
        if work.paused:
            work.resume()
        elif work.busy:
            work.pause()
            self._say("Pausing after the configuration that runs now; press again to go on.")
        self._buttons["pause"].description = "Go on" if work.paused else "Pause"

    def _stop(self) -> None:
        if self.session.work.busy:
            self._say("Stopping.")
            self.session.work.stop()

    def _export(self) -> None:
        submission, setting, session = self.submission, self.setting, self.session
        if session.would_replace(submission) and not self._asked_to_replace:
            self._asked_to_replace = True
            self._say(f"{session.target} holds another text. Press Export again to replace it.", "bad")
            return
        self._asked_to_replace = False

        def work() -> None:
            self._show_report(session.export(submission, setting, self._say), f"Wrote {session.target}. ")

        self._start(work)

    def _reset(self) -> None:
        self.values = self.session.base.values
        self._say("Back to the step's own values.")

    def _restore(self) -> None:
        best = self.session.history.best(self.session.step)
        if best is not None:
            self.values = best.values
            text = f"Restored: {self.session.changes(best) or 'the step itself'}."
            if self.submission.source_hash == best.source_hash:
                self._say(text, "good")
            else:
                self._say(f"{text} But the step has changed since this was accepted: check it again.", "bad")

    def _save_csv(self) -> None:
        path = self.session.save_csv()
        self._say(f"Wrote {path}.", "good")

    # ---- history

    def _show_history(self) -> None:
        table = self.session.summary()
        problem = self.session.history.problem
        note = _note(problem[0].upper() + problem[1:] + ".", "bad") if problem else ""
        if table.empty:
            self._table.value = f"{note}<p>Nothing tried yet: what you check, sweep or export is kept here.</p>"
            self._trials.layout.display = "none"
            return
        rows = table.head(_MOST_ROWS).to_html(index=False, border=0, na_rep="", escape=True)
        more = f", {_MOST_ROWS} of {len(table)}" if len(table) > _MOST_ROWS else ""
        self._table.value = (
            f"{note}<b>Tried so far</b>, newest first{more} ({html.escape(str(self.session.history.path))})"
            f'<div class="moe-lab-scroll" tabindex="0">{rows}</div>'
        )
        self._trials.value = _png(draw_trials(self.session.history.trials(self.session.step), self.setting))
        self._trials.layout.display = ""


# --- layout and roofline ---------------------------------------------------------------------------------------------

#: Block sizes to choose from: powers of two, and what a tile of tokens may be between them.
_BLOCKS = (16, 32, 48, 64, 96, 128, 160, 192, 256)


class _Plotter(_Panel):
    """A panel with one picture and a sentence above it."""

    def __init__(self, controls: Sequence[ipywidgets.Widget]) -> None:
        self._words = ipywidgets.HTML()
        self._picture = ipywidgets.Image(format="png", layout={"width": "100%", "max_width": "860px"})
        self.redraw = Redraw(self._update)
        super().__init__(
            [ipywidgets.HBox(list(controls), layout={"flex_flow": "row wrap"}), self._words, self._picture]
        )
        for control in controls:
            control.observe(lambda change: self.redraw.request(), names="value")
        self._update()

    def _update(self) -> None:
        try:
            figure, words = self.static_figure()
            self._words.value = _note(words)
            self._picture.value = _png(figure, tight=True)
        except MoeLabError as error:
            self._words.value = _note(str(error), "bad")
        except Exception:  # noqa: BLE001 - a dead widget would say nothing at all
            self._words.value = _note("The plot failed; this is a mistake in moe_lab.", "bad", _trace())


class LayoutExplorer(_Plotter):
    """Group sizes, block size and padding rule: the layout they give and what it wastes.

    Args:
        sizes: valid rows of each expert; by default a random routing of the contest's case 1.
        block: rows of a block.
        padding_rule: "ceil" or "plus_one", see :class:`moe_lab.problem.contract.Variant`.

    Raises:
        ContractError: for sizes, a block or a rule that no layout can have.
    """

    def __init__(
        self, sizes: Sequence[int] | None = None, block: int = 128, padding_rule: PaddingRule = "ceil"
    ) -> None:
        layout = GroupedLayout(
            find_routing(1, "multinomial-0").sizes if sizes is None else tuple(sizes), block, padding_rule
        )
        self._sizes = ipywidgets.Text(
            value=" ".join(map(str, layout.sizes)), description="rows of each expert", continuous_update=False,
            layout={"width": "420px"}, style={"description_width": "initial"},
        )  # fmt: skip
        self._block = _block_slider(block)
        rules = [("ceil(n / block)", "ceil"), ("ceil((n + 1) / block)", "plus_one")]
        self._rule = _menu("blocks of n rows", rules, padding_rule)
        super().__init__([self._sizes, self._block, self._rule])

    @property
    def layout_shown(self) -> GroupedLayout:
        """The layout of the controls.

        Raises:
            ContractError: for sizes that are none.
        """
        words = self._sizes.value.replace(",", " ").split()
        try:
            sizes = tuple(int(word) for word in words)
        except ValueError:
            raise ContractError(f"got {self._sizes.value!r}, expected rows of each expert such as 3 0 2") from None
        return GroupedLayout(sizes, self._block.value, self._rule.value)

    def static_figure(self) -> tuple[Figure, str]:
        """The layout's picture."""
        from moe_lab.lesson import plots

        return plots.layout_picture(self.layout_shown)


class RooflineExplorer(_Plotter):
    """Device, case and block size: the bound of the case, and what padding and a second read of the weights make of it.

    Args:
        device: key of a device.
        case: number of the contest's case.
        block: rows of a block; every expert has the same number of rows.

    Raises:
        DataError: for a device that does not exist.
        ContractError: for a case that is none of the contest's.
    """

    def __init__(self, device: str = "c500", case: int = 1, block: int = 128) -> None:
        _check_case(case)
        device = find_device(device).name
        self._device = _menu("device", _device_options(device), device)
        self._case = _menu("case", _case_options(), case)
        self._block = _block_slider(block)
        super().__init__([self._device, self._case, self._block])

    def static_figure(self) -> tuple[Figure, str]:
        """The roofline with three dots, and the bounds in words."""
        from moe_lab.lesson import plots

        case, roof = CASES[self._case.value], best_roof(find_device(self._device.value))
        reads = -(-case.num_tokens // case.num_experts // self._block.value)
        dots, words = [], []
        for label, passes, padded in (
            ("the case itself", 1, False),
            ("with padded rows computed", 1, True),
            (f"and each weight read {reads} times" if reads > 1 else "and each weight read once", reads, True),
        ):
            whole = work(case, weight_passes=passes, block=self._block.value).whole
            least = bound(replace(whole, flops=whole.padded_flops) if padded else whole, roof)
            rate = whole.flops / least.time_ms / 1e9
            dots.append(plots.Point(f"{label}: {least.time_ms:.3f} ms", whole.intensity, rate))
            words.append(f"{label}: {least.time_ms:.3f} ms, {least.side} binds")
        figure, _ = plots.roofline([roof], dots)
        return figure, f"{case.name} on the {roof.title}, blocks of {self._block.value}. {'; '.join(words)}."


def _block_slider(block: int) -> ipywidgets.SelectionSlider:
    return ipywidgets.SelectionSlider(
        options=sorted({*_BLOCKS, block}), value=block, description="rows of a block", layout={"width": "330px"},
        style={"description_width": "initial"},
    )  # fmt: skip


# --- parts -----------------------------------------------------------------------------------------------------------


def _literal(choice: Choice) -> ipywidgets.Widget:
    """The control for one literal: a tick for True and False, a menu for words, a slider for numbers."""
    shared = {"description": choice.name, "style": {"description_width": "125px"}, "layout": {"width": "350px"}}
    if isinstance(choice.value, bool):
        return ipywidgets.Checkbox(value=choice.value, tooltip=choice.comment, **shared)
    options = [(str(value), value) for value in choice.values]
    if isinstance(choice.value, str):
        return ipywidgets.Dropdown(options=options, value=choice.value, tooltip=choice.comment, **shared)
    return ipywidgets.SelectionSlider(options=options, value=choice.value, tooltip=choice.comment, **shared)


def _tick(name: str) -> ipywidgets.Checkbox:
    return ipywidgets.Checkbox(
        value=False, indent=False, tooltip=f"Vary {name} in a sweep", layout={"width": "22px", "flex": "0 0 auto"}
    )


def _readout_html(readout: Readout) -> str:
    kind = {True: "good", False: "bad", None: ""}[readout.fits]
    gauges = "".join(_gauge_html(gauge) for gauge in readout.gauges)
    return f'{_note(readout.sentence, kind)}<div class="moe-lab-gauges" style="margin-top: 8px">{gauges}</div>'


def _gauge_html(gauge: Gauge) -> str:
    over = gauge.share > 1
    # The whole bar is 125% of the limit, so that the limit is a line inside it and not its end.
    fill = f'<div class="{"moe-lab-over" if over else ""}" style="width: {min(gauge.share, 1.25) * 80:.1f}%"></div>'
    limit = '<span style="left: 80%"></span>' if gauge.limit else ""
    return (
        f"<div>{html.escape(gauge.label)}</div>"
        f'<div class="moe-lab-bar" aria-hidden="true">{fill}{limit}</div>'
        f"<div>{html.escape(gauge.text)}{', <b>too much</b>' if over else ''}</div>"
    )


def _rows_html(readout: Readout) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in readout.columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in readout.rows)
    return f'<table class="moe-lab-facts"><thead><tr>{head}</tr></thead>{body}</table>'


def _trace() -> str:
    return _pre(traceback.format_exc())
