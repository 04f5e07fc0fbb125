"""The local judge: static rules, then the submission in a process of its own, then every row against the truth."""

from __future__ import annotations

import ast
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import torch

from moe_lab.contract import ARGUMENTS, ENTRY_POINT
from moe_lab.errors import BackendError, MoeLabError, SubmissionError
from moe_lab.inputs import Inputs
from moe_lab.judge.arena import Arena, private_folder
from moe_lab.judge.channel import Message
from moe_lab.judge.compare import compare, first_failure
from moe_lab.judge.plan import Group, Plan, call_inputs, default_plan, fill_out
from moe_lab.judge.process import Limits, Worker, WorkerEnded
from moe_lab.judge.verdict import (
    CaseReport,
    Failure,
    FindingReport,
    Report,
    SubmissionReport,
    Verdict,
)
from moe_lab.reference import fused_truth
from moe_lab.submission import Submission

Profile = Literal["contest", "open"]
Progress = Callable[[str], None]

#: A submission is a page or two of text; a file beyond this was not written by hand.
_MAX_SOURCE_BYTES = 1 << 20


class _Stop(Exception):  # noqa: N818 - control flow, never seen outside
    """The run ends here with a verdict."""

    def __init__(self, verdict: Verdict, sentence: str) -> None:
        super().__init__(sentence)
        self.verdict = verdict
        self.sentence = sentence


def judge(
    submission: Submission | str | os.PathLike[str],
    *,
    profile: Profile = "contest",
    seed: int | None = None,
    progress: Progress | None = None,
    plan: Plan | None = None,
) -> Report:
    """Judge one submission.

    Args:
        submission: a :class:`~moe_lab.submission.Submission` or the path of a file.
        profile: "contest" applies every rule and the C500's limits; "open" turns the contest's rulings and the C500's
            limits into advice, for kernels written for other cards.
        seed: replays a run; fresh by default and recorded in the report.
        progress: called with one line of text whenever something starts.
        plan: which calls to make; by default :func:`moe_lab.judge.plan.default_plan`.

    Returns:
        The report. A failure of the judge itself is the verdict ``judge_error``, never a pass and never an exception.
    """
    say = progress or (lambda text: None)
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    name = submission.name if isinstance(submission, Submission) else Path(submission).name
    say(f"reading {name}")
    report = Report(
        verdict=Verdict.JUDGE_ERROR, sentence="the judge did not finish", profile=profile,
        submission=SubmissionReport(name=name), judge_sha256=judge_hash(), device="none", seed=seed,
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )  # fmt: skip
    start = time.monotonic()
    try:
        _Run(report, plan or default_plan(seed), say).judge(submission)
        report.verdict, report.sentence = Verdict.ACCEPTED, _accepted_sentence(report)
    except _Stop as stop:
        report.verdict, report.sentence = stop.verdict, stop.sentence
    except MoeLabError as error:
        report.verdict, report.sentence = Verdict.JUDGE_ERROR, str(error)
    except Exception as error:  # noqa: BLE001 - whatever breaks in the judge must not look like a verdict
        report.verdict = Verdict.JUDGE_ERROR
        report.sentence = f"the judge itself failed, this says nothing about the file: {type(error).__name__}: {error}"
    report.seconds = round(time.monotonic() - start, 3)
    say(f"{report.verdict}: {report.sentence}")
    return report


