"""``split_batch``: which rows of a batch of any type belong to which sample.

A batch is any nesting of dataclasses (or other plain objects), mappings, lists and tuples that holds KeyedJaggedTensors,
JaggedTensors and dense tensors. Every sample has rows in each tensor. The lengths of a jagged tensor tell how many. A dense
tensor has one row per sample or, like ``SeqBatch.timestamps``, one row per event of a jagged tensor. The ranks compare their
row counts to find out which of the two it is. If both fit on all ranks, the tensor has one row per sample.
"""

from __future__ import annotations

import copy
import math
from collections import UserDict
from collections.abc import Callable, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_freescale.balance.errors import CannotBalance
from lightning_freescale.batch.contents import attributes, find_parts
from lightning_freescale.batch.seq_batch import HISTORY, SeqBatch
from lightning_freescale.runtime.errors import FreeScaleError, InputError

# How many rows of a tensor each sample has: for each key of the tensor, a column of ``SplitBatch.lengths``.
LengthColumns = tuple[int, ...]
ONE_ROW_PER_SAMPLE: LengthColumns = (-1,)  # the last column is all ones


class BatchTensor(NamedTuple):
    """One tensor of a batch.

    Attributes:
        name: its place in the batch, for messages.
        rows: ``[T, ...]``. If the tensor has several keys, the rows of the first key come first.
        columns: each entry is a possible way to assign the rows to samples. Several may fit a dense tensor.
        is_dense: whether it is not part of a jagged tensor.
    """

    name: str
    rows: Tensor
    columns: tuple[LengthColumns, ...]
    is_dense: bool = False

    @property
    def row_bytes(self) -> int:
        return self.rows.element_size() * math.prod(self.rows.shape[1:])


class BatchLayout(NamedTuple):
    """What a batch consists of, without the values. Samples can move between batches of equal layout.

    Attributes:
        length_names: what each column of the lengths counts.
        tensors: name, dtype and row shape of each tensor.
        columns: for each tensor, the possible ways to assign its rows to samples.
    """

    length_names: tuple[str, ...]
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    columns: tuple[tuple[LengthColumns, ...], ...]

    def difference(self, other: BatchLayout) -> str:
        """Name what only one of the two layouts has. The text is empty if samples can move from one to the other."""
        if self[:2] == other[:2]:
            return ""
        own, others = ({*layout.tensors, *layout.length_names} for layout in (self, other))
        return ", ".join(sorted(map(str, own ^ others))) or "the order of the fields"


class SplitBatch(NamedTuple):
    """A batch and the rows of each of its samples.

    Attributes:
        batch: the batch, unchanged. A new batch takes its structure.
        num_samples: ``n``.
        length_names: what each of the first ``S`` columns of ``lengths`` counts.
        lengths: ``[n, S + 1]`` int64, the rows of each sample. The last column is 1.
        totals: the sum of each of the first ``S`` columns.
        tensors: all tensors of the batch.
    """

    batch: Any
    num_samples: int
    length_names: tuple[str, ...]
    lengths: NDArray[np.int64]
    totals: list[int]
    tensors: list[BatchTensor]

    @property
    def layout(self) -> BatchLayout:
        tensors = [(tensor.name, str(tensor.rows.dtype), tuple(tensor.rows.shape[1:])) for tensor in self.tensors]
        return BatchLayout(self.length_names, tuple(tensors), tuple(tensor.columns for tensor in self.tensors))


class Agreement(NamedTuple):
    """What the ranks agree on at the first batch: the layout, and for each tensor how many rows a sample has."""

    layout: BatchLayout
    columns: list[LengthColumns]


