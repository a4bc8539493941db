"""``split_batch``: which rows of a batch of any type belong to which sample.

A batch is any nesting of dataclasses (or other plain objects), mappings, lists and tuples that holds KeyedJaggedTensors,
JaggedTensors and dense tensors. Every sample has rows in each tensor. The lengths of a jagged tensor tell how many. A dense
tensor has one row per sample or, like ``SeqBatch.timestamps``, one row per event of a jagged tensor. The ranks compare their
row counts to find out which of the two it is. If both fit on all ranks, the tensor has one row per sample.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_freescale.balance.errors import CannotBalance
from lightning_freescale.batch.contents import attributes
from lightning_freescale.batch.seq_batch import HISTORY, SeqBatch
from lightning_freescale.runtime.errors import InputError

# How many rows of a tensor each sample has: for each key of the tensor, a column of ``SplitBatch.lengths``.
LengthColumns = tuple[int, ...]
ONE_ROW_PER_SAMPLE: LengthColumns = (-1,)  # the last column is all ones
FEWEST_SAMPLES = 3  # of a batch in which values that are places can be told from others


class BatchTensor(NamedTuple):
    """One tensor of a batch.

    Attributes:
        name: its place in the batch, for messages.
        rows: ``[T, ...]``. If the tensor has several keys, the rows of the first key come first.
        columns: each entry is a possible way to assign the rows to samples. Several may fit a dense tensor.
    """

    name: str
    rows: Tensor
    columns: tuple[LengthColumns, ...]

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
            tensors.append(BatchTensor(name, _on_host(name, leaf), ()))
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

    map_tensors(visit, "batch", batch)
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


def tensors_of_places(split: SplitBatch) -> frozenset[str]:
    """Names of the dense tensors whose values are places in this batch: the number of the sample of each row, or offsets.

    Such values would be wrong in a batch of other samples. In a batch of few samples other values may look like them.
    """
    lengths, samples = split.lengths, np.arange(split.num_samples)
    ends = lengths[:, :-1].cumsum(axis=0).T
    patterns = [samples, *ends, *(ends - lengths[:, :-1].T), *(np.repeat(samples, own) for own in lengths[:, :-1].T)]
    found = set()
    for tensor in split.tensors:
        is_jagged = any(name == tensor.name or name.startswith(f"{tensor.name}[") for name in split.length_names)
        if is_jagged or tensor.rows.ndim != 1 or tensor.rows.is_floating_point() or len(samples) < FEWEST_SAMPLES:
            continue
        values = tensor.rows.numpy()
        if any(np.array_equal(values, pattern) for pattern in patterns):
            found.add(tensor.name)
    return frozenset(found)


def refuse_places(found: Sequence[frozenset[str]]) -> None:
    """Raise :class:`CannotBalance` if a tensor has places on all ranks.

    Args:
        found: :func:`tensors_of_places` of all ranks.
    """
    if names := frozenset.intersection(*found):
        raise CannotBalance(
            f"{', '.join(sorted(names))}: the values are places in the batch, such as numbers of samples or offsets, which "
            "would be wrong after samples have moved. Compute them in training_step to have samples balanced"
        )


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
    if isinstance(item, Mapping):
        by_key = {key: map_tensors(visit, f"{name}[{key!r}]", value) for key, value in item.items()}
        if not isinstance(item, MutableMapping):
            return type(item)(by_key)  # type: ignore[call-arg]
        twin = copy.copy(item)  # The constructor of a defaultdict takes other arguments than that of a dict.
        twin.update(by_key)
        return twin
    if isinstance(item, (list, tuple)):
        values = [map_tensors(visit, f"{name}[{at}]", value) for at, value in enumerate(item)]
        return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
    fields = attributes(item)
    if fields or hasattr(item, "__dict__"):
        twin = copy.copy(item)
        for key, value in fields.items():
            if isinstance(item, SeqBatch) and key == "negatives_per_position":
                continue  # a number that is equal on all ranks
            object.__setattr__(twin, key, map_tensors(visit, f"{name}.{key}", value))  # a dataclass may be frozen
        return twin
    raise CannotBalance(f"{name}: of type {type(item).__name__}, not a tensor with a row per sample")


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
    if tensor.device.type != "cpu":
        raise CannotBalance(f"{name}: on {tensor.device}, but samples are exchanged on the host")
    if tensor.ndim == 0:
        raise CannotBalance(f"{name}: a scalar belongs to no sample")
    return (tensor.detach() if tensor.requires_grad else tensor).contiguous()
