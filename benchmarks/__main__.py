"""``python -m benchmarks``: what there is to measure, and how. Reads the modules' docstrings, imports none of them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
TOOLS = ("cluster", "tables")  # measure nothing themselves


class Script(NamedTuple):
    name: str
    claim: str  # first line of its docstring
    commands: list[str]  # the lines of the docstring that are commands


def scripts() -> Iterator[Script]:
    """All that can be run, by name."""
    for path in sorted(FOLDER.glob("[a-z]*.py")):
        tree = ast.parse(path.read_text())
        if not any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            continue
        lines = (ast.get_docstring(tree) or "").splitlines()
        commands = [" ".join(line.split("  #")[0].split()) for line in lines if line.startswith("    ")]
        yield Script(path.stem, lines[0] if lines else "", commands)


def listing() -> str:
    lines = [
        "Each prints a table; --json prints JSON, --output FILE keeps it, --quick takes seconds rather than minutes.",
        "",
    ]
    for tools in (False, True):
        lines += [] if not tools else ["Beside them:", ""]
        for script in scripts():
            if (script.name in TOOLS) == tools:
                lines += [f"{script.name}: {script.claim}", *(f"    {command}" for command in script.commands), ""]
    return "\n".join(lines).rstrip()


def main() -> int:
    print(listing())
    return 0


if __name__ == "__main__":
    sys.exit(main())
