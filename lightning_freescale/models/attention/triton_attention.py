"""HSTU attention on CUDA with our own Triton kernels, forward and backward. No array of size ``L^2`` is stored.

One program takes one tile of one history and one head. In forward, and in the backward pass of dq and the biases, a program
owns a tile of queries and walks over the keys up to the diagonal. In the backward pass of dk and dv it owns a tile of keys and
walks over the queries from the diagonal to the end. Scores are recomputed in backward. Programs with the most work start first,
whichever history they belong to, so a long history does not keep a few SMs busy after all others have finished.

The result does not depend on timing or on the other samples of the batch: tile sizes follow from the data type and the width
alone, the kernels use no atomics, and every sum has a fixed order. The output and the gradients of a history have the same bits
in any batch. The bias gradients have the same bits for the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lightning_freescale.models.attention import triton_kernels
from lightning_freescale.models.tiles import cut_tiles, unit_stride
from lightning_freescale.runtime.errors import InputError

Biases = tuple[Tensor, Tensor]  # tables of the position and of the time
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LaunchConfig(NamedTuple):
    """Launch parameters of one kernel.

    They follow from the data type and the width alone. Tuning at run time could choose differently on different ranks.
    """

    tile: int  # rows that a program owns
    block: int  # rows of the other side that a program loads at a time
    warps: int
    stages: int


def configs(dtype: torch.dtype, width: int) -> dict[str, LaunchConfig]:
    """Launch parameters of the kernels ``"forward"``, ``"queries"`` and ``"keys"`` (the two backward kernels).

    Args:
        dtype: type of ``q``, ``k`` and ``v``.
        width: the larger of ``Dqk`` and ``Dv``, in elements.
    """
    if dtype == torch.float32:  # a float32 product takes three TF32 products and twice the bytes
        small = LaunchConfig(64 if width <= 64 else 32, 32, 4, 1)
        if width > 128:  # so that shared memory of 99 KiB suffices, which GPUs of compute capability 8.9 have
            small = LaunchConfig(16, 16, 4, 1)
        return dict.fromkeys(("forward", "queries", "keys"), small)
    if width > 128:  # for the same reason
        return dict.fromkeys(("forward", "queries", "keys"), LaunchConfig(32, 32, 4, 2))
    # Compared with blocks of 64, blocks of 32 take half the registers and as many instructions per score, and each block
    # spans fewer buckets.
    return {
        "forward": LaunchConfig(64, 32, 4, 3),
        "queries": LaunchConfig(64, 32, 4, 2),
        "keys": LaunchConfig(64, 32, 4, 2),
    }


class TileSchedule(NamedTuple):
    """The tile of each program, most work first. All fields are ``[N]``; ``N`` is an upper bound, unused tiles have length 0."""

    start: Tensor  # int64, flat row of the history's first event
    length: Tensor  # int32, events of the history
    row: Tensor  # int32, first row of the tile within the history


@dataclass
class TritonPlan:
    """What all layers share of one batch: offsets, times, and the tile schedules made so far.

    Args:
        offsets: ``[B + 1]`` int64, from 0 to ``sum(L)``.
        times: ``[sum(L)]`` int32, seconds since the first event of the same history.
    """

    offsets: Tensor
    times: Tensor
    _schedules: dict[tuple[int, bool], TileSchedule] = field(default_factory=dict)

    def schedule(self, size: int, keys: bool) -> TileSchedule:
        """Tiles of ``size`` rows: of queries, which walk over the keys before them, or of keys, which walk to the end."""
        if (size, keys) not in self._schedules:
            sample, row, used = cut_tiles(self.offsets, len(self.times), size)
            start, length = self.offsets[sample] * used, self.offsets.diff()[sample] * used
            work = (length - row if keys else row + 1) * used
            order = work.argsort(descending=True, stable=True)
            self._schedules[size, keys] = TileSchedule(start[order], length[order].int(), row[order].int())
        return self._schedules[size, keys]


def plan(offsets: Tensor, times: Tensor) -> TritonPlan:
    """The plan of one batch, from ``offsets [B + 1]`` of any integer type and ``times [sum(L)]`` int32."""
    return TritonPlan(offsets.long(), times.contiguous())


def _launch(
    kernel: Any,
    config: LaunchConfig,
    schedule: TileSchedule,
    jagged: tuple[Tensor, ...],
    shares: tuple[Tensor, ...],
    biases: Biases | None,
    times: Tensor,
    alpha: float,
    **slots: int,
) -> None:
    """Launch one program per tile and head.

    Args:
        jagged: arrays ``[sum(L), H, D]`` in the order of the kernel's arguments; the first three are ``q``, ``k``, ``v``.
        shares: arrays that receive each program's share of the bias gradients; none in forward.
        slots: sizes of these shares, as constants of the kernel.
    """
    q, _, v = jagged[:3]
    tables = (times, times) if biases is None else [bias.float() for bias in biases]  # the kernel needs some pointers
    heads, programs = q.shape[1], len(schedule.row) * q.shape[1]
    if not programs:
        return
    kernel[(programs,)](
        *jagged,
        *(x.stride(0) for x in jagged),
        *(x.stride(1) for x in jagged),
        *shares,
        times,
        *tables,
        *schedule,
        alpha,
        heads,
        len(tables[0]),
        len(tables[1]),
        QK=q.shape[-1],
        V=v.shape[-1],
        QK_BLOCK=max(16, triton.next_power_of_2(q.shape[-1])),
        V_BLOCK=max(16, triton.next_power_of_2(v.shape[-1])),
        TILE=config.tile,
        BLOCK=config.block,
        BIASED=biases is not None,
        # Matters for float32 inputs only.
        PRECISION="tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
        **slots,
    )


def forward(q: Tensor, k: Tensor, v: Tensor, biases: Biases | None, alpha: float, plan: TritonPlan) -> Tensor:
    """:func:`attention` without its checks and without a gradient."""
    config = configs(q.dtype, max(q.shape[-1], v.shape[-1]))["forward"]
    out = v.new_empty(v.shape)
    schedule = plan.schedule(config.tile, keys=False)
    _launch(triton_kernels.forward, config, schedule, (q, k, v, out), (), biases, plan.times, alpha)
    return out


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    biases: Biases | None,
    alpha: float,
    plan: TritonPlan,
    dout: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> Biases | None:
    """The backward pass of :func:`forward`: writes the gradients of q, k, v to ``grads`` and returns those of the biases."""
    dout, (dq, dk, dv) = unit_stride(dout), grads
    config = configs(q.dtype, max(q.shape[-1], v.shape[-1]))
    inputs = biases, plan.times, alpha
    # Each program writes its share of the bias gradients. Without atomics, the sum over the shares has a fixed order.
    schedule = plan.schedule(config["queries"].tile, keys=False)
    slots = [1, 1] if biases is None else [triton.next_power_of_2(len(bias)) for bias in biases]
    programs = 0 if biases is None else len(schedule.row) * q.shape[1]
    shares = tuple(torch.empty(programs, size, device=q.device) for size in slots)
    _launch(
        triton_kernels.backward_queries,
        config["queries"],
        schedule,
        (q, k, v, dout, dq),
        shares,
        *inputs,
        POSITION_SLOTS=slots[0],
        TIME_SLOTS=slots[1],
    )
    schedule = plan.schedule(config["keys"].tile, keys=True)
    _launch(triton_kernels.backward_keys, config["keys"], schedule, (q, k, v, dout, dk, dv), (), *inputs)
    return None if biases is None else (shares[0].sum(0)[: len(biases[0])], shares[1].sum(0)[: len(biases[1])])


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_bias: Tensor | None,
        time_bias: Tensor | None,
        alpha: float,
        plan: TritonPlan,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, position_bias, time_bias)
        ctx.alpha, ctx.plan = alpha, plan
        return forward(q, k, v, _biases(position_bias, time_bias), alpha, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position_bias, time_bias = ctx.saved_tensors
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        biases = _biases(position_bias, time_bias)
        found = backward(q, k, v, biases, ctx.alpha, ctx.plan, grads[0], (dq, dk, dv))
        if biases is None or found is None:
            return dq, dk, dv, None, None, None, None
        return dq, dk, dv, found[0].to(biases[0].dtype), found[1].to(biases[1].dtype), None, None


def _biases(position_bias: Tensor | None, time_bias: Tensor | None) -> Biases | None:
    return None if position_bias is None or time_bias is None else (position_bias, time_bias)


def check_types(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise :class:`InputError` for types that the kernels do not have."""
    if q.dtype not in TRITON_DTYPES or not q.dtype == k.dtype == v.dtype:
        raise InputError(
            f"q, k, v have the types {q.dtype}, {k.dtype}, {v.dtype}; all three must have one type of {TRITON_DTYPES}"
        )


def attention(q: Tensor, k: Tensor, v: Tensor, biases: Biases | None, alpha: float, plan: TritonPlan) -> Tensor:
    """:func:`~lightning_freescale.models.attention.hstu_attention` on CUDA tensors."""
    check_types(q, k, v)
    q, k, v = (unit_stride(x) for x in (q, k, v))
    return _TritonAttention.apply(q, k, v, *(biases or (None, None)), alpha, plan)
