"""The open questions of the contract, each tried once after the verdict and never part of it."""

from __future__ import annotations

import random
from dataclasses import replace

from moe_lab.judge import diagnose
from moe_lab.judge.plan import STATE_SIZES, Call, Garbage, Group
from moe_lab.judge.process import Limits
from moe_lab.judge.session import Made, Progress, Session, Stopped
from moe_lab.judge.verdict import VariantReport
from moe_lab.problem.contract import VARIANTS
from moe_lab.problem.submission import Submission

#: Sizes that the contest does not use, to say how far the file reaches.
_OTHER_SHAPES = ((192, 320), (136, 200))


def variant_groups(seed: int) -> dict[str, Group]:
    """One group for each variant, by name.

    Args:
        seed: of the values.
    """
    rng = random.Random(seed)
    groups = {}
    for name, variant in VARIANTS.items():
        garbage: Garbage = "nan" if variant.workspace_fill == "garbage" else "untouched"
        groups[name] = Group(name, 256, 256, (Call(STATE_SIZES, rng.getrandbits(31)),), garbage, variant)
    for hidden, intermediate in _OTHER_SHAPES:
        name = f"hidden {hidden}, intermediate {intermediate}"
        groups[name] = Group(name, hidden, intermediate, (Call(STATE_SIZES, rng.getrandbits(31)),))
    return groups


def run_variants(
    submission: Submission, seed: int, limits: Limits, *, sandboxed: bool, say: Progress, device: str
) -> list[VariantReport]:
    """Try every variant, each after a crash in a fresh worker.

    Args:
        submission: an accepted one.
        seed: of the values.
        limits: of the worker.
        sandboxed: whether the run-time sandbox applies.
        say: progress.
        device: torch device of the kernels.
    """
    left = variant_groups(seed)
    reports: list[VariantReport] = []
    while left:
        try:
            with Session(
                submission, tuple(left.values()), limits, sandboxed=sandboxed, say=say, device=device
            ) as session:
                alive = True
                while left and alive:
                    name, group = left.popitem()
                    report, alive = _tried(session, name, group)
                    reports.append(report)
        except Stopped as stop:
            # The file cannot even be loaded any more, which the cases before did not show.
            reports += [VariantReport(name=name, robust=None, sentence=stop.sentence) for name in left]
            break
    order = list(variant_groups(seed))
    return sorted(reports, key=lambda report: order.index(report.name))


def _tried(session: Session, name: str, group: Group) -> tuple[VariantReport, bool]:
    """One variant, and whether the worker survived it."""
    try:
        made = next(session.calls(replace(group, name=f"variant: {name}")))
    except Stopped as stop:
        return VariantReport(name=name, robust=False, sentence=stop.sentence), stop.alive
    return _report(name, made), True


def _report(name: str, made: Made) -> VariantReport:
    if made.comparison.passed and not made.edits:
        return VariantReport(name=name, robust=True, sentence="right")
    if made.edits:
        return VariantReport(name=name, robust=False, sentence="; ".join(map(str, made.edits)))
    rows = int(made.comparison.wrong_rows.sum())
    what = f"{rows} of {made.inputs.layout.num_rows} rows are wrong" if rows else ""
    cause = diagnose.cause_of([made])
    sentence = f"{what} ({cause})" if what and cause else cause or what
    return VariantReport(name=name, robust=False, sentence=sentence)