def split_batch(batch: Any) -> SplitBatch:
    """Split a batch in host memory into samples. Raises :class:`CannotBalance` if some rows belong to no sample."""
    jagged: list[tuple[str, int]] = []  # name and number of samples
    length_names: list[str] = []
    columns: list[NDArray[np.int64]] = []
    totals: list[int] = []
    tensors: list[BatchTensor] = []
    dense: list[int] = []  # positions in ``tensors``

    def visit(name: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            dense.append(len(tensors))
            tensors.append(BatchTensor(name, _on_host(name, leaf), (), is_dense=True))
            return leaf
        keys, lengths = _jagged_lengths(name, leaf)
        own_columns = tuple(range(len(length_names), len(length_names) + len(keys)))
        length_names.extend(keys)
        columns.extend(lengths)
        jagged.append((name, lengths.shape[1]))
        values, by_key = _on_host(name, leaf.values()), lengths.sum(axis=1).tolist()
        totals.extend(by_key)
        if sum(by_key) != len(values):
            raise InputError(f"{name}: lengths sum to {sum(by_key)} but there are {len(values)} values")
        tensors.append(BatchTensor(name, values, (own_columns,)))
        if (weights := leaf.weights_or_none()) is not None:
            tensors.append(BatchTensor(f"{name} weights", _on_host(name, weights), (own_columns,)))
        return leaf

    try:
        map_tensors(visit, "batch", batch)
    except FreeScaleError:
        raise
    except Exception as error:  # of the user's classes
        raise CannotBalance(
            f"batch: a {type(batch).__name__} cannot be made of other samples: {type(error).__name__}: {error}"
        ) from error
    if not tensors:
        raise CannotBalance(f"batch: a {type(batch).__name__} without tensors has no samples")
    name, count = jagged[0] if jagged else (tensors[0].name, len(tensors[0].rows))
    for other, number in jagged:
        if number != count:
            raise CannotBalance(f"{other}: {number} samples, but {name} has {count}")
    lengths = np.stack([*columns, np.ones(count, dtype=np.int64)], axis=1)
    split = SplitBatch(batch, count, tuple(length_names), lengths, totals, tensors)
    for at in dense:
        tensors[at] = tensors[at]._replace(columns=_dense_columns(tensors[at], split))
    return split


def _dense_columns(tensor: BatchTensor, split: SplitBatch) -> tuple[LengthColumns, ...]:
    """Return the ways to assign the rows of a dense tensor to samples: per sample, or per event of a jagged tensor."""
    if isinstance(split.batch, SeqBatch) and tensor.name == "batch.timestamps":
        # The type defines one row per event, even if the number of rows would also fit one row per sample.
        return ((split.length_names.index(f"batch.features[{HISTORY}]"),),)
    rows = len(tensor.rows)
    fit = [ONE_ROW_PER_SAMPLE] if rows == split.num_samples else []
    fit += [(column,) for column, total in enumerate(split.totals) if total == rows]
    if not fit:
        raise CannotBalance(
            f"{tensor.name}: {rows} rows, neither one for each of {split.num_samples} samples nor one for each event of "
            f"{', '.join(split.length_names) or 'a jagged tensor'}"
        )
    return tuple(fit)


def agree(layouts: Sequence[BatchLayout]) -> Agreement:
    """Choose, for each tensor, the first way to assign rows to samples that fits the batches of all ranks.

    Raises :class:`CannotBalance`, the same on every rank, if the layouts differ.

    Args:
        layouts: of all ranks, in rank order.
    """
    first = layouts[0]
    for rank, layout in enumerate(layouts):
        if difference := first.difference(layout):
            raise CannotBalance(f"the batches of ranks 0 and {rank} differ in {difference}")
    agreed = []
    for at, (name, *_) in enumerate(first.tensors):
        common = [way for way in first.columns[at] if all(way in layout.columns[at] for layout in layouts)]
        if not common:
            raise CannotBalance(f"{name}: no way to assign its rows to samples fits the batches of all ranks")
        agreed.append(common[0])
    return Agreement(first, agreed)


def check_layout(split: SplitBatch, agreement: Agreement) -> None:
    """Raise :class:`CannotBalance` unless the batch fits what the ranks agreed on."""
    if difference := split.layout.difference(agreement.layout):
        raise CannotBalance(f"batch: this batch and earlier ones differ in {difference}")
    for tensor, columns in zip(split.tensors, agreement.columns, strict=True):
        if columns not in tensor.columns:
            per_sample = columns == ONE_ROW_PER_SAMPLE
            kind = "sample" if per_sample else f"event of {', '.join(split.length_names[at] for at in columns)}"
            raise CannotBalance(f"{tensor.name}: {len(tensor.rows)} rows; earlier batches have one row per {kind}")


def map_tensors(visit: Callable[[str, Any], Any], name: str, item: Any) -> Any:
    """Return a copy of ``item`` in which ``visit(name, tensor)`` replaces every tensor and every jagged tensor."""
    if item is None:
        return None
    if isinstance(item, (Tensor, JaggedTensor, KeyedJaggedTensor)):
        return visit(name, item)
    if isinstance(item, (dict, UserDict, MappingProxyType)) or _is_tensordict(item):
        return _map_mapping(visit, name, item)
    if isinstance(item, (list, tuple)):
        _refuse_tensors_beside_items(name, item)
        values = [map_tensors(visit, f"{name}[{at}]", value) for at, value in enumerate(item)]
        if isinstance(item, list):
            twin = copy.copy(item)  # The constructor of a subclass may take other arguments.
            twin[:] = values
            return twin
        return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
    fields = attributes(item)
    if not isinstance(item, type) and (fields or hasattr(item, "__dict__")):
        twin = copy.copy(item)
        for key, value in fields.items():
            if isinstance(item, SeqBatch) and key == "negatives_per_position":
                continue  # a number that is equal on all ranks
            object.__setattr__(twin, key, map_tensors(visit, f"{name}.{key}", value))  # a dataclass may be frozen
        return twin
    raise CannotBalance(f"{name}: of type {type(item).__name__}, not a tensor with a row per sample")


def _map_mapping(visit: Callable[[str, Any], Any], name: str, item: Any) -> Any:
    """:func:`map_tensors` of a dictionary. Other mappings keep their items in attributes."""
    items_are_attributes = getattr(item, "__dict__", None) is item
    if not items_are_attributes:
        _refuse_tensors_beside_items(name, item)
    by_key = {key: map_tensors(visit, f"{name}[{key!r}]", value) for key, value in item.items()}
    if isinstance(item, MappingProxyType):
        return MappingProxyType(by_key)
    if _is_tensordict(item):
        rows = [len(value) for value in list(by_key.values())[:1]] if item.batch_size else []
        return type(item)(by_key, batch_size=[*rows, *item.batch_size[1:]])
    twin = copy.copy(item)  # The constructor of a defaultdict takes other arguments than that of a dict.
    if items_are_attributes:
        twin.__dict__ = twin  # A copy has attributes of its own.
    for key, value in by_key.items():
        twin[key] = value
    return twin


def _refuse_tensors_beside_items(name: str, item: Any) -> None:
    """Raise :class:`CannotBalance` if a subclass of a dictionary or a list has tensors in attributes, too."""
    if type(item) in (dict, list, tuple) or _is_tensordict(item):
        return
    held = item.values() if isinstance(item, (dict, UserDict)) else item
    items = {id(value) for value in held} if not isinstance(item, MappingProxyType) else set()
    for key, value in attributes(item).items():
        if (key == "data" and isinstance(item, UserDict)) or id(value) in items:
            continue
        if any(True for _ in find_parts(value, (Tensor, JaggedTensor, KeyedJaggedTensor))):
            raise CannotBalance(
                f"{name}.{key}: a tensor that is an attribute of a {type(item).__name__} and not an item"
            )


def _is_tensordict(item: Any) -> bool:
    return isinstance(item, MutableMapping) and isinstance(getattr(item, "batch_size", None), torch.Size)


def _jagged_lengths(name: str, leaf: JaggedTensor | KeyedJaggedTensor) -> tuple[list[str], NDArray[np.int64]]:
    """Return the names and the lengths ``[keys, n]`` of a jagged tensor."""
    lengths = _on_host(name, leaf.lengths()).numpy().astype(np.int64, copy=False)
    if isinstance(leaf, JaggedTensor):
        return [name], lengths[None]
    if leaf.variable_stride_per_key() or leaf.inverse_indices_or_none() is not None:
        raise CannotBalance(f"{name}: its keys have different batch sizes (variable stride)")
    keys = leaf.keys()
    return [f"{name}[{key}]" for key in keys], lengths.reshape(len(keys), leaf.stride())


def _on_host(name: str, tensor: Tensor) -> Tensor:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise CannotBalance(f"{name}: of type {type(tensor).__name__}, not a plain tensor with a row per sample")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise CannotBalance(f"{name}: a sparse, nested or quantized tensor, whose rows cannot be moved")
    if tensor.device.type != "cpu":
        raise CannotBalance(f"{name}: on {tensor.device}, but samples are exchanged on the host")
    if tensor.ndim == 0:
        raise CannotBalance(f"{name}: a scalar belongs to no sample")
    return (tensor.detach() if tensor.requires_grad else tensor).resolve_conj().resolve_neg().contiguous()
