"""What the organisers ruled about kernels, held against what a submission launches.

The text of a file shows what it may do; TileLang's own front end knows what it does. ``num_stages=x // x + 1`` is 2
there, an intrinsic has its name however it was spelled, and a kernel that no call launches is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_lab.judge.rules import broken
from moe_lab.model import tir
from moe_lab.model.roofline import balanced
from moe_lab.problem.contract import CASES
from moe_lab.problem.layout import GroupedLayout
from moe_lab.problem.submission import Submission


def rulings(submission: Submission) -> tuple[tuple[str, str], ...]:
    """Rules that the launches of the contest's cases break. Host code runs in the sandbox, in the reader's process.

    Args:
        submission: a file that passed the rules of the text.

    Returns:
        Rule ids with what was found, each once, in order.

    Raises:
        SubmissionError: for a file that cannot be followed, of which nothing is known then.
    """
    found: dict[tuple[str, str], None] = {}
    for case in CASES.values():
        layout = GroupedLayout(balanced(case))
        launches = tir.launches(submission, case, layout, load="moe_lab.judge.sandbox:load")
        for number, launch in enumerate(launches, 1):
            for name in _spelled(launch):
                for rule, level, said in broken(name, "kernel"):
                    if level == "violation":
                        found[rule.id, f"launch {number} of {launch.name or 'a kernel'}: {said}"] = None
    return tuple(found)


def _spelled(launch: tir.Launch) -> Iterator[str]:
    """Everything that a launch uses, by the names of the rules."""
    for call in launch.calls:
        yield f"tilelang.{call.name}"
        if call.text:
            yield f"tilelang.{call.text}"
    if launch.source:
        yield "tilelang.import_source"
    for name, value in launch.pass_configs.items():
        yield f"option.{name}={value}"
    for loop in tir.every(launch.body, tir.Loop):
        yield f"option.num_stages={loop.num_stages}"
        yield from (f"note.{note}" for note in loop.notes)
