"""The benchmark: all steps and every peer that is installed, in one process, in turns, checked, recorded.

The machine's roofs, a large dense matmul and a large copy, take turns with them, so they run at the same clocks.
"""

import contextlib
import functools
import itertools
import math
import platform
import shutil
import signal
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from moe_lab.machine import backend
from moe_lab.machine.timing import COLD, Kind, Measurement, Timing, interleave, measurements, new_run, record
from moe_lab.model.roofline import work
from moe_lab.problem.contract import CASES, JUDGE_TOLERANCE, Case
from moe_lab.problem.errors import ContractError, DataError, SubmissionError
from moe_lab.problem.inputs import Inputs, draw_inputs, group_sizes
from moe_lab.problem.layout import GroupedLayout
from moe_lab.problem.reference import fused_truth
from moe_lab.problem.routings import routings
from moe_lab.problem.submission import Submission
from moe_lab.speed.peers import PEERS, Call, Peer, forget_copies
from moe_lab.steps import STEPS, find

#: What a CPU is given instead of a contest case: the same shape of problem, a thousandth of the work.
CPU_CASE = Case("small case for a CPU", 4, 256, 512, 568)
#: The routing whose rows the summary reads: each row picks its expert uniformly.
DEFAULT_ROUTING = "multinomial-0"

_MATMUL, _COPY = "dense matmul", "large copy"
#: Longest time for one candidate's first calls: the slowest library known here tunes itself for five minutes.
_READY_S = 600.0
#: A GPU rests before the clock runs: after a library has tuned itself its clocks are low, and no fault of the others.
_REST_S = 5.0


@dataclass(frozen=True)
class Candidate:
    """One thing to time; what is not said here is as the record has it."""

    kind: Kind
    name: str
    source_hash: str | None
    calls: Sequence[Call]  # issue the work and give the result, one for each input set; a roof has one for all
    flops: int
    bytes: int
    rows: torch.Tensor | None = None  # rows of a result that count, in raw order; all if None
    kept: dict[int, torch.Tensor] = field(default_factory=dict)  # the last result of each input set

    def issue(self, turn: int) -> None:
        """Issue the work on one input set."""
        number = turn % len(self.calls)
        self.kept[number] = self.calls[number]()


