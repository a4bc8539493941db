"""The bubble in a profiler's trace, and where it differs from that of the monitor, on a known trace."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_freescale.bubbles.spans import ENGINE, Kind, Span, Step
from tests.bubbles.profiled import MARKER, Intervals, by_hand, compare, useful

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


def micros(intervals: Intervals) -> Any:
    return [pytest.approx((1e6 * start, 1e6 * end), abs=1e-3) for start, end in intervals]


def test_steps_of_a_trace() -> None:
    first, second = by_hand(reversed(TRACE))  # the order does not matter
    assert micros(first.busy) == [(100, 300), (310, 400), (900, 1000)]
    assert micros(first.exchanging) == [(400, 700)]
    assert micros([(0, first.wall), (first.elsewhere, first.copying)]) == [(0, 1000), (60, 20)]
    assert micros(second.busy) == [(0, 100), (300, 700)]
    assert micros(second.exchanging) == [(100, 250), (700, 800)]  # sorting, and the end of the AllReduce
    assert micros([(0, second.wall), (second.elsewhere, second.copying)]) == [(0, 1000), (20, 0)]
    assert first.bubble == pytest.approx(610e-6)


def test_concurrent_kernels_count_once() -> None:
    (step,) = by_hand([marker(0), kernel("a", 10, 40), kernel("b", 20, 10), kernel("c", 40, 20), marker(100)])
    assert micros(step.busy) == [(10, 60)]


def recorded(*spans: tuple[str, float, float]) -> Step:
    """A step of the monitor from 3 s to 3.001 s with spans in microseconds since its start."""
    moments = [(Kind(kind), ENGINE, 3 + start / 1e6, 3 + end / 1e6, 3 + start / 1e6) for kind, start, end in spans]
    return Step(7, 3.0, 3.001, tuple(Span(*moment) for moment in moments))


def test_differences_explain_the_two_bubbles() -> None:
    """Kernels of the model in the wait, waits in the forward, and gaps in the forward."""
    step = recorded(("dense_forward", 90, 950), ("row_exchange", 390, 600))
    work = useful(step)
    assert micros(work) == [(90, 390), (600, 950)]
    profiled = by_hand(TRACE)[0]
    found = compare(profiled, work)
    # busy from 390 to 400 and from 950; NCCL from 600 to 700; idle at 90, 300, and from 700 to 900
    assert micros([(found.model_in_bubble, found.exchange_in_compute)]) == [(60, 100)]
    assert micros([(0, found.idle_in_compute)]) == [(0, 220)]
    monitor = step.wall - sum(end - start for start, end in work)
    explained = monitor + found.exchange_in_compute + found.idle_in_compute - found.model_in_bubble
    assert explained == pytest.approx(profiled.bubble)


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
