"""Weights of losses and logged means when ranks hold different numbers of samples or tokens.

Lightning and DDP average over the ranks as if all ranks held equally many samples. If each rank first multiplies its
value by its share, the plain mean over the ranks is the mean over the global batch:

    >>> losses, weights = [0.5, 2.0], [3, 1]
    >>> sum(loss * share(weights, rank) for rank, loss in enumerate(losses)) / 2  # (3 * 0.5 + 1 * 2.0) / 4
    0.875
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_freescale.batch.contents import find_parts
from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.runtime.log import log_once

REDUCTIONS = ("sample", "token")
UNKNOWN = -1  # the weight of a batch of which it is not known how many samples it has
MEANS = ("mean", "avg", dist.ReduceOp.AVG)  # The names that Lightning uses for a mean.


def share(weights: Sequence[int], rank: int) -> float:
    """The factor of the value of ``rank``: its weight over the mean weight. It is 1 if all weights are equal.

    Args:
        weights: ``[ranks]``, samples or tokens of each rank; empty if they are not known.
        rank: this rank.
    """
    if len(set(weights)) <= 1:
        return 1.0
    return weights[rank] * len(weights) / sum(weights)


def weigh(value: Tensor, weights: Sequence[int], rank: int) -> Tensor:
    """``value`` multiplied by its :func:`share`. A mean over no samples, which is often NaN, becomes 0."""
    portion = share(weights, rank)
    if portion == 1.0:
        return value
    return value * portion if portion else torch.zeros_like(value)


def mean_of_counts(total: Tensor, ranks: int) -> Tensor:
    """``total / ranks``: an integer if the division is exact, a floating-point number otherwise.

    Lightning truncates the mean of the batch sizes to an integer: 3 and 4 samples would count as 3.
    """
    mean = total.div(ranks, rounding_mode="floor")
    if torch.equal(mean * ranks, total):
        return mean
    at_least_float32 = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return (total.double() / ranks).to(at_least_float32)


def loss_weight(batch: Any, reduction: str, module: Any = None) -> int:
    """The weight of a mean loss over this rank's batch in the mean over all ranks; :data:`UNKNOWN` if it is not known.

    Args:
        batch: any batch in host memory.
        reduction: ``"sample"`` counts the stride of the KeyedJaggedTensors, the lengths of the JaggedTensors, or the rows of the
            tensors, if all of them have equally many. ``"token"`` counts the predicted positions of the histories, which is
            one less than the events of each history; for batches of other types it counts all ids of the first jagged tensor.
        module: the LightningModule. Its method ``loss_denominator(batch)``, if it has one, is asked first.
    """
    if callable(count := getattr(module, "loss_denominator", None)):
        return _checked(count(batch))
    if isinstance(batch, SeqBatch):
        return batch.timestamps.numel() - batch.num_samples if reduction == "token" else batch.num_samples
    jagged = list(find_parts(batch, KeyedJaggedTensor)) or list(find_parts(batch, JaggedTensor))
    samples = {_samples(part) for part in jagged}
    if len(samples) == 1:
        return jagged[0].values().size(0) if reduction == "token" else samples.pop()
    if samples:
        return _unknown(
            f"loss_reduction={reduction!r}: the {type(jagged[0]).__name__}s of a batch have different numbers of samples"
        )
    rows = {tensor.size(0) for tensor in find_parts(batch, Tensor) if tensor.ndim}
    if len(rows) == 1 and reduction == "sample":
        return rows.pop()
    if rows:
        return _unknown(
            f"loss_reduction={reduction!r}: the batches hold no jagged tensor, and "
            + ("their tensors have different numbers of rows" if reduction == "sample" else "so no tokens to count")
        )
    return 1


def _samples(jagged: KeyedJaggedTensor | JaggedTensor) -> int:
    return jagged.stride() if isinstance(jagged, KeyedJaggedTensor) else jagged.lengths().numel()


def _unknown(reason: str) -> int:
    log_once(
        f"{reason}. So it is not known what the loss of a batch is a mean over, and all ranks count the same, as with plain DDP. "
        "If their batches differ in size, add a method loss_denominator(batch) to the model that returns that number",
        logging.WARNING,
    )
    return UNKNOWN


def _checked(count: Any) -> int:
    number = int(count)
    if number != count or number < 0:
        raise InputError(f"loss_denominator: {count}, but it must be an integer that is not negative")
    return number


def known_weights(weights: Sequence[int], has_batch: Sequence[bool]) -> list[int]:
    """``weights [ranks]``; if one of them is :data:`UNKNOWN`, all ranks with a batch count the same."""
    return [int(has) for has in has_batch] if UNKNOWN in weights else list(weights)
