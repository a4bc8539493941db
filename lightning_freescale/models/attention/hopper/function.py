"""HSTU attention on Hopper, differentiable."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config import BIAS_SLOTS, WIDTHS
from .driver import BiasArguments, Kernels, SiluArguments, SiluPart, kernels, tensor_map, use_device
from .plan import Plan
from .plan import plan as make_plan

DTYPES = (torch.bfloat16, torch.float16)
Biases = tuple[Tensor, Tensor]  # of the position and of the time
Grads = tuple[
    Tensor, Tensor, Tensor
]  # of q, k, v; heads lie side by side, rows may lie apart, by a multiple of 8 elements

SILU_BLOCKS = (
    1056  # for each of q, k, v; it does not follow the number of SMs, so sums have the same order on every GPU
)


class Silu(NamedTuple):
    """The SiLU whose outputs are queries, keys and values.

    Args:
        before: its inputs, of the shapes and the type of ``q, k, v``. Heads lie side by side; rows may lie apart, by a multiple
            of 8 elements.
        shares: ``[SILU_BLOCKS, H * D]`` float32 for each of them, zeros. The sum over the rows of each is afterwards the sum over
            the events of the gradient of its input.
    """

    before: tuple[Tensor, Tensor, Tensor]
    shares: tuple[Tensor, Tensor, Tensor]


def available(device: torch.device | str | int | None = None) -> bool:
    """Whether ``device`` (the current one by default) is a GPU that these kernels run on."""
    if not torch.cuda.is_available() or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def supports(q: Tensor, k: Tensor, v: Tensor, biases: Biases | None = None) -> str | None:
    """Why these inputs cannot be used, or ``None`` if they can."""
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        return f"the types are {q.dtype}, {k.dtype}, {v.dtype}, not one of {DTYPES}"
    if q.shape[-1] not in WIDTHS or v.shape[-1] not in WIDTHS:
        return f"the head widths are {q.shape[-1]} and {v.shape[-1]}, not of {WIDTHS}"
    if biases and max(len(table) for table in biases) > BIAS_SLOTS:
        return f"the bias tables have {len(biases[0])} and {len(biases[1])} entries, more than {BIAS_SLOTS}"
    return None


def _aligned(x: Tensor) -> Tensor:
    """``x``, copied if the copy engine could not read it."""
    rows, heads = x.stride(0) % 8, x.stride(1) % 8 if x.shape[1] > 1 else 0
    return x if x.stride(2) == 1 and not rows and not heads and x.data_ptr() % 16 == 0 else x.contiguous()


class _Inputs(NamedTuple):
    """Arguments of both passes. ``biases`` are float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    biases: Biases | None
    half_alpha: float
    plan: Plan

    def kernels(self) -> Kernels:
        half = self.q.dtype == torch.float16
        return kernels(self.q.shape[-1], self.v.shape[-1], half, self.biases is not None, self.q.device.index)

    def maps(self) -> list[Any]:
        return [tensor_map(x) for x in (self.q, self.k, self.v)]

    def bias(self, shares: Tensor | None = None) -> BiasArguments:
        if self.biases is None:
            return BiasArguments()
        position, time = self.biases
        assert self.plan.edges is not None
        pointers = [x.data_ptr() for x in (position, time, self.plan.edges, self.plan.records())]
        return BiasArguments(*pointers, None if shares is None else shares.data_ptr(), position.shape[0], time.shape[0])

    def rest(self) -> list[Any]:
        return [ctypes.c_int(self.q.shape[1]), ctypes.c_float(self.half_alpha)]


def _forward(inputs: _Inputs, out: Tensor | None = None) -> Tensor:
    use = inputs.kernels()
    c, heads, v = use.config, inputs.q.shape[1], inputs.v
    schedule = inputs.plan.schedule(c.forward_rows, c.backward_rows, False)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out.view(v.shape)
    arguments = [*inputs.maps(), inputs.bias(), out, schedule, *inputs.rest()]
    use.launch("hstu_forward", schedule.shape[0] * heads, c.forward_threads, arguments, c.forward_shared)
    return out


