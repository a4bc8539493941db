"""How many ids of a batch each rank owns, counted while the ids are still in host memory.

The row-wise exchange of ids first tells every rank how many ids it will get. TorchRec counts the ids on the device, and
the host waits for the result. In short steps this wait is a large part of the host's time: the kernels that count share the GPU
with the compute of the step. A batch that comes from a loader is in host memory before, so the ids are counted there, and
``id_exchange.py`` gets the counts with the ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale import _C
from lightning_freescale.embedding.batch_contents import contents_version
from lightning_freescale.embedding.id_exchange import AnnouncedSizes, IdsByOwner, RowWiseIds
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
        self._only: RwSparseFeaturesDist | None = None  # the exchange of all ids of the module, if it is a single one

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
            return (
                self._only_exchange(context, kjt) if self._has_one_exchange(kjt) else self._all_exchanges(context, kjt)
            )
        finally:
            self._counts, self._active = None, False

    def _all_exchanges(self, context: Any, kjt: KeyedJaggedTensor) -> Any:
        sent = self._module.input_dist(context, kjt)
        sent._module_fqn = None  # a name for ranges of the profiler, which take the host some time
        return sent

    def _has_one_exchange(self, kjt: KeyedJaggedTensor) -> bool:
        """Whether ``module.input_dist`` would call a single exchange with ``kjt`` itself."""
        if self._only is None or self._module._use_index_dedup or kjt.variable_stride_per_key():
            return False
        return len(kjt.keys()) == self._only._feature_block_sizes_tensor.numel()

    def _only_exchange(self, context: Any, kjt: KeyedJaggedTensor) -> Any:
        """What ``module.input_dist`` does then, without its further work for the host."""
        assert self._only is not None
        sizes = self._only.forward(kjt)
        position = self._only.unbucketize_permute_tensor
        context.sharding_contexts.append(
            SequenceShardingContext(features_before_input_dist=kjt, unbucketize_permute_tensor=position)
        )
        return KJTListSplitsAwaitable([sizes], context)

    def _install(self) -> None:
        """TorchRec makes the exchanges of ids when the module is called for the first time.

        The object of a later fit replaces that of an earlier one. Calls that do not come from it go to TorchRec's own exchange.
        """
        self._installed = True
        for exchange in self._module._input_dists:
            if isinstance(exchange, RwSparseFeaturesDist) and exchange._world_size > 1 and _is_plain(exchange):
                sizes = exchange._feature_block_sizes_tensor
                ids = RowWiseIds(self._module._env.process_group, sizes.numel())
                forward = partial(type(exchange).forward, exchange)
                exchange.forward = partial(self._send, forward, exchange, ids, sizes.tolist())
                alone = len(self._module._input_dists) == 1 and not self._module._features_order
                if alone and type(self._module) is ShardedEmbeddingCollection:
                    self._only = exchange

    def _send(
        self,
        forward: Callable[[KeyedJaggedTensor], Any],
        exchange: RwSparseFeaturesDist,
        ids: RowWiseIds,
        blocks: list[int],
        features: KeyedJaggedTensor,
    ) -> Any:
        """What ``exchange(features)`` does: order the ids by owner, and start to send them."""
        if not self._active or features.variable_stride_per_key():
            return forward(features)
        values, sizes = features.values(), exchange._feature_block_sizes_tensor
        lengths, values, weights, _, position = torch.ops.fbgemm.block_bucketize_sparse_features(
            features.lengths().view(-1),
            values,
            False,  # positions in the bags
            exchange._is_sequence,
            sizes.to(values.dtype),
            ids.world_size,
            features.weights_or_none(),
        )
        vars(exchange)["unbucketize_permute_tensor"] = position  # ``setattr`` of a module takes longer
        names, by_owner, announced = features.keys(), None, None
        known = self._counts
        if known is not None and [known.blocks.get(name) for name in names] == blocks:
            by_owner = _sum_columns([known.by_feature[name] for name in names])
            if self._ahead and all(name in known.arriving for name in names):
                arriving = [known.arriving[name] for name in names]
                announced = AnnouncedSizes(_sum_columns([counts for counts, _ in arriving]), arriving[0][1])
        return ids.send(IdsByOwner(names, lengths, values, weights, features.stride(), by_owner), announced)


def _check_unchanged(kjt: KeyedJaggedTensor, rank: int) -> None:
    """Refuse ids that have changed since the other ranks were told how many ids they get."""
    found = attached(kjt)
    if found is not None and found.arriving and found.version != contents_version(kjt):
        raise InputError(
            f"rank {rank}: the ids of the features {', '.join(found.arriving)} were changed in place before their batch was in "
            "training, after the other ranks were told how many of them they get. Change the ids in the data set or in collate_fn"
        )


def _sum_columns(rows: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _is_plain(exchange: RwSparseFeaturesDist) -> bool:
    """Whether owner ``r`` of a row is the row's number divided by the rows of a rank, and nothing but ids and weights travels."""
    positions = any(getattr(exchange, name, None) is not None for name in _ROW_POSITIONS)
    further = exchange._has_feature_processor or exchange._need_pos or exchange._keep_original_indices
    return not positions and not exchange._has_multiple_blocks_per_shard and not further
