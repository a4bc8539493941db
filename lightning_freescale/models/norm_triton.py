"""Norms of rows on CUDA: one Triton kernel forward and one backward. They compute in float32 for inputs of any type.

The kernels of the layer norm can also add up their input, multiply by a gate or by the SiLU of a gate, drop elements, and add an
array to the gradient of the input: what surrounds the norms in a layer of HSTU then takes no pass over memory of its own.

A program takes a tile of whole rows. In the backward pass of a layer norm, each of at most ``PROGRAMS`` programs walks over
several tiles and accumulates its share of the gradients of weight and bias. The shares are summed afterwards: without atomics,
so every sum has a fixed order. The output and the gradient of a row have the same bits in any batch.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.models.dropout import threshold
from lightning_freescale.models.dropout_triton import is_kept
from lightning_freescale.models.tiles import cdiv, power_of_2, unit_stride
from lightning_freescale.runtime.direct_triton import direct

ELEMENTS = 4096  # elements of a tile
WARPS = 4
UNIT_EPS = 1e-12  # the least divisor of a row that is scaled to length 1
# In backward a program is one warp: sums over a row then need no barrier, and all loads of a tile are under way together.
BACKWARD_ELEMENTS = 1024
BACKWARD_WARPS = 1
PROGRAMS = (
    1056  # most programs in backward; it does not follow the number of SMs, so sums have the same order on every GPU
)


@triton.jit
def _load(ptr, rows, stride, cols, count, D: tl.constexpr):
    """``[rows, cols]`` in float32; 0 past the last row and the last column."""
    mask = (rows[:, None] < count) & (cols[None, :] < D)
    return tl.load(ptr + rows[:, None].to(tl.int64) * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, rows, stride, cols, count, D: tl.constexpr, value):
    """Write ``value [rows, cols]``, except past the last row and the last column."""
    mask = (rows[:, None] < count) & (cols[None, :] < D)
    tl.store(ptr + rows[:, None].to(tl.int64) * stride + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _vector(ptr, cols, D: tl.constexpr):
    """A value for each column, ``[1, cols]`` in float32."""
    return tl.load(ptr + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _standardized(x, cols, eps, D: tl.constexpr):
    """Rows of mean 0 and variance 1, and the factor ``1 / sqrt(variance + eps)`` of each row."""
    centered = tl.where(cols[None, :] < D, x - (tl.sum(x, 1) / D)[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centered * centered, 1) / D + eps)
    return centered * inverse[:, None], inverse


@triton.jit
def _kept(keys_ptr, rows, cols, count, number, limit):
    """Which elements of ``[rows, cols]`` stay."""
    keys = tl.load(keys_ptr + rows, mask=rows < count, other=0)
    return is_kept(keys[:, None], cols[None, :], number, limit)


@direct
@triton.jit(do_not_specialize=["count"])
def _forward(
    x_ptr, branch_ptr, shift_ptr, gate_ptr, weight_ptr, bias_ptr, keys_ptr, sum_ptr, out_ptr,
    x_row, gate_row, count, eps, number, limit, scale,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    JOIN: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """Layer norm of one tile of rows; times the gate if ``GATED``, or its SiLU if ``SILU``; with dropout if ``DROP``.

    If ``JOIN``, the norm is of ``x + branch + shift``, which is written to ``sum``.
    """
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    x = _load(x_ptr, rows, x_row, cols, count, D)
    if JOIN:
        x += _load(branch_ptr, rows, D, cols, count, D) + _vector(shift_ptr, cols, D)
        _store(sum_ptr, rows, D, cols, count, D, x)
    x, _ = _standardized(x, cols, eps, D)
    out = x * _vector(weight_ptr, cols, D) + _vector(bias_ptr, cols, D)
    if GATED:
        gate = _load(gate_ptr, rows, gate_row, cols, count, D)
        out *= gate * tl.sigmoid(gate) if SILU else gate
    if DROP:
        out = tl.where(_kept(keys_ptr, rows, cols, count, number, limit), out * scale, 0.0)
    _store(out_ptr, rows, D, cols, count, D, out)


@direct
@triton.jit(do_not_specialize=["count"])
def _backward(
    x_ptr, gate_ptr, weight_ptr, bias_ptr, keys_ptr, added_ptr, factor_ptr, dout_ptr, dx_ptr, rounded_ptr, dgate_ptr, shares_ptr,
    x_row, gate_row, added_row, dout_row, dgate_row, share_row, count, eps, number, limit, scale,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr, DROP: tl.constexpr, ADD: tl.constexpr, SCALE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Gradients of ``x`` (times ``factor`` if ``SCALE``, plus ``added`` if ``ADD``) and the gate, and shares of sums over rows.

    If ``ROUND``, the gradient of ``x`` is also written to ``rounded``, which has another type.

    ``shares_ptr [programs, 3, D]``, with ``share_row`` from one program to the next, receives the shares: of the gradients of
    weight and bias, and of the sum of the gate's if ``SILU``, or of that of ``x`` if ``ADD``.
    """
    # Four elements of a thread lie side by side, whatever the type of an array, so that no array needs another layout.
    cols = tl.max_contiguous(tl.arange(0, COLS), 4)
    dweight, dbias, third = tl.zeros([COLS], tl.float32), tl.zeros([COLS], tl.float32), tl.zeros([COLS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        x = _load(x_ptr, rows, x_row, cols, count, D)
        dout = _load(dout_ptr, rows, dout_row, cols, count, D)
        if GATED:
            gate = _load(gate_ptr, rows, gate_row, cols, count, D)
        if ADD:
            added = _load(added_ptr, rows, added_row, cols, count, D)
        weight = _vector(weight_ptr, cols, D)  # again for every tile: kept, it would take registers
        x, inverse = _standardized(x, cols, eps, D)
        if DROP:
            dout = tl.where(_kept(keys_ptr, rows, cols, count, number, limit), dout * scale, 0.0)
        if GATED:
            dgate = dout * (x * weight + _vector(bias_ptr, cols, D))
            if SILU:
                sigmoid = tl.sigmoid(gate)
                dgate *= sigmoid * (1.0 + gate * (1.0 - sigmoid))
                gate *= sigmoid
                third += tl.sum(dgate, 0)
            _store(dgate_ptr, rows, dgate_row, cols, count, D, dgate)
            dout *= gate
        dweight += tl.sum(dout * x, 0)
        dbias += tl.sum(dout, 0)
        dout *= weight
        dx = (dout - (tl.sum(dout, 1) / D)[:, None] - x * (tl.sum(dout * x, 1) / D)[:, None]) * inverse[:, None]
        if SCALE:
            dx *= tl.load(factor_ptr + rows, mask=rows < count, other=0.0)[:, None]
        if ADD:
            dx += added
            third += tl.sum(dx, 0)  # rows past the end are 0
        _store(dx_ptr, rows, D, cols, count, D, dx)
        if ROUND:
            _store(rounded_ptr, rows, D, cols, count, D, dx)
    share = shares_ptr + tl.program_id(0) * share_row + cols
    tl.store(share, dweight, mask=cols < D)
    tl.store(share + D, dbias, mask=cols < D)
    if SILU or ADD:
        tl.store(share + 2 * D, third, mask=cols < D)


@direct
@triton.jit(do_not_specialize=["count"])
def _unit_forward(
    x_ptr, out_ptr, x_row, count, eps, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """One tile of rows, scaled to length 1."""
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    x = _load(x_ptr, rows, x_row, cols, count, D)
    length = tl.maximum(tl.sqrt(tl.sum(x * x, 1)), eps)
    _store(out_ptr, rows, D, cols, count, D, x / length[:, None])


@direct
@triton.jit(do_not_specialize=["count"])
def _unit_backward(
    x_ptr, dout_ptr, factor_ptr, dx_ptr, x_row, dout_row, count, eps,
    SCALE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of rows; times the number at ``factor_ptr`` if ``SCALE``."""
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    x, dout = _load(x_ptr, rows, x_row, cols, count, D), _load(dout_ptr, rows, dout_row, cols, count, D)
    if SCALE:
        dout *= tl.load(factor_ptr)
    length = tl.sqrt(tl.sum(x * x, 1))
    # Forward divided a row that is not longer than eps by the constant eps: its length has no gradient.
    along = tl.where(length > eps, tl.sum(x * dout, 1) / (length * length), 0.0)
    dx = (dout - x * along[:, None]) / tl.maximum(length, eps)[:, None]
    _store(dx_ptr, rows, D, cols, count, D, dx)


class _UnitRows(torch.autograd.Function):
    """:func:`unit_rows` with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(x)
        out = torch.empty(rows, x.shape[1], device=x.device)
        if rows:
            tile = _tile(x, ELEMENTS, WARPS)
            _unit_forward[(cdiv(rows, tile["ROWS"]),)](x, out, x.stride(0), rows, UNIT_EPS, **tile)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return unit_rows_backward(x, grads[0]), None


def unit_rows_backward(x: Tensor, dout: Tensor, factor: Tensor | None = None) -> Tensor:
    """The gradient of the argument ``x [N, D]`` of :func:`unit_rows`.

    Args:
        x: its elements in a row lie side by side.
        dout: gradient of the result, which may have fewer rows than ``x``.
        factor: a float32 number on the device that ``dout`` is multiplied by.
    """
    dout, dx = unit_stride(dout), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = dout.shape[0]
    if rows < x.shape[0]:
        dx[rows:].zero_()
    if rows:
        tile = _tile(x, ELEMENTS, WARPS)
        some_factor = dx if factor is None else factor  # the kernel needs some pointer
        strides = x.stride(0), dout.stride(0)
        _unit_backward[(cdiv(rows, tile["ROWS"]),)](
            x, dout, some_factor, dx, *strides, rows, UNIT_EPS, SCALE=factor is not None, **tile
        )
    return dx


class Drop(NamedTuple):
    """Dropout of the output; the arguments of :func:`.dropout_triton.drop`."""

    keys: Tensor
    number: int
    rate: float

    def constants(self) -> tuple[int, int, float]:
        return self.number, threshold(self.rate), 1 / (1 - self.rate)


class Join(NamedTuple):
    """A sum that a layer norm computes on its way: ``total`` receives ``x + branch + shift``.

    Args:
        branch: ``[N, D]``, contiguous.
        shift: ``[D]``.
        total: ``[N, D]``, contiguous.
    """

    branch: Tensor
    shift: Tensor
    total: Tensor


class Norm(NamedTuple):
    """A layer norm of rows of ``D`` elements, and what is done to its output.

    Args:
        weight: ``[D]``.
        bias: ``[D]``.
        eps: added to the variance.
        silu: multiply by the SiLU of the gate and not by the gate itself.
        drop: dropout of the output.
    """

    weight: Tensor
    bias: Tensor
    eps: float
    silu: bool = False
    drop: Drop | None = None

    def _constants(self, x: Tensor, gate: Tensor | None, elements: int, warps: int) -> dict[str, Any]:
        return _tile(x, elements, warps) | {"GATED": gate is not None, "SILU": self.silu, "DROP": self.drop is not None}

    def forward(
        self,
        x: Tensor,
        gate: Tensor | None,
        dtype: torch.dtype,
        join: Join | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The norm of ``x [N, D]``, times the gate ``[N, D]`` if there is one; ``[N, D]`` of type ``dtype``.

        With ``join`` it is the norm of a sum, see there. ``out`` receives the result if it is given.
        """
        out = torch.empty(x.shape, dtype=dtype, device=x.device) if out is None else out
        if x.shape[0]:
            # The kernel needs some pointers.
            some_gate, drop, some_join = (
                x if gate is None else gate,
                self.drop or Drop(x, 0, 0.0),
                join or Join(x, x, x),
            )
            constants = self._constants(x, gate, ELEMENTS, WARPS)
            _forward[(cdiv(x.shape[0], constants["ROWS"]),)](
                x, some_join.branch, some_join.shift, some_gate, self.weight, self.bias, drop.keys, some_join.total, out,
                x.stride(0), some_gate.stride(0), x.shape[0], self.eps, *drop.constants(), JOIN=join is not None, **constants,
            )  # fmt: skip
        return out

    def backward(
        self,
        x: Tensor,
        gate: Tensor | None,
        dout: Tensor,
        shares: Tensor,
        *,
        dgate: Tensor | None = None,
        added: Tensor | None = None,
        factor: Tensor | None = None,
        rounded: Tensor | None = None,
    ) -> Tensor:
        """The gradient of ``x``, given that of the output.

        Args:
            x: ``[N, D]``, not empty.
            gate: ``[N, D]`` or nothing.
            dout: ``[N, D]``, gradient of the output.
            shares: ``[PROGRAMS, 3 D]`` float32, zeros. Its sum over the rows is afterwards the gradient of the weight, that of
                the bias, and the sum over the rows of ``dgate`` if ``silu``, or of the result if ``added``. Otherwise ``2 D``
                columns suffice.
            dgate: ``[N, D]``, receives the gradient of the gate. Its rows may lie apart.
            added: ``[N, D]``, is added to the gradient of ``x``.
            factor: ``[N]`` float32, the gradient of each row of ``x`` is multiplied by it.
            rounded: ``[N, D]``, contiguous, receives the result as another type.
        """
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        warps = BACKWARD_WARPS if x.shape[1] <= BACKWARD_ELEMENTS else WARPS  # a wider row takes more registers
        constants = self._constants(x, gate, BACKWARD_ELEMENTS, warps)
        assert not (self.silu and added is not None), "both would be summed in the same place"
        some_gate, some_dgate, some_added, some_rounded = (
            dx if y is None else y for y in (gate, dgate, added, rounded)
        )
        drop = self.drop or Drop(x, 0, 0.0)
        _backward[(min(PROGRAMS, cdiv(x.shape[0], constants["ROWS"])),)](
            x, some_gate, self.weight, self.bias, drop.keys, some_added, shares if factor is None else factor,
            dout, dx, some_rounded, some_dgate, shares,
            x.stride(0), some_gate.stride(0), some_added.stride(0), dout.stride(0), some_dgate.stride(0), shares.stride(0),
            x.shape[0], self.eps, *drop.constants(), ADD=added is not None, SCALE=factor is not None, ROUND=rounded is not None,
            **constants,
        )  # fmt: skip
        return dx


class _LayerNorm(torch.autograd.Function):
    """:func:`layer_norm` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, gate, weight, bias)
        ctx.eps = eps
        return Norm(weight, bias, eps).forward(x, gate, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, bias = ctx.saved_tensors
        dgate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=x.device)
        if not x.shape[0]:
            return torch.empty_like(x), dgate, torch.zeros_like(weight), torch.zeros_like(bias), None, None
        shares = torch.zeros(PROGRAMS, 3 * x.shape[1], device=x.device)
        dx = Norm(weight, bias, ctx.eps).backward(x, gate, unit_stride(grads[0]), shares, dgate=dgate)
        dweight, dbias, _ = shares.sum(0).chunk(3)
        return dx, dgate, dweight.to(weight.dtype), dbias.to(bias.dtype), None, None


def _tile(x: Tensor, elements: int, warps: int) -> dict[str, Any]:
    """Constants of a kernel for ``x [N, D]``: the shape of a tile and the number of warps."""
    cols = power_of_2(x.shape[1])
    return {"D": x.shape[1], "ROWS": max(1, elements // cols), "COLS": cols, "num_warps": warps}


def layer_norm(x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The layer norm of ``x [N, D]``, times ``gate [N, D]`` if it is given. Returns ``[N, D]`` of type ``dtype``.

    ``x`` and ``gate`` may be views with gaps between their rows.
    """
    return _LayerNorm.apply(unit_stride(x), None if gate is None else unit_stride(gate), weight, bias, eps, dtype)


def unit_rows(x: Tensor, rows: int | None = None) -> Tensor:
    """The first ``rows`` rows of ``x [N, D]``, each divided by its length or by ``UNIT_EPS``, whichever is larger; float32.

    The result remembers ``x``: see :func:`origin_of`.
    """
    x = unit_stride(x)
    out = _UnitRows.apply(x, x.shape[0] if rows is None else rows)
    out.unit_rows_of = x
    return out


def origin_of(x: Tensor) -> Tensor | None:
    """What :func:`unit_rows` made ``x`` of; nothing if it did not, or if ``x`` was changed or its own gradient is asked for.

    A function of ``x`` can then compute the gradient of the origin itself and save a pass over the rows.
    """
    changed = x._version or x._backward_hooks or x.retains_grad
    return None if changed else getattr(x, "unit_rows_of", None)
