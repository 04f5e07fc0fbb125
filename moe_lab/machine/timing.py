"""Timing that can be trusted: interleaved, warmed up, medians with an interval, and never across devices.

Candidates take turns, forwards and then backwards, so that clocks and heat reach all of them alike. On a GPU a *cold*
call finds its inputs in memory and not in the L2 cache; a CPU's caches are not controlled, and the record says so.
"""

import functools
import random
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from moe_lab.machine import backend
from moe_lab.problem.contract import data_dir
from moe_lab.problem.errors import ContractError, DataError
from moe_lab.problem.submission import write_atomic
from moe_lab.problem.tables import Finite, load, to_csv

Cache = Literal["cold", "dirty", "uncontrolled"]
Kind = Literal["step", "submission", "peer", "roof"]

#: States in which a call finds none of its inputs in the L2 cache. "dirty" is only recorded, no longer measured: the
#: buffer was written before the call, so its lines still had to go to memory while the call ran.
COLD: tuple[Cache, ...] = ("cold", "dirty")
_FLUSH_BYTES = 512 * 2**20  # read before a cold call at least: several times the largest L2 cache there is
_RESAMPLES = 2000


@dataclass(frozen=True)
class Timing:
    """Times of one candidate: each round, their median and its 95% bootstrap interval."""

    name: str
    device: str  # its own name
    cache: Cache  # before each call
    times_ms: tuple[float, ...]  # one entry a round
    median_ms: float
    low_ms: float
    high_ms: float


def summarise(name: str, times_ms: Sequence[float], *, device: str, cache: Cache) -> Timing:
    """Median and its 95% bootstrap interval (percentiles of 2000 resamples, seeded).

    Raises ContractError for no time at all, or one that is not above 0.

    >>> summarise("x", [2.0, 1.0, 3.0], device="a card", cache="cold").median_ms
    2.0
    """
    if not times_ms or not all(value > 0 for value in times_ms):
        raise ContractError(f"got times {list(times_ms)} for {name}, expected at least one, each above 0 ms")
    median = float(statistics.median(times_ms))
    resampled = sorted(_medians(times_ms, 0))
    low, high = (resampled[round(share * _RESAMPLES)] for share in (0.025, 0.975))
    return Timing(name, device, cache, tuple(times_ms), median, min(low, median), max(high, median))


def _medians(times_ms: Sequence[float], seed: int) -> list[float]:
    """Medians of 2000 resamples."""
    draw = random.Random(seed)
    return [statistics.median(draw.choices(times_ms, k=len(times_ms))) for _ in range(_RESAMPLES)]


def interleave(
    calls: Mapping[str, Callable[[int], Any]], *, rounds: int = 25, warmup: int = 3, sets: int = 1
) -> dict[str, Timing]:
    """Time candidates in turns on this machine's device, ``rounds`` times each after ``warmup`` rounds.

    Each of ``calls`` takes the number of an input set, of which there are ``sets``, and issues the work on it; a set
    should hold more than the cache. Raises ContractError for fewer than one round or set.
    """
    if rounds < 1 or sets < 1 or warmup < 0:
        raise ContractError(f"got rounds={rounds}, warmup={warmup}, sets={sets}, expected at least 1, 0 and 1")
    where = backend.detect()
    clock = _cpu_clock if where.kind == "cpu" else _gpu_clock()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + rounds):
        names = list(calls)[:: -1 if turn % 2 else 1]
        pending = [(name, clock(functools.partial(calls[name], turn % sets))) for name in names]
        for name, finish in pending:
            elapsed = finish()
            if turn >= warmup:
                times[name].append(elapsed)
    state: Cache = "uncontrolled" if where.kind == "cpu" else "cold"
    return {name: summarise(name, found, device=where.name, cache=state) for name, found in times.items()}


def _cpu_clock(call: Callable[[], Any]) -> Callable[[], float]:
    start = time.perf_counter()
    call()
    elapsed = (time.perf_counter() - start) * 1e3
    return lambda: elapsed


