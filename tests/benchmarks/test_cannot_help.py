"""Where nothing is to be won: two trainings in turns, and what follows from their times."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch.distributed as dist

from benchmarks import cannot_help
from benchmarks.harness.training.alternation import SETTLE, Turns, turn_times
from benchmarks.harness.training.bubble import DEFAULT, SYNC
from tests.benchmarks.command import run_benchmark

SHAPE = {"warm": 3, "steps": 2, "count": 2}
LAST = 3 + 2 * 2  # the step after the last turn


class Seen(NamedTuple):
    at: float
    side: int
    rank: int
    step: int
    begins: bool


def ranks_of_both_sides(in_turns: bool) -> list[Seen]:
    """When each rank of both sides was in each step, by the clock; one thread a rank."""
    seen: list[Seen] = []
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))

    def train(side: int, rank: int) -> None:
        taking = Turns(store, side, rank, ranks=2, **SHAPE)
        for step in range(LAST + 2):
            if in_turns:
                taking.on_train_batch_start(None, None, None, step)
            seen.append(Seen(time.perf_counter(), side, rank, step, True))
            time.sleep(0.002 * (1 + rank))
            seen.append(Seen(time.perf_counter(), side, rank, step, False))
        taking.leave()

    threads = [threading.Thread(target=train, args=(side, rank)) for side in range(2) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return sorted(seen)


def sides_meet(seen: list[Seen]) -> bool:
    """Whether a step of one side's turns was under way in one of the other's."""
    under_way = [0, 0]
    for event in seen:
        if event.step < LAST:
            under_way[event.side] += 1 if event.begins else -1
            if all(under_way):
                return True
    return False


def test_sides_never_train_at_the_same_time() -> None:
    seen = ranks_of_both_sides(in_turns=True)
    assert not sides_meet(seen)
    first = [(event.side, event.step) for event in seen if event.begins and event.rank == 0 and event.step < LAST]
    assert first == [
        (side, step) for steps in (range(3), range(3, 5), range(5, 7)) for side in range(2) for step in steps
    ]
    assert sides_meet(ranks_of_both_sides(in_turns=False))  # the check is able to fail


def test_a_side_that_does_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(RuntimeError, match="side 0 waits in vain for: side 1 at turn 0"):
        Turns(store, side=0, rank=0, ranks=1, **SHAPE).on_train_batch_start(None, None, None, 0)


def test_time_of_a_step_by_turn() -> None:
    """Steps that settle do not count, and the slowest rank does."""
    steps = SETTLE + 2
    fast = np.full(1 + 2 * steps, 1.0)
    fast[1 : 1 + SETTLE] = 50.0
    slow = fast.copy()
    slow[-1] = 5.0
    ends = np.cumsum([fast, slow], axis=1)
    assert turn_times(ends, warm=1, steps=steps, count=2).tolist() == [1.0, 3.0]


def side(name: str, turn_ms: list[float], loss: float = 1.0) -> dict[str, Any]:
    return {"side": name, "turn_ms": turn_ms, "losses": [2.0, loss], "notes": {}}


def test_turns_are_compared_with_those_next_to_them() -> None:
    """A machine that is twice as slow in the second half makes no error."""
    sync, default = [10.0, 10.0, 20.0, 20.0], [9.9, 10.1, 19.8, 20.2]
    goal = cannot_help.compare(side(SYNC, sync), side(DEFAULT, default), "cpu")["goal"]
    assert goal["reached"] == pytest.approx(1.0)
    assert goal["error"] == pytest.approx(np.std([0.99, 1.01, 0.99, 1.01], ddof=1) / 2)
    assert cannot_help.compare(side(SYNC, [1.0]), side(DEFAULT, [1.02]), "cpu")["goal"]["error"] is None


def test_what_is_said() -> None:
    met = cannot_help.compare(side(SYNC, [10.0]), side(DEFAULT, [10.05]), "cpu")
    missed = cannot_help.compare(side(SYNC, [10.0]), side(DEFAULT, [10.2], loss=1.1), "cpu")
    assert "equal" in cannot_help.describe(met)[0]
    assert cannot_help.describe(met)[1].endswith("reached, 1.0050")
    assert "DIFFERENT" in cannot_help.describe(missed)[0]
    assert cannot_help.describe(missed)[1].endswith("missed, 1.0200")


@pytest.mark.parametrize(("words", "text"), [(["--steps", "4"], "--steps"), (["--ranks", "1"], "--ranks")])
def test_what_cannot_be_measured(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cannot_help.parse(["--device", "cpu", *words])
    assert f"error: {text}: " in capsys.readouterr().err


def test_the_command(tmp_path: Path) -> None:
    """Both sides, two ranks each: the ``auto`` settings have decided before the turns, and the losses are equal bit for bit."""
    output = tmp_path / "cannot_help.json"
    words = ["--device", "cpu", "--quick", "--batch-size", "4", "--output", str(output)]
    figures, errors = run_benchmark("cannot_help", *words)
    assert figures == json.loads(output.read_text())
    assert figures["command"].startswith("python -m benchmarks.cannot_help --device cpu")
    assert [row["side"] for row in figures["sides"]] == [SYNC, DEFAULT]
    assert figures["sides"][1]["exchange"].split()[1] == "exchange,"  # which one, and by what times
    assert figures["losses"]["apart"] == {"first": 0.0, "second": 0.0}
    assert figures["losses"]["last"] < figures["losses"]["first"] - 1  # something was trained
    assert np.array(figures["turn_ms"]).shape == (2, 2)
    assert figures["goal"]["reached"] == pytest.approx(np.divide(*np.mean(figures["turn_ms"], axis=1)[::-1]))
    assert "turn 2 of 2 is over" in errors
