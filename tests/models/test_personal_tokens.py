"""Personal tokens: the sequences of a user equal the masked dense form, and recent events do not leak into the history."""

from __future__ import annotations

import io
import itertools
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
from lightning_freescale.models.attention.buckets import log_bucket
from lightning_freescale.models.personal_tokens import PersonalTokens, TokenSequences, arrange, squared_lengths
from lightning_freescale.models.personalization import UserStates, split_history
from lightning_freescale.models.sequences import TokenAttention
from lightning_freescale.runtime.errors import ConfigurationError, InputError

Row = tuple[int, int, str, int]


def order_of(lengths: list[int], cut: PersonalTokens) -> list[Row]:
    """User, part, kind and number of every row of a layer, written out. The parts are the segments, then the recent events."""
    rows: list[Row] = []
    for user, length in enumerate(lengths):
        chunks = max(0, length - cut.recent) // cut.refresh
        ends = [chunks * number // cut.segments * cut.refresh for number in range(1, cut.segments + 1)]
        for part, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            rows += [(user, part, "event", at) for at in range(start, end)]
            rows += [(user, part, "token", at) for at in range(cut.tokens)]
        rows += [(user, cut.segments, "event", at) for at in range(ends[-1], length)]
    return rows


def masked(
    q: Tensor, k: Tensor, v: Tensor, times: Tensor, position_bias: Tensor, time_bias: Tensor, rows: list[Row]
) -> Tensor:
    """One user by one dense attention with an explicit mask. A distance counts the rows that the later row attends to."""
    part = torch.tensor([row[1] for row in rows])
    is_token = torch.tensor([row[2] == "token" for row in rows])
    mask = torch.ones(len(rows), len(rows)).tril().bool() & ((part[:, None] == part) | is_token)
    rank = mask.int().cumsum(1, dtype=torch.int32)
    seconds = (times - times[0]).to(torch.int32)
    scores = q.shape[-1] ** -0.5 * torch.einsum("ihd,jhd->hij", q, k)
    scores = scores + position_bias[log_bucket(rank[:, -1:] - rank, len(position_bias)).long()]
    scores = scores + time_bias[log_bucket(seconds[:, None] - seconds, len(time_bias)).long()]
    weights = torch.nn.functional.silu(scores) * mask / mask.sum(1, keepdim=True)
    return torch.einsum("hij,jhd->ihd", weights, v)


def arranged(lengths: list[int], cut: PersonalTokens) -> TokenSequences:
    events = torch.tensor(lengths)
    return arrange(events, cut.history_lengths(events), sum(lengths), cut)


@hypothesis.given(
    st.lists(st.integers(1, 14), min_size=1, max_size=5),
    st.builds(PersonalTokens, st.integers(1, 3), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)),
)
@hypothesis.settings(max_examples=80, deadline=None)
def test_the_rows_are_in_order(lengths: list[int], cut: PersonalTokens) -> None:
    found, expected = arranged(lengths, cut), order_of(lengths, cut)
    events = [row for row in expected if row[2] == "event"]
    tokens = [row for row in expected if row[2] == "token"]
    assert [(events + tokens)[at] for at in found.rows.tolist()] == expected
    assert [expected[at] for at in found.events.tolist()] == events
    assert [expected[at] for at in found.tokens.flatten().tolist()] == tokens
    sequences = [expected[at] for at in found.copies.tolist()]
    wanted, lengths_wanted, own = [], [], set()
    for user, part in itertools.product(range(len(lengths)), range(cut.segments + 1)):
        before = [row for row in tokens if row[0] == user and row[1] < part]
        sequence = before + [row for row in expected if row[:2] == (user, part)]
        own |= set(range(len(wanted) + len(before), len(wanted) + len(sequence)))
        wanted += sequence
        lengths_wanted.append(len(sequence))
    assert sequences == wanted
    assert found.offsets.diff().tolist() == lengths_wanted
    assert [sequences[at] for at in found.kept.tolist()] == expected
    assert set(found.kept.tolist()) == own


