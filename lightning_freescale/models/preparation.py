"""HSTU plans the attention of a batch before the lookup. It plans the next batch at the end of the backward, if it knows it.

The plan of the attention depends on the lengths and times of the histories alone. With a strategy that knows the next batch, a
step makes the plan of the next step at the end of its own backward. The GPU computes it there while gradients and rows
travel to other ranks, and the next forward begins earlier. The values are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_freescale.batch.seq_batch import HISTORY, SeqBatch
from lightning_freescale.models.even_rows import add_rows, pad_keys
from lightning_freescale.models.layer_graphs.registry import graphs_of, plans_of
from lightning_freescale.models.sequences import Attention, PreparedHistories
from lightning_freescale.runtime.log import log_once

if TYPE_CHECKING:
    from lightning_freescale.models.hstu import HSTUMixin

MAX_MISSES = 3  # plans in a row that no step used; then no plans are made ahead


class PlannedBatch(NamedTuple):
    """A batch whose plan was made before its step.

    Args:
        batch: the batch.
        parts: what the plan depends on: the features, the lengths and the times.
        versions: numbers of changes in place of the lengths and times.
        settings: those of the model for which the plan was made.
        attention: the attention with the plan.
    """

    batch: SeqBatch
    parts: tuple[Any, ...]
    versions: tuple[int, ...]
    settings: tuple[bool, ...]
    attention: Attention

    @staticmethod
    def of(model: HSTUMixin, batch: SeqBatch, attention: Attention) -> PlannedBatch:
        """``batch`` as it is now."""
        lengths, times = batch.features.lengths(), batch.timestamps
        versions, settings = (lengths._version, times._version), (model.drops, model.hparams["cuda_graphs"])
        return PlannedBatch(batch, (batch.features, lengths, times), versions, settings, attention)

    def fits(self, model: HSTUMixin, batch: SeqBatch) -> bool:
        """Whether ``batch`` is this one, and nothing has changed that the plan depends on."""
        if batch is not self.batch:
            return False
        now = PlannedBatch.of(model, batch, self.attention)
        same = all(one is other for one, other in zip(self.parts, now.parts, strict=True))
        return same and self.versions == now.versions and self.settings == now.settings


class AheadPlan:
    """The plan of the next batch of one model, if it has been made.

    Attributes:
        used: number of batches whose plan was made before their step.
    """

    def __init__(self) -> None:
        self.used = 0
        self._planned: PlannedBatch | None = None
        self._misses = 0

    @property
    def is_worth_it(self) -> bool:
        """Whether steps train on the batches that the strategy has announced."""
        return self._misses < MAX_MISSES

    def put(self, planned: PlannedBatch) -> None:
        """Keep the plan of the next batch."""
        self._planned = planned

    def drop(self) -> None:
        """Forget the plan, which keeps its batch in memory, and the plans that no step used."""
        self._planned, self._misses = None, 0

    def take(self, model: HSTUMixin, batch: SeqBatch) -> Attention | None:
        """The plan of ``batch``; ``None`` if there is none, or if user code has changed the batch since."""
        planned, self._planned = self._planned, None
        if planned is None:
            return None
        if planned.fits(model, batch):
            self.used, self._misses = self.used + 1, 0
            return planned.attention
        self._misses += 1
        if not self.is_worth_it:
            log_once(
                "HSTU: the attention of a batch is planned in its own step, because steps trained on other batches than "
                "those that the strategy had announced"
            )
        return None


def offsets_of(batch: SeqBatch) -> Tensor:
    """Offsets ``[B + 1]`` int64 of the histories."""
    return batch.by_key[HISTORY].offsets().long()


def plan_histories(model: HSTUMixin, batch: SeqBatch, offsets: Tensor) -> Attention:
    """The attention over the histories of ``batch``, with added rows where the model adds some.

    Args:
        offsets: those of the histories, ``[B + 1]`` int64.
    """
    times = batch.timestamps
    if model.adds_rows(batch):
        offsets, times = add_rows(offsets, times)
    return Attention(offsets, times, model.has_bias)


def prepare_histories(model: HSTUMixin, batch: SeqBatch) -> PreparedHistories:
    """What the layers of ``model`` need of ``batch`` beside its embeddings."""
    keys, attention = model.dropout_keys(batch), None
    if not model.attends_to_whole_histories(batch):
        return PreparedHistories(batch, keys, attention)
    trains = torch.is_grad_enabled() and model.training
    ahead = plans_of.setdefault(model.layers[0], AheadPlan()) if trains else None
    attention = None if ahead is None else ahead.take(model, batch)
    planned = attention is not None
    attention = plan_histories(model, batch, offsets_of(batch)) if attention is None else attention
    if keys is not None:
        keys = pad_keys(keys, len(attention.timestamps))
    if batch.timestamps.is_cuda:
        from lightning_freescale.models.fused_layer import prepare_layers  # Triton is on CUDA machines only

        layers, graphs = list(model.layers), model.hparams["cuda_graphs"]
        prepare_layers(layers, attention.plan, keys is not None, graphs, planned, then=plan_next(model, ahead))
    return PreparedHistories(batch, keys, attention)


def plan_next(model: HSTUMixin, ahead: AheadPlan | None) -> Callable[[torch.dtype], None] | None:
    """A function that plans the next batch; ``None`` if the strategy of ``model`` knows no next batches.

    Its argument is the type of the arrays of the layers.
    """
    trainer: Any = getattr(model, "_trainer", None)
    next_batch = getattr(getattr(trainer, "strategy", None), "next_batch", None)
    if ahead is None or next_batch is None or not ahead.is_worth_it:
        return None
    return partial(_plan_next, weakref.ref(model), ahead, next_batch)


def _plan_next(
    model_ref: Callable[[], HSTUMixin | None],
    ahead: AheadPlan,
    next_batch: Callable[[], Any],
    dtype: torch.dtype,
) -> None:
    model, batch = model_ref(), next_batch()
    if model is None or not isinstance(batch, SeqBatch) or HISTORY not in batch.features.keys():  # noqa: SIM118 - not a mapping
        return
    graphs = graphs_of.get(model.layers[0])
    if not model.attends_to_whole_histories(batch) or (graphs is not None and graphs.is_busy()):
        return
    # TorchRec would keep the offsets that it computes, and user code may still change the lengths.
    attention = plan_histories(model, batch, F.pad(batch.lengths.long().cumsum(0), (1, 0)))
    if batch.timestamps.is_cuda:
        from lightning_freescale.models.fused_layer import plan_layers  # Triton is on CUDA machines only

        plan_layers(list(model.layers), attention.plan, dtype, model.drops, model.hparams["cuda_graphs"])
    ahead.put(PlannedBatch.of(model, batch, attention))


def drop_plan(model: HSTUMixin) -> None:
    """Drop the plan of a next batch at the end of a training."""
    ahead = plans_of.get(model.layers[0])
    if ahead is not None:
        ahead.drop()
