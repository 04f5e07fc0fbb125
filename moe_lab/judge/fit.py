"""Whether the kernels fit a C500, from TileLang's own lowering of the contest's cases."""

import ast
import contextlib
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from moe_lab.judge.rulings import rulings
from moe_lab.machine import devices
from moe_lab.model import tiles
from moe_lab.model.lowering import LoweredKernel, Lowering, LoweringError, lower_many
from moe_lab.problem.contract import CASES, Case
from moe_lab.problem.errors import MoeLabError
from moe_lab.problem.submission import Submission

#: No public TileLang lowers for the C500. This target multiplies buffers by pipeline stages as the C500's compiler was
#: reported to, and does no warp specialisation.
_STAND_IN = "sm_80"
#: A relative of the C500. What neither of the two lowers, no C500 is expected to run.
_RELATIVE = "gfx90a"
_TIMEOUT_S = 120.0
_SAID_CHARS = 240


@dataclass(frozen=True)
class FitResult:
    """What the contest's cases need against what a C500 has."""

    lines: tuple[str, ...] = ()  # one sentence for each case
    problems: tuple[str, ...] = ()  # sentences about what does not fit; empty if everything known fits
    unknown: tuple[str, ...] = ()  # what could not be told and why, one clause each
    messages: tuple[str, ...] = ()  # what the compiler said about that, in full and each once
    rulings: tuple[tuple[str, str], ...] = ()  # rules that the kernels break, by id, and what was found
    refused: str = ""  # what TileLang's compiler says against it, if a stand-in cannot have it
    hopeless: bool = False  # neither stand-in can


def c500_fit(submission: Submission) -> FitResult:
    """Lower every contest case and hold it against the C500's limits.

    The submission's host code runs in a child process, outside the sandbox: call this for files that passed the rules.
    """
    alike, unknown = _alike(submission), list[str]()
    ruled: tuple[tuple[str, str], ...] = ()
    try:
        ruled = rulings(submission)
    except MoeLabError as error:
        unknown.append(f"the organisers' rulings about kernels, because {error}")
    try:
        asked = [Lowering(submission, cases[0], _STAND_IN) for cases, _ in alike]
        answers = lower_many(asked, timeout_s=_TIMEOUT_S)
    except MoeLabError as error:
        return FitResult(unknown=(*unknown, f"resources on a C500: {error}"), rulings=ruled)
    # What is equal for several cases is said once: from the words to the names of the cases.
    lines, problems, reasons = (defaultdict[str, list[str]](list) for _ in range(3))
    messages: dict[str, None] = {}
    for (cases, registers), answer in zip(alike, answers, strict=True):
        names = [case.name for case in cases]
        if isinstance(answer, LoweringError):
            reasons[_why(answer)] += names
            messages[answer.message] = None
            continue
        held = registers if len(registers) == len(answer) else [None] * len(answer)
        launches = list(enumerate(zip(answer, held, strict=True), 1))
        lines["; ".join(f"launch {number} {_sentence(*launch)}" for number, launch in launches)] += names
        for number, (kernel, _) in launches:
            for reason in _reasons(kernel):
                problems[f"launch {number}: {reason}"] += names
    refused = next((each for each in answers if isinstance(each, LoweringError) and each.refused), None)
    words, hopeless = _refusal(submission, asked[answers.index(refused)].case, refused) if refused else ("", False)
    unknown += [f"resources on a C500 ({', '.join(names)}), because {text}" for text, names in reasons.items()]
    return FitResult(
        tuple(f"{', '.join(names)}: {text} (lowered for {_STAND_IN}, a stand-in)" for text, names in lines.items()),
        tuple(f"{', '.join(names)}, {text}" for text, names in problems.items()),
        tuple(unknown),
        tuple(messages),
        ruled,
        words,
        hopeless,
    )


def _refusal(submission: Submission, case: Case, error: LoweringError) -> tuple[str, bool]:
    """The words for what one stand-in cannot have, and whether the other cannot have it either."""
    (other,) = lower_many([Lowering(submission, case, _RELATIVE)], timeout_s=_TIMEOUT_S)
    hopeless = isinstance(other, LoweringError) and other.refused
    which = f"neither for {_STAND_IN} nor for {_RELATIVE}" if hopeless else f"not for {_STAND_IN}, but for {_RELATIVE}"
    gemms = [
        str(node.lineno)
        for node in ast.walk(submission.tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(".gemm")
        and re.search("gemm|warp", error.said)
    ]
    where = f" (T.gemm in line {', '.join(gemms)})" if gemms else ""
    return f"TileLang can compile it {which}, the stand-ins for the C500{where}: {error.said}", hopeless


def _alike(submission: Submission) -> list[tuple[list[Case], list[int | None]]]:
    """Cases that ask for the same according to the file's text, and the registers of each launch.

    A case whose text leaves something open stands alone: only lowering tells what it asks for.
    """
    groups: dict[object, tuple[list[Case], list[int | None]]] = {}
    for case in CASES.values():
        key: object = case
        registers: list[int | None] = []
        with contextlib.suppress(MoeLabError):
            found = tiles.resources(submission, case)
            figures = tuple(
                (kernel.shared_bytes, kernel.threads, kernel.fragment_registers) for kernel in found.kernels
            )
            registers = [figure[2] for figure in figures]
            if not (found.unknown or any(None in figure for figure in figures)):
                key = figures
        groups.setdefault(key, ([], registers))[0].append(case)
    return list(groups.values())


def _why(error: LoweringError) -> str:
    """Why a case could not be lowered, for people."""
    if error.feature:
        return f"{error}, the stand-in for the C500"
    said = textwrap.shorten(error.said, _SAID_CHARS, placeholder=" ... (the JSON report holds all of it)")
    return f"{error.name} cannot be lowered for {error.target}, the stand-in for the C500: {said}"


def _reasons(kernel: LoweredKernel) -> Iterator[str]:
    """Why a launch does not fit."""
    c500 = devices.device("c500")
    if kernel.shared_bytes > c500.shared_per_block_bytes:
        yield (
            f"needs {kernel.shared_bytes} bytes of shared memory, a block of the {c500.title} has "
            f"{c500.shared_per_block_bytes}: make a tile smaller, or keep fewer copies in flight"
        )
    if kernel.threads > c500.threads_per_block:
        yield f"has {kernel.threads} threads per block, the {c500.title} takes {c500.threads_per_block}"


def _sentence(kernel: LoweredKernel, registers: int | None) -> str:
    c500 = devices.device("c500")
    text = f"takes {kernel.shared_bytes} of {c500.shared_per_block_bytes} bytes shared, {kernel.threads} threads"
    if kernel.threads % c500.lanes:
        text += f" (no multiple of its {c500.lanes} lanes)"
    if registers is None:
        return text
    spills = " (the rest spills to memory)" if registers > c500.registers_per_thread else ""
    return f"{text}, at least {registers} of {c500.registers_per_thread} registers per thread{spills}"
