"""After a problem, a campaign shows what each rank has printed, how it has ended, and where it hangs."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.faults import attempt
from tests.faults.attempt import Moment, run_attempt
from tests.faults.checks import check_survivors
from tests.faults.output import describe, last_lines, shorten
from tests.faults.training import Settings


def hang_in_a_call() -> None:
    ctypes.PyDLL(None).sleep(60)  # It keeps the lock of the interpreter.


def end_in_different_ways(rank: int, *arguments: Any) -> None:
    print(f"output of rank {rank}")
    if rank == 0:
        print("rank 0: rank 3 has died\nThe process ends itself", file=sys.stderr)
        os._exit(1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    hang_in_a_call()


def test_the_ends_of_all_ranks_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "train", end_in_different_ways)
    settings, folder = Settings(timeout=60.0), tmp_path / "7"
    outcome = run_attempt(4, folder, 2, settings, victim=3, moment=Moment("start", 0, 0.0), limit=2.0)
    assert outcome.stuck == [2]
    assert outcome.errors[0] == "the process has ended itself with exit code 1: rank 0: rank 3 has died"
    assert check_survivors(outcome, 3, settings) == [
        "rank 2 hangs after the failure of rank 3",
        "rank 1 does not name rank 3: the process has died with exit code -11 without a message",
    ]
    shown = describe(folder, 2, 4, outcome.errors)
    assert {"7/2/rank 0| output of rank 0", "7/2/rank 2| output of rank 2"} <= set(shown)
    assert any(line.startswith("7/2/rank 1| Fatal Python error: Segmentation fault") for line in shown)
    assert any(line.startswith("7/2/rank 2| ") and "in hang_in_a_call" in line for line in shown)
    counts = Counter(line.partition("|")[0] for line in shorten(shown))
    assert counts["7/2/rank 2"] == 3
    assert max(counts.values()) == 3


def test_lines_without_news_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "output"
    frames = [f'  File "a.py", line {number} in call' for number in range(20)]
    path.write_text("\n".join(["frame #0: c10::Error", "GPU available: True", "news", *frames, "", "more"]))
    assert last_lines(path) == ["news", *frames[:8], "more"]
    assert last_lines(path, 1) == ["more"]
