"""Markdown tables, and generated blocks between two marker comments of a hand-written page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.labels import label

END = "<!-- end of results -->"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table. Columns are in order of first appearance; a missing cell is a dash."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        [label(name) for name in columns],
        ["---"] * len(columns),
        *([cell(row.get(name, "-")) for name in columns] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    """A value with at most three digits, or a whole number from 1,000 on."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|")


def fill_block(page: str, text: str, name: str, new: str) -> str:
    """``text`` with ``new`` between ``<!-- results: name ... -->`` and the next ``<!-- end of results -->``.

    Args:
        page: file name, for the error.
        name: how the marker's text begins; an empty name matches any block.
    """
    marker = re.search(rf"<!-- results: {re.escape(name)}.*?-->", text)
    if marker is None:
        raise ValueError(
            f"{page} has no marker <!-- results: {name} -->, so its table cannot be written: add the marker"
        )
    end = text.find(END, marker.end())
    if end < 0:
        raise ValueError(f"{page} has no {END} after {marker[0]}, so its table cannot be written: add the marker")
    return f"{text[: marker.end()]}\n{new}\n{text[end:]}"
