"""Names of the variants that benchmarks compare. They are keys in stored results."""

from __future__ import annotations

# Parts of a step, measured alone.
DENSE_ONLY = "dense alone"  # the dense layers, with the embedding rows already on the rank
COMPUTE_ONLY = "compute alone"  # dense layers, lookups and updates; no row travels

# Baselines.
TORCHREC_BASE = "TrainPipelineBase"
TORCHREC_SPARSE_DIST = "TrainPipelineSparseDist"
SYNC = "freescale_sync"

# benchmarks.exposed
PRIORITIZED = "prioritized"

# benchmarks.end_to_end: one technique at a time, then all of them.
BALANCE = "+ balance"
PRIORITIZE = "+ prioritize"
SM_FREE = "+ SM-free"
ALL_OVER_NCCL = "all over NCCL"
ALL_OVER_TCP = "all over TCP"
ALL = "all"

FREESCALE = "freescale"  # the strategy with its default settings

EXCHANGE_VARIANTS = (TORCHREC_BASE, TORCHREC_SPARSE_DIST, SYNC, PRIORITIZED)
TRAINING_VARIANTS = (
    DENSE_ONLY,
    TORCHREC_BASE,
    TORCHREC_SPARSE_DIST,
    SYNC,
    BALANCE,
    PRIORITIZE,
    SM_FREE,
    ALL_OVER_NCCL,
    ALL_OVER_TCP,
    ALL,
)

# Softmax attention of PyTorch, which the attention of HSTU is compared with.
FLASH, FLEX = "softmax, flash", "softmax, flex"
