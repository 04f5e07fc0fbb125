"""The parts of README.md that are made from data and notebooks, between markers.

``python tests/lesson/readme_parts.py`` writes them anew (part of make notebooks)."""

import re

from moe_lab.lesson import notebooks
from moe_lab.lesson.export import TAG
from moe_lab.problem.errors import DataError
from moe_lab.problem.submission import write_atomic
from moe_lab.speed import bench

README = notebooks.ROOT / "README.md"


def verdict() -> str:
    """The verdict on the final cell, as the committed notebook shows it, up to the open questions."""
    cells = notebooks.read(notebooks.FOLDER / "08_your_submission.ipynb").cells
    final = [cell for cell in cells if TAG in cell.metadata.get("tags", [])]
    shown = [texts[kind] for texts, kind in notebooks.shown_texts(*final) if texts[kind].startswith("accepted")]
    if not shown:
        raise DataError("got no accepted verdict in 08_your_submission.ipynb, expected one: run `make notebooks`")
    lines = [line.rstrip() for line in shown[0].partition("open question")[0].splitlines()]
    return "```text\n" + "\n".join(lines).strip() + "\n```"


def speed() -> str:
    """The runs that stand for the ladder: a table of every step and peer, then the summary's lines."""
    rows = bench.summary_rows()
    first, cases = rows[0], sorted({row.case for row in rows})
    versions = dict(item.split("=", 1) for item in first.versions.split())
    dirty = ", which was full of written lines that had to go to memory first" if first.cache == "dirty" else ""
    times = {
        (f"`{row.name}`" if row.kind == "step" else row.name, row.case): row.median_ms
        for row in rows if row.kind != "roof"
    }  # fmt: skip
    names = sorted({name for name, _ in times}, key=lambda name: times.get((name, cases[-1]), float("inf")))
    bounds = [f"*{bench.bound_ms([row for row in rows if row.case == case]):.3f}*" for case in cases]
    table = [
        ["", *cases],
        ["---", *["---:"] * len(cases)],
        *([name, *(f"{times[name, case]:.3f}" if (name, case) in times else "-" for case in cases)] for name in names),
        ["*bound: max of useful FLOPs and compulsory bytes at the roofs of that run*", *bounds],
    ]
    stack = f"torch {versions['torch']}, tilelang {versions['tilelang']}, driver {first.driver}"
    said = [
        f"Milliseconds on one {first.device}, medians of {first.rounds} calls in turns with weights cold in L2{dirty}, "
        f"routing `{first.routing}`; each case in one run ({first.recorded_at[:10]}, {stack}). "
        "Steps compute in fp16, peers in the dtype they name.",
        "",
        *(f"| {' | '.join(cells)} |" for cells in table),
        "",
        "Over all recorded runs, each ratio within one run: the median, in brackets the least and the greatest.",
    ]
    return "\n".join([*said, "", "```text", *bench.summary(), "```"])


PARTS = {"verdict": verdict, "speed": speed}  #: by the markers around them


def rendered(text: str) -> str:
    """README text with every marked part made anew. Raises DataError for one without markers or that cannot be made."""
    for name, make in PARTS.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, *rest = re.split(f"{begin}|{end}", text)
        if len(rest) != 2:
            raise DataError(f"got no pair of markers {name}:begin and {name}:end in README.md, expected one")
        text = before + begin + make() + "\n" + end + rest[1]
    return text


if __name__ == "__main__":
    write_atomic(README, rendered(README.read_text(encoding="utf-8")).encode())
