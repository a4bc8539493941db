"""Recent events that continue from states on CUDA: :class:`.sequences.StateAttention` with fewer passes over memory.

One kernel joins the events with the rows of the tokens: it writes the input of the layers, and what the attention must know of
all rows. In every layer the kernel of the SiLU writes the keys and values of the tokens from the states to their places. So no
layer has a launch more than without states, and the states of the users are not copied out of a store.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_freescale.models import tiles_triton
from lightning_freescale.models.sequences import Attention
from lightning_freescale.models.tiles import cdiv, power_of_2, unit_stride

if TYPE_CHECKING:
    from lightning_freescale.models.personalization import UserStates

JOINED_ELEMENTS = 4096  # of a tile
JOINED_CHUNKS = 64  # most programs that share the rows of a user
SILU_COLUMNS, SILU_ROWS = 512, 4  # of a tile


@triton.jit(
    do_not_specialize=[
        *("lengths_ptr", "timestamps_ptr", "before_ptr", "segment_times_ptr", "chosen_ptr"),
        "users",
    ]
)
def _join(
    x_ptr, lengths_ptr, timestamps_ptr, before_ptr, segment_times_ptr, chosen_ptr,
    rows_ptr, times_ptr, states_ptr, recent_ptr, offsets_ptr, x_row, users, scale,
    TOKENS: tl.constexpr, SEGMENTS: tl.constexpr, CHOSEN: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every ``num_programs(1)``-th tile of the rows of one user: the tokens, whose rows are 0, then the events."""
    user, chunk, cols = tl.program_id(0), tl.program_id(1), tl.arange(0, COLS)
    start = 0  # the first event of the user
    for begin in range(0, user, BLOCK):
        others = begin + tl.arange(0, BLOCK)
        start += tl.sum(tl.load(lengths_ptr + others, mask=others < user, other=0).to(tl.int32), 0)
    length = tl.load(lengths_ptr + user).to(tl.int32)
    first = start + user * TOKENS
    if chunk == 0:
        tl.store(offsets_ptr + user, first)
        if user == users - 1:
            tl.store(offsets_ptr + users, first + TOKENS + length)
    state = user.to(tl.int64)
    if CHOSEN:
        state = tl.load(chosen_ptr + user).to(tl.int64)
    has_history = tl.load(before_ptr + state) > 0
    first_time = tl.load(timestamps_ptr + start, mask=length > 0, other=0)
    for tile in range(chunk, tl.cdiv(length + TOKENS, ROWS), tl.num_programs(1)):
        place = tile * ROWS + tl.arange(0, ROWS)
        is_token, event = place < TOKENS, start + place - TOKENS
        is_event = (place >= TOKENS) & (place < length + TOKENS)
        segment_time = tl.load(
            segment_times_ptr + state * SEGMENTS + place // (TOKENS // SEGMENTS), mask=is_token, other=0
        )
        time = tl.load(timestamps_ptr + event, mask=is_event, other=0)
        time = tl.where(is_token, tl.where(has_history, segment_time, first_time), time)
        row, exists = first + place, place < length + TOKENS
        tl.store(times_ptr + row, time, mask=exists)
        tl.store(states_ptr + row, tl.where(is_token, state * TOKENS + place, -1).to(tl.int32), mask=exists)
        tl.store(recent_ptr + event, row.to(tl.int64), mask=is_event)
        x_place = x_ptr + event[:, None].to(tl.int64) * x_row + cols[None, :]
        x = tl.load(x_place, mask=is_event[:, None] & (cols[None, :] < D), other=0.0).to(tl.float32) * scale
        out = rows_ptr + row[:, None].to(tl.int64) * D + cols[None, :]
        tl.store(out, x.to(rows_ptr.dtype.element_ty), mask=exists[:, None] & (cols[None, :] < D))


