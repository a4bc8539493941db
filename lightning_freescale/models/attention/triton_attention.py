"""HSTU attention on CUDA: our own Triton kernels, forward and backward, no ``L^2`` memory.

One program takes one tile of one history and one head: a tile of queries (forward, dq and the bias gradients) or of keys
(dk, dv), and walks the other side up to or from the diagonal. Scores are recomputed in backward. Programs start with the
most work first, whatever history it is from, so that long histories do not leave a tail.

Nothing here depends on timing or on the other samples: block sizes follow from types and widths, no atomics are used,
and every sum has a fixed order. The output of a history is the same bits in any batch, its gradients too; bias gradients
are the same bits for the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lightning_freescale.models.attention import triton_kernels
from lightning_freescale.models.tiles import cut
from lightning_freescale.runtime.errors import InputError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Config(NamedTuple):
    """Launch parameters of one kernel. Set by type and width alone: tuned at run time they would differ between ranks."""

    own: int  # rows of the program's own tile
    other: int  # rows of a block of the side it walks
    warps: int
    stages: int


def configs(dtype: torch.dtype, width: int) -> dict[str, Config]:
    """Launch parameters by kernel. ``width`` is the larger of ``Dqk`` and ``Dv``, in elements."""
    if dtype == torch.float32:  # three products for one, twice the bytes
        small = Config(64 if width <= 64 else 32, 32, 4, 1)
        return {"forward": small, "queries": small, "keys": small}
    # Blocks of 32 take half the registers of 64, for as many instructions per score, and span fewer buckets.
    return {"forward": Config(64, 32, 4, 3), "queries": Config(64, 32, 4, 2), "keys": Config(64, 32, 4, 2)}


class Schedule(NamedTuple):
    """What each program works on, most work first. All ``[N]``; ``N`` is a bound, surplus entries have length 0."""

    start: Tensor  # int64, flat row of the history's first event
    length: Tensor  # int32, events of the history
    row: Tensor  # int32, first row of the tile within the history


@dataclass
class Plan:
    """Offsets ``[B + 1]`` and relative times ``[sum(L)]`` int32 of a batch, and the schedules made from them so far."""

    offsets: Tensor
    times: Tensor
    _schedules: dict[tuple[int, bool], Schedule] = field(default_factory=dict)

    def schedule(self, size: int, keys: bool) -> Schedule:
        """Tiles of ``size`` queries, which work up to the diagonal, or of ``keys``, which work from there to the end."""
        if (size, keys) not in self._schedules:
            sample, row, used = cut(self.offsets, len(self.times), size)
            start, length = self.offsets[sample] * used, self.offsets.diff()[sample] * used
            work = (length - row if keys else row + 1) * used
            order = work.argsort(descending=True, stable=True)
            self._schedules[size, keys] = Schedule(start[order], length[order].int(), row[order].int())
        return self._schedules[size, keys]


def plan(offsets: Tensor, times: Tensor) -> Plan:
    return Plan(offsets.long(), times.contiguous())


def _launch(
    kernel: Any,
    config: Config,
    schedule: Schedule,
    jagged: tuple[Tensor, ...],
    others: tuple[Tensor, ...],
    biases: tuple[Tensor, Tensor],
    times: Tensor,
    alpha: float,
    **blocks: int,
) -> None:
    """Start one program per tile and head. ``jagged`` are ``[sum(L), H, D]``, of which ``q, k, v`` come first."""
    q, _, v = jagged[:3]
    heads, programs = q.shape[1], len(schedule.row) * q.shape[1]
    if not programs:
        return
    kernel[(programs,)](
        *jagged,
        *(x.stride(0) for x in jagged),
        *(x.stride(1) for x in jagged),
        *others,
        times,
        *biases,
        *schedule,
        alpha,
        heads,
        len(biases[0]),
        len(biases[1]),
        QK=q.shape[-1],
        V=v.shape[-1],
        QK_BLOCK=max(16, triton.next_power_of_2(q.shape[-1])),
        V_BLOCK=max(16, triton.next_power_of_2(v.shape[-1])),
        OWN=config.own,
        OTHER=config.other,
        PRECISION="tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32",  # of float32 inputs only
        num_warps=config.warps,
        num_stages=config.stages,
        **blocks,
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor, time_bias: Tensor, alpha: float, plan: Plan
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, position_bias, time_bias)
        ctx.alpha, ctx.plan = alpha, plan
        config = configs(q.dtype, max(q.shape[-1], v.shape[-1]))["forward"]
        out = v.new_empty(v.shape)
        biases = position_bias.float(), time_bias.float()
        _launch(
            triton_kernels.forward,
            config,
            plan.schedule(config.own, False),
            (q, k, v, out),
            (),
            biases,
            plan.times,
            alpha,
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position_bias, time_bias = ctx.saved_tensors
        plan, dout = ctx.plan, _unit_stride(grads[0])
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        config = configs(q.dtype, max(q.shape[-1], v.shape[-1]))
        rest = (position_bias.float(), time_bias.float()), plan.times, ctx.alpha
        # Each program writes its share of the bias gradients: no atomics, so the sum has a fixed order.
        schedule = plan.schedule(config["queries"].own, False)
        blocks = [triton.next_power_of_2(len(bias)) for bias in (position_bias, time_bias)]
        shares = tuple(torch.empty(len(schedule.row) * q.shape[1], block, device=q.device) for block in blocks)
        _launch(
            triton_kernels.backward_queries,
            config["queries"],
            schedule,
            (q, k, v, dout, dq),
            shares,
            *rest,
            POSITION_BLOCK=blocks[0],
            TIME_BLOCK=blocks[1],
        )
        schedule = plan.schedule(config["keys"].own, True)
        _launch(triton_kernels.backward_keys, config["keys"], schedule, (q, k, v, dout, dk, dv), (), *rest)
        dposition = shares[0].sum(0)[: len(position_bias)].to(position_bias.dtype)
        dtime = shares[1].sum(0)[: len(time_bias)].to(time_bias.dtype)
        return dq, dk, dv, dposition, dtime, None, None


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def attention(
    q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor, time_bias: Tensor, alpha: float, plan: Plan
) -> Tensor:
    """:func:`~lightning_freescale.models.attention.hstu_attention` on CUDA tensors."""
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise InputError(f"q, k, v: {q.dtype}, {k.dtype}, {v.dtype}; give all three as one of {DTYPES}")
    q, k, v = (_unit_stride(x) for x in (q, k, v))
    return _Attention.apply(q, k, v, position_bias, time_bias, alpha, plan)
