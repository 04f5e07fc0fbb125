"""The tile explorer without its widgets: choices, history, long work. Everything here runs without a browser.

A configuration is a step with some of its literals changed, so it is a submission like any other: what the explorer
checks, times and exports is one and the same text.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_lab.model.choices import choices
from moe_lab.problem.errors import ExplorerError, MoeLabError
from moe_lab.problem.submission import LiteralValue, Submission, write_atomic

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from moe_lab.judge import Report
    from moe_lab.judge.plan import Plan
    from moe_lab.judge.rules import Profile
    from moe_lab.lesson.readout import Readout
    from moe_lab.lesson.stopwatch import Times
    from moe_lab.machine.devices import Device

#: Told what is being done.
Say = Callable[[str], None]

# --- history ---------------------------------------------------------------------------------------------------------

#: Verdict of a configuration that the judge never saw, because its tiles do not fit the card.
DOES_NOT_FIT = "does not fit"
#: Verdict of a configuration that a sweep ran on one case only.
FIRST_CASE_RIGHT = "right on one case"


class Trial(BaseModel):
    """One configuration and what came of it.

    Attributes:
        step: name of the step.
        values: every literal of it, by name.
        source_hash: SHA-256 of the text that was tried.
        device, case, routing: what the readout was for; ``device`` is a key of :func:`moe_lab.machine.devices.devices`.
        verdict: of the judge, or :data:`DOES_NOT_FIT` or :data:`FIRST_CASE_RIGHT`; empty if it was only timed.
        reason: one sentence.
        bound_ms: predicted least time on ``device``; None if it does not fit.
        judged_on: the machine that ran it; empty if none did.
        time_ms, baseline_ms: medians of the configuration and of the baseline, interleaved; None if not timed.
        timed_on: sizes and machine of the two times; times compare only where this is equal.
        when: UTC, ISO 8601.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    step: str
    values: dict[str, LiteralValue]
    source_hash: str
    device: str
    case: str
    routing: str
    verdict: str = ""
    reason: str = ""
    bound_ms: float | None = None
    judged_on: str = ""
    time_ms: float | None = None
    baseline_ms: float | None = None
    timed_on: str = ""
    when: str = Field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    @property
    def legal(self) -> bool:
        """Whether it may be used as far as anybody looked: the judge accepted it."""
        return self.verdict == "accepted"

    @property
    def speed(self) -> float | None:
        """Baseline's time over its own, both measured together; None if not timed."""
        return self.baseline_ms / self.time_ms if self.time_ms and self.baseline_ms else None


