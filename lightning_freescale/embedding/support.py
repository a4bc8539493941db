"""Which tables are exchanged prioritized, which synchronously, and why. The one place of these decisions.

The schedule and the exchange mode take their decisions and the reasons in their log lines from here.
``strategy/exchange_table.py`` makes the table of the documentation from them.
"""

from __future__ import annotations

from torchrec import PoolingType
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DataType

PRIORITIZED_SHARDINGS = (ShardingType.ROW_WISE.value, ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value)
PRIORITIZED_KERNELS = tuple(
    kernel.value
    for kernel in (
        EmbeddingComputeKernel.FUSED,
        EmbeddingComputeKernel.FUSED_UVM,
        EmbeddingComputeKernel.FUSED_UVM_CACHING,
    )
)

# Ends of "... is exchanged synchronously, because it is ...". The schedule finds them while it trains.
MORE_THAN_ONCE = "called more than once a step"
NOT_IN_BATCH = "called with features that are not part of the batch"
VARIABLE_BATCH_SIZE = "called with a batch size that varies by feature"
CHANGED_IDS = "called with ids that were changed in place after the batch was loaded"
OTHER_KEYS = "called with its features in another order than in the first step"
UNANNOUNCED_BACKWARD = "trained with loss.backward(); call self.manual_backward(loss) instead"
SEVERAL_BACKWARDS = "trained by more than one backward a step"
CHANGED_TABLES = "changed by user code between steps; call trainer.strategy.flush() on all ranks before each change"
WITHOUT_INSERTION = "called with gradients in evaluation mode, in which a table with zero-collision ids inserts none"
# These two do not make a module synchronous. They are ends of errors if a rank finds them alone.
OTHER_BATCH = "trained with another batch than the one whose ids were sent"
WITHOUT_GRADIENTS = "called in a step whose loss does not depend on its rows"
FOUND_IN_TRAINING = (
    MORE_THAN_ONCE,
    NOT_IN_BATCH,
    VARIABLE_BATCH_SIZE,
    CHANGED_IDS,
    OTHER_KEYS,
    UNANNOUNCED_BACKWARD,
    SEVERAL_BACKWARDS,
    CHANGED_TABLES,
    WITHOUT_INSERTION,
)

ACCUMULATION = "micro-batches of gradient accumulation"
ACCUMULATION_REASON = "no row changes before the last one; bags are exchanged at once after it"
SINGLE_RANK = "a single rank exchanges nothing with others"
MAPPED_IDS = "the model declares maps_ids = True, so the rows of a batch are not known in advance"
FEATURE_PROCESSORS = "feature processors, whose weights change in every step"
ROUNDED_AT_RANDOM = "FBGEMM rounds updates at random"
WEIGHTED_MEANS = "FBGEMM does not divide the gradients of weighted means on a CPU"


def reason_against_prioritizing(module: ShardedEmbeddingCollection | ShardedEmbeddingBagCollection) -> str | None:
    """Why the exchange of ``module`` cannot be prioritized, as the end of "because it ..."; None if it can.

    The answer depends on the plan and on the tables, which are the same on all ranks.
    """
    bags = isinstance(module, ShardedEmbeddingBagCollection)
    for table, sharding in module.module_sharding_plan.items():
        if sharding.sharding_type not in PRIORITIZED_SHARDINGS:
            return f"has a table {table!r} with {sharding.sharding_type} sharding"
        if sharding.compute_kernel not in PRIORITIZED_KERNELS:
            return f"has a table {table!r} with the compute kernel {sharding.compute_kernel}"
    return _reason_against_types(module) or (_reason_against_bags(module) if bags else None)


def _reason_against_types(module: ShardedEmbeddingCollection | ShardedEmbeddingBagCollection) -> str | None:
    bags = isinstance(module, ShardedEmbeddingBagCollection)
    for config in module._embedding_bag_configs if bags else module._embedding_configs:
        if config.data_type != DataType.FP32 and module._device.type == "cuda":
            return f"has a table {config.name!r} of type {config.data_type.name} on CUDA, where {ROUNDED_AT_RANDOM}"
    return None


def _reason_against_bags(module: ShardedEmbeddingBagCollection) -> str | None:
    if module._is_weighted and any(config.pooling == PoolingType.MEAN for config in module._embedding_bag_configs):
        return f"pools weighted bags by their mean, and {WEIGHTED_MEANS}"
    return None
