"""Validation and test of a sequence recommender: the held-out item of each user is ranked among the catalogue."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.batch.torchrec_types import KeyedJaggedTensor
from lightning_freescale.models.item_catalogue import ItemCatalogue
from lightning_freescale.models.metrics import MRR, NDCG, HitRate, target_ranks
from lightning_freescale.models.norm import unit_rows
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.runtime.log import log_once

# RankingEvaluation is combined with the LightningModule of `lightning` or of `pytorch_lightning`.
if TYPE_CHECKING:
    import lightning.pytorch as pl

    _Base = pl.LightningModule
else:
    _Base = object


def ranking_metrics() -> nn.ModuleDict:
    """The metrics of one stage, by the name under which they are logged."""
    metrics = {"hr@10": HitRate(10), "hr@50": HitRate(50), "ndcg@10": NDCG(10), "ndcg@50": NDCG(50), "mrr": MRR()}
    return nn.ModuleDict(metrics)


class RankingEvaluation(ItemCatalogue, _Base):
    """The hooks of validation and test of a LightningModule with ``embedding``, ``encode`` and ``feature_names``.

    ``validate`` and ``test`` log the same metrics, under ``val/`` and ``test/``. The hyperparameters ``max_eval_items``,
    ``filter_seen`` and ``temperature`` apply to both.
    """

    feature_names: list[str]
    embedding: Any

    def _make_metrics(self) -> None:
        """Call this at the end of ``__init__``."""
        self.metrics = nn.ModuleDict({"val": ranking_metrics(), "test": ranking_metrics()})
        self._catalogue: tuple[Tensor, Tensor] | None = None
        self._make_catalogue()

    def encode(self, embedded: Any, batch: SeqBatch) -> Tensor:
        """Output at every event, ``[sum(L), D]``, of length 1."""
        raise NotImplementedError

    def on_validation_epoch_start(self) -> None:
        self._look_up_catalogue()

    def on_test_epoch_start(self) -> None:
        self._look_up_catalogue()

    def on_validation_epoch_end(self) -> None:
        self._catalogue = None  # frees the embeddings

    def on_test_epoch_end(self) -> None:
        self._catalogue = None

    def validation_step(self, batch: SeqBatch, batch_idx: int) -> None:
        """Rank ``batch.targets`` by the output at the last event of each history. Log ``val/loss`` and the metrics."""
        self._evaluate(batch, "val")

    def test_step(self, batch: SeqBatch, batch_idx: int) -> None:
        """As :meth:`validation_step`, under ``test/``."""
        self._evaluate(batch, "test")

    def _look_up_catalogue(self) -> None:
        """Look up the embeddings of the catalogue. If the tables are sharded this is a collective, so every rank does it."""
        self.take_catalogue()
        known = None if self.catalogue_ids is None else self.catalogue_ids.cpu()  # sorted
        count, limit = self.catalogue_size, self.hparams["max_eval_items"]
        if count <= limit:
            ids = torch.arange(count)
        else:
            # The same items on every rank and in every epoch.
            ids = torch.tensor(sorted(random.Random(0).sample(range(count), limit)))
            log_once(f"validation ranks the target among {limit:,} random items of {count:,} (max_eval_items)")
        if known is not None:
            ids = known[ids]
        lengths = torch.zeros(len(self.feature_names), dtype=torch.int64)
        lengths[0] = len(ids)
        features = KeyedJaggedTensor(keys=self.feature_names, values=ids, lengths=lengths).to(self.device)
        items = self.embedding(features)[HISTORY].values()
        self._catalogue = ids.to(self.device), unit_rows(items)

    def _evaluate(self, batch: SeqBatch, stage: str) -> None:
        if batch.targets is None or self._catalogue is None:
            raise InputError(
                "targets: None; validation needs the held-out item of every sample, [B]: set SeqBatch.targets"
            )
        self.check_catalogue(batch.targets)
        embedded = self.embedding(self._with_targets(batch, batch.targets))
        outputs = self.encode(embedded, batch)[batch.lengths.cumsum(0) - 1]
        ids, items = self._catalogue
        temperature = self.hparams["temperature"]
        with torch.autocast(outputs.device.type, enabled=False):
            scores = outputs @ items.mT
            if self.hparams["filter_seen"]:
                scores = without_seen(scores, ids, batch)
            target_scores = (outputs * unit_rows(embedded[NEGATIVES].values())).sum(-1)
            is_target = batch.targets[:, None] == ids
            others = (scores / temperature).masked_fill(is_target, -torch.inf).logsumexp(-1)
            loss = F.softplus(others - target_scores / temperature).mean()
            ranks = target_ranks(scores, target_scores, is_target)
        size = batch.num_samples
        self.log(f"{stage}/loss", loss, batch_size=size, sync_dist=True)
        for name, metric in self.metrics[stage].items():  # type: ignore[union-attr, operator]
            metric.update(ranks)
            shown = name in ("hr@10", "ndcg@10")
            self.log(f"{stage}/{name}", metric, on_step=False, on_epoch=True, batch_size=size, prog_bar=shown)

    def _with_targets(self, batch: SeqBatch, targets: Tensor) -> KeyedJaggedTensor:
        """The features of the batch with the targets in place of the negatives, so that one lookup serves both."""
        self._check_features(batch, self.feature_names, optional=NEGATIVES)
        parts = {name: batch.features[name] for name in self.feature_names if name != NEGATIVES}
        ones = torch.ones_like(batch.lengths)
        values = [targets if name == NEGATIVES else parts[name].values() for name in self.feature_names]
        lengths = [ones if name == NEGATIVES else parts[name].lengths() for name in self.feature_names]
        return KeyedJaggedTensor(keys=self.feature_names, values=torch.cat(values), lengths=torch.cat(lengths))

    @staticmethod
    def _check_features(batch: SeqBatch, expected: list[str], optional: str | None = None) -> None:
        """Check the order of the features: sharded tables assume the order of the first batch and would look up wrong rows."""
        keys = batch.features.keys()
        if [key for key in keys if key != optional] != [key for key in expected if key != optional]:
            raise InputError(
                f"features: the batch has the keys {keys}, the model expects {expected}; name the features of the events in "
                "feature_sizes, in the order of the batch"
            )


def without_seen(scores: Tensor, ids: Tensor, batch: SeqBatch) -> Tensor:
    """``scores [B, N]`` of the items ``ids [N]``, with minus infinity for the items of the sample's own history.

    Args:
        scores: scores of the ranked items.
        ids: int64, sorted.
        batch: the histories. An item that was cut off because the history was too long does not count as seen.
    """
    history = batch.features[HISTORY].values()
    sample = torch.arange(len(scores), device=ids.device).repeat_interleave(batch.lengths)
    column = torch.searchsorted(ids, history).clamp_(max=len(ids) - 1)
    ranked = ids[column] == history
    return scores.index_put((sample[ranked], column[ranked]), scores.new_tensor(-torch.inf))