def _scaled(use: Kernels, dout: Tensor, plan: Plan) -> Tensor:
    """``dout`` multiplied by ``plan.scale()``: divided by the number of events that each event attends to."""
    total, width = len(dout), dout.shape[1] * dout.shape[2]
    if dout.stride(2) != 1 or dout.stride(1) != dout.shape[2] or dout.stride(0) % 8 or dout.data_ptr() % 16:
        dout = dout.contiguous()
    scaled = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    blocks = min(2048, (total * width + 2047) // 2048)
    rows = [dout, ctypes.c_int64(dout.stride(0)), scaled, plan.scale(), ctypes.c_int(width), ctypes.c_int64(total)]
    use.launch("hstu_scale", blocks, 256, rows)
    return scaled


def _backward(inputs: _Inputs, scaled: Tensor, grads: Grads, silu: Silu | None = None) -> Biases | None:
    """Write the gradients of q, k, v, or of the inputs of ``silu``, to ``grads``.

    Returns those of both tables, float32, if there are biases.
    """
    use = inputs.kernels()
    q, _, _, biases, _, plan = inputs
    c, heads, device = use.config, q.shape[1], q.device
    _, dk, dv = grads
    strides = [ctypes.c_int64(x.stride(0)) for x in (dk, dv)]
    tiles = plan.tiles(c.backward_rows)
    sums = torch.empty(tiles * heads * c.backward_rows * q.shape[-1], device=device)
    counters = torch.zeros(1 + tiles * heads * (c.backward_rows // 16), dtype=torch.int32, device=device)
    schedule = plan.schedule(c.backward_keys, c.backward_rows, True)
    blocks = schedule.shape[0] * heads
    shares = None if biases is None else torch.empty(blocks, 2 * BIAS_SLOTS, device=device)
    arguments = [
        *inputs.maps(),
        tensor_map(scaled),
        inputs.bias(shares),
        sums,
        dk,
        dv,
        *strides,
        counters,
        schedule,
    ]
    use.launch("hstu_backward", blocks, 384, [*arguments, *inputs.rest()], c.backward_shared)
    _finish(inputs, sums, grads, silu)
    if biases is None or shares is None:
        return None
    total = shares.sum(0)
    return total[: biases[0].shape[0]], total[BIAS_SLOTS : BIAS_SLOTS + biases[1].shape[0]]


def _finish(inputs: _Inputs, sums: Tensor, grads: Grads, silu: Silu | None) -> None:
    """Write dq, and continue through ``silu`` if there is one."""
    use = inputs.kernels()
    heads, rows = inputs.q.shape[1], use.config.backward_rows
    schedule = inputs.plan.schedule(rows, rows, False)
    tiles = schedule.shape[0]
    if silu is None:
        dq = grads[0]
        arguments = [sums, dq, ctypes.c_int64(dq.stride(0)), schedule, *inputs.rest()]
        use.launch("hstu_finish", tiles * heads, 256, arguments)
        return
    parts = SiluArguments(*(SiluPart.of(*part) for part in zip(grads, *silu, strict=True)))
    programs = min(max(1, SILU_BLOCKS // heads), tiles)
    arguments = [sums, parts, schedule, ctypes.c_int(tiles), *inputs.rest()]
    use.launch("hstu_finish_silu", 3 * heads * programs, 256, arguments)


def prepare(q: Tensor, v: Tensor, biases: Biases | None, plan: Plan) -> None:
    """Make what both passes need of ``plan`` for heads of these widths: they use it later."""
    with _on(q.device):
        config = kernels(q.shape[-1], v.shape[-1], q.dtype == torch.float16, biases is not None, q.device.index).config
        rows = config.backward_rows
        for size, keys in ((config.forward_rows, False), (config.backward_keys, True), (rows, False)):
            plan.schedule(size, rows, keys)
        plan.scale()


def forward(
    q: Tensor, k: Tensor, v: Tensor, biases: Biases | None, alpha: float, plan: Plan, out: Tensor | None = None
) -> Tensor:
    """:func:`attention` without its checks and without a gradient. There must be events.

    ``out [sum(L), H * Dv]``, contiguous, receives the result if it is given.
    """
    with _on(q.device):
        return _forward(_inputs(q, k, v, biases, alpha, plan), out)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    biases: Biases | None,
    alpha: float,
    plan: Plan,
    scaled: Tensor,
    grads: Grads,
    silu: Silu | None = None,
) -> Biases | None:
    """The backward pass of :func:`forward`: writes the gradients of q, k, v to ``grads`` and returns those of the biases.

    With ``silu`` the gradients are those of its inputs.

    ``scaled [sum(L), H, Dv]`` is the gradient of the output, each row multiplied by ``plan.scale()``; contiguous.
    """
    with _on(q.device):
        use_device(q.device.index)
        return _backward(_inputs(q, k, v, biases, alpha, plan), scaled, grads, silu)


def _inputs(q: Tensor, k: Tensor, v: Tensor, biases: Biases | None, alpha: float, plan: Plan) -> _Inputs:
    if biases is not None and not all(x.dtype == torch.float32 and x.is_contiguous() for x in biases):
        biases = biases[0].float().contiguous(), biases[1].float().contiguous()
    return _Inputs(_aligned(q), _aligned(k), _aligned(v), biases, alpha / 2, plan)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current one, if it is not."""
    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_bias: Tensor | None,
        time_bias: Tensor | None,
        alpha: float,
        plan: Plan,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, position_bias, time_bias)
        ctx.alpha, ctx.plan = alpha, plan
        return forward(q, k, v, _biases(position_bias, time_bias), alpha, plan) if len(q) else torch.empty_like(v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position_bias, time_bias = saved = ctx.saved_tensors
        if not len(q):
            return *(None if x is None else torch.zeros_like(x) for x in saved), None, None
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        biases = _biases(position_bias, time_bias)
        with torch.cuda.device(q.device):
            use_device(q.device.index)
            inputs = _inputs(q, k, v, biases, ctx.alpha, ctx.plan)
            found = _backward(inputs, _scaled(inputs.kernels(), grads[0], ctx.plan), (dq, dk, dv))
        if biases is None or found is None:
            return dq, dk, dv, None, None, None, None
        return dq, dk, dv, found[0].to(biases[0].dtype), found[1].to(biases[1].dtype), None, None


def _biases(position_bias: Tensor | None, time_bias: Tensor | None) -> Biases | None:
    return None if position_bias is None or time_bias is None else (position_bias, time_bias)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    alpha: float,
    plan: Plan | None = None,
    biases: Biases | None = None,
) -> Tensor:
    """Causal pointwise SiLU attention over jagged histories.

    Event ``i`` of a history gets ``1 / (i + 1) * sum_j silu(alpha * q_i . k_j + bias_ij) * v_j`` over its events ``j <= i``.
    Outputs and gradients of a history have the same bits in whatever batch it lies. All values must be finite: a tile
    may run over the end of a history, and what follows there is multiplied by zero.

    Args:
        q: ``[sum(L), H, Dqk]`` queries, bf16 or fp16; see :func:`supports`.
        k: ``[sum(L), H, Dqk]`` keys.
        v: ``[sum(L), H, Dv]`` values.
        offsets: ``[B + 1]`` integer; history ``b`` is rows ``offsets[b]`` to ``offsets[b + 1]``, which may be none.
        alpha: scale of the scores.
        plan: result of :func:`.plan.plan` for these offsets, made here if absent. With biases it is needed, with times and
            edges.
        biases: tables of the position bias and of the time bias, one entry a bucket; or none.
    """
    reason = supports(q, k, v, biases)
    if reason:
        raise ValueError(f"q, k, v: {reason}")
    plan = make_plan(offsets, len(q)) if plan is None else plan
    if biases and (plan.times is None or plan.edges is None):
        raise ValueError("plan: it has no times and edges, which attention with biases needs")
    q, k, v = (_aligned(x) for x in (q, k, v))
    return _Attention.apply(q, k, v, *(biases or (None, None)), alpha, plan)
