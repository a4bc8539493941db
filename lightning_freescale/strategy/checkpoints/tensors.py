"""Sharded tables and full tensors: gather, fill, and copy."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from lightning_freescale.embedding.plan import embedding_modules, is_of_a_table
from lightning_freescale.runtime.errors import CheckpointError
from lightning_freescale.strategy.control import Control

_IMMUTABLE = (str, int, float, bool, type(None))


def is_sharded(value: Any) -> bool:
    return isinstance(value, ShardedTensor)


def table_names(module: nn.Module) -> set[str]:
    """The keys of the tables in ``module.state_dict()``, before and after sharding."""
    unsharded = {
        f"{name}.{key}" if name else key
        for name, collection in embedding_modules(module).items()
        for key in filter(is_of_a_table, collection.state_dict())
    }
    return unsharded | {key for key, value in module.state_dict().items() if is_sharded(value)}


def with_values(state: Mapping[str, Any], values: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """The state dict ``state`` with other values. It keeps the versions of the modules, which PyTorch stores beside it."""
    result = OrderedDict(values)
    if hasattr(state, "_metadata"):
        result._metadata = state._metadata  # type: ignore[attr-defined]
    return result


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a tensor. For a sharded one it is that of the full tensor."""
    # ShardedTensor.size() warns that the class is deprecated. TorchRec uses it all the same.
    return tuple(value.metadata().size if is_sharded(value) else value.shape)


def total_bytes(values: Iterable[Any]) -> int:
    """The size of the sharded tensors among ``values`` on all ranks together."""
    return sum(math.prod(shape_of(value)) * value.dtype.itemsize for value in values if is_sharded(value))


