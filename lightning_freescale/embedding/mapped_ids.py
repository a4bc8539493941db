"""Models that make rows of the ids of their batches themselves, for example by hashing. They declare ``maps_ids = True``.

The ids of their batches are no rows, so they are neither checked in advance nor requested. They are checked when a collection
is called.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.batch.jagged_checks import check_ids


def maps_ids(module: nn.Module) -> bool:
    """Whether the model declares it."""
    return bool(getattr(module, "maps_ids", False))


def check_in_calls(module: nn.Module, rows: Mapping[str, int]) -> None:
    """Check the ids that the sharded collections in ``module`` are called with. On CUDA, each call waits for them.

    Args:
        rows: number of rows of the table of each feature.
    """
    for child in module.modules():
        if isinstance(child, ShardedModule):
            child.register_forward_pre_hook(functools.partial(_check, rows), with_kwargs=True)


def _check(rows: Mapping[str, int], _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    features = arguments[0] if arguments else options.get("features")
    if isinstance(features, KeyedJaggedTensor):
        check_ids(features.to("cpu"), rows)
