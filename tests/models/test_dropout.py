"""Dropout whose mask is a function of the sample: its statistics, what it depends on, and its kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_freescale.models import HSTU
from lightning_freescale.models.dropout import SampleDropout, kept, row_keys
from lightning_freescale.runtime.errors import ConfigurationError
from tests.models.cases import make_batch
from tests.models.interpreter import run_interpreted

HISTORIES = [[1, 2, 3, 4], [9, 8], [5] * 40, [7]]
NEGATIVES = [[4, 6], [1, 2], [2, 1], [0, 9]]


def keys_of(order: list[int], step: int = 0, **options: list[list[int]]) -> list[Tensor]:
    """``row_keys`` of the samples ``order``, split by sample."""
    histories = [options.get("histories", HISTORIES)[i] for i in order]
    negatives = [options.get("negatives", NEGATIVES)[i] for i in order]
    return list(row_keys(make_batch(histories, negatives), step).split([len(history) for history in histories]))


def random_keys(rows: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (rows,), generator=torch.Generator().manual_seed(0)).to(torch.int32)


def test_keys_depend_on_the_sample_and_not_on_its_place() -> None:
    together = keys_of([0, 1, 2, 3])
    for order in ([3, 2, 1, 0], [2], [1, 3]):
        for sample, keys in zip(order, keys_of(order), strict=True):
            assert torch.equal(keys, together[sample])
    assert torch.cat(together).unique().numel() == sum(
        map(len, HISTORIES)
    )  # equal items at other positions differ, too


def test_a_batch_without_samples_has_no_keys() -> None:
    batch = make_batch([], [])
    assert {name: part.offsets().tolist() for name, part in batch.by_key.items()} == {"history": [0], "negatives": [0]}
    assert row_keys(batch, 0).shape == (0,)


def test_keys_change_with_step_epoch_and_user() -> None:
    (keys,) = keys_of([0])
    (next_step,) = keys_of([0], step=1)
    (other_negatives,) = keys_of([0], negatives=[[4, 7]])  # negatives are new in every epoch
    (other_history,) = keys_of([0], histories=[[1, 2, 3, 5]])
    for other in (next_step, other_negatives, other_history):
        assert not (keys == other).any()


def test_masks_are_independent() -> None:
    """Rates, and correlations between channels, positions, steps and layers, within five standard errors."""
    rows, width, rate = 4000, 64, 0.2
    histories = [list(range(200))] * 20
    keys = torch.cat([row_keys(make_batch([history], [[sample]]), 0) for sample, history in enumerate(histories)])
    mask = kept(keys, width, 1, rate).double()
    assert mask.mean().item() == pytest.approx(0.8, abs=5 * 0.4 / (rows * width) ** 0.5)
    assert (mask.mean(0) - 0.8).abs().max() < 5 * 0.4 / rows**0.5
    assert (mask.mean(1) - 0.8).abs().max() < 5 * 0.4 / width**0.5
    channels = torch.corrcoef(mask.T).fill_diagonal_(0)
    assert channels.abs().max() < 5 / rows**0.5
    for other in (mask.roll(1, 0), mask.roll(200, 0), kept(keys, width, 2, rate).double()):
        correlation = torch.corrcoef(torch.stack([mask.flatten(), other.flatten()]))[0, 1]
        assert correlation.abs() < 5 / (rows * width) ** 0.5
    assert torch.corrcoef(torch.stack([mask.flatten(), mask.flatten()]))[0, 1] > 0.99  # negative control


def test_scale_gradient_and_evaluation() -> None:
    dropout, x, keys = SampleDropout(0.25, number=3), torch.randn(50, 8).requires_grad_(), random_keys(50)
    out = dropout(x, keys)
    mask = kept(keys, 8, 3, 0.25)
    assert torch.equal(out, torch.where(mask, x / 0.75, 0.0))
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    torch.testing.assert_close(gradient, mask / 0.75)
    assert dropout.eval()(x, None) is x
    assert SampleDropout(0.0)(x, None) is x
    assert not SampleDropout(1 - 1e-9)(x, keys).any()


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_bad_rate_is_refused(rate: float) -> None:
    with pytest.raises(ConfigurationError, match=r"dropout: .* is not a rate"):
        HSTU(10, dropout=rate)


SCRIPT = """
import torch
from lightning_freescale.models import dropout_triton
from lightning_freescale.models.dropout import SampleDropout, kept
from lightning_freescale.models.dropout import row_keys
from tests.models.cases import make_batch
from tests.models.test_dropout import HISTORIES, NEGATIVES, random_keys

