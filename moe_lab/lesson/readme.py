"""The parts of README.md that are made and not written: between markers, from data and from the notebooks.

python -m moe_lab.lesson.readme      write them anew (part of make notebooks)
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

from moe_lab import judge
from moe_lab.lesson.export import TAG
from moe_lab.machine.timing import Measurement
from moe_lab.problem.errors import DataError
from moe_lab.problem.submission import write_atomic
from moe_lab.speed import bench

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
_FINAL = ROOT / "notebooks" / "08_your_submission.ipynb"


def verdict() -> str:
    """The verdict on the final cell, as the committed notebook shows it, up to the open questions.

    Raises:
        DataError: if the notebook is not executed.
    """
    cells = json.loads(_FINAL.read_text(encoding="utf-8"))["cells"]
    (cell,) = (cell for cell in cells if TAG in cell["metadata"].get("tags", []))
    texts = ["".join(output.get("data", {}).get("text/plain", "")) for output in cell["outputs"]]
    shown = next((text for text in texts if text.startswith("accepted")), None)
    if shown is None:
        raise DataError(f"got no accepted verdict in {_FINAL.name}, expected one: run `make notebooks`")
    lines = [line.rstrip() for line in shown.partition("open question")[0].splitlines()]
    return "```text\n" + "\n".join(lines).strip() + "\n```"


def judged() -> str:
    """What the judge checks and what it does not defend: its own docstring after the first paragraph."""
    text = (inspect.getdoc(judge) or "").partition("\n\n")[2].strip().replace("``", "`")
    return re.sub(r":\w+:`\.?([\w.]+)`", r"`\1`", text)


def speed() -> str:
    """The runs that stand for the ladder: a table of every step and peer, then the summary's lines.

    Raises:
        DataError: if no such run is recorded.
    """
    said = "Over all recorded runs, each ratio within one run: the median, in brackets the least and the greatest."
    return "\n".join([*_table(bench.summary_rows()), "", said, "", "```text", *bench.summary(), "```"])


#: What the calls of a run found in the L2 cache.
_STATES = {
    "cold": "weights cold in L2",
    "dirty": "weights cold in L2, which was full of written lines that had to go to memory first",
}


def _table(rows: list[Measurement]) -> list[str]:
    first = rows[0]
    cases = sorted({row.case for row in rows})
    names = sorted({row.name for row in rows if row.kind != "roof"}, key=lambda name: _time(rows, name, cases[-1]))
    return [
        f"Milliseconds on one {first.device}, medians of {first.rounds} calls in turns with {_STATES[first.cache]}, "
        f"routing `{first.routing}`; each case in one run ({first.recorded_at[:10]}, {_stack(first)}, "
        f"driver {first.driver}). Steps compute in fp16, peers in the dtype they name.",
        "",
        f"| | {' | '.join(cases)} |",
        "|---|" + "---:|" * len(cases),
        *(f"| {_label(rows, name)} | {' | '.join(_cell(rows, name, case) for case in cases)} |" for name in names),
        "| *bound: max of useful FLOPs and compulsory bytes at the roofs of that run* | "
        + " | ".join(f"*{bench.bound_ms([row for row in rows if row.case == case]):.3f}*" for case in cases)
        + " |",
    ]


def _time(rows: list[Measurement], name: str, case: str) -> float:
    return next((row.median_ms for row in rows if row.name == name and row.case == case), float("inf"))


def _cell(rows: list[Measurement], name: str, case: str) -> str:
    time_ms = _time(rows, name, case)
    return f"{time_ms:.3f}" if time_ms != float("inf") else "-"


def _label(rows: list[Measurement], name: str) -> str:
    ours = any(row.name == name and row.kind == "step" for row in rows)
    return f"`{name}`" if ours else name


def _stack(row: Measurement) -> str:
    found = dict(item.split("=", 1) for item in row.versions.split())
    return ", ".join(f"{name} {found[name]}" for name in ("torch", "tilelang") if name in found)


#: What stands between which markers.
PARTS = {"verdict": verdict, "judge": judged, "speed": speed}


def rendered(text: str) -> str:
    """README text with every marked part made anew.

    Raises:
        DataError: for a marker that is missing, or a part that cannot be made.
    """
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise DataError(f"got no pair of markers {name}:begin and {name}:end in README.md, expected one")
        part = make()
        text = pattern.sub(lambda match, part=part: f"{match[1]}{part}\n{match[2]}", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    write_atomic(README, rendered(README.read_text(encoding="utf-8")).encode())
