"""The local judge: static rules, then the submission in a process of its own, then every row against the truth."""

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from moe_lab.judge import diagnose, rules
from moe_lab.judge.ahead import Ahead
from moe_lab.judge.checks import Problem, check_group
from moe_lab.judge.compare import error_map
from moe_lab.judge.fit import FitResult, c500_fit
from moe_lab.judge.plan import Group, Plan, default_plan, variant_groups
from moe_lab.judge.process import Progress, Stopped
from moe_lab.judge.score import score
from moe_lab.judge.session import Made, Session
from moe_lab.judge.verdict import FindingReport, Report, SubmissionReport, TimingReport, VariantReport, Verdict
from moe_lab.machine import backend, devices
from moe_lab.machine.timing import summarise
from moe_lab.model.roofline import bound, work
from moe_lab.problem.contract import CASES, Profile
from moe_lab.problem.errors import DataError, MoeLabError, SubmissionError
from moe_lab.problem.submission import Submission

#: What breaking a rule of this kind is called; every other kind is a rule violation.
_KIND_VERDICTS = {"contract": Verdict.CONTRACT_ERROR, "limit": Verdict.RESOURCE_ERROR}
#: Calls that differ from a wrong one in a single thing that a right kernel does not depend on: what it means if such a
#: call is right, and what to change in its group and in the call. Each is made alone and in a fresh process.
_EXPERIMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "it is right when called first and alone: something is kept between calls": ({}, {}),
    "it is right when the padding rows of the tokens are zero: their values leak, or a zero mask meets NaN": (
        {}, {"token_poison": "zeros"},
    ),
    "it is right when fresh workspace memory is zero: rows of the workspace are read that nobody wrote, or a zero mask "
    "multiplies NaN": ({"garbage": "zeros"}, {}),
    "it is right when out arrives zeroed: valid rows of out are read or added to": ({}, {"out_fill": "zeros"}),
}  # fmt: skip


