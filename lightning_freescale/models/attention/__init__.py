"""Jagged pointwise attention of HSTU (arXiv 2402.17152): one function, three implementations.

Event ``i`` of a history attends to the events ``j <= i`` of the same history, without a softmax::

    s_ij  = alpha * q_i . k_j + position_bias[bucket(i - j)] + time_bias[bucket(t_i - t_j)]
    out_i = 1 / (i + 1) * sum_j silu(s_ij) * v_j

The normaliser is the number of events attended to, so an output depends on its own history alone, never on the batch
it lies in: moving a sample to another rank changes nothing. (HSTU normalises the
output again, so its scale matters little; but divided by the longest history's length, as is usual, the outputs of
short histories would drown in that norm's epsilon.)

The device of ``q`` says which implementation runs:

* ``cpu``: blocks of histories of like length (:mod:`.cpu`); the work is about ``sum(L^2)``.
* ``cuda``: our Triton kernels (:mod:`.triton_attention`); the work is about ``sum(L^2) / 2`` and no ``L^2`` is stored.
* :func:`dense_attention` pads to the longest history. Tests and benchmarks compare against it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_freescale.models.attention import cpu
from lightning_freescale.models.attention.buckets import log_bucket, relative_times


def plan_attention(offsets: Tensor, timestamps: Tensor) -> Any:
    """What :func:`hstu_attention` needs to know of lengths and times. Make it once per batch; all layers share it.

    Args:
        offsets: ``[B + 1]`` integer, from 0 to ``sum(L)``.
        timestamps: ``[sum(L)]`` int64, seconds; need not be sorted.
    """
    if offsets.device.type == "cuda":
        from lightning_freescale.models.attention import triton_attention  # Triton exists on CUDA machines only

        return triton_attention.plan(offsets, relative_times(timestamps, offsets))
    return cpu.Plan(offsets, relative_times(timestamps, offsets))


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    timestamps: Tensor,
    position_bias: Tensor,
    time_bias: Tensor,
    *,
    alpha: float | None = None,
    plan: Any = None,
) -> Tensor:
    """Causal pointwise SiLU attention over jagged histories; the module's docstring has the formula.

    Sums are accumulated in float32 (float64 for float64 inputs) whatever the type of the inputs.

    Args:
        q: ``[sum(L), H, Dqk]`` queries.
        k: ``[sum(L), H, Dqk]`` keys.
        v: ``[sum(L), H, Dv]`` values.
        offsets: ``[B + 1]`` integer; history ``b`` is rows ``offsets[b]`` to ``offsets[b + 1]``, which may be none.
        timestamps: ``[sum(L)]`` int64, seconds; need not be sorted.
        position_bias: ``[P]``, shared by the heads.
        time_bias: ``[T]``, shared by the heads.
        alpha: scale of the scores, ``Dqk ** -0.5`` by default.
        plan: result of :func:`plan_attention` for these offsets and timestamps, made here if absent.

    Returns:
        ``[sum(L), H, Dv]`` of the type of ``v``.
    """
    alpha = q.shape[-1] ** -0.5 if alpha is None else alpha
    plan = plan_attention(offsets, timestamps) if plan is None else plan
    if q.device.type == "cuda":
        from lightning_freescale.models.attention import triton_attention

        return triton_attention.attention(q, k, v, position_bias, time_bias, alpha, plan)
    return cpu.attention(q, k, v, position_bias, time_bias, alpha, plan)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    timestamps: Tensor,
    position_bias: Tensor,
    time_bias: Tensor,
    *,
    alpha: float | None = None,
) -> Tensor:
    """:func:`hstu_attention` written down plainly: ``B x H x Lmax x Lmax`` scores, differentiated by autograd."""
    alpha = 1 / math.sqrt(q.shape[-1]) if alpha is None else alpha
    lengths = offsets.diff().tolist()
    longest = max(lengths)
    pad = torch.nn.utils.rnn.pad_sequence
    q, k, v_ = (pad(x.split(lengths), batch_first=True).transpose(1, 2) for x in (q, k, v))  # [B, H, L, D]
    times = pad(relative_times(timestamps, offsets).split(lengths), batch_first=True)

    position = torch.arange(longest, device=q.device, dtype=torch.int32)
    by_position = log_bucket(position[:, None] - position, len(position_bias)).long()  # [L, L]
    by_time = log_bucket(times[:, :, None] - times[:, None], len(time_bias)).long()  # [B, L, L]
    scores = alpha * q @ k.mT + (position_bias[by_position] + time_bias[by_time])[:, None]
    weights = torch.nn.functional.silu(scores).tril() / (position + 1)[:, None]
    out = (weights.to(v.dtype) @ v_).transpose(1, 2)  # [B, L, H, Dv]
    return torch.cat([row[:length] for row, length in zip(out, lengths, strict=True)])
