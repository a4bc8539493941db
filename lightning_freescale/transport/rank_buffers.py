"""The tensors that one rank sends or receives in a collective, as one flat byte buffer per rank.

As bytes, tensors of every dtype and shape take the same path through a mover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_freescale.runtime.errors import InputError


def as_bytes(tensor: Tensor, name: str) -> Tensor:
    """``tensor`` as a flat uint8 view of its own memory. ``name`` is the argument that an error names."""
    if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise InputError(f"{name}: the tensor must be dense and contiguous; pass tensor.contiguous()")
    return tensor.detach().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class RankBuffers:
    """One flat uint8 tensor per rank, in rank order.

    ``whole`` is one buffer that holds them all, one after another. It is None if the caller gave separate tensors.
    """

    buffers: list[Tensor]
    whole: Tensor | None = None

    @property
    def sizes(self) -> list[int]:
        """``[world]`` bytes of each rank."""
        return [buffer.numel() for buffer in self.buffers]

    @property
    def total(self) -> int:
        """Bytes of all ranks together."""
        return sum(self.sizes)

    def joined(self) -> Tensor:
        """The buffers one after another: ``whole`` if there is one, otherwise a copy."""
        return torch.cat(self.buffers) if self.whole is None else self.whole

    @classmethod
    def split(cls, tensor: Tensor, splits: Sequence[int], world: int, name: str) -> RankBuffers:
        """Split along the first dimension: ``splits[i]`` rows for rank ``i``, or equal shares if ``splits`` is empty."""
        rows = tensor.size(0) if tensor.dim() else 0
        if not splits:
            if rows % world:
                raise InputError(f"{name}: {rows} rows cannot be divided equally among {world} ranks; pass split sizes")
            splits = [rows // world] * world
        if len(splits) != world or sum(splits) != rows or min(splits) < 0:
            raise InputError(f"{name}: split sizes {list(splits)} must be {world} counts that sum to its {rows} rows")
        flat = as_bytes(tensor, name)
        row_bytes = flat.numel() // rows if rows else 0
        return cls(list(flat.split([count * row_bytes for count in splits])), flat)

    @classmethod
    def even(cls, tensor: Tensor, world: int, name: str) -> RankBuffers:
        """Split the bytes of a tensor of any shape into equal shares."""
        flat = as_bytes(tensor, name)
        if flat.numel() % world:
            raise InputError(f"{name}: {flat.numel()} bytes cannot be divided equally among {world} ranks")
        return cls(list(flat.split([flat.numel() // world] * world)), flat)

    @classmethod
    def listed(cls, tensors: Sequence[Tensor], world: int, name: str) -> RankBuffers:
        """One tensor per rank."""
        if len(tensors) != world:
            raise InputError(f"{name}: got {len(tensors)} tensors for {world} ranks; pass one per rank")
        return cls([as_bytes(tensor, f"{name}[{rank}]") for rank, tensor in enumerate(tensors)])

    @classmethod
    def same(cls, tensor: Tensor, world: int, name: str) -> RankBuffers:
        """The same tensor for every rank."""
        return cls([as_bytes(tensor, name)] * world)

    @classmethod
    def only(cls, tensor: Tensor, ranks: Sequence[int], world: int, name: str) -> RankBuffers:
        """The tensor for each of ``ranks``, and an empty buffer for the other ranks."""
        flat = as_bytes(tensor, name)
        return cls([flat if rank in ranks else flat[:0] for rank in range(world)])
