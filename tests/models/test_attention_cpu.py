"""HSTU attention on a CPU against the dense reference: results, gradients, memory and work."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.models.attention import cpu, dense_attention, hstu_attention, plan_attention
from lightning_freescale.models.attention.cpu import FREE_WORK, MIN_CHUNK, PADDED_WORK, chunk_ranges, group_lengths
from lightning_freescale.runtime.errors import InputError
from tests.models.cases import (
    NAMES,
    YEAR,
    assert_close,
    attention_inputs,
    dense_result,
    relative_errors,
    run_attention,
    run_without_bias,
    zero_bias,
)

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@given(LENGTHS, st.integers(1, 3), st.booleans(), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_equals_dense_reference(lengths: list[int], heads: int, sorted_times: bool, seed: int) -> None:
    inputs = attention_inputs(lengths, heads=heads, qk_dim=4, v_dim=6, sorted_times=sorted_times, seed=seed)
    assert_close(run_attention(hstu_attention, inputs), dense_result(inputs), 1e-13)


@pytest.mark.parametrize("lengths", [[1], [130, 1, 0, 64, 129], [300, 290, 280, 5, 5, 5]])
@pytest.mark.parametrize("kept", [0, 2**22])
def test_equals_dense_reference_in_many_chunks(lengths: list[int], kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CHUNK_SCORES", 32)  # every chunk is as short as allowed
    monkeypatch.setattr(cpu, "FREE_WORK", 500)
    monkeypatch.setattr(cpu, "KEPT_SCORES", kept)
    inputs = attention_inputs(lengths)
    assert_close(run_attention(hstu_attention, inputs), dense_result(inputs), 1e-13)


def test_a_wrong_bucket_is_detected() -> None:
    """Negative control: the comparison detects tables that are shifted by one bucket, and one wrong entry."""
    inputs = attention_inputs([60, 20])
    expected = dense_result(inputs)
    for table in ("position_bias", "time_bias"):
        shifted = inputs | {table: inputs[table].roll(1)}
        assert relative_errors(run_attention(hstu_attention, shifted), expected)["out"] > 1e-2
    one = inputs["position_bias"].clone()
    one[4] += 0.01  # distances 3 and 4
    assert relative_errors(run_attention(hstu_attention, inputs | {"position_bias": one}), expected)["out"] > 1e-6


def test_gradcheck() -> None:
    inputs = attention_inputs([5, 0, 3, 1], qk_dim=3, v_dim=2, position_buckets=4)
    plan = plan_attention(inputs["offsets"], inputs["timestamps"])
    learned = tuple(inputs[name].requires_grad_() for name in ("q", "k", "v", "position_bias", "time_bias"))

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return hstu_attention(q, k, v, inputs["offsets"], inputs["timestamps"], p, t, plan=plan)

    assert torch.autograd.gradcheck(function, learned)


def test_a_future_event_changes_nothing_before_it() -> None:
    inputs = attention_inputs([30, 20])
    before = hstu_attention(**inputs)
    changed = {name: value.clone() for name, value in inputs.items()}
    for name in ("q", "k", "v"):
        changed[name][25] += 1.0
    changed["timestamps"][25] += YEAR
    after = hstu_attention(**changed)
    assert torch.equal(after[:25], before[:25])
    assert not torch.equal(after[25:30], before[25:30])
    assert torch.equal(after[30:], before[30:])  # another history


@pytest.mark.parametrize("length", [1, 2, 37, 200])
def test_an_output_does_not_depend_on_the_other_samples(length: int) -> None:
    """Alone or in a batch a history has the same output up to rounding: BLAS sums in another order for other shapes."""
    inputs = attention_inputs([length, 150, 36, 201, 40])
    alone = {
        name: value[:length] if name in ("q", "k", "v", "timestamps") else value
        for name, value in inputs.items()
        if name != "offsets"
    }
    torch.testing.assert_close(
        hstu_attention(**alone, offsets=torch.tensor([0, length])),
        hstu_attention(**inputs)[:length],
        rtol=0,
        atol=1e-14,
    )


def test_half_precision_inputs_accumulate_in_float32() -> None:
    inputs = attention_inputs([300, 17], dtype=torch.bfloat16)
    got = run_attention(hstu_attention, inputs)
    assert_close(got, dense_result(inputs), 4e-3)  # rounded to bfloat16 once, at the end: 2**-9
    assert relative_errors(got, dense_result(inputs))["dtime"] < 1e-5  # not rounded to bfloat16


def test_no_samples_and_empty_histories_give_zero_gradients() -> None:
    for lengths in ([], [0, 0]):
        got = run_attention(hstu_attention, attention_inputs(lengths, position_buckets=3))
        assert got["out"].shape == (0, 2, 16)
        assert not got["dposition"].any()
        assert not got["dtime"].any()


def test_a_plan_can_be_reused_and_changes_nothing() -> None:
    inputs = attention_inputs([9, 70, 3])
    plan = plan_attention(inputs["offsets"], inputs["timestamps"])
    first, second = hstu_attention(**inputs, plan=plan), hstu_attention(**inputs, plan=plan)
    assert torch.equal(first, second)
    assert torch.equal(first, hstu_attention(**inputs))


def computed_scores(lengths: list[int]) -> int:
    """Number of scores that forward computes per head, including padding and the upper triangle of each chunk."""
    total = 0
    for group in group_lengths(lengths):
        longest = lengths[group[0]]
        ranges = chunk_ranges(len(group), longest)
        total += sum(len(group) * (stop - start) * stop for start, stop in ranges)
    return total


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_groups_hold_each_history_once_and_padding_is_bounded(lengths: list[int]) -> None:
    groups = group_lengths(lengths)
    assert sorted(b for group in groups for b in group) == [b for b, length in enumerate(lengths) if length]
    for group in groups:
        padded = len(group) * max(lengths[b] for b in group) ** 2
        assert padded <= PADDED_WORK * sum(lengths[b] ** 2 for b in group) + FREE_WORK
    for group in groups:
        covered = [row for start, stop in chunk_ranges(len(group), lengths[group[0]]) for row in range(start, stop)]
        assert covered == list(range(lengths[group[0]]))


def test_work_is_proportional_to_the_sum_of_squares() -> None:
    rng = torch.Generator().manual_seed(0)
    lengths = (torch.randn(64, generator=rng).mul(1.2).add(5).exp().clamp(1, 2000)).long().tolist()
    squares = sum(length**2 for length in lengths)
    assert len(lengths) * max(lengths) ** 2 > 10 * squares  # the work if all were padded to the longest
    assert computed_scores(lengths) < 1.1 * squares
    assert computed_scores([21_000]) < 0.51 * 21_000**2  # half of the pairs: attention is causal


def test_chunks_of_a_long_history_bound_memory() -> None:
    assert max((stop - start) * stop for start, stop in chunk_ranges(1, 21_000)) <= MIN_CHUNK * 21_000


def test_dense_reference_is_the_formula() -> None:
    """The reference equals a loop over single pairs of events."""
    inputs = attention_inputs([4], heads=1, qk_dim=2, v_dim=1)
    q, k, v = (inputs[name][:, 0] for name in ("q", "k", "v"))
    times = inputs["timestamps"].tolist()

    def bucket(distance: int) -> int:
        x = distance + 1
        octave = x.bit_length() - 1
        return 2 * octave + (octave > 0 and (x >> (octave - 1)) & 1)

    expected = torch.zeros(4, dtype=torch.float64)
    for i in range(4):
        for j in range(i + 1):
            score = q[i] @ k[j] / 2**0.5
            score += inputs["position_bias"][bucket(i - j)] + inputs["time_bias"][bucket(times[i] - times[j])]
            expected[i] += score / (1 + (-score).exp()) * v[j, 0] / (i + 1)
    torch.testing.assert_close(dense_attention(**inputs)[:, 0, 0], expected)


@given(LENGTHS, st.integers(1, 3), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_without_bias_equals_dense_reference(lengths: list[int], heads: int, seed: int) -> None:
    inputs = zero_bias(attention_inputs(lengths, heads=heads, qk_dim=4, v_dim=6, seed=seed))
    assert_close(run_without_bias(hstu_attention, inputs), dense_result(inputs, NAMES[:4]), 1e-13)


def test_without_bias_in_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CHUNK_SCORES", 32)
    biased = attention_inputs([130, 1, 0, 64, 129])
    inputs = zero_bias(biased)
    assert_close(run_without_bias(hstu_attention, inputs), dense_result(inputs, NAMES[:4]), 1e-13)
    assert relative_errors(run_without_bias(hstu_attention, biased), dense_result(biased, ("out",)))["out"] > 1e-2


def test_without_bias_computes_no_buckets() -> None:
    plan = plan_attention(torch.tensor([0, 5, 5, 8]), torch.zeros(8, dtype=torch.int64), bias=False)
    assert plan.total == 8
    for number, group in enumerate(plan.groups):
        assert group.times is None
        assert all(chunk.buckets is None for chunk in plan.chunks(number, 0, 0, torch.float32))


def test_one_bias_alone_is_refused() -> None:
    inputs = attention_inputs([3])
    with pytest.raises(InputError, match="give both or neither"):
        hstu_attention(**inputs | {"time_bias": None})
