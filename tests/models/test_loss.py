"""The sampled softmax against a loop over single positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_freescale.models import loss as loss_module
from lightning_freescale.models.loss import sampled_softmax
from lightning_freescale.runtime.errors import InputError


def make_inputs(lengths: list[int], negatives: int, items: int = 7, dim: int = 3, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    total, drawn = sum(lengths), len(lengths) * negatives
    return [
        torch.randn(total, dim, generator=rng, dtype=torch.float64).requires_grad_(),
        torch.randn(total, dim, generator=rng, dtype=torch.float64).requires_grad_(),
        torch.randint(items, (total,), generator=rng),
        torch.randn(drawn, dim, generator=rng, dtype=torch.float64).requires_grad_(),
        torch.randint(items, (drawn,), generator=rng),
        torch.tensor([0, *lengths]).cumsum(0),
    ]


def naive(
    outputs: Tensor,
    items: Tensor,
    item_ids: Tensor,
    negatives: Tensor,
    negative_ids: Tensor,
    offsets: Tensor,
    log_q: Tensor | None = None,
    counts: Tensor | None = None,
    set_size: int | None = None,
    mask: bool = True,
) -> Tensor:
    """One position at a time, with ``torch.nn.functional.cross_entropy``."""
    samples = len(offsets) - 1
    if counts is None:
        counts = torch.full((samples,), len(negatives) // samples)
    first_negative = [0, *counts.cumsum(0).tolist()]
    total = 0.0 * (outputs.sum() + items.sum() + negatives.sum())
    for b in range(samples):
        for t in range(int(offsets[b]), int(offsets[b + 1]) - 1):
            drawn = slice(first_negative[b], first_negative[b + 1])
            if set_size is not None:
                turn = (t - int(offsets[b])) // 32 % (int(counts[b]) // set_size)
                drawn = slice(drawn.start + turn * set_size, drawn.start + (turn + 1) * set_size)
            target = item_ids[t + 1]
            kept = negative_ids[drawn] != target if mask else slice(None)
            logits = torch.cat([items[t + 1][None], negatives[drawn][kept]]) @ outputs[t]
            if log_q is not None:
                logits = logits - log_q[torch.cat([target[None], negative_ids[drawn][kept]])]
            total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(0))
    return total


def assert_equal_with_gradients(
    inputs: list[Tensor], log_q: Tensor | None = None, counts: Tensor | None = None, set_size: int | None = None
) -> None:
    learned = [inputs[0], inputs[1], inputs[3]]
    options = (log_q, counts, set_size)
    got, expected = sampled_softmax(*inputs, *options), naive(*inputs, *options)
    torch.testing.assert_close(got, expected)
    for ours, theirs in zip(
        torch.autograd.grad(got * 3, learned), torch.autograd.grad(expected * 3, learned), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@given(st.lists(st.integers(0, 70), min_size=1, max_size=4), st.integers(0, 5), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_equals_a_loop_over_positions(lengths: list[int], negatives: int, seed: int) -> None:
    assert_equal_with_gradients(make_inputs(lengths, negatives, seed=seed))


@pytest.mark.parametrize("chunk", [1, 2])
def test_chunks_change_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_TILES", chunk)
    assert_equal_with_gradients(make_inputs([40, 3, 100, 1], 4))


def test_sampling_correction() -> None:
    log_q = torch.linspace(-5, -1, 7, dtype=torch.float64)
    inputs = make_inputs([9, 30], 5)
    assert_equal_with_gradients(inputs, log_q)
    assert not torch.isclose(sampled_softmax(*inputs, log_q), sampled_softmax(*inputs))


def with_sets(sets: list[int], set_size: int, inputs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """``inputs`` with this many sets for each sample, and the numbers of negatives."""
    counts = torch.tensor(sets) * set_size
    rng = torch.Generator().manual_seed(9)
    rows = torch.randn(int(counts.sum()), 3, generator=rng, dtype=torch.float64).requires_grad_()
    ids = torch.randint(7, (int(counts.sum()),), generator=rng)
    return [*inputs[:3], rows, ids, inputs[5]], counts


@pytest.mark.parametrize("corrected", [False, True])
def test_positions_take_turns_with_the_sets_of_their_sample(corrected: bool) -> None:
    """Fewer sets than tiles, as many, and more; with histories that end at the end of a tile and in the middle."""
    inputs, counts = with_sets([2, 1, 3, 4, 1], 5, make_inputs([100, 33, 96, 7, 1], 0))
    log_q = torch.linspace(-5, -1, 7, dtype=torch.float64) if corrected else None
    assert_equal_with_gradients(inputs, log_q, counts, 5)
    in_order = sampled_softmax(*inputs, log_q, counts, 5)
    inputs[3], inputs[4] = inputs[3].roll(5, 0), inputs[4].roll(5, 0)  # negative control: the sets one sample further
    assert not torch.isclose(sampled_softmax(*inputs, log_q, counts, 5), in_order)


def test_one_set_for_each_sample_is_the_default() -> None:
    inputs, counts = with_sets([1, 1], 6, make_inputs([70, 5], 0))
    assert torch.equal(sampled_softmax(*inputs, None, counts, 6), sampled_softmax(*inputs))


def test_a_negative_that_is_the_target_is_masked() -> None:
    inputs = make_inputs([20], 6, items=3)  # with three items many negatives equal the target
    assert not torch.isclose(naive(*inputs), naive(*inputs, mask=False))  # negative control: masking matters here
    assert_equal_with_gradients(inputs)


def test_all_negatives_masked_leaves_a_certain_target() -> None:
    inputs = make_inputs([5, 4], 3, items=1)
    got = sampled_softmax(*inputs)
    assert got == 0
    assert not any(grad.any() for grad in torch.autograd.grad(got, [inputs[0], inputs[1], inputs[3]]))


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [], [0, 0]])
def test_nothing_to_predict_is_zero_with_gradients(lengths: list[int]) -> None:
    inputs = make_inputs(lengths, 4)
    got = sampled_softmax(*inputs)
    assert got == 0
    for grad in torch.autograd.grad(got, [inputs[0], inputs[1], inputs[3]]):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_nan_reaches_the_loss() -> None:
    inputs = make_inputs([5], 2)
    inputs[0].data[1] = torch.nan
    assert sampled_softmax(*inputs).isnan()


def test_uneven_negatives_are_refused() -> None:
    inputs = make_inputs([5, 5], 2)
    with pytest.raises(InputError, match="negatives: 3 for 2 samples"):
        sampled_softmax(*inputs[:3], inputs[3][:3], inputs[4][:3], inputs[5])


@pytest.mark.gpu
def test_a_million_positions_fit_on_gpu() -> None:
    """1,000 histories of 1,000 events with 64 negatives each. A copy of the negatives for each position would be 15 GiB."""
    rng = torch.Generator("cuda").manual_seed(0)
    total, drawn, dim = 1_000_000, 64_000, 64

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, dim, generator=rng, device="cuda").requires_grad_()

    outputs, items, negatives = normal(total), normal(total), normal(drawn)
    ids = torch.randint(10_000, (total,), generator=rng, device="cuda")
    negative_ids = torch.randint(10_000, (drawn,), generator=rng, device="cuda")
    offsets = torch.arange(0, total + 1, 1000, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = sampled_softmax(outputs, items, ids, negatives, negative_ids, offsets)
    grads = torch.autograd.grad(loss, [outputs, items, negatives])
    assert torch.cuda.max_memory_allocated() - before < 4 * 2**30
    half = slice(0, total // 2)
    parts = [
        sampled_softmax(outputs[p], items[p], ids[p], negatives[n], negative_ids[n], offsets[:501])
        for p, n in ((half, slice(0, drawn // 2)), (slice(total // 2, None), slice(drawn // 2, None)))
    ]
    torch.testing.assert_close(loss, parts[0] + parts[1], rtol=1e-5, atol=0)
    assert all(grad.isfinite().all() for grad in grads)