def _slices(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


@torch.no_grad()
def fill_shards(target: Any, full: Tensor) -> None:
    """Copy the full tensor into the local shards of the sharded tensor ``target``."""
    for shard in target.local_shards():
        shard.tensor.copy_(full[_slices(shard.metadata.shard_offsets, shard.metadata.shard_sizes)])


def gather_full(tensors: Mapping[str, Any], control: Control, everywhere: bool = False) -> dict[str, Tensor]:
    """Put sharded tensors together, one at a time. A collective.

    Args:
        tensors: the sharded tensors of this rank by name. A rank may lack names of which it holds no shard.
        everywhere: give the full tensors to all ranks. Otherwise rank 0 gets them, and the others get tensors of the same
            shape on the ``meta`` device.

    Returns:
        Full tensors in host memory by name; all ranks get the same names.
    """
    own = {
        name: (
            shape_of(value),
            value.dtype,
            [(list(s.metadata.shard_offsets), list(s.metadata.shard_sizes)) for s in value.local_shards()],
        )
        for name, value in tensors.items()
    }
    layouts = control.gather(own)
    everything = {name: entry for layout in layouts for name, entry in layout.items()}
    receives = everywhere or control.rank == 0
    result = {}
    for name, (size, dtype, _) in sorted(everything.items()):
        full = torch.empty(size, dtype=dtype, device="cpu" if receives else "meta")
        local = [shard.tensor.detach() for shard in tensors[name].local_shards()] if name in tensors else []
        try:
            for rank, layout in enumerate(layouts):
                for index, (offsets, sizes) in enumerate(layout.get(name, (None, None, []))[2]):
                    piece = local[index].cpu().contiguous() if rank == control.rank else torch.empty(sizes, dtype=dtype)
                    _move(piece, rank, control, everywhere)
                    if receives:
                        full[_slices(offsets, sizes)] = piece
        except RuntimeError as error:
            raise control.missing_ranks(f"the shards of {name}", error) from error
        result[name] = full
    return result


def without_shards(state: Mapping[str, Any], control: Control) -> Mapping[str, Any]:
    """``state`` with full tensors in place of sharded ones, on rank 0. A collective.

    A hook ``on_save_checkpoint`` may have replaced the full tables by ``module.state_dict()``, as that of ``ModelPruning`` does.
    """
    sharded = {name: value for name, value in state.items() if is_sharded(value)}
    by_rank = control.gather(sorted(sharded))
    for rank, names in enumerate(by_rank):
        if names != by_rank[0]:
            raise CheckpointError(
                f"rank {rank}: on_save_checkpoint has put the sharded tables {names} into the checkpoint, and on rank 0 "
                f"{by_rank[0]}. Change checkpoint['state_dict'] on all ranks alike, or leave the tables as they are"
            )
    return with_values(state, {**state, **gather_full(sharded, control)}) if sharded else state


def _move(piece: Tensor, source: int, control: Control, everywhere: bool) -> None:
    """Send ``piece`` from rank ``source`` to rank 0, or to all ranks."""
    if control.world_size == 1 or not piece.numel():
        return
    if everywhere:
        dist.broadcast(piece, src=source, group=control.group)
    elif source != 0 and control.rank == 0:
        dist.recv(piece, src=source, group=control.group)
    elif source != 0 and control.rank == source:
        dist.send(piece, dst=0, group=control.group)


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, also of a tensor that is there already."""
    return tensor.detach().to("cpu", copy=True)


class Slot(NamedTuple):
    """Stands for a tensor in a structure. Its copy is the one with this number in a list."""

    number: int


@dataclass
class CopiedShards:
    """Copies of the shards of a sharded tensor on this rank. :func:`snapshot` makes a sharded tensor of them.

    To make a sharded tensor takes longer than to copy small shards, so another thread does it.
    """

    original: ShardedTensor  # Training never changes its metadata.
    tensors: list[Any]


def copied_shards(value: Any, copy_of: Callable[[Any], Any]) -> CopiedShards:
    return CopiedShards(value, [copy_of(shard.tensor) for shard in value.local_shards()])


def snapshot(
    value: Any,
    copy_of: Callable[[Any], Any] = host_copy,
    of_sharded: Callable[[Any, Callable[[Any], Any]], Any] | None = None,
) -> Any:
    """A copy of a checkpoint, by default in host memory. Training may change the original afterwards.

    Args:
        copy_of: gives the copy of one tensor, or what stands for it.
        of_sharded: gives the copy of a sharded tensor; by default it is a sharded tensor.
    """
    if type(value) in _IMMUTABLE:
        return value
    if is_sharded(value):
        return (of_sharded or _copy_of_shards)(value, copy_of)
    if isinstance(value, CopiedShards):
        return _sharded_tensor(value.original, [copy_of(tensor) for tensor in value.tensors])
    if isinstance(value, (Tensor, Slot)):
        return copy_of(value)
    if type(value) in (dict, OrderedDict):
        copied = {key: snapshot(part, copy_of, of_sharded) for key, part in value.items()}
        return copied if type(value) is dict else with_values(value, copied)
    if type(value) in (list, tuple):
        return type(value)(snapshot(part, copy_of, of_sharded) for part in value)
    return copy.deepcopy(value)


def _copy_of_shards(value: Any, copy_of: Callable[[Tensor], Tensor]) -> ShardedTensor:
    return _sharded_tensor(value, [copy_of(shard.tensor) for shard in value.local_shards()])


def _sharded_tensor(original: Any, tensors: list[Tensor]) -> ShardedTensor:
    """A sharded tensor like ``original`` with other shards on this rank."""
    on_host = all(tensor.device.type == "cpu" for tensor in tensors)

    def placed(metadata: Any) -> Any:
        own = copy.deepcopy(metadata)
        if on_host:
            own.placement._device = torch.device("cpu")
        return own

    metadata = copy.deepcopy(original.metadata())
    metadata.shards_metadata = [placed(shard) for shard in metadata.shards_metadata]
    shards = [
        Shard(tensor, placed(shard.metadata)) for tensor, shard in zip(tensors, original.local_shards(), strict=True)
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, sharded_tensor_metadata=metadata, process_group=original._process_group
    )
