"""``ids="raw"``: the ids of a file as 64-bit integers, for tables with zero-collision ids."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.runtime.errors import ConfigurationError, InputError


def check_ids(ids: str, num_items: int | None) -> str:
    """The option ``ids`` of the data module. Raises :class:`ConfigurationError` if it is unknown or does not fit."""
    if ids not in ("dense", "raw"):
        raise ConfigurationError(f"ids: {ids!r} is unknown; choose 'dense' or 'raw'")
    if ids == "raw" and num_items is not None:
        raise ConfigurationError(f"num_items: {num_items} does not fit ids='raw', whose ids are no rows; leave it out")
    return ids


class CountedIds:
    """The distinct ids of a stream, and how often each of them occurs in training.

    Attributes:
        ids: ``[n]`` int64, sorted.
        counts: ``[n]`` int64.
    """

    def __init__(self) -> None:
        self.ids, self.counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)

    def add(self, ids: NDArray[np.int64], trained: NDArray[np.int64]) -> None:
        """Add ``ids [k]``, and count ``trained [j]``, those of them that are in training.

        >>> found = CountedIds()
        >>> found.add(np.array([9, 4, 9]), np.array([9, 9]))
        >>> found.add(np.array([7]), np.array([], dtype=np.int64))
        >>> found.ids, found.counts
        (array([4, 7, 9]), array([0, 0, 2]))
        """
        together = np.union1d(self.ids, ids)
        counts = np.zeros(len(together), dtype=np.int64)
        counts[np.searchsorted(together, self.ids)] = self.counts
        new, occurrences = np.unique(trained, return_counts=True)
        counts[np.searchsorted(together, new)] += occurrences
        self.ids, self.counts = together, counts


def raw_item_ids(values: NDArray) -> NDArray[np.int64]:
    """Integers from 0 to 2^63 - 1 for distinct raw ids ``[n]``, which are such integers or strings.

    Integers stay as they are. A string becomes 63 bits of its BLAKE2b hash, which depend on the string alone.

    >>> raw_item_ids(np.array([7, 2**62]))
    array([                  7, 4611686018427387904])
    >>> raw_item_ids(np.array(["B00005N5PF"]))
    array([7445213124905404067])
    """
    if np.issubdtype(values.dtype, np.integer):
        return values.astype(np.int64)
    hashes = [hashlib.blake2b(str(value).encode(), digest_size=8).digest() for value in values]
    ids = (np.frombuffer(b"".join(hashes), dtype="<u8") >> np.uint64(1)).astype(np.int64)
    order = np.argsort(ids, kind="stable")
    if (equal := ids[order[1:]] == ids[order[:-1]]).any():
        at = int(equal.argmax())
        raise InputError(
            f"ids='raw': the item ids {values[order[at]]!r} and {values[order[at + 1]]!r} have the same 63-bit hash; "
            "rename one of them"
        )
    return ids
