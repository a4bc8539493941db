"""Checks a batch on the host before it is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.batch.contents import parts
from lightning_freescale.batch.seq_batch import SeqBatch, check_jagged
from lightning_freescale.runtime.errors import InputError


def check_batch(batch: Any, rows: Mapping[str, int]) -> None:
    """Raise :class:`InputError` for a batch that cannot be trained on; host tensors only, so there is no device sync.

    Args:
        batch: anything a loader yields.
        rows: number of rows of the table behind each feature.
    """
    if batch is None:
        raise InputError("batch: None; the loader or its collate_fn returned no batch")
    if isinstance(batch, SeqBatch) and batch.timestamps.device.type == "cpu":
        batch.validate()
    for features in parts(batch, KeyedJaggedTensor):
        if features.values().device.type != "cpu":
            continue
        if features.stride() == 0:
            raise InputError(f"{', '.join(features.keys())}: an empty batch (0 samples)")
        check_jagged(features, rows)
