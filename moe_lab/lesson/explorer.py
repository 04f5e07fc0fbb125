"""The tile explorer without its widgets: choices, history, long work. Everything here runs without a browser.

A configuration is a step with some of its literals changed, so it is a submission like any other: what the explorer
checks, times and exports is one and the same text.
"""

import atexit
import contextlib
import functools
import os
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_lab import judge, steps
from moe_lab.lesson import stopwatch
from moe_lab.lesson.export import export
from moe_lab.lesson.readout import DOES_NOT_FIT, FIRST_CASE_RIGHT, Readout, read_out
from moe_lab.machine import backend, devices
from moe_lab.model import tir
from moe_lab.model.choices import choices
from moe_lab.problem.contract import CASES, Case, Profile
from moe_lab.problem.errors import MoeLabError
from moe_lab.problem.layout import GroupedLayout
from moe_lab.problem.routings import routing
from moe_lab.problem.submission import LiteralValue, Submission, write_atomic

if TYPE_CHECKING:
    from moe_lab.judge import Report

#: Told what is being done.
Say = Callable[[str], None]

# --- history ---------------------------------------------------------------------------------------------------------


class Trial(BaseModel):
    """One configuration and what came of it; a line of the history."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    step: str  # its name
    values: dict[str, LiteralValue]  # every literal
    source_hash: str  # SHA-256 of the text that was tried
    device: str  # what the readout was for: a key of :func:`moe_lab.machine.devices.devices`, or HERE
    case: str
    routing: str
    verdict: str = ""  # the judge's, or DOES_NOT_FIT or FIRST_CASE_RIGHT; empty if it was only timed
    reason: str = ""  # one sentence
    bound_ms: float | None = None  # predicted least time on the device; None if it does not fit
    judged_on: str = ""  # the machine that ran it; empty if none did
    time_ms: float | None = None  # median, in turns with the baseline; None if not timed
    baseline_ms: float | None = None
    timed_on: str = ""  # sizes and machine of the two times, which compare only where this is equal
    when: str = Field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    @property
    def speed(self) -> float | None:
        """Baseline's time over its own, both measured together; None if not timed."""
        return self.baseline_ms / self.time_ms if self.time_ms and self.baseline_ms else None

    def completed(self, older: "Trial") -> "Trial":
        """This one, with what only an older trial of the same configuration knows."""
        verdict, time, bound = ("verdict", "reason", "judged_on"), ("time_ms", "baseline_ms", "timed_on"), ("bound_ms",)
        missing = [group for group in (verdict, time, bound) if getattr(self, group[0]) in ("", None)]
        # One case that was right says less than the whole judge did.
        if self.verdict == FIRST_CASE_RIGHT and older.verdict == "accepted":
            missing.append(verdict)
        return self.model_copy(update={name: getattr(older, name) for group in missing for name in group})


