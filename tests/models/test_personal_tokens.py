"""Personal tokens: two sequences per user equal the masked dense form, and recent events do not leak into the history."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.balance.cost import CostModel
from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.models import HSTU
from lightning_freescale.models.attention import hstu_attention
from lightning_freescale.models.attention.buckets import log_bucket
from lightning_freescale.models.personal_tokens import PersonalTokens, arrange
from lightning_freescale.models.personalization import UserStates, split_history
from lightning_freescale.runtime.errors import ConfigurationError, InputError


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


CUT = PersonalTokens(tokens=3, recent=4, refresh=2)
LENGTHS = [9, 1, 4, 17, 6]
ROUNDING = 2e-6  # of outputs of length 1 in float32


def make_model(bias: str = "relative", cut: PersonalTokens | None = CUT, **options: Any) -> HSTU:
    torch.manual_seed(3)
    shape = {"embedding_dim": 8, "num_layers": 3, "num_heads": 2, "max_history": 12, "feature_sizes": {"genre": 5}}
    model = HSTU(40, bias=bias, personalization=cut, **shape, **options)  # type: ignore[arg-type]
    for parameter in model.parameters():  # the initial biases are 0, and the initial encodings are small
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def make_features(lengths: list[int], seed: int = 0) -> SeqBatch:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    items, genres = (torch.randint(0, n, (total,), generator=generator) for n in (40, 5))
    gaps = torch.randint(0, 10**5, (total,), generator=generator)
    none = [0] * len(lengths)
    features = KeyedJaggedTensor(
        keys=["history", "negatives", "genre"],
        values=torch.cat([items, genres]),
        lengths=torch.tensor([*lengths, *none, *lengths]),
    )
    return SeqBatch(features, gaps.cumsum(0))


@pytest.mark.parametrize("bias", ["relative", "input"])
def test_recent_events_continue_from_a_state_as_from_the_history(bias: str) -> None:
    """The states also pass through a file."""
    model, batch = make_model(bias), make_features(LENGTHS)
    with torch.no_grad():
        whole = model(batch)
        history, recent = split_history(batch, CUT)
        file = io.BytesIO()
        torch.save(model.compress(history).tensors(), file)
        file.seek(0)
        states = UserStates.from_tensors(torch.load(file, weights_only=True))
        found = model.encode_recent(recent, states)
    starts = np.cumsum([0, *LENGTHS])
    expected = [
        whole[start + int(cut) : end]
        for start, end, cut in zip(starts[:-1], starts[1:], CUT.history_lengths(np.array(LENGTHS)), strict=True)
    ]
    assert torch.allclose(found, torch.cat(expected), rtol=0, atol=ROUNDING)
    some = torch.tensor([3, 0])
    chosen = make_subset(recent, some)
    again = model.encode_recent(chosen, states.select(some))
    ends = recent.lengths.cumsum(0)
    parts = [found[int(ends[user] - recent.lengths[user]) : int(ends[user])] for user in some]
    assert torch.allclose(again, torch.cat(parts), rtol=0, atol=ROUNDING)


def make_subset(batch: SeqBatch, users: Tensor) -> SeqBatch:
    rows = {key: batch.features[key].to_dense() for key in batch.features.keys()}  # noqa: SIM118
    times = torch.split(batch.timestamps, batch.lengths.tolist())
    lengths = [len(rows[key][user]) for key in rows for user in users]
    values = torch.cat([rows[key][user] for key in rows for user in users])
    features = KeyedJaggedTensor(keys=list(rows), values=values, lengths=torch.tensor(lengths))
    return SeqBatch(features, torch.cat([times[user] for user in users]))


@pytest.mark.parametrize("bias", ["relative", "input"])
def test_recent_events_do_not_leak_and_the_history_matters(bias: str) -> None:
    """Other recent events change no output of the history and no state. Another history changes the recent outputs."""
    model, length = make_model(bias), 17
    cut = int(CUT.history_lengths(np.array([length]))[0])
    batch, other = make_features([length]), make_features([length])
    other.features.values()[cut:length] = 39 - other.features.values()[cut:length]
    with torch.no_grad():
        before, after = model(batch), model(other)
        assert torch.equal(before[:cut], after[:cut])
        assert not torch.allclose(before[cut:], after[cut:])
        states = [model.compress(split_history(b, CUT)[0]).tensors() for b in (batch, other)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        other = make_features([length])
        other.features.values()[0] = 39 - other.features.values()[0]
        assert not torch.allclose(model(other)[cut:], before[cut:])


def test_short_histories_have_one_state_and_the_model_without_tokens_is_another() -> None:
    model, batch = make_model(), make_features([3, 4, 5])
    with torch.no_grad():
        states = model.compress(split_history(batch, CUT)[0])
        assert states.lengths.tolist() == [0, 0, 0]
        for layer in states.layers:
            assert torch.allclose(layer.keys, layer.keys[:1].expand_as(layer.keys), rtol=0, atol=ROUNDING)
        assert not torch.allclose(make_model(cut=None)(batch), model(batch))
    with pytest.raises(ConfigurationError, match="compress: the model has no personal tokens"):
        make_model(cut=None).compress(batch)
    with pytest.raises(InputError, match="states: of 2 users, but the batch has 3"):
        model.encode_recent(batch, states.select(torch.tensor([0, 1])))
    with pytest.raises(InputError, match=r"states: no tensor named 'values\.0'"):
        UserStates.from_tensors({"keys.0": torch.ones(1), "lengths": torch.ones(1), "last_times": torch.ones(1)})


def test_the_cost_follows_the_two_sequences() -> None:
    """The cost model of a balanced loader; without tokens it has the squares."""
    lengths = np.array([4.0, 17.0])
    models = (CostModel.of_module(make_model(cut=cut)) for cut in (CUT, None))
    with_tokens, without = pickle.loads(pickle.dumps(tuple(models)))  # as a loader does with its workers
    assert with_tokens.squares(lengths).tolist() == [3**2 + 7**2, (12 + 3) ** 2 + (5 + 3) ** 2]
    assert without.squares(lengths).tolist() == [16, 289]
    assert (with_tokens(lengths) - with_tokens.linear * lengths) / with_tokens.quadratic == pytest.approx([58, 289])


def test_the_option_is_saved_as_numbers(tmp_path: Path) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    model = make_model()
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert saved["hyper_parameters"]["personalization"] == {"tokens": 3, "recent": 4, "refresh": 2}
    loaded = HSTU.load_from_checkpoint(tmp_path / "model.ckpt").eval()
    batch = make_features(LENGTHS)
    with torch.no_grad():
        assert torch.equal(loaded(batch), model(batch))


@pytest.mark.parametrize("name", ["tokens", "recent", "refresh"])
def test_bad_options_are_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"personalization: {name} must be at least 1, not 0"):
        PersonalTokens(**{name: 0})
