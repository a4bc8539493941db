"""A gather of small Python objects in one collective. ``torch.distributed.all_gather_object`` takes two of them."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LENGTH_BYTES = 8
SLOT_BYTES = 512  # An object that takes more is sent by a second collective.


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """``value`` of every rank of ``group``, in rank order. A collective of a group that moves tensors in host memory."""
    data = pickle.dumps(value)
    slots = _gather(len(data).to_bytes(LENGTH_BYTES, "little") + data[:SLOT_BYTES], LENGTH_BYTES + SLOT_BYTES, group)
    lengths = [int.from_bytes(slot[:LENGTH_BYTES], "little") for slot in slots]
    contents = [slot[LENGTH_BYTES:] for slot in slots]
    if max(lengths) > SLOT_BYTES:
        contents = _gather(data, max(lengths), group)
    return [pickle.loads(content[:length]) for content, length in zip(contents, lengths, strict=True)]


def _gather(data: bytes, size: int, group: Any) -> list[bytes]:
    """The ``data`` of every rank, filled up with zeros to ``size`` bytes."""
    own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    everyone: list[Tensor] = [torch.empty(size, dtype=torch.uint8) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    return [part.numpy().tobytes() for part in everyone]
