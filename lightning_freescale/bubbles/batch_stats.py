"""What the monitor records of a batch: samples, tokens, padding, and the cost of its samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.batch.contents import find_parts
from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES
from lightning_freescale.bubbles.spans import Step
from lightning_freescale.bubbles.timeline import Timeline

SampleCost = Callable[[NDArray, NDArray], NDArray]  # history lengths [B], candidates [B] -> cost of each sample [B]


def record_batch(timeline: Timeline, batch: Any) -> None:
    """Record the number of samples of ``batch`` and, where it has them, its history lengths ``[B]`` and candidates ``[B]``.

    Does not wait for the device. A batch without a KeyedJaggedTensor has only samples. A KeyedJaggedTensor without a
    ``history`` feature has the ids of all features of a sample as its length.
    """
    features = next(iter(find_parts(batch, KeyedJaggedTensor)), None)
    if features is None:
        tensor = next(iter(find_parts(batch, Tensor)), None)
        timeline.count("samples", tensor.shape[0] if tensor is not None and tensor.ndim else 1)
        return
    timeline.count("samples", features.stride())
    if features.variable_stride_per_key():
        timeline.count("tokens", features.values().numel())
        return
    by_key = dict(zip(features.keys(), features.lengths().view(-1, features.stride()), strict=True))
    lengths = by_key[HISTORY] if HISTORY in by_key else torch.stack(list(by_key.values())).sum(0)
    timeline.keep("lengths", lengths)
    if HISTORY in by_key and NEGATIVES in by_key:
        per_position = getattr(batch, "negatives_per_position", None)
        timeline.keep("candidates", (lengths - 1).clamp(min=0) * (per_position or by_key[NEGATIVES]))


def add_batch_stats(step: Step, cost: SampleCost, cost_is_flops: bool) -> Step:
    """``step`` with the counts ``cost``, ``tokens``, ``padded`` and ``flops``, and the arrays ``lengths`` and ``costs``.

    Args:
        step: with what :func:`record_batch` recorded.
        cost: of each sample.
        cost_is_flops: whether ``cost`` gives FLOPs; ``flops`` is set only then.
    """
    lengths = step.arrays.get("lengths", np.zeros(0))
    costs = cost(lengths, step.arrays.get("candidates", np.zeros(len(lengths))))
    counts = {"cost": float(costs.sum()), **step.counts}
    if len(lengths):
        counts |= {"tokens": float(lengths.sum()), "padded": float(len(lengths) * lengths.max())}
    if cost_is_flops:
        counts["flops"] = counts["cost"]
    return replace(step, counts=counts, arrays={"lengths": lengths, "costs": costs})
