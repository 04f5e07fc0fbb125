"""pyproject.toml (lower bounds), constraints.txt (pins) and environment.yml (conda) describe one set of packages."""

import re
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
