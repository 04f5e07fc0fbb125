from __future__ import annotations

import pytest

from moe_lab.lesson.listings import SideBySide, block, difference, elide, generated, lines
from moe_lab.problem.errors import SubmissionError
from moe_lab.problem.submission import Submission

FILE = Submission("A = 1\n\n\ndef f(x):\n    if x:\n        return A\n    return 0\n", "file.py")


def test_slice_is_found_by_its_text_and_keeps_its_line_number() -> None:
    listing = lines(FILE, "if x", "return A")
    assert str(listing) == "if x:\n    return A"
    assert str(listing._repr_markdown_()).startswith("Lines 5 to 6:\n\n```python\nif x:")
    assert listing._repr_html_() is None
    assert repr(listing) == "2 lines of python"
    assert [lines(FILE, "return", "return", occurrence=number).first_line for number in (1, 2)] == [6, 7]


@pytest.mark.parametrize(("first", "last", "said"), [
    ("no such line", "if x", "got 0 lines with 'no such line' in file.py from line 1"),
    ("if x", "A = 1", "got 0 lines with 'A = 1' in file.py from line 5"),
])  # fmt: skip
def test_lost_line_is_named(first: str, last: str, said: str) -> None:
    with pytest.raises(SubmissionError, match=said):
        lines(FILE, first, last)


def test_difference_holds_the_change_and_no_file_names() -> None:
    text = str(difference(FILE, Submission(FILE.source.replace("A = 1", "A = 2"), "new.py")))
    assert text.startswith("@@")
    assert "-A = 1\n+A = 2" in text
    assert "file.py" not in text


def test_indentation_alone_is_no_change() -> None:
    moved = Submission(
        "A = 1\n\n\ndef f(x):\n    if A:\n        if x:\n            return A\n    return 0\n", "moved.py"
    )
    changed = [line for line in str(difference(FILE, moved)).splitlines() if line[0] in "+-"]
    assert changed == ["+    if A:"]


def test_differences_are_escaped_and_shaded() -> None:
    shown = difference(FILE, Submission(FILE.source.replace("return 0", "return x < 0"), "new.py"))._repr_html_()
    assert shown is not None
    assert shown.count("#dbeafe") == shown.count("#ffe4c7") == 1
    assert "return x &lt; 0" in shown


def test_folded_listing_keeps_every_line_behind_its_heading() -> None:
    folded = lines(FILE, "if x", "return A").folded("a < b")
    assert folded._repr_html_() == "<details><summary>a &lt; b</summary><pre>if x:\n    return A</pre></details>"
    assert str(folded) == "a < b\nif x:\n    return A"


@pytest.mark.parametrize(("line", "shown"), [
    ("copy((&(b_shared[((((int)threadIdx.x) >> 3) * 64) + 8])), (&(b[(i_1 * 8)])), limit_of_rows[expert_of_block]);",
     "copy((&(b_shared[…])), (&(b[(i_1 * 8)])), limit_of_rows[expert_of_block]);"),
    ("f(a[0], (", "f(a[0], ("),
    ("mma<tl::DataType::kFloat16>(reinterpret_cast<float*>(acc));", "mma<fp16>((acc));"),
], ids=["only long arithmetic is cut", "a bracket that is never closed stays", "casts are left out"])  # fmt: skip
def test_generated_code_is_made_short(line: str, shown: str) -> None:
    assert elide(line) == shown


def test_block_ends_where_its_brace_closes() -> None:
    code = "void f() {\n  for (int i = 0; i < 4; ++i) {\n    if (i) {\n      y = 1;\n    }\n  }\n  z = 2;\n}"
    assert block(code, "for (") == "for (int i = 0; i < 4; ++i) {\n  if (i) {\n    y = 1;\n  }\n}"
    assert block(code, "z =") == "z = 2;"


def test_columns_are_escaped() -> None:
    table = SideBySide({"C": "a<b", "CUDA": "x"})
    assert "a&lt;b" in table._repr_html_()
    assert repr(table) == "C | CUDA"


def test_kernel_of_a_notebook_is_lowered_from_its_source() -> None:
    import tilelang
    import tilelang.language as T

    @tilelang.jit
    def fill(rows):  # type: ignore[no-untyped-def]
        @T.prim_func
        def kernel(out: T.Tensor((rows, 64), "float16")):
            with T.Kernel(1, threads=64):
                tile = T.alloc_shared((rows, 64), "float16")
                T.clear(tile)
                T.copy(tile, out[0, 0])

        return kernel

    (lowered,) = generated(fill, ["gfx90a"], rows=32).values()
    assert lowered.shared_bytes == 32 * 64 * 2
    assert lowered.threads == 64
    assert "__global__" in lowered.source