def run(
    *, cases: Sequence[int] | None = None, routing: str = DEFAULT_ROUTING, seed: int = 0,
    steps: Sequence[str] | None = None, rounds: int | None = None, folder: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[Measurement]:  # fmt: skip
    """Time everything on this machine's device, check every output, and record it in ``data/measurements``.

    A GPU times all contest cases by default, a CPU takes none and times :data:`CPU_CASE`; ``steps`` are by default all
    that are meant for the device, ``rounds`` 25 on a GPU and 5 on a CPU. ``routing`` is the name of a recorded one.
    Raises ContractError for a case on a CPU or one that does not exist, or such a routing, SubmissionError for an
    unknown step or none at all, BackendError if this machine cannot run TileLang.
    """
    where = backend.prepare()
    on_cpu = where.kind == "cpu"
    if on_cpu and cases:
        raise ContractError("got a contest case on a machine with no GPU, expected none: a CPU would need hours")
    for number in cases or ():
        if number not in CASES:
            raise ContractError(f"got case {number}, expected one of {', '.join(map(str, CASES))}")
    if steps is None:
        steps = [name for name, entry in STEPS.items() if entry.branch != "hopper" or backend.is_hopper()]
    rungs = {entry.name: entry.submission() for entry in map(find, steps)}
    if not rungs:
        raise SubmissionError(f"got no step, expected one or more of {', '.join(STEPS)}")
    problems = [CPU_CASE] if on_cpu else [CASES[number] for number in dict.fromkeys(cases or CASES)]
    # Before anything is said, so that a wrong name is one sentence and not the end of a run.
    drawn = {case: _sizes(case, routing) for case in problems}
    run_id, recorded_at = new_run()
    versions = backend.versions("triton", "quack-kernels", "nvidia-cutlass-dsl", "liger-kernel")
    common = {
        "run": run_id, "recorded_at": recorded_at, "driver": _driver(), "routing": routing, "seed": seed,
        "versions": " ".join(f"{name}={value.replace(' ', '_')}" for name, value in versions.items()),
    }  # fmt: skip
    say(f"run {run_id} on {where.name}" + " (CPU: shows the harness, says nothing about a GPU)" * on_cpu)
    rows: list[Measurement] = []
    for case, sizes in drawn.items():
        found = []
        for item, timing, error in time_case(case, sizes, seed, rungs, rounds or (5 if on_cpu else 25), say):
            known: dict[str, Any] = {**vars(case), **vars(timing), **vars(item), **common, "case": case.name}
            known |= {"rounds": len(timing.times_ms), "error": error}
            found.append(Measurement(**{column.name: known[column.name] for column in fields(Measurement)}))
        rows += found
        for line in render(found):
            say(line)
        # After every case, so that a run cut short keeps what it has.
        path = record(rows, folder)
    say(f"recorded {len(rows)} rows in {path}")
    return rows


def _sizes(case: Case, name: str) -> tuple[int, ...]:
    """Group sizes of a recorded routing; a case that is none of the contest's draws its own in the same way."""
    number = next((number for number, contest_case in CASES.items() if contest_case == case), None)
    rows = [row for row in routings() if row.case == (number or 1) and (number or row.distribution != "edge")]
    row = next((row for row in rows if row.name == name), None)
    if row is None:
        known = ", ".join(row.name for row in rows)
        raise ContractError(f"got routing {name!r} for {case.name}, expected one of {known}")
    if number or row.distribution == "edge":
        return row.sizes
    return group_sizes(row.distribution, case.num_experts, case.num_tokens, row.seed or 0)


def _driver() -> str:
    """Version of the GPU's driver, or of the operating system's kernel on a CPU."""
    if backend.detect().kind == "cpu":
        return f"{platform.system()} {platform.release()}"
    tool = shutil.which("nvidia-smi")  # MetaX has a tool of its own whose output is not known here
    if tool is None:
        return "unknown"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    return next(iter(done.stdout.split()), "unknown")


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread if the block takes longer."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"not ready after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def time_case(
    case: Case, sizes: tuple[int, ...], seed: int, rungs: Mapping[str, Submission], rounds: int,
    say: Callable[[str], None], *, alone: bool = False,
) -> list[tuple[Candidate, Timing, float | None]]:  # fmt: skip
    """Time rungs, peers and roofs in turns on one case, and check every output before and after.

    ``rungs`` are ours, by the name that the record gets; ``alone`` leaves out peers and roofs. Returns what ran and was
    right: the candidate, its timing, its relative error (None for a roof). ``say`` is told why anything was left out.
    """

    def tell(line: str) -> None:
        say(f"{case.name}: {line}")

    where = backend.detect()
    on_cpu, count = where.kind == "cpu", _sets_that_fit(case, sizes, len(rungs))
    sets = [draw_inputs(case, sizes, seed=seed + number, device=where.torch_device) for number in range(count)]
    truths = [fused_truth(inputs) for inputs in sets]
    contenders: dict[str, Submission | Peer] = {**rungs, **({} if alone else {peer.name: peer for peer in PEERS})}
    candidates = [item for name, what in contenders.items() for item in _ready(name, what, sets, truths, tell)]
    if not alone:
        candidates += _roofs(on_cpu)
        if not on_cpu:
            torch.cuda.synchronize()
            time.sleep(_REST_S)
    calls = {item.name: item.issue for item in candidates}
    timings = interleave(calls, rounds=rounds, warmup=1 if on_cpu else 3, sets=len(sets))
    timed: list[tuple[Candidate, Timing, float | None]] = []
    for candidate in candidates:
        # The last timed calls left their results: right before the clock ran and right after.
        wrong, error = ("", None) if candidate.kind == "roof" else _check(candidate, truths)
        if wrong:
            tell(f"{candidate.name} left out: after timing, {wrong}")
        else:
            timed.append((candidate, timings[candidate.name], error))
    forget_copies()
    return timed


def _ready(
    name: str, what: Submission | Peer, sets: Sequence[Inputs], truths: Sequence[torch.Tensor],
    tell: Callable[[str], None],
) -> list[Candidate]:  # fmt: skip
    """A candidate whose first calls were right and came in time, or none once it is said why."""
    if isinstance(what, Peer):
        missing = what.missing(backend.detect().kind != "cpu")
        tell(f"{name} " + (f"left out: {missing}" if missing else f"gets ready, within {_READY_S:g} s or not at all"))
        if missing:
            return []
    started = time.perf_counter()
    try:
        with _at_most(_READY_S):
            candidate = _candidate(name, what, sets)
            for number in range(len(sets)):
                candidate.issue(number)
            wrong, _ = _check(candidate, truths)
    # A peer or a step that does not compile or run here must not end the others' measurement.
    except Exception as failure:  # noqa: BLE001
        wrong = f"{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"
    if wrong:
        tell(f"{name} left out: {wrong}")
        return []
    tell(f"{name} ready, first calls took {time.perf_counter() - started:.1f} s")
    return [candidate]


def _candidate(name: str, what: Submission | Peer, sets: Sequence[Inputs]) -> Candidate:
    done = work(sets[0].case, sets[0].layout.sizes).whole
    costs = done.flops, int(done.bytes)
    if isinstance(what, Peer):
        return Candidate("peer", name, None, [what.prepare(inputs) for inputs in sets], *costs)
    entry = backend.load(what)

    def call(inputs: Inputs) -> torch.Tensor:
        entry(*inputs.args)
        return inputs.out

    # A result of its own for each step, so that what is checked after timing is what the timed calls wrote.
    own = [replace(inputs, out=torch.full_like(inputs.out, float("nan"))) for inputs in sets]
    calls = [functools.partial(call, inputs) for inputs in own]
    return Candidate("step", name, what.source_hash, calls, *costs, own[0].valid_rows)


def _sets_that_fit(case: Case, sizes: tuple[int, ...], num_steps: int) -> int:
    """Input sets to rotate: three, or as many as a GPU's free memory holds beside the peers' own layouts."""
    if backend.detect().kind == "cpu":
        return 2
    free, _ = torch.cuda.mem_get_info()
    weights = 2 * 3 * case.num_experts * case.hidden * case.intermediate
    results = 2 * GroupedLayout(sizes).num_padded_rows * case.hidden * (num_steps + len(PEERS) + 2)
    # Weights in fp16 and the peers' copy in bf16, one result for each candidate, the fp32 truth.
    return max(1, min(3, int(0.7 * free / (2.2 * weights + results))))


def _roofs(on_cpu: bool) -> list[Candidate]:
    """A dense square matmul and a copy, both far larger than any cache."""
    device, size, dtype = ("cpu", 1024, torch.float32) if on_cpu else ("cuda", 8192, torch.float16)
    generator = torch.Generator(device).manual_seed(0)
    one, other = (torch.randn(size, size, dtype=dtype, device=device, generator=generator) for _ in range(2))
    multiply = functools.partial(torch.mm, one, other, out=torch.empty_like(one))
    length = 2**26 if on_cpu else min(2**32, torch.cuda.mem_get_info()[0] // 8)
    # Random bytes: a copy of zeros may run faster than one of data.
    source = torch.randint(0, 256, (length,), dtype=torch.uint8, device=device)
    copy = functools.partial(torch.empty_like(source).copy_, source)
    label = f"{_MATMUL}, {str(dtype).removeprefix('torch.')} {size}^3"
    return [
        Candidate("roof", label, None, [multiply], 2 * size**3, 3 * size**2 * one.element_size()),
        Candidate("roof", f"{_COPY}, {length >> 20} MiB", None, [copy], 0, 2 * length),
    ]


def _check(candidate: Candidate, truths: Sequence[torch.Tensor]) -> tuple[str, float]:
    """Why the last results are wrong, empty if all are within the judge's tolerance, and their relative error."""
    errors = []
    for number, truth in enumerate(truths):
        kept = candidate.kept[number]
        result = (kept if candidate.rows is None else kept[candidate.rows]).float()
        if result.shape != truth.shape:
            return f"the result is {tuple(result.shape)}, expected {tuple(truth.shape)}", math.inf
        off = ~((result - truth).abs() <= JUDGE_TOLERANCE * (1 + truth.abs()))
        if off.any():
            row, column = map(int, off.nonzero()[0])
            found = f"wrong result: {int(off.sum())} elements outside the tolerance, the first at row {row}, column"
            got, wanted = float(result[row, column]), float(truth[row, column])
            return f"{found} {column}: {got:.4g} instead of {wanted:.4g}", math.inf
        errors.append(float((result - truth).norm() / truth.norm().clamp(min=1e-30)))
    return "", max(errors)


def bound_ms(rows: Sequence[Measurement]) -> float:
    """max(useful FLOPs / measured peak, compulsory bytes / measured bandwidth) of one run and case.

    Both roofs at the fast end of their interval: what disturbed one measurement of them must not flatter us.
    Raises DataError if a roof or a candidate is missing.
    """
    flop_ms = [row.low_ms / row.flops for row in rows if row.kind == "roof" and row.name.startswith(_MATMUL)]
    byte_ms = [row.low_ms / row.bytes for row in rows if row.kind == "roof" and row.name.startswith(_COPY)]
    if not flop_ms or not byte_ms:
        raise DataError(f"got {len(rows)} rows without both roofs, expected a dense matmul and a large copy of the run")
    done = next((row for row in rows if row.kind != "roof"), None)
    if done is None:
        raise DataError("got roofs and nothing else, expected at least one step or peer of the same run")
    return max(done.flops * min(flop_ms), done.bytes * min(byte_ms))


def render(rows: Sequence[Measurement]) -> list[str]:
    """One aligned line for each row of one run and case, fastest first, and the bound.

    A CPU has no bound: what fits its caches beats the copy, and bf16 can beat the matmul in fp32.
    """
    bound = bound_ms(rows) if rows[0].cache in COLD and any(row.kind != "roof" for row in rows) else None
    width = max(len(row.name) for row in rows)
    lines = [
        f"{rows[0].case}, {rows[0].routing}, {rows[0].cache} cache, {rows[0].rounds} rounds on {rows[0].device}",
        f"{'':{width}}  median ms         95% interval   TFLOP/s     GB/s{'  x bound' if bound else ''}     error",
    ]
    for row in sorted(rows, key=lambda row: (row.kind == "roof", row.median_ms)):
        times = f"{row.median_ms:9.4f}  {row.low_ms:8.4f} - {row.high_ms:8.4f}"
        ratio = "" if not bound else " " * 9 if row.kind == "roof" else f"  {row.median_ms / bound:7.2f}"
        error = f"{row.error:8.1e}" if row.error is not None else ""
        lines.append(f"{row.name:{width}}  {times}  {row.rate_tflops:8.4g}  {row.rate_gbps:7.4g}{ratio}  {error}")
    return lines + ([f"{'bound, roofs at their fast ends':{width}}  {bound:9.4f}"] if bound else [])


class _Run:
    """The rows of one run and case that has steps, peers and both roofs."""

    def __init__(self, rows: list[Measurement]) -> None:
        self.rows, self.id, self.device, self.bound = rows, rows[0].run, rows[0].device, bound_ms(rows)
        ranked = sorted(rows, key=lambda row: row.median_ms)
        self.steps, self.peers = ([row for row in ranked if row.kind == kind] for kind in ("step", "peer"))
        self.step, self.peer = self.steps[0], self.peers[0]
        self.recommended = sum(row.name in STEPS and STEPS[row.name].recommended for row in self.steps)


def _of_today(runs: Sequence[_Run]) -> list[_Run]:
    """The runs that hold the most of the steps that are recommended today."""
    most = max(run.recommended for run in runs)
    return [run for run in runs if run.recommended == most]


def _records(folder: Path | None) -> list[tuple[list[_Run], list[_Run], _Run]]:
    """Of each contest case: its runs of today's steps, oldest first, those with the fastest peer, and the ladder's.

    The runs are complete ones of the newest's GPU with :data:`DEFAULT_ROUTING` and cold inputs. The fastest peer came
    nearest to the bound of its run. The ladder is of the run that has that peer, then the most steps, then the newest.
    """
    rows = [row for row in measurements(folder) if row.cache in COLD and row.routing == DEFAULT_ROUTING]
    found = []
    for case in CASES.values():
        of_case = sorted((row for row in rows if row.case == case.name), key=lambda row: row.run)
        by_run = [list(of_run) for _, of_run in itertools.groupby(of_case, key=lambda row: row.run)]
        kinds = [Counter(row.kind for row in of_run) for of_run in by_run]
        whole = [_Run(r) for r, of in zip(by_run, kinds, strict=True) if of["step"] and of["peer"] and of["roof"] > 1]
        runs = [run for run in whole if run.device == whole[-1].device]
        if runs:
            rival = min((run.peer.median_ms / run.bound, run.peer.name) for run in runs)[1]
            beside = _of_today([run for run in runs if any(row.name == rival for row in run.peers)])
            today = _of_today(runs)
            found.append((today, beside, max(today, key=lambda run: (run in beside, len(run.steps), run.id))))
    if not found:
        raise DataError(
            f"got no recorded GPU run with steps, peers and roofs for routing {DEFAULT_ROUTING}, expected one: run "
            "`moe-lab bench` on a machine with a GPU"
        )
    return found


def summary_rows(folder: Path | None = None) -> list[Measurement]:
    """The recorded rows that show the ladder and the peers: of each contest case one run; DataError for none."""
    return [row for _, _, ladder in _records(folder) for row in ladder.rows]


def summary(folder: Path | None = None) -> list[str]:
    """One line for each contest case from the recorded data: how far from the bound, how far from the best peer.

    Each ratio is of one run; the line gives its median over the runs and the extremes, because cards of one kind
    differ. ``bound_ratio`` is our best median over the bound, in the runs with the most of today's recommended steps;
    ``vs_best_peer`` the best peer's median over our best, in the runs with the fastest peer known, which can be older
    and have an older step, which is named. Raises DataError if no recorded run qualifies.
    """
    lines = []
    for today, beside, ladder in _records(folder):
        rivals = ladder if ladder in beside else beside[-1]
        ours, peer, step = ladder.step, rivals.peer, rivals.step
        bounds = _spread([run.step.median_ms / run.bound for run in today])
        peers = _spread([run.peer.median_ms / run.step.median_ms for run in beside])
        than = step.name if rivals is ladder else f"{step.name} {step.median_ms:.4f} ms in run {rivals.id}"
        lines.append(
            f"{ours.case} bound_ratio={bounds} vs_best_peer={peers} {ours.device}; run {ladder.id}: "
            f"{ours.name} {ours.median_ms:.4f} ms = {ours.median_ms / ladder.bound:.3f} x bound {ladder.bound:.4f} ms, "
            f"best peer {peer.name} {peer.median_ms:.4f} ms = {peer.median_ms / step.median_ms:.3f} x {than}"
        )
    return lines


def _spread(ratios: Sequence[float]) -> str:
    """Median, extremes and how many: ``1.087 [1.061 to 1.123, 6 runs]``."""
    runs = f"{len(ratios)} run{'s' * (len(ratios) > 1)}"
    return f"{statistics.median(ratios):.3f} [{min(ratios):.3f} to {max(ratios):.3f}, {runs}]"
