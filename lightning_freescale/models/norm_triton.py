"""Norms of rows on CUDA: one Triton kernel forward and one backward. They compute in float32 for inputs of any type.

The kernels of the layer norm can also multiply by a gate or by the SiLU of a gate, drop elements, and add an array to the
gradient of the input: what surrounds the norms in a layer of HSTU then takes no pass over memory of its own.

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
from lightning_freescale.models.tiles import unit_stride

ELEMENTS = 4096  # elements of a tile
BACKWARD_ELEMENTS = 2048  # of a tile in backward, which holds more arrays in registers
PROGRAMS = (
    512  # most programs in backward; it does not follow the number of SMs, so sums have the same order on every GPU
)
WARPS = 4


@triton.jit
def _columns(CHUNKS: tl.constexpr, INNER: tl.constexpr, VECTOR: tl.constexpr):
    """All columns, ``[CHUNKS, 1, INNER]``. A tile is ``[CHUNKS, ROWS, INNER]``.

    A warp is 32 threads of ``VECTOR`` elements, so ``INNER = 32 * VECTOR`` columns are one row of a warp. The next dimension has
    the other warps: each row belongs to one warp, and sums over a row need no barrier. The hint makes arrays of every type have
    the same layout, so that none is converted.
    """
    inner = tl.max_contiguous(tl.arange(0, INNER), VECTOR)
    return (tl.arange(0, CHUNKS) * INNER)[:, None, None] + inner[None, None, :]


@triton.jit
def _load(ptr, rows, stride, cols, count, D: tl.constexpr):
    """The tile in float32; 0 past the last row and the last column."""
    mask = (rows[None, :, None] < count) & (cols < D)
    return tl.load(ptr + rows[None, :, None].to(tl.int64) * stride + cols, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, rows, stride, cols, count, D: tl.constexpr, value):
    """Write a tile, except past the last row and the last column."""
    mask = (rows[None, :, None] < count) & (cols < D)
    tl.store(ptr + rows[None, :, None].to(tl.int64) * stride + cols, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _vector(ptr, cols, ROWS: tl.constexpr, D: tl.constexpr):
    """A value for each column, in float32, as a tile: with one row only, it would have another layout."""
    cols = tl.broadcast_to(cols, [cols.shape[0], ROWS, cols.shape[2]])
    return tl.load(ptr + cols, mask=cols < D, other=0.0).to(tl.float32)


@triton.jit
def _row_sum(x):
    """The sum of each row, ``[1, ROWS, 1]``."""
    return tl.sum(tl.sum(x, 0), 1)[None, :, None]


@triton.jit
def _standardized(x, cols, eps, D: tl.constexpr):
    """Rows of mean 0 and variance 1, and the factor ``1 / sqrt(variance + eps)`` of each row."""
    centered = tl.where(cols < D, x - _row_sum(x) / D, 0.0)
    inverse = 1.0 / tl.sqrt(_row_sum(centered * centered) / D + eps)
    return centered * inverse, inverse


@triton.jit
def _kept(keys_ptr, rows, cols, count, number, limit):
    """Which elements of the tile stay."""
    keys = tl.load(keys_ptr + rows, mask=rows < count, other=0)
    return is_kept(keys[None, :, None], cols, number, limit)


@triton.jit
def _forward(
    x_ptr, branch_ptr, shift_ptr, gate_ptr, weight_ptr, bias_ptr, keys_ptr, sum_ptr, out_ptr,
    x_row, gate_row, count, eps, number, limit, scale,
    D: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, INNER: tl.constexpr, VECTOR: tl.constexpr,
    JOIN: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """Layer norm of one tile of rows; times the gate if ``GATED``, or its SiLU if ``SILU``; with dropout if ``DROP``.

    If ``JOIN``, the norm is of ``x + branch + shift``, which is written to ``sum``.
    """
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), _columns(CHUNKS, INNER, VECTOR)
    x = _load(x_ptr, rows, x_row, cols, count, D)
    if JOIN:
        x += _load(branch_ptr, rows, D, cols, count, D) + _vector(shift_ptr, cols, ROWS, D)
        _store(sum_ptr, rows, D, cols, count, D, x)
    x, _ = _standardized(x, cols, eps, D)
    out = x * _vector(weight_ptr, cols, ROWS, D) + _vector(bias_ptr, cols, ROWS, D)
    if GATED:
        gate = _load(gate_ptr, rows, gate_row, cols, count, D)
        out *= gate * tl.sigmoid(gate) if SILU else gate
    if DROP:
        out = tl.where(_kept(keys_ptr, rows, cols, count, number, limit), out * scale, 0.0)
    _store(out_ptr, rows, D, cols, count, D, out)


@triton.jit
def _backward(
    x_ptr, gate_ptr, weight_ptr, bias_ptr, keys_ptr, added_ptr, factor_ptr, dout_ptr, dx_ptr, rounded_ptr, dgate_ptr, shares_ptr,
    x_row, gate_row, added_row, dout_row, dgate_row, share_row, count, eps, number, limit, scale,
    D: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, INNER: tl.constexpr, VECTOR: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr, DROP: tl.constexpr, ADD: tl.constexpr, SCALE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Gradients of ``x`` (times ``factor`` if ``SCALE``, plus ``added`` if ``ADD``) and the gate, and shares of sums over rows.

    If ``ROUND``, the gradient of ``x`` is also written to ``rounded``, which has another type.

    ``shares_ptr [programs, 3, D]``, with ``share_row`` from one program to the next, receives the shares: of the gradients of
    weight and bias, and of the sum of the gate's if ``SILU``, or of that of ``x`` if ``ADD``.
    """
    cols = _columns(CHUNKS, INNER, VECTOR)
    # Summed over their rows at the end: that needs other threads' values.
    dweight, dbias = tl.zeros([CHUNKS, ROWS, INNER], tl.float32), tl.zeros([CHUNKS, ROWS, INNER], tl.float32)
    third = tl.zeros([CHUNKS, ROWS, INNER], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        # All loads come first, so that they are under way at the same time.
        x = _load(x_ptr, rows, x_row, cols, count, D)
        dout = _load(dout_ptr, rows, dout_row, cols, count, D)
        if GATED:
            gate = _load(gate_ptr, rows, gate_row, cols, count, D)
        if ADD:
            added = _load(added_ptr, rows, added_row, cols, count, D)
        weight = _vector(weight_ptr, cols, ROWS, D)  # again in every round: kept, it would take registers
        x, inverse = _standardized(x, cols, eps, D)
        if DROP:
            dout = tl.where(_kept(keys_ptr, rows, cols, count, number, limit), dout * scale, 0.0)
        if GATED:
            dgate = dout * (x * weight + _vector(bias_ptr, cols, ROWS, D))
            if SILU:
                sigmoid = tl.sigmoid(gate)
                dgate *= sigmoid * (1.0 + gate * (1.0 - sigmoid))
                gate *= sigmoid
                third += dgate
            _store(dgate_ptr, rows, dgate_row, cols, count, D, dgate)
            dout *= gate
        dweight += dout * x
        dbias += dout
        dout *= weight
        dx = (dout - _row_sum(dout) / D - x * (_row_sum(dout * x) / D)) * inverse
        if SCALE:
            dx *= tl.load(factor_ptr + rows, mask=rows < count, other=0.0)[None, :, None]
        if ADD:
            dx += added
            third += dx
        _store(dx_ptr, rows, D, cols, count, D, dx)
        if ROUND:
            _store(rounded_ptr, rows, D, cols, count, D, dx)
    share = shares_ptr + tl.program_id(0) * share_row + cols
    tl.store(share, tl.sum(dweight, 1)[:, None, :], mask=cols < D)
    tl.store(share + D, tl.sum(dbias, 1)[:, None, :], mask=cols < D)
    if SILU or ADD:
        tl.store(share + 2 * D, tl.sum(third, 1)[:, None, :], mask=cols < D)


@triton.jit
def _unit_forward(
    x_ptr, out_ptr, x_row, count, eps,
    D: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, INNER: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One tile of rows, scaled to length 1."""
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), _columns(CHUNKS, INNER, VECTOR)
    x = _load(x_ptr, rows, x_row, cols, count, D)
    length = tl.maximum(tl.sqrt(_row_sum(x * x)), eps)
    _store(out_ptr, rows, D, cols, count, D, x / length)


@triton.jit
def _unit_backward(
    x_ptr, dout_ptr, dx_ptr, x_row, dout_row, count, eps,
    D: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, INNER: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of rows."""
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), _columns(CHUNKS, INNER, VECTOR)
    x, dout = _load(x_ptr, rows, x_row, cols, count, D), _load(dout_ptr, rows, dout_row, cols, count, D)
    length = tl.sqrt(_row_sum(x * x))
    # Forward divided a row that is not longer than eps by the constant eps: its length has no gradient.
    along = tl.where(length > eps, _row_sum(x * dout) / (length * length), 0.0)
    _store(dx_ptr, rows, D, cols, count, D, (dout - x * along) / tl.maximum(length, eps))


class _UnitRows(torch.autograd.Function):
    """:func:`unit_rows` with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.eps = eps
        out = torch.empty(x.shape, device=x.device)
        if len(x):
            tile = _tile(x, ELEMENTS)
            _unit_forward[(triton.cdiv(len(x), tile["ROWS"]),)](x, out, x.stride(0), len(x), eps, **tile)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dout, dx = unit_stride(grads[0]), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if len(x):
            tile = _tile(x, ELEMENTS)
            grid = (triton.cdiv(len(x), tile["ROWS"]),)
            _unit_backward[grid](x, dout, dx, x.stride(0), dout.stride(0), len(x), ctx.eps, **tile)
        return dx, None


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

    def _constants(self, x: Tensor, gate: Tensor | None, elements: int) -> dict[str, Any]:
        return _tile(x, elements) | {"GATED": gate is not None, "SILU": self.silu, "DROP": self.drop is not None}

    def forward(self, x: Tensor, gate: Tensor | None, dtype: torch.dtype, join: Join | None = None) -> Tensor:
        """The norm of ``x [N, D]``, times the gate ``[N, D]`` if there is one; ``[N, D]`` of type ``dtype``.

        With ``join`` it is the norm of a sum, see there.
        """
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        if len(x):
            # The kernel needs some pointers.
            some_gate, drop, some_join = (
                x if gate is None else gate,
                self.drop or Drop(x, 0, 0.0),
                join or Join(x, x, x),
            )
            constants = self._constants(x, gate, ELEMENTS)
            _forward[(triton.cdiv(len(x), constants["ROWS"]),)](
                x, some_join.branch, some_join.shift, some_gate, self.weight, self.bias, drop.keys, some_join.total, out,
                x.stride(0), some_gate.stride(0), len(x), self.eps, *drop.constants(), JOIN=join is not None, **constants,
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
        constants = self._constants(x, gate, BACKWARD_ELEMENTS)
        assert not (self.silu and added is not None), "both would be summed in the same place"
        some_gate, some_dgate, some_added, some_rounded = (
            dx if y is None else y for y in (gate, dgate, added, rounded)
        )
        drop = self.drop or Drop(x, 0, 0.0)
        _backward[(min(PROGRAMS, triton.cdiv(len(x), constants["ROWS"])),)](
            x, some_gate, self.weight, self.bias, drop.keys, some_added, shares if factor is None else factor,
            dout, dx, some_rounded, some_dgate, shares,
            x.stride(0), some_gate.stride(0), some_added.stride(0), dout.stride(0), some_dgate.stride(0), shares.stride(0),
            len(x), self.eps, *drop.constants(), ADD=added is not None, SCALE=factor is not None, ROUND=rounded is not None,
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
        if not len(x):
            return torch.empty_like(x), dgate, torch.zeros_like(weight), torch.zeros_like(bias), None, None
        shares = torch.zeros(PROGRAMS, 3 * x.shape[1], device=x.device)
        dx = Norm(weight, bias, ctx.eps).backward(x, gate, unit_stride(grads[0]), shares, dgate=dgate)
        dweight, dbias, _ = shares.sum(0).chunk(3)
        return dx, dgate, dweight.to(weight.dtype), dbias.to(bias.dtype), None, None


def _tile(x: Tensor, elements: int) -> dict[str, Any]:
    """Constants of a kernel for ``x [N, D]``: the shape of a tile and the number of warps."""
    cols, vector = triton.next_power_of_2(x.shape[1]), 4
    inner = min(cols, 32 * vector)
    shape = {"ROWS": max(1, elements // cols), "CHUNKS": cols // inner, "INNER": inner, "VECTOR": vector}
    return shape | {"D": x.shape[1], "num_warps": WARPS}


def layer_norm(x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The layer norm of ``x [N, D]``, times ``gate [N, D]`` if it is given. Returns ``[N, D]`` of type ``dtype``.

    ``x`` and ``gate`` may be views with gaps between their rows.
    """
    return _LayerNorm.apply(unit_stride(x), None if gate is None else unit_stride(gate), weight, bias, eps, dtype)


def unit_rows(x: Tensor, eps: float = 1e-12) -> Tensor:
    """The rows of ``x [N, D]``, each divided by its length or by ``eps``, whichever is larger. Returns ``[N, D]`` float32."""
    return _UnitRows.apply(unit_stride(x), eps)
