"""``check_jagged``: checks the lengths and the ids of a jagged tensor on the host."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_freescale.batch.torchrec_types import KeyedJaggedTensor
from lightning_freescale.runtime.errors import InputError

ANY_ID = 2**63  # Number of ids of a table with zero-collision ids: every integer from 0 to 2^63 - 1.


def check_jagged(features: KeyedJaggedTensor, rows: Mapping[str, int] | None = None) -> None:
    """Raise :class:`InputError` unless the lengths fit the values and every id is a row of its table.

    Args:
        features: ids in host memory.
        rows: number of rows of the table of each key, or :data:`ANY_ID`. The ids of a key that is missing here are not checked.
    """
    # NumPy takes less time for small arrays, and often runs beside the training, which waits for each operator of torch.
    lengths, values = features.lengths().numpy(), features.values()
    keys, stride = features.keys(), features.stride()
    if lengths.min(initial=0) < 0:
        at = int((lengths < 0).argmax())
        raise InputError(f"{keys[at // max(stride, 1)]}: negative length {lengths[at]} at sample {at % max(stride, 1)}")
    if (total := int(lengths.sum())) != values.numel():
        raise InputError(f"{', '.join(keys)}: lengths sum to {total} but there are {values.numel()} values")
    if not rows or not total or rows.keys().isdisjoint(keys):
        return
    all_ids, end = values.numpy(), 0
    for key, count in zip(keys, features.length_per_key(), strict=True):
        ids, end, limit = all_ids[end : end + count], end + count, rows.get(key)
        if limit is None or not count:
            continue
        low, high = int(ids.min()), int(ids.max())
        if low < 0 and limit == ANY_ID:
            raise InputError(f"{key}: id {low} is negative; zero-collision ids are integers from 0 to 2^63 - 1")
        if low < 0 or high >= limit:
            raise InputError(
                f"{key}: id {low if low < 0 else high} is outside its table of {limit} rows (0 to {limit - 1})"
            )
