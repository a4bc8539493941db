"""Jagged pointwise attention of HSTU (arXiv 2402.17152): one function, one implementation for each kind of device.

Event ``i`` of a history attends to the events ``j <= i`` of the same history, without a softmax::

    s_ij  = alpha * q_i . k_j + position_bias[bucket(i - j)] + time_bias[bucket(t_i - t_j)]
    out_i = 1 / (i + 1) * sum_j silu(s_ij) * v_j

Both biases may be absent. Then position and time must be part of the input (:mod:`lightning_freescale.models.event_encoding`).

The sum is divided by the number of events attended to. An output therefore depends on its own history alone and not on the
other samples of the batch: balancing may move a sample to another rank. HSTU normalizes the output again, so its scale matters
little. But with the usual divisor, the length of the longest history, the outputs of short histories would be so small that the
epsilon of that norm would dominate them.

Modules:

* :mod:`.buckets`: the logarithmic buckets of the two biases.
* :mod:`.cpu`: for CPU tensors. Groups of histories of similar length; the work is about ``sum(L^2)``.
* :mod:`.cuda`: for CUDA tensors: selects the Hopper kernels or the Triton kernels. The work of both is about
  ``sum(L^2) / 2``, and no array of size ``L^2`` is stored.
* :mod:`.hopper`: kernels in CUDA C++ for Hopper GPUs; :mod:`.hopper_plan`: their plan, made by Triton kernels.
* :mod:`.triton_attention` and :mod:`.triton_kernels`: kernels for all other GPUs.
* :func:`dense_attention` in this file: the reference, padded to the longest history. Tests and benchmarks compare with it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_freescale.models.attention import cpu, cuda
from lightning_freescale.models.attention.buckets import log_bucket, relative_times
from lightning_freescale.runtime.errors import InputError


def plan_attention(offsets: Tensor, timestamps: Tensor, bias: bool = True) -> Any:
    """What :func:`hstu_attention` derives from lengths and times. Compute it once per batch; all layers share it.

    Args:
        offsets: ``[B + 1]`` integer, from 0 to ``sum(L)``.
        timestamps: ``[sum(L)]`` int64, seconds, in any order.
        bias: whether the attention has the two biases. Without them the times are not used.
    """
    if offsets.device.type == "cuda":
        return cuda.CudaPlan(offsets, timestamps, bias)
    return cpu.CpuPlan(offsets, relative_times(timestamps, offsets) if bias else None)


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    timestamps: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    *,
    alpha: float | None = None,
    plan: Any = None,
) -> Tensor:
    """Causal pointwise SiLU attention over jagged histories. The docstring of the module has the formula.

    Sums are accumulated in float32, and in float64 for float64 inputs. On CUDA float64 is not supported.

    Args:
        q: ``[sum(L), H, Dqk]`` queries.
        k: ``[sum(L), H, Dqk]`` keys.
        v: ``[sum(L), H, Dv]`` values.
        offsets: ``[B + 1]`` integer; history ``b`` has the rows ``offsets[b]`` to ``offsets[b + 1]`` and may be empty.
        timestamps: ``[sum(L)]`` int64, seconds, in any order.
        position_bias: ``[P]``, one bias per bucket of the distance in events; shared by the heads.
        time_bias: ``[T]``, one bias per bucket of the elapsed seconds; shared by the heads. Give both biases, or ``None`` for
            both: then the scores are ``alpha * q_i . k_j`` alone.
        alpha: scale of the scores; ``Dqk ** -0.5`` by default.
        plan: result of :func:`plan_attention` for these offsets and timestamps; computed here if absent.

    Returns:
        ``[sum(L), H, Dv]``, of the type of ``v``.
    """
    if (position_bias is None) != (time_bias is None):
        raise InputError("position_bias, time_bias: one of them is None; give both or neither")
    alpha = q.shape[-1] ** -0.5 if alpha is None else alpha
    plan = plan_attention(offsets, timestamps, bias=position_bias is not None) if plan is None else plan
    implementation: Any = cuda if q.device.type == "cuda" else cpu
    return implementation.attention(q, k, v, position_bias, time_bias, alpha, plan)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    timestamps: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    *,
    alpha: float | None = None,
) -> Tensor:
    """The reference of :func:`hstu_attention`: ``B x H x Lmax x Lmax`` scores, differentiated by autograd."""
    alpha = 1 / math.sqrt(q.shape[-1]) if alpha is None else alpha
    lengths = offsets.diff().tolist()
    longest = max(lengths)
    pad = torch.nn.utils.rnn.pad_sequence
    q, k, v_ = (pad(x.split(lengths), batch_first=True).transpose(1, 2) for x in (q, k, v))  # [B, H, L, D]
    times = pad(relative_times(timestamps, offsets).split(lengths), batch_first=True)

    position = torch.arange(longest, device=q.device, dtype=torch.int32)
    scores = alpha * q @ k.mT
    if position_bias is not None and time_bias is not None:
        by_position = log_bucket(position[:, None] - position, len(position_bias)).long()  # [L, L]
        by_time = log_bucket(times[:, :, None] - times[:, None], len(time_bias)).long()  # [B, L, L]
        scores = scores + (position_bias[by_position] + time_bias[by_time])[:, None]
    weights = torch.nn.functional.silu(scores).tril() / (position + 1)[:, None]
    out = (weights.to(v.dtype) @ v_).transpose(1, 2)  # [B, L, H, Dv]
    return torch.cat([row[:length] for row, length in zip(out, lengths, strict=True)])
