"""How many ids of a batch each rank owns, counted while the ids are still in host memory.

The row-wise exchange of ids first tells every rank how many ids it will get. TorchRec counts the ids on the device, and
the host waits for the result. In short steps this wait is a large part of the host's time: the kernels that count share the GPU
with the compute of the step. A batch that comes from a loader is in host memory before, so the ids are counted there, and
TorchRec's tensor gets the counts before ``id_exchange.py`` asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale import _C
from lightning_freescale.embedding.id_exchange import AnnouncedSizes, RowWiseIds
from lightning_freescale.embedding.stages import contents_version
from lightning_freescale.runtime.errors import InputError

COMPARED_RANKS = 8  # up to here a comparison for each rank takes less time than a division
_ATTRIBUTE = "_freescale_owner_counts"
# Set for tables with buckets. The name depends on the release of TorchRec.
_ROW_POSITIONS = ("zch_bucketize_row_pos", "kvzch_bucketize_row_pos")


@dataclass(frozen=True)
class OwnerCounts:
    """Of one KeyedJaggedTensor on the device.

    Attributes:
        by_feature: for each feature, the ids of each owner, ``[ranks]``.
        blocks: for each feature, the rows of its table on each rank.
        version: ``contents_version`` of the tensor on the device when it was made.
        arriving: for each feature, the ids that each rank sends to this one, and its batch size, both ``[ranks]``. Features
            are left out if any rank has not announced them. ``announced_ids.py`` writes it.
    """

    by_feature: dict[str, list[int]]
    blocks: dict[str, int]
    version: int
    arriving: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)


def count(host: KeyedJaggedTensor, rows: Mapping[str, int], ranks: int) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The ids of each owner and the rows of each rank, by feature, of tables that are divided row-wise.

    Args:
        host: in host memory. Its ids are at least 0 and below the number of rows.
        rows: rows of the table of each feature. Other features are left out.
        ranks: number of ranks.
    """
    counts, blocks = {}, {}
    values = host.values().numpy()  # PyTorch would use its threads, which go on to occupy cores for a while afterwards
    for name, (start, end) in zip(host.keys(), pairwise(host.offset_per_key()), strict=True):
        if name in rows:
            blocks[name] = -(-rows[name] // ranks)
            counts[name] = _by_owner(values[start:end], blocks[name], ranks)
    return counts, blocks


def _by_owner(ids: NDArray[np.integer[Any]], block: int, ranks: int) -> list[int]:
    """How many of ``ids`` lie in each of ``ranks`` blocks of rows."""
    if ranks > COMPARED_RANKS:
        return np.bincount(ids // block, minlength=ranks).tolist()
    return _C.count_owners(ids, block, ranks)


def attach(host: KeyedJaggedTensor, moved: KeyedJaggedTensor, rows: Mapping[str, int], ranks: int) -> None:
    """Count the ids of ``host`` and keep the counts with its copy on the device, ``moved``."""
    if host.device().type == "cpu" and not host.variable_stride_per_key():
        setattr(moved, _ATTRIBUTE, OwnerCounts(*count(host, rows, ranks), contents_version(moved)))


def attached(kjt: KeyedJaggedTensor) -> OwnerCounts | None:
    """The counts that :func:`attach` has kept; ``None`` without them."""
    return getattr(kjt, _ATTRIBUTE, None)


def counts_of(kjt: KeyedJaggedTensor) -> OwnerCounts | None:
    """The counts that :func:`attach` has kept; ``None`` without them, or if the ids were changed in place since."""
    found = attached(kjt)
    return found if found is not None and found.version == contents_version(kjt) else None


class KnownCounts:
    """Exchanges the ids of one module. Ids of row-wise tables go through :class:`RowWiseIds`, with the counts of the batch.

    Args:
        module: the sharded collection.
    """

    def __init__(self, module: Any):
        self._module = module
        self._counts: OwnerCounts | None = None
        self._possible = type(module) in (ShardedEmbeddingCollection, ShardedEmbeddingBagCollection)
        self._countable = not getattr(module, "_use_index_dedup", False)  # dedup changes the numbers of ids
        self._installed = self._active = self._ahead = False

    def input_dist(self, context: Any, kjt: KeyedJaggedTensor, ahead: bool = False) -> Any:
        """What ``module.input_dist(context, kjt)`` does, with the counts of ``kjt`` if they are known.

        Args:
            context: TorchRec's context of the batch.
            kjt: the ids on the device.
            ahead: whether the batch is still to be handed to the training, on all ranks. Then what the ranks have announced
                about it still holds, and they do not exchange the sizes of the transfers once more.
        """
        if self._possible and not self._installed and getattr(self._module, "_input_dists", None):
            self._install()
        uses_counts = self._installed and self._countable
        self._counts = counts_of(kjt) if uses_counts else None
        self._ahead = ahead
        if ahead and uses_counts and self._counts is None:
            _check_unchanged(kjt, self._module._env.process_group.rank())
        self._active = True
        try:
            return self._module.input_dist(context, kjt)
        finally:
            self._counts, self._active = None, False

    def _install(self) -> None:
        """TorchRec makes the exchanges of ids when the module is called for the first time.

        The object of a later fit replaces that of an earlier one. Calls that do not come from it go to TorchRec's own exchange.
        """
        self._installed = True
        for exchange in self._module._input_dists:
            if isinstance(exchange, RwSparseFeaturesDist) and exchange._world_size > 1:
                sizes = exchange._feature_block_sizes_tensor
                blocks = sizes.tolist() if _in_equal_blocks(exchange) else []
                ids = RowWiseIds(self._module._env.process_group, sizes.numel())
                forward = partial(type(exchange._dist).forward, exchange._dist)
                exchange._dist.forward = partial(self._send, forward, ids, blocks)

    def _send(
        self,
        forward: Callable[[KeyedJaggedTensor], Any],
        ids: RowWiseIds,
        blocks: list[int],
        divided: KeyedJaggedTensor,
    ) -> Any:
        """The exchange of ids that are ordered by owner, then by feature."""
        if not self._active or divided.variable_stride_per_key():
            return forward(divided)
        names = divided.keys()[: len(blocks)]
        known = self._counts
        if known is not None and blocks and [known.blocks.get(name) for name in names] == blocks:
            divided._length_per_key = list(
                chain.from_iterable(
                    [known.by_feature[name][owner] for name in names] for owner in range(ids.world_size)
                )
            )
            if self._ahead and all(name in known.arriving for name in names):
                counts, samples = zip(*(known.arriving[name] for name in names), strict=True)
                return ids.send(
                    divided, AnnouncedSizes([sum(column) for column in zip(*counts, strict=True)], samples[0])
                )
        return ids.send(divided)


def _check_unchanged(kjt: KeyedJaggedTensor, rank: int) -> None:
    """Refuse ids that have changed since the other ranks were told how many ids they get."""
    found = attached(kjt)
    if found is not None and found.arriving and found.version != contents_version(kjt):
        raise InputError(
            f"rank {rank}: the ids of the features {', '.join(found.arriving)} were changed in place before their batch was in "
            "training, after the other ranks were told how many of them they get. Change the ids in the data set or in collate_fn"
        )


def _in_equal_blocks(exchange: RwSparseFeaturesDist) -> bool:
    """Whether owner ``r`` of a row is the row's number divided by the rows of a rank."""
    positions = any(getattr(exchange, name, None) is not None for name in _ROW_POSITIONS)
    return not positions and not exchange._has_multiple_blocks_per_shard
