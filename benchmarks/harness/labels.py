"""Readable names for the keys and machine descriptions in stored results.

The keys are a file format and stay as they are. Tables show these labels instead.
"""

from __future__ import annotations

import re

LABELS = {
    "side": "variant",
    "sides": "variants",
    "figure": "metric",
    "ms a step": "ms per step",
    "us a kernel": "µs per kernel",
    "samples a rank": "samples per rank",
    "samples": "samples per global batch",
    "shortest turn": "shortest block, ms per step",
    "longest turn": "longest block, ms per step",
    "ranks x batch": "ranks x samples per rank",
    "plan": "partition",
    "straggler %": "straggler, % of the step",
    "above bound %": "above the lower bound, %",
    "over argsort": "time relative to argsort",
    "argsort ms": "numpy.argsort ms",
    "eager by rank ms": "PyTorch, one mask per rank, ms",
    "speedup": "speed-up",
    "eager by index ms": "PyTorch, one gather, ms",
    "speedup over it": "speed-up over one gather",
    "recorded over other steps": "recorded step relative to others",
    "recording ms, by the monitor's own account": "recording ms, the monitor's own estimate",
    "share of a recorded step": "recording, share of a step",
    "publishing ms per interval": "publishing ms per logging interval",
    "recorded by default, every": "by default, one step is recorded out of",
    "overhead by default, by that account": "overhead by default, the monitor's own estimate",
    "overhead by default, by step times": "overhead by default, from step times",
    "in line ms": "exchange ms (if not hidden)",
    "in line %": "exchange, % of a step",
    "exposed in an epoch's first step ms": "exposed ms, first step of an epoch",
    "exposed in the others %": "exposed %, all other steps",
    "waited for data ms": "wait for data ms",
    "of slowest %": "idle, % of the slowest rank's compute",
    "times less": "reduction of idle time",
    "slowest ms": "slowest rank ms",
    "iteration ms": "step ms",
    "on the critical path ms": "exposed ms",
    "of an iteration %": "exposed, % of a step",
    "error %": "error %",
    "cost": "cost model",
    "measured in": "stored result",
    "waits off by at most ms": "largest error of a wait, ms",
    "bubble gone %": "bubble removed, %",
    "efficiency %": "throughput per rank, % of the smallest cluster",
    "QPS": "samples/s",
    "simulated in s": "simulation time, s",
    "gb_per_s_per_rank": "GB/s per rank",
    "bare_gb_per_s_per_rank": "GB/s per rank, no compute",
    "bytes_per_rank": "bytes per rank",
    "slowest_ms": "slowest rank ms",
    "slowdown": "time relative to compute alone",
    "world": "ranks",
    "nccl": "NCCL",
    "cores": "SMs",
    "forward_ms": "forward ms",
    "backward_ms": "backward ms",
    "after_backward_ms": "after backward ms",
    "bandwidth_mb_per_s": "bandwidth MB/s",
    "latency_ms": "latency ms",
    "lane": "exchange",
    "unordered": "difference with the order broken on purpose",
}
# Names of computations and transports, which are values in stored results.
VALUES = {
    "gemm": "matrix products",
    "hstu": "HSTU layers",
    "alone": "no exchange",
    "nccl": "NCCL",
    "freescale": "SM-free",
    "freescale over TCP": "SM-free over TCP",
    "freescale, NCCL's bytes": "SM-free, as many bytes as NCCL",
}
# Descriptions in results that were stored before the wording changed.
MACHINES = (
    (r"(\d+) cores of its own a rank", r"\1 SMs reserved per rank"),
    (r"(\d+) % of its cores a rank", r"at most \1% of the SMs per rank, not reserved"),
    (r"MPS, (\d+) SMs a rank", r"MPS, \1 SMs per rank, not reserved"),
    (r"MPS shares its cores out", r"SMs shared through MPS, not reserved"),
)


def label(key: str) -> str:
    """The name of a stored key in tables."""
    return LABELS.get(key, key)


def value_label(value: str) -> str:
    """The name of a stored computation or transport in tables."""
    return VALUES.get(value, value)


def machine(text: str) -> str:
    """The description of a machine in today's wording."""
    for pattern, wording in MACHINES:
        text = re.sub(pattern, wording, text)
    return text
