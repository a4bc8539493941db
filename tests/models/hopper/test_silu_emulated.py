"""``silu.cuh`` compiled for a CPU, 256 threads a block, against plain loops. GPU tests run it after the attention."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.models.hopper.emulator import compile_emulation
from tests.slow import slow

EMULATION = Path(__file__).parent / "silu_emulation"


@pytest.fixture(scope="module", params=[(32, 128), slow((256, 64))], ids=lambda widths: f"{widths[0]}_{widths[1]}")
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    qk, v = request.param
    sizes = [f"-DDQK={qk}", f"-DDV={v}", "-DBACKWARD_ROWS=64"]
    return compile_emulation(tmp_path_factory.mktemp("silu"), EMULATION, "silu.cuh", sizes)


def run(program: Path, shift: float) -> tuple[float, float]:
    done = subprocess.run([program, str(shift)], capture_output=True, text=True, timeout=300, check=True)
    gradient, total = json.loads(done.stdout)
    return gradient, total


def test_gradients_and_their_sums_equal_plain_loops(program: Path) -> None:
    gradient, total = run(program, 0)
    assert gradient < 2**-8  # rounding to bf16
    assert total < 1e-4


def test_a_wrong_input_is_detected(program: Path) -> None:
    """Negative control: inputs of the SiLU that are wrong by a hundredth."""
    gradient, total = run(program, 0.01)
    assert gradient > 0.1
    assert total > 0.1
