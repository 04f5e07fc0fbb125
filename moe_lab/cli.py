"""Command line: ``moe-lab`` or ``python -m moe_lab``. Exit codes: 0 accepted or ok, 1 rejected, 2 usage or our failure.

What takes long to import is imported by the command that needs it, so that ``--help`` answers at once.
"""

import io
import os
import signal
import sys
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from moe_lab import judge as judging
from moe_lab.lesson import export as exporting
from moe_lab.machine import backend
from moe_lab.problem.contract import CASES, Profile
from moe_lab.problem.errors import MoeLabError, SubmissionError
from moe_lab.problem.submission import Submission
from moe_lab.steps import STEPS, find

if TYPE_CHECKING:
    from typing_extensions import Buffer

ProfileOption = Annotated[
    Profile,
    typer.Option(
        "--profile",
        help="contest: every rule rejects, as in the contest; open: its rulings (no asynchronous copies, no device "
        "source, no computing in torch) and a C500's limits are advice, for kernels of other cards",
    ),
]
SubmissionArgument = Annotated[
    Path, typer.Argument(metavar="FILE|STEP", help="Python file with run_kernel, or the name of a step")
]

#: What a shell reports for a program that Ctrl-C ended, and for one whose output nobody reads, as before ``head``.
_INTERRUPTED, _READER_GONE = 130, 141
_STDERR = 2

app = typer.Typer(
    name="moe-lab", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Learn, judge and tune fused Mixture-of-Experts kernels in TileLang.",
)  # fmt: skip


def _step_of(given: Path) -> Submission | None:
    """The step of a name; None for what is a file, or cannot be a step's name."""
    # os.path, since a path that is too long, or not ours to look at, raises an error in pathlib.
    if os.path.lexists(given) or len(given.parts) != 1 or given.suffix:
        return None
    try:
        return find(given.name).submission()
    except SubmissionError:
        raise SubmissionError(
            f"got no file {given}, expected a Python file with run_kernel or the name of a step (`moe-lab steps` lists "
            "them)"
        ) from None


def _submission(given: Path) -> Submission:
    """What an argument names: a file first, then a step."""
    return _step_of(given) or Submission.from_file(given)


def _print_table(rows: list[dict[str, str]]) -> None:
    """Rows of text under the names of their columns; the first column is never wrapped, the others lose nothing."""
    first, *others = rows[0]
    table = Table(Column(first, no_wrap=True), *(Column(name, overflow="fold") for name in others))
    for row in rows:
        table.add_row(*map(escape, row.values()))
    Console().print(table)


def _expect(good: object, sentence: str) -> None:
    if not good:
        raise SubmissionError(sentence)


@app.command()
def export(
    notebook: Annotated[Path, typer.Argument(help="notebook whose cell tagged 'submission' is exported")],
    output: Annotated[Path, typer.Option("-o", "--output", help="file to write")] = Path("submission.py"),
    profile: ProfileOption = "contest",
) -> None:
    """Write the final cell of a notebook to a file, byte for byte, without running it."""
    submission = Submission(exporting.submission_cell(notebook), output.name)
    path = exporting.export(submission, output, profile)
    print(f"wrote {path} ({len(submission.source.encode())} bytes, sha256 {submission.source_hash[:12]})")


@app.command()
def score(
    times_ms: Annotated[list[float], typer.Argument(metavar="MS MS MS", help="time of each contest case in ms")],
) -> None:
    """Points of three times, and how much faster each case must get for the next one."""
    from moe_lab.judge import score as scoring

    result = scoring.score(times_ms)
    _print_table([
        {
            "case": str(case.case), "time ms": f"{case.time_ms:.3f}", "baseline ms": f"{case.baseline_ms:.3f}",
            "points": f"{case.points:.2f}", "counts as": str(case.floored),
            "next point at": f"{case.next_time_ms:.3f} ms" if case.next_time_ms else "-",
            "that is": f"{100 * (1 - case.next_time_ms / case.time_ms):.1f}% less" if case.next_time_ms else "-",
        }
        for case in result.cases
    ])  # fmt: skip
    print(f"score {result.points:.2f} (mean of the whole points), total {result.total_ms:.3f} ms")


@app.command()
def doctor() -> None:
    """What is here, what is missing and what to do about it. Exit code 0 if submissions can run here."""
    with Console().status("looking, and compiling one small kernel"):
        checks = backend.doctor()
    _print_table([
        {
            "": "ok" if check.ok else "MISSING" if check.required else "note", "check": check.name,
            "found": check.found, "what to do": check.remedy,
        }
        for check in checks
    ])  # fmt: skip
    if any(check.name.startswith("$") and not check.ok for check in checks):
        print("A TileLang built from source needs, before Python starts (set the first two to your folders):\n")
        print(backend.maca_exports())
    missing = [check.name for check in checks if check.required and not check.ok]
    print(f"submissions cannot run here: {', '.join(missing)}" if missing else "submissions can run here")
    raise typer.Exit(1 if missing else 0)


