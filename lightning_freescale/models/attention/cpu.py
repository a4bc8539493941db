"""HSTU attention on a CPU: dense products over groups of histories of similar length. Scores are recomputed in backward.

Histories are sorted by length and grouped so that padding adds little work. The queries of a group are cut into chunks whose
scores fit the cache; a chunk is multiplied with the keys up to its last query. The memory is ``O(chunk * L)``. The work is
close to ``sum(L^2)``, and close to half of it for long histories.

Padding is on the right and attention is causal, so only padded queries see padded keys. Their outputs are dropped and their
gradients are zero. Padded slots may therefore hold any row, and the causal mask is the only mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_freescale.models.attention.buckets import log_bucket

PADDED_WORK = 1.25  # padding may multiply the sum of L^2 of a group by at most this factor,
FREE_WORK = 2**14  # plus this many scores, which cost no more than the calls of one more group
CHUNK_SCORES = 2**17  # scores of a chunk and head; a few arrays of this size fit the cache
MIN_CHUNK = 32  # fewest queries of a chunk; with fewer, the calls take longer than the arithmetic
KEPT_SCORES = 2**22  # a batch with at most this many scores keeps its buckets for all layers and for backward


class HistoryGroup(NamedTuple):
    """``G`` histories, padded to the length ``L`` of the longest of them."""

    rows: Tensor  # [G, L] flat row of each slot; for padding, some row of the same history
    valid: Tensor  # [G, L] bool, False for padding
    times: Tensor | None  # [G, L] int32, seconds since the first event of the history; None if there is no bias


class QueryChunk(NamedTuple):
    """The queries ``start`` to ``stop`` of a group, and what their scores with the keys before ``stop`` need."""

    start: int
    stop: int
    buckets: (
        Tensor | None
    )  # [G * (stop - start) * stop] int32, index of each score into the joint table; None without bias
    mean: Tensor  # [stop - start, stop]: 1 / (i + 1) where query i may see key j <= i, else 0


def group_lengths(lengths: list[int]) -> list[list[int]]:
    """Group histories of similar length. Empty histories are left out.

    In each group ``G * L^2 <= PADDED_WORK * sum(L_i^2) + FREE_WORK``, where ``L`` is the length of its longest history.

    Returns:
        For each group the indices of its histories in ``lengths``, longest first.
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