def judge(
    submission: Submission | str | os.PathLike[str], *, profile: Profile = "contest", seed: int | None = None,
    progress: Progress | None = None, plan: Plan | None = None,
) -> Report:  # fmt: skip
    """Judge a :class:`~moe_lab.problem.submission.Submission` or the file at a path.

    A failure of the judge itself is the verdict ``judge_error``, never a pass and never an exception.

    Args:
        profile: "contest" applies every rule and the C500's limits; "open" turns the contest's rulings and the C500's
            limits into advice, for kernels written for other cards.
        seed: replays a run; fresh by default and recorded in the report.
        progress: called with one line of text whenever something starts.
        plan: which calls to make; by default :func:`moe_lab.judge.plan.default_plan`.
    """
    say = progress or (lambda text: None)
    name = submission.name if isinstance(submission, Submission) else Path(submission).name
    # Python keeps bytes of a path that are no text as characters that cannot be written.
    name = name.encode("utf-8", "replace").decode()
    say(f"reading {name}")
    report = Report(
        verdict=Verdict.JUDGE_ERROR, sentence="the judge did not finish", profile=profile,
        submission=SubmissionReport(name=name), judge_sha256=judge_hash(), device="none",
        seed=secrets.randbelow(1 << 31) if seed is None else seed,
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )  # fmt: skip
    start = time.monotonic()
    read: Submission | None = None
    try:
        read = _read(submission, report)
        _parse(read)
        run = _Run(report, say, read, plan)
        run.judge()
        calls = sum(case.calls for case in report.cases)
        report.verdict = Verdict.ACCEPTED
        report.sentence = (
            f"right on every row of {calls} calls in {len(report.cases)} cases, under the contest's tolerance and the "
            f"strict bound, on {report.device}{run.caution}"
        )
    except Stopped as stop:
        report.verdict, report.sentence = stop.verdict, stop.sentence
        report.line, report.remedy = stop.line, stop.remedy
        if read and stop.line:
            numbered = list(enumerate(read.source.splitlines(), start=1))
            report.excerpt = dict(numbered[max(0, stop.line - 3) : stop.line + 2])
    except MoeLabError as error:
        report.sentence = str(error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        report.sentence = (
            f"this machine stopped the judge, which says nothing about the file: {where}{error.strerror or error}; "
            "look at `df` and `ulimit -a`"
        )
    except Exception as error:  # noqa: BLE001 - whatever breaks in the judge must not look like a verdict
        what = f"{type(error).__name__}: {error}"
        report.sentence = f"the judge itself failed, this says nothing about the file: {what}"
    report.seconds = round(time.monotonic() - start, 3)
    return report


def judge_hash() -> str:
    """SHA-256 over the judge's own sources and what they compare with."""
    folder = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for path in [*sorted(folder.glob("*.py")), *sorted((folder.parent / "problem").glob("*.py"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _read(given: Submission | str | os.PathLike[str], report: Report) -> Submission:
    """The text, whatever it is."""
    try:
        submission = given if isinstance(given, Submission) else Submission.from_file(given)
        lines = submission.source.count("\n") + 1
        report.submission = SubmissionReport(name=submission.name, sha256=submission.source_hash, lines=lines)
        return submission
    except (SubmissionError, UnicodeEncodeError) as error:
        raise Stopped(Verdict.CONTRACT_ERROR, str(error)) from None


def _parse(submission: Submission) -> None:
    try:
        # Deep nesting can parse and still be refused by the compiler.
        compile(submission.tree, submission.name, "exec", dont_inherit=True)
        return
    except SubmissionError as error:
        said = str(error)
    except SyntaxError as error:
        said = f"{submission.name}, line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        said = f"{submission.name} cannot be compiled as Python: {error}"
    place = re.search(r", line (\d+)", said)
    raise Stopped(Verdict.COMPILE_ERROR, said, line=int(place[1]) if place else None)


class _Run:
    """One run: fills the report, raises :class:`Stopped` at the first reason to say no."""

    def __init__(self, report: Report, say: Progress, submission: Submission, plan: Plan | None) -> None:
        self._report, self._say, self._submission = report, say, submission
        self._machine = backend.detect()
        report.device, report.versions = self._machine.name, backend.versions()
        self._device = self._machine.torch_device
        self._plan = plan or default_plan(report.seed, self._device)
        self._beside = ThreadPoolExecutor(1)
        self._fit: Future[FitResult] | None = None
        self.caution = ""  # what an accepted file's author should know first

    def judge(self) -> None:
        """Rules, calls and what the kernels need, then what never changes the verdict."""
        plan, report = self._plan, self._report
        self._say("checking the rules")
        self._find(
            FindingReport(**asdict(found))
            for found in rules.check(self._submission, report.profile)
            if plan.sandboxed or rules.RULES[found.rule_id].kind == "contract"
        )
        variants = variant_groups(report.seed) if plan.variants else ()
        # The first group is called at once.
        to_come = replace(plan, groups=(*plan.groups[1:], *variants))
        # A compiler keeps one core busy, and the judge, the worker and the driver want theirs; on a CPU the calls do. A
        # file outside the sandbox is one that attacks the judge: it gets one process, as few as possible.
        cores = len(os.sched_getaffinity(0)) if plan.sandboxed else 0
        whole = any(group.sparse for group in plan.groups)
        processes = cores * 3 // 4 if self._device != "cpu" else int(whole and cores > 1)
        with self._beside, Ahead(self._submission, to_come, self._device, processes) as ahead:
            self._make_calls(ahead)
            if plan.fit:
                self._check_fit()
            if self._device == "cpu":
                report.not_measured += ["speed (no GPU)", "the contest's full number of rows"]
            if self._machine.kind == "maca" and len(report.timing) == len(CASES):
                report.score = score([row.median_ms for row in report.timing]).points
            else:
                report.not_measured.append("contest score (only from times on a C500)")
            if variants:
                self._say(f"accepted so far{self.caution}; now the open questions, which do not change the verdict")
            self._try_variants(variants)

    def _find(self, findings: Iterable[FindingReport]) -> None:
        """Note findings; a violation among them ends the run."""
        found = list(findings)
        self._report.findings += found
        broken = [finding for finding in found if finding.level == "violation"]
        if broken:
            # The contract first: a file without run_kernel has little use for the rest.
            first = min(broken, key=lambda finding: rules.RULES[finding.rule_id].kind != "contract")
            where = f"line {first.line}, column {first.column}: " if first.line is not None else ""
            verdict = _KIND_VERDICTS.get(rules.RULES[first.rule_id].kind, Verdict.RULE_VIOLATION)
            said = where + rules.told(first.message, first.rule_id, len(broken) - 1)
            raise Stopped(verdict, said, line=first.line, remedy=rules.RULES[first.rule_id].fix)

    def _find_ruling(self, rule_id: str, what: str) -> None:
        """A ruling of the contest that only running or lowering the file shows: rejected there, said elsewhere."""
        level: rules.Level = "violation" if self._report.profile == "contest" else "advice"
        message = f"{what}. {rules.RULES[rule_id].sentence}"
        self._find([FindingReport(rule_id=rule_id, level=level, message=message)])

    def _session(self, *groups: Group) -> Session:
        return Session(self._submission, replace(self._plan, groups=groups), self._device, self._say)

    def _make_calls(self, ahead: Ahead) -> None:
        """All calls of the verdict."""
        plan, report, problem = self._plan, self._report, None
        session = self._session(*plan.groups)
        try:
            with session:
                for group in plan.groups:
                    if group.sparse or group.on_device:
                        # The contest's shapes take longest: a wrong file they would only tell the same again, and a
                        # file that got this far will be asked for its limits, in a process beside the calls.
                        if problem:
                            continue
                        if plan.fit and self._fit is None:
                            self._fit = self._beside.submit(c500_fit, self._submission)
                    ahead.wait(group, self._say)
                    found = check_group(session, group, report.cases)
                    if found and not problem:
                        self._say(
                            f"not accepted, {group.name}: {found.failure.extent}; now the other cases, to tell why"
                        )
                    problem = problem or found
                    if problem and plan.stop_at_first:
                        break
        except Stopped as stop:
            # A wrong answer that came first is more telling than what ended the process later.
            if problem is None:
                raise self._not_here(stop) from None
        finally:
            report.log = session.worker.log
            report.timing = [timing_report(name, *times) for name, times in session.times_ms.items()]
        if problem:
            self._explain(problem)
            line, remedy = diagnose.remedy(problem.failure.cause or "", self._submission.source)
            raise Stopped(problem.verdict, problem.sentence, line=line, remedy=remedy)
        if session.computed:
            names = ", ".join(sorted(session.computed))
            self._find_ruling("torch-compute", f"torch computed with {names} while run_kernel was called")
        for group in plan.groups:
            (times, _) = session.times_ms.get(group.name, ([], []))
            if times and (too_fast := impossible(group, min(times), report.device)):
                raise Stopped(Verdict.JUDGE_ERROR, too_fast)
        if strangers := session.worker.strangers:
            raise Stopped(
                Verdict.RULE_VIOLATION,
                f"left {len(strangers)} process(es) of its own running ({', '.join(sorted(set(strangers)))}), expected "
                "none: a submission computes in run_kernel and nowhere else",
            )

    def _not_here(self, stop: Stopped) -> Stopped:
        """What stopped a run on a CPU that a GPU might take: the file's fault only if a stand-in refuses it as well."""
        if stop.verdict is not Verdict.COMPILE_ERROR or self._device != "cpu" or not self._plan.fit:
            return stop
        self._say("lowering the contest's cases")
        if not c500_fit(self._submission).lines:
            return stop
        said = stop.sentence.replace("TileLang could not compile the kernel: ", "")
        why = (
            "it cannot be judged on a machine with no GPU; that says nothing about the file, which TileLang can compile"
        )
        return Stopped(Verdict.JUDGE_ERROR, f"{why} for a GPU: {said}")

    def _check_fit(self) -> None:
        self._say("lowering the contest's cases")
        fit, report = self._fit.result() if self._fit else c500_fit(self._submission), self._report
        report.not_measured += fit.unknown
        report.compiler_messages = list(fit.messages)
        report.fit = list(fit.lines)
        # Where nothing is enforced, what the text has shown needs no repeating.
        said = {item.rule_id for item in report.findings if report.profile == "open"}
        for rule_id, what in fit.rulings:
            if rule_id not in said:
                self._find_ruling(rule_id, what)
        if fit.refused and report.profile == "contest":
            if fit.hopeless:
                raise Stopped(Verdict.COMPILE_ERROR, fit.refused)
            self.caution = f". But {fit.refused}"
        if fit.problems and report.profile == "contest":
            raise Stopped(Verdict.RESOURCE_ERROR, f"does not fit a C500: {'; '.join(fit.problems)}")
        report.fit += [f"does not fit: {problem}" for problem in fit.problems]

    def _try_variants(self, groups: tuple[Group, ...]) -> None:
        """The open questions, each tried once, after a crash in a fresh worker."""
        session: Session | None = None
        with contextlib.ExitStack() as held:
            for group in groups:
                # A file that cannot even be loaded any more has not been tried.
                robust: bool | None = None
                try:
                    session = session or held.enter_context(self._session(*groups))
                    robust = False
                    sentence = _what_is_wrong(next(session.calls(replace(group, name=f"variant: {group.name}"))))
                    robust = not sentence
                except Stopped as stop:
                    sentence = stop.sentence.replace("the contest's tensors", "the variant's tensors")
                    if not stop.alive:
                        held.close()
                        session = None
                tried = VariantReport(name=group.name, robust=robust, sentence=sentence or "right")
                self._report.variants.append(tried)

    def _explain(self, problem: Problem) -> None:
        """Draw the error map and, where no usual mistake fits, ask the file itself what it depends on."""
        if problem.verdict is not Verdict.WRONG_ANSWER:
            return
        made, name = problem.made, f"why: {problem.group.name}"
        self._report.error_map = error_map(made.inputs, made.out, made.comparison)
        for meaning, (of_group, of_call) in _EXPERIMENTS.items() if problem.failure.cause is None else ():
            alone = replace(made.call, change="everything", **of_call)
            asked = replace(problem.group, name=name, calls=(alone,), **of_group)
            try:
                with self._session(asked) as session:
                    if next(session.calls(asked)).comparison.passed:
                        problem.failure.cause = meaning
                        return
            except Stopped:
                return


def _what_is_wrong(made: Made) -> str:
    """What a variant's answer lacks, and its likely cause; nothing for a right one."""
    if made.edits or made.comparison.passed:
        return "; ".join(map(str, made.edits))
    rows, cause = int(made.comparison.wrong_rows.sum()), diagnose.cause_of([made])
    what = f"{rows} of {made.inputs.layout.num_rows} rows are wrong" if rows else ""
    return f"{what} ({cause})" if what and cause else cause or what


def timing_report(case: str, candidate_ms: list[float], baseline_ms: list[float]) -> TimingReport:
    """Medians of interleaved times, one a round, with the interval of the candidate's."""
    mine, other = (summarise(case, times, device="", cache="cold") for times in (candidate_ms, baseline_ms))
    return TimingReport(
        case=case, median_ms=mine.median_ms, low_ms=mine.low_ms, high_ms=mine.high_ms, baseline_ms=other.median_ms,
        samples=len(candidate_ms),
    )  # fmt: skip


def impossible(group: Group, time_ms: float, device_name: str) -> str | None:
    """Why a time cannot be true, or None: no call beats the device's specified roof on the work of its valid rows."""
    try:
        roof = devices.device(device_name).roof()
    except DataError:
        return None  # a device without figures has no floor
    least_ms = bound(work(group.case, group.calls[-1].sizes).whole, roof).time_ms
    # What the L2 cache holds of the hidden activation is counted as memory traffic, a few percent of the whole.
    if time_ms > 0.9 * least_ms:
        return None
    return (
        f"{group.name}: got {time_ms:.3f} ms, expected at least {least_ms:.3f} ms, which the {device_name} needs for "
        "the arithmetic and the bytes of the valid rows: the clock is not to be trusted, and the file with it"
    )
