"""Histories and inputs of an attention, and the time that a call takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_freescale.models.attention.buckets import num_buckets

TOKENS = 65_536


class AttentionCase(NamedTuple):
    name: str
    lengths: list[int]
    heads: int
    width: int  # Dqk = Dv


def log_normal(samples: int, mean: float, longest: int, seed: int = 0) -> list[int]:
    """Log-normal lengths with sigma 1.2."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - 0.72, 1.2, samples)
    return drawn.clip(1, longest).astype(int).tolist()


def long_tailed(longest: int) -> list[int]:
    """Log-normal lengths of ``TOKENS`` events in all. The first seed whose longest history reaches ``longest`` is used."""
    for seed in range(1000):
        generator, lengths = np.random.default_rng(seed), [0]
        while sum(lengths) < TOKENS:
            lengths.append(int(min(generator.lognormal(7.3, 1.2), longest)))
        lengths[-1] -= sum(lengths) - TOKENS
        if max(lengths) == longest:
            return [length for length in lengths if length > 0]
    raise ValueError(f"no seed gives a history of {longest} events")


def make_inputs(case: AttentionCase, device: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    total, dtype = sum(case.lengths), torch.float32 if device == "cpu" else torch.bfloat16
    gaps = torch.empty(total).exponential_(1 / 3600).long() + 1  # one event an hour
    made = {name: torch.randn(total, case.heads, case.width, dtype=dtype) for name in ("q", "k", "v")}
    made |= {
        "offsets": torch.tensor([0, *case.lengths]).cumsum(0),
        "timestamps": torch.cat([part.cumsum(0) for part in gaps.split(case.lengths)]),
        "position_bias": torch.randn(num_buckets(max(case.lengths))),
        "time_bias": torch.randn(num_buckets(2**31 - 1)),
    }
    return {name: x.to(device).requires_grad_(x.is_floating_point()) for name, x in made.items()}


def milliseconds(call: Callable[[], Any], device: str, repeats: int) -> float:
    """Median of CUDA event times, or the shortest wall time on a CPU, after a warm-up."""
    call()
    if device == "cpu":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return 1e3 * min(times)
    call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start_event, end_event in events:
        start_event.record()
        call()
        end_event.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)
