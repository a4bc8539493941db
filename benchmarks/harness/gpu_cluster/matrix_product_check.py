"""Checks that matrix products are correct on this machine. A benchmark of wrong products would mean nothing.

cuBLAS is not correct for every MPS setting. On an H200 (driver 580, CUDA 13.0), MPS clients that may use 20, 24 or 28
of the 132 SMs get wrong bfloat16 products, some of them NaN. With 32 SMs the products are correct. Benchmarks therefore
check first.
"""

from __future__ import annotations

import torch
from torch import Tensor

PRODUCT_TOLERANCE = 1e-2  # relative error of bfloat16 products against float32; 2e-3 is usual


def check_products(device: torch.device, rank: int, width: int = 128, rows: int = 100_003) -> None:
    """Raise ``RuntimeError`` if a product with the shapes of a layer's forward or backward is wrong.

    Args:
        width: width of the layer.
        rows: number of events.
    """
    rng = torch.Generator(device).manual_seed(rank)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=device).bfloat16()

    tokens, wide = draw(rows, width), draw(rows, 4 * width)
    for name, left, right in (
        ("forward", tokens, draw(width, 4 * width)),
        ("forward, square", tokens, draw(width, width)),
        ("gradient of the input", wide, draw(4 * width, width)),
        ("gradient of the weight", wide.T, tokens),
    ):
        compare(name, left @ right, left.float() @ right.float(), rank)


def compare(name: str, product: Tensor, reference: Tensor, rank: int) -> None:
    """Raise ``RuntimeError`` if ``product`` is not close to ``reference``."""
    error = float((product.float() - reference).norm() / reference.norm())
    if not error <= PRODUCT_TOLERANCE:  # also true for NaN
        raise RuntimeError(
            f"rank {rank}: a matrix product is wrong on this machine ({name}, {list(product.shape)}: relative error {error:.1e}, "
            f"allowed {PRODUCT_TOLERANCE:.0e}). cuBLAS does not support every share of SMs under MPS: try another --share"
        )
