"""Find better literals for a submission on this machine, asking the resource model before the compiler.

One literal is varied at a time, the others stay at the best so far (coordinate search). What does not fit the device is
not compiled, what is wrong is dropped, and a value replaces the incumbent only if it is faster beyond the noise.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_lab.machine import backend
from moe_lab.machine.devices import Device, reported_as
from moe_lab.machine.timing import Timing, speedup
from moe_lab.model import tiles
from moe_lab.model.choices import choices
from moe_lab.problem.contract import Case
from moe_lab.problem.errors import ContractError, MoeLabError, SubmissionError
from moe_lab.problem.layout import group_sizes
from moe_lab.problem.submission import LiteralValue, Submission, write_atomic
from moe_lab.speed.bench import time_case


@dataclass(frozen=True)
class Tuned:
    """What a search found."""

    values: dict[str, LiteralValue]  # every literal that differs from the source
    median_ms: float  # of the best configuration, in turns with the source's own literals
    source_ms: float  # of the source's own literals in the same turns
    timed: int  # configurations that ran and were right
    pruned: int  # those that the resource model dropped without compiling
    failed: int  # those that did not compile, or were wrong


def offers(submission: Submission, names: Sequence[str] | None = None) -> dict[str, tuple[LiteralValue, ...]]:
    """The values to try for each literal, as the tile explorer offers them.

    By default every literal with a choice, but for the block's rows, which the contract fixes: the block map has one
    entry for so many. Raises ContractError for a name that has no choice.
    """
    found = {item.name: item.values for item in choices(submission) if len(item.values) > 1}
    chosen = [name for name in found if name != "BLOCK_M"] if names is None else names
    unknown = ", ".join(name for name in chosen if name not in found)
    if unknown:
        known = ", ".join(found) or "this file has none"
        raise ContractError(f"got {unknown}, expected literals with a choice: {known}")
    return {name: found[name] for name in chosen}


def why_not(submission: Submission, case: Case, sizes: Sequence[int], device: Device | None) -> str:
    """Why a configuration cannot run on a GPU, without compiling it; empty if it fits, or on a CPU (None)."""
    kernels = tiles.fit(tiles.resources(submission, case, sizes), device).kernels if device else ()
    return "; ".join(reason for kernel in kernels for reason in kernel.reasons)


def tune(
    submission: Submission, case: Case, *, names: Sequence[str] | None = None, rounds: int = 9,
    say: Callable[[str], None] = print,
) -> Tuned:  # fmt: skip
    """Search with sizes drawn multinomially, and remember what was found: the best, or the source's own literals.

    Varies the literals in ``names`` in order, see :func:`offers`, with so many timed calls of each configuration.

    Raises ContractError for a name with no choice, or if the submission itself does not compile or is wrong;
    SubmissionError if the text is no Python, cannot be loaded, or has no ``run_kernel`` or no literal to vary;
    BackendError if this machine cannot run TileLang.
    """
    backend.prepare()
    _check_loads(submission)
    offered = offers(submission, names)
    if not offered:
        raise SubmissionError(
            f"got no literal with a choice in {submission.name}, expected one at module level such as BLOCK_K = 64"
        )
    search = _Search(submission, case, rounds, say)
    search.check()
    for name, values in offered.items():
        search.vary(name, values)
    result = search.result()
    try:
        path, entries = cache_file(), _read() | {_key(submission, case): asdict(result)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(entries, indent=1).encode())
    # What was found took minutes, and is worth more than its record.
    except (OSError, MoeLabError) as error:
        say(f"fused_moe will not find this again: {error}")
    return result


def _check_loads(submission: Submission) -> None:
    """Refuse a text that has no ``run_kernel`` to time, before anything is measured."""
    try:
        submission.tree  # noqa: B018 - says where a text is no Python
        backend.load(submission)
    except MoeLabError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody else's text may raise anything
        why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise SubmissionError(f"{submission.name} cannot be loaded: {why}") from None


class _Search:
    """The best literals so far, and how many configurations were tried."""

    def __init__(self, submission: Submission, case: Case, rounds: int, say: Callable[[str], None]) -> None:
        self._source, self._case, self._rounds, self._say = submission, case, rounds, say
        self._sizes = group_sizes("multinomial", case.num_experts, case.num_tokens)
        where = backend.detect()
        self._device = reported_as(where.name) if where.kind != "cpu" else None
        self._best = submission
        self._timed = self._pruned = self._failed = 0
        self._median_ms = self._source_ms = 0.0

    def check(self) -> None:
        """Refuse a source that does not compile or is wrong: it is what every configuration is compared with."""
        said: list[str] = []
        try:
            if not self._time({"source": self._source}, 1, said.append):
                raise self._unfit(next((line.partition("left out: ")[2] for line in said if "left out" in line), ""))
        except SystemExit:
            raise self._unfit("run_kernel ends Python") from None

    def vary(self, name: str, values: Sequence[LiteralValue]) -> None:
        """Time all values of one literal in turns, and keep the fastest if it is faster beyond the noise."""
        rungs = {"source": self._source, "best": self._best}
        for value in values:
            if value == self._best.values[name]:
                continue
            label, text = f"{name}={value!r}", self._best.with_literals(**{name: value})
            reason = why_not(text, self._case, self._sizes, self._device)
            if reason:
                self._pruned += 1
                self._say(f"{label} pruned: {reason}")
            else:
                rungs[label] = text
        timings = self._time(rungs, self._rounds, self._say)
        if not {"source", "best"} <= timings.keys():
            raise self._unfit("it was right once, and then it was not")
        self._timed += len(timings) - 2
        self._failed += len(rungs) - len(timings)
        best, winner = timings["best"], min(timings, key=lambda key: timings[key].median_ms)
        if winner in ("source", "best") or speedup(timings[winner], best).low <= 1:
            winner = "best"
        else:
            self._say(f"{winner}: {best.median_ms:.4f} ms becomes {timings[winner].median_ms:.4f} ms")
        self._best = rungs[winner]
        self._median_ms, self._source_ms = timings[winner].median_ms, timings["source"].median_ms

    def result(self) -> Tuned:
        own = self._source.values
        changed = {name: value for name, value in self._best.values.items() if value != own[name]}
        # With nothing changed both figures are of one text, and their difference is noise.
        median_ms = self._median_ms if changed else self._source_ms
        return Tuned(changed, median_ms, self._source_ms, self._timed, self._pruned, self._failed)

    def _time(self, rungs: dict[str, Submission], rounds: int, say: Callable[[str], None]) -> dict[str, Timing]:
        timed = time_case(self._case, self._sizes, 0, rungs, rounds, say, alone=True)
        return {candidate.name: timing for candidate, timing, _ in timed}

    def _unfit(self, why: str) -> ContractError:
        found = f"got {self._source.name}, which does not run or is wrong on this machine ({why})"
        return ContractError(f"{found}, expected a file that `moe-lab judge` accepts")


def tuned(submission: Submission, case: Case) -> Submission:
    """A submission with what :func:`tune` found for this device, these versions, this source, E, H and I, if it did."""
    try:
        values = _read()[_key(submission, case)]["values"].items()
        return submission.with_literals(**{name: tuple(v) if isinstance(v, list) else v for name, v in values})
    # Nothing was found yet; nor must a cache that somebody edited keep the layer from running.
    except (MoeLabError, KeyError, TypeError, AttributeError):
        return submission


def cache_file() -> Path:
    """Where results are kept: ``moe_lab/tuned.json`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_lab" / "tuned.json"


def _key(submission: Submission, case: Case) -> str:
    where = backend.detect()
    parts = [
        where.kind, where.name, submission.source_hash, f"{case.num_experts}x{case.hidden}x{case.intermediate}",
        *(f"{name}={version}" for name, version in sorted(backend.versions().items())),
    ]  # fmt: skip
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _read() -> dict[str, Any]:
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
