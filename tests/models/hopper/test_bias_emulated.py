"""``bias.cuh`` compiled for a CPU, one thread a lane: all of its paths against plain loops. GPU tests run it in the kernels."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.models.hopper.emulator import compile_emulation

EMULATION = Path(__file__).parent / "emulation"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_emulation(tmp_path_factory.mktemp("emulation"), EMULATION, "bias.cuh")


def run(program: Path, trials: int, shift: int) -> dict[str, Any]:
    done = subprocess.run([program, str(trials), str(shift)], capture_output=True, text=True, timeout=300, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_bias_and_its_gradients_equal_plain_loops(program: Path) -> None:
    found = run(program, 144, 0)
    assert min(found["paths"]) > 2  # each path was taken
    assert found["score"] < 2e-6
    assert found["sum"] < 1e-7


def test_a_wrong_edge_is_detected(program: Path) -> None:
    """Negative control: edges that are off by one second or event."""
    found = run(program, 12, 1)
    assert found["score"] > 1e-2
    assert found["sum"] > 1e-4
