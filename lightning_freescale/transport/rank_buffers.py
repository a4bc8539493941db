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


def check_contiguous(tensor: Tensor, name: str) -> Tensor:
    """``tensor`` without its gradient, if its bytes lie one after another. ``name`` is the argument that an error names."""
    if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise InputError(f"{name}: the tensor must be dense and contiguous; pass tensor.contiguous()")
    return tensor.detach() if tensor.requires_grad else tensor


def as_bytes(tensor: Tensor, name: str) -> Tensor:
    """``tensor`` as a flat uint8 view of its own memory. ``name`` is the argument that an error names."""
    return check_contiguous(tensor, name).reshape(-1).view(torch.uint8)


@dataclass  # not frozen: that would double the time to make one
class RankBuffers:
    """The bytes of each rank, in rank order.

    Addresses are computed rather than taken from one tensor for each rank: with many ranks, the tensors would take the host
    longer than the transfer takes the device.

    Attributes:
        memory: tensors that hold all bytes, each once.
        addresses: ``[world]`` where the bytes of each rank begin.
        sizes: ``[world]`` bytes of each rank.
        in_one: whether ``memory`` is one tensor that holds the bytes of all ranks one after another.
    """

    memory: list[Tensor]
    addresses: list[int]
    sizes: list[int]
    in_one: bool = False

    @cached_property
    def whole(self) -> Tensor | None:
        """The bytes of all ranks, one after another. It is None if the caller gave separate tensors.

        Transfers by address do not need it, and to make the view takes the host some time.
        """
        return as_bytes(self.memory[0], "tensor") if self.in_one else None

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
    def _in_one(cls, tensor: Tensor, sizes: list[int]) -> RankBuffers:
        return cls([tensor], list(accumulate(sizes[:-1], initial=tensor.data_ptr())), sizes, True)

    @classmethod
    def split(cls, tensor: Tensor, splits: Sequence[int], world: int, name: str) -> RankBuffers:
        """Split along the first dimension: ``splits[i]`` rows for rank ``i``, or equal shares if ``splits`` is empty."""
        shape = tensor.shape
        rows = shape[0] if shape else 0
        if not splits:
            if rows % world:
                raise InputError(f"{name}: {rows} rows cannot be divided equally among {world} ranks; pass split sizes")
            splits = [rows // world] * world
        if len(splits) != world or sum(splits) != rows or min(splits) < 0:
            raise InputError(f"{name}: split sizes {list(splits)} must be {world} counts that sum to its {rows} rows")
        held = check_contiguous(tensor, name)
        row_bytes = held.nbytes // rows if rows else 0
        return cls._in_one(held, [count * row_bytes for count in splits])

    @classmethod
    def even(cls, tensor: Tensor, world: int, name: str) -> RankBuffers:
        """Split the bytes of a tensor of any shape into equal shares."""
        held = check_contiguous(tensor, name)
        if held.nbytes % world:
            raise InputError(f"{name}: {held.nbytes} bytes cannot be divided equally among {world} ranks")
        return cls._in_one(held, [held.nbytes // world] * world)

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
