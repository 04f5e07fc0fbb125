"""The local judge.

``judge(submission)`` runs one submission in a fresh process and compares everything it writes with a truth that this
process never holds.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {"Report": "moe_lab.judge.verdict", "Verdict": "moe_lab.judge.verdict", "judge": "moe_lab.judge.local"}

__all__ = ["Report", "Verdict", "judge"]


def __getattr__(name: str) -> Any:
    """Load a public name on first use: the worker needs none of them, and less in it is better."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'moe_lab.judge' has no attribute {name!r}; it has {', '.join(__all__)}")
