"""The open questions of the contract, each tried once after the verdict and never part of it."""

from __future__ import annotations

import random
from dataclasses import replace

from moe_lab.contract import VARIANTS
from moe_lab.judge import diagnose
from moe_lab.judge.plan import Call, Garbage, Group
from moe_lab.judge.process import Limits
from moe_lab.judge.session import Made, Progress, Session, Stopped
from moe_lab.judge.verdict import VariantReport
from moe_lab.submission import Submission

#: One expert empty, one an exact multiple of 128 (what the padding rules disagree on), and a partly filled block.
_SIZES = (128, 0, 129, 5)
#: Sizes that the contest does not use, to say how far the file reaches.
_OTHER_SHAPES = ((192, 320), (136, 200))

_ASKS = {
    "padding rule ceil((n+1)/128)": "an exact multiple of 128 and an empty expert get one more block, all padding",
    "offsets of length E": "the total is left out of both offset arrays",
    "route weights in fp16": "the problem page says fp16, accepted files take fp32",
    "surplus block map": "the block map is longer than P/128 and its surplus names the last expert",
    "compact storage": "tokens and out hold N rows, without padding",
    "out arrives as NaN": "nothing zeroes out before the call",
    "out holds an older answer": "nothing zeroes out before the call",
    "workspace arrives as garbage": "torch.empty returns NaN bit patterns",
}


def variant_groups(seed: int) -> dict[str, Group]:
    """One group for each variant, by name.

    Args:
        seed: of the values.
    """
    rng = random.Random(seed)
    groups = {}
    for name, variant in VARIANTS.items():
        garbage: Garbage = "nan" if variant.workspace_fill == "garbage" else "untouched"
        groups[name] = Group(name, 256, 256, (Call(_SIZES, rng.getrandbits(31)),), garbage, variant)
    for hidden, intermediate in _OTHER_SHAPES:
        name = f"hidden {hidden}, intermediate {intermediate}"
        groups[name] = Group(name, hidden, intermediate, (Call(_SIZES, rng.getrandbits(31)),))
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
    reports: dict[str, VariantReport] = {}
    while left:
        name = next(iter(left))
        try:
            with Session(
                submission, tuple(left.values()), limits, sandboxed=sandboxed, say=say, device=device
            ) as session:
                for name in list(left):
                    group = replace(left[name], name=f"variant: {name}")
                    try:
                        made = next(session.calls(group))
                    finally:
                        del left[name]
                    reports[name] = _report(name, made)
        except Stopped as stop:
            left.pop(name, None)
            reports[name] = VariantReport(name=name, robust=False, sentence=_sentence(name, stop.sentence))
    return list(reports.values())


def _report(name: str, made: Made) -> VariantReport:
    if made.comparison.passed and not made.edits:
        return VariantReport(name=name, robust=True, sentence=_sentence(name, "right"))
    if made.edits:
        return VariantReport(name=name, robust=False, sentence=_sentence(name, "; ".join(map(str, made.edits))))
    rows = int(made.comparison.wrong_rows.sum())
    what = f"{rows} of {made.inputs.layout.num_rows} rows are wrong" if rows else ""
    cause = diagnose.cause_of([made])
    sentence = f"{what} ({cause})" if what and cause else cause or what
    return VariantReport(name=name, robust=False, sentence=_sentence(name, sentence))


def _sentence(name: str, outcome: str) -> str:
    asked = f"{_ASKS[name]}: " if name in _ASKS else ""
    return f"{asked}{outcome}"
