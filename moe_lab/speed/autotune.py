"""Find better literals for a submission on this machine, one at a time, asking the resource model before the compiler.

What is wrong is dropped, and a value replaces the best so far only if it is faster beyond the noise.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_lab.machine import backend, cpu
from moe_lab.machine.devices import Device, reported_as
from moe_lab.machine.timing import Timing, faster
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
    Raises ContractError for a name with no choice or a submission that does not compile or is wrong, SubmissionError
    for one that cannot be loaded or has no literal to vary, BackendError if this machine cannot run TileLang.
    """
    _check_loads(submission)
    offered = offers(submission, names)
    if not offered:
        expected = "one at module level such as BLOCK_K = 64"
        raise SubmissionError(f"got no literal with a choice in {submission.name}, expected {expected}")
    sizes, where = group_sizes("multinomial", case.num_experts, case.num_tokens), backend.detect()
    card = reported_as(where.name) if where.kind != "cpu" else None
    best, median_ms, source_ms = submission, 0.0, 0.0
    timed = pruned = failed = 0
    # Before anything else is compiled, what every configuration is compared with has to run and be right.
    _time({"source": submission}, case, sizes, 1, lambda line: None)
    for name, values in offered.items():
        rungs = {"source": submission, "best": best}
        for value in values:
            if value == best.values[name]:
                continue
            label, text = f"{name}={value!r}", best.with_literals(**{name: value})
            reason = why_not(text, case, sizes, card)
            if reason:
                pruned += 1
                say(f"{label} pruned: {reason}")
            else:
                rungs[label] = text
        timings = _time(rungs, case, sizes, rounds, say)
        timed, failed = timed + len(timings) - 2, failed + len(rungs) - len(timings)
        winner = min(timings, key=lambda label: timings[label].median_ms)
        if winner in ("source", "best") or not faster(timings[winner], timings["best"]):
            winner = "best"
        else:
            say(f"{winner}: {timings['best'].median_ms:.4f} ms becomes {timings[winner].median_ms:.4f} ms")
        best, median_ms, source_ms = rungs[winner], timings[winner].median_ms, timings["source"].median_ms
    changed = {name: value for name, value in best.values.items() if value != submission.values[name]}
    # With nothing changed both figures are of one text, and their difference is noise.
    result = Tuned(changed, median_ms if changed else source_ms, source_ms, timed, pruned, failed)
    try:
        path = cache_file(submission, case)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(asdict(result), indent=1).encode())
    # What was found took minutes, and is worth more than its record.
    except (OSError, MoeLabError) as error:
        say(f"fused_moe will not find this again: {error}")
    return result


def _check_loads(submission: Submission) -> None:
    """Refuse a text that has no ``run_kernel`` to time, before anything is measured."""
    backend.prepare()
    try:
        submission.tree  # noqa: B018 - says where a text is no Python
        backend.load(submission)
    except MoeLabError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody else's text may raise anything
        why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise SubmissionError(f"{submission.name} cannot be loaded: {why}") from None


def _time(
    rungs: dict[str, Submission], case: Case, sizes: tuple[int, ...], rounds: int, say: Callable[[str], None]
) -> dict[str, Timing]:
    """Time rungs in turns by name; raises ContractError if the source or the best is not right, with the reason."""
    said: list[str] = []

    def tell(line: str) -> None:
        said.append(line)
        say(line)

    try:
        timed = time_case(case, sizes, 0, rungs, rounds, tell, alone=True)
    except SystemExit:
        timed, said = [], ["source left out: run_kernel ends Python"]
    timings = {candidate.name: timing for candidate, timing, _ in timed}
    for name in {"source", "best"} & rungs.keys() - timings.keys():
        why = next(line.partition("left out: ")[2] for line in said if f"{name} left out: " in line)
        found = f"got {rungs['source'].name}, which does not run or is wrong on this machine ({why})"
        raise ContractError(f"{found}, expected a file that `moe-lab judge` accepts")
    return timings


def tuned(submission: Submission, case: Case) -> Submission:
    """A submission with what :func:`tune` found for this device, these versions, this source, E, H and I, if it did."""
    try:
        values = json.loads(cache_file(submission, case).read_text(encoding="utf-8"))["values"].items()
        return submission.with_literals(**{name: tuple(v) if isinstance(v, list) else v for name, v in values})
    # Nothing was found yet; nor must a file that somebody edited keep the layer from running.
    except (MoeLabError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return submission


def cache_file(submission: Submission, case: Case) -> Path:
    """Where a result is kept, in the user's cache folder: what :func:`tuned` goes by makes its name."""
    where = backend.detect()
    parts = [
        where.kind, where.name, submission.source_hash, f"{case.num_experts}x{case.hidden}x{case.intermediate}",
        *(f"{name}={version}" for name, version in sorted(backend.versions().items())),
    ]  # fmt: skip
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return cpu.cache_folder() / f"tuned_{key}.json"
