"""torchrun with a changing number of hosts: one vanishes, another one joins, and the training ends as if undisturbed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.attempt import run_attempt
from tests.faults.campaign import check_samples, check_weights
from tests.faults.training import Settings
from tests.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings(pause=0.4, pause_alone=8.0, timeout=10.0)


class Host:
    """One agent of torchrun with one rank. ``vanish`` kills the agent and its rank at once."""

    def __init__(self, name: str, folder: Path, port: int):
        self.log = (folder / f"{name}.log").open("w")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=1:2",
            "--nproc-per-node=1",
            "--max-restarts=3",
        ]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=faults"]
        command += [
            "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2",
            "--local-addr=127.0.0.1",
        ]
        script = [str(ROOT / "tests/faults/elastic.py"), str(folder), json.dumps(asdict(SETTINGS))]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, *script], env=environment, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def vanish(self) -> None:
        for pid in [*children(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


def children(pid: int) -> list[int]:
    """All descendants of a process. Torchrun gives every rank a session of its own."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *children(child)]
    return found


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of all ranks of the last start, in which all ranks have trained a step."""
    files = sorted((folder / "samples").glob("*.jsonl")) if (folder / "samples").exists() else []
    last = [file for file in files if file.name.split(".")[0] == files[-1].name.split(".")[0]]
    return [json.loads(line) for file in last for line in file.read_text().splitlines() if line.endswith("}")]


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def trains_on(folder: Path, world: int, steps: int) -> Callable[[], bool]:
    """Whether the last start has ``world`` ranks and has trained ``steps`` steps."""

    def condition() -> bool:
        found = records(folder)
        worlds = {entry["world"] for entry in found if "world" in entry}
        return worlds == {world} and sum("step" in entry for entry in found) >= steps * world

    return condition


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[[str], Host]]:
    started: list[Host] = []
    port = free_port()

    def start(name: str) -> Host:
        started.append(Host(name, tmp_path, port))
        return started[-1]

    yield start
    for host in started:
        host.vanish()


@pytest.mark.timeout(500)
def test_hosts_come_and_go(tmp_path: Path, hosts: Callable[[str], Host]) -> None:
    first, second = hosts("first"), hosts("second")  # The first one keeps the store of the rendezvous.
    wait_for(trains_on(tmp_path, 2, 4), "two ranks to train")
    second.vanish()
    wait_for(trains_on(tmp_path, 1, 1), "one rank to train")
    third = hosts("third")
    wait_for(trains_on(tmp_path, 2, 1), "two ranks to train again")
    wait_for(lambda: first.process.poll() is not None and third.process.poll() is not None, "the end of the training")
    assert (first.process.returncode, third.process.returncode) == (0, 0)
    assert check_samples(tmp_path) == []
    undisturbed = run_attempt(2, tmp_path / "undisturbed", 0, Settings(timeout=60.0))
    weights = torch.load(tmp_path / "weights.pt")
    assert check_weights(weights, {2: undisturbed.results[0]}, [2, 1, 2]) == []
