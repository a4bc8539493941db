"""Runs ``examples/tour.py`` cell by cell and writes ``docs/tour.md``: its text, its code, and what the code printed.

python docs/tour_page.py
"""

from __future__ import annotations

import io
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir, redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SCRIPT, PAGE = ROOT / "examples" / "tour.py", ROOT / "docs" / "tour.md"
NOTE = "<!-- made by `python docs/tour_page.py` from `examples/tour.py` -->"


class Cell(NamedTuple):
    """A cell of a notebook in the percent format."""

    is_text: bool
    source: str


def cells(script: str) -> Iterator[Cell]:
    """The cells of a script. Text is without the comment signs."""
    for part in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        kind, _, source = part.partition("\n")
        is_text = kind.strip() == "[markdown]"
        if is_text:
            source = re.sub(r"^# ?", "", source, flags=re.MULTILINE)
            source = source.replace("](../docs/", "](").replace("](torchrun.md", "](../examples/torchrun.md")
        yield Cell(is_text, source.strip("\n"))


def run(script: Sequence[Cell]) -> list[str]:
    """What each cell printed; text cells print nothing. The cells run in one namespace, in the present folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for cell in script:
        with redirect_stdout(io.StringIO()) as output:
            if not cell.is_text:
                exec(compile(cell.source, str(SCRIPT), "exec"), names)
        printed.append(output.getvalue().rstrip())
    return printed


def page(script: Sequence[Cell], printed: Sequence[str]) -> str:
    """The page."""
    parts = [NOTE]
    for cell, output in zip(script, printed, strict=True):
        parts.append(cell.source if cell.is_text else f"```python\n{cell.source}\n```")
        if output:
            parts.append(f"```text\n{output}\n```")
    return "\n\n".join(parts) + "\n"


def without_outputs(text: str) -> str:
    """A page without what the code printed and without the line about the machine."""
    return re.sub(r"```text\n.*?\n```\n\n|^The output below [^\n]*\n\n", "", text, flags=re.DOTALL | re.MULTILINE)


def about() -> str:
    """Where and when the page was made. It depends on the machine, and so do the times on the page."""
    return (
        f"The output below is from {os.cpu_count()} cores ({platform.machine()}) on {datetime.now(UTC):%Y-%m-%d}. "
        "Times differ from run to run."
    )


def main() -> None:
    script = list(cells(SCRIPT.read_text()))
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        os.environ["FREESCALE_CACHE"] = folder
        printed = [text.replace(f"{Path(sys.executable).parent}/", "") for text in run(script)]
    title, rest = script[0].source.split("\n\n", 1)
    script[0] = Cell(True, f"{title}\n\n{about()}\n\n{rest}")
    PAGE.write_text(page(script, printed))


if __name__ == "__main__":
    main()
