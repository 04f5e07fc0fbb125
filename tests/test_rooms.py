"""The rooms of the package stand in one order, and imports run along it: a room never needs a later one."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "moe_lab"
ROOMS = ("problem", "steps", "machine", "model", "judge", "speed", "lesson", "cli", "__main__")
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py")


def _imported(tree: ast.Module) -> set[str]:
    """Dotted names below ``moe_lab`` that a module imports, those inside functions included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "moe_lab":
            found |= {f"moe_lab.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} if node.module.startswith("moe_lab.") else set()
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("moe_lab.")}
    return found


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_from_later_rooms_to_earlier_ones(path):
    floor = ROOMS.index(_room(path))
    wrong = sorted(
        name
        for name in _imported(ast.parse(path.read_text()))
        if name.split(".")[1] not in ROOMS or ROOMS.index(name.split(".")[1]) > floor
    )
    assert wrong == []


def test_every_room_says_which_question_it_answers():
    for room in ROOMS[:7]:
        assert ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())), room


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_only_forwards(path):
    """A module without a definition of its own has nothing but its docstring, or runs the command line."""
    body = ast.parse(path.read_text()).body[1:]
    own = [node for node in body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    assert own or not body


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent.name != "steps"], ids=lambda path: path.stem)
def test_no_function_is_longer_than_a_page(path):
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    assert [node.name for node in functions if node.end_lineno - node.lineno >= 60] == []
