"""The Triton kernels of HSTU attention: forward, backward by queries, backward by keys. :mod:`.triton_attention` launches them.

The grid has one program for each tile and head. A program owns ``TILE`` consecutive rows of one history and walks over blocks
of ``BLOCK`` rows of the other side: over keys if it owns queries, over queries if it owns keys.

All three kernels share these arguments:

* ``q_ptr``, ``k_ptr``, ...: arrays ``[sum(L), H, D]`` whose last stride is 1. ``q_row`` is the stride of ``q`` between rows
  and ``q_head`` the stride between heads, both in elements.
* ``times_ptr [sum(L)]`` int32: seconds since the first event of the history.
* ``position_ptr [positions]`` and ``time_ptr [times]`` float32: the two bias tables.
* ``start_ptr``, ``length_ptr``, ``row_ptr``, all ``[tiles]``: for each tile, the flat row at which its history starts, the
  length of that history, and the tile's first row within the history.
* ``BIASED``: whether there are biases. If not, the tables and the times are not read.
* ``QK`` and ``V``: the width of a head. ``QK_BLOCK`` and ``V_BLOCK``: the same, rounded up to a power of two.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from lightning_freescale.models.attention.buckets import BUCKET_BASE, BUCKET_SHIFT

_SHIFT, _BASE = tl.constexpr(BUCKET_SHIFT), tl.constexpr(BUCKET_BASE)
_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_MASKED = tl.constexpr(-1e4)  # silu and its derivative are both 0 at this score
_RUNTIME = [
    "heads",
    "positions",
    "times",
]  # one binary serves all values; by default Triton specializes on some of them


@triton.jit
def log_bucket(distance, size):
    """The same bucket as ``buckets.log_bucket``: the upper bits of a float32 are a logarithm."""
    code = (tl.maximum(distance, 0).to(tl.float32) + 1.0).to(tl.int32, bitcast=True) >> _SHIFT
    return tl.minimum(code - _BASE, size - 1)


@triton.jit
def _is_below(distance, bucket):
    """Whether ``log_bucket(distance) < bucket``. One comparison, without computing the bucket of each distance."""
    edge = ((bucket + _BASE) << _SHIFT).to(tl.float32, bitcast=True)
    return distance.to(tl.float32) + 1.0 < edge


@triton.jit
def _add_bias(scores, table_ptr, distance, low, high, size):
    """Add the bias of each distance. All distances lie in the buckets ``low`` to ``high``.

    A block far from the diagonal spans at most two buckets: one comparison selects the bias. Otherwise the table is read.
    """
    if high > low + 1:
        scores += tl.load(table_ptr + log_bucket(distance, size))
    else:
        scores += tl.where(_is_below(distance, high), tl.load(table_ptr + low), tl.load(table_ptr + high))
    return scores


@triton.jit
def _add_bias_gradient(sums, dscores, distance, low, high, size, SLOTS: tl.constexpr):
    """Add ``dscores`` to ``sums [SLOTS]`` by the bucket of each distance. All buckets lie in ``low`` to ``high``."""
    slot = tl.arange(0, SLOTS)
    if high > low + 1:
        buckets = log_bucket(distance, size)
        for bucket in range(low, high + 1):
            sums += tl.where(slot == bucket, tl.sum(tl.where(buckets == bucket, dscores, 0.0)), 0.0)
    else:
        below = _is_below(distance, high)
        sums += tl.where(slot == low, tl.sum(tl.where(below, dscores, 0.0)), 0.0)
        sums += tl.where(slot == high, tl.sum(tl.where(below, 0.0, dscores)), 0.0)
    return sums


@triton.jit
def _sigmoid(x):
    """``1 / (1 + exp(-x))`` to about 1e-7. The compiler's own version spends 12 instructions on denormal numbers."""
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
def _silu_gradient(dweights, scores, gate):
    """Gradient of the scores, given that of ``silu(scores)`` and ``gate = sigmoid(scores)``."""
    return dweights * gate * (1.0 + scores * (1.0 - gate))


