"""Widgets for the notebooks: the tile explorer, the layout explorer and the roofline explorer.

They are controls and wiring: what they answer is in :mod:`moe_lab.lesson.explorer`, what they draw in
:mod:`moe_lab.lesson.readout`.
"""

import functools
import html
import io
import itertools
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipywidgets
from IPython import display as notebook
from matplotlib.figure import Figure

from moe_lab import judge
from moe_lab.lesson import plots
from moe_lab.lesson.display import BLUE, RED, show
from moe_lab.lesson.explorer import HERE, Background, Session, Setting, Stopped
from moe_lab.lesson.readout import Readout, best_roof, draw, draw_trials, gauges_html, rows_html
from moe_lab.machine.devices import device as find_device
from moe_lab.model.choices import Choice, grid
from moe_lab.model.roofline import bound, work
from moe_lab.problem import routings as recorded
from moe_lab.problem.contract import CASES
from moe_lab.problem.errors import ContractError, ExplorerError, MoeLabError
from moe_lab.problem.layout import GroupedLayout
from moe_lab.problem.submission import LiteralValue, Submission

#: A sweep of more would take days.
_MOST_CONFIGURATIONS = 1000
#: Rows of the history that the panel shows; all are in the CSV.
_MOST_ROWS = 100

_CSS = Path(__file__).with_name("panel.css").read_text(encoding="utf-8")
_STYLE = f"<style>.moe-lab-panel {{ --good: {BLUE}; --bad: {RED}; }}\n{_CSS}</style>"
_WRAP = {"flex_flow": "row wrap", "grid_gap": "4px 16px"}


# --- shared ----------------------------------------------------------------------------------------------------------


class _Panel(ipywidgets.VBox):
    """A panel that is alive in JupyterLab and elsewhere (a code host, a PDF, nbconvert) a figure and its description.

    A move of a control redraws it in the background. A fast drag asks for that at every step of the slider: only the
    latest request is served.
    """

    def __init__(self, *controls: ipywidgets.Widget) -> None:
        self._words = ipywidgets.HTML()  # says what is drawn, or why it cannot be
        self._picture = _picture()
        super().__init__([ipywidgets.HTML(_STYLE), *self._arranged(controls)])
        self.add_class("moe-lab-panel")
        self.redraw = Background()
        for control in controls:
            control.observe(self._moved, names="value")
        _guarded(self._words, self._draw)

    def static_figure(self) -> tuple[Figure, str]:
        """What stays where widgets do not live: a figure and its description."""
        raise NotImplementedError

    def _arranged(self, controls: Sequence[ipywidgets.Widget]) -> list[ipywidgets.Widget]:
        return [ipywidgets.HBox(controls, layout=_WRAP), self._words, self._picture]

    def _draw(self) -> None:
        figure, words = self.static_figure()
        self._words.value, self._picture.value = _note(words), _png(figure)

    def _moved(self, change: dict[str, Any]) -> None:
        self.redraw.start(lambda: _guarded(self._words, self._draw), after=True)

    def _ipython_display_(self) -> None:
        notebook.display(self._repr_mimebundle_(), raw=True)
        try:
            show(*self.static_figure())
        except MoeLabError as error:
            notebook.display({"text/plain": str(error)}, raw=True)


def _guarded(place: ipywidgets.HTML, action: Callable[[], object]) -> None:
    """Do something; what goes wrong is a sentence at a place of the panel, for a dead widget would say nothing."""
    try:
        action()
    except MoeLabError as error:
        place.value = _note(str(error), "bad")
    except Exception:  # noqa: BLE001
        place.value = _note("That failed; this is a mistake in moe_lab.", "bad", traceback.format_exc())


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


@functools.lru_cache(maxsize=256)
def _roofline_png(readout: Readout) -> bytes:
    """The roofline of a readout without its words: most moves of a slider leave it as it is."""
    return _png(draw(readout, gauges=False))


def _note(text: str, kind: str = "", details: str = "") -> str:
    """A sentence with a mark and folded details."""
    folded = f"<details><summary>details</summary>{_pre(details)}</details>" if details else ""
    mark = {"good": "✓", "bad": "✗", "": ""}[kind]
    return f'<div role="status" class="moe-lab-note moe-lab-{kind}">{mark} {html.escape(text)}{folded}</div>'