@triton.jit(do_not_specialize=["count"])
def _silu_with_states(
    x_ptr, out_ptr, states_ptr, keys_ptr, values_ptr, x_row, out_row, count, width,
    KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """SiLU of one tile. In the rows of tokens, the first ``VALUES`` and the last ``KEYS`` columns come from the states."""
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (rows[:, None] < count) & (cols[None, :] < width)
    place, col = rows[:, None].to(tl.int64), cols[None, :]
    x = tl.load(x_ptr + place * x_row + col, mask=mask, other=0.0).to(tl.float32)
    state = tl.load(states_ptr + rows, mask=rows < count, other=-1)[:, None].to(tl.int64)
    is_value = mask & (state >= 0) & (col < VALUES)
    is_key = mask & (state >= 0) & (col >= width - KEYS)
    value = tl.load(values_ptr + state * VALUES + col, mask=is_value, other=0.0).to(tl.float32)
    key = tl.load(keys_ptr + state * KEYS + col - (width - KEYS), mask=is_key, other=0.0).to(tl.float32)
    out = tl.where(is_value, value, tl.where(is_key, key, x * tl.sigmoid(x)))
    tl.store(out_ptr + place * out_row + col, out.to(out_ptr.dtype.element_ty), mask=mask)


class StateRows(NamedTuple):
    """The tokens of some users in one layer.

    Attributes:
        keys: ``[S, H * Dqk]``, contiguous.
        values: ``[S, H * Dv]``, contiguous.
        states: ``[N]`` int32: for each row of the layer, its row in ``keys`` and ``values``; -1 for an event.
    """

    keys: Tensor
    values: Tensor
    states: Tensor

    def silu(self, projected: Tensor) -> Tensor:
        """SiLU of values, queries and keys ``[N, H * (Dv + 2 Dqk)]``, with the keys and values of the tokens from their states.

        The rows of the argument may lie apart.
        """
        rows, width = projected.shape
        out = torch.empty(rows, width, dtype=projected.dtype, device=projected.device)
        _silu_with_states[(cdiv(rows, SILU_ROWS), cdiv(width, SILU_COLUMNS))](
            projected, out, self.states, self.keys, self.values, projected.stride(0), out.stride(0), rows, width,
            self.keys.shape[1], self.values.shape[1], SILU_ROWS, SILU_COLUMNS,
        )  # fmt: skip
        return out


class JoinedStateAttention(Attention):
    """:class:`.sequences.StateAttention` whose layers take the keys and values of the tokens as :class:`StateRows`.

    Args:
        offsets: ``[B + 1]`` int64, the tokens and recent events of each user.
        timestamps: ``[N]`` int64, the time of each row.
        bias: whether the layers have position and time biases.
        recent: ``[sum(lengths)]`` int64, the rows of the events.
        layers: the tokens in every layer, in order.
    """

    differentiable_when_fused = False

    def __init__(self, offsets: Tensor, timestamps: Tensor, bias: bool, recent: Tensor, layers: list[StateRows]):
        super().__init__(offsets, timestamps, bias)
        self.recent = recent
        self._layers = iter(layers)

    def take_state(self) -> StateRows:
        return next(self._layers)


def join(
    x: Tensor,
    scale: float,
    lengths: Tensor,
    timestamps: Tensor,
    states: UserStates,
    users: Tensor | None,
    bias: bool,
) -> tuple[Tensor, JoinedStateAttention]:
    """The rows of the layers, and their attention. It has no gradient.

    Args:
        x: ``[sum(lengths), D]``, rows of the recent events.
        scale: factor of ``x``.
        lengths: ``[B]`` integer, recent events of each user. ``B`` is not 0.
        timestamps: ``[sum(lengths)]`` int64, seconds.
        states: of these users, or of more.
        users: ``[B]`` integer, the users of the batch among those of ``states``. Without it, all in their order.
        bias: whether the layers have position and time biases.
    """
    count, (events, width), device = lengths.shape[0], x.shape, x.device
    layers, _, tokens = states.keys.shape[:3]
    x, total = unit_stride(x), events + count * tokens
    rows = torch.empty(total, width, dtype=x.dtype, device=device)
    times, offsets, recent = (torch.empty(n, dtype=torch.int64, device=device) for n in (total, count + 1, events))
    state_rows = torch.empty(total, dtype=torch.int32, device=device)
    columns = power_of_2(width)
    tile = max(1, JOINED_ELEMENTS // columns)
    chunks = min(JOINED_CHUNKS, cdiv(cdiv(total, count), tile))
    given = lengths, timestamps, states.lengths, states.segment_times, lengths if users is None else users
    _join[(count, chunks)](
        x, *(part.contiguous() for part in given), rows, times, state_rows, recent, offsets, x.stride(0), count, scale,
        tokens, states.segment_times.shape[1], users is not None, width, tile, columns, tiles_triton.BLOCK,
    )  # fmt: skip
    keys, values = (part.reshape(layers, -1, part.shape[3] * part.shape[4]) for part in (states.keys, states.values))
    found = [StateRows(key, value, state_rows) for key, value in zip(keys.unbind(), values.unbind(), strict=True)]
    return rows, JoinedStateAttention(offsets, times, bias, recent, found)
