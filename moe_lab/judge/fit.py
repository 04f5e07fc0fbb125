"""Whether the kernels fit a C500, from TileLang's own lowering of the contest's cases."""

from __future__ import annotations

from dataclasses import dataclass

from moe_lab import devices, tiles
from moe_lab.contract import CASES, Case
from moe_lab.errors import MoeLabError
from moe_lab.lowering import LoweredKernel, Lowering, lower_many
from moe_lab.submission import Submission

_DEVICE = "c500"
#: No public TileLang lowers for the C500. This target multiplies buffers by pipeline stages as the C500's compiler was
#: reported to, and does no warp specialisation.
_STAND_IN = "sm_80"
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class FitResult:
    """What the contest's cases need against what a C500 has.

    Attributes:
        lines: one sentence for each case.
        problems: sentences about what does not fit; empty if everything known fits.
        unknown: what could not be told, one sentence each.
    """

    lines: tuple[str, ...]
    problems: tuple[str, ...]
    unknown: tuple[str, ...]


def c500_fit(submission: Submission) -> FitResult:
    """Lower every contest case and hold it against the C500's limits.

    The submission's host code runs in a child process, outside the sandbox: call this for files that passed the rules.

    Args:
        submission: what to lower.
    """
    problems: list[str] = []
    unknown: list[str] = []
    alike = _alike(submission)
    try:
        answers = lower_many([Lowering(submission, cases[0], _STAND_IN) for cases, _ in alike], timeout_s=_TIMEOUT_S)
    except MoeLabError as error:
        return FitResult((), (), (f"resources on a C500: {error}",))
    found: dict[str, list[str]] = {}
    for (cases, registers), answer in zip(alike, answers, strict=True):
        names = [case.name for case in cases]
        if isinstance(answer, MoeLabError):
            unknown.append(f"resources on a C500, {', '.join(names)}: {answer}")
            continue
        parts = []
        for number, kernel in enumerate(answer):
            held = registers[number] if len(registers) == len(answer) else None
            problems += [f"{', '.join(names)}, launch {number + 1}: {reason}" for reason in _reasons(kernel)]
            parts.append(f"launch {number + 1} {_sentence(kernel, held)}")
        found.setdefault("; ".join(parts), []).extend(names)
    lines = tuple(f"{', '.join(names)}: {text} (lowered for {_STAND_IN}, a stand-in)" for text, names in found.items())
    return FitResult(lines, tuple(problems), tuple(unknown))


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


def _reasons(kernel: LoweredKernel) -> list[str]:
    device = devices.device(_DEVICE)
    reasons = []
    if kernel.shared_bytes > device.shared_per_block_bytes:
        reasons.append(
            f"needs {kernel.shared_bytes} bytes of shared memory, a block of the {device.title} has "
            f"{device.shared_per_block_bytes}: make a tile smaller, or keep fewer copies in flight"
        )
    most = device.threads_per_block or device.threads_per_processor
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
