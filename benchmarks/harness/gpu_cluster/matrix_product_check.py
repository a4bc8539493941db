"""Whether matrix products are right on this machine: a benchmark of wrong ones measures nothing.

cuBLAS is not right everywhere. On an H200 (driver 580, CUDA 13.0) it gives clients of MPS that may use 20, 24 or 28 of the 132
cores wrong bfloat16 products, some of them NaN; with 32 cores they are right. Every share of a GPU is checked before it is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 1e-2  # of bfloat16 inputs and outputs, against float32: 2e-3 is usual


def check_products(device: torch.device, rank: int, width: int = 128, rows: int = 100_003) -> None:
    """Raise if products of the shapes that a layer of ``width`` has, forward and backward, are wrong."""
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


def compare(name: str, product: Tensor, right: Tensor, rank: int) -> None:
    error = float((product.float() - right).norm() / right.norm())
    if not error <= TOLERANCE:  # NaN, too
        raise RuntimeError(
            f"rank {rank}: matrix products are wrong here ({name}, {list(product.shape)}: off by {error:.1e}, at most "
            f"{TOLERANCE:.0e} is right). Under MPS cuBLAS needs a share of cores that it can deal with: try another --share"
        )
