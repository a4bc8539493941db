"""What all benchmarks share: their options, the header of a result, and tables on the console."""

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

from benchmarks.harness.labels import label

Row = Mapping[str, Any]

PACKAGES = (  # whose versions are part of a result
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
        quick: help text of ``--quick``: what it shortens.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON to this file")
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def head(benchmark: str, machine: str | None = None, script: str | None = None) -> dict[str, Any]:
    """The header of every result: name, date, command, machine and versions.

    Args:
        benchmark: name of the module.
        machine: description of the machine. Default: this machine's CPU.
        script: what was started, if it was not ``-m benchmarks.<benchmark>``.
    """
    script = script or f"-m benchmarks.{benchmark}"
    # Folders of this machine mean nothing to a reader.
    words = [Path(word).name if word.startswith(("/", "../")) else word for word in sys.argv[1:]]
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *shlex.split(script), *words]),
        "machine": machine or f"{os.cpu_count()} cores ({platform.machine()})",
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages. Imports none of them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def publish(arguments: argparse.Namespace, results: Row, tables: Mapping[str, Sequence[Row]], *notes: str) -> None:
    """Print the tables under their titles, then the notes; with ``--json`` print the results instead. Write ``--output``."""
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
    """Rows with the same columns as right-aligned text; numbers with four digits."""
    cells = [[label(name) for name in rows[0]]] + [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
