"""HSTU attention without bias on Hopper, differentiable."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from .config import WIDTHS
from .driver import Kernels, TensorMap, kernels, tensor_map, use_device
from .plan import Plan
from .plan import plan as make_plan

DTYPES = (torch.bfloat16, torch.float16)


def available(device: torch.device | str | int | None = None) -> bool:
    """Whether ``device`` (the current one by default) is a GPU that these kernels run on."""
    if not torch.cuda.is_available() or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def supports(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why these inputs cannot be used, or ``None`` if they can."""
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        return f"the types are {q.dtype}, {k.dtype}, {v.dtype}, not one of {DTYPES}"
    if q.shape[-1] not in WIDTHS or v.shape[-1] not in WIDTHS:
        return f"the head widths are {q.shape[-1]} and {v.shape[-1]}, not of {WIDTHS}"
    return None


def _aligned(x: Tensor) -> Tensor:
    """``x``, copied if the copy engine could not read it."""
    rows, heads = x.stride(0) % 8, x.stride(1) % 8 if x.shape[1] > 1 else 0
    return x if x.stride(2) == 1 and not rows and not heads and x.data_ptr() % 16 == 0 else x.contiguous()


def _kernels(q: Tensor, v: Tensor) -> Kernels:
    return kernels(q.shape[-1], v.shape[-1], q.dtype == torch.float16, q.device.index)


def _forward(maps: list[TensorMap], q: Tensor, v: Tensor, half_alpha: float, plan: Plan) -> Tensor:
    use = _kernels(q, v)
    c, heads = use.config, q.shape[1]
    schedule = plan.schedule(c.forward_rows, c.backward_rows, False)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    arguments = [*maps, out, schedule, ctypes.c_int(heads), ctypes.c_float(half_alpha)]
    use.launch("hstu_forward", len(schedule) * heads, c.forward_threads, arguments, c.forward_shared)
    return out


def _backward(
    maps: list[TensorMap], q: Tensor, v: Tensor, dout: Tensor, half_alpha: float, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    use = _kernels(q, v)
    c, heads, device = use.config, q.shape[1], q.device
    total, width = len(q), heads * v.shape[-1]
    if dout.stride(2) != 1 or dout.stride(1) != dout.shape[2] or dout.stride(0) % 8 or dout.data_ptr() % 16:
        dout = dout.contiguous()
    scaled = torch.empty(v.shape, dtype=v.dtype, device=device)
    blocks = min(2048, (total * width + 2047) // 2048)
    rows = [dout, ctypes.c_int64(dout.stride(0)), scaled, plan.scale(), ctypes.c_int(width), ctypes.c_int64(total)]
    use.launch("hstu_scale", blocks, 256, rows)

    dq, dk = (torch.empty(q.shape, dtype=q.dtype, device=device) for _ in range(2))
    dv = torch.empty(v.shape, dtype=v.dtype, device=device)
    tiles = plan.tiles(c.backward_rows)
    sums = torch.empty(tiles * heads * c.backward_rows * q.shape[-1], device=device)
    counters = torch.zeros(1 + tiles * heads * (c.backward_rows // 16), dtype=torch.int32, device=device)
    schedule = plan.schedule(c.backward_keys, c.backward_rows, True)
    rest = [ctypes.c_int(heads), ctypes.c_float(half_alpha)]
    arguments = [*maps, tensor_map(scaled), sums, dk, dv, counters, schedule, *rest]
    use.launch("hstu_backward", len(schedule) * heads, 384, arguments, c.backward_shared)
    schedule = plan.schedule(c.backward_rows, c.backward_rows, False)
    use.launch("hstu_finish", len(schedule) * heads, 256, [sums, dq, schedule, *rest])
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, half_alpha: float, plan: Plan) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.half_alpha, ctx.plan = half_alpha, plan
        if not len(q):
            return torch.empty_like(v)
        with torch.cuda.device(q.device):
            return _forward([tensor_map(x) for x in (q, k, v)], q, v, half_alpha, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        if not len(q):
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None
        with torch.cuda.device(q.device):
            use_device(q.device.index)
            maps = [tensor_map(x) for x in (q, k, v)]
            return *_backward(maps, q, v, grads[0], ctx.half_alpha, ctx.plan), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, alpha: float, plan: Plan | None = None) -> Tensor:
    """Causal pointwise SiLU attention over jagged histories, without bias.

    Event ``i`` of a history gets ``1 / (i + 1) * sum_j silu(alpha * q_i . k_j) * v_j`` over its events ``j <= i``.
    Outputs and gradients of a history have the same bits in whatever batch it lies. All values must be finite: a tile
    may run over the end of a history, and what follows there is multiplied by zero.

    Args:
        q: ``[sum(L), H, Dqk]`` queries, bf16 or fp16; see :func:`supports`.
        k: ``[sum(L), H, Dqk]`` keys.
        v: ``[sum(L), H, Dv]`` values.
        offsets: ``[B + 1]`` integer; history ``b`` is rows ``offsets[b]`` to ``offsets[b + 1]``, which may be none.
        alpha: scale of the scores.
        plan: result of :func:`.plan.plan` for these offsets, made here if absent.
    """
    reason = supports(q, k, v)
    if reason:
        raise ValueError(f"q, k, v: {reason}")
    plan = make_plan(offsets, len(q)) if plan is None else plan
    q, k, v = (_aligned(x) for x in (q, k, v))
    return _Attention.apply(q, k, v, alpha / 2, plan)
