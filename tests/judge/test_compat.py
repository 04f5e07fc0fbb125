"""Submissions under TileLang 0.1.10, the contest's version; needs the environment that ``make test-compat`` creates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import compat
import pytest

from moe_lab.lesson.export import submission_cell
from moe_lab.problem.errors import BackendError
from moe_lab.problem.submission import Submission
from moe_lab.steps import STEPS, step

HERE = Path(__file__).parent
HONEST = sorted((HERE.parent / "honest").glob("*.py"))
NOTEBOOK = HERE.parent.parent / "notebooks" / "08_your_submission.ipynb"


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return compat.interpreter()
    except BackendError as error:
        pytest.skip(str(error))


FILES: dict[str, Callable[[], Submission]] = {
    "exported cell": lambda: Submission(submission_cell(NOTEBOOK), "exported.py"),
    "s0_baseline": lambda: step("s0_baseline"),
    **{item.name: item.submission for item in STEPS.values() if item.profile == "contest" and item.recommended},
    **{path.stem: functools.partial(Submission.from_file, path) for path in HONEST},
}


@pytest.mark.compat
@pytest.mark.parametrize("name", FILES)
def test_what_is_meant_for_the_contest_lowers(name: str, python: Path) -> None:
    (answer,) = compat.check([FILES[name]()], python)
    assert answer.ok, answer.render()
    assert answer.version.partition("+")[0] == "0.1.10"
    for (_, target), result in answer.lowered.items():
        if target == "sm_80":
            # At most the 64 KiB of a C500 block, in whole waves; a launch that only moves rows may need none.
            assert all(kernel.shared_bytes <= 65536 and kernel.threads % 64 == 0 for kernel in result)
            assert any(kernel.shared_bytes for kernel in result)


@pytest.mark.compat
def test_a_newer_name_is_reported_with_its_line(python: Path) -> None:
    source = step("s0_baseline").source
    line = next(number for number, text in enumerate(source.splitlines(), 1) if "T.exp2(" in text)
    newer = Submission(source.replace("T.exp2(", "T.fast_rcp("), "newer.py")
    (answer,) = compat.check([newer], python)
    assert not answer.ok
    assert answer.missing == (compat.MissingName("tilelang.language.fast_rcp", line),)
    assert f"line {line}: tilelang.language.fast_rcp does not exist there" in answer.render()


@pytest.mark.compat
def test_what_lowering_refuses_is_shown(python: Path) -> None:
    source = step("s0_baseline").source.replace("transpose_B=True", "transpose_B=True, no_such_option=1")
    (answer,) = compat.check([Submission(source, "refused.py")], python)
    assert not answer.ok
    assert "no_such_option" in answer.render()


def test_no_environment_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BackendError, match="expected an interpreter"):
        compat.check([step("s0_baseline")], tmp_path / "python")
    assert compat.main([]) == 2
    assert "got no file, expected one or more Python files with run_kernel" in capsys.readouterr().err
    assert compat.main([str(tmp_path / "missing.py")]) == 2
    assert "got no file" in capsys.readouterr().err


def test_names_of_a_file_under_every_alias() -> None:
    text = (
        "import tilelang.language as TL\nfrom tilelang import language as X\nfrom tilelang.language import copy as c\n"
        "from tilelang.maca.intrinsics import make_mma_swizzle_layout\n\n\n"
        "def f():\n    y = TL\n    y.gemm(X.fma, TL.copy)\n    X.gemm()\n"
    )
    assert compat._tilelang_names(Submission(text)) == {
        "tilelang.language": 2, "tilelang.language.copy": 3, "tilelang.language.gemm": 9, "tilelang.language.fma": 9,
    }  # fmt: skip
