"""``benchmarks.cannot_help``: two trainings that alternate, and what follows from their times."""

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
from benchmarks.harness.training.alternation import UNCOUNTED_STEPS_OF_BLOCK, AlternatingBlocks, block_times
from benchmarks.harness.variant_names import FREESCALE, SYNC
from tests.benchmarks.command import run_benchmark

SHAPE = {"warm": 3, "steps": 2, "count": 2}
LAST = 3 + 2 * 2  # the step after the last block


class StepEvent(NamedTuple):
    at: float
    variant: int
    rank: int
    step: int
    begins: bool


def train_both(alternate: bool) -> list[StepEvent]:
    """Start and end of every step of every rank of both variants, in order; one thread per rank."""
    seen: list[StepEvent] = []
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))

    def train(variant: int, rank: int) -> None:
        blocks = AlternatingBlocks(store, variant, rank, ranks=2, **SHAPE)
        for step in range(LAST + 2):
            if alternate:
                blocks.on_train_batch_start(None, None, None, step)
            seen.append(StepEvent(time.perf_counter(), variant, rank, step, True))
            time.sleep(0.002 * (1 + rank))
            seen.append(StepEvent(time.perf_counter(), variant, rank, step, False))
        blocks.leave()

    threads = [threading.Thread(target=train, args=(variant, rank)) for variant in range(2) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return sorted(seen)


def overlap(seen: list[StepEvent]) -> bool:
    """Whether a step of one variant ran during a step of the other."""
    running = [0, 0]
    for event in seen:
        if event.step < LAST:
            running[event.variant] += 1 if event.begins else -1
            if all(running):
                return True
    return False


def test_the_variants_never_train_at_the_same_time() -> None:
    seen = train_both(alternate=True)
    assert not overlap(seen)
    first = [(event.variant, event.step) for event in seen if event.begins and event.rank == 0 and event.step < LAST]
    assert first == [
        (variant, step) for steps in (range(3), range(3, 5), range(5, 7)) for variant in range(2) for step in steps
    ]
    assert overlap(train_both(alternate=False))  # the check can fail


def test_the_error_names_a_variant_that_does_not_arrive() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(RuntimeError, match="variant 0 waited for variant 1 at block 0"):
        AlternatingBlocks(store, variant=0, rank=0, ranks=1, **SHAPE).on_train_batch_start(None, None, None, 0)


def test_step_time_of_each_block() -> None:
    """The first steps of a block do not count, and the slowest rank defines the time."""
    steps = UNCOUNTED_STEPS_OF_BLOCK + 2
    fast = np.full(1 + 2 * steps, 1.0)
    fast[1 : 1 + UNCOUNTED_STEPS_OF_BLOCK] = 50.0
    slow = fast.copy()
    slow[-1] = 5.0
    ends = np.cumsum([fast, slow], axis=1)
    assert block_times(ends, warm=1, steps=steps, count=2).tolist() == [1.0, 3.0]


def variant(name: str, turn_ms: list[float], loss: float = 1.0) -> dict[str, Any]:
    return {"side": name, "turn_ms": turn_ms, "losses": [2.0, loss], "notes": {}, "host": {"operators": 9.0}}


def pair(before: list[float], after: list[float], loss: float = 1.0) -> tuple[dict[str, Any], dict[str, Any]]:
    return variant(SYNC, before), variant(FREESCALE, after, loss)


def test_each_block_is_compared_with_the_next_block_of_the_other_variant() -> None:
    """A machine that is twice as slow in the second half does not change the result."""
    goal = cannot_help.compare([pair([10.0, 10.0, 20.0, 20.0], [9.9, 10.1, 19.8, 20.2])], "cpu")["goal"]
    assert goal["reached"] == pytest.approx(1.0)
    assert goal["error"] == pytest.approx(np.std([0.99, 1.01, 0.99, 1.01], ddof=1) / 2)
    assert cannot_help.compare([pair([1.0], [1.02])], "cpu")["goal"]["error"] is None


def test_the_error_includes_differences_between_processes() -> None:
    """Every block of a repeat agrees with the others, but the repeats differ."""
    found = cannot_help.compare([pair([10.0] * 9, [10.4] * 9), pair([20.0] * 9, [20.0] * 9)], "cpu")
    assert found["goal"]["repeats"] == pytest.approx([1.04, 1.0])
    assert found["goal"]["reached"] == pytest.approx(1.02)
    assert found["goal"]["error"] == pytest.approx(0.02)
    assert [row["ms a step"] for row in found["sides"]] == pytest.approx([15.0, 15.2])
    assert np.shape(found["turn_ms"]) == (2, 2, 9)
    assert not cannot_help.compare([pair([1.0], [1.0]), pair([1.0], [1.0], loss=1.1)], "cpu")["losses"]["equal"]


def test_conclusions_as_text() -> None:
    met = cannot_help.compare([pair([10.0], [10.05])], "cpu")
    missed = cannot_help.compare([pair([10.0], [10.2], loss=1.1)], "cpu")
    assert "equal" in cannot_help.describe(met)[0]
    assert cannot_help.describe(met)[1].endswith(": 1.005")
    assert cannot_help.describe(met)[2].endswith("reached, 1.0050")
    assert "DIFFERENT" in cannot_help.describe(missed)[0]
    assert cannot_help.describe(missed)[2].endswith("missed, 1.0200")


@pytest.mark.parametrize(
    ("words", "text"), [(["--steps", "4"], "--steps"), (["--ranks", "1"], "--ranks"), (["--repeats", "0"], "--repeats")]
)
def test_invalid_options_are_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cannot_help.parse(["--device", "cpu", *words])
    assert f"error: {text}: " in capsys.readouterr().err


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """Both variants with two ranks each: ``auto`` has decided before the blocks, and the losses are equal bit for bit."""
    output = tmp_path / "cannot_help.json"
    words = ["--device", "cpu", "--quick", "--batch-size", "4", "--repeats", "1", "--output", str(output)]
    figures, errors = run_benchmark("cannot_help", tmp_path, *words)
    assert figures == json.loads(output.read_text())
    assert figures["command"].startswith("python -m benchmarks.cannot_help --device cpu")
    assert [row["side"] for row in figures["sides"]] == [SYNC, FREESCALE]
    assert figures["sides"][1]["exchange"].split()[1] == "exchange,"  # which exchange, and with which times
    assert list(figures["losses"]["apart"].values()) == [0.0] * 2
    assert figures["losses"]["last"] < figures["losses"]["first"] - 1  # something was trained
    assert np.shape(figures["turn_ms"]) == (2, 1, 2)  # variants, repeats, blocks
    assert figures["goal"]["repeats"] == pytest.approx(np.divide(*np.mean(figures["turn_ms"], axis=2)[::-1]))
    assert figures["goal"]["reached"] == pytest.approx(np.mean(figures["goal"]["repeats"]))
    before, after = figures["sides"]
    # A prioritized step has other work than one of freescale_sync.
    if "prioritized exchange" not in after["exchange"]:
        assert after["operators a step"] == before["operators a step"]
        assert after["collectives a step"] == before["collectives a step"]
        assert before["Python calls a step"] < after["Python calls a step"] < 1.01 * before["Python calls a step"]
    assert before["collectives a step"] > 3
    assert errors.count("block 2 of 2: done") == 1
    assert "repeat 1 of 1" in errors