dropout_triton.KEY_BLOCK = 16
for drawn in (NEGATIVES, None):
    for step in (0, 7):
        batch = make_batch(HISTORIES, drawn)
        parts = [(part.values(), part.offsets()) for part in batch.by_key.values()]
        keys = dropout_triton.row_keys(parts[0], parts[1] if len(parts) > 1 else None, step)
        assert torch.equal(keys, row_keys(batch, step))
        assert not torch.equal(keys, row_keys(batch, step + 1))
for rows, width, elements, number in ((1, 8, 64, 0), (37, 12, 64, 3), (50, 16, 4096, 8)):
    dropout_triton.TILE_ELEMENTS = elements
    both, keys = torch.randn(rows, 2 * width), random_keys(rows)
    x = both[:, width:].requires_grad_()
    out = dropout_triton.drop(x, keys, number, 0.2)
    expected = SampleDropout(0.2, number)(x, keys)
    assert torch.equal(out == 0, expected == 0) and torch.allclose(out, expected, rtol=1e-6)
    assert not torch.equal(out == 0, SampleDropout(0.2, number + 1)(x, keys) == 0) or rows == 1
    grads = [torch.autograd.grad(value, x, torch.ones_like(x))[0] for value in (out, expected)]
    assert torch.allclose(*grads, rtol=1e-6)
    total = rows + 5
    more = [dropout_triton.drop(x, keys, number, 0.2, 3.0, total), SampleDropout(0.2, number)(x, keys, 3.0, total)]
    assert more[0].shape == (total, width) and not more[0][rows:].any() and torch.allclose(*more, rtol=1e-6)
    grads = [torch.autograd.grad(value, x, torch.ones_like(value))[0] for value in more]
    assert torch.allclose(*grads, rtol=1e-6) and grads[0].any()
assert dropout_triton.drop(torch.empty(0, 8), random_keys(0), 1, 0.2).shape == (0, 8)
"""


def test_the_interpreted_kernel_drops_the_same_elements() -> None:
    run_interpreted(SCRIPT)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3001, 96), (40_000, 512)])
def test_the_compiled_kernel_drops_the_same_elements(rows: int, width: int, dtype: torch.dtype) -> None:
    x, keys, dropout = torch.randn(rows, width).to(dtype), random_keys(rows), SampleDropout(0.2, 5)
    leaf = x.cuda().requires_grad_()
    out = dropout(leaf, keys.cuda())
    torch.testing.assert_close(out.cpu(), dropout(x, keys))
    (gradient,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    torch.testing.assert_close(gradient.cpu(), dropout(torch.ones_like(x), keys))
    assert torch.equal(out.cpu() != 0, kept(keys, width, 5, 0.2) & (x != 0))


@pytest.mark.gpu
def test_keys_are_equal_on_both_devices() -> None:
    histories = [*HISTORIES, list(range(5000)), [2**40 + 3, 1]]
    for negatives in ([*NEGATIVES, [3], [3, 4, 5]], None):
        batch = make_batch(histories, negatives)
        for step in (0, 1, 16, 12345):
            assert torch.equal(row_keys(batch.to(torch.device("cuda")), step).cpu(), row_keys(batch, step))
        assert not torch.equal(row_keys(batch.to(torch.device("cuda")), 5).cpu(), row_keys(batch, 6))
