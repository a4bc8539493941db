"""Ranks that are killed at random moments: the others end with a named error, and a restart loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.harness.gpu_cluster.mps import MPS_CONTROL
from tests.faults.__main__ import main
from tests.faults.attempt import Outcome
from tests.faults.campaign import campaign
from tests.faults.checks import check_samples, check_survivors, check_weights
from tests.faults.failures import lose_mps_server, mps_clients
from tests.faults.training import EPOCHS, USERS, Settings
from tests.gpu.clusters import Call, started_early


@pytest.mark.timeout(400)
def test_ten_kills() -> None:
    result = campaign(kills=10, seed=22, worlds=(2, 3), timeout=10.0, parallel=3, kills_each=4)
    assert result["problems"] == {}
    assert result["left_behind"] == []
    assert result["kills"] == 10
    assert result["survivors"] >= 10
    assert result["with_resharding"] >= 1


def two_kills_and_other_failures() -> subprocess.CompletedProcess[str]:
    """In a process of its own, which does not use CUDA: the ranks are forked from it."""
    options = (
        "--device cuda --kills 2 --kills-each 2 --ranks 2 --parallel 3 --failures hang memory --seed 3 --shared-gpu"
    )
    command = [sys.executable, "-m", "tests.faults", *options.split()]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)


@pytest.mark.gpu
@pytest.mark.timeout(400)
@started_early(Call(two_kills_and_other_failures))
def test_two_kills_and_other_failures_on_a_gpu(results: subprocess.CompletedProcess[str]) -> None:
    assert results.returncode == 0, results.stdout[-20_000:] + results.stderr[-2_000:]


# ---- the checks can fail -----------------------------------------------------------------------------------------------
def record(folder: Path, attempt: int, begin: int, steps: dict[int, tuple[int, list[int]]]) -> None:
    lines = [{"begin": begin}]
    lines += [{"step": step, "epoch": epoch, "users": users} for step, (epoch, users) in steps.items()]
    path = folder / "samples" / f"{attempt}.0.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_lost_and_repeated_samples_are_found(tmp_path: Path) -> None:
    everyone = list(range(USERS))
    steps = {epoch + 1: (epoch, everyone) for epoch in range(EPOCHS)}
    record(tmp_path, 0, 0, {1: steps[1], 2: (1, everyone[:5])})  # Step 2 is not in the checkpoint of step 1.
    record(tmp_path, 1, 1, {step: entry for step, entry in steps.items() if step > 1})
    assert check_samples(tmp_path) == []
    record(tmp_path, 1, 1, {2: (1, everyone[1:]), 3: (2, [*everyone, 7])})
    assert check_samples(tmp_path) == ["1 samples lost: [(1, 0)]", "1 samples trained twice: [(2, 7)]"]


def test_other_weights_are_found() -> None:
    reference = {"w": torch.ones(3)}
    rounded, wrong = {"w": torch.ones(3) + 1e-6}, {"w": torch.ones(3) + 0.1}
    assert check_weights({"w": torch.ones(3)}, reference, exact=True) == []
    assert len(check_weights(rounded, reference, exact=True)) == 1
    assert check_weights(rounded, reference, exact=False) == []
    assert len(check_weights(wrong, reference, exact=False)) == 1


def test_survivors_that_hang_or_name_nobody_are_found() -> None:
    settings = Settings(timeout=5.0)
    good = Outcome(True, {}, {0: "FreeScaleError: rank 1 is missing"}, {0: 3.0})
    assert check_survivors(good, 1, settings) == []
    bad = Outcome(True, {}, {0: "RuntimeError: connection closed"}, {0: 11.0}, stuck=[2])
    assert len(check_survivors(bad, 1, settings)) == 3
    assert len(check_survivors(good, 1, settings, "memory")) == 1
    lost = Outcome(
        True, {}, {0: "AcceleratorError: CUDA error: MPS client failed", 1: "rank 0 is missing"}, {0: 3.0, 1: 11.0}
    )
    assert (
        len(check_survivors(lost, 0, settings, "mps")) == 2
    )  # Rank 1 is late, and does not say what CUDA has reported.


# ---- an MPS server that dies; the control program is replaced by one that lists a process of this test ----------------------
def test_the_mps_server_is_killed_and_its_daemon_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as server:
        tool, notes = tmp_path / MPS_CONTROL, tmp_path / "notes"
        answer = f"kill -0 {server.pid} 2>/dev/null && echo {server.pid}"
        tool.write_text(f"""#!/bin/sh
            [ $# = 0 ] && read -r line
            echo $CUDA_MPS_PIPE_DIRECTORY $1 $line >> {notes}
            [ "$line" = get_server_list ] && {answer}
            exit 0""")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with mps_clients():
            folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
            lose_mps_server(torch.device("cuda"))
            assert server.wait(10.0) == -signal.SIGKILL
            with pytest.raises(RuntimeError, match="lists no server"):
                lose_mps_server(torch.device("cuda"))
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    asked = ["-d", "get_server_list", "get_server_list", "quit"]
    assert notes.read_text().splitlines() == [f"{folder} {what}" for what in asked]


def test_without_a_gpu_there_is_no_mps_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tests.faults", "--failures", "mps"])
    with pytest.raises(SystemExit):
        main()
    assert "--failures mps: this failure needs a GPU; add --device cuda" in capsys.readouterr().err
