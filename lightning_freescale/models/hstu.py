"""HSTU (arXiv 2402.17152): a generative sequence recommender, jagged from the lookup to the loss."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.models.attention import hstu_attention, plan_attention
from lightning_freescale.models.attention.buckets import num_buckets
from lightning_freescale.models.loss import sampled_softmax
from lightning_freescale.models.metrics import NDCG, HitRate, target_ranks
from lightning_freescale.models.norm import gated_layer_norm, layer_norm, unit_rows
from lightning_freescale.runtime.errors import ConfigurationError, InputError
from lightning_freescale.runtime.log import log_once

ITEM_TABLE = "item"
TIME_BUCKETS = num_buckets(2**31 - 1)

# The mixin is written against LightningModule and combined with either namespace's.
if TYPE_CHECKING:
    _Module = pl.LightningModule
else:
    _Module = object


class HSTULayer(nn.Module):
    """On flat ``[sum(L), D]``: ``x + f2(norm(attention(q, k, v)) * u)`` with ``u, v, q, k = silu(f1(norm(x)))``."""

    def __init__(
        self, dim: int, heads: int, qk_dim: int, v_dim: int, position_buckets: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads = heads
        self.split = [heads * v_dim, heads * v_dim, heads * qk_dim, heads * qk_dim]
        self.norm = nn.LayerNorm(dim)
        self.f1 = nn.Linear(dim, sum(self.split))
        self.position_bias = nn.Parameter(torch.zeros(position_buckets))
        self.time_bias = nn.Parameter(torch.zeros(TIME_BUCKETS))
        self.attention_norm = nn.LayerNorm(heads * v_dim)
        self.dropout = nn.Dropout(dropout)
        self.f2 = nn.Linear(heads * v_dim, dim)

    def forward(self, x: Tensor, offsets: Tensor, timestamps: Tensor, plan: Any) -> Tensor:
        u, v, q, k = F.silu(self.f1(layer_norm(self.norm, x))).split(self.split, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in (q, k, v))
        attended = hstu_attention(q, k, v, offsets, timestamps, self.position_bias, self.time_bias, plan=plan)
        return x + self.f2(self.dropout(gated_layer_norm(self.attention_norm, attended.flatten(1), u)))


class HSTUMixin(_Module):
    """All of :class:`HSTU`, for the LightningModule of either namespace.

    Args:
        num_items: size of the catalogue; ids are ``0`` to ``num_items - 1``.
        embedding_dim: width ``D`` of the tables and of the layers.
        num_layers: HSTU layers.
        num_heads: attention heads.
        qk_dim: width of a head's queries and keys, ``D / num_heads`` by default.
        v_dim: width of a head's values, ``D / num_heads`` by default.
        max_history: longest history expected, in events; sizes the position bias. Longer ones work, and share the bias
            of the longest distance.
        feature_sizes: rows of the table of each categorical feature of the events; embeddings are added to the item's.
        temperature: of the softmax over cosines.
        dropout: on the gated attention output, off by default.
        lr: of AdamW. Tables sharded by the strategy have their own optimizer, set there.
        weight_decay: of AdamW.
        warmup_steps: steps of linear warm-up of the learning rate.
        max_steps: steps after which a cosine has brought the learning rate to 0; constant if absent.
        max_eval_items: validation ranks the whole catalogue up to this size; beyond, a random part and the target.
        meta_tables: declare the tables on the meta device, for tables that no single rank can hold. The strategy that
            shards them draws their rows; without such a strategy the model cannot run.
    """

    loss_reduction = "token"
    log_q: Tensor | None

    def __init__(
        self,
        num_items: int,
        *,
        embedding_dim: int = 64,
        num_layers: int = 2,
        num_heads: int = 2,
        qk_dim: int | None = None,
        v_dim: int | None = None,
        max_history: int = 2048,
        feature_sizes: Mapping[str, int] | None = None,
        temperature: float = 0.05,
        dropout: float = 0.0,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        max_steps: int | None = None,
        max_eval_items: int = 50_000,
        meta_tables: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if embedding_dim % num_heads and (qk_dim is None or v_dim is None):
            raise ConfigurationError(
                f"num_heads: {num_heads} does not divide embedding_dim {embedding_dim}; give qk_dim and v_dim"
            )
        self.num_items = num_items
        self.feature_names = [HISTORY, NEGATIVES, *(feature_sizes or {})]
        tables = [_table(ITEM_TABLE, num_items, embedding_dim, [HISTORY, NEGATIVES])]
        tables += [_table(name, rows, embedding_dim, [name]) for name, rows in (feature_sizes or {}).items()]
        self.embedding = EmbeddingCollection(tables=tables, device=torch.device("meta" if meta_tables else "cpu"))
        self.qk_dim = qk_dim or embedding_dim // num_heads
        self.v_dim = v_dim or embedding_dim // num_heads
        position_buckets = num_buckets(max_history)
        self.layers = nn.ModuleList(
            HSTULayer(embedding_dim, num_heads, self.qk_dim, self.v_dim, position_buckets, dropout)
            for _ in range(num_layers)
        )
        self.register_buffer("log_q", None, persistent=False)
        self.hit_rate, self.ndcg = HitRate(10), NDCG(10)
        self._catalogue: tuple[Tensor, Tensor] | None = None

    # Forward

    def forward(self, batch: SeqBatch) -> Tensor:
        """Output of every event, ``[sum(L), D]`` of unit length: the direction of the next item's embedding."""
        return self.encode(self.embedding(batch.features), batch)

    def encode(self, embedded: Mapping[str, Any], batch: SeqBatch) -> Tensor:
        """:meth:`forward` given the embeddings of the batch's features."""
        x = embedded[HISTORY].values()
        for name in self.feature_names[2:]:
            x = x + embedded[name].values()
        offsets = _offsets(batch.lengths)
        plan = plan_attention(offsets, batch.timestamps)
        for layer in self.layers:
            x = layer(x, offsets, batch.timestamps, plan)
        return unit_rows(x)

    def training_step(self, batch: SeqBatch, batch_idx: int) -> Tensor:
        """Mean loss over the predicted positions of this rank."""
        self._check_features(batch, self.feature_names)
        loss = self.loss(self.embedding(batch.features), batch)
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=batch.num_samples)
        return loss

    def loss(self, embedded: Mapping[str, Any], batch: SeqBatch) -> Tensor:
        """The loss of :meth:`training_step` given the embeddings of the batch's features: all of its dense compute."""
        outputs = self.encode(embedded, batch)
        with torch.autocast(outputs.device.type, enabled=False):
            total = sampled_softmax(
                outputs / self.hparams["temperature"],
                unit_rows(embedded[HISTORY].values()),
                batch.features[HISTORY].values(),
                unit_rows(embedded[NEGATIVES].values()),
                batch.features[NEGATIVES].values(),
                _offsets(batch.lengths),
                self.log_q,
            )
        return total / self.num_predicted(batch).clamp(min=1)

    def correct_sampling(self, item_counts: Tensor) -> None:
        """Tell the loss that negatives are drawn in proportion to ``item_counts [num_items]``, not uniformly.

        The log probability of being drawn is subtracted from each logit, else popular items would be pushed away for
        nothing but their popularity. Call it before ``fit``; it is no part of a checkpoint.
        """
        counts = item_counts.double().clamp(min=1)  # an item that is never drawn still occurs as a target
        self.log_q = (counts / counts.sum()).log().float().to(self.device)

    @staticmethod
    def num_predicted(batch: SeqBatch) -> Tensor:
        """Number of positions that predict an item, the weight of this rank's mean loss: scalar int64, on device."""
        return (batch.lengths - 1).clamp(min=0).sum()

    # Validation: the held-out item among the catalogue

    def on_validation_epoch_start(self) -> None:
        """Look the catalogue up through the (maybe sharded) tables: a collective, so every rank does it."""
        count, limit = self.num_items, self.hparams["max_eval_items"]
        if count <= limit:
            ids = torch.arange(count)
        else:
            ids = torch.tensor(
                random.Random(0).sample(range(count), limit)
            )  # the same on every rank and in every epoch
            log_once(f"validation ranks the target among {limit:,} random items of {count:,} (max_eval_items)")
        lengths = torch.zeros(len(self.feature_names), dtype=torch.int64)
        lengths[0] = len(ids)
        features = KeyedJaggedTensor(keys=self.feature_names, values=ids, lengths=lengths).to(self.device)
        items = self.embedding(features)[HISTORY].values()
        self._catalogue = ids.to(self.device), unit_rows(items)

    def on_validation_epoch_end(self) -> None:
        self._catalogue = None

    def validation_step(self, batch: SeqBatch, batch_idx: int) -> None:
        if batch.targets is None or self._catalogue is None:
            raise InputError("targets: None; validation needs the held-out item of every sample")
        embedded = self.embedding(self._with_targets(batch, batch.targets))
        outputs = self.encode(embedded, batch)[batch.lengths.cumsum(0) - 1]
        ids, items = self._catalogue
        with torch.autocast(outputs.device.type, enabled=False):
            scores = outputs @ items.mT
            target_scores = (outputs * unit_rows(embedded[NEGATIVES].values())).sum(-1)
            is_target = batch.targets[:, None] == ids
            others = (scores / self.hparams["temperature"]).masked_fill(is_target, -torch.inf).logsumexp(-1)
            loss = F.softplus(others - target_scores / self.hparams["temperature"]).mean()
            ranks = target_ranks(scores, target_scores, is_target)
        self.hit_rate.update(ranks)
        self.ndcg.update(ranks)
        size = batch.num_samples
        self.log("val/loss", loss, batch_size=size, sync_dist=True)
        self.log("val/hr@10", self.hit_rate, on_step=False, on_epoch=True, batch_size=size, prog_bar=True)
        self.log("val/ndcg@10", self.ndcg, on_step=False, on_epoch=True, batch_size=size, prog_bar=True)

    def _with_targets(self, batch: SeqBatch, targets: Tensor) -> KeyedJaggedTensor:
        """The batch's features with the targets in the place of negatives: one lookup gives both."""
        self._check_features(batch, self.feature_names, optional=NEGATIVES)
        parts = {name: batch.features[name] for name in self.feature_names if name != NEGATIVES}
        ones = torch.ones_like(batch.lengths)
        values = [targets if name == NEGATIVES else parts[name].values() for name in self.feature_names]
        lengths = [ones if name == NEGATIVES else parts[name].lengths() for name in self.feature_names]
        return KeyedJaggedTensor(keys=self.feature_names, values=torch.cat(values), lengths=torch.cat(lengths))

    @staticmethod
    def _check_features(batch: SeqBatch, expected: list[str], optional: str | None = None) -> None:
        """Sharded tables remember the order of the keys they see first: any other order would look up wrong rows."""
        keys = batch.features.keys()
        if [key for key in keys if key != optional] != [key for key in expected if key != optional]:
            raise InputError(
                f"features: keys {keys} where the model has {expected}; name the features of the events in "
                "feature_sizes, in this order"
            )

    # Optimizer and cost

    def configure_optimizers(self) -> Any:
        h = self.hparams
        optimizer = torch.optim.AdamW(self.parameters(), lr=h["lr"], weight_decay=h["weight_decay"])
        warmup, steps = h["warmup_steps"], h["max_steps"]
        if not warmup and not steps:
            return optimizer

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            if not steps:
                return 1.0
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def cost_coefficients(self) -> tuple[float, float, float]:
        """FLOPs of a sample, forward and backward: ``a * L + b * L^2 + c * candidates``.

        ``a``: two linear maps per layer, ``2 D H (2 Dqk + 3 Dv)`` forward and twice that backward. ``b``: causal
        attention, half of ``L^2`` pairs at ``2 H`` times: ``4 Dqk`` (scores, again in backward, dq, dk) ``+ 3 Dv``
        (values, dv, their scores), per layer. ``c``: ``6 D`` for each logit; a sample of ``L`` events and ``K``
        negatives has ``(L - 1) * K`` candidates.
        """
        dim, heads, layers = self.hparams["embedding_dim"], self.hparams["num_heads"], len(self.layers)
        linear = 3.0 * layers * 2 * dim * heads * (2 * self.qk_dim + 3 * self.v_dim)
        attention = float(layers * heads * (4 * self.qk_dim + 3 * self.v_dim))
        return linear, attention, 6.0 * dim


class HSTU(HSTUMixin, pl.LightningModule):
    __doc__ = HSTUMixin.__doc__


def _offsets(lengths: Tensor) -> Tensor:
    return F.pad(lengths.long().cumsum(0), (1, 0))


def _draw_rows(weight: Tensor, dim: int) -> None:
    """Uniform rows of length about 1 into ``weight``: a whole table of width ``dim``, a shard of one, or nothing."""
    if not weight.is_meta:
        bound = math.sqrt(3 / dim)
        with torch.no_grad():
            weight.uniform_(-bound, bound)


def _table(name: str, rows: int, dim: int, features: list[str]) -> EmbeddingConfig:
    draw = partial(_draw_rows, dim=dim)
    return EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, init_fn=draw)
