"""moe_lab: learn, judge and tune fused Mixture-of-Experts kernels in TileLang.

Importing the package is light on purpose: no torch, no TileLang, no plotting. The names below are loaded when they
are first used. ``moe_lab.judge`` is the room; its function is ``moe_lab.judge.judge``.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

#: What notebooks and programs use most, and where it lives; loading it is what costs.
_NAMES = {
    "ARGUMENTS BLOCK_TOKEN CASES Case": "problem.contract",
    "Inputs group_sizes make_inputs": "problem.inputs",
    "GroupedLayout permute unpermute": "problem.layout",
    "fused_truth": "problem.reference",
    "routing": "problem.routings",
    "Submission": "problem.submission",
    "STEPS step": "steps",
    "device": "machine.devices",
    "balanced bound work": "model.roofline",
    "Report Verdict": "judge.verdict",
    "baseline_times_ms score": "judge.score",
    "MoE fused_moe": "speed.moe",
    "show": "lesson.display",
    "check predict": "lesson.exercises",
}
_HOMES = {name: f"{__name__}.{home}" for names, home in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'moe_lab' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