@triton.jit
def _load(base, rows, stride, cols, length, WIDTH: tl.constexpr):
    """Rows of one head, ``[rows, cols]``; 0 past the end of the history or of the head."""
    mask = (rows[:, None] < length) & (cols[None, :] < WIDTH)
    return tl.load(base + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _store(base, rows, stride, cols, length, WIDTH: tl.constexpr, value):
    """Inverse of :func:`_load`: write ``value [rows, cols]``, except past the end of the history or of the head."""
    mask = (rows[:, None] < length) & (cols[None, :] < WIDTH)
    tl.store(base + rows[:, None] * stride + cols[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _load_times(times_ptr, rows, length):
    """Times of ``rows``. Past the end it is the time of the last event, so padding does not widen the range of buckets."""
    return tl.load(times_ptr + tl.maximum(tl.minimum(rows, length - 1), 0))


@triton.jit
def _program_tile(heads, start_ptr, length_ptr, row_ptr):
    """This program's head, its history (first flat row, length), and the first row of its tile within the history."""
    tile, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    return head, tl.load(start_ptr + tile), tl.load(length_ptr + tile), tl.load(row_ptr + tile)


@triton.jit
def _biased_scores(
    own, other, distance, elapsed, shortest, longest, soonest, latest,
    position_ptr, time_ptr, alpha, positions, times, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``alpha * own @ other^T`` plus both biases if ``BIASED``, masked where the key lies after the query.

    ``distance`` (in events) and ``elapsed`` (in seconds) go from key to query and have the shape of the scores.
    ``shortest``, ``longest``, ``soonest`` and ``latest`` bound them.

    Returns:
        The scores, the lowest and highest bucket of the distances, the lowest and highest bucket of the elapsed times.
    """
    near, far = log_bucket(shortest, positions), log_bucket(longest, positions)
    soon, late = log_bucket(soonest, times), log_bucket(latest, times)
    scores = tl.dot(own, tl.trans(other), input_precision=PRECISION) * alpha
    if BIASED:
        scores = _add_bias(scores, position_ptr, distance, near, far, positions)
        scores = _add_bias(scores, time_ptr, elapsed, soon, late, times)
    if shortest < 0:
        scores = tl.where(distance < 0, _MASKED, scores)
    return scores, near, far, soon, late


@triton.jit(do_not_specialize=_RUNTIME)
def forward(
    q_ptr, k_ptr, v_ptr, out_ptr, q_row, k_row, v_row, out_row, q_head, k_head, v_head, out_head,
    times_ptr, position_ptr, time_ptr, start_ptr, length_ptr, row_ptr, alpha, heads, positions, times,
    QK: tl.constexpr, V: tl.constexpr, QK_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of one tile of queries."""
    head, start, length, first = _program_tile(heads, start_ptr, length_ptr, row_ptr)
    queries, qk_cols, v_cols = first + tl.arange(0, TILE), tl.arange(0, QK_BLOCK), tl.arange(0, V_BLOCK)
    q = _load(q_ptr + start * q_row + head * q_head, queries, q_row, qk_cols, length, QK)
    k_ptr += start * k_row + head * k_head
    v_ptr += start * v_row + head * v_head
    times_ptr += start
    query_times = _load_times(times_ptr, queries, length)
    query_min, query_max = tl.min(query_times), tl.max(query_times)
    out = tl.zeros([TILE, V_BLOCK], tl.float32)
    for block in range(0, tl.minimum(first + TILE, length), BLOCK):
        keys = block + tl.arange(0, BLOCK)
        k = _load(k_ptr, keys, k_row, qk_cols, length, QK)
        v = _load(v_ptr, keys, v_row, v_cols, length, V)
        key_times = _load_times(times_ptr, keys, length)
        scores, _, _, _, _ = _biased_scores(
            q, k, queries[:, None] - keys[None, :], query_times[:, None] - key_times[None, :],
            first - block - BLOCK + 1, first - block + TILE - 1, query_min - tl.max(key_times), query_max - tl.min(key_times),
            position_ptr, time_ptr, alpha, positions, times, BIASED, PRECISION,
        )  # fmt: skip
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
    TILE: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
    POSITION_SLOTS: tl.constexpr, TIME_SLOTS: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries, and the tile's share of both bias gradients.

    ``dposition_ptr [programs, POSITION_SLOTS]`` and ``dtime_ptr [programs, TIME_SLOTS]`` receive the shares.
    """
    head, start, length, first = _program_tile(heads, start_ptr, length_ptr, row_ptr)
    queries, qk_cols, v_cols = first + tl.arange(0, TILE), tl.arange(0, QK_BLOCK), tl.arange(0, V_BLOCK)
    q = _load(q_ptr + start * q_row + head * q_head, queries, q_row, qk_cols, length, QK)
    dout = _load(dout_ptr + start * dout_row + head * dout_head, queries, dout_row, v_cols, length, V)
    k_ptr += start * k_row + head * k_head
    v_ptr += start * v_row + head * v_head
    times_ptr += start
    query_times = _load_times(times_ptr, queries, length)
    query_min, query_max = tl.min(query_times), tl.max(query_times)
    mean = (1.0 / (queries + 1))[:, None]
    dq = tl.zeros([TILE, QK_BLOCK], tl.float32)
    dposition, dtime = tl.zeros([POSITION_SLOTS], tl.float32), tl.zeros([TIME_SLOTS], tl.float32)
    for block in range(0, tl.minimum(first + TILE, length), BLOCK):
        keys = block + tl.arange(0, BLOCK)
        k = _load(k_ptr, keys, k_row, qk_cols, length, QK)
        v = _load(v_ptr, keys, v_row, v_cols, length, V)
        key_times = _load_times(times_ptr, keys, length)
        distance, elapsed = queries[:, None] - keys[None, :], query_times[:, None] - key_times[None, :]
        scores, near, far, soon, late = _biased_scores(
            q, k, distance, elapsed,
            first - block - BLOCK + 1, first - block + TILE - 1, query_min - tl.max(key_times), query_max - tl.min(key_times),
            position_ptr, time_ptr, alpha, positions, times, BIASED, PRECISION,
        )  # fmt: skip
        gate = _sigmoid(scores)
        dweights = tl.dot(dout, tl.trans(v), input_precision=PRECISION) * mean
        dscores = _silu_gradient(dweights, scores, gate)
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)
        if BIASED:
            dposition = _add_bias_gradient(dposition, dscores, distance, near, far, positions, POSITION_SLOTS)
            dtime = _add_bias_gradient(dtime, dscores, elapsed, soon, late, times, TIME_SLOTS)
    _store(dq_ptr + start * dq_row + head * dq_head, queries, dq_row, qk_cols, length, QK, dq * alpha)
    if BIASED:
        tl.store(dposition_ptr + tl.program_id(0) * POSITION_SLOTS + tl.arange(0, POSITION_SLOTS), dposition)
        tl.store(dtime_ptr + tl.program_id(0) * TIME_SLOTS + tl.arange(0, TIME_SLOTS), dtime)


@triton.jit(do_not_specialize=_RUNTIME)
def backward_keys(
    q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, q_row, k_row, v_row, dout_row, dk_row, dv_row,
    q_head, k_head, v_head, dout_head, dk_head, dv_head,
    times_ptr, position_ptr, time_ptr, start_ptr, length_ptr, row_ptr, alpha, heads, positions, times,
    QK: tl.constexpr, V: tl.constexpr, QK_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys. The scores are transposed, ``[keys, queries]``, which both products need."""
    head, start, length, first = _program_tile(heads, start_ptr, length_ptr, row_ptr)
    keys, qk_cols, v_cols = first + tl.arange(0, TILE), tl.arange(0, QK_BLOCK), tl.arange(0, V_BLOCK)
    k = _load(k_ptr + start * k_row + head * k_head, keys, k_row, qk_cols, length, QK)
    v = _load(v_ptr + start * v_row + head * v_head, keys, v_row, v_cols, length, V)
    q_ptr += start * q_row + head * q_head
    dout_ptr += start * dout_row + head * dout_head
    times_ptr += start
    key_times = _load_times(times_ptr, keys, length)
    key_min, key_max = tl.min(key_times), tl.max(key_times)
    dk, dv = tl.zeros([TILE, QK_BLOCK], tl.float32), tl.zeros([TILE, V_BLOCK], tl.float32)
    for block in range(first // BLOCK * BLOCK, length, BLOCK):
        queries = block + tl.arange(0, BLOCK)
        q = _load(q_ptr, queries, q_row, qk_cols, length, QK)
        dout = _load(dout_ptr, queries, dout_row, v_cols, length, V)  # 0 for padding, which therefore adds nothing
        query_times = _load_times(times_ptr, queries, length)
        scores, _, _, _, _ = _biased_scores(
            k, q, queries[None, :] - keys[:, None], query_times[None, :] - key_times[:, None],
            block - first - TILE + 1, block - first + BLOCK - 1, tl.min(query_times) - key_max, tl.max(query_times) - key_min,
            position_ptr, time_ptr, alpha, positions, times, BIASED, PRECISION,
        )  # fmt: skip
        gate = _sigmoid(scores)
        mean = (1.0 / (queries + 1))[None, :]
        dv = tl.dot((scores * gate * mean).to(dout.dtype), dout, dv, input_precision=PRECISION)
        dweights = tl.dot(v, tl.trans(dout), input_precision=PRECISION) * mean
        dscores = _silu_gradient(dweights, scores, gate)
        dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=PRECISION)
    _store(dk_ptr + start * dk_row + head * dk_head, keys, dk_row, qk_cols, length, QK, dk * alpha)
    _store(dv_ptr + start * dv_row + head * dv_head, keys, dv_row, v_cols, length, V, dv)
