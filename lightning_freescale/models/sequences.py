"""The sequences over which all layers attend: histories, histories with personal tokens, or recent events with a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.models.attention import hstu_attention, plan_attention
from lightning_freescale.models.personal_tokens import TokenSequences

Projections = tuple[Tensor, Tensor, Tensor]  # queries, keys and values


class Attention:
    """Attention over the rows of the layers as they are. Subclasses arrange the rows for the attention.

    Args:
        offsets: ``[S + 1]`` int64, the sequences of the attention.
        timestamps: int64, seconds, one for each row of the attention.
        bias: whether the layers have position and time biases.
    """

    differentiable_when_fused = True  # the fused layer has a backward pass for these sequences

    def __init__(self, offsets: Tensor, timestamps: Tensor, bias: bool):
        self.offsets, self.timestamps = offsets, timestamps
        self.plan = plan_attention(offsets, timestamps, bias=bias)

    @property
    def place(self) -> Tensor | None:
        """Where the layers read their input, if there is such a place (:mod:`.layer_graphs`)."""
        graphs = getattr(self.plan, "graphs", None)
        return None if graphs is None else graphs.place()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor | None, time_bias: Tensor | None
    ) -> Tensor:
        """The attention of the next layer. ``q``, ``k [N, H, Dqk]``, ``v`` and the result ``[N, H, Dv]``: rows of a layer."""
        q, k, v = self.arrange(q, k, v)
        out = hstu_attention(q, k, v, self.offsets, self.timestamps, position_bias, time_bias, plan=self.plan)
        return self.collect(out)

    def arrange(self, q: Tensor, k: Tensor, v: Tensor) -> Projections:
        """The rows of the attention, from those of the layer. To be called once for each layer, in order."""
        return q, k, v

    def take_state(self) -> Any:
        """Keys and values of tokens that the fused layer writes to their rows (:mod:`.state_attention_triton`), or ``None``.

        To be called once for each layer, in order.
        """
        return None

    def collect(self, out: Tensor) -> Tensor:
        """The output of each row of the layer, from the rows of the attention."""
        return out

    def events_of(self, rows: Tensor) -> Tensor:
        """The rows of the events, from all rows of a layer."""
        return rows


class PreparedHistories(NamedTuple):
    """What the layers need of a batch beside its embeddings.

    Args:
        batch: the batch.
        keys: the keys of dropout for each row of the layers, if anything is dropped.
        attention: the attention over the histories; ``None`` if the model divides the batch, or adds personal tokens.
    """

    batch: SeqBatch
    keys: Tensor | None
    attention: Attention | None


class TokenAttention(Attention):
    """Attention over the events of each user and the tokens between them (:mod:`.personal_tokens`).

    Args:
        sequences: the rows of all sequences.
        timestamps: ``[N]`` int64, the time of each row of the layers.
        bias: whether the layers have position and time biases.
    """

    def __init__(self, sequences: TokenSequences, timestamps: Tensor, bias: bool):
        super().__init__(sequences.offsets, timestamps[sequences.copies], bias)
        self.sequences = sequences

    def arrange(self, q: Tensor, k: Tensor, v: Tensor) -> Projections:
        copies = self.sequences.copies
        return q[copies], k[copies], v[copies]

    def collect(self, out: Tensor) -> Tensor:
        return out[self.sequences.kept]

    def events_of(self, rows: Tensor) -> Tensor:
        return rows[self.sequences.events]

    def collect_backward(self, grad: Tensor) -> Tensor:
        """The gradient of the argument of :meth:`collect`."""
        spread = grad.new_zeros(len(self.sequences.copies), *grad.shape[1:])
        spread[self.sequences.kept] = grad
        return spread

    def arrange_backward(self, grad: Tensor) -> Tensor:
        """The gradient of an argument of :meth:`arrange`, from that of its copies. The order of each sum is fixed."""
        summed = grad[self.sequences.kept]
        for rows, places in self.sequences.later:
            summed[rows] += grad[places]
        return summed


class LayerState(NamedTuple):
    """Keys ``[B, n * k, H, Dqk]`` and values ``[B, n * k, H, Dv]`` of the tokens of ``B`` users in one layer."""

    keys: Tensor
    values: Tensor


class RecordingAttention(TokenAttention):
    """:class:`TokenAttention` that keeps the keys and values of the tokens of every layer."""

    differentiable_when_fused = False

    def __init__(self, sequences: TokenSequences, timestamps: Tensor, bias: bool):
        super().__init__(sequences, timestamps, bias)
        self.layers: list[LayerState] = []

    def arrange(self, q: Tensor, k: Tensor, v: Tensor) -> Projections:
        self.layers.append(LayerState(k[self.sequences.tokens], v[self.sequences.tokens]))
        return super().arrange(q, k, v)


class StateAttention(Attention):
    """Attention of recent events over ``[tokens, recent]``, where the keys and values of the tokens come from a state.

    The rows of the layers are those of the attention: :meth:`insert` puts rows of zeros where the tokens are. A layer computes
    them like all others, and the state replaces their keys and values. So no other row has to be copied in a layer. On CUDA
    :mod:`.state_attention_triton` does the same with fewer launches, if nothing is differentiated.

    Args:
        lengths: ``[B]`` int64, recent events of each user.
        timestamps: ``[sum(lengths)]`` int64, seconds.
        token_times: ``[B, n * k]`` int64, the times of the tokens of each user.
        layers: the state of the users in every layer, in order.
        bias: whether the layers have position and time biases.
    """

    differentiable_when_fused = False

    def __init__(
        self, lengths: Tensor, timestamps: Tensor, token_times: Tensor, layers: Sequence[LayerState], bias: bool
    ):
        users, tokens = token_times.shape
        total = len(timestamps)
        user = torch.repeat_interleave(torch.arange(users, device=lengths.device), lengths, output_size=total)
        self.recent = torch.arange(total, device=lengths.device) + (user + 1) * tokens  # the rows of the events
        ends = (lengths + tokens).cumsum(0)
        first = ends - lengths - tokens
        self._tokens = (first[:, None] + torch.arange(tokens, device=lengths.device)).flatten()
        times = timestamps.new_empty(total + users * tokens)
        times[self.recent], times[self._tokens] = timestamps, token_times.flatten()
        super().__init__(F.pad(ends, (1, 0)), times, bias)
        self._layers = iter(layers)

    def insert(self, x: Tensor) -> Tensor:
        """The rows of the layers, from ``x [sum(lengths), D]``, those of the events."""
        rows = x.new_zeros(len(self.recent) + len(self._tokens), x.shape[1])
        return rows.index_copy(0, self.recent, x)

    def arrange(self, q: Tensor, k: Tensor, v: Tensor) -> Projections:
        state = next(self._layers)
        return q, self._replace(k, state.keys), self._replace(v, state.values)

    def _replace(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """``rows`` with those of the tokens replaced: in place if nothing is differentiated."""
        tokens = tokens.flatten(0, 1).to(rows.dtype)
        if torch.is_grad_enabled():
            return rows.index_copy(0, self._tokens, tokens)
        return rows.index_copy_(0, self._tokens, tokens)
