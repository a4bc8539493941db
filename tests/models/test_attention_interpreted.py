"""The attention kernels in Triton's interpreter, against the dense reference."""

from __future__ import annotations

from tests.models.interpreter import run_interpreted

SCRIPT = """
import sys, torch
from lightning_freescale.models.attention import triton_attention
from lightning_freescale.models.attention.buckets import relative_times
from tests.models.cases import (
    NAMES, assert_close, attention_inputs, dense_result, relative_errors, run_attention, run_without_bias, zero_bias
)

def interpreted(q, k, v, offsets, timestamps, position_bias, time_bias):
    plan = triton_attention.plan(offsets, relative_times(timestamps, offsets))
    biases = None if position_bias is None else (position_bias, time_bias)
    return triton_attention.attention(q, k, v, biases, q.shape[-1] ** -0.5, plan)

# Small tiles, because the interpreter is slow. They also reach blocks far from the diagonal, which take another code path.
for config in (triton_attention.LaunchConfig(32, 16, 4, 1), triton_attention.LaunchConfig(16, 32, 4, 1)):
    triton_attention.configs = lambda *_: dict.fromkeys(("forward", "queries", "keys"), config)
    for dtype, lengths, sorted_times in (
        (torch.float32, [1, 0, 90, 2, 0], True),
        (torch.float32, [33], False),
        (torch.float16, [40], True),
    ):
        inputs = attention_inputs(lengths, heads=2, qk_dim=8, v_dim=12, dtype=dtype, sorted_times=sorted_times)
        expected, tolerance = dense_result(inputs), 1e-6 if dtype == torch.float32 else 1e-3
        assert_close(run_attention(interpreted, inputs), expected, tolerance)
without = dense_result(zero_bias(inputs), NAMES[:4])
assert_close(run_without_bias(interpreted, inputs), without, 2 * tolerance)
wrong = inputs | {"time_bias": inputs["time_bias"].roll(1)}
assert relative_errors(run_attention(interpreted, wrong), expected)["out"] > 10 * tolerance
inputs = attention_inputs([0, 0], dtype=torch.float32, position_buckets=3)
assert not run_attention(interpreted, inputs)["dtime"].any()
"""


def test_interpreted_kernels_equal_dense_reference() -> None:
    run_interpreted(SCRIPT)
