"""HSTU attention for Hopper GPUs (sm_90a), written in CUDA C++ and compiled when first used.

``forward.cuh``, ``backward.cuh`` and ``bias.cuh`` say how the kernels work. This package imports PyTorch and nothing else of
:mod:`lightning_freescale`.

* :mod:`.function`: the attention, differentiable.
* :mod:`.plan`: which tile of which history each block works on.
* :mod:`.config`: sizes of tiles by head width.
* :mod:`.compiler`: compiles the kernels.
* :mod:`.driver`: starts them through the CUDA driver.
"""

from .config import BIAS_SLOTS, RECORD_EVENTS
from .function import SILU_BLOCKS, Silu, attention, available, backward, forward, prepare, supports
from .plan import Plan, plan

__all__ = [
    "BIAS_SLOTS",
    "RECORD_EVENTS",
    "SILU_BLOCKS",
    "Plan",
    "Silu",
    "attention",
    "available",
    "backward",
    "forward",
    "plan",
    "prepare",
    "supports",
]
