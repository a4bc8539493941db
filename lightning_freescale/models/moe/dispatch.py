"""Which row of the experts' products belongs to which token: index structures, built without sorting and without atomics.

A token that is given to ``k`` experts has ``k`` *copies*. The copies of all tokens are arranged expert by expert, and in the
order of the tokens within an expert. The copies themselves are rows of a product and exist only while it runs; what is kept are
numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EXPERT_TILE = 128  # rows of a tile on CUDA; a tile has copies of one expert only


class Arrangement(NamedTuple):
    """The arrangement of ``T * k`` copies in ``R`` rows.

    The rows of an expert are a multiple of the size of a tile: the last ones may be empty. ``R`` is an upper bound that follows
    from shapes alone, so the host does not wait for the device. All fields are int64 on a CPU and int32 on CUDA.
    """

    copies: Tensor  # [R] number of the copy in each row, token * k + choice; -1 if the row is empty
    rows: Tensor  # [T, k] row of each copy
    ends: Tensor  # [E] the row after the last one of each expert; each expert begins where the one before ends
    counts: Tensor  # [E] copies of each expert
    tile_experts: Tensor  # [R / tile] expert of each tile; the number of experts for tiles after the last one


def arrange_copies(chosen: Tensor, experts: int, tile: int = EXPERT_TILE) -> Arrangement:
    """The arrangement for ``chosen [T, k]`` int64, the experts of each token. It has the same bits in every run.

    ``tile`` is the size of a tile on CUDA. With 1 no row is empty. On a CPU the size is always 1.
    """
    if chosen.is_cuda:
        from lightning_freescale.models.moe import dispatch_triton  # Triton is installed on CUDA machines only

        return dispatch_triton.arrange_copies(chosen, experts, tile)
    return arrange_plain(chosen, experts, 1)


def row_bound(copies: int, experts: int, tile: int) -> int:
    """``R``: rows that always suffice for ``copies`` in tiles of ``tile`` rows."""
    return (copies + experts * (tile - 1)) // tile * tile


def arrange_plain(chosen: Tensor, experts: int, tile: int) -> Arrangement:
    """:func:`arrange_copies` in PyTorch operations, for any device."""
    flat, device = chosen.flatten(), chosen.device
    bound = row_bound(len(flat), experts, tile)
    is_chosen = F.one_hot(flat, experts)  # [copies, E]
    counts = is_chosen.sum(0)
    padded = (counts + tile - 1) // tile * tile
    ends = padded.cumsum(0)
    before = (is_chosen.cumsum(0) - 1).gather(1, flat[:, None])[:, 0]  # copies of the same expert before each copy
    rows = (ends - padded)[flat] + before
    copies = torch.full((bound,), -1, device=device)
    copies[rows] = torch.arange(len(flat), device=device)
    tile_experts = torch.searchsorted(ends, torch.arange(0, bound, tile, device=device), right=True)
    return Arrangement(copies, rows.view(chosen.shape), ends, counts, tile_experts)