class History:
    """Trials of all time, one JSON object a line in a file that is only ever appended to.

    A line that cannot be read is named in :attr:`problem` and stays in the file. Several notebooks may write to one
    file: every line is appended in one write.

    Args:
        path: the file; it and its folder are created with the first trial.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._trials: list[Trial] = []
        self._lock = threading.Lock()
        #: One sentence about what could not be read or written; empty if all is well.
        self.problem = ""
        self._load()

    def _load(self) -> None:
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            self.problem = f"the history {self.path} cannot be read: {error.strerror}"
            return
        bad = []
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    self._trials.append(Trial.model_validate_json(line, strict=True))
                except ValidationError:
                    bad.append(number)
        if bad:
            some = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
            self.problem = (
                f"{len(bad)} of {len([line for line in lines if line.strip()])} lines of {self.path} cannot be read "
                f"(line {some}); they stay in the file and are left out here"
            )

    def add(self, trial: Trial) -> None:
        """Remember a trial, here and on disk; :attr:`problem` says so if the file cannot be written."""
        line = trial.model_dump_json().encode() + b"\n"
        with self._lock:
            self._trials.append(trial)
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
                try:
                    size = os.fstat(handle).st_size
                    # After a write that broke off, the next line must not continue the broken one.
                    whole = size == 0 or os.pread(handle, 1, size - 1) == b"\n"
                    os.write(handle, line if whole else b"\n" + line)
                finally:
                    os.close(handle)
            except OSError as error:
                self.problem = (
                    f"the history {self.path} cannot be written ({error.strerror}): what is tried now is only kept "
                    "until the kernel stops"
                )

    def trials(self, step: str | None = None) -> list[Trial]:
        """Configurations in the order they were first tried, each with its latest verdict and its latest time.

        Args:
            step: only of this step; None for all.
        """
        with self._lock:
            everything = list(self._trials)
        merged: dict[tuple[str, ...], Trial] = {}
        for trial in everything:
            if step is None or trial.step == step:
                key = (trial.source_hash, trial.device, trial.case, trial.routing)
                merged[key] = _merged(merged[key], trial) if key in merged else trial
        return list(merged.values())

    def best(self, step: str, timed_on: str | None = None) -> Trial | None:
        """The accepted configuration to go back to: the fastest against the baseline, else the lowest bound.

        Args:
            step: name of the step.
            timed_on: compare times of these sizes and this machine; None for those of the last one timed.
        """
        legal = [trial for trial in self.trials(step) if trial.legal]
        timed = [trial for trial in legal if trial.speed]
        if timed:
            where = timed_on or timed[-1].timed_on
            timed = [trial for trial in timed if trial.timed_on == where]
        if timed:
            return max(timed, key=lambda trial: trial.speed or 0.0)
        bounded = [trial for trial in legal if trial.bound_ms is not None]
        return min(bounded, key=lambda trial: trial.bound_ms or 0.0, default=legal[-1] if legal else None)

    def table(self, step: str | None = None) -> pd.DataFrame:
        """A row for each configuration, newest last: literals that vary, verdict, times, where.

        Args:
            step: only of this step; None for all.
        """
        import pandas as pd

        trials = self.trials(step)
        names = list(dict.fromkeys(name for trial in trials for name in trial.values))
        rows = [
            {
                "when": trial.when, "step": trial.step, "case": trial.case, "routing": trial.routing,
                "device": trial.device, **{name: trial.values.get(name) for name in names}, "verdict": trial.verdict,
                "bound_ms": trial.bound_ms, "time_ms": trial.time_ms, "baseline_ms": trial.baseline_ms,
                "speed": trial.speed, "timed_on": trial.timed_on, "judged_on": trial.judged_on,
                "reason": trial.reason, "source_hash": trial.source_hash,
            }
            for trial in trials
        ]  # fmt: skip
        columns = [
            "when", "step", "case", "routing", "device", *names, "verdict", "bound_ms", "time_ms", "baseline_ms",
            "speed", "timed_on", "judged_on", "reason", "source_hash",
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(names, object))

    def save_csv(self, path: str | os.PathLike[str], step: str | None = None) -> Path:
        """Write :meth:`table` as CSV; an existing file is replaced in one step or not at all.

        Raises:
            SubmissionError: if the folder does not exist or cannot be written to.
        """
        return write_atomic(path, self.table(step).to_csv(index=False).encode())


def _merged(old: Trial, new: Trial) -> Trial:
    """The newer trial, with what only the older one knows."""
    known = dict(new)
    groups = (("verdict", "reason", "judged_on"), ("time_ms", "baseline_ms", "timed_on"), ("bound_ms",))
    for group in groups:
        if getattr(new, group[0]) in ("", None):
            known |= {name: getattr(old, name) for name in group}
    # One case that was right says less than the whole judge did.
    if new.verdict == FIRST_CASE_RIGHT and old.legal:
        known |= {name: getattr(old, name) for name in groups[0]}
    return Trial(**known)


# --- long work -------------------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """Somebody pressed stop. Like KeyboardInterrupt it is no Exception, so that no handler of errors swallows it."""


class Background:
    """One piece of long work at a time, in a thread of its own, that can be paused and stopped.

    The work is a function that calls :meth:`checkpoint` now and then: this is where it waits while paused, and where
    :class:`Stopped` is raised. At the end of the interpreter the work is stopped.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._stop = threading.Event()
        self._go = threading.Event()
        self._go.set()
        atexit.register(self.close)

    @property
    def busy(self) -> bool:
        """Whether something runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def paused(self) -> bool:
        """Whether the work waits for :meth:`resume`."""
        return not self._go.is_set()

    def start(self, work: Callable[[], None]) -> bool:
        """Start some work unless other work still runs.

        Returns:
            Whether it was started.
        """
        with self._starting:
            if self.busy:
                return False
            self._stop.clear()
            self._go.set()
            self._thread = threading.Thread(target=self._run, args=(work,), name="moe_lab explorer", daemon=True)
            self._thread.start()
            return True

    def _run(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(Stopped):
            work()

    def checkpoint(self, *, pausable: bool = True) -> None:
        """Called by the work: wait while paused, end if stopped.

        Args:
            pausable: False where waiting would let a time limit of the judge run out.

        Raises:
            Stopped: after :meth:`stop`.
        """
        if pausable:
            self._go.wait()
        if self._stop.is_set():
            raise Stopped

    def pause(self) -> None:
        """Wait at the next checkpoint."""
        self._go.clear()

    def resume(self) -> None:
        """Go on."""
        self._go.set()

    def stop(self) -> None:
        """End at the next checkpoint."""
        self._stop.set()
        self._go.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end.

        Returns:
            Whether it has ended.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def close(self) -> None:
        """Stop, and give the work a moment to end what it started."""
        self.stop()
        self.wait(10)


# --- what the buttons do ---------------------------------------------------------------------------------------------

#: Stands for the device of this machine.
HERE = "here"


@dataclass(frozen=True)
class Setting:
    """What a configuration is looked at for.

    Attributes:
        device: key of :func:`moe_lab.machine.devices.devices`, or :data:`HERE`.
        case: number of the contest's case.
        routing: name of a routing of that case.
    """

    device: str
    case: int
    routing: str


class Session:
    """Everything the tile explorer does, without a widget.

    What takes long is meant to run in :attr:`work` and ends with :class:`Stopped` soon after ``work.stop()``; what the
    judge has started by then is ended, too.

    Args:
        step: name of a step of the ladder, or any submission.
        history: file of the trials.
        target: file that :meth:`export` writes.

    Raises:
        SubmissionError: for a name that is no step, or text that is no Python.
    """

    def __init__(self, step: str | Submission, history: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        from moe_lab import steps

        self.base = step if isinstance(step, Submission) else steps.step(step)
        entry = None if isinstance(step, Submission) else steps.find(step)
        #: What its trials are filed under.
        self.step = entry.name if entry else self.base.name
        self.profile: Profile = entry.profile if entry else "contest"
        self.choices = choices(self.base)
        self.history = History(history)
        self.target = Path(target)
        self.work = Background()
        self._reports: dict[str, Report] = {}

    def read(self, submission: Submission, setting: Setting) -> Readout:
        """What can be said without compiling.

        Raises:
            MoeLabError: if nothing can be said; the message says why.
        """
        from moe_lab.lesson.readout import read_out

        return read_out(submission, setting.case, setting.routing, device_of(setting))

    def check(self, submission: Submission, setting: Setting, say: Say, *, quick: bool = False) -> Report:
        """Have the judge compile and run a configuration on this machine, and remember the verdict.

        Args:
            submission: what to judge.
            setting: what to file it under.
            say: told what is being done.
            quick: the first structural case only, which does not make it accepted.

        Raises:
            Stopped: after ``work.stop()``.
        """
        from moe_lab.judge import judge

        def progress(text: str) -> None:
            # The judge's time limits run on while it waits, so a pause comes after it.
            self.work.checkpoint(pausable=False)
            say(text)

        report = judge(submission, profile=self.profile, progress=progress, plan=_one_case() if quick else None)
        verdict = str(report.verdict)
        if quick and report.accepted:
            verdict = FIRST_CASE_RIGHT
        elif not quick:
            self._reports[submission.source_hash] = report
        self.remember(submission, setting, verdict=verdict, reason=report.sentence, judged_on=report.device)
        return report

    def time(self, submission: Submission, setting: Setting, say: Say) -> Times:
        """Time a configuration on this machine, in turns with the baseline, and remember both medians.

        Raises:
            Stopped: after ``work.stop()``.
            ExplorerError: if it does not run here or is wrong.
        """
        from moe_lab.lesson.stopwatch import time_against_baseline

        def checkpoint() -> None:
            self.work.checkpoint(pausable=False)

        times = time_against_baseline(submission, setting.case, setting.routing, say=say, checkpoint=checkpoint)
        self.remember(submission, setting, time_ms=times.time_ms, baseline_ms=times.baseline_ms, timed_on=times.where)
        return times

    def sweep(
        self,
        values: Sequence[Mapping[str, LiteralValue]],
        setting: Setting,
        say: Callable[[int, str], None],
        tried: Callable[[], None],
        *,
        timed: bool = False,
    ) -> Counter[str]:
        """Try many configurations: those that do not fit are noted, the others run one case of the judge.

        Args:
            values: changed literals of each.
            setting: what they are for.
            say: told how many are done and what is being done.
            tried: called after each.
            timed: whether those that are right are timed, too.

        Returns:
            How many came to each verdict.

        Raises:
            Stopped: after ``work.stop()``; what was tried until then is in the history.
        """
        verdicts: Counter[str] = Counter()
        for done, changed in enumerate(values):
            self.work.checkpoint()
            submission = self.base.with_literals(**changed)
            name = self._changes(submission.values) or "the step itself"
            say(done, name)
            reason = self._why_not(submission, setting)
            if reason:
                self.remember(submission, setting, verdict=DOES_NOT_FIT, reason=reason)
                verdicts[DOES_NOT_FIT] += 1
                tried()
                continue

            def tell(text: str, done: int = done, name: str = name) -> None:
                say(done, f"{name}: {text}")

            report = self.check(submission, setting, tell, quick=True)
            if timed and report.accepted:
                try:
                    self.time(submission, setting, tell)
                except ExplorerError as error:
                    verdicts[f"not timed ({error})"] += 1
            verdicts[FIRST_CASE_RIGHT if report.accepted else str(report.verdict)] += 1
            tried()
        return verdicts

    def _why_not(self, submission: Submission, setting: Setting) -> str:
        """Why a configuration does not fit; empty if it does, or if only running it can tell."""
        try:
            readout = self.read(submission, setting)
        except MoeLabError:
            return ""
        return readout.sentence if readout.fits is False else ""

    def would_replace(self, submission: Submission) -> bool:
        """Whether :attr:`target` holds another text, which :meth:`export` would replace."""
        return self.target.exists() and self.target.read_bytes() != submission.source.encode()

    def export(self, submission: Submission, setting: Setting, say: Say) -> Report:
        """Write a configuration to :attr:`target` through the exporter, then judge the file.

        A text that was judged in this session already is not judged again: it is the same bytes.

        Args:
            submission: what to write.
            setting: what to file the verdict under.
            say: told what is being done.

        Raises:
            ExportError: for a violated rule or a folder that cannot be written to; an existing file stays.
            Stopped: after ``work.stop()``; the file is written by then.
        """
        from moe_lab.lesson.export import export

        written = Submission.from_file(export(submission, self.target, self.profile))
        return self._reports.get(written.source_hash) or self.check(written, setting, say)

    def remember(self, submission: Submission, setting: Setting, **found: Any) -> None:
        """Add to the history what came of a configuration."""
        try:
            bound_ms = self.read(submission, setting).bound_ms
        except MoeLabError:
            bound_ms = None
        self.history.add(
            Trial(
                step=self.step,
                values=submission.values,
                source_hash=submission.source_hash,
                device=setting.device,
                case=f"case {setting.case}",
                routing=setting.routing,
                bound_ms=bound_ms,
                **found,
            )
        )

    def changes(self, trial: Trial) -> str:
        """What a trial changed in the step; empty for the step itself."""
        return self._changes(trial.values)

    def _changes(self, values: Mapping[str, LiteralValue]) -> str:
        own = self.base.values
        return ", ".join(f"{name} {value}" for name, value in values.items() if own.get(name) != value)

    def summary(self) -> pd.DataFrame:
        """The history of this step for the panel, newest first; :meth:`History.table` has every column."""
        import pandas as pd

        table = pd.DataFrame(
            [
                {
                    "no.": number,
                    "changed": self.changes(trial) or "nothing",
                    "for": f"{trial.device}, {trial.case}, {trial.routing}",
                    "verdict": trial.verdict.replace("_", " "),
                    "least ms": "" if trial.bound_ms is None else f"{trial.bound_ms:.3f}",
                    "measured ms": "" if trial.time_ms is None else f"{trial.time_ms:.3f}",
                    "times as fast as the baseline": "" if trial.speed is None else f"{trial.speed:.2f}",
                    "measured on": trial.timed_on,
                    "reason": trial.reason,
                }
                for number, trial in reversed(list(enumerate(self.history.trials(self.step), start=1)))
            ]
        )
        measured = ["measured ms", "times as fast as the baseline", "measured on"]
        return table if table.empty or (table["measured ms"] != "").any() else table.drop(columns=measured)

    def save_csv(self) -> Path:
        """Write the whole history of this step to ``tile_explorer.csv`` in the present folder, the notebook's.

        Raises:
            SubmissionError: if the folder cannot be written to.
        """
        return self.history.save_csv("tile_explorer.csv", self.step)


def device_of(setting: Setting) -> Device | None:
    """The device that a setting names; None for a machine that nobody has figures of.

    Raises:
        DataError: for a key that is no device.
    """
    from moe_lab.machine import backend, devices

    if setting.device == HERE:
        return devices.reported_as(backend.detect().name)
    return devices.device(setting.device)


def _one_case() -> Plan:
    """The structural case with the group sizes 0, 1, 127, 128 and 129, and nothing else."""
    from moe_lab.judge.plan import Plan, structural_groups

    first = structural_groups(random.Random(secrets.randbits(32)))[0]
    return Plan(groups=(first,), stop_at_first=True, variants=False, fit=False)


#: How a verdict is drawn: marker, filled or not, colour (Okabe and Ito's), name in the legend.
_LOOKS: dict[str, tuple[str, bool, str, str]] = {
    "accepted": ("o", True, "#0072B2", "accepted"),
    FIRST_CASE_RIGHT: ("o", False, "#0072B2", FIRST_CASE_RIGHT),
    DOES_NOT_FIT: ("x", True, "#D55E00", DOES_NOT_FIT),
    "": (".", True, "#777777", "not judged"),
}
_REFUSED = ("^", True, "#D55E00", "refused by the judge")


def draw_trials(trials: Sequence[Trial], setting: Setting) -> Figure:
    """What was tried for one setting, numbered as in :meth:`Session.summary`: least times, and speeds measured.

    Args:
        trials: as :meth:`History.trials` returns them; those for another setting are left out.
        setting: device, case and routing.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    mine = [
        (number, trial) for number, trial in enumerate(trials, start=1)
        if (trial.device, trial.case, trial.routing) == (setting.device, f"case {setting.case}", setting.routing)
    ]  # fmt: skip
    where = next((trial.timed_on for _, trial in reversed(mine) if trial.speed), "")
    parts = [("predicted: least ms", [(number, trial, trial.bound_ms) for number, trial in mine])]
    if where:
        timed = [(number, trial, trial.speed) for number, trial in mine if trial.timed_on == where]
        parts.append((f"measured: times as fast as the baseline\n{where}", timed))
    figure = Figure(figsize=(6.6, 2.6))
    for column, (title, found) in enumerate(parts):
        axes = figure.add_axes((0.09 + column * 0.49, 0.19, 0.40 if where else 0.88, 0.64))
        dots: dict[tuple[str, bool, str, str], list[tuple[int, float]]] = {}
        for number, trial, height in found:
            if height is not None:
                dots.setdefault(_LOOKS.get(trial.verdict, _REFUSED), []).append((number, height))
        for (marker, filled, colour, name), places in dots.items():
            axes.plot(
                *zip(*places, strict=True), marker=marker, color=colour, markerfacecolor=colour if filled else "none",
                linestyle="none", label=name,
            )  # fmt: skip
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel("configuration, in the order tried", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if dots:
            axes.set_ylim(0, 1.25 * axes.dataLim.y1)
            axes.set_xlim(0.5, len(trials) + 0.5)
            axes.legend(fontsize=7)
        else:
            axes.set_yticks([])
            axes.text(0.5, 0.5, "nothing yet", ha="center", va="center", fontsize=8, transform=axes.transAxes)
        if column:
            axes.axhline(1.0, color="#777777", linewidth=0.8)
    return figure
