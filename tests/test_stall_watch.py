"""A rank that makes no progress says what it waits for, and ends; and so do the others of its cluster. No GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.gpu_cluster import launcher
from benchmarks.harness.gpu_cluster.mps import server_log
from benchmarks.harness.gpu_cluster.rank_process import EXIT_OF_TIMEOUT, ClusterFailed
from tests.gpu.stall_watch import LaunchNotes

PROGRAM = """
import os
import time

from tests.gpu.stall_watch import StallWatch

watch = StallWatch(60)
watch.limit(3)


def wait_for_the_other() -> None:
    time.sleep(60)


for number in range(8):  # together longer than the limit
    watch.progress(f"batch {number}")
    time.sleep(0.5)
if MODE == "stalls" and os.environ["RANK"] == "0":
    wait_for_the_other()
time.sleep(0 if MODE == "works" else 60)
"""


def run(mode: str, folder: Path) -> list[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("MODE", repr(mode)))
    return launcher.run(2, [str(program)], timeout=50, gpu=False)


def test_every_rank_says_what_it_waits_for(tmp_path: Path) -> None:
    with pytest.raises(ClusterFailed, match="made no progress") as failure:
        run("stalls", tmp_path)
    assert failure.value.status == EXIT_OF_TIMEOUT
    text = str(failure.value)
    for rank in (0, 1):
        assert f"rank {rank}: no progress for 3 s since batch 7" in text
    assert "in wait_for_the_other" in text  # the stack


def test_a_rank_that_makes_progress_is_left_alone(tmp_path: Path) -> None:
    assert run("works", tmp_path) == ["", ""]


class Owner:
    def start(self, name: str, count: int) -> str:
        return name * count


def test_calls_are_noted_and_return_what_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    notes, noted = LaunchNotes(), []
    monkeypatch.setattr(notes, "note", noted.append)
    monkeypatch.setattr(Owner, "start", Owner.start)  # restored at the end
    notes.wrap(Owner, "start", lambda owner, name, count: f"{type(owner).__name__}: {count} of {name}")
    assert Owner().start("ab", count=2) == "abab"
    assert noted == ["Owner: 2 of ab"]
    assert notes.incomplete() == []


def test_the_end_of_the_log_of_the_servers(tmp_path: Path) -> None:
    variables = {"CUDA_MPS_LOG_DIRECTORY": str(tmp_path)}
    assert server_log(variables) == ""  # no client has come
    (tmp_path / "server.log").write_text("".join(f"line {number}\n" for number in range(30)))
    assert server_log(variables, lines=2) == "line 28\nline 29"
