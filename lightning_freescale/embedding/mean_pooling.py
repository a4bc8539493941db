"""Collections of bags with mean pooling that TorchRec would divide wrongly.

TorchRec pools the bags of row-wise tables by their sum, and divides the sums of a mean by the lengths of the bags afterwards. It
divides all features of the collection, by one where it knows that a feature is pooled by its sum. It does not know this of tables
with another sharding, and for all but the first table of a shared feature. Such bags would silently be divided as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torchrec import PoolingType
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from lightning_freescale.runtime.errors import ConfigurationError

_DIVIDED_LATER = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)


def has_means(configs: Sequence[BaseEmbeddingConfig]) -> bool:
    """Whether any of these tables pools bags by their mean."""
    return any(getattr(config, "pooling", None) == PoolingType.MEAN for config in configs)


def refuse_wrong_means(name: str, configs: Sequence[BaseEmbeddingConfig], plan: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigurationError` if TorchRec would divide bags of a collection that are no means of row-wise tables.

    Args:
        name: name of the collection.
        configs: its tables.
        plan: TorchRec's ``ParameterSharding`` of each table.
    """
    later = [config for config in configs if plan[config.name].sharding_type in _DIVIDED_LATER]
    if not has_means(later):
        return
    mean = next(config.name for config in later if has_means([config]))
    others = [config.name for config in configs if config not in later]
    if others:
        raise ConfigurationError(
            f"{name}: table {mean!r} is row-wise and pools by the mean, and table {others[0]!r} has another sharding "
            f"({plan[others[0]].sharding_type}). TorchRec would divide the bags of {others[0]!r} by their lengths once more. "
            "Shard all tables of the collection row-wise, or none, or put the two into collections of their own"
        )
    uses = Counter(feature for config in configs for feature in config.feature_names)
    shared = [feature for config in configs if not has_means([config]) for feature in config.feature_names]
    shared = [feature for feature in shared if uses[feature] > 1]
    if shared:
        raise ConfigurationError(
            f"{name}: table {mean!r} is row-wise and pools by the mean, and several tables share the feature {shared[0]!r}, "
            "of which at least one pools by the sum. TorchRec would divide these sums. Put tables that pool by the mean into a "
            "collection of their own"
        )
