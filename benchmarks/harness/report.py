"""What all benchmarks share: their options, the head of their results, and tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

RESULTS = Path(__file__).resolve().parents[1] / "results"  # what is kept
STACK = (
    "torch",
    "torchrec",
    "fbgemm-gpu",
    "fbgemm-gpu-cpu",
    "triton",
    "lightning",
    "numpy",
    "lightning-freescale",
)


def make_parser(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has.

    Args:
        doc: docstring of the module.
        quick: what ``--quick`` leaves out.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON to this file")
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def head(benchmark: str, machine: str | None = None, script: str | None = None) -> dict[str, Any]:
    """What, when, how and on what: every result begins with it.

    Args:
        benchmark: the module's name.
        machine: in words; this one's processor by default.
        script: what was started, if not the module of that name.
    """
    script = script or f"-m benchmarks.{benchmark}"
    # Where files lay on this machine is of no interest to a reader.
    words = [Path(word).name if word.startswith(("/", "../")) else word for word in sys.argv[1:]]
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *shlex.split(script), *words]),
        "machine": machine or f"{os.cpu_count()} cores ({platform.machine()})",
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that are installed; imports none of them."""
    found = {"python": platform.python_version()}
    for name in STACK:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def publish(arguments: argparse.Namespace, results: Row, tables: Mapping[str, Sequence[Row]], *notes: str) -> None:
    """Print the tables, by title, and what is to be said of them; or JSON. Write the JSON where it is asked for."""
    text = json.dumps(results, indent=1)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text + "\n")
    if arguments.json:
        print(text, flush=True)
        return
    for title, rows in tables.items():
        print(f"\n{title}\n{table(rows)}")
    print(*notes, sep="\n", flush=True)


def table(rows: Sequence[Row]) -> str:
    """Rows of the same columns, right-aligned, four digits."""
    cells = [list(rows[0])] + [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
