"""``python -m benchmarks``: lists the benchmarks and their commands. Reads their docstrings and imports none of them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
TOOLS = ("cluster", "tables")  # scripts that measure nothing


class Script(NamedTuple):
    name: str
    claim: str  # first line of the docstring
    commands: list[str]  # indented lines of the docstring


def scripts() -> Iterator[Script]:
    """All scripts of this folder, sorted by name."""
    for path in sorted(FOLDER.glob("[a-z]*.py")):
        tree = ast.parse(path.read_text())
        if not any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            continue
        lines = (ast.get_docstring(tree) or "").splitlines()
        commands = [" ".join(line.split("  #")[0].split()) for line in lines if line.startswith("    ")]
        yield Script(path.stem, lines[0] if lines else "", commands)


def listing() -> str:
    """The text that the command prints."""
    lines = [
        "Each benchmark prints a table. --json prints JSON, --output FILE also writes it,",
        "--quick takes seconds instead of minutes.",
        "",
    ]
    for tools in (False, True):
        lines += ["Tools:", ""] if tools else []
        for script in scripts():
            if (script.name in TOOLS) == tools:
                lines += [f"{script.name}: {script.claim}", *(f"    {command}" for command in script.commands), ""]
    return "\n".join(lines).rstrip()


def main() -> int:
    print(listing())
    return 0


if __name__ == "__main__":
    sys.exit(main())
