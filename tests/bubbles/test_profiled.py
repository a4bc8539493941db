"""The bubble that is computed from a profiler's trace, on a known trace."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bubbles.profiled import MARKER, Profiled, by_hand

COMPUTE, SIDE, NCCL = 7, 13, 20


def kernel(name: str, ts: float, dur: float, stream: int = COMPUTE, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "args": {"stream": stream}}


def marker(ts: float) -> dict[str, Any]:
    return kernel(f"at::cuda::(anonymous namespace)::{MARKER}(long)", ts, 1)


TRACE = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 5000, "args": {"stream": COMPUTE}},
    kernel("before the first marker", 500, 100),
    marker(1000),
    kernel("gemm", 1100, 200),
    kernel("gemm", 1310, 90),  # after the gap of a kernel launch
    kernel("ncclDevKernel_SendRecv", 1400, 300, NCCL),
    kernel("index", 1500, 50, SIDE),
    kernel("Memcpy DtoD (Device -> Device)", 1750, 20, cat="gpu_memcpy"),
    kernel("Memcpy HtoD (Pinned -> Device)", 1600, 10, SIDE, cat="gpu_memcpy"),
    kernel("gemm", 1900, 200),  # continues in the next step
    marker(2000),
    kernel("void fbgemm_gpu::permute_2D_data_kernel_vec<false, long, float>", 2100, 150),
    kernel("void fbgemm_gpu::_block_bucketize_sparse_features_cuda_kernel1<long>", 2250, 20, SIDE),
    kernel("gemm", 2300, 400),
    kernel("ncclDevKernel_AllReduce", 2400, 400, NCCL),  # overlaps with the gemm for 300
    marker(3000),
    kernel("after the last marker", 3100, 100),
]


def micros(step: Profiled) -> dict[str, float]:
    return {name: pytest.approx(1e6 * value, abs=1e-3) for name, value in step._asdict().items()}


def test_steps_of_a_trace() -> None:
    first, second = by_hand(reversed(TRACE))  # the order does not matter
    assert micros(first) == {
        "wall": 1000, "busy": 390, "sorting": 0, "elsewhere": 60, "exchanging": 300, "copying": 20, "gaps": 10
    }  # fmt: skip
    assert micros(second) == {
        "wall": 1000, "busy": 500, "sorting": 150, "elsewhere": 20, "exchanging": 100, "copying": 0, "gaps": 0
    }  # fmt: skip
    assert first.bubble == pytest.approx(600e-6)
    assert second.bubble == pytest.approx(500e-6)


def test_concurrent_kernels_count_once() -> None:
    (step,) = by_hand([marker(0), kernel("a", 10, 40), kernel("b", 20, 10), kernel("c", 40, 20), marker(100)])
    assert micros(step)["busy"] == 50


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([marker(0), kernel("a", 1, 1)], "1 markers on streams"),
        ([], "0 markers"),
        ([marker(0), marker(5) | {"args": {"stream": SIDE}}], "streams .7, 13."),
    ],
)
def test_a_trace_without_steps_is_refused(events: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        by_hand(events)
