"""Personal tokens (PerSRec, arXiv 2601.03479): a long history is compressed into a few learned tokens.

The events of a user are cut into a history and the recent events. ``k`` learned tokens, the same for all users, stand between
them. The tokens attend to the history and to earlier tokens. Recent events attend to the tokens and to earlier recent events, but
not to the history. So all that a recent event learns of the history passes through the tokens. When the model serves, the keys
and values of the tokens in every layer, the *state* of a user, replace the history.

This needs no attention mask. It is causal attention over two sequences per user, ``[history, tokens]`` and ``[tokens, recent]``.
The rows of the tokens are computed once and are copied into both sequences. The outputs of the second copy are dropped.

Users with few events have an empty history. Their tokens attend to each other only, so all of them have the same state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
        tokens: number of tokens, ``k``.
        recent: least number of recent events. A user with fewer events has an empty history.
        refresh: the history has a multiple of this many events. So a stored state stays valid for ``refresh`` more events, and
            the number of recent events is between ``recent`` and ``recent + refresh - 1``.
    """

    tokens: int = 4
    recent: int = 256
    refresh: int = 64

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigurationError(f"personalization: {name} must be at least 1, not {value}")

    @staticmethod
    def of(option: PersonalTokens | Mapping[str, Any] | None) -> PersonalTokens | None:
        """From the argument of a model, which may come from a checkpoint or a YAML file."""
        return PersonalTokens(**option) if isinstance(option, Mapping) else option

    def history_lengths(self, lengths: Any) -> Any:
        """The number of events of each user in the history. ``lengths [B]``: a tensor or a NumPy array of integers."""
        return (lengths - self.recent).clip(min=0) // self.refresh * self.refresh


def squared_lengths(lengths: NDArray[np.float64], cut: PersonalTokens) -> NDArray[np.float64]:
    """The sum of the squared lengths of the two sequences of each user, to which the work of the attention is proportional.

    The linear work of the tokens themselves, a few rows per user, is left out.
    """
    history = cut.history_lengths(lengths)
    return (history + cut.tokens) ** 2 + (lengths - history + cut.tokens) ** 2


class TwoSequences(NamedTuple):
    """The rows ``[history, tokens]`` and ``[tokens, recent]`` of ``B`` users.

    The rows of a layer are the events and tokens of each user in the order history, tokens, recent: ``N = sum(L) + B * k`` rows.
    The attention has ``sum(L) + 2 * B * k`` rows.

    Attributes:
        rows: ``[N]`` int64: for each row of a layer, its number among all events of the batch, then all tokens.
        events: ``[sum(L)]`` int64: the row of each event.
        copies: ``[sum(L) + 2 B k]`` int64: for each row of the attention, the row of the layer that it copies.
        kept: ``[N]`` int64: for each row of the layer, the row of the attention that holds its output.
        offsets: ``[2 B + 1]`` int64: the sequences of the attention.
        token_times: ``[B]`` int64: position among the events of the event whose time the tokens have.
    """

    rows: Tensor
    events: Tensor
    copies: Tensor
    kept: Tensor
    offsets: Tensor
    token_times: Tensor


def arrange(lengths: Tensor, total: int, cut: PersonalTokens) -> TwoSequences:
    """The two sequences of each user. Nothing is copied to the host.

    Args:
        lengths: ``[B]`` int64, events of each user, at least one each.
        total: ``sum(lengths)``.
        cut: tokens, and where the history ends.
    """
    users, k, device = len(lengths), cut.tokens, lengths.device
    history = cut.history_lengths(lengths)
    first_event = lengths.cumsum(0) - lengths
    user = torch.repeat_interleave(torch.arange(users, device=device), lengths, output_size=total)
    position = torch.arange(total, device=device) - first_event[user]
    is_recent = position >= history[user]
    event = torch.arange(total, device=device)
    token = torch.arange(users * k, device=device)
    owner = token // k

    events = event + (user + is_recent) * k  # tokens of earlier users, and the user's own before a recent event
    token_rows = first_event[owner] + history[owner] + token
    rows = torch.empty(total + users * k, dtype=torch.int64, device=device)
    rows[events], rows[token_rows] = event, total + token

    # In the attention, the second copy of the tokens follows the first.
    event_places = event + (2 * user + 2 * is_recent) * k
    first_places = first_event[owner] + history[owner] + token + owner * k
    kept = torch.empty_like(rows)
    kept[events], kept[token_rows] = event_places, first_places
    copies = torch.empty(total + 2 * users * k, dtype=torch.int64, device=device)
    copies[event_places], copies[first_places], copies[first_places + k] = events, token_rows, token_rows
    pairs = torch.stack([history + k, lengths - history + k], dim=1).flatten()
    token_times = first_event + (history - 1).clamp(min=0)
    return TwoSequences(rows, events, copies, kept, F.pad(pairs.cumsum(0), (1, 0)), token_times)
