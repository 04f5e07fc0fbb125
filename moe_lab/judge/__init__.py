"""The local judge: ``judge(submission)`` gives a :class:`Report` whose ``verdict`` is one of nine words.

What happens, in this order:

1. The text is read, parsed and held against the rules (:mod:`.rules`). A violation ends the run.
2. A fresh process is started for the submission (:mod:`.process`, :mod:`.worker`) and loads it under the sandbox
   (:mod:`.sandbox`).
3. The judge draws the inputs of each call (:mod:`.plan`) and hands their bytes to that process through shared memory
   (:mod:`.arena`), which calls ``run_kernel`` on them. Truth, comparison (:mod:`.compare`) and diagnosis
   (:mod:`.diagnose`) stay with the judge: the worker never holds an answer, and nothing it says can turn a wrong
   ``out`` into a right one. With a GPU, further processes compile for the cases to come (:mod:`.ahead`).
4. Whether the kernels fit a C500 (:mod:`.fit`), in one more process beside the calls; what happens under the contract's
   open questions; and, with a GPU, times beside the baseline.

What is defended, each with a file in ``tests/exploits`` that must be caught: answers, weights or routing kept from an
earlier call, whole or in part, by shape, address, sample, sum or content; computing in the first calls, before the
timed ones or on poisoned buffers only; a branch for small sizes (a CPU calls the contest's own H, I and E with one
block of rows, and its largest case's rows and experts with small H and I; a GPU calls the whole cases); edited
inputs; writes outside ``out``; values that only padding, old or unwritten memory explains; answers that only the
contest's loose tolerance passes; forged results and printed verdicts; endless loops, crashes, floods of output,
memory or files; processes and threads left behind.

What is not defended: this is no security boundary. The submission runs as the same user. The sandbox is a replica of
the contest's rules; text that gets around it can read and write this user's files, among them TileLang's cache of
compiled kernels and the judge itself, reach other processes, or use the network. On a CPU a file may still behave
differently when the contest's rows meet its H and I, for an expert that the judge did not pick there, or where a GPU
is; only a GPU run or the contest shows that. A thread or stream that writes ``out`` after ``run_kernel`` has returned
and before the judge looks counts as written. Results of a repeated input, or a part of them, that are kept behind
kernel launches do not show, nor does a file that is honest for more calls of one shape than the judge makes, nor a
process that leaves both its session and its environment. Races that need a GPU do not happen on a CPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_lab.judge.local import judge
    from moe_lab.judge.verdict import Report, Verdict

_LAZY = {"Report": "moe_lab.judge.verdict", "Verdict": "moe_lab.judge.verdict", "judge": "moe_lab.judge.local"}

__all__ = ["Report", "Verdict", "judge"]


def __getattr__(name: str) -> Any:
    """Load a public name on first use: the worker needs none of them, and less in it is better."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'moe_lab.judge' has no attribute {name!r}; it has {', '.join(__all__)}")
