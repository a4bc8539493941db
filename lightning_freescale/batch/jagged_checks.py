"""Checks of the lengths and the ids of a jagged tensor on the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_freescale.batch.torchrec_types import KeyedJaggedTensor
from lightning_freescale.runtime.errors import InputError

ANY_ID = 2**63  # Number of ids of a table with zero-collision ids: every integer from 0 to 2^63 - 1.


def check_lengths(features: KeyedJaggedTensor) -> None:
    """Raise :class:`InputError` unless the lengths fit the values. ``features`` are in host memory."""
    lengths, values = features.lengths(), features.values()
    keys = features.keys()
    if lengths.numel() and int(lengths.min()) < 0:
        at, stride = int((lengths < 0).nonzero()[0]), features.stride()
        raise InputError(
            f"{keys[at // max(stride, 1)]}: negative length {int(lengths[at])} at sample {at % max(stride, 1)}"
        )
    if int(lengths.sum()) != values.numel():
        raise InputError(
            f"{', '.join(keys)}: lengths sum to {int(lengths.sum())} but there are {values.numel()} values"
        )


def check_ids(features: KeyedJaggedTensor, rows: Mapping[str, int]) -> None:
    """Raise :class:`InputError` unless every id is a row of its table.

    Args:
        features: ids in host memory, whose lengths fit.
        rows: number of rows of the table of each key, or :data:`ANY_ID`. The ids of a key that is missing here are not checked.
    """
    values = features.values()
    if not rows or not values.numel():
        return
    for key, ids in zip(features.keys(), values.split(features.length_per_key()), strict=True):
        limit = rows.get(key)
        if limit is None or not ids.numel():
            continue
        edges = torch.aminmax(ids)
        low, high = int(edges.min), int(edges.max)
        if low < 0 and limit == ANY_ID:
            raise InputError(f"{key}: id {low} is negative; zero-collision ids are integers from 0 to 2^63 - 1")
        if low < 0 or high >= limit:
            raise InputError(
                f"{key}: id {low if low < 0 else high} is outside its table of {limit} rows (0 to {limit - 1})"
            )
