"""Checks of the lengths and the ids of a jagged tensor on the host.

They use NumPy. It takes less time for small arrays, and a check often runs beside the training: each operator of torch gives
Python's lock to the other thread.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_freescale.batch.torchrec_types import KeyedJaggedTensor
from lightning_freescale.runtime.errors import InputError

ANY_ID = 2**63  # Number of ids of a table with zero-collision ids: every integer from 0 to 2^63 - 1.


def check_lengths(features: KeyedJaggedTensor) -> None:
    """Raise :class:`InputError` unless the lengths fit the values. ``features`` are in host memory."""
    lengths, num_values, keys = features.lengths().numpy(), features.values().numel(), features.keys()
    if lengths.min(initial=0) < 0:
        at, stride = int((lengths < 0).argmax()), max(features.stride(), 1)
        raise InputError(f"{keys[at // stride]}: negative length {lengths[at]} at sample {at % stride}")
    if (total := int(lengths.sum())) != num_values:
        raise InputError(f"{', '.join(keys)}: lengths sum to {total} but there are {num_values} values")


def check_ids(features: KeyedJaggedTensor, rows: Mapping[str, int], advice: str = "") -> None:
    """Raise :class:`InputError` unless every id is a row of its table.

    Args:
        features: ids in host memory, whose lengths fit.
        rows: number of rows of the table of each key, or :data:`ANY_ID`. The ids of a key that is missing here are not checked.
        advice: the end of the message about an id that is no row.
    """
    keys, values, end = features.keys(), features.values(), 0
    if not values.numel() or rows.keys().isdisjoint(keys):
        return
    all_ids = values.numpy()
    for key, count in zip(keys, features.length_per_key(), strict=True):
        ids, end, limit = all_ids[end : end + count], end + count, rows.get(key)
        if limit is None or not count:
            continue
        low, high = int(ids.min()), int(ids.max())
        if low < 0 and limit == ANY_ID:
            raise InputError(f"{key}: id {low} is negative; zero-collision ids are integers from 0 to 2^63 - 1")
        if low < 0 or high >= limit:
            raise InputError(
                f"{key}: id {low if low < 0 else high} is outside its table of {limit} rows (0 to {limit - 1}){advice}"
            )
