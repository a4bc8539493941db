"""The index arithmetic of the prioritized exchange on CUDA, in a few Triton kernels. ``index.py`` defines the orders of rows.

``index.py`` computes the same with about 240 small kernels for each step. Their launches take longer than the kernels themselves.
The ids of one feature and one requester are a *segment*: they are contiguous in lookup order and in wire order, and have the same
order in both. So the place of an id follows from the starts of its segment, and nothing has to be sorted.

Two consecutive batches, A and B, are treated together. Their marks travel in one transfer: for each rank those of A, then those
of B. ``BOUNDS`` in ``fused_index.py`` names the rows of the array ``bounds``.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from lightning_freescale.runtime.direct_triton import direct

BLOCK_IDS = 512  # ids of one program

# Sizes of batches: a kernel must not be compiled again because a number happens to be 1 or a multiple of 16.
_SIZES = (
    "num_features", "num_ranks", "num_samples", "rank", "num_owned", "num_requested", "own_start", "own_count", "count",
    "stamp", "num_sent", "kept_from", "first_mark",
    "owned_a", "owned_b", "requested_a", "requested_b", "lengths_a", "lengths_b",
)  # fmt: skip


def _kernel(function):
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return direct(triton.jit(function, do_not_specialize=[name for name in names if name in _SIZES]))


@triton.jit
def _segment_of(place, starts, count, mask, STEPS: tl.constexpr):
    """The last of ``count`` segments that starts at ``place`` or before it. Empty segments are skipped."""
    low, high = tl.zeros_like(place), tl.zeros_like(place) + count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        begun = tl.load(starts + middle, mask=mask, other=0) <= place
        low, high = tl.where(begun, middle, low), tl.where(begun, high, middle)
    return low


@_kernel
def segments(
    offsets, sample_bounds, lookup, wire, num_features, num_ranks, num_samples, rank, BLOCK: tl.constexpr
):  # fmt: skip
    """Where each segment starts: ``lookup [T * W + 1]`` and ``wire [T * W]`` int64. One program; ``BLOCK`` >= ``W``.

    ``offsets [T * B + 1]`` are those of the features, ``sample_bounds [W + 1]`` where the samples of each requester start.
    """
    ranks = tl.arange(0, BLOCK)
    mask = ranks < num_ranks
    first = tl.load(sample_bounds + ranks, mask=mask, other=0)
    after = tl.load(sample_bounds + ranks + 1, mask=mask, other=0)
    total = tl.zeros([BLOCK], tl.int64)
    for feature in range(num_features):
        row = offsets + feature * num_samples
        start = tl.load(row + first, mask=mask, other=0).to(tl.int64)
        total += tl.load(row + after, mask=mask, other=0).to(tl.int64) - start
        tl.store(lookup + feature * num_ranks + ranks, start, mask=mask)
    others = tl.where(ranks == rank, 0, total)
    place = tl.where(ranks == rank, tl.sum(others, 0), tl.cumsum(others, 0) - others)
    for feature in range(num_features):
        row = offsets + feature * num_samples
        tl.store(wire + feature * num_ranks + ranks, place, mask=mask)
        start = tl.load(row + first, mask=mask, other=0).to(tl.int64)
        place += tl.load(row + after, mask=mask, other=0).to(tl.int64) - start
    end = tl.load(offsets + num_features * num_samples).to(tl.int64)
    tl.store(lookup + num_features * num_ranks, end)


@_kernel
def place_ids(
    values, unbucketize, first_key, lookup, wire, keys, owner_order, requester_order, batch_position,
    num_owned, num_requested, own_start, own_count, num_features, num_ranks,
    PERMUTED: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row keys and owner's wire order ``[n]``; requester's wire order ``[m]``; batch position ``[m]`` if ``PERMUTED``."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    owned = place < num_owned
    segment = _segment_of(place, lookup, num_features * num_ranks, owned, STEPS)
    value = tl.load(values + place, mask=owned, other=0).to(tl.int64)
    tl.store(keys + place, value + tl.load(first_key + segment // num_ranks, mask=owned, other=0), mask=owned)
    shift = tl.load(wire + segment, mask=owned, other=0) - tl.load(lookup + segment, mask=owned, other=0)
    tl.store(owner_order + place + shift, place, mask=owned)

    requested = place < num_requested
    last = num_requested - own_count  # from here on, this rank's own rows
    request = tl.where(place < own_start, place, tl.where(place < last, place + own_count, place - last + own_start))
    tl.store(requester_order + place, request, mask=requested)
    if PERMUTED:
        tl.store(batch_position + tl.load(unbucketize + place, mask=requested, other=0), place, mask=requested)


@_kernel
def note_rows(keys, stamps, count, stamp, BLOCK: tl.constexpr):
    """Write ``stamp`` to the rows of a batch."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    row = tl.load(keys + place, mask=mask, other=0)
    tl.store(stamps + row, (tl.zeros_like(row) + stamp).to(tl.uint8), mask=mask)