@pytest.mark.parametrize("segments", [1, 3])
def test_the_sequences_equal_the_masked_form(segments: int) -> None:
    """Outputs and gradients in float64. Without the copies of the tokens in the last sequence the outputs differ."""
    lengths, cut = [12, 3, 9, 1, 20, 30], PersonalTokens(tokens=2, recent=3, refresh=4, segments=segments)
    generator = torch.Generator().manual_seed(0)
    order = order_of(lengths, cut)
    rows = len(order)
    q, k, v = (torch.randn(rows, 2, 4, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3))
    biases = [torch.randn(n, dtype=torch.float64, generator=generator, requires_grad=True) for n in (6, 12)]
    times = torch.randint(0, 10**6, (rows,), generator=generator).sort().values
    attention = TokenAttention(arranged(lengths, cut), times, bias=True)
    found = attention(q, k, v, *biases)

    expected, start = [], 0
    for user in range(len(lengths)):
        own = [row for row in order if row[0] == user]
        parts = (part[start : start + len(own)] for part in (q, k, v, times))
        expected.append(masked(*parts, *biases, own))
        start += len(own)
    reference = torch.cat(expected)
    assert torch.allclose(found, reference, rtol=0, atol=1e-12)
    toward = torch.randn(reference.shape, dtype=torch.float64, generator=generator)
    ours, theirs = (
        torch.autograd.grad(out, (q, k, v, *biases), toward, retain_graph=True) for out in (found, reference)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-12)
    attention.sequences.copies[attention.sequences.later[-1][1]] = 0  # negative control
    assert not torch.allclose(attention(q, k, v, *biases), reference, rtol=0, atol=1e-3)


@pytest.mark.parametrize("segments", [1, 3])
def test_the_written_backward_passes_equal_autograd(segments: int) -> None:
    """Those that the fused layer of CUDA uses."""
    lengths, cut = [12, 3, 1, 30], PersonalTokens(tokens=2, recent=3, refresh=4, segments=segments)
    sequences = arranged(lengths, cut)
    attention = TokenAttention(sequences, torch.zeros(len(sequences.rows), dtype=torch.int64), bias=False)
    for forward, backward, rows in (
        (lambda x: attention.arrange(x, x, x)[0], attention.arrange_backward, len(sequences.rows)),
        (attention.collect, attention.collect_backward, len(sequences.copies)),
    ):
        x = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
        out = forward(x)
        toward = torch.randn_like(out)
        (expected,) = torch.autograd.grad(out, x, toward)
        assert torch.allclose(backward(toward), expected, rtol=0, atol=1e-14)


CUT = PersonalTokens(tokens=3, recent=4, refresh=2, random_cut=False)
SEGMENTED = PersonalTokens(tokens=2, recent=4, refresh=2, segments=3, random_cut=False)
both_cuts = pytest.mark.parametrize("cut", [CUT, SEGMENTED], ids=["one segment", "three segments"])
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


@both_cuts
@pytest.mark.parametrize("bias", ["relative", "input"])
def test_recent_events_continue_from_a_state_as_from_the_history(bias: str, cut: PersonalTokens) -> None:
    """The states also pass through a file."""
    model, batch = make_model(bias, cut), make_features(LENGTHS)
    with torch.no_grad():
        whole = model(batch)
        history, recent = split_history(batch, cut)
        file = io.BytesIO()
        torch.save(model.compress(history).tensors(), file)
        file.seek(0)
        states = UserStates.from_tensors(torch.load(file, weights_only=True))
        found = model.encode_recent(recent, states)
    starts = np.cumsum([0, *LENGTHS])
    expected = [
        whole[start + int(events) : end]
        for start, end, events in zip(starts[:-1], starts[1:], cut.history_lengths(np.array(LENGTHS)), strict=True)
    ]
    assert torch.allclose(found, torch.cat(expected), rtol=0, atol=ROUNDING)
    some = torch.tensor([3, 0])
    chosen = make_subset(recent, some)
    again = model.encode_recent(chosen, states.select(some))
    ends = recent.lengths.cumsum(0)
    parts = [found[int(ends[user] - recent.lengths[user]) : int(ends[user])] for user in some]
    assert torch.allclose(again, torch.cat(parts), rtol=0, atol=ROUNDING)


@pytest.mark.gpu
@both_cuts
@pytest.mark.parametrize("bias", ["relative", "input"])
def test_the_states_of_a_gpu_are_those_of_a_cpu(bias: str, cut: PersonalTokens) -> None:
    """The fused layer computes them, in float32."""
    batch = make_features(LENGTHS)
    outputs = []
    for device in ("cpu", "cuda"):
        model = make_model(bias, cut, qk_dim=16, v_dim=16).to(device)
        with torch.no_grad():
            whole = model(batch.to(torch.device(device)))
            history, recent = split_history(batch.to(torch.device(device)), cut)
            outputs += [whole, model.encode_recent(recent, model.compress(history))]
    for expected, found in ((outputs[0], outputs[2]), (outputs[1], outputs[3])):
        assert torch.allclose(found.cpu(), expected, rtol=0, atol=1e-4)


def make_subset(batch: SeqBatch, users: Tensor) -> SeqBatch:
    rows = {key: batch.features[key].to_dense() for key in batch.features.keys()}  # noqa: SIM118
    times = torch.split(batch.timestamps, batch.lengths.tolist())
    lengths = [len(rows[key][user]) for key in rows for user in users]
    values = torch.cat([rows[key][user] for key in rows for user in users])
    features = KeyedJaggedTensor(keys=list(rows), values=values, lengths=torch.tensor(lengths))
    return SeqBatch(features, torch.cat([times[user] for user in users]))


