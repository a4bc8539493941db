"""``dedup`` with zero-collision ids: a rank requests each distinct id of its batch once.

TorchRec's own search for distinct ids gives every table a range of numbers, so 64-bit ids of several tables do not fit. It also
searches all features of a table together, and then the owner could not tell the ids that insert from those that only look up.
Here both kinds are searched apart: an id that is in both travels twice. The slots are the same as without ``dedup``, because
they depend on the set of ids alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def request_distinct_ids(
    context: Any, requests: list[KeyedJaggedTensor], groups: list[list[int]]
) -> list[KeyedJaggedTensor]:
    """Replaces ``_dedup_indices`` of TorchRec's managed-collision collection.

    Args:
        context: TorchRec's context of the batch. It gets the positions that undo the search.
        requests: the ids of each sharding group.
        groups: by sharding group, the group of each feature. Features with the same number are searched together.
    """
    found = []
    for features, group_of_feature in zip(requests, groups, strict=True):
        distinct, position = distinct_ids_by_group(features, group_of_feature)
        context.input_features.append(features)
        context.reverse_indices.append(position)
        found.append(distinct)
    return found


def distinct_ids_by_group(
    features: KeyedJaggedTensor, group_of_feature: Sequence[int]
) -> tuple[KeyedJaggedTensor, Tensor]:
    """The distinct ids of each group of features, and the position of every id of ``features`` among them.

    The ids of a group are put under its first feature, spread evenly over the samples: only their number matters to the
    exchange.

    >>> ids = KeyedJaggedTensor(["a", "b"], torch.tensor([7, 3, 3, 7]), lengths=torch.tensor([2, 0, 1, 1]))
    >>> distinct, position = distinct_ids_by_group(ids, [0, 0])
    >>> distinct.values(), position
    (tensor([3, 7]), tensor([1, 0, 0, 1]))
    >>> distinct_ids_by_group(ids, [0, 1])[0].values()
    tensor([3, 7, 3, 7])
    """
    values, samples = features.values(), max(1, features.stride())
    counts = features.length_per_key()
    parts = values.split(counts)
    positions: list[Tensor] = [values] * len(parts)
    lengths = [[0] * samples for _ in parts]
    distinct: list[Tensor] = []
    so_far = 0
    for group in dict.fromkeys(group_of_feature):  # in the order of their first features
        members = [place for place, other in enumerate(group_of_feature) if other == group]
        ids, position = torch.unique(torch.cat([parts[place] for place in members]), return_inverse=True)
        for place, of_feature in zip(members, position.split([counts[place] for place in members]), strict=True):
            positions[place] = of_feature + so_far
        each, left_over = divmod(len(ids), samples)
        lengths[members[0]] = [each + (sample < left_over) for sample in range(samples)]
        distinct.append(ids)
        so_far += len(ids)
    kjt = KeyedJaggedTensor(
        features.keys(),
        torch.cat(distinct),
        lengths=torch.tensor(lengths, dtype=features.lengths().dtype).flatten().to(values.device, non_blocking=True),
        stride=features.stride(),
    )
    return kjt, torch.cat(positions)
