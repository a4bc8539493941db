"""HSTU attention on CPU: blocks of histories of like length, scores recomputed in backward.

Histories are sorted by length and grouped so that padding adds little work; a group is cut into chunks of queries that
fit the cache, each against the keys up to its last query. Memory is ``O(chunk * L)`` and work close to ``sum(L^2)``,
or half of it where histories are long.

Padding is on the right, and attention is causal: a padded key is seen by padded queries only, whose outputs are dropped
and whose gradients are zero. So slots of padding may hold any row, and no mask but the causal one is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_freescale.models.buckets import log_bucket

PADDED_WORK = 1.25  # most that padding may multiply a group's sum of L^2 by,
FREE_WORK = 2**14  # beyond this many scores, which cost no more than the calls of one more group
CHUNK_SCORES = 2**18  # scores of a chunk, all heads: a few arrays of this size fit the cache
MIN_CHUNK = 32  # queries; shorter ones spend their time in calls


class Group(NamedTuple):
    """``G`` histories, padded to the longest of them, ``L``."""

    size: int  # G
    length: int  # L
    rows: Tensor  # [G * L] the flat row of each slot; slots of padding name some row of the batch
    valid: Tensor  # [G * L] bool, False for padding
    times: Tensor  # [G, L] int32, relative


def group_lengths(lengths: list[int]) -> list[list[int]]:
    """Group samples of like length: indices into ``lengths``, longest first; empty histories are left out.

    In each group ``G * L^2 <= PADDED_WORK * sum(L_i^2) + FREE_WORK``, where ``L`` is the longest of its histories.
    """
    order = sorted((b for b, length in enumerate(lengths) if length), key=lambda b: -lengths[b])
    groups: list[list[int]] = []
    longest = work = 0
    for b in order:
        work += lengths[b] ** 2
        if groups and (len(groups[-1]) + 1) * longest**2 <= PADDED_WORK * work + FREE_WORK:
            groups[-1].append(b)
        else:
            groups.append([b])
            longest, work = lengths[b], lengths[b] ** 2
    return groups


def chunks(size: int, length: int, heads: int) -> Iterator[tuple[int, int]]:
    """Cut the ``length`` queries of a group of ``size`` histories into ranges ``(start, stop)``."""
    step = max(MIN_CHUNK, CHUNK_SCORES // (size * heads * length))
    for start in range(0, length, step):
        yield start, min(start + step, length)


def plan(offsets: Tensor, times: Tensor) -> list[Group]:
    """Groups of one batch: ``offsets [B + 1]``, ``times [sum(L)]`` int32, relative to each history's first."""
    lengths = offsets.diff().tolist()
    groups = []
    for samples in group_lengths(lengths):
        longest = lengths[samples[0]]
        slot = torch.arange(longest)
        start = offsets[samples].long()[:, None]
        valid = slot < offsets.diff()[samples][:, None]
        rows = torch.where(valid, start + slot, start)
        groups.append(Group(len(samples), longest, rows.flatten(), valid.flatten(), times[rows]))
    return groups


