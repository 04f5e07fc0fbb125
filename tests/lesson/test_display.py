"""Figures reach a notebook with their words."""

from __future__ import annotations

import base64

import pytest
from matplotlib.figure import Figure

from moe_lab.lesson.display import show


def _figure() -> Figure:
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([0, 1])
    return figure


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict, dict]]:
    """What was displayed: (data, metadata) of each."""
    outputs: list[tuple[dict, dict]] = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, metadata=None, raw=False: outputs.append((data, metadata or {}))
    )
    return outputs


def test_a_figure_carries_its_description_in_every_form(shown) -> None:
    show(_figure(), "a line from 0 to <1>")
    (picture, metadata), (words, _) = shown
    assert base64.b64decode(picture["image/png"]).startswith(b"\x89PNG")
    assert metadata["image/png"]["alt"] == picture["text/plain"] == words["text/plain"] == "a line from 0 to <1>"
    assert "a line from 0 to &lt;1&gt;" in words["text/html"]


def test_the_same_figure_gives_the_same_bytes(shown) -> None:
    show(_figure(), "once")
    show(_figure(), "again")
    assert shown[0][0]["image/png"] == shown[2][0]["image/png"]


def test_a_figure_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="empty description"):
        show(_figure(), " ")