class History:
    """Trials of one step, one JSON object a line in a file that is only ever appended to, also by several notebooks.

    The file and its folder are created with the first trial. A line that cannot be read, like those of other steps,
    stays in the file.
    """

    def __init__(self, path: str | os.PathLike[str], step: str) -> None:
        self.path = Path(path)
        self.problem = ""  # one sentence about what could not be read or written; empty if all is well
        lines, trials, bad = [], [], []
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            pass
        except OSError as error:
            self.problem = f"the history {self.path} cannot be read: {error.strerror}"
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    trials.append(Trial.model_validate_json(line, strict=True))
                except ValidationError:
                    bad.append(number)
        self._trials = [trial for trial in trials if trial.step == step]
        if bad:
            some = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
            self.problem = f"{len(bad)} of {len(bad) + len(trials)} lines of {self.path} cannot be read (line {some}); "
            self.problem += "they stay in the file and are left out here"

    def add(self, trial: Trial) -> None:
        """Remember a trial, here and on disk; :attr:`problem` says so if the file cannot be written."""
        self._trials.append(trial)
        line = trial.model_dump_json().encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                # After a write that broke off, the next line must not continue the broken one. One write a line.
                broken = file.tell() and file.seek(-1, os.SEEK_END) and file.read(1) != b"\n"
                file.write(b"\n" + line if broken else line)
        except OSError as error:
            self.problem = f"the history {self.path} cannot be written ({error.strerror}): "
            self.problem += "what is tried now is only kept until the kernel stops"

    def trials(self) -> list[Trial]:
        """Configurations in the order they were first tried, each with its latest verdict and its latest time."""
        merged: dict[tuple[str, ...], Trial] = {}
        for trial in list(self._trials):
            key = (trial.source_hash, trial.device, trial.case, trial.routing)
            merged[key] = trial.completed(merged[key]) if key in merged else trial
        return list(merged.values())

    def best(self) -> Trial | None:
        """The accepted configuration to go back to: the fastest where the last one was timed, else the least bound."""
        legal = [trial for trial in self.trials() if trial.verdict == "accepted"]
        timed = [trial for trial in legal if trial.speed]
        if timed:
            return max((t for t in timed if t.timed_on == timed[-1].timed_on), key=lambda trial: trial.speed or 0.0)
        bounded = [trial for trial in legal if trial.bound_ms is not None]
        return min(bounded, key=lambda trial: trial.bound_ms or 0.0, default=legal[-1] if legal else None)

    def save_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write a row for each configuration, its literals and its speed among the columns; the file is replaced.

        Raises SubmissionError if the folder does not exist or cannot be written to.
        """
        rows = [{**each.model_dump(exclude={"values"}), "speed": each.speed, **each.values} for each in self.trials()]
        return write_atomic(path, pd.DataFrame(rows, dtype=object).to_csv(index=False).encode())


# --- work in the background ------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """Somebody pressed stop. Like KeyboardInterrupt it is no Exception, so that no handler of errors swallows it."""


class Background:
    """One piece of work at a time, in a thread of its own; the end of the interpreter stops it.

    Long work calls :meth:`checkpoint` now and then: this is where it waits while paused and ends when stopped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._next: Callable[[], None] | None = None
        self.paused = False  # whether the work shall wait
        self._stopped = False
        atexit.register(self._close)

    @property
    def busy(self) -> bool:
        """Whether something runs."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def start(self, work: Callable[[], None], *, after: bool = False) -> bool:
        """Start some work unless other work still runs; says whether it was started, or will be.

        With ``after`` it follows the other work, in the place of whatever waits for that already: of many requests
        only the latest is served, so nothing piles up.
        """
        with self._lock:
            if self.busy:
                self._next = work if after else self._next
                return after
            self.paused = self._stopped = False
            self._thread = threading.Thread(target=self._run, args=(work,), name="moe_lab explorer", daemon=True)
            self._thread.start()
            return True

    def _run(self, work: Callable[[], None] | None) -> None:
        while work is not None:
            with contextlib.suppress(Stopped):
                work()
            with self._lock:
                work, self._next = self._next, None
                self._thread = self._thread if work else None

    def checkpoint(self, *, pausable: bool = True) -> None:
        """Called by the work: waits while paused, unless a time limit of the judge runs on; raises :class:`Stopped`."""
        while pausable and self.paused and not self._stopped:
            time.sleep(0.05)
        if self._stopped:
            raise Stopped

    def stop(self) -> None:
        """End at the next checkpoint."""
        self._stopped = True

    def wait(self, timeout_s: float = 30.0) -> bool:
        """Wait until nothing runs and nothing waits; whether that is so."""
        if (thread := self._thread) is not None:
            thread.join(timeout_s)
        return not self.busy

    def _close(self) -> None:
        self._next = None
        self.stop()
        self.wait(10)  # a moment to end what it started


# --- what the buttons do ---------------------------------------------------------------------------------------------

#: Stands for the device of this machine.
HERE = "here"


@dataclass(frozen=True)
class Setting:
    """What a configuration is looked at for."""

    device: str  # key of :func:`moe_lab.machine.devices.devices`, or HERE
    case: int  # number of the contest's case
    routing: str  # name of a routing of that case

    @property
    def figures(self) -> devices.Device | None:
        """The device; None for a machine that nobody has figures of. Raises DataError for a key that is no device."""
        here = self.device == HERE
        return devices.reported_as(backend.detect().name) if here else devices.device(self.device)

    @property
    def sizes(self) -> tuple[Case, GroupedLayout]:
        """The case, and its rows in groups."""
        return CASES[self.case], GroupedLayout(routing(self.case, self.routing).sizes)


class Session:
    """Everything the tile explorer does with a step of the ladder or any other submission, without a widget.

    What takes long is meant to run in :attr:`work` and ends with :class:`Stopped` soon after ``work.stop()``; what the
    judge has started by then is ended, too. ``target`` is the file that :meth:`export` writes. Raises SubmissionError
    for a name that is no step, or text that is no Python.
    """

    def __init__(self, step: str | Submission, history: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        entry = None if isinstance(step, Submission) else steps.find(step)
        self.base = step if isinstance(step, Submission) else steps.step(step)
        self.step = entry.name if entry else self.base.name  # what its trials are filed under
        self.profile: Profile = entry.profile if entry else "contest"
        self.device = "h200" if entry and entry.branch == "hopper" else "c500"  # the one that it is made for
        self.choices = choices(self.base)
        self.history = History(history, self.step)
        self.target = Path(target)
        self.work = Background()
        self._reports: dict[str, Report] = {}

    def read(self, submission: Submission, setting: Setting) -> Readout:
        """What can be said without compiling; may wait for TileLang to read the text, see :meth:`is_read`.

        Raises MoeLabError if nothing can be said; the message says why.
        """
        return read_out(submission, setting.case, setting.routing, setting.figures)

    def is_read(self, submission: Submission, setting: Setting) -> bool:
        """Whether :meth:`read` answers at once."""
        with contextlib.suppress(MoeLabError):
            return tir.peek(submission, *setting.sizes) is not None
        return True

    def read_ahead(self, submission: Submission, setting: Setting) -> None:
        """While nobody waits, read what one move of a control leads to: the nearest values of each literal first."""
        near = []
        for choice in self.choices:
            place = choice.values.index(submission.values[choice.name])
            near += [(abs(number - place), choice.name, value) for number, value in enumerate(choice.values)]
        near.sort(key=lambda each: each[0], reverse=True)
        tir.ahead([(submission.with_literals(**{name: value}), *setting.sizes) for _, name, value in near])

    def check(self, submission: Submission, setting: Setting, say: Say, *, quick: bool = False) -> "Report":
        """Have the judge compile and run a configuration on this machine, and remember the verdict.

        ``quick`` runs the case with the group sizes 0, 1, 127, 128 and 129 only, which does not make it accepted.
        """
        from moe_lab.judge.plan import Plan, structural_groups

        def progress(text: str) -> None:
            # The judge's time limits run on while it waits, so a pause comes after it.
            self.work.checkpoint(pausable=False)
            say(text)

        plan = None
        if quick:
            first = structural_groups(random.Random(secrets.randbits(32)))[0]
            plan = Plan(groups=(first,), stop_at_first=True, variants=False, fit=False)
        report = judge.judge(submission, profile=self.profile, progress=progress, plan=plan)
        if not quick:
            self._reports[submission.source_hash] = report
        verdict = FIRST_CASE_RIGHT if quick and report.accepted else str(report.verdict)
        self.remember(submission, setting, verdict=verdict, reason=report.sentence, judged_on=report.device)
        return report

    def time(self, submission: Submission, setting: Setting, say: Say) -> stopwatch.Times:
        """Time a configuration on this machine, in turns with the baseline, and remember both medians.

        Raises ChildError if it does not run here or is wrong.
        """
        tick = functools.partial(self.work.checkpoint, pausable=False)
        asked = (submission, setting.case, setting.routing)
        times = stopwatch.time_against_baseline(*asked, say=say, checkpoint=tick)
        self.remember(submission, setting, time_ms=times.time_ms, baseline_ms=times.baseline_ms, timed_on=times.where)
        return times

    def sweep(
        self, values: Sequence[Mapping[str, LiteralValue]], setting: Setting, say: Callable[[int, str], None],
        tried: Callable[[], None],
    ) -> Counter[str]:  # fmt: skip
        """Try many configurations: those that do not fit are noted, the others run one case of the judge.

        ``values`` are the changed literals of each. ``say`` is told how many are done and what is being done; ``tried``
        is called after each. Returns how many came to each verdict; what was tried before a stop is in the history.
        """
        verdicts: Counter[str] = Counter()
        for done, changed in enumerate(values):
            self.work.checkpoint()
            submission = self.base.with_literals(**changed)
            name = self.changes(submission.values) or "the step itself"
            say(done, name)
            readout = None
            with contextlib.suppress(MoeLabError):  # what cannot be read can still be run
                readout = self.read(submission, setting)
            if readout and readout.fits is False:
                verdict = DOES_NOT_FIT
                self.remember(submission, setting, verdict=verdict, reason=readout.sentence)
            else:
                tell = functools.partial(lambda done, name, text: say(done, f"{name}: {text}"), done, name)
                report = self.check(submission, setting, tell, quick=True)
                verdict = FIRST_CASE_RIGHT if report.accepted else str(report.verdict)
            verdicts[verdict] += 1
            tried()
        return verdicts

    def would_replace(self, submission: Submission) -> bool:
        """Whether :attr:`target` holds another text, which :meth:`export` would replace."""
        return self.target.exists() and self.target.read_bytes() != submission.source.encode()

    def export(self, submission: Submission, setting: Setting, say: Say) -> "Report":
        """Write a configuration to :attr:`target` through the exporter, then judge the file.

        A text that was judged in this session already is not judged again: it is the same bytes. Raises ExportError
        for a violated rule or a folder that cannot be written to; an existing file stays.
        """
        written = Submission.from_file(export(submission, self.target, self.profile))
        return self._reports.get(written.source_hash) or self.check(written, setting, say)

    def remember(self, submission: Submission, setting: Setting, **found: Any) -> None:
        """Add to the history what came of a configuration."""
        with contextlib.suppress(MoeLabError):
            found["bound_ms"] = self.read(submission, setting).bound_ms
        trial = Trial(
            step=self.step, values=submission.values, source_hash=submission.source_hash, device=setting.device,
            case=f"case {setting.case}", routing=setting.routing, **found,
        )  # fmt: skip
        self.history.add(trial)

    def changes(self, values: Mapping[str, LiteralValue]) -> str:
        """What these values change in the step; empty for the step itself."""
        own = self.base.values
        return ", ".join(f"{name} {value}" for name, value in values.items() if own.get(name) != value)

    def summary(self) -> pd.DataFrame:
        """The history of this step for the panel, newest first; :meth:`History.save_csv` has every column."""
        rows = [
            {
                "no.": number, "changed": self.changes(trial.values) or "nothing",
                "for": f"{trial.device}, {trial.case}, {trial.routing}", "verdict": trial.verdict.replace("_", " "),
                "least ms": trial.bound_ms, "measured ms": trial.time_ms, "times as fast as the baseline": trial.speed,
                "measured on": trial.timed_on or None, "reason": trial.reason,
            }
            for number, trial in enumerate(self.history.trials(), start=1)
        ]  # fmt: skip
        return pd.DataFrame(rows[::-1]).dropna(axis="columns", how="all")
