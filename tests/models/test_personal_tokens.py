"""Personal tokens: two sequences per user equal the masked dense form, and recent events do not leak into the history."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_freescale.models.attention import hstu_attention
from lightning_freescale.models.attention.buckets import log_bucket
from lightning_freescale.models.personal_tokens import PersonalTokens, arrange
from lightning_freescale.runtime.errors import ConfigurationError


def order_of(lengths: list[int], cut: PersonalTokens) -> list[tuple[int, str, int]]:
    """User, kind and number of every row of a layer, written out."""
    rows: list[tuple[int, str, int]] = []
    for user, length in enumerate(lengths):
        history = max(0, length - cut.recent) // cut.refresh * cut.refresh
        rows += [(user, "event", at) for at in range(history)]
        rows += [(user, "token", at) for at in range(cut.tokens)]
        rows += [(user, "event", at) for at in range(history, length)]
    return rows


def masked(
    q: Tensor, k: Tensor, v: Tensor, times: Tensor, position_bias: Tensor, time_bias: Tensor, history: int, tokens: int
) -> Tensor:
    """One user by one dense attention with an explicit mask. Distances are those within the two sequences."""
    rows = len(q)
    mask = torch.ones(rows, rows).tril().bool()
    mask[history + tokens :, :history] = False
    at = torch.arange(rows, dtype=torch.int32)
    seconds = (times - times[0]).to(torch.int32)
    scores = q.shape[-1] ** -0.5 * torch.einsum("ihd,jhd->hij", q, k)
    scores = scores + position_bias[log_bucket(at[:, None] - at, len(position_bias)).long()]
    scores = scores + time_bias[log_bucket(seconds[:, None] - seconds, len(time_bias)).long()]
    weights = torch.nn.functional.silu(scores) * mask / mask.sum(1, keepdim=True)
    return torch.einsum("hij,jhd->ihd", weights, v)


@hypothesis.given(
    st.lists(st.integers(1, 14), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 6), st.integers(1, 4)
)
@hypothesis.settings(max_examples=80, deadline=None)
def test_the_rows_are_in_order(lengths: list[int], tokens: int, recent: int, refresh: int) -> None:
    cut = PersonalTokens(tokens, recent, refresh)
    found = arrange(torch.tensor(lengths), sum(lengths), cut)
    events = [(user, "event", at) for user, length in enumerate(lengths) for at in range(length)]
    all_rows = events + [(user, "token", at) for user in range(len(lengths)) for at in range(tokens)]
    expected = order_of(lengths, cut)
    assert [all_rows[at] for at in found.rows.tolist()] == expected
    assert [expected[at] for at in found.events.tolist()] == events
    sequences = [expected[at] for at in found.copies.tolist()]
    ends = found.offsets.tolist()
    for user, length in enumerate(lengths):
        first, second = (sequences[ends[2 * user + n] : ends[2 * user + n + 1]] for n in (0, 1))
        own = [row for row in expected if row[0] == user]
        history = length - (len(second) - tokens)
        assert first == own[: history + tokens]
        assert second == own[history:]
        assert history == cut.history_lengths(np.array([length]))[0]
    assert [sequences[at] for at in found.kept.tolist()] == expected
    first_copies = {at for n in range(len(lengths)) for at in range(ends[2 * n], ends[2 * n + 1])}
    kept_tokens = [at for at, row in zip(found.kept.tolist(), expected, strict=True) if row[1] == "token"]
    assert set(kept_tokens) <= first_copies


def test_two_sequences_equal_the_masked_form() -> None:
    """Outputs and gradients in float64."""
    lengths, cut = [12, 3, 9, 1, 20], PersonalTokens(tokens=2, recent=3, refresh=4)
    generator = torch.Generator().manual_seed(0)
    rows = sum(lengths) + len(lengths) * cut.tokens
    sequences = arrange(torch.tensor(lengths), sum(lengths), cut)
    q, k, v = (torch.randn(rows, 2, 4, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3))
    biases = [torch.randn(n, dtype=torch.float64, generator=generator, requires_grad=True) for n in (6, 12)]
    times = torch.randint(0, 10**6, (rows,), generator=generator).sort().values
    parts = (part[sequences.copies] for part in (q, k, v))
    found = hstu_attention(*parts, sequences.offsets, times[sequences.copies], *biases)[sequences.kept]

    expected, start = [], 0
    for length in lengths:
        end = start + length + cut.tokens
        history = int(cut.history_lengths(np.array([length]))[0])
        own = (part[start:end] for part in (q, k, v, times))
        expected.append(masked(*own, *biases, history, cut.tokens))
        start = end
    reference = torch.cat(expected)
    assert torch.allclose(found, reference, rtol=0, atol=1e-12)
    toward = torch.randn(reference.shape, dtype=torch.float64, generator=generator)
    ours, theirs = (
        torch.autograd.grad(out, (q, k, v, *biases), toward, retain_graph=True) for out in (found, reference)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["tokens", "recent", "refresh"])
def test_bad_options_are_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"personalization: {name} must be at least 1, not 0"):
        PersonalTokens(**{name: 0})