def judge_hash() -> str:
    """SHA-256 over the judge's own sources and what they compare with."""
    folder = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    others = [folder.parent / name for name in ("contract.py", "layout.py", "inputs.py", "reference.py")]
    for path in [*sorted(folder.glob("*.py")), *others]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class _Run:
    """One run: fills the report, raises :class:`_Stop` at the first reason to say no."""

    def __init__(self, report: Report, plan: Plan, say: Progress) -> None:
        self._report = report
        self._plan = plan
        self._say = say

    def judge(self, submission: Submission | str | os.PathLike[str]) -> None:
        submission = self._read(submission)
        self._check_signature(submission)
        if self._plan.sandboxed:
            self._check_rules(submission)
        from moe_lab import backend

        detected = backend.detect()
        self._report.device = detected.name
        self._report.versions = backend.versions()
        self._run_cases(submission)

    def _read(self, given: Submission | str | os.PathLike[str]) -> Submission:
        try:
            if not isinstance(given, Submission):
                path = Path(given)
                if path.is_file() and path.stat().st_size > _MAX_SOURCE_BYTES:
                    raise SubmissionError(
                        f"got {path.stat().st_size} bytes in {path}, expected at most {_MAX_SOURCE_BYTES}, usually "
                        "because it is not the file you meant"
                    )
                given = Submission.from_file(path)
            self._report.submission = SubmissionReport(
                name=given.name, sha256=given.source_hash, lines=given.source.count("\n") + 1
            )
        except (SubmissionError, UnicodeEncodeError) as error:
            raise _Stop(Verdict.CONTRACT_ERROR, str(error)) from None
        try:
            # Deep nesting can parse and still be refused by the compiler.
            compile(given.tree, given.name, "exec")
        except SubmissionError as error:
            raise _Stop(Verdict.COMPILE_ERROR, str(error)) from None
        except SyntaxError as error:
            raise _Stop(Verdict.COMPILE_ERROR, f"{given.name}, line {error.lineno}: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise _Stop(Verdict.COMPILE_ERROR, f"{given.name} cannot be compiled as Python: {error}") from None
        return given

    def _check_signature(self, submission: Submission) -> None:
        problem = signature_problem(submission.tree)
        if problem:
            self._report.contract = problem
            raise _Stop(Verdict.CONTRACT_ERROR, problem)

    def _check_rules(self, submission: Submission) -> None:
        from moe_lab.judge import rules

        self._say("checking the rules")
        self._report.findings = [
            FindingReport(
                rule_id=found.rule_id, level=found.level, message=found.message, line=found.line, column=found.column
            )
            for found in rules.check(submission, self._report.profile)
        ]
        broken = [found for found in self._report.findings if found.level == "violation"]
        if broken:
            first = broken[0]
            where = f"line {first.line}: " if first.line is not None else ""
            more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
            raise _Stop(Verdict.RULE_VIOLATION, f"{where}{first.message}{more}; `moe-lab explain {first.rule_id}`")

    def _run_cases(self, submission: Submission) -> None:
        cases = _Cases(self._plan, self._say)
        try:
            cases.run(submission)
        finally:
            self._report.cases = cases.reports
            self._report.log = cases.log
        if cases.problem:
            raise cases.problem


class _Cases:
    """The calls of a plan, made in one worker."""

    def __init__(self, plan: Plan, say: Progress) -> None:
        self.reports: list[CaseReport] = []
        self.problem: _Stop | None = None
        self.log = ""
        self._plan = plan
        self._say = say
        self._doing = ""

    def run(self, submission: Submission) -> None:
        """Make every call, stopping early if the worker cannot go on."""
        limits = self._plan.limits
        folder = private_folder(_arena_bytes(self._plan))
        try:
            source = folder / "submission.py"
            submission.save(source)
            (folder / "cwd").mkdir()
            self._doing = "starting a fresh process"
            self._say(self._doing)
            with Worker(folder / "cwd", limits, self._tick) as worker:
                try:
                    self._start(worker, source)
                    for group in self._plan.groups:
                        self._judge_group(worker, group, folder)
                        if self.problem and self._plan.stop_at_first:
                            break
                except WorkerEnded as end:
                    raise _ended(end, self._doing, limits) from None
                finally:
                    strangers = worker.strangers()
                    worker.kill()
                    self.log = worker.log
            strangers += worker.survivors
            if strangers and self.problem is None:
                self.problem = _Stop(
                    Verdict.RULE_VIOLATION,
                    f"left {len(strangers)} process(es) of its own running ({', '.join(sorted(set(strangers)))}), "
                    "expected none: a submission computes in run_kernel and nowhere else",
                )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _tick(self, seconds: float) -> None:
        self._say(f"{self._doing} ({seconds:.0f} s)")

    def _start(self, worker: Worker, source: Path) -> None:
        limits = self._plan.limits
        try:
            answer = worker.request(
                {"event": "start", "memory_bytes": limits.memory_bytes, "file_bytes": limits.file_bytes}, limits.start_s
            )
        except WorkerEnded as end:
            raise BackendError(
                f"the worker did not start ({end}), usually because torch or TileLang cannot be imported: run "
                f"`moe-lab doctor`. Its last words: {worker.log[-500:].strip() or 'none'}"
            ) from None
        self._doing = "loading the file"
        self._say(self._doing)
        answer = worker.request(
            {"event": "load", "path": str(source), "sandboxed": self._plan.sandboxed}, limits.load_s
        )
        if answer["event"] == "error":
            raise _raised(answer)

    def _judge_group(self, worker: Worker, group: Group, folder: Path) -> None:
        limits = self._plan.limits
        report = CaseReport(
            name=group.name, num_experts=group.case.num_experts, hidden=group.hidden, intermediate=group.intermediate,
            sizes=group.calls[0].sizes, values=tuple(dict.fromkeys(call.values for call in group.calls)),
            padding="zero", guards="intact", inputs="unchanged", max_abs_error=0.0, judge_ratio=0.0, row_error=0.0,
            strict_ratio=0.0, repeat="not repeated",
        )  # fmt: skip
        self.reports.append(report)
        arenas: dict[int, Arena] = {}
        calls: list[_Made] = []
        start = time.monotonic()
        for number, call in enumerate(group.calls):
            self._doing = f"{group.name}: call {number + 1} of {len(group.calls)}"
            self._say(self._doing)
            before = calls[-1] if calls else None
            inputs = call_inputs(group, call, before.inputs if before else None)
            tensors = dict(zip((argument.name for argument in ARGUMENTS), inputs.args, strict=True))
            tensors["out"] = fill_out(inputs, call, before.truth if before else None)
            if call.slot not in arenas:
                arenas[call.slot] = Arena(tensors, folder, f"{len(self.reports)}_{call.slot}.arena")
                worker.request({"event": "open", "arena": call.slot, **arenas[call.slot].describe()}, limits.call_s)
            arena = arenas[call.slot]
            arena.write(tensors)
            answer = worker.request(
                {"event": "call", "arena": call.slot, "garbage": group.garbage, "seed": call.seed},
                limits.call_s if calls else limits.first_call_s,
            )
            report.calls += 1
            report.seconds = round(time.monotonic() - start, 3)
            if answer["event"] == "error":
                raise _raised(answer)
            made = _Made(inputs, fused_truth(inputs), arena.out.clone(), answer["seconds"], answer["launches"])
            calls.append(made)
            problem = self._check(report, arena, answer, calls)
            if problem and self.problem is None:
                self.problem = problem
            if problem and self._plan.stop_at_first:
                break
        report.passed = report.failure is None
        for slot in arenas:
            worker.request({"event": "close", "arena": slot}, limits.call_s)

    def _check(self, report: CaseReport, arena: Arena, answer: Message, calls: list[_Made]) -> _Stop | None:
        number, made = len(calls) - 1, calls[-1]
        result = compare(made.inputs, made.out, made.truth)
        for field in ("max_abs_error", "judge_ratio", "row_error", "strict_ratio"):
            value, worst = getattr(result, field), getattr(report, field)
            setattr(report, field, None if value is None or worst is None else max(value, worst))
        problems: list[tuple[Verdict, Failure]] = []
        for edit in arena.edits():
            if edit.where in ("before out", "after out"):
                report.guards = f"{edit.count} bytes overwritten {edit.where}"
                what = f"wrote {edit.count} bytes {edit.where}, the nearest {edit.first} bytes away"
            else:
                report.inputs = f"edited {edit.where}"
                what = f"edited its input {edit.where} ({edit.count} bytes, first at element {edit.first})"
            problems.append((Verdict.CONTRACT_ERROR, Failure(call=number, what=what)))
        if answer["returned"] is not None:
            what = f"run_kernel returned a {answer['returned']}, expected None: the result goes into out"
            problems.append((Verdict.CONTRACT_ERROR, Failure(call=number, what=what)))
        if result.padding_rows.numel():
            report.padding = f"{result.padding_rows.numel()} rows not zero"
        if not result.passed:
            problems.append((Verdict.WRONG_ANSWER, first_failure(made.inputs, made.out, made.truth, result, number)))
        if not problems:
            return None
        verdict, failure = problems[0]
        report.failure = report.failure or failure
        cause = f" Likely cause: {failure.cause}." if failure.cause else ""
        return _Stop(verdict, f"{report.name}, call {number}: {failure}.{cause}")


@dataclass(frozen=True)
class _Made:
    """One call that was made."""

    inputs: Inputs
    truth: torch.Tensor
    out: torch.Tensor
    seconds: float
    launches: int


def signature_problem(tree: ast.Module) -> str | None:
    """What is wrong with the definition of ``run_kernel``, or None.

    Args:
        tree: the parsed file.
    """
    expected = [argument.name for argument in ARGUMENTS]
    found = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    entries = [node for node in found if node.name == ENTRY_POINT]
    if not entries:
        return (
            f"got no function {ENTRY_POINT} at module level, expected def {ENTRY_POINT}({', '.join(expected)}), "
            "usually because it has another name or sits inside something else"
        )
    entry = entries[-1]
    if isinstance(entry, ast.AsyncFunctionDef):
        return f"line {entry.lineno}: got async def {ENTRY_POINT}, expected a plain def"
    if entry.decorator_list:
        return f"line {entry.lineno}: got a decorator on {ENTRY_POINT}, expected none"
    arguments = entry.args
    names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults or arguments.posonlyargs:
        return (
            f"line {entry.lineno}: got defaults, keyword-only or starred parameters on {ENTRY_POINT}, expected exactly "
            "the ten plain ones of the contract"
        )
    if names != expected:
        wrong = next(
            (index for index, (got, want) in enumerate(zip(names, expected, strict=False)) if got != want),
            min(len(names), len(expected)),
        )
        got = repr(names[wrong]) if wrong < len(names) else "nothing"
        want = repr(expected[wrong]) if wrong < len(expected) else "nothing"
        return (
            f"line {entry.lineno}: got {len(names)} parameters on {ENTRY_POINT}, expected 10 in the contract's order; "
            f"parameter {wrong + 1} is {got}, expected {want}"
        )
    annotated = [argument.arg for argument in arguments.args if argument.annotation] or (
        ["the return value"] if entry.returns else []
    )
    if annotated:
        return f"line {entry.lineno}: got an annotation on {annotated[0]}, expected none: it can fail in the contest"
    return None


def _arena_bytes(plan: Plan) -> int:
    """Room that the largest group of a plan needs, both slots, generously."""

    def size(group: Group) -> int:
        case = group.case
        rows = 2 * (sum(group.calls[0].sizes) + 256 * case.num_experts)
        return 2 * (3 * case.num_experts * case.hidden * case.intermediate + 2 * rows * case.hidden)

    return 2 * max(size(group) for group in plan.groups) + (64 << 20)


def _raised(answer: Message) -> _Stop:
    """The verdict for an exception inside the submission."""
    where = f"line {answer['line']}" if answer["line"] else "the file"
    if answer["function"] not in (None, "<module>"):
        where += f" in {answer['function']}"
    message = " ".join(answer["message"].split())
    short = message if len(message) <= 400 else message[:200] + " ... " + message[-180:]
    text = f"{answer['kind']}: {short}" if short else answer["kind"]
    if answer["rule_id"]:
        return _Stop(Verdict.RULE_VIOLATION, f"{where}: {text}; `moe-lab explain {answer['rule_id']}`")
    if answer["kind"] == "MemoryError":
        return _Stop(Verdict.RESOURCE_ERROR, f"{where}: ran out of the memory that one run may use ({text})")
    if answer["stage"] == "compile":
        return _Stop(Verdict.COMPILE_ERROR, f"{where}: TileLang could not compile the kernel: {text}")
    when = "while the file was loaded" if answer["phase"] == "load" else "inside run_kernel"
    return _Stop(
        Verdict.RUNTIME_ERROR, f"{where}: {text}, raised {when}; the contest shows every exception as a wrong answer"
    )


def _ended(end: WorkerEnded, doing: str, limits: Limits) -> _Stop:
    """The verdict for a worker that stopped answering."""
    if end.kind == "timeout":
        return _Stop(
            Verdict.TIMEOUT,
            f"no answer within {end.detail} s while {doing}, usually an endless loop or far too much work for one call",
        )
    if end.kind == "output":
        return _Stop(
            Verdict.RESOURCE_ERROR,
            f"printed more than {limits.output_bytes >> 20} MiB while {doing}, expected next to nothing: remove the "
            "prints",
        )
    if end.kind == "forged":
        return _Stop(
            Verdict.RULE_VIOLATION,
            f"wrote on the judge's own channel while {doing} ({end.detail}); results are only read from out",
        )
    if end.kind == "signal":
        usual = {
            "SIGSEGV": "usually a kernel that reads or writes outside its tensors",
            "SIGBUS": "usually a kernel that reads or writes outside its tensors",
            "SIGKILL": "usually because the machine ran out of memory",
            "SIGABRT": "usually a failed check inside a library, see its last lines",
        }.get(end.detail, "which it sent itself or got from a library")
        return _Stop(Verdict.RUNTIME_ERROR, f"the process died of {end.detail} while {doing}, {usual}")
    return _Stop(
        Verdict.RUNTIME_ERROR,
        f"the process ended itself with exit code {end.detail} while {doing}, expected run_kernel to return",
    )


def _accepted_sentence(report: Report) -> str:
    calls = sum(case.calls for case in report.cases)
    return (
        f"right on every row of {calls} calls in {len(report.cases)} cases, under the contest's tolerance and the "
        f"strict bound, on {report.device}"
    )
