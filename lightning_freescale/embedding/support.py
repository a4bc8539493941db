"""Which tables are exchanged prioritized, which synchronously, and why. The one place of these decisions.

The schedule and the exchange mode take their decisions and the reasons in their log lines from here.
"""

from __future__ import annotations

from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ShardingType

PRIORITIZED_SHARDINGS = (ShardingType.ROW_WISE.value, ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value)
PRIORITIZED_KERNELS = (EmbeddingComputeKernel.FUSED.value,)


def reason_against_prioritizing(module: ShardedEmbeddingCollection) -> str | None:
    """Why the exchange of ``module`` cannot be prioritized, as the end of "because it ..."; None if it can.

    The answer depends on the plan, which is the same on all ranks.
    """
    for table, sharding in module.module_sharding_plan.items():
        if sharding.sharding_type not in PRIORITIZED_SHARDINGS:
            return f"has a table {table!r} with {sharding.sharding_type} sharding"
        if sharding.compute_kernel not in PRIORITIZED_KERNELS:
            return f"has a table {table!r} with the compute kernel {sharding.compute_kernel}"
    return None
