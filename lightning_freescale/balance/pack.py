"""A batch of any type taken apart into samples, and put together again from samples of other ranks. No communication.

A batch is any nesting of dataclasses (or other plain objects), mappings, lists and tuples that holds KeyedJaggedTensors,
JaggedTensors and dense tensors. Its samples own rows of each of them: jagged ones by their lengths, a dense tensor one row
per sample or, like ``SeqBatch.timestamps``, one row per event of a jagged one. Which of the two is told by the numbers of
rows on all ranks; where they allow both, it is one row per sample.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_freescale.batch.contents import find_parts
from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.runtime.jagged import gather, lengths_to_offsets

# Who owns the rows of a tensor: the column of a batch's lengths for each key it has. The last column is all ones.
Owner = tuple[int, ...]
ONE_ROW: Owner = (-1,)


class CannotBalance(InputError):
    """The batch is sound, but nobody can tell whose rows are whose, or its samples fit no other rank's batch."""


class Part(NamedTuple):
    """One tensor of a batch.

    Attributes:
        name: where it stands, for messages.
        rows: ``[T, ...]``; with several keys, all samples' rows of the first key come first.
        owners: the ways in which the samples may own its rows. A dense tensor can have several that fit.
    """

    name: str
    rows: Tensor
    owners: tuple[Owner, ...]

    @property
    def row_bytes(self) -> int:
        return self.rows.element_size() * int(np.prod(self.rows.shape[1:], dtype=np.int64))


class Layout(NamedTuple):
    """How a batch is made.

    Attributes:
        names: what is counted by its lengths.
        parts: of each tensor the name, dtype and shape of a row.
        owners: of each tensor the ways in which the samples may own its rows.
    """

    names: tuple[str, ...]
    parts: tuple[tuple[str, str, tuple[int, ...]], ...]
    owners: tuple[tuple[Owner, ...], ...]

    def difference(self, other: Layout) -> str:
        """What only one of the two has; empty if samples can move from one to the other."""
        if self[:2] == other[:2]:
            return ""
        own, others = ({*layout.parts, *layout.names} for layout in (self, other))
        return ", ".join(sorted(map(str, own ^ others))) or "the order of its fields"


class Samples(NamedTuple):
    """A batch taken apart.

    Attributes:
        batch: as it was, the pattern for those to be built.
        num_samples: ``n``.
        names: what each column of ``lengths`` counts, ``S`` of them.
        lengths: ``[n, S + 1]`` int64, rows of each sample; the last column is 1.
        parts: its tensors.
    """

    batch: Any
    num_samples: int
    names: tuple[str, ...]
    lengths: NDArray[np.int64]
    parts: list[Part]

    @property
    def layout(self) -> Layout:
        parts = [(part.name, str(part.rows.dtype), tuple(part.rows.shape[1:])) for part in self.parts]
        return Layout(self.names, tuple(parts), tuple(part.owners for part in self.parts))