@app.command()
def steps(
    diff: Annotated[str | None, typer.Option(metavar="NAME", help="show what a step changes in the one before")] = None,
) -> None:
    """The ladder: every step, the branch it belongs to and its one idea."""
    from rich.syntax import Syntax

    if diff is None:
        _print_table([
            {
                "step": step.name, "branch": step.branch, "after": step.after.split("_")[0] if step.after else "-",
                "the one idea": f"{step.story} (start here)" if step.recommended else step.story,
            }
            for step in STEPS.values()
        ])  # fmt: skip
        return
    step = find(diff)
    if step.after is None:
        print(f"{step.name} is the first step: there is nothing before it")
    elif sys.stdout.isatty():
        Console().print(Syntax(step.diff(), "diff", word_wrap=True))
    else:
        print(step.diff(), end="")


@app.command()
def judge(
    file: SubmissionArgument,
    profile: ProfileOption = "contest",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="also write the report here")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="replay a run; fresh by default")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="show every case and open question, and what it printed")
    ] = False,
) -> None:
    """Judge a submission: rules, contract, every row of every structural case. Exit code 0 only if accepted."""
    from moe_lab.judge import process

    step = _step_of(file)
    got = f"{file}, a folder, a device or a pipe" if os.path.exists(file) else f"no file {file}"
    _expect(step or os.path.isfile(file), f"got {got}, expected a Python file with run_kernel")
    if json_file is not None:
        folder = json_file.parent
        _expect(os.path.isdir(folder), f"got no folder {folder}, expected one for the report {json_file.name}")
        _expect(not os.path.isdir(json_file), f"got a folder {json_file}, expected a file to write the report to")
    console, said = Console(stderr=True), ""
    with console.status("starting the judge") as status:

        def progress(text: str) -> None:
            nonlocal said
            # A sentence may quote a submission's own words, and square brackets are Rich's markup.
            status.update(escape(text))
            # A log gets one line for each case, a terminal one line that changes, and what is certain already.
            head, certain = text.partition(":")[0].partition(" (")[0], "accepted" in text
            if head != said and (certain or not console.is_terminal):
                said = head
                print(text, file=sys.stderr, flush=True)

        progress("starting the judge")
        process.warm_up()  # while the judge itself is imported
        try:
            report = judging.judge(step or file, profile=profile, seed=seed, progress=progress)
        except KeyboardInterrupt:
            print("interrupted: no verdict", file=sys.stderr)
            raise typer.Exit(_INTERRUPTED) from None
    # Said before it is saved, and saved though it cannot be said: a verdict took a minute, and both may fail.
    try:
        Console().print(report.full if full else report)
    except MoeLabError:
        print(f"{report.verdict}: {report.sentence}", file=sys.stderr, flush=True)
        raise
    finally:
        if json_file is not None:
            report.save(json_file)
    raise typer.Exit(0 if report.accepted else 2 if report.verdict is judging.Verdict.JUDGE_ERROR else 1)


@app.command()
def explain(
    rule: Annotated[str | None, typer.Argument(metavar="[RULE]", help="id; without one, list all")] = None,
) -> None:
    """What a rule says, why it exists, how to obey it and where it is known from."""
    from moe_lab.judge import rules

    print(rules.explain(rule))


@app.command()
def fit(
    file: SubmissionArgument,
    device: Annotated[str, typer.Option(metavar="NAME", help="GPU, by its key or name in data/devices.csv")] = "c500",
    case: Annotated[int, typer.Option(min=1, max=3, metavar="N", help="contest case")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON and nothing else")] = False,
    lower: Annotated[bool, typer.Option("--lower", help="ask TileLang too: takes seconds, runs host code")] = False,
) -> None:
    """What the tiles of a submission cost, and whether a device can pay. Exit code 1 if it cannot.

    TileLang's own front end reads the kernels that run_kernel asks for, in the judge's sandbox; nothing is compiled.
    Groups are taken as equal: 142 rows for every expert.
    """
    import json

    from moe_lab.lesson.readout import describe, print_out
    from moe_lab.machine import devices
    from moe_lab.model import tiles

    wanted = devices.device(device, "gpu")
    submission = _submission(file)
    found = tiles.resources(submission, CASES[case], load="moe_lab.judge.sandbox:load")
    fits = tiles.fit(found, wanted)
    lowered = tiles.lowered_figures(submission, CASES[case], wanted) if lower else []
    if as_json:
        print(json.dumps({**tiles.as_dict(found, [fits]), "lowered": lowered}, indent=2, allow_nan=False))
    else:
        others = [item for item in devices.devices().values() if item.kind == "gpu" and item.name != wanted.name]
        elsewhere = [tiles.fit(found, item) for item in others]
        print_out(Console(), describe(found, "balanced", wanted), elsewhere, lowered)
    raise typer.Exit(1 if fits.fits is False else 0)


@app.command()
def bench(
    case: Annotated[
        list[int] | None, typer.Option(min=1, max=3, metavar="N", help="contest case, may be repeated; default: all")
    ] = None,
    routing: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="balanced, multinomial-0 to -2, skewed-0, skewed-1 or one_expert; on a GPU also a shape made by hand "
            "of data/routings/routings.csv, such as 'empty half'",
        ),
    ] = "multinomial-0",
    seed: Annotated[int, typer.Option(min=0, help="of the inputs")] = 0,
    steps: Annotated[
        str | None, typer.Option(metavar="STEP,STEP", help="steps to time; default: all meant for this device")
    ] = None,
    summary: Annotated[bool, typer.Option("--summary", help="print the recorded standing, time nothing")] = False,
) -> None:
    """Time all steps and every installed peer in turns, check every output, record it in data/measurements.

    A machine with no GPU runs a small case that shows the harness and says nothing about speed.
    """
    from moe_lab.speed import bench as harness

    if summary:
        print(*harness.summary(), sep="\n")
    else:
        names = None if steps is None else [name.strip() for name in steps.split(",") if name.strip()]
        harness.run(cases=case, routing=routing, seed=seed, steps=names)