@_kernel
def look_for_rows(
    keys, stamps, lookup, wire, shifts, marks, sent, count, stamp, first_mark, num_sent, kept_from,
    num_features, num_ranks, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Which rows of a batch have ``stamp``: to ``marks`` from ``first_mark`` on, in lookup order, and to the wire.

    ``shifts [W]`` is the distance from the place in the batch's own wire order to the place in the common transfer. Marks for
    other ranks go to ``sent``, marks for this rank to ``marks`` from ``kept_from`` on.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    row = tl.load(keys + place, mask=mask, other=0)
    found = (tl.load(stamps + row, mask=mask, other=0) == stamp).to(tl.uint8)
    tl.store(marks + first_mark + place, found, mask=mask)
    segment = _segment_of(place, lookup, num_features * num_ranks, mask, STEPS)
    there = tl.load(wire + segment, mask=mask, other=0) - tl.load(lookup + segment, mask=mask, other=0) + place
    there += tl.load(shifts + segment % num_ranks, mask=mask, other=0)
    tl.store(sent + there, found, mask=mask & (there < num_sent))
    tl.store(marks + kept_from + there - num_sent, found, mask=mask & (there >= num_sent))


@triton.jit
def _before(prefix, place, mask):
    """Number of marks before ``place``; ``prefix`` counts up to and including each place."""
    return tl.load(prefix + place - 1, mask=mask & (place > 0), other=0).to(tl.int64)


@triton.jit
def _own_last(counts, ranks, rank):
    """Where the elements of each rank start in wire order."""
    others = tl.where(ranks == rank, 0, counts)
    return tl.where(ranks == rank, tl.sum(others, 0), tl.cumsum(others, 0) - others)


@triton.jit
def _count_batch(
    prefix, lookup, first_mark, request_start, request_end, request_shift, received_from,
    counts, starts, num_features, num_ranks, rank, BLOCK: tl.constexpr,
):  # fmt: skip
    ranks = tl.arange(0, BLOCK)
    mask = ranks < num_ranks
    num_segments = num_features * num_ranks
    total, total_exclusive = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for feature in range(num_features):
        segment = lookup + feature * num_ranks + ranks
        start, end = tl.load(segment, mask=mask, other=0), tl.load(segment + 1, mask=mask, other=0)
        marked = _before(prefix, first_mark + end, mask) - _before(prefix, first_mark + start, mask)
        total += marked
        total_exclusive += end - start - marked
        tl.store(counts + num_ranks + feature, tl.sum(marked, 0))
        tl.store(counts + num_ranks + num_features + feature, tl.sum(end - start, 0))
    tl.store(counts + ranks, total, mask=mask)
    place, place_exclusive = _own_last(total, ranks, rank), _own_last(total_exclusive, ranks, rank)
    for feature in range(num_features):
        segment = lookup + feature * num_ranks + ranks
        start, end = tl.load(segment, mask=mask, other=0), tl.load(segment + 1, mask=mask, other=0)
        marked = _before(prefix, first_mark + end, mask) - _before(prefix, first_mark + start, mask)
        tl.store(starts + feature * num_ranks + ranks, place, mask=mask)
        tl.store(starts + num_segments + feature * num_ranks + ranks, place_exclusive, mask=mask)
        place += marked
        place_exclusive += end - start - marked
    start, end = tl.load(request_start + ranks, mask=mask, other=0), tl.load(request_end + ranks, mask=mask, other=0)
    shift = tl.load(request_shift + ranks, mask=mask, other=0) + received_from
    marked = _before(prefix, shift + end, mask) - _before(prefix, shift + start, mask)
    tl.store(counts + num_ranks + 2 * num_features + ranks, marked, mask=mask)
    tl.store(starts + 2 * num_segments + ranks, _own_last(marked, ranks, rank), mask=mask)
    exclusive = _own_last(end - start - marked, ranks, rank)
    tl.store(starts + 2 * num_segments + num_ranks + ranks, exclusive, mask=mask)


@_kernel
def count_marks(
    prefix, lookup_a, lookup_b, bounds, counts, owned_a, owned_b, num_features, num_ranks, rank, BLOCK: tl.constexpr
):  # fmt: skip
    """The sizes of both parts of both batches, and where each segment of a part starts in wire order. One program.

    ``prefix`` counts the marks of A in lookup order, of B in lookup order, and those that this rank has received. ``counts`` is
    ``[2, 2 W + 2 T]``, each row as :func:`~lightning_freescale.embedding.index.split_counts` gives it. After it come the starts,
    ``[2, 2 T W + 2 W]``: of the collision rows and of the exclusive rows, at the owner and then at the requester.
    """
    received_from = owned_a + owned_b
    starts = counts + 4 * num_ranks + 4 * num_features
    _count_batch(
        prefix, lookup_a, 0, bounds + 4 * num_ranks, bounds + 5 * num_ranks, bounds + 6 * num_ranks, received_from,
        counts, starts, num_features, num_ranks, rank, BLOCK,
    )  # fmt: skip
    _count_batch(
        prefix, lookup_b, owned_a, bounds + 6 * num_ranks, bounds + 7 * num_ranks, bounds + 5 * num_ranks, received_from,
        counts + 2 * num_ranks + 2 * num_features, starts + 2 * num_features * num_ranks + 2 * num_ranks,
        num_features, num_ranks, rank, BLOCK,
    )  # fmt: skip


@triton.jit
def _divide_ids(
    place, marks, prefix, values, lookup, starts, values_out, wire_order, wire_position, wire_ids,
    first_mark, base, num_owned, owned_collisions, num_segments, STEPS: tl.constexpr,
):  # fmt: skip
    """At the owner: every id, in lookup order."""
    mask = place < num_owned
    mark = tl.load(marks + first_mark + place, mask=mask, other=0) != 0
    before = _before(prefix, first_mark + place, mask) - base
    segment = _segment_of(place, lookup, num_segments, mask, STEPS)
    start = tl.load(lookup + segment, mask=mask, other=0)
    before_segment = _before(prefix, first_mark + start, mask) - base
    part = tl.where(mark, 0, num_segments)
    within = tl.where(mark, before - before_segment, place - start - (before - before_segment))
    on_wire = tl.load(starts + part + segment, mask=mask, other=0) + within
    in_part = tl.where(mark, before, place - before)
    part_start = tl.where(mark, 0, owned_collisions)
    value = tl.load(values + place, mask=mask, other=0).to(tl.int64)
    tl.store(values_out + part_start + in_part, value, mask=mask)
    tl.store(wire_ids + part_start + on_wire, value, mask=mask)
    tl.store(wire_order + part_start + on_wire, in_part, mask=mask)
    tl.store(wire_position + part_start + in_part, on_wire, mask=mask)


@triton.jit
def _divide_offsets(place, prefix, offsets, offsets_out, first_mark, base, num_lengths):
    """At the owner: every feature and sample."""
    mask = place <= num_lengths
    offset = tl.load(offsets + place, mask=mask, other=0).to(tl.int64)
    collisions = _before(prefix, first_mark + offset, mask) - base
    tl.store(offsets_out + place, collisions, mask=mask)
    tl.store(offsets_out + num_lengths + 1 + place, offset - collisions, mask=mask)


@triton.jit
def _divide_batch(
    marks, prefix, values, offsets, unbucketize, lookup, request_start, receive_start, receive_shift, starts, counts,
    out, first_mark, received_from, num_owned, num_requested, num_lengths, num_features, num_ranks,
    PERMUTED: tl.constexpr, STEPS: tl.constexpr, RANK_STEPS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):  # fmt: skip
    wire_order = out + num_owned
    wire_position = wire_order + num_owned
    wire_ids = wire_position + num_owned
    batch_position = wire_ids + num_owned
    batch_order = batch_position + num_requested
    offsets_out = batch_order + num_requested
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    num_segments = num_features * num_ranks
    ranks = tl.arange(0, BLOCK_RANKS)
    owned_collisions = tl.sum(tl.load(counts + ranks, mask=ranks < num_ranks, other=0), 0)
    base = _before(prefix, first_mark, first_mark >= 0)
    _divide_ids(
        place, marks, prefix, values, lookup, starts, out, wire_order, wire_position, wire_ids,
        first_mark, base, num_owned, owned_collisions, num_segments, STEPS,
    )  # fmt: skip
    _divide_offsets(place, prefix, offsets, offsets_out, first_mark, base, num_lengths)

    # at the requester: every id, in batch order
    by_owner = tl.load(counts + num_ranks + 2 * num_features + ranks, mask=ranks < num_ranks, other=0)
    mask = place < num_requested
    request = tl.load(unbucketize + place, mask=mask, other=0).to(tl.int64) if PERMUTED else place
    owner = _segment_of(request, request_start, num_ranks, mask, RANK_STEPS)
    within = request - tl.load(request_start + owner, mask=mask, other=0)
    first = received_from + tl.load(receive_start + owner, mask=mask, other=0)
    first += tl.load(receive_shift + owner, mask=mask, other=0)
    mark = tl.load(marks + first + within, mask=mask, other=0) != 0
    before = _before(prefix, first + within, mask) - _before(prefix, first, mask)
    part = 2 * num_segments + tl.where(mark, 0, num_ranks)
    arrives = tl.load(starts + part + owner, mask=mask, other=0) + tl.where(mark, before, within - before)
    arrives += tl.where(mark, 0, tl.sum(by_owner, 0))
    tl.store(batch_position + arrives, place, mask=mask)
    tl.store(batch_order + place, arrives, mask=mask)


@_kernel
def divide_batches(
    marks, prefix, bounds, counts, out, values_a, offsets_a, unbucketize_a, lookup_a,
    values_b, offsets_b, unbucketize_b, lookup_b, owned_a, requested_a, lengths_a, owned_b, requested_b, lengths_b,
    num_features, num_ranks, PERMUTED: tl.constexpr, STEPS: tl.constexpr, RANK_STEPS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):  # fmt: skip
    """Divide two batches into collision rows and exclusive rows. The second dimension of the grid is the batch.

    ``counts`` is that of :func:`count_marks`, with the starts after it. ``out`` has these arrays for A, and then the same for B.
    Each lists the collision rows first. At the owner ``[n]``: ids in lookup order, the place in lookup order of each row in wire
    order, the reverse, and ids in wire order, each within its part. At the requester ``[m]``: the place in the batch of each row
    in wire order, and for each id of the batch, the place of its row among all rows that arrive. At last the offsets
    ``[2, T * B + 1]``.
    """
    counted, started = 2 * num_ranks + 2 * num_features, 2 * num_features * num_ranks + 2 * num_ranks
    starts, received_from = counts + 2 * counted, owned_a + owned_b
    if tl.program_id(1) == 0:
        _divide_batch(
            marks, prefix, values_a, offsets_a, unbucketize_a, lookup_a,
            bounds + 8 * num_ranks, bounds + 4 * num_ranks, bounds + 6 * num_ranks, starts, counts,
            out, 0, received_from, owned_a, requested_a, lengths_a, num_features, num_ranks,
            PERMUTED, STEPS, RANK_STEPS, BLOCK, BLOCK_RANKS,
        )  # fmt: skip
    else:
        _divide_batch(
            marks, prefix, values_b, offsets_b, unbucketize_b, lookup_b,
            bounds + 9 * num_ranks, bounds + 6 * num_ranks, bounds + 5 * num_ranks, starts + started, counts + counted,
            out + 4 * owned_a + 2 * requested_a + 2 * lengths_a + 2,
            owned_a, received_from, owned_b, requested_b, lengths_b, num_features, num_ranks,
            PERMUTED, STEPS, RANK_STEPS, BLOCK, BLOCK_RANKS,
        )  # fmt: skip
