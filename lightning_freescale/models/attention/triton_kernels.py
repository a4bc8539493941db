"""Triton kernels of HSTU attention: forward, backward by queries, backward by keys; :mod:`.triton_attention` starts them.

Arguments that all three share: ``*_ptr`` and their strides by row and by head of ``[sum(L), H, D]`` arrays whose last
stride is 1; ``times_ptr [sum(L)]`` int32; the bias tables ``position_ptr`` and ``time_ptr`` float32; and the schedule,
``start_ptr, length_ptr, row_ptr [N]``: a tile's history (its first flat row, its length) and the tile's first row in it.
A grid of ``N * heads`` programs. ``OWN`` rows are the program's, blocks of ``OTHER`` rows are what it walks over.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from lightning_freescale.models.attention.buckets import BUCKET_BASE, BUCKET_SHIFT

_SHIFT, _BASE = tl.constexpr(BUCKET_SHIFT), tl.constexpr(BUCKET_BASE)
_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_MASKED = tl.constexpr(-1e4)  # a score whose silu, and its slope, are 0
_RUNTIME = ["heads", "positions", "times"]  # one binary for all values of these


@triton.jit
def _log_bucket(distance, size):
    """As ``attention.log_bucket``: the upper bits of a float32 are a logarithm."""
    code = (tl.maximum(distance, 0).to(tl.float32) + 1.0).to(tl.int32, bitcast=True) >> _SHIFT
    return tl.minimum(code - _BASE, size - 1)


@triton.jit
def _is_below(distance, bucket):
    """Whether ``_log_bucket(distance) < bucket``, without the bucket of each distance."""
    edge = ((bucket + _BASE) << _SHIFT).to(tl.float32, bitcast=True)
    return distance.to(tl.float32) + 1.0 < edge


@triton.jit
def _add_bias(scores, table_ptr, distance, low, high, size):
    """Add the bias of distances in the buckets ``low`` to ``high``.

    A tile far from the diagonal spans two buckets at most, and one comparison finds the bias; else the table is read.
    """
    if high > low + 1:
        scores += tl.load(table_ptr + _log_bucket(distance, size))
    else:
        scores += tl.where(_is_below(distance, high), tl.load(table_ptr + low), tl.load(table_ptr + high))
    return scores


@triton.jit
def _add_bias_gradient(sums, dscores, distance, low, high, size, BLOCK: tl.constexpr):
    """Add ``dscores`` to ``sums [BLOCK]`` by bucket of the distance, all in ``low`` to ``high``."""
    slot = tl.arange(0, BLOCK)
    if high > low + 1:
        buckets = _log_bucket(distance, size)
        for bucket in range(low, high + 1):
            sums += tl.where(slot == bucket, tl.sum(tl.where(buckets == bucket, dscores, 0.0)), 0.0)
    else:
        below = _is_below(distance, high)
        sums += tl.where(slot == low, tl.sum(tl.where(below, dscores, 0.0)), 0.0)
        sums += tl.where(slot == high, tl.sum(tl.where(below, 0.0, dscores)), 0.0)
    return sums


@triton.jit
def _mask_future(scores, distance, shortest):
    if shortest < 0:
        scores = tl.where(distance < 0, _MASKED, scores)
    return scores


@triton.jit
def _sigmoid(x):
    """``1 / (1 + exp(-x))`` to about 1e-7. The compiler's own spends 12 instructions on denormal numbers."""
    if _COMPILED:
        return tl.inline_asm_elementwise(
            """{
            mul.ftz.f32 $0, $1, 0fBFB8AA3B;  // -log2(e)
            ex2.approx.ftz.f32 $0, $0;
            add.ftz.f32 $0, $0, 0f3F800000;
            rcp.approx.ftz.f32 $0, $0;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.sigmoid(x)


@triton.jit
def _load(base, rows, stride, cols, length, WIDTH: tl.constexpr):
    """Rows of one head, ``[rows, cols]``; 0 past the end of the history or of the head."""
    mask = (rows[:, None] < length) & (cols[None, :] < WIDTH)
    return tl.load(base + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _store(base, rows, stride, cols, length, WIDTH: tl.constexpr, value):
    mask = (rows[:, None] < length) & (cols[None, :] < WIDTH)
    tl.store(base + rows[:, None] * stride + cols[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _load_times(times_ptr, rows, length):
    """Times of ``rows``; past the end that of the last event, so that padding widens no range of buckets."""
    return tl.load(times_ptr + tl.maximum(tl.minimum(rows, length - 1), 0))


@triton.jit(do_not_specialize=_RUNTIME)
def forward(
    q_ptr, k_ptr, v_ptr, out_ptr, q_row, k_row, v_row, out_row, q_head, k_head, v_head, out_head,
    times_ptr, position_ptr, time_ptr, start_ptr, length_ptr, row_ptr, alpha, heads, positions, times,
    QK: tl.constexpr, V: tl.constexpr, QK_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    OWN: tl.constexpr, OTHER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of one tile of queries."""
    tile, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    start, length, first = tl.load(start_ptr + tile), tl.load(length_ptr + tile), tl.load(row_ptr + tile)
    queries, qk, v_cols = first + tl.arange(0, OWN), tl.arange(0, QK_BLOCK), tl.arange(0, V_BLOCK)
    q = _load(q_ptr + start * q_row + head * q_head, queries, q_row, qk, length, QK)
    k_ptr += start * k_row + head * k_head
    v_ptr += start * v_row + head * v_head
    times_ptr += start
    now = _load_times(times_ptr, queries, length)
    now_min, now_max = tl.min(now), tl.max(now)
    out = tl.zeros([OWN, V_BLOCK], tl.float32)
    for block in range(0, tl.minimum(first + OWN, length), OTHER):
        keys = block + tl.arange(0, OTHER)
        k = _load(k_ptr, keys, k_row, qk, length, QK)
        v = _load(v_ptr, keys, v_row, v_cols, length, V)
        then = _load_times(times_ptr, keys, length)
        distance, shortest = queries[:, None] - keys[None, :], first - block - OTHER + 1
        low, high = _log_bucket(shortest, positions), _log_bucket(first - block + OWN - 1, positions)
        elapsed = now[:, None] - then[None, :]
        soon, late = _log_bucket(now_min - tl.max(then), times), _log_bucket(now_max - tl.min(then), times)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * alpha
        scores = _add_bias(scores, position_ptr, distance, low, high, positions)
        scores = _add_bias(scores, time_ptr, elapsed, soon, late, times)
        scores = _mask_future(scores, distance, shortest)
        weights = scores * _sigmoid(scores)
        out = tl.dot(weights.to(v.dtype), v, out, input_precision=PRECISION)
    out /= (queries + 1)[:, None]
    _store(out_ptr + start * out_row + head * out_head, queries, out_row, v_cols, length, V, out)


@triton.jit(do_not_specialize=_RUNTIME)
def backward_queries(
    q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, q_row, k_row, v_row, dout_row, dq_row,
    q_head, k_head, v_head, dout_head, dq_head, dposition_ptr, dtime_ptr,
    times_ptr, position_ptr, time_ptr, start_ptr, length_ptr, row_ptr, alpha, heads, positions, times,
    QK: tl.constexpr, V: tl.constexpr, QK_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    OWN: tl.constexpr, OTHER: tl.constexpr, PRECISION: tl.constexpr,
    POSITION_BLOCK: tl.constexpr, TIME_BLOCK: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries, and its share of the bias gradients."""
    tile, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    start, length, first = tl.load(start_ptr + tile), tl.load(length_ptr + tile), tl.load(row_ptr + tile)
    queries, qk, v_cols = first + tl.arange(0, OWN), tl.arange(0, QK_BLOCK), tl.arange(0, V_BLOCK)
    q = _load(q_ptr + start * q_row + head * q_head, queries, q_row, qk, length, QK)
    dout = _load(dout_ptr + start * dout_row + head * dout_head, queries, dout_row, v_cols, length, V)
    k_ptr += start * k_row + head * k_head
    v_ptr += start * v_row + head * v_head
    times_ptr += start
    now = _load_times(times_ptr, queries, length)
    now_min, now_max = tl.min(now), tl.max(now)
    mean = (1.0 / (queries + 1))[:, None]
    dq = tl.zeros([OWN, QK_BLOCK], tl.float32)
    dposition, dtime = tl.zeros([POSITION_BLOCK], tl.float32), tl.zeros([TIME_BLOCK], tl.float32)
    for block in range(0, tl.minimum(first + OWN, length), OTHER):
        keys = block + tl.arange(0, OTHER)
        k = _load(k_ptr, keys, k_row, qk, length, QK)
        v = _load(v_ptr, keys, v_row, v_cols, length, V)
        then = _load_times(times_ptr, keys, length)
        distance, shortest = queries[:, None] - keys[None, :], first - block - OTHER + 1
        low, high = _log_bucket(shortest, positions), _log_bucket(first - block + OWN - 1, positions)
        elapsed = now[:, None] - then[None, :]
        soon, late = _log_bucket(now_min - tl.max(then), times), _log_bucket(now_max - tl.min(then), times)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * alpha
        scores = _add_bias(scores, position_ptr, distance, low, high, positions)
        scores = _add_bias(scores, time_ptr, elapsed, soon, late, times)
        scores = _mask_future(scores, distance, shortest)
        gate = _sigmoid(scores)
        dweights = tl.dot(dout, tl.trans(v), input_precision=PRECISION) * mean
        dscores = dweights * gate * (1.0 + scores * (1.0 - gate))
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)
        dposition = _add_bias_gradient(dposition, dscores, distance, low, high, positions, POSITION_BLOCK)
        dtime = _add_bias_gradient(dtime, dscores, elapsed, soon, late, times, TIME_BLOCK)
    _store(dq_ptr + start * dq_row + head * dq_head, queries, dq_row, qk, length, QK, dq * alpha)
    tl.store(dposition_ptr + tl.program_id(0) * POSITION_BLOCK + tl.arange(0, POSITION_BLOCK), dposition)
    tl.store(dtime_ptr + tl.program_id(0) * TIME_BLOCK + tl.arange(0, TIME_BLOCK), dtime)


@triton.jit(do_not_specialize=_RUNTIME)
def backward_keys(
    q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, q_row, k_row, v_row, dout_row, dk_row, dv_row,
    q_head, k_head, v_head, dout_head, dk_head, dv_head,
    times_ptr, position_ptr, time_ptr, start_ptr, length_ptr, row_ptr, alpha, heads, positions, times,
    QK: tl.constexpr, V: tl.constexpr, QK_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    OWN: tl.constexpr, OTHER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys. Scores are held transposed, ``[keys, queries]``, ready for the products."""
    tile, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    start, length, first = tl.load(start_ptr + tile), tl.load(length_ptr + tile), tl.load(row_ptr + tile)
    keys, qk, v_cols = first + tl.arange(0, OWN), tl.arange(0, QK_BLOCK), tl.arange(0, V_BLOCK)
    k = _load(k_ptr + start * k_row + head * k_head, keys, k_row, qk, length, QK)
    v = _load(v_ptr + start * v_row + head * v_head, keys, v_row, v_cols, length, V)
    q_ptr += start * q_row + head * q_head
    dout_ptr += start * dout_row + head * dout_head
    times_ptr += start
    then = _load_times(times_ptr, keys, length)
    then_min, then_max = tl.min(then), tl.max(then)
    dk, dv = tl.zeros([OWN, QK_BLOCK], tl.float32), tl.zeros([OWN, V_BLOCK], tl.float32)
    for block in range(first // OTHER * OTHER, length, OTHER):
        queries = block + tl.arange(0, OTHER)
        q = _load(q_ptr, queries, q_row, qk, length, QK)
        dout = _load(dout_ptr, queries, dout_row, v_cols, length, V)  # 0 for padding, which so adds nothing
        now = _load_times(times_ptr, queries, length)
        distance, shortest = queries[None, :] - keys[:, None], block - first - OWN + 1
        low, high = _log_bucket(shortest, positions), _log_bucket(block - first + OTHER - 1, positions)
        elapsed = now[None, :] - then[:, None]
        soon, late = _log_bucket(tl.min(now) - then_max, times), _log_bucket(tl.max(now) - then_min, times)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * alpha
        scores = _add_bias(scores, position_ptr, distance, low, high, positions)
        scores = _add_bias(scores, time_ptr, elapsed, soon, late, times)
        scores = _mask_future(scores, distance, shortest)
        gate = _sigmoid(scores)
        mean = (1.0 / (queries + 1))[None, :]
        dv = tl.dot((scores * gate * mean).to(dout.dtype), dout, dv, input_precision=PRECISION)
        dweights = tl.dot(v, tl.trans(dout), input_precision=PRECISION) * mean
        dscores = dweights * gate * (1.0 + scores * (1.0 - gate))
        dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=PRECISION)
    _store(dk_ptr + start * dk_row + head * dk_head, keys, dk_row, qk, length, QK, dk * alpha)
    _store(dv_ptr + start * dv_row + head * dv_head, keys, dv_row, v_cols, length, V, dv)
