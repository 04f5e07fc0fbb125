"""The other process: its answers, its endings, and that nothing of it is left."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from moe_lab.machine.child import Child, ChildError
from moe_lab.problem.errors import BackendError, ContractError


def do(say, code):
    """What the child runs: a line of Python that may set ``answer`` and call ``say``."""
    names = {"say": say}
    exec(code, names)
    return names.get("answer")


def child(**options) -> Child:
    return Child("tests_child:do", environment={"PYTHONPATH": _path()}, **options)


def _path() -> str:
    return f"{Path(__file__).resolve().parents[2]}:{_HERE}"


_HERE = ""


@pytest.fixture(scope="module", autouse=True)
def _module(tmp_path_factory):
    """The child imports the functions of this file by a name of its own, without pytest's way of importing."""
    global _HERE
    folder = tmp_path_factory.mktemp("module")
    (folder / "tests_child.py").write_text(Path(__file__).read_text())
    _HERE = str(folder)


def gone(pid) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_one_process_answers_many_requests_and_prints_disturb_none():
    said = []
    with child() as one:
        first = one.ask({"code": "import os; print('noise'); say('begun'); answer = os.getpid()"}, say=said.append)
        long = "x" * 1_000_000
        assert one.ask({"code": f"answer = '{long}'"}, timeout_s=60) == long
        assert one.ask({"code": "import os, sys; answer = [os.getpid(), sys.stdin.read()]"}) == [first, ""]
    assert said == ["begun"]
    assert gone(first)


def test_an_exception_is_the_requests_own_and_the_process_goes_on():
    with child() as one:
        before = one.ask({"code": "import os; answer = os.getpid()"})
        with pytest.raises(ChildError, match=r"^ValueError: no luck$") as caught:
            one.ask({"code": "raise ValueError('no luck\\nat all')"})
        assert (caught.value.message, caught.value.ending) == ("ValueError: no luck\nat all", "")
        with pytest.raises(ChildError, match=r"^got 3, expected 4$"):
            one.ask(
                {"code": f"from {ContractError.__module__} import ContractError as E; raise E('got 3, expected 4')"}
            )
        silent = "class Silent(Exception):\n    def __str__(self):\n        raise self\nraise Silent"
        with pytest.raises(ChildError, match=r"^Silent$"):
            one.ask({"code": silent})
        with pytest.raises(ChildError, match=r"^SystemExit: 3$"):
            one.ask({"code": "raise SystemExit(3)"})
        assert one.ask({"code": "import os; answer = os.getpid()"}) == before


def test_a_process_that_ends_says_how_and_the_next_request_starts_another():
    with child() as one:
        with pytest.raises(ChildError, match=r"^the process ended with exit code 3; its last words: bye$") as caught:
            one.ask({"code": "import os; print('bye'); os._exit(3)"})
        assert (caught.value.ending, caught.value.message) == ("exit code 3", "bye\n")
        with pytest.raises(ChildError) as caught:
            one.ask({"code": "import os; os.kill(os.getpid(), 9)"})
        assert caught.value.ending == "signal 9 (Killed)"
        assert one.ask({"code": "answer = 1"}) == 1


def test_what_takes_too_long_ends_with_all_it_started_and_its_folder(tmp_path, monkeypatch):
    code = "import os, subprocess, time; say(subprocess.Popen(['sleep', '60']).pid); open('mine', 'w'); time.sleep(60)"
    said = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with child() as one:
        assert one.ask({"code": "answer = 1"}) == 1
        with pytest.raises(ChildError, match=r"^got no answer in 0.5 s$"):
            one.ask({"code": code}, timeout_s=0.5, say=said.append)
    assert gone(said[0])
    assert list(tmp_path.iterdir()) == []


def test_what_the_tick_raises_ends_the_process():
    said = []

    def tick():
        if said:
            raise KeyboardInterrupt

    with child() as one, pytest.raises(KeyboardInterrupt):
        one.ask({"code": "import os; say(os.getpid())\nwhile True: pass"}, say=said.append, tick=tick)
    assert gone(said[0])


def test_the_process_ends_with_its_parent_even_when_it_is_killed():
    program = f"""
from moe_lab.machine.child import Child
child = Child("tests_child:do", environment={{"PYTHONPATH": {_path()!r}}})
child.ask({{"code": "import os; say(os.getpid())\\nwhile True: pass"}}, say=lambda pid: print(pid, flush=True))
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with parent.stdout:
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
        parent.wait()
    assert gone(pid)


def test_an_interpreter_that_is_none_and_a_function_that_is_none():
    with pytest.raises(BackendError, match="no/such/python"):
        child(python="no/such/python").ask({"code": ""})
    with Child("moe_lab.machine.child:no_such") as one, pytest.raises(ChildError, match="no_such"):
        one.ask({})
