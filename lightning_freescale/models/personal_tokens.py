"""Personal tokens (PerSRec, arXiv 2601.03479): a long history is compressed into a few learned tokens.

The events of a user are cut into a history and the recent events. ``k`` learned tokens, the same for all users, stand between
them. The tokens attend to the history and to earlier tokens. Recent events attend to the tokens and to earlier recent events, but
not to the history. So all that a recent event learns of the history passes through the tokens. When the model serves, the keys
and values of the tokens in every layer, the *state* of a user, replace the history.

A history may be cut further, into segments. Tokens follow each segment. The events and tokens of a segment attend to the tokens
of all earlier segments and to earlier rows of their own segment. Recent events attend to the tokens of all segments.

This needs no attention mask. With ``n`` segments it is causal attention over ``n + 1`` sequences per user: the tokens of the
earlier segments, then the events of the segment, then its tokens; the last sequence is the tokens of all segments, then the
recent events. With one segment these are ``[history, tokens]`` and ``[tokens, recent]``. The rows of the tokens are computed once
and are copied into the later sequences. The outputs of these copies are dropped.

Users with few events have an empty history. Their tokens attend to tokens only, so all of them have the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lightning_freescale.runtime.errors import ConfigurationError


@dataclass(frozen=True)
class PersonalTokens:
    """How the events of a user are cut.

    Attributes:
        tokens: number of tokens of a segment, ``k``.
        recent: least number of recent events. A user with fewer events has an empty history.
        refresh: the history has a multiple of this many events. So a stored state stays valid for ``refresh`` more events, and
            the number of recent events is between ``recent`` and ``recent + refresh - 1``.
        segments: number of segments of the history, ``n``. Each has a multiple of ``refresh`` events. They are of equal length if
            the length of the history allows it. A state has ``n * k`` tokens.
        random_cut: in training, the history of a sample ends at a random multiple of ``refresh``, from 0 to where it ends
            otherwise. So tokens learn from all events and not from the last ones of each user alone. Without it they
            may learn nothing.
    """

    tokens: int = 4
    recent: int = 256
    refresh: int = 64
    segments: int = 1
    random_cut: bool = True

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "random_cut" and value < 1:
                raise ConfigurationError(f"personalization: {name} must be at least 1, not {value}")

    @staticmethod
    def of(option: PersonalTokens | Mapping[str, Any] | None) -> PersonalTokens | None:
        """From the argument of a model, which may come from a checkpoint or a YAML file."""
        return PersonalTokens(**option) if isinstance(option, Mapping) else option

    def history_lengths(self, lengths: Any) -> Any:
        """The number of events of each user in the history. ``lengths [B]``: a tensor or a NumPy array of integers."""
        return (lengths - self.recent).clip(min=0) // self.refresh * self.refresh

    def training_lengths(self, lengths: Tensor, keys: Tensor) -> Tensor:
        """:meth:`history_lengths` in training. ``keys [B]`` int32: a random number for each sample."""
        history = self.history_lengths(lengths)
        if not self.random_cut:
            return history
        choices = history // self.refresh + 1
        return ((keys.long() & 0x7FFFFFFF) * choices >> 31) * self.refresh

    def segment_ends(self, history: Any) -> list[Any]:
        """Where each segment ends: for each of the ``n`` segments a position ``[B]`` among the events of the user.

        ``history [B]``: the number of events in the history, a tensor or a NumPy array. Events behind the last multiple of
        ``refresh``, which :meth:`history_lengths` never leaves, belong to the last segment.
        """
        inner = [history // self.refresh * number // self.segments * self.refresh for number in range(1, self.segments)]
        return [*inner, history]


def squared_lengths(lengths: NDArray[np.float64], cut: PersonalTokens) -> NDArray[np.float64]:
    """The sum of the squared lengths of the sequences of each user in training: the work of the attention is proportional to it.

    With one segment and ``H`` events in the history this is ``(H + k)^2 + (L - H + k)^2``. With ``random_cut`` it is the mean
    over all ends of the history. Segments are taken to be of equal length. The linear work of the tokens is left out.
    """
    tokens, n = cut.tokens, cut.segments
    history = cut.history_lengths(lengths)
    square = history**2
    if cut.random_cut:  # the mean and the mean square of 0, refresh, 2 refresh, ..., history
        history, square = history / 2, history * (2 * history + cut.refresh) / 6
    segments = square / n + history * tokens * (n + 1) + tokens**2 * n * (n + 1) * (2 * n + 1) / 6
    after = lengths + n * tokens
    return segments + after**2 - 2 * after * history + square


def attention_work(cut: PersonalTokens | None) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """A function of the lengths ``[B]`` to which the work of the attention is proportional. It can be pickled."""
    return np.square if cut is None else partial(squared_lengths, cut=cut)


class TokenSequences(NamedTuple):
    """The sequences of ``B`` users with ``n`` segments and ``k`` tokens a segment.

    The rows of a layer are the events and tokens of each user in the order segment, its tokens, next segment, its tokens, recent
    events: ``N = sum(L) + B * n * k`` rows. The attention has ``M = N + B * k * n * (n + 1) / 2`` rows.

    Attributes:
        rows: ``[N]`` int64: for each row of a layer, its number among all events of the batch, then all tokens. The tokens are
            ordered by user, then by segment.
        events: ``[sum(L)]`` int64: the row of each event.
        tokens: ``[B, n * k]`` int64: the row of each token.
        copies: ``[M]`` int64: for each row of the attention, the row of the layer that it copies.
        kept: ``[N]`` int64: for each row of the layer, the row of the attention that holds its output.
        later: ``n`` pairs of rows of the layer and of the attention: the copies of tokens in the second sequence of each user, in
            the third, and so on. A pair has each row of the layer once at most.
        offsets: ``[B * (n + 1) + 1]`` int64: the sequences of the attention.
        token_times: ``[B, n]`` int64: position among the events of the event whose time the tokens of a segment have.
    """

    rows: Tensor
    events: Tensor
    tokens: Tensor
    copies: Tensor
    kept: Tensor
    later: list[tuple[Tensor, Tensor]]
    offsets: Tensor
    token_times: Tensor


def arrange(lengths: Tensor, history: Tensor, total: int, cut: PersonalTokens) -> TokenSequences:
    """The sequences of each user. Nothing is copied to the host.

    Args:
        lengths: ``[B]`` int64, events of each user.
        history: ``[B]`` int64, how many of them are in the history.
        total: ``sum(lengths)``.
        cut: tokens and segments.
    """
    users, n, k, device = len(lengths), cut.segments, cut.tokens, lengths.device
    ends = torch.stack(
        [*cut.segment_ends(history), lengths], 1
    )  # [B, n + 1], those of the parts: segments, recent events
    starts = F.pad(ends[:, :-1], (1, 0))
    first_event = lengths.cumsum(0) - lengths
    event, user, part = (
        torch.arange(total, device=device),
        torch.arange(users, device=device),
        torch.arange(n + 1, device=device),
    )
    owner = torch.repeat_interleave(user, lengths, output_size=total)
    position = event - first_event[owner]
    own_part = (position[:, None] >= ends[owner, :-1]).sum(1)
    token = torch.arange(k, device=device)

    # Rows of a layer: before an event are the tokens of earlier users, and those of the earlier segments of its user.
    events = event + (owner * n + own_part) * k
    segment_tokens = (first_event + user * n * k)[:, None] + ends[:, :-1] + part[:n] * k  # [B, n], the first of each
    tokens = (segment_tokens[:, :, None] + token).flatten(1)
    rows = torch.empty(total + users * n * k, dtype=torch.int64, device=device)
    rows[events], rows[tokens.flatten()] = event, torch.arange(total, total + users * n * k, device=device)

    # Rows of the attention: a sequence has the tokens of the earlier segments, its events, and its own tokens if it has some.
    sizes = ends - starts + (part + 1).clamp(max=n) * k
    offsets = F.pad(sizes.flatten().cumsum(0), (1, 0))
    sequence = offsets[:-1].view(users, n + 1)
    event_places = (sequence - starts)[owner, own_part] + own_part * k + position
    own_places = ((sequence + ends - starts + part * k)[:, :n, None] + token).flatten(1)
    kept = torch.empty_like(rows)
    kept[events], kept[tokens.flatten()] = event_places, own_places.flatten()
    copies = torch.empty(len(rows) + users * k * n * (n + 1) // 2, dtype=torch.int64, device=device)
    copies[kept] = torch.arange(len(rows), device=device)
    later = []
    for number in range(1, n + 1):
        places = sequence[:, number, None] + torch.arange(number * k, device=device)
        later.append((tokens[:, : number * k].flatten(), places.flatten()))
        copies[later[-1][1]] = later[-1][0]
    token_times = first_event[:, None] + (ends[:, :-1] - 1).clamp(min=0)
    return TokenSequences(rows, events, tokens, copies, kept, later, offsets, token_times)