def take_apart(batch: Any) -> Samples:
    """The samples of a batch on the host. Raises :class:`CannotBalance` if some part of it cannot be dealt to samples."""
    counts: list[tuple[str, int]] = []
    names: list[str] = []
    columns: list[NDArray[np.int64]] = []
    parts: list[Part] = []
    dense: list[int] = []

    def visit(name: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            dense.append(len(parts))
            parts.append(Part(name, _on_host(name, leaf), ()))
            return leaf
        keys, lengths = _jagged_lengths(name, leaf)
        owner = tuple(range(len(names), len(names) + len(keys)))
        names.extend(keys)
        columns.extend(lengths)
        counts.append((name, lengths.shape[1]))
        values = _on_host(name, leaf.values())
        if int(lengths.sum()) != len(values):
            raise InputError(f"{name}: lengths sum to {lengths.sum()} but there are {len(values)} values")
        parts.append(Part(name, values, (owner,)))
        if (weights := leaf.weights_or_none()) is not None:
            parts.append(Part(f"{name} weights", _on_host(name, weights), (owner,)))
        return leaf

    _map(visit, "batch", batch)
    if not parts:
        raise CannotBalance(f"batch: a {type(batch).__name__} without tensors has no samples")
    name, count = counts[0] if counts else (parts[0].name, len(parts[0].rows))
    for other, number in counts:
        if number != count:
            raise CannotBalance(f"{other}: {number} samples, but {name} has {count}")
    lengths = np.stack([*columns, np.ones(count, dtype=np.int64)], axis=1)
    samples = Samples(batch, count, tuple(names), lengths, parts)
    for at in dense:
        parts[at] = parts[at]._replace(owners=_owners(parts[at], samples))
    return samples


def _owners(part: Part, samples: Samples) -> tuple[Owner, ...]:
    if isinstance(samples.batch, SeqBatch) and part.name == "batch.timestamps":
        return ((samples.names.index(f"batch.features[{HISTORY}]"),),)  # known, whatever else the numbers would allow
    rows = len(part.rows)
    fit = [ONE_ROW] if rows == samples.num_samples else []
    fit += [(column,) for column in range(len(samples.names)) if samples.lengths[:, column].sum() == rows]
    if not fit:
        raise CannotBalance(
            f"{part.name}: {rows} rows, neither one for each of {samples.num_samples} samples nor one for each event of "
            f"{', '.join(samples.names) or 'a jagged tensor'}"
        )
    return tuple(fit)


def agree(layouts: Sequence[Layout]) -> list[Owner]:
    """Who owns the rows of each part, from the layouts of all ranks: the first way that fits them all.

    Raises :class:`CannotBalance`, the same on every rank, if their batches differ in kind.
    """
    first = layouts[0]
    for rank, layout in enumerate(layouts):
        if difference := first.difference(layout):
            raise CannotBalance(f"the batches of ranks 0 and {rank} differ in {difference}")
    agreed = []
    for at, (name, *_) in enumerate(first.parts):
        common = [owner for owner in first.owners[at] if all(owner in layout.owners[at] for layout in layouts)]
        if not common:
            raise CannotBalance(f"{name}: no way to deal its rows to samples fits the batches of all ranks")
        agreed.append(common[0])
    return agreed


def check_layout(samples: Samples, layout: Layout, owners: Sequence[Owner]) -> None:
    """Raise :class:`CannotBalance` unless the batch is made like those the ranks have agreed on."""
    if difference := samples.layout.difference(layout):
        raise CannotBalance(f"batch: it and those before differ in {difference}")
    for part, owner in zip(samples.parts, owners, strict=True):
        if owner not in part.owners:
            kind = "samples" if owner == ONE_ROW else f"events of {', '.join(samples.names[s] for s in owner)}"
            raise CannotBalance(f"{part.name}: {len(part.rows)} rows do not fit the {kind}, as in batches before")


def pack(
    samples: Samples, owners: Sequence[Owner], order: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """All bytes of the samples ``order [n]``, one sample after another, and how many each has, ``[n]``."""
    starts, sizes, at = [], [], 0
    for part, owner in zip(samples.parts, owners, strict=True):
        own = samples.lengths[:, owner] * part.row_bytes  # [n, keys]
        starts.append(at + lengths_to_offsets(own.T.ravel())[:-1].reshape(own.T.shape).T)
        sizes.append(own)
        at += own.sum()
    everything = np.concatenate([part.rows.reshape(-1).view(torch.uint8).numpy() for part in samples.parts])
    start, size = np.concatenate(starts, axis=1)[order], np.concatenate(sizes, axis=1)[order]
    return gather(everything, start.ravel(), size.ravel()), size.sum(axis=1)


def packed_sizes(samples: Samples, owners: Sequence[Owner], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of each key of each part of each sample, ``[m, P]``, from lengths ``[m, S + 1]`` of any rank's samples."""
    sizes = [lengths[:, owner] * part.row_bytes for part, owner in zip(samples.parts, owners, strict=True)]
    return np.concatenate(sizes, axis=1)


def put_together(
    pattern: Samples,
    owners: Sequence[Owner],
    lengths: NDArray[np.int64],
    packed: NDArray[np.uint8],
    pin_memory: bool = False,
) -> Any:
    """A batch of the same type from ``m`` packed samples.

    Args:
        pattern: a batch taken apart.
        owners: as agreed.
        lengths: ``[m, S + 1]``.
        packed: their bytes, by sample, as :func:`pack` makes them.
        pin_memory: put the tensors into page-locked memory.
    """
    size = packed_sizes(pattern, owners, lengths)
    start = lengths_to_offsets(size.ravel())[:-1].reshape(size.shape)
    columns = iter(np.split(np.arange(size.shape[1]), np.cumsum([len(owner) for owner in owners])[:-1]))
    ways = iter(owners)
    pinned = (lambda tensor: tensor.pin_memory()) if pin_memory else (lambda tensor: tensor)

    def rows(like: Tensor, owner: Owner) -> Tensor:
        own = next(columns)
        shape = (int(lengths[:, owner].sum()), *like.shape[1:])
        values = gather(packed, start[:, own].T.ravel(), size[:, own].T.ravel())
        tensor = torch.from_numpy(values).view(like.dtype) if len(values) else torch.empty(0, dtype=like.dtype)
        return pinned(tensor.reshape(shape))

    def visit(name: str, leaf: Any) -> Any:
        owner = next(ways)
        if isinstance(leaf, Tensor):
            return rows(leaf, owner)
        values, weights = rows(leaf.values(), owner), None
        if (old := leaf.weights_or_none()) is not None:
            weights = rows(old, next(ways))
        counts = pinned(torch.from_numpy(lengths[:, owner].T.ravel()).to(leaf.lengths().dtype))
        if isinstance(leaf, JaggedTensor):
            return JaggedTensor(values, lengths=counts, weights=weights)
        return KeyedJaggedTensor(leaf.keys(), values, weights=weights, lengths=counts, stride=len(lengths))

    return _map(visit, "batch", pattern.batch)


def sample_sizes(batch: Any, key: str | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What the samples of a batch cost: history lengths ``[n]`` and numbers of candidates ``[n]``.

    In a :class:`SeqBatch` every position but the last is scored against its sample's negatives. In any other batch a
    sample's length is that of ``key``, or the sum over all keys, of the first KeyedJaggedTensor; it has no candidates.
    """
    if isinstance(batch, SeqBatch):
        lengths = batch.lengths.numpy().astype(np.int64)
        keys = batch.features.keys()
        negatives = batch.features[NEGATIVES].lengths().numpy() if NEGATIVES in keys else 0
        return lengths, np.maximum(lengths - 1, 0) * negatives
    for features in find_parts(batch, KeyedJaggedTensor):
        jagged = features if key is None else features[key]
        lengths = jagged.lengths().numpy().astype(np.int64).reshape(-1, features.stride()).sum(axis=0)
        return lengths, np.zeros_like(lengths)
    raise CannotBalance(f"batch: a {type(batch).__name__} without a KeyedJaggedTensor has no lengths to balance by")


def _map(visit: Callable[[str, Any], Any], name: str, item: Any) -> Any:
    """``item`` with every tensor in it, jagged ones whole, replaced by ``visit(name, tensor)``; types stay."""
    if isinstance(item, (Tensor, JaggedTensor, KeyedJaggedTensor)):
        return visit(name, item)
    if item is None:
        return None
    if isinstance(item, Mapping):
        return type(item)({key: _map(visit, f"{name}[{key!r}]", value) for key, value in item.items()})  # type: ignore[call-arg]
    if isinstance(item, (list, tuple)):
        values = [_map(visit, f"{name}[{at}]", value) for at, value in enumerate(item)]
        return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
    if hasattr(item, "__dict__"):
        twin = copy.copy(item)
        for key, value in vars(item).items():
            object.__setattr__(twin, key, _map(visit, f"{name}.{key}", value))  # a dataclass may be frozen
        return twin
    raise CannotBalance(f"{name}: of type {type(item).__name__}, not a tensor with a row per sample")


def _jagged_lengths(name: str, leaf: JaggedTensor | KeyedJaggedTensor) -> tuple[list[str], NDArray[np.int64]]:
    """Names and lengths ``[keys, n]`` of a jagged tensor."""
    lengths = _on_host(name, leaf.lengths()).numpy().astype(np.int64)
    if isinstance(leaf, JaggedTensor):
        return [name], lengths[None]
    if leaf.variable_stride_per_key() or leaf.inverse_indices_or_none() is not None:
        raise CannotBalance(f"{name}: its keys have different batch sizes (variable stride)")
    keys = leaf.keys()
    return [f"{name}[{key}]" for key in keys], lengths.reshape(len(keys), leaf.stride())


def _on_host(name: str, tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        raise CannotBalance(f"{name}: on {tensor.device}, but samples are exchanged on the host")
    if tensor.ndim == 0:
        raise CannotBalance(f"{name}: a scalar belongs to no sample")
    return tensor.detach().contiguous()
