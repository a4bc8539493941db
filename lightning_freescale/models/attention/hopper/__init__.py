"""HSTU attention without bias for Hopper GPUs (sm_90a), written in CUDA C++ and compiled when first used.

``forward.cuh`` and ``backward.cuh`` say how the kernels work. This package imports PyTorch and nothing else of
:mod:`lightning_freescale`.
"""

from .function import attention, available, supports
from .plan import Plan, plan

__all__ = ["Plan", "attention", "available", "plan", "supports"]
