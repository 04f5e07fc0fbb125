"""The local judge: static rules, then the submission in a process of its own, then every row against the truth."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from moe_lab.judge import rules
from moe_lab.judge.ahead import Ahead, processes_for
from moe_lab.judge.checks import Problem, check_group, experiments, new_report
from moe_lab.judge.compare import error_map
from moe_lab.judge.fit import FitResult, c500_fit
from moe_lab.judge.plan import Group, Plan, default_plan
from moe_lab.judge.score import score
from moe_lab.judge.session import Progress, Session, Stopped
from moe_lab.judge.variants import run_variants, variant_groups
from moe_lab.judge.verdict import FindingReport, Report, SubmissionReport, TimingReport, Verdict
from moe_lab.machine import backend, devices
from moe_lab.machine.timing import summarise
from moe_lab.model.roofline import bound, work
from moe_lab.problem.contract import CASES
from moe_lab.problem.errors import DataError, MoeLabError, SubmissionError
from moe_lab.problem.submission import Submission

Profile = Literal["contest", "open"]

#: What breaking a rule of this kind is called; every other kind is a rule violation.
_KIND_VERDICTS = {"contract": Verdict.CONTRACT_ERROR, "limit": Verdict.RESOURCE_ERROR}


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
        submission: a :class:`~moe_lab.problem.submission.Submission` or the path of a file.
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
    # Python keeps bytes of a path that are no text as characters that cannot be written.
    name = name.encode("utf-8", "replace").decode()
    say(f"reading {name}")
    report = Report(
        verdict=Verdict.JUDGE_ERROR, sentence="the judge did not finish", profile=profile,
        submission=SubmissionReport(name=name), judge_sha256=judge_hash(), device="none", seed=seed,
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )  # fmt: skip
    start = time.monotonic()
    try:
        _Run(report, plan, say).judge(submission)
        report.verdict, report.sentence = Verdict.ACCEPTED, _accepted_sentence(report)
    except Stopped as stop:
        report.verdict, report.sentence = stop.verdict, stop.sentence
    except MoeLabError as error:
        report.verdict, report.sentence = Verdict.JUDGE_ERROR, str(error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        report.verdict = Verdict.JUDGE_ERROR
        report.sentence = (
            f"this machine stopped the judge, which says nothing about the file: {where}{error.strerror or error}; "
            "look at `df` and `ulimit -a`"
        )
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
    for path in [*sorted(folder.glob("*.py")), *sorted((folder.parent / "problem").glob("*.py"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _kind(found: FindingReport) -> str:
    return rules.RULES[found.rule_id].kind


class _Run:
    """One run: fills the report, raises :class:`Stopped` at the first reason to say no."""

    def __init__(self, report: Report, plan: Plan | None, say: Progress) -> None:
        self._report = report
        self._given_plan = plan
        self._say = say
        self._beside = ThreadPoolExecutor(1)
        self._fit: Future[FitResult] | None = None

    def judge(self, given: Submission | str | os.PathLike[str]) -> None:
        """Everything in order: text, rules, calls, then what never changes the verdict."""
        report = self._report
        submission = self._read(given)
        detected = backend.detect()
        report.device, report.versions = detected.name, backend.versions()
        self._device = detected.torch_device
        self._plan = self._given_plan or default_plan(report.seed, self._device)
        self._check_rules(submission)
        with self._ahead(submission) as ahead, self._beside:
            self._run_calls(submission, ahead, detected.kind)

    def _ahead(self, submission: Submission) -> Ahead:
        """Compile for every group but the first, which is called at once."""
        plan = self._plan
        variants = variant_groups(self._report.seed).values() if plan.variants else ()
        # A file outside the sandbox is one that attacks the judge: it gets one process, as few as possible.
        processes = processes_for(self._device) if plan.sandboxed else 0
        return Ahead(
            submission, (*plan.groups[1:], *variants), plan.limits, sandboxed=plan.sandboxed, device=self._device,
            processes=processes,
        )  # fmt: skip

    def _run_calls(self, submission: Submission, ahead: Ahead, kind: backend.Kind) -> None:
        """All calls of the verdict, the limits of a C500, and what never changes the verdict."""
        report = self._report
        self._run_groups(submission, ahead)
        if self._plan.fit:
            self._check_fit(submission)
        if self._device == "cpu":
            report.not_measured += ["speed (no GPU)", "the contest's full number of rows"]
        if kind == "maca" and len(report.timing) == len(CASES):
            report.score = score([row.median_ms for row in report.timing]).points
        else:
            report.not_measured.append("contest score (only from times on a C500)")
        if self._plan.variants:
            report.variants = run_variants(
                submission,
                report.seed,
                self._plan.limits,
                sandboxed=self._plan.sandboxed,
                say=self._say,
                device=self._device,
            )

    def _read(self, given: Submission | str | os.PathLike[str]) -> Submission:
        try:
            if not isinstance(given, Submission):
                given = Submission.from_file(given)
            self._report.submission = SubmissionReport(
                name=given.name, sha256=given.source_hash, lines=given.source.count("\n") + 1
            )
        except (SubmissionError, UnicodeEncodeError) as error:
            raise Stopped(Verdict.CONTRACT_ERROR, str(error)) from None
        try:
            # Deep nesting can parse and still be refused by the compiler.
            compile(given.tree, given.name, "exec", dont_inherit=True)
        except SubmissionError as error:
            raise Stopped(Verdict.COMPILE_ERROR, str(error)) from None
        except SyntaxError as error:
            raise Stopped(Verdict.COMPILE_ERROR, f"{given.name}, line {error.lineno}: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise Stopped(Verdict.COMPILE_ERROR, f"{given.name} cannot be compiled as Python: {error}") from None
        return given

    def _check_rules(self, submission: Submission) -> None:
        self._say("checking the rules")
        self._report.findings = [
            FindingReport(
                rule_id=found.rule_id, level=found.level, message=found.message, line=found.line, column=found.column
            )
            for found in rules.check(submission, self._report.profile)
            if self._plan.sandboxed or rules.RULES[found.rule_id].kind == "contract"
        ]
        broken = [found for found in self._report.findings if found.level == "violation"]
        if broken:
            # The contract first: a file without run_kernel has little use for the rest.
            first = min(broken, key=lambda found: _kind(found) != "contract")
            where = f"line {first.line}, column {first.column}: " if first.line is not None else ""
            verdict = _KIND_VERDICTS.get(_kind(first), Verdict.RULE_VIOLATION)
            raise Stopped(verdict, where + rules.told(first.message, first.rule_id, len(broken) - 1))

    def _session(self, submission: Submission, groups: tuple[Group, ...]) -> Session:
        return Session(
            submission, groups, self._plan.limits, sandboxed=self._plan.sandboxed, say=self._say, device=self._device
        )

    def _run_groups(self, submission: Submission, ahead: Ahead) -> None:
        plan = self._plan
        problem: Problem | None = None
        session = self._session(submission, plan.groups)
        try:
            with session:
                for group in plan.groups:
                    if problem and (group.sparse or group.on_device):
                        # The contest's shapes take longest and would only say the same again.
                        continue
                    ahead.wait(group, self._say)
                    case = new_report(group)
                    self._report.cases.append(case)
                    found = check_group(
                        session, group, case, stop_at_first=plan.stop_at_first, must_launch=plan.sandboxed
                    )
                    problem = problem or found
                    if problem and plan.stop_at_first:
                        break
                    if not (problem or self._fit) and plan.fit and self._device != "cpu":
                        # A GPU leaves the processor idle, and a file that got this far will be asked for its limits.
                        self._fit = self._beside.submit(c500_fit, submission)
        except Stopped:
            # A wrong answer that came first is more telling than what ended the process later.
            if problem is None:
                raise
        finally:
            self._report.log = session.log
            self._report.timing = [timing_report(name, *times) for name, times in session.times_ms.items()]
        if problem:
            self._explain(submission, problem)
            raise Stopped(problem.verdict, problem.sentence)
        if session.computed:
            self._torch_computed(sorted(session.computed))
        for group in plan.groups:
            if group.name in session.times_ms:
                too_fast = impossible(group, min(session.times_ms[group.name][0]), self._report.device)
                if too_fast:
                    raise Stopped(Verdict.JUDGE_ERROR, too_fast)
        if session.strangers:
            raise Stopped(
                Verdict.RULE_VIOLATION,
                f"left {len(session.strangers)} process(es) of its own running "
                f"({', '.join(sorted(set(session.strangers)))}), expected none: a submission computes in run_kernel "
                "and nowhere else",
            )

    def _torch_computed(self, names: list[str]) -> None:
        """A ruling of the contest: rejected there, said elsewhere."""
        rule = rules.RULES["torch-compute"]
        message = f"torch computed with {', '.join(names)} while run_kernel was called. {rule.sentence}"
        contest = self._report.profile == "contest"
        level: Literal["violation", "advice"] = "violation" if contest else "advice"
        self._report.findings.append(FindingReport(rule_id=rule.id, level=level, message=message))
        if contest:
            raise Stopped(Verdict.RULE_VIOLATION, rules.told(message, rule.id))

    def _check_fit(self, submission: Submission) -> None:
        self._say("lowering the contest's cases")
        fit = self._fit.result() if self._fit else c500_fit(submission)
        self._report.fit = list(fit.lines)
        self._report.not_measured += fit.unknown
        self._report.compiler_messages = list(fit.messages)
        if fit.problems and self._report.profile == "contest":
            raise Stopped(Verdict.RESOURCE_ERROR, f"does not fit a C500: {'; '.join(fit.problems)}")
        self._report.fit += [f"does not fit: {problem}" for problem in fit.problems]

    def _explain(self, submission: Submission, problem: Problem) -> None:
        """Draw the error map and, where no usual mistake fits, ask the file itself what it depends on."""
        made = problem.history[-1]
        if problem.verdict is not Verdict.WRONG_ANSWER:
            return
        self._report._error_map = error_map(made.inputs, made.out, made.comparison)
        if problem.failure.cause is not None:
            return
        for meaning, group in experiments(problem.group, made.call):
            try:
                with self._session(submission, (group,)) as session:
                    if next(session.calls(group)).comparison.passed:
                        problem.failure.cause = meaning
                        return
            except Stopped:
                return


def timing_report(case: str, candidate_ms: list[float], baseline_ms: list[float]) -> TimingReport:
    """Medians of interleaved times, with the interval of the candidate's.

    Args:
        case: name.
        candidate_ms, baseline_ms: one time a round.
    """
    mine, other = (summarise(case, times, device="", cache="cold") for times in (candidate_ms, baseline_ms))
    return TimingReport(
        case=case, median_ms=mine.median_ms, low_ms=mine.low_ms, high_ms=mine.high_ms, baseline_ms=other.median_ms,
        samples=len(candidate_ms),
    )  # fmt: skip


def impossible(group: Group, time_ms: float, device_name: str) -> str | None:
    """Why a time cannot be true, or None: no call beats the device's specified roof on the work of its valid rows.

    Args:
        group: what was called last.
        time_ms: the fastest call.
        device_name: as its driver reports it; a device without figures has no floor.
    """
    try:
        roof = devices.device(device_name).roof()
    except DataError:
        return None
    least_ms = bound(work(group.case, group.calls[-1].sizes).whole, roof).time_ms
    # What the L2 cache holds of the hidden activation is counted as memory traffic, a few percent of the whole.
    if time_ms > 0.9 * least_ms:
        return None
    return (
        f"{group.name}: got {time_ms:.3f} ms, expected at least {least_ms:.3f} ms, which the {device_name} needs for "
        "the arithmetic and the bytes of the valid rows: the clock is not to be trusted, and the file with it"
    )


def _accepted_sentence(report: Report) -> str:
    calls = sum(case.calls for case in report.cases)
    return (
        f"right on every row of {calls} calls in {len(report.cases)} cases, under the contest's tolerance and the "
        f"strict bound, on {report.device}"
    )
