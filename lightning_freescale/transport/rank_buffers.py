"""The tensors that one rank sends or receives in a collective, as bytes for each rank.

As bytes, tensors of every dtype and shape take the same path through a mover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

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
    """The bytes of each rank, in rank order.

    Addresses are computed rather than taken from one tensor for each rank: with many ranks, the tensors would take the host
    longer than the transfer takes the device.

    Attributes:
        memory: flat uint8 tensors that hold all bytes, each once.
        addresses: ``[world]`` where the bytes of each rank begin.
        sizes: ``[world]`` bytes of each rank.
        whole: the tensor that holds all ranks, one after another. It is None if the caller gave separate tensors.
    """

    memory: list[Tensor]
    addresses: list[int]
    sizes: list[int]
    whole: Tensor | None = None

    @cached_property
    def buffers(self) -> list[Tensor]:
        """One flat uint8 tensor per rank."""
        if self.whole is not None:
            return list(self.whole.split(self.sizes))
        by_address = {tensor.data_ptr(): tensor for tensor in self.memory}
        empty = self.memory[0][:0]
        return [by_address[at] if size else empty for at, size in zip(self.addresses, self.sizes, strict=True)]

    @property
    def total(self) -> int:
        """Bytes of all ranks together."""
        return sum(self.sizes)

    def joined(self) -> Tensor:
        """The bytes of all ranks one after another: ``whole`` if there is one, otherwise a copy."""
        return torch.cat(self.buffers) if self.whole is None else self.whole

    @classmethod
    def _in_one(cls, flat: Tensor, sizes: list[int]) -> RankBuffers:
        starts = accumulate(sizes[:-1], initial=flat.data_ptr())
        return cls([flat], list(starts), sizes, flat)

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
        return cls._in_one(flat, [count * row_bytes for count in splits])

    @classmethod
    def even(cls, tensor: Tensor, world: int, name: str) -> RankBuffers:
        """Split the bytes of a tensor of any shape into equal shares."""
        flat = as_bytes(tensor, name)
        if flat.numel() % world:
            raise InputError(f"{name}: {flat.numel()} bytes cannot be divided equally among {world} ranks")
        return cls._in_one(flat, [flat.numel() // world] * world)

    @classmethod
    def listed(cls, tensors: Sequence[Tensor], world: int, name: str) -> RankBuffers:
        """One tensor per rank."""
        if len(tensors) != world:
            raise InputError(f"{name}: got {len(tensors)} tensors for {world} ranks; pass one per rank")
        flat = [as_bytes(tensor, f"{name}[{rank}]") for rank, tensor in enumerate(tensors)]
        return cls(flat, [tensor.data_ptr() for tensor in flat], [tensor.numel() for tensor in flat])

    @classmethod
    def same(cls, tensor: Tensor, world: int, name: str) -> RankBuffers:
        """The same tensor for every rank."""
        flat = as_bytes(tensor, name)
        return cls([flat], [flat.data_ptr()] * world, [flat.numel()] * world)

    @classmethod
    def only(cls, tensor: Tensor, ranks: Sequence[int], world: int, name: str) -> RankBuffers:
        """The tensor for each of ``ranks``, and an empty buffer for the other ranks."""
        flat = as_bytes(tensor, name)
        sizes = [flat.numel() if rank in ranks else 0 for rank in range(world)]
        return cls([flat], [flat.data_ptr()] * world, sizes)
