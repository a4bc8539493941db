"""A Triton kernel for the tests of direct launches. Only machines with Triton import this file."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from lightning_freescale.runtime.direct_triton import direct


@direct
@triton.jit(do_not_specialize=["count"])
def strided_sum(x_ptr, y_ptr, out_ptr, count, stride, FACTOR: tl.constexpr, SIZE: tl.constexpr):
    """``out[i] = FACTOR * x[i * stride] + y[i]``, without ``y`` if it is None."""
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = FACTOR * tl.load(x_ptr + place * stride, mask=place < count)
    if y_ptr is not None:
        value += tl.load(y_ptr + place, mask=place < count)
    tl.store(out_ptr + place, value, mask=place < count)
