"""The ladder: one submission a file, one idea apart.

Every step is a complete ``submission.py``. The diff between a step and its predecessor is the lesson, so each changes
one thing. Two branches leave the baseline: ``c500`` obeys the contest's rules and stays inside 64 KiB of shared
memory; ``hopper`` may use what the contest forbids and is measured on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_lab.problem.contract import Profile
from moe_lab.problem.errors import SubmissionError
from moe_lab.problem.submission import Submission

Branch = Literal["base", "c500", "hopper"]


@dataclass(frozen=True)
class Step:
    """One rung.

    Attributes:
        name: file name without ``.py``.
        branch: "base" for the baseline both branches start from, "c500" or "hopper".
        story: the one idea, in a line.
        after: name of the step it differs from by that idea; None for the baseline.
        profile: judge profile it must be accepted under, "contest" or "open".
        recommended: True for the step of its branch that a user of that card should start from.
    """

    name: str
    branch: Branch
    story: str
    after: str | None
    profile: Profile = "contest"
    recommended: bool = False

    @property
    def path(self) -> Path:
        """The file of this step."""
        return Path(__file__).with_name(f"{self.name}.py")

    def submission(self) -> Submission:
        """The step as a submission."""
        return Submission.from_file(self.path)

    def diff(self) -> str:
        """Unified diff from the predecessor to this step; empty for the baseline."""
        return step(self.after).diff(self.submission()) if self.after else ""


#: All steps in reading order, by name.
STEPS: dict[str, Step] = {
    entry.name: entry
    for entry in (
        Step("s0_baseline", "base", "two launches, 128x128x128 tiles, token tile in registers, one stage", None),
        Step("c1_one_weight_tile", "c500", "gate and up share one weight tile: half the shared memory", "s0_baseline"),
        Step("c2_shared_tokens", "c500", "the token tile moves from registers to shared memory", "c1_one_weight_tile"),
        Step("c3_k64", "c500", "64 columns of the reduction at a time: two blocks on a processor", "c2_shared_tokens"),
        Step("c4_skip_empty", "c500", "empty blocks skip all work, padding rows are written as 0", "c3_k64"),
        Step("c5_column_panels", "c500", "column panels of 4 blocks: neighbours share weight tiles", "c4_skip_empty"),
        Step("c6_copy_width", "c500", "weight tiles are copied 16 bytes a lane at a time", "c5_column_panels"),
        Step("c7_prefetch_up", "c500", "up weights travel while gate is multiplied: no wait", "c6_copy_width"),
        Step("c8_assume", "c500", "promised bounds of the expert number: no check on a weight load", "c7_prefetch_up"),
        Step("c9_memory_guards", "c500", "an option: memory guards off, with its published risk", "c8_assume"),
        Step("c10_shared_layout", "c500", "an option: swizzled shared tiles", "c9_memory_guards", recommended=True),
        Step("h1_pipelined", "hopper", "shared operands, 4 tiles in flight, copying warps", "s0_baseline", "open"),
        Step("h2_expert_tiles", "hopper", "tiles of one expert's tokens, listed on the device", "h1_pipelined", "open"),
        Step("h3_swapped", "hopper", "weights on the left: token tiles of any height", "h2_expert_tiles", "open"),
        Step("h4_persistent", "hopper", "one launch that stays, warps told apart by hand", "h3_swapped", "open"),
        Step("h5_heights", "hopper", "each tile at the height that fits it", "h4_persistent", "open"),
        Step(
            "h6_matrix_stores",
            "hopper",
            "one epilogue for all heights, turned by matrix stores",
            "h5_heights",
            "open",
            recommended=True,
        ),
        Step("h7_any_shape", "hopper", "any H and I of 64, busy and quiet experts mixed", "h6_matrix_stores", "open"),
    )
}


def step(name: str) -> Submission:
    """The submission of a step.

    Args:
        name: a key of :data:`STEPS`, such as "s0_baseline", or its part before the underscore, such as "s0".

    Raises:
        SubmissionError: for a name that is no step.
    """
    return find(name).submission()


def find(name: str) -> Step:
    """The step of a name; see :func:`step`.

    Raises:
        SubmissionError: for a name that is no step.
    """
    matches = [entry for entry in STEPS.values() if name in (entry.name, entry.name.split("_")[0])]
    if len(matches) != 1:
        raise SubmissionError(f"got step {name!r}, expected one of {', '.join(STEPS)}")
    return matches[0]


def predecessors(name: str) -> list[Step]:
    """The chain from the baseline to a step, both included.

    Raises:
        SubmissionError: for a name that is no step.
    """
    entry: Step | None = find(name)
    chain: list[Step] = []
    while entry is not None:
        chain.insert(0, entry)
        entry = STEPS[entry.after] if entry.after else None
    return chain
