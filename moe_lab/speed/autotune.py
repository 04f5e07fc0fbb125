"""Find better literals for a submission on this machine, asking the resource model before the compiler.

One literal is varied at a time, the others stay at the best found so far (coordinate search): what does not fit the
device is dropped without compiling, what is wrong is dropped by the truth, and a value replaces the incumbent only if
it is faster beyond the noise. The result is kept on disk, keyed by device, versions, source and shape, so that
:func:`moe_lab.fused_moe` finds it again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_lab.machine import backend
from moe_lab.machine.devices import Device, reported_as
from moe_lab.machine.timing import speedup
from moe_lab.model import tiles
from moe_lab.model.choices import choices
from moe_lab.problem.contract import Case
from moe_lab.problem.errors import ContractError, MoeLabError, SubmissionError
from moe_lab.problem.inputs import group_sizes
from moe_lab.problem.submission import LiteralValue, Submission, write_atomic
from moe_lab.speed.bench import time_case

#: Fixed by the contract: the block map has one entry for so many rows.
_FIXED = ("BLOCK_M",)


@dataclass(frozen=True)
class Tuned:
    """What a search found.

    Attributes:
        values: every literal that differs from the source.
        median_ms: time of the best configuration, in turns with the source's own literals.
        source_ms: time of the source's own literals in the same turns.
        timed: configurations that ran and were right.
        pruned: configurations that the resource model dropped without compiling.
        failed: configurations that did not compile, or were wrong.
    """

    values: dict[str, LiteralValue]
    median_ms: float
    source_ms: float
    timed: int
    pruned: int
    failed: int


@dataclass(frozen=True)
class _Rung:
    name: str
    text: Submission

    def submission(self) -> Submission:
        return self.text


def offers(submission: Submission, names: Sequence[str] | None = None) -> dict[str, tuple[LiteralValue, ...]]:
    """The values to try for each literal, as the tile explorer offers them.

    Args:
        submission: whose literals.
        names: only these; every literal with a choice by default, but for the block's rows, fixed by the contract.

    Raises:
        ContractError: for a name that has no choice.
    """
    found = {item.name: item.values for item in choices(submission) if len(item.values) > 1}
    if names is None:
        return {name: values for name, values in found.items() if name not in _FIXED}
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ContractError(
            f"got {', '.join(unknown)}, expected literals with a choice: {', '.join(found) or 'this file has none'}"
        )
    return {name: found[name] for name in names}


def why_not(submission: Submission, case: Case, sizes: Sequence[int], device: Device | None) -> str:
    """Why a configuration cannot run on a device, without compiling it; empty if it fits or nothing is known.

    Args:
        submission: with its literals set.
        case: the problem.
        sizes: rows of each expert.
        device: a GPU, or None on a CPU, which has no such limits.
    """
    if device is None:
        return ""
    reasons = [
        reason
        for kernel in tiles.fit(tiles.resources(submission, case, sizes), device).kernels
        for reason in kernel.reasons
    ]
    return "; ".join(reasons)


def tune(
    submission: Submission,
    case: Case,
    *,
    sizes: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    rounds: int = 9,
    say: Callable[[str], None] = print,
) -> Tuned:
    """Search, and remember what was found.

    Args:
        submission: where to start.
        case: the problem.
        sizes: rows of each expert; drawn multinomially by default.
        names: literals to vary, in order; see :func:`offers`.
        rounds: timed calls of each configuration.
        say: gets one line at a time.

    Returns:
        The best configuration, which may be the source's own.

    Raises:
        ContractError: for a name with no choice, or if the submission itself does not compile or is wrong.
        SubmissionError: if the text is no Python, cannot be loaded, or has no ``run_kernel`` or no literal to vary.
        BackendError: if this machine cannot run TileLang.
    """
    where = backend.prepare()
    _load(submission)
    offered = offers(submission, names)
    if not offered:
        raise SubmissionError(
            f"got no literal with a choice in {submission.name}, expected one at module level such as BLOCK_K = 64"
        )
    sizes = tuple(sizes) if sizes is not None else group_sizes("multinomial", case.num_experts, case.num_tokens)
    device = reported_as(where.name) if where.kind != "cpu" else None
    best: dict[str, LiteralValue] = {}
    counts = {"timed": 0, "pruned": 0, "failed": 0}
    median = own = 0.0
    _check(submission, case, sizes)
    for name, values in offered.items():
        rungs = {"source": _Rung("source", submission), "best": _Rung("best", submission.with_literals(**best))}
        tried: dict[str, LiteralValue] = {}
        for value in values:
            if value == rungs["best"].text.values[name]:
                continue
            text = submission.with_literals(**{**best, name: value})
            reason = why_not(text, case, sizes, device)
            if reason:
                counts["pruned"] += 1
                say(f"{name}={value!r} pruned: {reason}")
                continue
            tried[f"{name}={value!r}"] = value
            rungs[f"{name}={value!r}"] = _Rung(f"{name}={value!r}", text)
        timed = time_case(case, sizes, 0, list(rungs.values()), rounds, say, alone=True)
        timings = {candidate.name: timing for candidate, timing, _ in timed}
        if "source" not in timings or "best" not in timings:
            raise _unfit(submission, "it was right once, and then it was not")
        winner = min(timings, key=lambda key: timings[key].median_ms)
        counts["timed"] += len(timings) - 2
        counts["failed"] += len(rungs) - len(timings)
        if winner in tried and speedup(timings[winner], timings["best"]).low > 1:
            best[name] = tried[winner]
            say(f"{winner}: {timings['best'].median_ms:.4f} ms becomes {timings[winner].median_ms:.4f} ms")
        else:
            winner = "best"
        median, own = timings[winner].median_ms, timings["source"].median_ms
    changed = {name: value for name, value in best.items() if value != submission.values[name]}
    # With nothing changed both figures are of one text, and their difference is noise.
    result = Tuned(changed, median if changed else own, own, **counts)
    try:
        _remember(submission, case, result)
    # What was found took minutes, and is worth more than its record.
    except (OSError, MoeLabError) as error:
        say(f"fused_moe will not find this again: {error}")
    return result


def _load(submission: Submission) -> None:
    """Refuse a text that has no ``run_kernel`` to time, before anything is measured."""
    try:
        submission.tree  # noqa: B018 - says where a text is no Python
        backend.load(submission)
    except MoeLabError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody else's text may raise anything
        raise SubmissionError(
            f"{submission.name} cannot be loaded: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        ) from None


def _check(submission: Submission, case: Case, sizes: tuple[int, ...]) -> None:
    """Refuse a source that does not compile or is wrong: it is what every configuration is compared with."""
    said: list[str] = []
    try:
        right = bool(time_case(case, sizes, 0, [_Rung("source", submission)], 1, said.append, alone=True))
    except SystemExit:
        raise _unfit(submission, "run_kernel ends Python") from None
    if not right:
        raise _unfit(submission, next((line.partition("left out: ")[2] for line in said if "left out" in line), ""))


def _unfit(submission: Submission, why: str) -> ContractError:
    return ContractError(
        f"got {submission.name}, which does not run or is wrong on this machine ({why}), expected a file that "
        "`moe-lab judge` accepts"
    )


def tuned(submission: Submission, case: Case) -> Submission:
    """A submission with the literals that :func:`tune` found for this device, versions, source and shape, if it did.

    Args:
        submission: the source that was tuned.
        case: the shape; the number of rows does not matter, only E, H and I do.
    """
    found = _read().get(_key(submission, case))
    if not isinstance(found, Mapping):
        return submission
    try:
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in found["values"].items()}
        return submission.with_literals(**values)
    # A cache that somebody edited must not keep the layer from running.
    except (MoeLabError, KeyError, AttributeError):
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


def _read() -> dict[str, object]:
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(submission: Submission, case: Case, result: Tuned) -> None:
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = _read() | {_key(submission, case): asdict(result)}
    write_atomic(path, json.dumps(entries, indent=1).encode())