@app.command()
def tune(
    file: SubmissionArgument,
    case: Annotated[int | None, typer.Option("--case", min=1, max=3, help="contest case; a CPU takes none")] = None,
    vary: Annotated[list[str] | None, typer.Option("--vary", metavar="LITERAL", help="only these, in order")] = None,
) -> None:
    """Search better literals on this machine, the resource model first, and remember them for fused_moe."""
    from moe_lab.speed.autotune import tune as search
    from moe_lab.speed.bench import CPU_CASE

    submission = _submission(file)
    on_cpu = backend.detect().kind == "cpu"
    _expect(not on_cpu or case is None, "got a contest case on a CPU, which would need hours; leave --case out")
    _expect(on_cpu or case is not None, "got no case, expected --case 1, 2 or 3")
    result = search(submission, CPU_CASE if case is None else CASES[case], names=vary or None)
    where = "this machine's CPU, which says nothing about a GPU" if on_cpu else backend.detect().name
    changes = ", ".join(f"{name}={value!r}" for name, value in result.values.items())
    found = f"{changes}: {result.median_ms:.4f} ms instead of" if changes else "nothing is faster than the source:"
    print(
        f"{found} {result.source_ms:.4f} ms on {where}; {result.timed} timed, {result.pruned} pruned without "
        f"compiling, {result.failed} did not compile or were wrong"
    )


def main() -> None:
    """Run the command line; whatever fails is one sentence and exit code 2, since 1 says that a file is rejected."""
    _open_standard_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Not where somebody ignores it on purpose, as nohup does.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    try:
        try:
            os.getcwd()
        except OSError as error:
            # Libraries fail in ways of their own there.
            raise MoeLabError(f"the current folder: {error.strerror}") from None
        try:
            app()
            return
        finally:
            sys.stdout.flush()
    except MoeLabError as error:
        sentence = str(error)
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        sentence = f"{what}{error.strerror or error}"
    except Exception as error:  # noqa: BLE001 - a fault of ours: say where, for a report of it
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if "moe_lab" in Path(frame.filename).parts]
        place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"
        sentence = f"the tool itself failed, which says nothing about your files: {said}"
    print(f"moe-lab: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _open_standard_streams() -> None:
    """Make the three streams ones that can be written to, whatever the shell and the locale made of them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # Closed, as by `>&-`: its number would go to the next file or socket.
            os.open(os.devnull, os.O_RDWR)
        original = getattr(sys, f"__{name}__")
        if number and getattr(sys, name) is original:
            encoding, line = getattr(original, "encoding", None), number == _STDERR or os.isatty(number)
            raw = io.BufferedWriter(_Output(number, "wb", closefd=False))
            ours = io.TextIOWrapper(raw, encoding, "backslashreplace", line_buffering=line)
            # Libraries that reach for the original must not find a stream without a file.
            setattr(sys, name, ours)
            setattr(sys, f"__{name}__", ours)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)


class _Output(io.FileIO):
    """A standard stream that fails at most once, and in one way for every library that writes to it.

    A library must not turn a broken pipe into exit code 1, which says that a file failed.
    """

    def write(self, data: "Buffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # What could not be written now cannot be written by Python's own exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            # On standard error: progress that nobody can see is no reason to lose a verdict.
            if self.fileno() == _STDERR:
                return memoryview(data).nbytes
            if isinstance(error, BrokenPipeError):
                raise SystemExit(_READER_GONE) from None
            raise MoeLabError(f"the output cannot be written: {error.strerror or error}") from None


def _end(number: int, frame: types.FrameType | None) -> NoReturn:
    """End as the signal asks, once every process and file of ours is gone."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
