"""The hash of ids on tensors: the bits of ``reference.hash_id``, in int64 tensors, whose arithmetic wraps."""

from __future__ import annotations

from torch import Tensor


def signed(value: int) -> int:
    """The signed 64-bit integer with the bits of ``value``.

    >>> signed(0xFFFFFFFFFFFFFFFF)
    -1
    """
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def logical_shift(x: Tensor, bits: int) -> Tensor:
    """Shift to the right, with zeros from the left. The shift of a signed tensor repeats the sign instead."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def finalize(x: Tensor) -> Tensor:
    """The finalizer of MurmurHash3."""
    x = (x ^ logical_shift(x, 33)) * signed(0xFF51AFD7ED558CCD)
    x = (x ^ logical_shift(x, 33)) * signed(0xC4CEB9FE1A85EC53)
    return x ^ logical_shift(x, 33)


def hash_ids(ids: Tensor) -> Tensor:
    """MurmurHash3 of each id as FBGEMM computes it: ``[n]`` int64 to ``[n]`` int64 with the bits of the unsigned hash."""

    def rotate(x: Tensor, bits: int) -> Tensor:
        return (x << bits) | logical_shift(x, 64 - bits)

    k = rotate(ids * signed(0x87C37B91114253D5), 31) * signed(0x4CF5AD432745937F)
    h1 = rotate(k, 27) * 5 + 0x52DCE729
    h2 = h1 * 5 + 0x38495AB5
    h1, h2 = h1 ^ 16, h2 ^ 16
    h1 = h1 + h2
    h2 = h2 + h1
    h1, h2 = finalize(h1), finalize(h2)
    h1 = h1 + h2
    return h1 ^ (h2 + h1)


def unsigned_remainder(x: Tensor, divisor: int) -> Tensor:
    """``x % divisor``, where the bits of ``x`` mean an unsigned number; ``divisor`` is positive and less than 2^61."""
    return (logical_shift(x, 1) % divisor * 2 + (x & 1)) % divisor


def unsigned_order(x: Tensor) -> Tensor:
    """Numbers whose signed order is the unsigned order of ``x``."""
    return x ^ signed(1 << 63)
