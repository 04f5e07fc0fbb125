"""moe_lab: learn, judge and tune fused Mixture-of-Experts kernels in TileLang.

Importing the package is light on purpose: no torch, no TileLang, no plotting. The names below are loaded when they
are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Where each public name lives; loading it is what costs.
_LAZY = {
    "CASES": "moe_lab.problem.contract",
    "Case": "moe_lab.problem.contract",
    "GroupedLayout": "moe_lab.problem.layout",
    "Inputs": "moe_lab.problem.inputs",
    "MoE": "moe_lab.speed.moe",
    "Submission": "moe_lab.problem.submission",
    "fused_moe": "moe_lab.speed.moe",
    "make_inputs": "moe_lab.problem.inputs",
}

__all__ = ["__version__", *sorted(_LAZY)]


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'moe_lab' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
