"""The local judge: ``judge(submission)`` gives a :class:`Report` whose ``verdict`` is one of nine words.

README.md says what happens in which order, what is defended and what is not.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_lab.judge.local import judge
    from moe_lab.judge.verdict import Report, Verdict

_HOMES = {"Report": "verdict", "Verdict": "verdict", "judge": "local"}

__all__ = ["Report", "Verdict", "judge"]


def __getattr__(name: str) -> Any:
    """Load a public name on first use: the worker needs none of them, and less in it is better."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"moe_lab.judge.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'moe_lab.judge' has no attribute {name!r}; it has {', '.join(__all__)}")