def _pre(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def _picture() -> ipywidgets.Image:
    return ipywidgets.Image(format="png", layout={"width": "100%", "max_width": "800px"})


def _control(
    kind: type, description: str, value: Any, width: str = "auto", label: str = "initial", **more: Any
) -> ipywidgets.Widget:
    look = {"layout": {"width": width}, "style": {"description_width": label}}
    return kind(description=description, value=value, **look, **more)


def _menu(description: str, value: Any, options: Sequence[str | tuple[str, Any]]) -> ipywidgets.Dropdown:
    return _control(ipywidgets.Dropdown, description, value, options=options)


def _device_menu(device: str, *others: tuple[str, str]) -> ipywidgets.Dropdown:
    """The two cards of the lessons; another device comes first."""
    key = device if device == HERE else find_device(device).name
    keys = [*({key} - {"c500", "h200", HERE}), "c500", "h200"]
    return _menu("device", key, [*((find_device(each).title, each) for each in keys), *others])


def _case_menu(number: int) -> ipywidgets.Dropdown:
    if number not in CASES:
        raise ContractError(f"got case {number!r}, expected one of {', '.join(map(str, CASES))}")
    sizes = "{0.name}: {0.num_experts} experts, {0.hidden} × {0.intermediate}, {0.num_tokens} rows"
    return _menu("case", number, [(sizes.format(case), each) for each, case in CASES.items()])


def _block_slider(block: int) -> ipywidgets.SelectionSlider:
    """Rows of a block: powers of two, and what a tile of tokens may be between them."""
    options = sorted({16, 32, 48, 64, 96, 128, 160, 192, 256, block})
    return _control(ipywidgets.SelectionSlider, "rows of a block", block, "330px", options=options)


def _literal(choice: Choice) -> ipywidgets.Widget:
    """The control for one literal: a tick for True and False, a menu for words, a slider for numbers."""
    kind, options = ipywidgets.Checkbox, {}
    if not isinstance(choice.value, bool):
        kind = ipywidgets.Dropdown if isinstance(choice.value, str) else ipywidgets.SelectionSlider
        options = {"options": [(str(value), value) for value in choice.values]}
    return _control(kind, choice.name, choice.value, "350px", "125px", tooltip=choice.comment, **options)


# --- tile explorer ---------------------------------------------------------------------------------------------------

#: Rows of buttons: key, text and tooltip of each; ``TileExplorer._check`` is what "check" does.
_BUTTONS = {
    "this configuration": {
        "check": ("Compile and check", "Let the judge compile and run this on this machine"),
        "time": ("Time", "Time this on this machine, in turns with the baseline"),
        "export": ("Export", "Write the submission's file and judge it"),
        "source": ("Source", "Show the text, or hide it"),
        "diff": ("Diff", "Show what differs from the step, or hide it"),
        "reset": ("Reset", "Back to the step's own values"),
    },
    "sweep and history": {
        "sweep": ("Sweep", "Try every value of the ticked literals"),
        "pause": ("Pause", "Wait after the present configuration, or go on"),
        "stop": ("Stop", "End what runs; results so far are kept"),
        "best": ("Restore best", "Go to the best accepted configuration of the history"),
        "csv": ("Save CSV", "Write the history as a table"),
    },
}


class TileExplorer(_Panel):
    """Turn the tiles of a step, or of any submission, and see what it costs; check, sweep and export what you like.

    ``device`` is a key, or "here" for this machine; by default the one that the step is made for. ``history`` is the
    file of what was tried, ``target`` the one that the export button writes.

    Raises SubmissionError for a name that is no step, or text that is no Python, DataError for a device or routing
    that does not exist, ContractError for a case that is none of the contest's.
    """

    def __init__(
        self, step: str | Submission = "s0_baseline", case: int = 1, device: str | None = None,
        routing: str = "multinomial-0", *, history: str | Path = ".moe_lab/history.jsonl",
        target: str | Path = "submission.py",
    ) -> None:  # fmt: skip
        self.session = Session(step, history, target)
        self._device = _device_menu(device or self.session.device, ("this machine", HERE))
        self._case = _case_menu(case)
        names = [each.name for each in recorded.routings() if each.case == case]
        self._routing = _menu("routing", recorded.routing(case, routing).name, names)
        self._menus = (self._device, self._case, self._routing)
        self._literals = {choice.name: _literal(choice) for choice in self.session.choices if len(choice.values) > 1}
        small = {"width": "22px", "flex": "0 0 auto"}
        self._swept = {
            name: ipywidgets.Checkbox(value=False, indent=False, tooltip=f"Vary {name} in a sweep", layout=small)
            for name in self._literals
        }
        self._gauges, self._bound, self._rows = (ipywidgets.HTML() for _ in range(3))
        self._message, self._text, self._table = (ipywidgets.HTML() for _ in range(3))
        self._trials = _picture()
        self._progress = ipywidgets.IntProgress(layout={"width": "100%", "display": "none"})
        self._buttons: dict[str, ipywidgets.Button] = {}
        for key, (text, tooltip) in itertools.chain.from_iterable(row.items() for row in _BUTTONS.values()):
            self._buttons[key] = ipywidgets.Button(description=text, tooltip=tooltip, layout={"width": "auto"})
            self._buttons[key].on_click(functools.partial(self._press, getattr(self, f"_{key}")))
        self._buttons["check"].button_style = "primary"
        self._shown, self._asked_to_replace = "", False
        super().__init__(*self._menus, *self._literals.values(), *self._swept.values())
        self._show_history()
        self._enable(busy=False)

    def _arranged(self, controls: Sequence[ipywidgets.Widget]) -> list[ipywidgets.Widget]:
        box, words = ipywidgets.HBox, ipywidgets.HTML
        left = [words(f"<b>Tiles of {html.escape(self.session.step)}</b>; tick what a sweep shall vary")]
        for stage, names in itertools.groupby(self._literals, re.compile(r"^STAGE(\d+)").findall):
            left += [words(f"<b>Stage {number}</b>") for number in stage]
            left += [box([self._swept[name], self._literals[name]]) for name in names]
        if constants := [f"{each.name} = {each.value!r}" for each in self.session.choices if len(each.values) == 1]:
            left.append(words(f"<small>Constants: {html.escape(', '.join(constants))}</small>"))
        right = [self._words, self._gauges, self._picture, self._bound]
        columns = [
            ipywidgets.VBox([*left, self._rows], layout={"width": "390px", "flex": "0 0 auto"}),
            ipywidgets.VBox(right, layout={"flex": "1 1 420px", "min_width": "0"}),
        ]
        rows = []
        for title, buttons in _BUTTONS.items():
            head = words(f"<small>{title}</small>", layout={"width": "120px"})
            rows.append(box([head, *(self._buttons[key] for key in buttons)], layout={"flex_flow": "row wrap"}))
        below = [self._progress, self._message, self._text, self._table, self._trials]
        return [box(self._menus, layout=_WRAP), box(columns, layout=_WRAP), *rows, *below]

    # ---- state and readout

    @property
    def values(self) -> dict[str, LiteralValue]:
        """What the controls say, by literal; those that a control does not offer are left as they are."""
        return {name: control.value for name, control in self._literals.items()}

    @values.setter
    def values(self, values: Mapping[str, LiteralValue]) -> None:
        for choice in self.session.choices:
            if choice.name in self._literals and values.get(choice.name) in choice.values:
                self._literals[choice.name].value = values[choice.name]

    @property
    def submission(self) -> Submission:
        """The step with these values: what the buttons check, show and export."""
        return self.session.base.with_literals(**self.values)

    @property
    def setting(self) -> Setting:
        """Device, case and routing of the menus."""
        return Setting(*(menu.value for menu in self._menus))

    def static_figure(self) -> tuple[Figure, str]:
        """The readout as a figure."""
        readout = self.session.read(self.submission, self.setting)
        return draw(readout), readout.description

    def _moved(self, change: dict[str, Any]) -> None:
        if change["owner"] in self._swept.values():
            self._enable(busy=self.session.work.busy)
            return
        self._asked_to_replace = False
        super()._moved(change)
        if change["owner"] in self._menus:
            _guarded(self._message, self._show_history)

    def _draw(self) -> None:
        submission, setting = self.submission, self.setting
        self._show_text()
        if not self.session.is_read(submission, setting):
            self._words.value = _note("TileLang reads this configuration; the figures are still those before it.")
        readout = self.session.read(submission, setting)
        self._words.value = _note(readout.sentence, {True: "good", False: "bad", None: ""}[readout.fits])
        self._gauges.value, self._rows.value = gauges_html(readout), rows_html(readout)
        self._bound.value = html.escape(readout.bound_sentence)
        self._picture.value = _roofline_png(replace(readout, title="", sentence="", gauges=(), columns=(), rows=()))
        self.session.read_ahead(submission, setting)

    def _show_text(self) -> None:
        shown, mine = "", Submission(self.submission.source, "this configuration")
        if self._shown == "diff":
            shown = self.session.base.diff(mine) or "No difference: these are the step's own values."
        elif self._shown:
            shown = mine.source
        self._text.value = _pre(shown) if shown else ""

    def _show_history(self) -> None:
        table, history = self.session.summary(), self.session.history
        note = _note(history.problem[0].upper() + history.problem[1:] + ".", "bad") if history.problem else ""
        self._trials.layout.display = "none" if table.empty else ""
        if table.empty:
            self._table.value = f"{note}<p>Nothing tried yet: what you check, sweep or export is kept here.</p>"
            return
        rows = table.head(_MOST_ROWS).to_html(index=False, border=0, na_rep="", float_format="{:.3f}".format)
        more = f", {_MOST_ROWS} of {len(table)}" if len(table) > _MOST_ROWS else ""
        self._table.value = (
            f"{note}<b>Tried so far</b>, newest first{more} ({html.escape(str(history.path))})"
            f'<div class="moe-lab-scroll" tabindex="0">{rows}</div>'
        )
        self._trials.value = _png(draw_trials(history.trials(), self.setting))

    # ---- buttons

    def _press(self, action: Callable[[], object], button: ipywidgets.Button) -> None:
        _guarded(self._message, action)

    def _say(self, text: str, kind: str = "", details: str = "") -> None:
        self._message.value = _note(text, kind, details)

    def _start(self, task: Callable[[Submission, Setting], object], *, pausable: bool = False) -> None:
        """Do something long with the present configuration."""
        work = functools.partial(task, self.submission, self.setting)

        def run() -> None:
            try:
                _guarded(self._message, work)
            except Stopped:
                self._say("Stopped; what was tried until then is in the history.")
            finally:
                self._progress.layout.display = "none"
                self._buttons["pause"].description = "Pause"
                _guarded(self._message, self._show_history)
                self._enable(busy=False)

        if self.session.work.start(run):
            self._enable(busy=True)
            self._buttons["pause"].disabled = not pausable
        else:
            self._say("Something still runs: wait for it, or stop it.", "bad")

    def _enable(self, *, busy: bool) -> None:
        offers = self._offers()
        count = math.prod(map(len, offers.values()))
        off = {
            "check": busy, "time": busy, "export": busy, "stop": not busy, "sweep": busy or not offers, "pause": True,
            "best": self.session.history.best() is None,
        }  # fmt: skip
        for key, disabled in off.items():
            self._buttons[key].disabled = disabled
        self._buttons["sweep"].description = f"Sweep {count}" if count > 1 else "Sweep"

    def _check(self) -> None:
        self._start(lambda what, setting: self._show_report(self.session.check(what, setting, self._say)))

    def _time(self) -> None:
        def task(submission: Submission, setting: Setting) -> None:
            times = self.session.time(submission, setting, self._say)
            both = f"{times.time_ms:.3f} ms, the baseline {times.baseline_ms:.3f} ms"
            self._say(f"{both}: {times.baseline_ms / times.time_ms:.2f} times as fast ({times.where}).", "good")

        self._start(task)

    def _show_report(self, report: judge.Report, before: str = "") -> None:
        text = f"{before}{str(report.verdict).replace('_', ' ')}: {report.sentence}"
        self._say(text, "good" if report.accepted else "bad", report.render())

    def _offers(self) -> dict[str, tuple[LiteralValue, ...]]:
        """Values of the ticked literals."""
        ticked = [name for name, tick in self._swept.items() if tick.value]
        return {choice.name: choice.values for choice in self.session.choices if choice.name in ticked}

    def _sweep(self) -> None:
        offers, now = self._offers(), self.values
        count = math.prod(map(len, offers.values()))
        if count > _MOST_CONFIGURATIONS:
            raise ExplorerError(
                f"got {count} configurations, expected at most {_MOST_CONFIGURATIONS}: tick fewer literals at a time"
            )
        self._progress.max, self._progress.value, self._progress.layout.display = count, 0, ""

        def say(done: int, text: str) -> None:
            self._progress.value = done
            self._say(f"{done + 1} of {count}{' (paused)' if self.session.work.paused else ''}: {text}")

        def task(_: Submission, setting: Setting) -> None:
            values = [{**now, **changed} for changed in grid(offers)]
            verdicts = self.session.sweep(values, setting, say, self._show_history)
            found = ", ".join(f"{number} {verdict.replace('_', ' ')}" for verdict, number in verdicts.most_common())
            self._say(f"Tried {count}: {found}.", "good")

        self._start(task, pausable=True)

    def _pause(self) -> None:
        self.session.work.paused = not self.session.work.paused
        if self.session.work.paused:
            self._say("Pausing after the configuration that runs now; press again to go on.")
        self._buttons["pause"].description = "Go on" if self.session.work.paused else "Pause"

    def _stop(self) -> None:
        if self.session.work.busy:
            self._say("Stopping.")
            self.session.work.stop()

    def _export(self) -> None:
        session, wrote = self.session, f"Wrote {self.session.target}. "
        self._asked_to_replace = session.would_replace(self.submission) and not self._asked_to_replace
        if self._asked_to_replace:
            self._say(f"{session.target} holds another text. Press Export again to replace it.", "bad")
        else:
            self._start(lambda what, setting: self._show_report(session.export(what, setting, self._say), wrote))

    def _reset(self) -> None:
        self.values = self.session.base.values
        self._say("Back to the step's own values.")

    def _best(self) -> None:
        if (best := self.session.history.best()) is not None:
            self.values = best.values
            text = f"Restored: {self.session.changes(best.values) or 'the step itself'}."
            if self.submission.source_hash == best.source_hash:
                self._say(text, "good")
            else:
                self._say(f"{text} But the step has changed since this was accepted: check it again.", "bad")

    def _csv(self) -> None:
        self._say(f"Wrote {self.session.history.save_csv('tile_explorer.csv')}.", "good")

    def _source(self, what: str = "source") -> None:
        self._shown = "" if self._shown == what else what
        self._show_text()

    def _diff(self) -> None:
        self._source("diff")


# --- layout and roofline ---------------------------------------------------------------------------------------------


class LayoutExplorer(_Panel):
    """Group sizes, block size and padding rule: the layout they give and what it wastes.

    ``sizes`` are the valid rows of each expert, by default of a random routing of the contest's case 1. Raises
    ContractError for sizes that no layout can have.
    """

    def __init__(self, sizes: Sequence[int] | None = None) -> None:
        wanted = recorded.routing(1, "multinomial-0").sizes if sizes is None else GroupedLayout(tuple(sizes)).sizes
        text = " ".join(map(str, wanted))
        self._sizes = _control(ipywidgets.Text, "rows of each expert", text, "420px", continuous_update=False)
        self._block = _block_slider(128)
        rules = [("ceil(n / block)", "ceil"), ("ceil((n + 1) / block)", "plus_one")]
        self._rule = _menu("blocks of n rows", "ceil", rules)
        super().__init__(self._sizes, self._block, self._rule)

    def static_figure(self) -> tuple[Figure, str]:
        """The layout's picture."""
        try:
            sizes = tuple(map(int, self._sizes.value.replace(",", " ").split()))
        except ValueError:
            raise ContractError(f"got {self._sizes.value!r}, expected rows of each expert such as 3 0 2") from None
        return plots.layout_picture(GroupedLayout(sizes, self._block.value, self._rule.value))


class RooflineExplorer(_Panel):
    """Device, case and block size: the bound of the case, and what padding and a second read of the weights make of it.

    Every expert has the same number of rows. Raises DataError for a device that does not exist, ContractError for a
    case that is none of the contest's.
    """

    def __init__(self, device: str = "c500", case: int = 1, block: int = 128) -> None:
        self._device, self._case, self._block = _device_menu(device), _case_menu(case), _block_slider(block)
        super().__init__(self._device, self._case, self._block)

    def static_figure(self) -> tuple[Figure, str]:
        """The roofline with three dots, and the bounds in words."""
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
            label = f"{label}: {least.time_ms:.3f} ms"
            dots.append(plots.Point(label, whole.intensity, whole.flops / least.time_ms / 1e9))
            words.append(f"{label}, {least.side} binds")
        figure, _ = plots.roofline([roof], dots)
        return figure, f"{case.name} on the {roof.title}, blocks of {self._block.value}. {'; '.join(words)}."
