"""The Hopper kernels against float64 on the same rounded inputs, and their promises about bits.

Errors are ``|got - expected| / |expected|``: weights and score gradients are rounded to 16 bits before a product, the
results once more, and the activation's tangent is exact to about 11 bits.
"""

from __future__ import annotations

import pytest
import torch

from tests.models.hopper.loading import Inputs, errors, expected, hopper, make, run, run_through_silu, select

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hopper.available(), reason="needs a GPU of compute capability 9.0"),
]
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
TYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
MIXED = [0, 5, 127, 128, 129, 0, 300, 1000, 1, 0]


def assert_close(inputs: Inputs, dtype: torch.dtype) -> None:
    assert max(errors(run(inputs), expected(inputs))) < TOLERANCE[dtype]


@TYPES
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 1000])
def test_one_history(length: int, width: int, heads: int, dtype: torch.dtype) -> None:
    assert_close(make([length], heads, width, width, dtype), dtype)


@TYPES
@pytest.mark.parametrize("v", [32, 64, 128, 256])
@pytest.mark.parametrize("qk", [32, 64, 128, 256])
def test_mixed_lengths_with_empty_histories(qk: int, v: int, dtype: torch.dtype) -> None:
    assert_close(make(MIXED, 4, qk, v, dtype), dtype)


@pytest.mark.parametrize("width", [64, 128])
def test_long_history(width: int) -> None:
    assert_close(make([4097, 333], 2, width, width), torch.bfloat16)


def test_no_events() -> None:
    assert [len(x) for x in run(make([0, 0]))] == [0, 0, 0, 0]


def test_many_short_histories() -> None:
    lengths = torch.randint(0, 40, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    assert_close(make(lengths, 2), torch.bfloat16)


def test_contiguous_inputs_and_unaligned_inputs() -> None:
    inputs = make(MIXED)
    result = run(inputs)
    contiguous = inputs._replace(q=inputs.q.contiguous(), k=inputs.k.contiguous(), v=inputs.v.contiguous())
    padded = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
    unaligned = inputs._replace(q=padded[0], k=padded[1], v=padded[2], dout=padded[3])
    for other in (contiguous, unaligned):
        assert all(torch.equal(a, b) for a, b in zip(result, run(other), strict=True))


@pytest.mark.parametrize("width", [64, 128])
def test_comparison_can_fail(width: int) -> None:
    """Negative control: a scale that is wrong by one percent, or one wrong key, is seen."""
    inputs = make(MIXED, 2, width, width)
    want = expected(inputs)
    assert max(errors(run(inputs, 1.01 * width**-0.5), want)) > TOLERANCE[torch.bfloat16]
    wrong = inputs.k.clone()
    wrong[140] += 1
    assert max(errors(run(inputs._replace(k=wrong)), want)) > TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("alpha", [-0.2, 0.0, 3.0])
def test_other_scales(alpha: float) -> None:
    inputs = make(MIXED)
    got, want = run(inputs, alpha), expected(inputs, alpha)
    for x, y in zip(got, want, strict=True):
        assert (x.double() - y).norm() <= 1e-2 * y.norm()


@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_later_events_change_nothing(width: int) -> None:
    """Outputs of earlier events have the same bits whatever follows."""
    inputs = make([1000], 2, width, width)
    changed = inputs._replace(k=inputs.k.clone(), v=inputs.v.clone(), q=inputs.q.clone())
    for x in (changed.k, changed.v, changed.q):
        x[500:] *= -3
    assert torch.equal(run(inputs)[0][:500], run(changed)[0][:500])


@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_same_bits_every_time(width: int) -> None:
    inputs = make([5000, 3, 2500, 700, 1300], 4, width, width)
    first = run(inputs)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, run(inputs), strict=True))


@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_same_bits_alone_and_in_a_batch(width: int) -> None:
    inputs = make([700, 0, 2500, 3, 129, 4000, 128, 1300], 4, width, width)
    together = run(inputs)
    for sample, length in enumerate(inputs.lengths):
        start = sum(inputs.lengths[:sample])
        alone = run(select(inputs, sample))
        assert all(torch.equal(a[start : start + length], b) for a, b in zip(together, alone, strict=True))


@TYPES
@pytest.mark.parametrize(("qk", "v"), [(32, 32), (64, 128), (128, 128), (256, 64)])
def test_gradients_through_the_silu_of_queries_keys_and_values(qk: int, v: int, dtype: torch.dtype) -> None:
    before = make([*MIXED, 3000], 4, qk, v, dtype)
    active = before._replace(**{name: torch.nn.functional.silu(getattr(before, name)) for name in "qkv"})
    got, again = run_through_silu(before, active), run_through_silu(before, active)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    slopes = [(lambda x: x.sigmoid() * (1 + x * (1 - x.sigmoid())))(x.double()) for x in before[:3]]
    want = [grad * slope for grad, slope in zip(expected(active)[1:], slopes, strict=True)]
    assert max(errors(got[:3], want)) < 2 * TOLERANCE[dtype]  # one rounding more
    sums = [x.sum(0).flatten() for x in want]
    assert max(errors(got[3:], sums)) < 4 * TOLERANCE[dtype]  # terms that cancel
    changed = before._replace(k=before.k + 0.25)  # negative control
    assert errors(run_through_silu(changed, active)[1:2], want[1:2])[0] > 5 * TOLERANCE[dtype]
