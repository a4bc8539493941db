"""The Triton kernels of zero-collision ids, in Triton's interpreter, against the C++ core: slots, states and counts."""

from __future__ import annotations

from tests.models.interpreter import run_interpreted

SCRIPT = """
from tests.embedding.zero_collision.kernels import compare_with_core
import torch
for policy in (None, "ttl", "lru"):
    assert compare_with_core(policy, torch.device("cpu"), steps=6, batch=60) > 0
"""


def test_interpreted_kernels_equal_the_core() -> None:
    run_interpreted(SCRIPT)
