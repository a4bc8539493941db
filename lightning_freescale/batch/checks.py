"""``check_batch``: checks a batch of any type on the host before the training uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.batch.contents import find_parts
from lightning_freescale.batch.jagged_checks import check_ids, check_lengths
from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.runtime.errors import InputError

MAPS_IDS_ADVICE = (
    ". If the model makes rows of other ids itself, for example by hashing, set its class attribute maps_ids = True"
)


def check_batch(batch: Any, rows: Mapping[str, int]) -> None:
    """Raise :class:`InputError` if the batch cannot be trained on.

    The function skips tensors that are not in host memory, so it never waits for a device.

    Args:
        batch: any object that a loader yields.
        rows: number of rows of the embedding table of each feature.
    """
    if batch is None:
        raise InputError("batch: None; the loader or its collate_fn returned no batch")
    validated = None
    if isinstance(batch, SeqBatch) and batch.timestamps.device.type == "cpu":
        batch.validate()
        validated = batch.features
    for features in find_parts(batch, KeyedJaggedTensor):
        if features.values().device.type != "cpu":
            continue
        if features is not validated:
            if features.stride() == 0:
                raise InputError(f"{', '.join(features.keys())}: an empty batch (0 samples)")
            check_lengths(features)
            _check_weights(features)
        check_ids(features, rows, MAPS_IDS_ADVICE)


def _check_weights(features: KeyedJaggedTensor) -> None:
    """Raise :class:`InputError` unless there is a weight for each value. TorchRec would read memory behind the weights."""
    weights, values = features.weights_or_none(), features.values()
    if weights is not None and len(weights) != len(values):
        raise InputError(f"{', '.join(features.keys())}: {len(weights)} weights for {len(values)} values")
