"""The tile explorer without its widgets: choices, history, long work. Everything here runs without a browser.

A configuration is a step with some of its literals changed, so it is a submission like any other: what the explorer
checks, times and exports is one and the same text.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_lab.errors import ExplorerError
from moe_lab.submission import LiteralValue, Submission, write_atomic

if TYPE_CHECKING:
    import pandas as pd

# --- choices ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """One literal of a step and the values that the explorer offers for it.

    Attributes:
        name: as in the source.
        value: what the source says.
        values: what is offered, in order, ``value`` among them; one value means that it is shown and not offered.
        comment: the comment above it in the source, empty if there is none.
    """

    name: str
    value: LiteralValue
    values: tuple[LiteralValue, ...]
    comment: str


def choices(submission: Submission) -> tuple[Choice, ...]:
    """Every literal of a submission, in the order of the source.

    Raises:
        SubmissionError: for text that is no Python.
    """
    lines = submission.source.splitlines()
    return tuple(
        Choice(literal.name, literal.value, offered(literal.name, literal.value), _comment_above(lines, literal.line))
        for literal in submission.literals.values()
    )


#: What the last word of a literal's name says about its values; everything else goes by the value alone.
_VOCABULARY: dict[str, tuple[LiteralValue, ...]] = {
    "ORDER": ("row", "column"),
    "POLICY": ("Square", "FullRow", "FullCol"),
    "STAGES": (1, 2, 3, 4),
    "PANEL": (1, 2, 4, 6, 8, 10, 12, 16),
    "THREADS": (64, 128, 256, 384, 512, 1024),
    "WIDTH": (1, 2, 4, 8),
    "VECTOR": (0, 2, 4, 8),
}


def offered(name: str, value: LiteralValue) -> tuple[LiteralValue, ...]:
    """Values worth trying in the place of one.

    - A word of the field at the end of the name has its own values: copies in flight (STAGES), swizzle panels (PANEL)
      and their ORDER, warp POLICY, THREADS, and values copied (WIDTH) or kept together (VECTOR) at once.
    - Otherwise the value's neighbours of the same kind: for a power of two from 16 on, as tile sides are, powers of two
      from an eighth, at least 16, to four times the value; for another multiple of 16, as token tiles are, multiples
      of 32, or of 16 if it is none of 32, up to twice the value; below 16, counts from 1 to twice the value, at least
      to 4; for True or False, both.
    - Anything else is a constant, not a tile: itself alone.

    What is offered need not fit a card or be right: that is what the readout and the judge say.

    >>> offered("BLOCK_K", 128)
    (16, 32, 64, 128, 256, 512)
    >>> offered("NUM_STAGES", 1)
    (1, 2, 3, 4)
    >>> offered("TOKEN_TILE", 48)
    (16, 32, 48, 64, 80, 96)
    >>> offered("LOG2_E", 1.44269504)
    (1.44269504,)
    """
    words = _VOCABULARY.get(name.rpartition("_")[2])
    if words is not None and type(value) is type(words[0]):
        return words if value in words else tuple(sorted((*words, value)))  # type: ignore[type-var]
    if isinstance(value, bool):
        return (False, True)
    if not isinstance(value, int) or value < 1:
        return (value,)
    if value < 16:
        return tuple(range(1, max(4, 2 * value) + 1))
    if value & (value - 1) == 0:
        powers = [16]
        while powers[-1] < 4 * value:
            powers.append(2 * powers[-1])
        return tuple(power for power in powers if power >= value // 8)
    unit = next((unit for unit in (32, 16) if value % unit == 0), None)
    return tuple(range(unit, 2 * value + 1, unit)) if unit else (value,)


def _comment_above(lines: Sequence[str], line: int) -> str:
    """The comment above a literal, or above the run of literals that it belongs to."""
    row = line - 2
    while row >= 0 and "=" in lines[row] and not lines[row].startswith(("#", " ")):
        row -= 1
    last = row
    while row >= 0 and lines[row].startswith("#"):
        row -= 1
    return " ".join(text.lstrip("# ").rstrip() for text in lines[row + 1 : last + 1])


def grid(offers: Mapping[str, Sequence[LiteralValue]]) -> Iterator[dict[str, LiteralValue]]:
    """Every combination of some values, the last name varying fastest.

    >>> list(grid({"A": (1, 2), "B": (3,)}))
    [{'A': 1, 'B': 3}, {'A': 2, 'B': 3}]
    """
    for combination in itertools.product(*offers.values()):
        yield dict(zip(offers, combination, strict=True))


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
        device, case, routing: what the readout was for; ``device`` is a key of :func:`moe_lab.devices.devices`.
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
        #: One sentence about what could not be read; empty if all is well.
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
        """Remember a trial, here and on disk.

        Raises:
            ExplorerError: if the file cannot be written; the trial is then kept in memory only.
        """
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
                raise ExplorerError(
                    f"the history {self.path} cannot be written: {error.strerror}; this trial is kept until the kernel "
                    "stops"
                ) from None

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
