"""The Hopper kernels with relative bias against float64 on the same rounded inputs, and their promises about bits.

The gradient of an entry of a table is a sum of many terms that cancel in part. Its relative error is therefore up to four times
that of the other results: rounding ``dout / (i + 1)`` to bf16 alone gives errors of up to 1.3e-2 for these inputs.
"""

from __future__ import annotations

import pytest
import torch

from tests.models.hopper.loading import Inputs, errors, expected, hopper, make, run, select, with_bias
from tests.models.hopper.test_kernels_gpu import MIXED, TOLERANCE, TYPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hopper.available(), reason="needs a GPU of compute capability 9.0"),
]
WIDTHS = pytest.mark.parametrize("width", [32, 64, 128, 256])
LIMIT = 2**30


def assert_close(inputs: Inputs, dtype: torch.dtype = torch.bfloat16) -> None:
    got, want = run(inputs), expected(inputs)
    assert len(got) == len(want) == 6
    found = errors(got, want)
    assert max(found[:4]) < TOLERANCE[dtype], found
    assert max(found[4:]) < 4 * TOLERANCE[dtype], found


@TYPES
@WIDTHS
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 129, 1000])
def test_one_history(length: int, width: int, dtype: torch.dtype) -> None:
    assert_close(with_bias(make([length], 2, width, width, dtype)), dtype)


@TYPES
@pytest.mark.parametrize("v", [32, 64, 128, 256])
@pytest.mark.parametrize("qk", [32, 64, 128, 256])
def test_mixed_lengths_with_empty_histories(qk: int, v: int, dtype: torch.dtype) -> None:
    assert_close(with_bias(make(MIXED, 4, qk, v, dtype)), dtype)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("seconds", [0, 1, 3600])
def test_regular_gaps_of_a_long_history(width: int, seconds: int) -> None:
    """Most strips of these have one bucket of times: a path of its own."""
    lengths = [4097, 333]
    times = torch.cat([seconds * torch.arange(length) for length in lengths])
    assert_close(with_bias(make(lengths, 2, width, width), times))


@pytest.mark.parametrize("width", [64, 128])
def test_extreme_times(width: int) -> None:
    """Times at both ends of the range, in any order: differences up to the largest int32, and negative ones."""
    generator = torch.Generator().manual_seed(3)
    for times in (
        torch.randint(-LIMIT, LIMIT, (1300,), generator=generator),
        torch.tensor([-LIMIT, LIMIT - 1])[torch.randint(2, (1300,), generator=generator)],
        torch.tensor([-LIMIT, LIMIT - 1]).repeat_interleave(650),
        LIMIT - 1 - 1000 * torch.arange(1300),
    ):
        assert_close(with_bias(make([1000, 300], 2, width, width), times))


@pytest.mark.parametrize("positions", [1, 2, 5, 64])
def test_sizes_of_the_position_table(positions: int) -> None:
    assert_close(with_bias(make([700, 64, 3]), positions=positions))


@pytest.mark.parametrize("alpha", [-0.2, 0.0, 3.0])
def test_other_scales(alpha: float) -> None:
    inputs = with_bias(make(MIXED))
    for x, y in zip(run(inputs, alpha), expected(inputs, alpha), strict=True):
        assert (x.double() - y).norm() <= 1e-2 * y.norm()


@pytest.mark.parametrize("width", [64, 128])
def test_comparison_can_fail(width: int) -> None:
    """Negative control: tables shifted by a bucket, one wrong entry, or times that are wrong by a tenth are seen."""
    inputs = with_bias(make([1000, 129], 2, width, width))
    assert inputs.biases is not None
    assert inputs.times is not None
    position, time = inputs.biases
    one = position.clone()
    one[12] += 1
    want = expected(inputs)
    for wrong in (
        inputs._replace(biases=(position.roll(1), time)),
        inputs._replace(biases=(position, time.roll(1))),
        inputs._replace(biases=(one, time)),
        inputs._replace(times=(inputs.times.double() * 1.1).clamp(max=LIMIT - 1).int()),
    ):
        found = errors(run(wrong), want)
        assert found[0] > 5 * TOLERANCE[torch.bfloat16]


def test_no_events() -> None:
    got = run(with_bias(make([0, 0]), positions=3))
    assert [len(x) for x in got] == [0, 0, 0, 0, 3, 63]
    assert not got[4].any()
    assert not got[5].any()


@WIDTHS
def test_same_bits_every_time(width: int) -> None:
    inputs = with_bias(make([5000, 3, 2500, 700, 1300], 4, width, width))
    first = run(inputs)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, run(inputs), strict=True))


@WIDTHS
def test_same_bits_alone_and_in_a_batch(width: int) -> None:
    inputs = with_bias(make([700, 0, 2500, 3, 129, 4000, 128, 1300], 4, width, width))
    together = run(inputs)[:4]
    for sample, length in enumerate(inputs.lengths):
        start = sum(inputs.lengths[:sample])
        alone = run(select(inputs, sample))[:4]
        assert all(torch.equal(a[start : start + length], b) for a, b in zip(together, alone, strict=True))


def test_refusals() -> None:
    inputs = with_bias(make([3]))
    assert inputs.biases is not None
    large = (torch.zeros(65, device="cuda"), inputs.biases[1])
    with pytest.raises(ValueError, match="65 and 63 entries"):
        hopper.attention(*inputs[:3], inputs.offsets, 1.0, biases=large)
    with pytest.raises(ValueError, match="no times"):
        hopper.attention(*inputs[:3], inputs.offsets, 1.0, biases=inputs.biases)
