"""The ranks announce how many ids of a batch each of them will send to each other one, in the header of the batch.

An all-to-all of ids needs the sizes of all its parts on the host. To exchange these sizes on the device costs a transfer, and the
host waits for it in every step. But the ids were counted in host memory (``owner_counts.py``), and each batch has a header that
travels in host memory anyway. So the header carries the counts, and the sizes are known some steps before they are needed.

Each rank tells each other rank two numbers for each feature with a table, in the order of the features' names: how many ids it
will send, and its batch size. Both are -1 if the rank does not know them. It then tells so to all ranks, and all ranks exchange
the sizes on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding import owner_counts

_PER_FEATURE = 2  # the number of ids, and the batch size


def numbers_per_rank(rows: Mapping[str, int]) -> int:
    """How many numbers each rank tells each other one about a batch.

    Args:
        rows: rows of the table of each feature.
    """
    return _PER_FEATURE * len(rows)


def to_announce(kjts: Iterable[KeyedJaggedTensor], rows: Mapping[str, int], ranks: int) -> NDArray[np.int64]:
    """What this rank tells each rank about a batch, ``[ranks, numbers_per_rank(rows)]``.

    Args:
        kjts: the jagged tensors of the batch, with the counts of ``owner_counts.attach``. A feature may be in one of them alone:
            otherwise its numbers are unknown.
        rows: rows of the table of each feature.
        ranks: number of ranks.
    """
    numbers = np.full((ranks, len(rows), _PER_FEATURE), -1, np.int64)
    kjts = list(kjts)
    places = {name: place for place, name in enumerate(sorted(rows))}
    seen = Counter(name for kjt in kjts for name in kjt.keys())  # noqa: SIM118
    for kjt in kjts:
        counts = owner_counts.attached(kjt)
        for name, by_owner in counts.by_feature.items() if counts is not None else ():
            if seen[name] == 1:
                numbers[:, places[name], 0] = by_owner
                numbers[:, places[name], 1] = kjt.stride()
    return numbers.reshape(ranks, -1)


def note(kjts: Iterable[KeyedJaggedTensor], rows: Mapping[str, int], received: NDArray[np.int64]) -> None:
    """Keep what all ranks have announced to this one with the counts of the jagged tensors of the same batch.

    Args:
        kjts: the jagged tensors of the batch on this rank.
        rows: rows of the table of each feature.
        received: ``[ranks, numbers_per_rank(rows)]`` row ``r`` is what rank ``r`` has told this one.
    """
    by_feature = received.reshape(len(received), len(rows), _PER_FEATURE)
    places = {name: place for place, name in enumerate(sorted(rows)) if (by_feature[:, place] >= 0).all()}
    for kjt in kjts:
        counts = owner_counts.attached(kjt)
        if counts is not None:
            for name in counts.by_feature:
                if name in places:
                    columns = by_feature[:, places[name]]
                    counts.arriving[name] = columns[:, 0].tolist(), columns[:, 1].tolist()
