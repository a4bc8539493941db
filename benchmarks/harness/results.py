"""Reads the stored results of ``benchmarks/results``."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import labels

RESULTS = Path(__file__).resolve().parents[1] / "results"
EARLIER = RESULTS / "earlier"  # results that newer ones have replaced, and repeats that no table shows
OUTPUT_OPTIONS = ("--output", "--plot")  # they name files and do not change the figures

StoredResult = Mapping[str, Any]


def load_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """All stored results, by file name without suffix."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def command(found: StoredResult) -> str:
    """The command that produced a result, without the options that only name output files."""
    words = iter(shlex.split(found["command"]))
    shown: list[str] = []
    for word in words:
        if word in OUTPUT_OPTIONS:
            next(words)
        elif word != "--json":
            shown.append(word)
    return shlex.join(shown)


def machine(found: StoredResult) -> str:
    """The machine of a result in one line."""
    described = found["machine"]
    if not isinstance(described, dict):
        return labels.machine(described)
    values = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in described.items()}
    return labels.machine(", ".join(f"{labels.label(name)} {value}" for name, value in values.items()))


def short_machine(found: StoredResult) -> str:
    """The machine of a result in a few words, for a table cell."""
    text = machine(found)
    gpu = re.search(r"NVIDIA (\w+)", text)
    if gpu is None:
        cores = re.search(r"(\d+) cores", text)
        return f"{cores[1]} CPU cores" if cores else text
    sms = "not reserved" if "not reserved" in text else "reserved" if "reserved" in text else ""
    return f"one {gpu[1]}" + (f", SMs {sms}" if sms else "")


def shape_of(found: StoredResult) -> str | None:
    """The shape of an end-to-end result of ``--shapes``; ``None`` for a result of other options.

    >>> shape_of({"command": "python -m benchmarks.end_to_end --shapes wide --rounds 3"}), shape_of({"command": "python x"})
    ('wide', None)
    """
    words = shlex.split(found["command"])
    return words[words.index("--shapes") + 1] if "--shapes" in words else None


def of_rounds(found: StoredResult, side: str, figure: str) -> list[float]:
    """A figure of one side of an end-to-end result in every round: ``step_ms``, ``bubble_ms`` or ``gone of`` a baseline."""
    rounds: dict[str, list[float]] = found.get("rounds", {}).get(side, {})
    if figure in rounds:
        return rounds[figure]
    variant = found["sides"][side]
    if figure.startswith("gone of "):
        return [variant["gone"][figure.removeprefix("gone of ")]]
    return [variant["step_ms"]["mean"] if figure == "step_ms" else variant[figure]]


def trained_on(found: StoredResult) -> str:
    """What an end-to-end result was trained on, for a table cell: the longest history, or the bags of a DLRM."""
    workload = found["workload"]
    return f"{workload['clicks']} bags (DLRM)" if "clicks" in workload else f"{workload['longest']:,}"
