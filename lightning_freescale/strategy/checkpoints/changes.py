"""The rows of sharded tensors that differ from a full checkpoint: found bit for bit, written to files, applied when read.

An incremental checkpoint is a folder with the files of a full one, the base, and one file ``changes_R.pt`` from each rank R:
the rows of its shards that differ from the base, and from rank 0 all tensors that are not sharded. A reader loads the base
and then applies the changes, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_freescale.runtime.errors import CheckpointError
from lightning_freescale.strategy.checkpoints import storage

PREFIX, SUFFIX = "changes_", ".pt"
_ROWS_AT_A_TIME = 1 << 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # An integer type for each size of an element.


class Piece(NamedTuple):
    """A shard of a tensor in host memory, and where its first element lies in the whole tensor."""

    offsets: tuple[int, ...]
    values: Tensor


Pieces = dict[str, list[Piece]]  # The shards of one rank, by the name of the tensor.


def file_name(rank: int) -> str:
    return f"{PREFIX}{rank}{SUFFIX}"


# ---- find ------------------------------------------------------------------------------------------------------------
def changed_rows(before: Tensor, now: Tensor) -> Tensor:
    """The indices of the rows in which any bit differs. A zero differs from a negative zero, and a NaN equals itself."""
    bits = _BITS[now.element_size()]
    found = []
    for begin in range(0, len(now), _ROWS_AT_A_TIME):
        old, new = (part[begin : begin + _ROWS_AT_A_TIME].contiguous().view(bits) for part in (before, now))
        differs = (old != new).flatten(1).any(dim=1) if now.dim() > 1 else old != new
        found.append(differs.nonzero().flatten() + begin)
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def find(before: Pieces, now: Pieces) -> dict[str, list[dict[str, Any]]]:
    """What differs between two states of the same shards, as ``torch.save`` writes it and ``weights_only`` reads it."""
    result: dict[str, list[dict[str, Any]]] = {}
    for name, pieces in now.items():
        for old, new in zip(before[name], pieces, strict=True):
            rows = changed_rows(old.values, new.values)
            if len(rows):
                entry = {"rows": rows + new.offsets[0], "columns": list(new.offsets[1:]), "values": new.values[rows]}
                result.setdefault(name, []).append(entry)
    return result


def same_layout(before: Pieces, now: Pieces) -> bool:
    """Whether two states have the same shards, so that :func:`find` can compare them."""

    def layout(pieces: Pieces) -> dict[str, Any]:
        return {
            name: [(part.offsets, part.values.shape, part.values.dtype) for part in parts]
            for name, parts in pieces.items()
        }

    return layout(before) == layout(now)


# ---- apply -----------------------------------------------------------------------------------------------------------
@torch.no_grad()
def apply(entry: Mapping[str, Any], target: Tensor, offsets: tuple[int, ...]) -> None:
    """Copy the changed rows of ``entry`` into ``target``, a shard that begins at ``offsets`` of the whole tensor."""
    rows, values = entry["rows"] - offsets[0], entry["values"]
    inside = (rows >= 0) & (rows < len(target))
    if not inside.any():
        return
    rows, values = rows[inside], values[inside]
    for axis, (begin, own) in enumerate(zip(entry["columns"], offsets[1:], strict=True), start=1):
        first = max(begin, own)
        length = min(begin + values.shape[axis], own + target.shape[axis]) - first
        if length <= 0:
            return
        values, target = values.narrow(axis, first - begin, length), target.narrow(axis, first - own, length)
    target[rows.to(target.device)] = values.to(target.device, target.dtype)


def read(path: str) -> Iterable[dict[str, Any]]:
    """What the files with changes in the folder ``path`` hold, one after the other. No code from them is run."""
    for name in sorted(storage.read_checksums(path)):
        last = name.rsplit("/", 1)[-1]
        if not (last.startswith(PREFIX) and last.endswith(SUFFIX)):
            continue
        file = storage.join(path, name)
        try:
            with storage.open_file(file, "rb") as stream:
                content = torch.load(stream, map_location="cpu", weights_only=True)
            if not {"sharded", "whole"} <= content.keys():
                raise ValueError("it has no entries 'sharded' and 'whole'")
        except Exception as failure:
            raise CheckpointError(f"{file} cannot be read: {type(failure).__name__}: {failure}") from failure
        yield content


def apply_all(path: str, targets: Mapping[str, Any], pieces_of: Callable[[Any], Iterable[Piece]]) -> None:
    """Apply all changes in the folder ``path``, if there are any, to ``targets``, which hold the base.

    Args:
        targets: the tensors by name. Sharded tensors are changed in place.
        pieces_of: the shards of a target on this rank; an empty list for a tensor that is replaced as a whole.
    """
    for content in read(path):
        for name, entries in content["sharded"].items():
            for piece in pieces_of(targets[name]) if name in targets else ():
                for entry in entries:
                    try:
                        apply(entry, piece.values, piece.offsets)
                    except (RuntimeError, ValueError, KeyError, IndexError) as failure:
                        raise CheckpointError(f"{path}: the changes of {name} do not fit: {failure}") from failure
        for name, value in content["whole"].items():
            if isinstance(targets.get(name), Tensor):
                with torch.no_grad():
                    targets[name].copy_(value)
