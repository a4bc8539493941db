"""The plan of the Hopper kernels, made by two Triton kernels. :class:`.hopper.Plan` takes about a hundred PyTorch operations.

The results are the same integers, and the same floating-point numbers.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.models import tiles_triton
from lightning_freescale.models.attention import hopper
from lightning_freescale.models.attention.buckets import TIME_LIMIT
from lightning_freescale.models.tiles_triton import find_tile, load_lengths, tiles_before
from lightning_freescale.runtime.direct_triton import direct

EVENTS = hopper.RECORD_EVENTS
CHUNKS = 8  # programs that share the events of a history


@direct
@triton.jit(do_not_specialize=["offsets_ptr", "samples"])
def _schedule(
    offsets_ptr, out_ptr, samples, SIZE: tl.constexpr, QUERY_SIZE: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write one tile to its place in the schedule: the number of tiles with more work, or with as much and a smaller number.

    The work of all tiles of a history follows from its length, so a program counts a whole history at once.
    """
    tile = tl.program_id(0)
    history, first, total = find_tile(offsets_ptr, samples, tile, SIZE, BLOCK)
    used = tile < total
    begin = tl.load(offsets_ptr + history, mask=used, other=0).to(tl.int32)
    length = tl.load(offsets_ptr + history + 1, mask=used, other=0).to(tl.int32) - begin
    number = tile - first
    work = length - number * SIZE
    place, query_tile = 0, 0
    for start in range(0, samples, BLOCK):
        histories = start + tl.arange(0, BLOCK)
        lengths = load_lengths(offsets_ptr, histories, samples)
        if KEYS:  # tile i of a history has the work length - i * SIZE
            more = tl.cdiv(tl.maximum(lengths - work, 0), SIZE)
            same = (lengths >= work) & ((lengths - work) % SIZE == 0)
        else:  # tile i of every history has the work i * SIZE + 1
            tiles = tl.cdiv(lengths, SIZE)
            more = tl.maximum(tiles - 1 - number, 0)
            same = tiles > number
        earlier = histories < history
        place += tl.sum(more + (same & earlier).to(tl.int32), 0)
        query_tile += tl.sum(tl.where(earlier, tl.cdiv(lengths, QUERY_SIZE), 0), 0)
    row = out_ptr + tl.where(used, place, tile) * 4
    tl.store(row, begin)
    tl.store(row + 1, length)
    tl.store(row + 2, tl.where(used, number * SIZE, 0))
    tl.store(row + 3, tl.where(used, query_tile, 0))


@direct
@triton.jit(do_not_specialize=["offsets_ptr", "times_ptr", "samples"])
def _events(
    offsets_ptr, times_ptr, records_ptr, scale_ptr, samples,
    TIMES: tl.constexpr, LIMIT: tl.constexpr, EVENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scale, and the records if ``TIMES``, of every ``num_programs(1)``-th tile of one history."""
    history = tl.program_id(0)
    begin = tl.load(offsets_ptr + history)
    length = (tl.load(offsets_ptr + history + 1) - begin).to(tl.int32)
    if TIMES:
        first_tile = tiles_before(offsets_ptr, samples, history, EVENTS, BLOCK)
    for tile in range(tl.program_id(1), tl.cdiv(length, EVENTS), tl.num_programs(1)):
        within = tl.arange(0, EVENTS)
        row = tile * EVENTS + within
        attended = (row + 1).to(tl.float32)
        tl.store(scale_ptr + begin + row, tl.div_rn(tl.full([EVENTS], 1.0, tl.float32), attended), mask=row < length)
        if TIMES:
            event = begin + tl.minimum(row, length - 1)
            time = tl.load(times_ptr + event).to(tl.int64) - tl.load(times_ptr + begin).to(tl.int64)
            time = tl.minimum(tl.maximum(time, -LIMIT), LIMIT - 1).to(tl.int32)
            record = records_ptr + (first_tile + tile).to(tl.int64) * (EVENTS + 4)
            tl.store(record + within, time)
            tl.store(record + EVENTS, tile * EVENTS)
            tl.store(record + EVENTS + 1, tile * EVENTS)
            tl.store(record + EVENTS + 2, tl.min(time, 0))
            tl.store(record + EVENTS + 3, tl.max(time, 0))


class HopperPlan(hopper.Plan):
    """A :class:`.hopper.Plan` on CUDA. Its times may be any integers: only their distances within a history are used."""

    places: dict[Any, Tensor] | None = None  # arrays of earlier plans of the same shape, which are written again

    def _empty(self, name: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.places is None:
            return torch.empty(shape, dtype=dtype, device=self.offsets.device)
        if name not in self.places:
            self.places[name] = torch.empty(shape, dtype=dtype, device=self.offsets.device)
        return self.places[name]

    def _make(self, size: int, query_size: int, keys: bool) -> Tensor:
        out = self._empty((size, query_size, keys), (self.tiles(size), 4), torch.int32)
        samples = self.offsets.shape[0] - 1
        if out.shape[0]:
            _schedule[(out.shape[0],)](self.offsets, out, samples, size, query_size, keys, tiles_triton.BLOCK)
        return out

    def records(self) -> Tensor:
        if self._records is None:
            self._make_events()
        assert self._records is not None
        return self._records

    def scale(self) -> Tensor:
        if self._scale is None:
            self._make_events()
        assert self._scale is not None
        return self._scale

    def _make_events(self) -> None:
        samples = self.offsets.shape[0] - 1
        self._scale = self._empty("scale", (self.total,), torch.float32)
        times = self._scale if self.times is None else self.times  # the kernel needs some pointer
        # A kernel may read a record more than a history has, and what it reads there must be numbers.
        records = self._empty("records", (self.tiles(EVENTS) + 1, EVENTS + 4), torch.int32).zero_()
        if self.total:
            constants = self.times is not None, TIME_LIMIT, EVENTS, tiles_triton.BLOCK
            _events[(samples, CHUNKS)](self.offsets, times, records, self._scale, samples, *constants, num_warps=1)
        self._records = records if self.times is not None else None
