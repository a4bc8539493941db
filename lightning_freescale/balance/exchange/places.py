"""Tensors whose rows must not move with the samples, although a sample has one row of them.

Some values are places in the batch: the number of the sample of each row, offsets, or a matrix of all pairs of samples. Others
are shared by all samples, and have as many rows as the batch by chance. Such values would be wrong in a batch of other samples.
They are found by their form in the first batch. In a batch of few samples other values may have this form, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_freescale.balance.errors import CannotBalance
from lightning_freescale.balance.exchange.split_batch import SplitBatch
from lightning_freescale.batch.contents import bytes_of, checksum

FEWEST_SAMPLES = 3  # of a batch in which values of one row per sample tell whether they are places
FEWEST_EVENTS = 8  # of a batch of two samples in which values of one row per event tell it


class FixedTensors(NamedTuple):
    """What one rank knows about the tensors of its batch, for :func:`refuse_to_move`.

    Attributes:
        places: names of the dense tensors whose values have the form of places in the batch.
        shared: the checksum of each dense tensor with at least three different rows, by name.
        samples: the checksums of the jagged tensors.
    """

    places: frozenset[str]
    shared: dict[str, int]
    samples: tuple[int, ...]

    @classmethod
    def of(cls, split: SplitBatch) -> Self:
        dense = [tensor for tensor in split.tensors if tensor.is_dense]
        return cls(
            frozenset(tensor.name for tensor in dense if _holds_places(tensor.rows, split)),
            {tensor.name: checksum(tensor.rows) for tensor in dense if _has_three_different_rows(tensor.rows)},
            tuple(checksum(tensor.rows) for tensor in split.tensors if not tensor.is_dense),
        )


def refuse_to_move(of_ranks: Sequence[FixedTensors]) -> None:
    """Raise :class:`CannotBalance`, the same on every rank, if a tensor must not move with the samples.

    Args:
        of_ranks: :class:`FixedTensors` of all ranks.
    """
    if names := frozenset.intersection(*(fixed.places for fixed in of_ranks)):
        raise CannotBalance(
            f"{', '.join(sorted(names))}: the values are places in the batch, such as numbers of samples or offsets, which "
            "would be wrong after samples have moved. Compute them in training_step to have samples balanced"
        )
    first = of_ranks[0]
    if all(fixed.samples == first.samples for fixed in of_ranks):
        return  # All ranks loaded the same samples, so equal values mean nothing.
    shared = [name for name, sum in first.shared.items() if all(fixed.shared.get(name) == sum for fixed in of_ranks)]
    if shared:
        raise CannotBalance(
            f"{', '.join(sorted(shared))}: equal on all ranks, so the values seem to belong to no sample. Make them an "
            "attribute of the model to have samples balanced"
        )


def _holds_places(rows: Tensor, split: SplitBatch) -> bool:
    """Whether the values have the form of places: places of samples, of events, or a matrix of all pairs of samples."""
    count = split.num_samples
    if rows.ndim == 2 and rows.shape == (count, count):
        is_of_pairs = any(torch.equal(rows, other) for other in (rows.T, rows.tril(), rows.triu()))
        return is_of_pairs and _has_three_different_rows(rows)
    if rows.is_floating_point() or rows.is_complex() or rows.numel() != len(rows):
        return False
    values = rows.flatten().numpy()
    if len(values) < (FEWEST_SAMPLES if count >= FEWEST_SAMPLES else FEWEST_EVENTS) or count < 2:
        return False
    if len(values) == count and np.array_equal(np.sort(values), np.arange(count)):
        return True
    return any(np.array_equal(values, pattern) for pattern in _patterns(split))


def _patterns(split: SplitBatch) -> Iterator[NDArray[np.int64]]:
    """The first and the last rows of all samples, and for each row its sample and its place, by key."""
    samples = np.arange(split.num_samples)
    for own in split.lengths[:, :-1].T:
        ends = own.cumsum()
        yield from (ends, ends - own, np.repeat(samples, own), np.arange(ends[-1]))


def _has_three_different_rows(rows: Tensor) -> bool:
    if not rows.numel():
        return False
    values = bytes_of(rows).reshape(len(rows), -1)
    other = (values != values[:1]).any(axis=1)
    return bool(other.any() and (other & (values != values[other.argmax()]).any(axis=1)).any())
