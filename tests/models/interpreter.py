"""Run Triton kernels without a GPU, in Triton's interpreter. A process of its own sets the interpreter up."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run_interpreted(script: str) -> None:
    """Run ``script`` with interpreted kernels. Skips the test without Triton, and with a GPU, where the compiled ones run."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, on which the tests run the compiled kernels")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not work with this NumPy")
    assert done.returncode == 0, done.stderr
