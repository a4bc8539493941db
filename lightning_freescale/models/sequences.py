"""The sequences over which all layers attend: histories, histories with personal tokens, or recent events with a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_freescale.models.attention import hstu_attention, plan_attention
from lightning_freescale.models.personal_tokens import TwoSequences


class Attention:
    """Attention over the rows of the layers as they are. Subclasses arrange the rows for the attention.

    Args:
        offsets: ``[S + 1]`` int64, the sequences of the attention.
        timestamps: int64, seconds, one for each row of the attention.
        bias: whether the layers have position and time biases.
    """

    def __init__(self, offsets: Tensor, timestamps: Tensor, bias: bool):
        self.offsets, self.timestamps = offsets, timestamps
        self.plan = plan_attention(offsets, timestamps, bias=bias)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor | None, time_bias: Tensor | None
    ) -> Tensor:
        """The attention of the next layer. ``q``, ``k [N, H, Dqk]``, ``v`` and the result ``[N, H, Dv]``: rows of a layer."""
        return hstu_attention(q, k, v, self.offsets, self.timestamps, position_bias, time_bias, plan=self.plan)


class TokenAttention(Attention):
    """Attention over ``[history, tokens]`` and ``[tokens, recent]`` of each user.

    Args:
        two: the rows of both sequences.
        timestamps: ``[N]`` int64, the time of each row of the layers.
        bias: whether the layers have position and time biases.
    """

    def __init__(self, two: TwoSequences, timestamps: Tensor, bias: bool):
        super().__init__(two.offsets, timestamps[two.copies], bias)
        self._two = two

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor | None, time_bias: Tensor | None
    ) -> Tensor:
        copies = self._two.copies
        return super().__call__(q[copies], k[copies], v[copies], position_bias, time_bias)[self._two.kept]


class LayerState(NamedTuple):
    """Keys ``[B, k, H, Dqk]`` and values ``[B, k, H, Dv]`` of the tokens of ``B`` users in one layer."""

    keys: Tensor
    values: Tensor


class RecordingAttention(Attention):
    """Attention over ``[history, tokens]`` that keeps the keys and values of the tokens of every layer.

    Args:
        token_rows: ``[B * k]`` int64, the rows of the tokens.
        users: ``B``.
    """

    def __init__(self, offsets: Tensor, timestamps: Tensor, bias: bool, token_rows: Tensor, users: int):
        super().__init__(offsets, timestamps, bias)
        self._rows, self._users = token_rows, users
        self.layers: list[LayerState] = []

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor | None, time_bias: Tensor | None
    ) -> Tensor:
        keys, values = (part[self._rows].unflatten(0, (self._users, -1)) for part in (k, v))
        self.layers.append(LayerState(keys, values))
        return super().__call__(q, k, v, position_bias, time_bias)


class StateAttention(Attention):
    """Attention of recent events over ``[tokens, recent]``, where the keys and values of the tokens come from a state.

    Args:
        lengths: ``[B]`` int64, recent events of each user.
        timestamps: ``[sum(lengths)]`` int64, seconds.
        token_times: ``[B]`` int64, the time of the tokens of each user.
        layers: the state of the users in every layer, in order.
        bias: whether the layers have position and time biases.
    """

    def __init__(
        self, lengths: Tensor, timestamps: Tensor, token_times: Tensor, layers: Sequence[LayerState], bias: bool
    ):
        users, tokens = layers[0].keys.shape[:2]
        user = torch.arange(users, device=lengths.device).repeat_interleave(lengths)
        self._recent = torch.arange(len(timestamps), device=lengths.device) + (user + 1) * tokens
        ends = (lengths + tokens).cumsum(0)
        first = ends - lengths - tokens
        self._tokens = (first[:, None] + torch.arange(tokens, device=lengths.device)).flatten()
        times = timestamps.new_empty(len(timestamps) + users * tokens)
        times[self._recent], times[self._tokens] = timestamps, token_times.repeat_interleave(tokens)
        super().__init__(F.pad(ends, (1, 0)), times, bias)
        self._layers = iter(layers)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor | None, time_bias: Tensor | None
    ) -> Tensor:
        state = next(self._layers)
        keys, values = self._join(k, state.keys), self._join(v, state.values)
        queries = self._join(q, torch.zeros_like(state.keys))  # the outputs of the tokens are dropped
        return super().__call__(queries, keys, values, position_bias, time_bias)[self._recent]

    def _join(self, recent: Tensor, tokens: Tensor) -> Tensor:
        joined = recent.new_empty(len(self._recent) + len(self._tokens), *recent.shape[1:])
        joined[self._recent], joined[self._tokens] = recent, tokens.flatten(0, 1).to(recent.dtype)
        return joined
