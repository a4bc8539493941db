"""The learned tokens of a model with :class:`~.personal_tokens.PersonalTokens`, and the states of users for serving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_freescale.batch.seq_batch import NEGATIVES, SeqBatch
from lightning_freescale.batch.torchrec_types import KeyedJaggedTensor
from lightning_freescale.models.attention.buckets import event_positions
from lightning_freescale.models.personal_tokens import PersonalTokens, arrange
from lightning_freescale.models.sequences import (
    Attention,
    LayerState,
    RecordingAttention,
    StateAttention,
    TokenAttention,
)
from lightning_freescale.runtime.errors import ConfigurationError, InputError

# Personalizing is combined with the LightningModule of `lightning` or of `pytorch_lightning`.
if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_freescale.models.state_attention_triton import JoinedStateAttention

    _Base = pl.LightningModule
else:
    _Base = object

INITIAL_TOKEN_STD = 0.02
_KEY_STEP = 0x61C88647  # odd: the dropout keys of the tokens of a user differ


class UserStates(NamedTuple):
    """What recent events need of the histories of ``B`` users.

    Attributes:
        keys: ``[layers, B, n * k, H, Dqk]``, the keys of the tokens.
        values: ``[layers, B, n * k, H, Dv]``, their values.
        lengths: ``[B]`` int64, events of each history.
        segment_times: ``[B, n]`` int64, the time of the last event of each of the ``n`` segments, that of the first event for
            the empty segments before it; 0 if the history is empty.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    segment_times: Tensor

    @property
    def layers(self) -> list[LayerState]:
        """The state in each layer."""
        return [LayerState(keys, values) for keys, values in zip(self.keys, self.values, strict=True)]

    @property
    def last_times(self) -> Tensor:
        """``[B]`` int64, the time of the last event of each history; 0 if it is empty."""
        return self.segment_times[:, -1]

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name, a row for each user, for a file such as ``safetensors.torch.save_file(states.tensors(), path)``."""
        found = {"lengths": self.lengths, "segment_times": self.segment_times}
        for number, layer in enumerate(self.layers):
            found |= {f"keys.{number}": layer.keys, f"values.{number}": layer.values}
        return {name: value.contiguous() for name, value in found.items()}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> UserStates:
        """The inverse of :meth:`tensors`."""
        count = sum(name.startswith("keys.") for name in tensors)
        missing = {"lengths", "segment_times", *(f"values.{number}" for number in range(count))} - tensors.keys()
        if missing or not count:
            raise InputError(f"states: no tensor named {min(missing or {'keys.0'})!r}; the file is not of UserStates")
        keys, values = (torch.stack([tensors[f"{kind}.{n}"] for n in range(count)]) for kind in ("keys", "values"))
        return UserStates(keys, values, tensors["lengths"], tensors["segment_times"])

    def select(self, users: Tensor) -> UserStates:
        """The states of some users, by their index ``[n]``."""
        keys, values = self.keys.index_select(1, users), self.values.index_select(1, users)
        return UserStates(keys, values, self.lengths[users], self.segment_times[users])

    def choose(self, users: Tensor) -> ChosenStates:
        """As :meth:`select`, but on CUDA the states are read where they are when recent events continue from them."""
        return ChosenStates(self, users)


class ChosenStates(NamedTuple):
    """The states of some users out of a store, which are not copied before they are needed.

    Attributes:
        store: states of all users.
        users: ``[B]`` int64, the chosen ones by their index.
    """

    store: UserStates
    users: Tensor

    @property
    def lengths(self) -> Tensor:
        """As in :class:`UserStates`."""
        return self.store.lengths[self.users]

    @property
    def last_times(self) -> Tensor:
        """As in :class:`UserStates`."""
        return self.store.last_times[self.users]


class Personalization(nn.Module):
    """The tokens that stand between history and recent events. All segments have the same tokens.

    Args:
        cut: number of tokens, where the history ends, and its segments.
        dim: width ``D`` of the layers.
    """

    def __init__(self, cut: PersonalTokens, dim: int) -> None:
        super().__init__()
        self.cut = cut
        self.tokens = nn.Parameter(torch.randn(cut.tokens, dim) * INITIAL_TOKEN_STD)

    def insert(
        self,
        x: Tensor,
        lengths: Tensor,
        timestamps: Tensor,
        keys: Tensor | None,
        bias: bool,
        record: bool = False,
    ) -> tuple[Tensor, TokenAttention, Tensor | None]:
        """Insert the tokens of each user between the segments of the history, and between history and recent events.

        Args:
            x: ``[sum(L), D]``, the input of the layers.
            lengths: ``[B]`` int64, events of each user.
            timestamps: ``[sum(L)]`` int64, seconds.
            keys: ``[sum(L)]`` int32, in training: a random number for each event, for dropout and for the end of the history.
            bias: whether the layers have position and time biases.
            record: all events are history, and the attention is a :class:`RecordingAttention`. A history may be empty.

        Returns:
            The rows of the layers, their attention, and their dropout keys.
        """
        if record:
            history = lengths
        elif keys is None:
            history = self.cut.history_lengths(lengths)
        else:
            history = self.cut.training_lengths(lengths, keys[lengths.cumsum(0) - lengths])
        found, tokens, segments = arrange(lengths, history, len(x), self.cut), self.cut.tokens, self.cut.segments
        rows = torch.cat([x, self.tokens.to(x.dtype).repeat(len(lengths) * segments, 1)])[found.rows]
        token_times = _at(timestamps, found.token_times).flatten().repeat_interleave(tokens)
        times = torch.cat([timestamps, token_times])[found.rows]
        if keys is not None:
            steps = torch.arange(1, segments * tokens + 1, dtype=torch.int32, device=keys.device) * _KEY_STEP
            keys = torch.cat([keys, (keys[found.token_times[:, -1:]] ^ steps).flatten()])[found.rows]
        return rows, (RecordingAttention if record else TokenAttention)(found, times, bias), keys


def _at(timestamps: Tensor, position: Tensor) -> Tensor:
    """The times at ``position``; any time where a user has no event, because then nothing depends on it."""
    return torch.cat([timestamps, timestamps.new_zeros(1)])[position]


def recent_attention(lengths: Tensor, timestamps: Tensor, states: UserStates, bias: bool) -> StateAttention:
    """The attention of recent events ``[sum(lengths)]`` of the users of ``states``."""
    first = timestamps[lengths.cumsum(0) - lengths]
    segment_times = torch.where(states.lengths[:, None] > 0, states.segment_times, first[:, None])
    per_segment = states.keys.shape[2] // segment_times.shape[1]
    token_times = segment_times.repeat_interleave(per_segment, dim=1)
    return StateAttention(lengths, timestamps, token_times, states.layers, bias)


def join_states(
    x: Tensor, scale: float, lengths: Tensor, timestamps: Tensor, states: UserStates | ChosenStates, bias: bool
) -> tuple[Tensor, StateAttention | JoinedStateAttention]:
    """The rows of the layers for recent events that continue from states, and their attention.

    Args:
        x: ``[sum(lengths), D]``, a row for each recent event.
        scale: factor of ``x``.
        lengths: ``[B]`` integer, recent events of each user.
        timestamps: ``[sum(lengths)]`` int64, seconds.
        states: of the users, in the same order.
        bias: whether the layers have position and time biases.
    """
    store, users = states if isinstance(states, ChosenStates) else (states, None)
    known = len(store.lengths if users is None else users)
    if len(lengths) != known:
        raise InputError(f"states: of {known} users, but the batch has {len(lengths)}")
    if x.is_cuda and known and not torch.is_grad_enabled():
        from lightning_freescale.models import state_attention_triton  # Triton is installed on CUDA machines only

        return state_attention_triton.join(x, scale, lengths, timestamps, store, users, bias)
    attention = recent_attention(lengths.long(), timestamps, store if users is None else store.select(users), bias)
    return attention.insert(x if scale == 1 else x * scale), attention


class Personalizing(_Base):
    """Serving of a LightningModule with ``personalization``: histories become states, and recent events continue from them."""

    embedding: Any
    personalization: Personalization | None

    @property
    def has_bias(self) -> bool:
        """Whether the attention has position and time biases."""
        raise NotImplementedError

    def layer_input(self, embedded: Any, batch: SeqBatch) -> Tensor:
        """The input of the layers, ``[sum(L), D]``."""
        raise NotImplementedError

    def unscaled_input(
        self, embedded: Any, batch: SeqBatch, states: UserStates | ChosenStates | None = None
    ) -> tuple[Tensor, float]:
        """``[sum(L), D]``, and the factor that makes it the input of the layers."""
        raise NotImplementedError

    def apply_layers(
        self,
        x: Tensor,
        attention: Attention,
        keys: Tensor | None = None,
        rows: int | None = None,
        ends: Tensor | None = None,
    ) -> Tensor:
        """All layers, then all rows or the rows ``ends [B] - 1``, each of length 1."""
        raise NotImplementedError

    def compress(self, history: SeqBatch) -> UserStates:
        """The states of the users after all events of ``history``. A history may be empty.

        ``split_history(batch, model.personalization.cut)`` cuts a batch as training does. Recent events do not change a state.
        """
        if self.personalization is None:
            raise ConfigurationError(
                "compress: the model has no personal tokens; set personalization=PersonalTokens(...)"
            )
        lengths = history.lengths.long()
        x = self.layer_input(self.embedding(history.features), history)
        rows, attention, _ = self.personalization.insert(
            x, lengths, history.timestamps, None, self.has_bias, record=True
        )
        assert isinstance(attention, RecordingAttention)
        self.apply_layers(rows, attention)
        times = torch.where(lengths[:, None] > 0, _at(history.timestamps, attention.sequences.token_times), 0)
        keys, values = (torch.stack(parts) for parts in zip(*attention.layers, strict=True))
        return UserStates(keys, values, lengths, times)

    def encode_recent(self, recent: SeqBatch, states: UserStates | ChosenStates, *, last: bool = False) -> Tensor:
        """Output at every recent event, ``[sum(R), D]``, as if the batch held the whole histories.

        The samples of ``recent`` and the users of ``states`` have the same order. With ``last`` only the output at the last
        event of each user is returned, ``[B, D]``.
        """
        return self.continue_from(states, self.embedding(recent.features), recent, last=last)

    def continue_from(
        self, states: UserStates | ChosenStates, embedded: Any, recent: SeqBatch, *, last: bool = False
    ) -> Tensor:
        """:meth:`encode_recent` after the lookup. ``embedded`` maps each feature to a ``JaggedTensor`` of its embeddings."""
        x, scale = self.unscaled_input(embedded, recent, states)
        rows, attention = join_states(x, scale, recent.lengths, recent.timestamps, states, self.has_bias)
        if last:
            return self.apply_layers(rows, attention, ends=attention.offsets[1:])
        return self.apply_layers(rows, attention)[attention.recent]


def split_history(batch: SeqBatch, cut: PersonalTokens) -> tuple[SeqBatch, SeqBatch]:
    """The history and the recent events of each user, as two batches. The first has only features of the events."""
    lengths = batch.lengths.long()
    history = cut.history_lengths(lengths)
    position = event_positions(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), len(batch.timestamps))
    is_history = position < history.repeat_interleave(lengths)
    return _part(batch, is_history, history), _part(batch, ~is_history, lengths - history)


def _part(batch: SeqBatch, chosen: Tensor, lengths: Tensor) -> SeqBatch:
    """The chosen events ``[sum(L)]`` bool of a batch, without negatives and targets; ``lengths [B]`` counts them."""
    names = batch.features.keys()
    values = [batch.features[name].values() for name in names]
    values = [part[:0] if name == NEGATIVES else part[chosen] for name, part in zip(names, values, strict=True)]
    counts = [torch.zeros_like(lengths) if name == NEGATIVES else lengths for name in names]
    features = KeyedJaggedTensor(keys=names, values=torch.cat(values), lengths=torch.cat(counts))
    return replace(batch, features=features, timestamps=batch.timestamps[chosen], targets=None)