@both_cuts
@pytest.mark.parametrize("bias", ["relative", "input"])
def test_recent_events_do_not_leak_and_the_history_matters(bias: str, cut: PersonalTokens) -> None:
    """Other recent events change no output of the history and no state. Another history changes the recent outputs."""
    model, length = make_model(bias, cut), 17
    past = int(cut.history_lengths(np.array([length]))[0])
    batch, other = make_features([length]), make_features([length])
    other.features.values()[past:length] = 39 - other.features.values()[past:length]
    with torch.no_grad():
        before, after = model(batch), model(other)
        assert torch.equal(before[:past], after[:past])
        assert not torch.allclose(before[past:], after[past:])
        states = [model.compress(split_history(b, cut)[0]).tensors() for b in (batch, other)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        other = make_features([length])
        other.features.values()[0] = 39 - other.features.values()[0]
        assert not torch.allclose(model(other)[past:], before[past:])


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
        UserStates.from_tensors({"keys.0": torch.ones(1), "lengths": torch.ones(1), "segment_times": torch.ones(1)})


def test_the_cost_follows_the_two_sequences() -> None:
    """The cost model of a balanced loader; without tokens it has the squares."""
    lengths = np.array([4.0, 17.0])
    models = (CostModel.of_module(make_model(cut=cut)) for cut in (CUT, SEGMENTED, None))
    with_tokens, segmented, without = pickle.loads(pickle.dumps(tuple(models)))  # as a loader does with its workers
    assert with_tokens.squares(lengths).tolist() == [3**2 + 7**2, (12 + 3) ** 2 + (5 + 3) ** 2]
    assert segmented.squares(lengths).tolist() == [2**2 + 4**2 + 6**2 + 10**2, 6**2 + 8**2 + 10**2 + (6 + 5) ** 2]
    assert without.squares(lengths).tolist() == [16, 289]
    assert (with_tokens(lengths) - with_tokens.linear * lengths) / with_tokens.quadratic == pytest.approx([58, 289])


@pytest.mark.parametrize("segments", [1, 2])
def test_the_cost_is_the_mean_over_the_random_ends_of_a_history(segments: int) -> None:
    cut = PersonalTokens(tokens=3, recent=4, refresh=2 * segments, segments=segments)
    for length in (3, 25):
        ends = range(0, int(cut.history_lengths(np.array([length]))[0]) + 1, cut.refresh)
        work = []
        for end in ends:
            found = arrange(torch.tensor([length]), torch.tensor([end]), length, cut)
            work.append((found.offsets.diff() ** 2).sum().item())
        # The formula takes segments to be equal. Here they differ by a refresh at most.
        tolerance = 1e-12 if segments == 1 else 0.05
        assert squared_lengths(np.array([float(length)]), cut) == pytest.approx(np.mean(work), rel=tolerance)


def test_histories_end_anywhere_in_training_and_where_they_should_otherwise() -> None:
    """The end is a function of the sample and the step. So it does not depend on the rank or on the other samples."""
    model = make_model(cut=PersonalTokens(tokens=3, recent=4, refresh=2), dropout=0.0, input_dropout=0.0)
    batch = make_features(LENGTHS)
    with torch.no_grad():
        served = model(batch)
        assert torch.equal(make_model()(batch), served)
        trained = model.train()(batch)
        assert not torch.allclose(trained, served, atol=1e-3)
        ends = batch.lengths.cumsum(0)
        users = torch.tensor([3, 0])
        parts = [trained[int(ends[user] - batch.lengths[user]) : int(ends[user])] for user in users]
        assert torch.allclose(model(make_subset(batch, users)), torch.cat(parts), rtol=0, atol=ROUNDING)
    keys = torch.randint(-(2**31), 2**31, (9000,), generator=torch.Generator().manual_seed(0)).int()
    lengths = torch.full((9000,), 13)
    counts = torch.bincount(PersonalTokens(3, 4, 2).training_lengths(lengths, keys))
    assert set(counts.nonzero().flatten().tolist()) == {0, 2, 4, 6, 8}
    assert counts[::2].min() > 1600


def test_the_option_is_saved_as_numbers(tmp_path: Path) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    model = make_model()
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert saved["hyper_parameters"]["personalization"] == {
        "tokens": 3,
        "recent": 4,
        "refresh": 2,
        "segments": 1,
        "random_cut": False,
    }
    loaded = HSTU.load_from_checkpoint(tmp_path / "model.ckpt").eval()
    batch = make_features(LENGTHS)
    with torch.no_grad():
        assert torch.equal(loaded(batch), model(batch))


@pytest.mark.parametrize("name", ["tokens", "recent", "refresh", "segments"])
def test_bad_options_are_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"personalization: {name} must be at least 1, not 0"):
        PersonalTokens(**{name: 0})