def _gpu_clock() -> Callable[[Callable[[], Any]], Callable[[], float]]:
    import torch

    size = max(_FLUSH_BYTES, 4 * getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0))
    flush = torch.zeros(size // 8, dtype=torch.int64, device="cuda")

    def clock(call: Callable[[], Any]) -> Callable[[], float]:
        # Reading fills the L2 cache with clean lines of no use; after a write the timed call would pay for up to 50 MB
        # of somebody else's bytes. While the read runs Python gets ahead, so the events enclose no gaps.
        flush.sum()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()

        def finish() -> float:
            end.synchronize()
            return float(start.elapsed_time(end))

        return finish

    return clock


def faster(one: Timing, other: Timing) -> bool:
    """Whether ``one`` is faster, by the 95% bootstrap interval of the ratio of medians.

    Raises ContractError if the two were timed on different devices or with another state of the cache.
    """
    if one.device != other.device:
        found = f"got {one.name} on {one.device} and {other.name} on {other.device}"
        raise ContractError(f"{found}, expected one device: a time says nothing about another machine")
    if one.cache != other.cache:
        found = f"got {one.name} with a {one.cache} cache and {other.name} with a {other.cache} one"
        raise ContractError(f"{found}, expected the same")
    resampled = zip(_medians(other.times_ms, 1), _medians(one.times_ms, 2), strict=True)
    return sorted(theirs / ours for theirs, ours in resampled)[round(0.025 * _RESAMPLES)] > 1


@dataclass(frozen=True)
class Measurement:
    """One row of ``data/measurements``: see ``data/README.md`` for the columns.

    Only rows of one ``run`` were timed in turns and may be compared. ``kind`` is "step" (ours), "submission" (a file
    of somebody), "peer" (a library) or "roof" (a plain matmul or copy); ``flops`` and ``bytes`` are the useful
    operations and the compulsory bytes, or those of the roof.
    """

    run: str
    recorded_at: str
    device: str
    driver: str
    versions: str
    kind: Kind
    name: str
    source_hash: str | None
    case: str
    num_experts: int
    hidden: int
    intermediate: int
    num_tokens: int
    routing: str
    seed: int
    cache: Cache
    rounds: int
    median_ms: Finite
    low_ms: Finite
    high_ms: Finite
    flops: int
    bytes: int
    error: Finite | None

    def __post_init__(self) -> None:
        """Refuse a time that is none, or a median outside its interval."""
        if not 0 < self.low_ms <= self.median_ms <= self.high_ms:
            raise ValueError(
                f"got median_ms={self.median_ms} in {self.low_ms} to {self.high_ms}, expected 0 < low <= median <= high"
            )
        if (self.kind in ("step", "submission")) != (self.source_hash is not None):
            raise ValueError(f"got source_hash={self.source_hash} for a {self.kind}, expected one for our files alone")

    @property
    def rate_tflops(self) -> float:
        """Useful operations over the median, 1e12 a second."""
        return self.flops / self.median_ms / 1e9

    @property
    def rate_gbps(self) -> float:
        """Compulsory bytes over the median, 1e9 a second."""
        return self.bytes / self.median_ms / 1e6


def new_run() -> tuple[str, str]:
    """Id and UTC time of a run that begins now; the id sorts by time and is unique."""
    now = datetime.now(timezone.utc)
    return f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}", now.isoformat(timespec="seconds")


def record(rows: Sequence[Measurement], folder: Path | None = None) -> Path:
    """Write the rows of one run to a file of its own, complete or not at all; raises ContractError for others."""
    runs = {row.run for row in rows}
    if len(runs) != 1:
        raise ContractError(f"got rows of {len(runs)} runs, expected rows of one")
    folder = folder or data_dir() / "measurements"
    folder.mkdir(parents=True, exist_ok=True)
    return write_atomic(folder / f"{runs.pop()}.csv", to_csv(rows).encode())


def measurements(folder: Path | None = None) -> list[Measurement]:
    """Every recorded row, oldest run first; raises DataError, which names file and line, for one that does not fit."""
    folder = folder or data_dir() / "measurements"
    if not folder.is_dir():
        raise DataError(f"got no folder {folder}, expected recorded measurements: run `moe-lab bench`")
    return [row for path in sorted(folder.glob("*.csv")) for row in load(path, Measurement)]


def newest_runs(device: str, name: str, routing: str, folder: Path | None = None) -> list[Measurement]:
    """All rows of the newest run of each case that timed ``name`` with a cold cache, cases in order.

    ``device`` is part of the device's own name, such as "H200"; ``name`` is a step, file or library.
    """
    wanted = (row for row in measurements(folder) if device in row.device and row.routing == routing)
    rows = [row for row in wanted if row.cache in COLD]
    newest = {row.case: row.run for row in rows if row.name == name}
    return [row for case in sorted(newest) for row in rows if (row.case, row.run) == (case, newest[case])]
