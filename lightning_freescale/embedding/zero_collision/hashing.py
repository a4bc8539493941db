"""64-bit integers without a sign in int64 tensors, whose arithmetic wraps."""

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
