"""What the organisers ruled about kernels, held against what a submission launches.

The text of a file shows what it may do; TileLang's own front end knows what it does: ``num_stages=x // x + 1`` is 2
there, an intrinsic has its name however it was spelled, and a kernel that no call launches is not counted.
"""

from moe_lab.judge.rules import broken
from moe_lab.model import tir
from moe_lab.model.roofline import balanced
from moe_lab.problem.contract import CASES
from moe_lab.problem.layout import GroupedLayout
from moe_lab.problem.submission import Submission


def rulings(submission: Submission) -> tuple[tuple[str, str], ...]:
    """Rules that the launches of the contest's cases break: ids with what was found, each once, in order.

    The file has passed the rules of the text. Its host code runs in the sandbox, in the reader's process. Raises
    SubmissionError for a file that cannot be followed, of which nothing is known then.
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


def _spelled(launch: tir.Launch) -> list[str]:
    """Everything that a launch uses, by the names of the rules."""
    names = [f"tilelang.{name}" for call in launch.calls for name in (call.name, call.text) if name]
    names += ["tilelang.import_source"] if launch.source else []
    names += [f"option.{name}={value}" for name, value in launch.pass_configs.items()]
    for loop in tir.every(launch.body, tir.Loop):
        names += [f"option.num_stages={loop.num_stages}", *(f"note.{note}" for note in loop.notes)]
    return names
