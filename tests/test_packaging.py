"""pyproject.toml (lower bounds), constraints.txt (pins) and environment.yml (conda) describe one set of packages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent


def _pyproject() -> list[Requirement]:
    text = (ROOT / "pyproject.toml").read_text()
    blocks = re.findall(r"^(?:dependencies|dev|browser) = \[(.*?)\]$", text, re.S | re.M)
    blocks += re.findall(r"^(?:dependencies|dev|browser) = \[([^\n]*)\]$", text, re.M)
    return [Requirement(name) for block in blocks for name in re.findall(r'"([^"]+)"', block)]


def _pins() -> dict[str, list[Requirement]]:
    pins: dict[str, list[Requirement]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            pins.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return pins


def _environment() -> list[Requirement]:
    text = (ROOT / "environment.yml").read_text().split("- pip:")[1]
    return [Requirement(name) for name in re.findall(r"^      - (?!-c)(\S+)$", text, re.M)]


@pytest.mark.parametrize("requirement", _pyproject(), ids=str)
def test_every_dependency_is_pinned_at_or_above_its_lower_bound(requirement):
    assert [clause.operator for clause in requirement.specifier] == [">="]
    pins = _pins()[canonicalize_name(requirement.name)]
    for pin in pins:
        (clause,) = pin.specifier
        assert clause.operator == "=="
        assert requirement.specifier.contains(Version(clause.version)), pin


def test_the_kernel_stack_is_pinned_together():
    pins = {name: str(items[0].specifier) for name, items in _pins().items()}
    assert (pins["torch"], pins["tilelang"], pins["apache-tvm-ffi"]) == ("==2.13.0", "==0.1.15", "==0.1.12")


def test_conda_installs_the_same_packages_with_the_same_pins():
    ours = {canonicalize_name(requirement.name) for requirement in _pyproject()} - {"playwright"}
    theirs = {canonicalize_name(requirement.name): requirement for requirement in _environment()}
    assert set(theirs) == ours
    for name, requirement in theirs.items():
        assert not requirement.specifier or requirement.specifier == _pins()[name][0].specifier


def test_a_folder_of_the_same_name_does_not_hide_the_installed_package(tmp_path):
    """The folder above a clone holds one, with a submission.py in it after ``make run``."""
    (tmp_path / "moe_lab").mkdir()
    (tmp_path / "moe_lab" / "submission.py").write_text("")
    command = [sys.executable, "-c", "from moe_lab.problem.submission import Submission"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("user", "option"), [("0", True), ("1000", False)])
def test_only_root_tells_jupyter_that_it_is_root(tmp_path, user, option):
    (tmp_path / "id").write_text(f"#!/bin/sh\necho {user}\n")
    (tmp_path / "id").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    # Nothing is made: whether .venv is older than pyproject.toml must not matter.
    command = ["make", "--dry-run", "--old-file=.venv/.installed", "lab"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert ("--allow-root" in done.stdout) is option
