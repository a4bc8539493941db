"""The examples with bags and with tied weights, on two ranks, in a few steps."""

from __future__ import annotations

import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

from tests.ranks import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(rank: int, name: str, options: list[str]) -> str:
    """What the script prints on this rank."""
    sys.argv = [name, *options]
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def test_dlrm_trains_alike_with_both_strategies() -> None:
    options = ["--steps", "6", "--batch-size", "8", "--samples", "200"]
    first, second = run_ranks(run_example, args=("dlrm.py", options), timeout=100)
    lines = first.splitlines()
    assert lines[0].split() == ["strategy", "first", "loss", "last", "loss", "ms", "a", "step", "bags", "that", "wait"]
    synchronous, prioritized = (line.split() for line in lines[1:3])
    assert synchronous[0] == "freescale_sync"
    assert synchronous[-1] == "-"
    assert prioritized[0] == "freescale"
    assert 0 < int(prioritized[-1].removesuffix("%")) < 100
    assert synchronous[1:3] == prioritized[1:3]
    assert lines[3] == "losses of all 6 steps: equal bit for bit"
    assert second == ""


def test_tied_softmax_learns_and_tying_by_assignment_is_refused() -> None:
    first, second = run_ranks(run_example, args=("tied_softmax.py", ["--steps", "60"]), timeout=100)
    ranked, refused = first.splitlines()
    begin, end = (int(word.removesuffix("%")) for word in ranked.split() if word.endswith("%"))
    assert end > begin + 10
    assert refused.startswith("tied by assignment: output.weight is tied to the table tables.embeddings.item.weight")
    assert "sampled softmax" in refused
    assert second == ""
