"""The generated table of tested versions in ``docs/install.md``, from the results of ``make test-versions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.results import StoredResult, command, machine
from benchmarks.harness.tables import markdown


def block(results: Mapping[str, StoredResult]) -> str:
    """The table and where it comes from."""
    found = results["versions_cpu"]
    table = markdown.table([_row(one) for one in reversed(found["sets"])])
    return f"{table}\n\n`{command(found)}` on {machine(found)}."


def _row(one: Mapping[str, Any]) -> dict[str, str]:
    return {
        "torch": ".".join(one["torch"].split(".")[:2]),
        "FBGEMM": one["fbgemm"],
        "TorchRec": one["torchrec"],
        "Lightning": one["lightning"],
        "Python": ".".join(one["python"].split(".")[:2]),
        "torch release": one["torch"],
        "short suite": _result(one),
    }


def _result(one: Mapping[str, Any]) -> str:
    if one["result"] == "not run here":
        return f"not run here: {one['reason']}"
    return f"{one['result']}: {one['tests']} tests, {one['date']}"