def _bias(
    group: Group, start: int, stop: int, position_bias: Tensor, time_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Bias ``[G, stop - start, stop]`` of a chunk, and the buckets it came from, flat."""
    query = torch.arange(start, stop, dtype=torch.int32)[:, None]
    by_position = log_bucket(query - torch.arange(stop, dtype=torch.int32), len(position_bias))
    elapsed = group.times[:, start:stop, None] - group.times[:, None, :stop]
    by_time = log_bucket(elapsed, len(time_bias))
    bias = time_bias.index_select(0, by_time.flatten()).view(elapsed.shape)
    bias += position_bias.index_select(0, by_position.flatten()).view(by_position.shape)
    return bias, by_position.flatten(), by_time.flatten()


def _causal_mean(start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """``[stop - start, stop]``: ``1 / (i + 1)`` where query ``i`` may see key ``j <= i``, else 0."""
    count = torch.arange(start + 1, stop + 1, dtype=dtype)
    return count.reciprocal()[:, None].expand(-1, stop).tril(start)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_bias: Tensor,
        time_bias: Tensor,
        alpha: float,
        groups: list[Group],
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, position_bias, time_bias)
        ctx.alpha, ctx.groups = alpha, groups
        heads, wide = q.shape[1], torch.promote_types(q.dtype, torch.float32)
        position_bias, time_bias = position_bias.to(wide), time_bias.to(wide)
        out = torch.empty_like(v)
        for group in groups:
            q_, k_, v_ = (_gather(x, group, wide) for x in (q, k, v))
            kt = k_.mT.contiguous()  # BLAS multiplies small matrices several times faster this way
            q_ *= alpha
            out_ = torch.empty_like(v_)
            for start, stop in chunks(group.size, group.length, heads):
                bias, _, _ = _bias(group, start, stop, position_bias, time_bias)
                scores = q_[:, start:stop] @ kt[..., :stop]
                scores.view(heads, *bias.shape).add_(bias)
                torch.nn.functional.silu(scores, inplace=True)
                scores *= _causal_mean(start, stop, wide)
                out_[:, start:stop] = scores @ v_[:, :stop]
            _scatter(out, out_, group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position_bias, time_bias = ctx.saved_tensors
        heads, wide = q.shape[1], torch.promote_types(q.dtype, torch.float32)
        position_table, time_table = position_bias.to(wide), time_bias.to(wide)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dposition, dtime = torch.zeros_like(position_table), torch.zeros_like(time_table)
        for group in ctx.groups:
            q_, k_, v_, dout_ = (_gather(x, group, wide) for x in (q, k, v, grads[0]))
            kt, vt = k_.mT.contiguous(), v_.mT.contiguous()
            q_ *= ctx.alpha
            dout_.view(heads, -1, dout_.shape[-1])[:, ~group.valid] = 0
            dq_, dk_, dv_ = torch.empty_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
            for start, stop in chunks(group.size, group.length, heads):
                bias, by_position, by_time = _bias(group, start, stop, position_table, time_table)
                mean = _causal_mean(start, stop, wide)
                scores = q_[:, start:stop] @ kt[..., :stop]
                scores.view(heads, *bias.shape).add_(bias)
                weights = torch.nn.functional.silu(scores).mul_(mean)
                dv_[:, :stop] += weights.mT @ dout_[:, start:stop]
                dweights = (dout_[:, start:stop] @ vt[..., :stop]).mul_(mean)
                dscores = torch.ops.aten.silu_backward(dweights, scores)
                dq_[:, start:stop] = dscores @ k_[:, :stop]
                dk_[:, :stop] += dscores.mT @ q_[:, start:stop]
                dbias = dscores.view(heads, *bias.shape).sum(0)  # [G, chunk, stop]
                dtime += torch.bincount(by_time, dbias.flatten(), len(dtime))
                dposition += torch.bincount(by_position, dbias.sum(0).flatten(), len(dposition))
            dq_ *= ctx.alpha
            for grad, padded in ((dq, dq_), (dk, dk_), (dv, dv_)):
                _scatter(grad, padded, group)
        return dq, dk, dv, dposition.to(position_bias.dtype), dtime.to(time_bias.dtype), None, None


def _gather(x: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
    """Rows of a group, heads first: ``[sum(L), H, D]`` to ``[H * G, L, D]``."""
    return x.transpose(0, 1).index_select(1, group.rows).view(-1, group.length, x.shape[-1]).to(dtype)


def _scatter(x: Tensor, padded: Tensor, group: Group) -> None:
    """Write ``padded [H * G, L, D]`` without its padding back to the rows of ``x [sum(L), H, D]``."""
    slots = padded.view(x.shape[1], -1, x.shape[-1]).transpose(0, 1)
    x[group.rows[group.valid]] = slots[group.valid].to(x.dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor, time_bias: Tensor, alpha: float, groups: list[Group]
) -> Tensor:
    """:func:`~lightning_freescale.models.attention.hstu_attention` on CPU tensors."""
    return _Attention.apply(q, k, v, position_bias, time_bias, alpha, groups)
