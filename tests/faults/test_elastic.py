"""torchrun's agents on a changing number of hosts: one vanishes, another one joins, and no sample is lost or repeated."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from benchmarks.harness.free_ports import free_port
from tests.faults.attempt import run_attempt
from tests.faults.checks import check_samples, check_weights
from tests.faults.elastic import run_agent
from tests.faults.training import SAVE_EVERY, STEPS, Settings

HOLD_ON_TWO, HOLD_ON_ONE = (
    SAVE_EVERY + 1,
    SAVE_EVERY + 2,
)  # The steps after which the training waits for a host to go or come.


class Host:
    """A process with one agent, which has one rank. ``vanish`` kills both at once."""

    def __init__(self, folder: Path, port: int, is_host: bool):
        self.process = mp.get_context("fork").Process(target=run_agent, args=(str(folder), port, is_host))
        self.process.start()

    def vanish(self) -> None:
        assert self.process.pid is not None
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.join()


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


@pytest.fixture
def start_host(tmp_path: Path) -> Iterator[Callable[[], Host]]:
    started: list[Host] = []
    port = free_port()

    def start() -> Host:
        started.append(Host(tmp_path, port, is_host=not started))
        return started[-1]

    yield start
    for host in started:
        host.vanish()


def starts(folder: Path) -> list[list[dict[str, Any]]]:
    """For each start of the ranks, what they have recorded."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((folder / "samples").glob("*.jsonl")):
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
        found.setdefault(path.name.split(".")[0], []).extend(map(json.loads, lines))
    return list(found.values())


def wait_until_trained(folder: Path, world: int, step: int, seconds: float = 90.0) -> None:
    """Wait until the last start has ``world`` ranks, and all of them have trained ``step``."""
    end = time.monotonic() + seconds
    while True:
        last = (starts(folder) or [[]])[-1]
        worlds = [entry["world"] for entry in last if "world" in entry]
        if worlds == [world] * world and sum(entry.get("step") == step for entry in last) == world:
            return
        assert time.monotonic() < end, f"{world} ranks have not trained step {step} after {seconds} s"
        time.sleep(0.05)


@pytest.mark.timeout(400)
def test_hosts_come_and_go(tmp_path: Path, start_host: Callable[[], Host]) -> None:
    gates = [tmp_path / "gates" / f"2.{HOLD_ON_TWO}"]
    gates[0].parent.mkdir()
    # One rank alone never comes to the end. On a busy machine the third host may miss the first rendezvous after it has come.
    gates += [tmp_path / "gates" / f"1.{step}" for step in range(HOLD_ON_ONE, STEPS + 1)]
    for gate in gates:
        gate.touch()
    first, second = start_host(), start_host()
    wait_until_trained(tmp_path, 2, HOLD_ON_TWO)
    second.vanish()
    gates[0].unlink()
    wait_until_trained(tmp_path, 1, HOLD_ON_ONE)
    third = start_host()  # The agent of the first host sends SIGTERM to its rank, which saves and ends.
    for host in (first, third):
        host.process.join(90.0)
        assert host.process.exitcode == 0
    begins = [[entry["begin"] for entry in start if "begin" in entry] for start in starts(tmp_path)]
    assert begins[:2] == [[0, 0], [SAVE_EVERY]]
    assert len(begins[-1]) == 2
    assert begins[-1][0] == begins[-1][1] >= HOLD_ON_ONE  # The checkpoint that was saved after SIGTERM.
    assert check_samples(tmp_path) == []
    undisturbed = run_attempt(2, tmp_path / "undisturbed", 0, Settings(timeout=60.0))
    weights = torch.load(tmp_path / "weights.pt")
    assert check_weights(weights, undisturbed.results[0], exact=False) == []
