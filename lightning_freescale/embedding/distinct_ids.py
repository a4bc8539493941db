"""``dedup``: a rank requests each distinct row of its batch once, and sums the gradients of a row before it sends them.

TorchRec does both. It finds the distinct ids with an operator of FBGEMM that has no CPU kernel, so this file adds one. With
``dedup="auto"`` the first training batch decides for each module whether it has enough repeated ids.

The order of a gradient sum. Without ``dedup`` the owner adds all gradients of a row: by requester, then in the order of the
batch. With ``dedup`` each requester adds its own gradients of the row in the order of the batch, and the owner adds these sums in
the order of the ranks. Both are sums of the same numbers, and differ in rounding. The prioritized and the synchronous exchange
use the same order if they have the same setting.
"""

from __future__ import annotations

from typing import Any, Literal

import fbgemm_gpu  # noqa: F401 - defines the operator
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding.zero_collision.sharded import ShardedZeroCollisionCollection
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once

Dedup = bool | Literal["auto"]
# "auto" keeps dedup if at least this share of the ids of the first batch repeats another one. A repeated id saves the transfer of
# a row and of a gradient. All ids pay for it, because they are sorted.
MIN_REPEATED = 0.1
_OPERATOR = "jagged_unique_indices"
_library: torch.library.Library | None = None  # the kernel exists as long as this object


def check_dedup(dedup: Any) -> None:
    """Raise :class:`ConfigurationError` unless ``dedup`` is a valid option of the strategy."""
    if not isinstance(dedup, bool) and dedup != "auto":
        raise ConfigurationError(f"dedup={dedup!r} is unknown; choose one of True, False, 'auto'")


def distinct_ids(
    hash_size_cumsum: Tensor, hash_size_offsets: Tensor, offsets: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The distinct ids of each table, as ``fbgemm::jagged_unique_indices`` computes them on CUDA.

    Features of one table are searched together. The distinct ids of a table are sorted, and they are spread evenly over the
    samples of its features: only their number matters to the exchange.

    Args:
        hash_size_cumsum: ``[T + 1]`` int64, first row key of each feature; the rows of a table count at its last feature.
        hash_size_offsets: ``[T + 1]`` int64, where the features of a table begin and end, at the index of its first feature.
        offsets: ``[T * B + 1]`` int64, where the ids of each feature and sample start.
        indices: ``[m]`` int64 ids.

    Returns:
        ``[T * B]`` lengths, ``[T * B + 1]`` offsets, ``[u]`` distinct ids, and ``[m]`` position of each id among them.

    >>> one_table = torch.tensor([0, 10])
    >>> distinct_ids(one_table, torch.tensor([0, 1]), torch.tensor([0, 2, 4]), torch.tensor([7, 3, 3, 7]))[2:]
    (tensor([3, 7]), tensor([1, 0, 0, 1]))
    """
    features = hash_size_cumsum.numel() - 1
    samples = (offsets.numel() - 1) // features
    ids_per_feature = offsets[torch.arange(features + 1) * samples].diff()
    keys, position = torch.unique(
        indices + hash_size_cumsum[:-1].repeat_interleave(ids_per_feature), return_inverse=True
    )
    bounds = torch.searchsorted(keys, hash_size_cumsum)  # [T + 1] where the keys of each feature start
    distinct = keys - hash_size_cumsum[:-1].repeat_interleave(bounds.diff())
    lengths = torch.zeros(features * samples, dtype=torch.int64)
    for begin, end in zip(hash_size_offsets[:-1].tolist(), hash_size_offsets[1:].tolist(), strict=True):
        places = (end - begin) * samples
        if places:
            each, left_over = divmod(int(bounds[end] - bounds[begin]), places)
            lengths[begin * samples : end * samples] = each
            lengths[begin * samples : begin * samples + left_over] += 1
    return lengths, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), distinct, position


def add_cpu_kernel() -> None:
    """Give FBGEMM's operator a CPU kernel, unless it has one."""
    global _library
    one_feature, no_ids = torch.tensor([0, 1]), torch.tensor([], dtype=torch.int64)
    try:
        getattr(torch.ops.fbgemm, _OPERATOR)(one_feature, one_feature, torch.tensor([0, 0]), no_ids)
    except NotImplementedError:
        _library = torch.library.Library("fbgemm", "IMPL")
        _library.impl(_OPERATOR, distinct_ids, "CPU")


class DedupTrial:
    """Decides for one module with ``dedup="auto"``: a forward pre-hook that counts the repeated ids of the first training batch.

    The ranks add their counts, so all ranks decide the same. The decision depends on the data alone, so it is the same in the
    synchronous and in the prioritized exchange. Before it, rows are requested once each.
    """

    def __init__(self, name: str, module: ShardedEmbeddingCollection | ShardedZeroCollisionCollection):
        self._name, self._module = name, module
        self._tables = [list(config.feature_names) for config in module._embedding_configs]
        self._hook = module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        features = args[0] if args else kwargs.get("features")
        if not (module.training and torch.is_grad_enabled() and isinstance(features, KeyedJaggedTensor)):
            return
        self._hook.remove()
        by_key = features.to_dict()
        ids = [torch.cat([by_key[key].values() for key in keys]) for keys in self._tables]
        distinct = sum(table.unique().numel() for table in ids)
        counts = torch.tensor([sum(table.numel() for table in ids), distinct], device=features.device())
        dist.all_reduce(counts)
        total, distinct = counts.tolist()
        repeated = 1 - distinct / total if total else 0.0
        self._module._use_index_dedup = repeated >= MIN_REPEATED
        verdict = "each distinct row travels once" if self._module._use_index_dedup else "each id has a row of its own"
        log_once(
            f"dedup='auto': {self._name}: {repeated:.1%} of the ids of the first batch are repeated, so {verdict} "
            f"(from {MIN_REPEATED:.0%} on, rows travel once)"
        )
