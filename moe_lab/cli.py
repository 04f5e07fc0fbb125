"""Command line: ``moe-lab`` or ``python -m moe_lab``.

Exit codes: 0 accepted or ok, 1 rejected, 2 usage or the tool's own failure. Every command imports what it needs when
it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import click
import typer

from moe_lab.errors import MoeLabError

#: "contest": every rule, ruling and C500 limit; "open": rulings and C500 limits are advice (kernels for other cards).
ProfileOption = Annotated[
    str,
    typer.Option(
        "--profile", click_type=click.Choice(["contest", "open"]), help="which rules reject, which only advise"
    ),
]

app = typer.Typer(
    name="moe-lab", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Learn, judge and tune fused Mixture-of-Experts kernels in TileLang.",
)  # fmt: skip


@app.callback()
def _app() -> None:
    """Learn, judge and tune fused Mixture-of-Experts kernels in TileLang."""


@app.command()
def export(
    notebook: Annotated[Path, typer.Argument(help="notebook whose cell tagged 'submission' is exported")],
    output: Annotated[Path, typer.Option("-o", "--output", help="file to write")] = Path("submission.py"),
    profile: ProfileOption = "contest",
) -> None:
    """Write the final cell of a notebook to a file, byte for byte, without running it."""
    from moe_lab.export import export as write
    from moe_lab.export import submission_cell
    from moe_lab.submission import Submission

    submission = Submission(submission_cell(notebook), output.name)
    path = write(submission, output, profile)  # type: ignore[arg-type]
    print(f"wrote {path} ({len(submission.source.encode())} bytes, sha256 {submission.source_hash[:12]})")


def main() -> None:
    """Run the command line; an error of ours is one sentence and exit code 2."""
    try:
        app()
    except MoeLabError as error:
        print(f"moe-lab: {error}", file=sys.stderr)
        raise SystemExit(2) from None
