"""``ids="raw"``: the ids of a file as 64-bit integers, for tables with zero-collision ids."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.runtime.errors import ConfigurationError, InputError


def check_ids(ids: str, streaming: bool) -> str:
    """The option ``ids`` of the data module. Raises :class:`ConfigurationError` if it is unknown or does not fit."""
    if ids not in ("dense", "raw"):
        raise ConfigurationError(f"ids: {ids!r} is unknown; choose 'dense' or 'raw'")
    if ids == "raw" and streaming:
        raise ConfigurationError("ids: 'raw' needs streaming=False, because negatives are drawn from all known items")
    return ids


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
