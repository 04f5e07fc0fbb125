"""Whether the kernels fit a C500, from TileLang's own lowering of the contest's cases."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from moe_lab.judge.arena import private_folder
from moe_lab.machine import devices
from moe_lab.model import tiles
from moe_lab.model.lowering import LoweredKernel, Lowering, LoweringError, lower_many
from moe_lab.problem.contract import CASES, Case
from moe_lab.problem.errors import MoeLabError
from moe_lab.problem.submission import Submission

_DEVICE = "c500"
#: No public TileLang lowers for the C500. This target multiplies buffers by pipeline stages as the C500's compiler was
#: reported to, and does no warp specialisation.
_STAND_IN = "sm_80"
_TIMEOUT_S = 120.0
#: The file's text, and what a compiler writes beside it.
_SCRATCH_BYTES = 16 << 20
_SAID_CHARS = 240


@dataclass(frozen=True)
class FitResult:
    """What the contest's cases need against what a C500 has.

    Attributes:
        lines: one sentence for each case.
        problems: sentences about what does not fit; empty if everything known fits.
        unknown: what could not be told and why, one clause each.
        messages: what the compiler said about that, in full and each once.
    """

    lines: tuple[str, ...]
    problems: tuple[str, ...]
    unknown: tuple[str, ...]
    messages: tuple[str, ...] = ()


def c500_fit(submission: Submission) -> FitResult:
    """Lower every contest case and hold it against the C500's limits.

    The submission's host code runs in a child process, outside the sandbox: call this for files that passed the rules.

    Args:
        submission: what to lower.
    """
    alike = _alike(submission)
    try:
        with private_folder(_SCRATCH_BYTES) as folder:
            asked = [Lowering(submission, cases[0], _STAND_IN) for cases, _ in alike]
            answers = lower_many(asked, timeout_s=_TIMEOUT_S, folder=folder)
    except MoeLabError as error:
        return FitResult((), (), (f"resources on a C500: {error}",))
    # What is equal for several cases is said once.
    found: dict[str, list[str]] = {}
    problems: dict[str, list[str]] = {}
    unknown: dict[str, list[str]] = {}
    messages: dict[str, None] = {}
    for (cases, registers), answer in zip(alike, answers, strict=True):
        names = [case.name for case in cases]
        if isinstance(answer, LoweringError):
            unknown.setdefault(_why(answer), []).extend(names)
            messages.setdefault(answer.message)
            continue
        parts = []
        for number, kernel in enumerate(answer):
            held = registers[number] if len(registers) == len(answer) else None
            for reason in _reasons(kernel):
                problems.setdefault(f"launch {number + 1}: {reason}", []).extend(names)
            parts.append(f"launch {number + 1} {_sentence(kernel, held)}")
        found.setdefault("; ".join(parts), []).extend(names)
    return FitResult(
        tuple(f"{', '.join(names)}: {text} (lowered for {_STAND_IN}, a stand-in)" for text, names in found.items()),
        tuple(f"{', '.join(names)}, {text}" for text, names in problems.items()),
        tuple(f"resources on a C500 ({', '.join(names)}), because {text}" for text, names in unknown.items()),
        tuple(messages),
    )


def _alike(submission: Submission) -> list[tuple[list[Case], list[int | None]]]:
    """Cases that ask for the same according to the file's text, and the registers of each launch.

    A case whose text leaves something open stands alone: only lowering tells what it asks for.
    """
    groups: dict[object, tuple[list[Case], list[int | None]]] = {}
    for case in CASES.values():
        try:
            found = tiles.resources(submission, case)
        except MoeLabError:
            groups[case] = ([case], [])
            continue
        figures = tuple((kernel.shared_bytes, kernel.threads, kernel.fragment_registers) for kernel in found.kernels)
        known = not found.unknown and all(None not in figure for figure in figures)
        cases, _ = groups.setdefault(figures if known else case, ([], [registers for _, _, registers in figures]))
        cases.append(case)
    return list(groups.values())


def _why(error: LoweringError) -> str:
    """Why a case could not be lowered, for people."""
    target = f"{error.target}, the stand-in for the C500"
    if error.feature:
        return f"{error.name} uses {error.feature}, which TileLang does not have for {target}"
    said = textwrap.shorten(error.said, _SAID_CHARS, placeholder=" ... (the JSON report holds all of it)")
    return f"{error.name} cannot be lowered for {target}: {said}"


def _reasons(kernel: LoweredKernel) -> list[str]:
    device = devices.device(_DEVICE)
    reasons = []
    if kernel.shared_bytes > device.shared_per_block_bytes:
        reasons.append(
            f"needs {kernel.shared_bytes} bytes of shared memory, a block of the {device.title} has "
            f"{device.shared_per_block_bytes}: make a tile smaller, or keep fewer copies in flight"
        )
    most = device.most_threads_per_block
    if kernel.threads > most:
        reasons.append(f"has {kernel.threads} threads a block, the {device.title} takes {most}")
    return reasons


def _sentence(kernel: LoweredKernel, registers: int | None) -> str:
    device = devices.device(_DEVICE)
    text = f"takes {kernel.shared_bytes} of {device.shared_per_block_bytes} bytes shared, {kernel.threads} threads"
    if kernel.threads % device.lanes:
        text += f" (no multiple of its {device.lanes} lanes)"
    if registers is not None:
        text += f", at least {registers} of {device.registers_per_thread} registers a thread"
        if registers > device.registers_per_thread:
            text += " (the rest spills to memory)"
    return text
