"""What every figure shares: colours, sizes of text, and how it reaches a notebook so that everybody can read it."""

import base64
import html
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by colour-blind readers, and in grey by lightness and by the labels.
BLUE, ORANGE, GREEN, RED, SKY, YELLOW, PURPLE = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#F0E442", "#CC79A7",
)  # fmt: skip
INK, PALE = "#444444", "#ECECEC"


def canvas(width: float, height: float, columns: int = 1, rows: int = 1) -> "tuple[Figure, list[Axes]]":
    """An empty figure with its axes, row by row, without pyplot's global state.

    Width and height are in inches; a notebook page shrinks what is wider than 9.
    """
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    return made, list(made.subplots(rows, columns, squeeze=False).flat)


def text_size(text: str, size: float) -> tuple[float, float]:
    """Width and height in points of lines set in ``size`` points; what is drawn is not larger but by a hair."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    lines, kind = text.split("\n"), FontProperties(size=size)
    widths = [text_to_path.get_text_width_height_descent(line, kind, ismath=False)[0] for line in lines]
    # Type is set on whole pixels, so some letters are wider than their outlines.
    return 1.08 * max(widths), 1.25 * size * len(lines)


def short_number(value: float, *, zeros: bool = False) -> str:
    """Three digits that count, and never a power of ten; ``zeros`` at the end stay, as of what was measured.

    >>> [short_number(value) for value in (0.42204, 0.5, 12.34, 100, 1999.6)]
    ['0.422', '0.5', '12.3', '100', '2000']
    >>> [short_number(value, zeros=True) for value in (0.5, 100.2)]
    ['0.500', '100']
    """
    if abs(value) >= 999.5:
        return f"{value:.0f}"
    return f"{value:#.3g}".rstrip(".") if zeros else f"{value:.3g}"


def show(figure: "Figure", description: str) -> None:
    """Display a figure and, folded below it, what it shows in words, with the figures that matter.

    The picture is kept as PNG, which every code host draws. JupyterLab and code hosts drop the alternative text of a
    picture, so the words are also an output of their own that a screen reader reaches. Raises ValueError for no words.
    """
    from IPython.display import display

    if not description.strip():
        raise ValueError("got an empty description, expected what the figure shows in words")
    picture = {"image/png": base64.b64encode(png(figure)).decode(), "text/plain": description}
    display(picture, metadata={"image/png": {"alt": description}}, raw=True)
    words = f"<details><summary>This figure in words</summary>{html.escape(description)}</details>"
    display({"text/html": words, "text/plain": description}, raw=True)


def png(figure: "Figure") -> bytes:
    """A figure as PNG with a palette of 128 colours: a third of the bytes of a full-colour one, and looks the same."""
    from PIL import Image

    picture, small = io.BytesIO(), io.BytesIO()
    figure.savefig(picture, format="png", dpi=100, bbox_inches="tight", metadata={"Software": None})
    with Image.open(picture) as image:
        image.convert("RGB").quantize(128, method=Image.Quantize.MEDIANCUT).save(small, format="png", optimize=True)
    return small.getvalue()
