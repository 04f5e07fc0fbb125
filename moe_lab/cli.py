"""Command line: ``moe-lab`` or ``python -m moe_lab``.

Exit codes: 0 accepted or ok, 1 rejected, 2 usage or the tool's own failure. Every command imports what it needs when
it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import sys

import typer

from moe_lab.errors import MoeLabError

app = typer.Typer(
    name="moe-lab", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Learn, judge and tune fused Mixture-of-Experts kernels in TileLang.",
)  # fmt: skip


@app.callback()
def _app() -> None:
    """Learn, judge and tune fused Mixture-of-Experts kernels in TileLang."""


def main() -> None:
    """Run the command line; an error of ours is one sentence and exit code 2."""
    try:
        app()
    except MoeLabError as error:
        print(f"moe-lab: {error}", file=sys.stderr)
        raise SystemExit(2) from None
