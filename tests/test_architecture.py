"""The structure of the package, read from its sources: layers, sizes, unique names."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_freescale"
# A folder may import folders with a smaller number, and itself. CONTRIBUTING.md has the same list with explanations.
LAYERS = {
    "runtime": 0,
    "batch": 1,
    "transport": 1,
    "balance": 2,
    "data": 3,
    "bubbles": 3,
    "simulate": 3,
    "models": 3,
    "embedding": 4,
    "inference": 4,
    "serving": 5,
    "strategy": 5,
    "cli": 6,
}
MAX_LINES = 400
MAX_FUNCTION_LINES = 60
CODE = sorted(
    path
    for folder in ("lightning_freescale", "csrc", "benchmarks", "examples", "docs")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh", ".c")
)


def layer_of(path: Path) -> int:
    """The layer of a file of the package. Files at the top of the package may import everything."""
    parts = path.relative_to(PACKAGE).parts
    return LAYERS[parts[0]] if len(parts) > 1 else max(LAYERS.values()) + 1


def imported_folders(source: str) -> set[str]:
    """The folders of the package that a source imports, wherever in the source."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    found = {name.split(".")[1] for name in names if name.startswith("lightning_freescale.")}
    return found & LAYERS.keys()


def upward_imports(path: Path, source: str) -> list[str]:
    own = path.relative_to(PACKAGE).parts[0]
    return [
        f"{path.relative_to(ROOT)} imports {folder}"
        for folder in imported_folders(source)
        if folder != own and LAYERS[folder] >= layer_of(path)
    ]


def test_every_folder_has_a_layer() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == LAYERS.keys()


def test_imports_go_down_only() -> None:
    found = [problem for path in PACKAGE.rglob("*.py") for problem in upward_imports(path, path.read_text())]
    assert not found


def test_an_upward_import_is_found() -> None:
    source = "def f():\n    from lightning_freescale.strategy import control\n"
    assert upward_imports(PACKAGE / "balance" / "cost.py", source) == [
        "lightning_freescale/balance/cost.py imports strategy"
    ]
    assert not upward_imports(PACKAGE / "cli" / "demo.py", source)


def test_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if path.name == "pytorch_lightning.py":
            continue  # It repeats the public classes for the other Lightning namespace.
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_constants_are_unique() -> None:
    """A module-level constant has one meaning in the package."""
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            for target in targets:
                if isinstance(target, ast.Name) and target.id.isupper() and not target.id.startswith("_"):
                    places[target.id].append(str(path.relative_to(PACKAGE)))
    assert not {name: where for name, where in places.items() if len(where) > 1}


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    """Files have at most 400 lines. Functions have at most 60, unless their docstring starts with the reason."""
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_LINES
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            reason = (ast.get_docstring(node) or "").startswith("Long because")
            assert lines <= MAX_FUNCTION_LINES or reason, f"{node.name} has {lines} lines"
