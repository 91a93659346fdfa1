"""The floors of the house: a module imports from its own floor or from those below it, never from above."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = [
    "errors",
    "config",
    "commandline",
    "environment",
    "precision",
    "models",
    "data",
    "optim",
    "parallel",
    "profiling",
    "train",
    "planning",
    "sweep",
]
FILES = sorted((ROOT / "jaxdl").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Names of the jaxdl rooms (and `experiments`) that a file imports, at its top or within a function."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("jaxdl.")}
        rooms |= {"experiments" for name in names if name.split(".")[0] == "experiments"}
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    room = path.relative_to(ROOT / "jaxdl").parts[0].removesuffix(".py")
    if room == "__init__":
        return
    assert room in FLOORS, f"{room} has no floor"
    allowed = FLOORS[: FLOORS.index(room) + 1]
    assert imported(path) <= set(allowed)
