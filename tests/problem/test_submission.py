import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.machine import backend
from moe_lab.problem.errors import SubmissionError
from moe_lab.problem.submission import Submission

SOURCE = '''"""Größe ☃ in the text moves byte offsets."""
import torch

BLOCK_M = 128  # rows
BLOCK_N, BLOCK_K = 64, 32
TILE = (64,
        32)
POLICY = 'Square'; SWIZZLE = True
SCALE = -1.5
_cache = {}
TWICE = 1
TWICE = 2
COMPUTED = 2 * 64


def run_kernel(a, out):
    BLOCK_M = 3
    out.fill_(BLOCK_M)
'''


def test_literals_are_the_upper_case_constants_bound_once():
    assert Submission(SOURCE).values == {
        "BLOCK_M": 128, "TILE": (64, 32), "POLICY": "Square", "SWIZZLE": True, "SCALE": -1.5,
    }  # fmt: skip


def test_rewriting_changes_only_the_literal():
    changed = Submission(SOURCE).with_literals(BLOCK_M=64, TILE=(128, 16), POLICY="FullRow", SCALE=2.5, SWIZZLE=False)
    expected = SOURCE.replace("BLOCK_M = 128", "BLOCK_M = 64").replace("(64,\n        32)", "(128, 16)")
    expected = expected.replace("'Square'", "'FullRow'").replace("-1.5", "2.5").replace("True", "False")
    assert changed.source == expected


@given(st.integers(-(10**6), 10**6), st.text(max_size=20))
def test_written_literals_are_read_back(number, text):
    changed = Submission(SOURCE).with_literals(BLOCK_M=number, POLICY=text)
    assert changed.values["BLOCK_M"] == number
    assert changed.values["POLICY"] == text


def test_the_same_values_give_the_same_bytes():
    submission = Submission(SOURCE)
    assert submission.with_literals(**submission.values).source_hash == submission.source_hash
    assert submission.with_literals(BLOCK_M=1).source_hash != submission.source_hash


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"BLOCK_Q": 1}, "got BLOCK_Q, expected one of BLOCK_M, TILE"),
        ({"BLOCK_N": 1}, "got BLOCK_N"),
        ({"BLOCK_M": "64"}, "got BLOCK_M='64', expected type int"),
        ({"BLOCK_M": 1.5}, "got BLOCK_M=1.5"),
        ({"SWIZZLE": 1}, "got SWIZZLE=1"),
        ({"POLICY": [1]}, "got POLICY="),
    ],
)
def test_other_names_and_kinds_are_refused(values, message):
    with pytest.raises(SubmissionError, match=message):
        Submission(SOURCE).with_literals(**values)


def test_diff_shows_the_one_line():
    diff = Submission(SOURCE, "a.py").diff(Submission(SOURCE, "b.py").with_literals(BLOCK_M=64))
    lines = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert lines == ["-BLOCK_M = 128  # rows", "+BLOCK_M = 64  # rows"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe\x00", "not UTF-8"), (b"  \n", "empty file"), (None, "got no file"), ("a folder", "cannot be read"),
        (b"#" * (1 << 20) + b"\n", "got 1048577 bytes .* expected at most 1048576"),
    ],
)  # fmt: skip
def test_broken_files_are_named(tmp_path, data, message):
    path = tmp_path / "broken.py"
    if isinstance(data, bytes):
        path.write_bytes(data)
    elif data:
        path.mkdir()
    with pytest.raises(SubmissionError, match=message):
        Submission.from_file(path)


def test_what_may_never_end_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    for path in (tmp_path / "pipe.py", "/dev/zero"):
        with pytest.raises(SubmissionError, match="cannot be read: it is a device or a pipe"):
            Submission.from_file(path)


def test_a_path_that_is_no_text_still_has_a_printable_name(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.py")
    path.write_text("a = 1\n")
    assert Submission.from_file(path).name == "caf\N{REPLACEMENT CHARACTER}.py"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a = 1\nb = = 2\n", r"^x.py, line 2, column \d+"), ("a = 1\0\n", "^x.py: .*null bytes"),
        ("(" * 5000 + ")" * 5000, "too many nested"), ("-" * 90_000 + "1", "deep"),
    ],
)  # fmt: skip
def test_text_that_the_parser_chokes_on_is_a_sentence(source, message):
    with pytest.raises(SubmissionError, match=message):
        _ = Submission(source, "x.py").tree


def test_save_replaces_in_one_step_or_not_at_all(tmp_path):
    path = tmp_path / "submission.py"
    Submission("a = 1\n").save(path)
    Submission("a = 2\n").save(path)
    assert path.read_bytes() == b"a = 2\n"
    assert [item.name for item in tmp_path.iterdir()] == ["submission.py"]
    with pytest.raises(SubmissionError, match="cannot be written"):
        Submission("a = 3\n").save(tmp_path / "missing" / "submission.py")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SubmissionError, match="an existing file is unchanged"):
        Submission("a = 3\n").save(tmp_path / "folder")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["folder", "submission.py"]


def test_saving_through_a_link_or_into_a_pipe_keeps_the_link_and_the_pipe(tmp_path):
    (tmp_path / "link.py").symlink_to("real.py")
    for source in ("a = 1\n", "a = 2\n"):
        Submission(source).save(tmp_path / "link.py")
        assert (tmp_path / "real.py").read_text() == source
    assert (tmp_path / "link.py").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    Submission("a = 3\n").save(tmp_path / "pipe")
    assert os.read(reader, 100) == b"a = 3\n"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_load_without_the_entry_point_says_so():
    with pytest.raises(SubmissionError, match="got no function run_kernel"):
        backend.load(Submission("a = 1\n"))