def chunk_ranges(size: int, length: int) -> Iterator[tuple[int, int]]:
    """Cut the ``length`` queries of a group of ``size`` histories into chunks ``(start, stop)``."""
    step = max(MIN_CHUNK, CHUNK_SCORES // (size * length))
    for start in range(0, length, step):
        yield start, min(start + step, length)


class CpuPlan:
    """What all layers share of one batch: its groups, their slots and their chunks.

    Args:
        offsets: ``[B + 1]``, from 0 to ``sum(L)``.
        times: ``[sum(L)]`` int32, seconds since the first event of the same history. ``None`` is enough for attention
            without bias.
    """

    def __init__(self, offsets: Tensor, times: Tensor | None) -> None:
        lengths = offsets.diff()
        self.total = int(offsets[-1])
        self.groups = []
        for samples in group_lengths(lengths.tolist()):
            length, start = lengths[samples][:, None], offsets[samples].long()[:, None]
            slot = torch.arange(int(length[0]))
            valid = slot < length
            rows = start + slot * valid
            self.groups.append(HistoryGroup(rows, valid, None if times is None else times[rows]))
        self._keeps_chunks = sum(group.rows.shape[1] * group.rows.numel() for group in self.groups) <= KEPT_SCORES
        self._chunks: dict[tuple[int, int, int, torch.dtype], list[QueryChunk]] = {}
        self._slots: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def slots(self, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """The slots of all groups, in the order ``[G, H, L]`` within a group, one group after the other.

        Returns:
            ``[slots]``: the row of each slot in the flat array ``[sum(L) * H]``. ``[slots, 1]`` bool: False for padding.
            ``[sum(L) * H]``: the slot of each row.
        """
        if heads not in self._slots:
            head = torch.arange(heads)[:, None]
            rows = [(group.rows[:, None] * heads + head).flatten() for group in self.groups]
            valid = [group.valid[:, None].expand(-1, heads, -1).flatten() for group in self.groups]
            none = torch.empty(0, dtype=torch.int64)
            all_rows, all_valid = torch.cat([none, *rows]), torch.cat([none.bool(), *valid])
            slot_of_row = torch.empty(self.total * heads, dtype=torch.int64)
            slot_of_row[all_rows[all_valid]] = all_valid.nonzero().flatten()
            self._slots[heads] = all_rows, all_valid[:, None], slot_of_row
        return self._slots[heads]

    def chunks(self, number: int, positions: int, times: int, dtype: torch.dtype) -> Iterator[QueryChunk]:
        """Chunks of group ``number`` for bias tables of ``positions`` and ``times`` entries; 0 and 0 mean no bias.

        A small batch keeps them (``KEPT_SCORES``). A large batch makes them again at each call.
        """
        if not self._keeps_chunks:
            return _make_chunks(self.groups[number], positions, times, dtype)
        key = number, positions, times, dtype
        if key not in self._chunks:
            self._chunks[key] = list(_make_chunks(self.groups[number], positions, times, dtype))
        return iter(self._chunks[key])


def _make_chunks(group: HistoryGroup, positions: int, times: int, dtype: torch.dtype) -> Iterator[QueryChunk]:
    """Chunks of one group, in order."""
    size, length = group.rows.shape
    position = torch.arange(length, dtype=torch.int32)
    for start, stop in chunk_ranges(size, length):
        mean = (position[start:stop, None] + 1).to(dtype).reciprocal().expand(-1, stop).tril(start)
        buckets = None
        if group.times is not None and positions:
            by_position = log_bucket(position[start:stop, None] - position[:stop], positions)
            by_time = log_bucket(group.times[:, start:stop, None] - group.times[:, None, :stop], times)
            buckets = by_time.add_(by_position * times).flatten()
        yield QueryChunk(start, stop, buckets, mean)


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_bias: Tensor | None,
        time_bias: Tensor | None,
        alpha: float,
        plan: CpuPlan,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, position_bias, time_bias)
        ctx.alpha, ctx.plan = alpha, plan
        wide = torch.promote_types(q.dtype, torch.float32)
        table = _joint_table(position_bias, time_bias, wide)
        groups = zip(*(_gather(x, plan, wide) for x in (q, k, v)), strict=True)
        outs = []
        for number, (q_, k_, v_) in enumerate(groups):
            kt = k_.mT.contiguous()  # BLAS multiplies small matrices several times faster with contiguous factors
            q_ *= alpha
            out = torch.empty_like(v_)
            for start, stop, buckets, mean in plan.chunks(number, *_sizes(position_bias, time_bias), wide):
                weights = _scores(q_[:, start:stop], kt[..., :stop], table, buckets)
                torch.nn.functional.silu(weights, inplace=True)
                out[:, start:stop] = weights.mul_(mean) @ v_[:, :stop]
            outs.append(out)
        return _scatter(outs, v, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position_bias, time_bias = ctx.saved_tensors
        plan, wide = ctx.plan, torch.promote_types(q.dtype, torch.float32)
        table = _joint_table(position_bias, time_bias, wide)
        dtable = None if table is None else torch.zeros_like(table)
        groups = zip(*(_gather(x, plan, wide) for x in (q, k, v)), _gather(grad, plan, wide, pad=0), strict=True)
        grads: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []
        for number, (q_, k_, v_, dout) in enumerate(groups):
            kt, vt = k_.mT.contiguous(), v_.mT.contiguous()
            q_ *= ctx.alpha
            dq, dk, dv = torch.empty_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
            for start, stop, buckets, mean in plan.chunks(number, *_sizes(position_bias, time_bias), wide):
                scores = _scores(q_[:, start:stop], kt[..., :stop], table, buckets)
                gate = scores.sigmoid()
                weights = scores.mul_(gate)
                slope = torch.addcmul(gate, weights, gate, value=-1).add_(weights)  # derivative of silu
                dscores = (dout[:, start:stop] @ vt[..., :stop]).mul_(mean).mul_(slope)
                dv[:, :stop] += weights.mul_(mean).mT @ dout[:, start:stop]
                dq[:, start:stop] = dscores @ k_[:, :stop]
                dk[:, :stop] += dscores.mT @ q_[:, start:stop]
                if dtable is not None:
                    dbias = dscores.unflatten(0, (-1, q.shape[1])).sum(1)  # [G, chunk, stop]
                    dtable += torch.bincount(buckets, dbias.flatten(), len(dtable))
            for parts, part in zip(grads, (dq.mul_(ctx.alpha), dk, dv), strict=True):
                parts.append(part)
        dq, dk, dv = (_scatter(parts, x, plan) for parts, x in zip(grads, (q, k, v), strict=True))
        if dtable is None:
            return dq, dk, dv, None, None, None, None
        by_pair = dtable.view(len(position_bias), -1)
        dposition, dtime = by_pair.sum(1).to(position_bias.dtype), by_pair.sum(0).to(time_bias.dtype)
        return dq, dk, dv, dposition, dtime, None, None


def _sizes(position_bias: Tensor | None, time_bias: Tensor | None) -> tuple[int, int]:
    """Entries of the two bias tables, 0 and 0 without bias."""
    return (0, 0) if position_bias is None or time_bias is None else (len(position_bias), len(time_bias))


def _joint_table(position_bias: Tensor | None, time_bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Sum of both biases, ``[P * T]``, so that a score needs one lookup instead of two. ``None`` without bias."""
    if position_bias is None or time_bias is None:
        return None
    return (position_bias.to(dtype)[:, None] + time_bias.to(dtype)).flatten()


def _scores(q: Tensor, kt: Tensor, table: Tensor | None, buckets: Tensor | None) -> Tensor:
    """Scores, with both biases unless ``table`` is ``None``, ``[G * H, chunk, stop]``."""
    scores = q @ kt
    if table is None or buckets is None:
        return scores
    bias = table.index_select(0, buckets).view(-1, 1, *scores.shape[1:])  # [G, 1, chunk, stop]
    scores.view(len(bias), -1, *scores.shape[1:]).add_(bias)
    return scores


def _gather(x: Tensor, plan: CpuPlan, dtype: torch.dtype, pad: int | None = None) -> list[Tensor]:
    """Copy ``x [sum(L), H, D]`` into one array ``[G * H, L, D]`` per group. Padding holds some row of its history, or ``pad``."""
    rows, valid, _ = plan.slots(x.shape[1])
    slots = x.reshape(-1, x.shape[-1]).index_select(0, rows).to(dtype)
    if pad is not None:
        slots.masked_fill_(~valid, pad)
    shapes = [(group.rows.shape[0] * x.shape[1], group.rows.shape[1]) for group in plan.groups]
    parts = slots.split([pairs * length for pairs, length in shapes])
    return [part.view(*shape, x.shape[-1]) for part, shape in zip(parts, shapes, strict=True)]


def _scatter(parts: list[Tensor], like: Tensor, plan: CpuPlan) -> Tensor:
    """Inverse of :func:`_gather`: drop the padding and return an array of the shape and type of ``like``."""
    if not parts:
        return torch.zeros_like(like)
    slots = torch.cat([part.view(-1, like.shape[-1]) for part in parts])
    return slots.index_select(0, plan.slots(like.shape[1])[2]).view(like.shape).to(like.dtype)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    alpha: float,
    plan: CpuPlan,
) -> Tensor:
    """:func:`~lightning_freescale.models.attention.hstu_attention` on CPU tensors."""
    return _CpuAttention.apply(q, k, v, position_bias, time_bias, alpha, plan)
