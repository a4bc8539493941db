"""HSTU (arXiv 2402.17152), a generative sequence recommender. No tensor is padded between the lookup and the loss."""

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

# HSTUMixin is combined with the LightningModule of `lightning` or of `pytorch_lightning`.
if TYPE_CHECKING:
    _Base = pl.LightningModule
else:
    _Base = object


class HSTULayer(nn.Module):
    """One layer: ``x + f2(norm(attention(q, k, v)) * u)`` with ``u, v, q, k = silu(f1(norm(x)))``.

    Args:
        dim: width ``D`` of the input and the output.
        heads: attention heads.
        qk_dim: width of a head's queries and keys.
        v_dim: width of a head's values.
        position_buckets: size of the position bias.
        dropout: dropout rate of the gated attention output.
    """

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
        """``x`` and the result are flat, ``[sum(L), D]``; the other arguments are those of ``hstu_attention``."""
        u, v, q, k = F.silu(self.f1(layer_norm(self.norm, x))).split(self.split, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in (q, k, v))
        attended = hstu_attention(q, k, v, offsets, timestamps, self.position_bias, self.time_bias, plan=plan)
        return x + self.f2(self.dropout(gated_layer_norm(self.attention_norm, attended.flatten(1), u)))


class HSTUMixin(_Base):
    """HSTU as a LightningModule. :class:`HSTU` combines it with ``lightning``, and another class with ``pytorch_lightning``.

    Args:
        num_items: size of the catalogue; ids are ``0`` to ``num_items - 1``.
        embedding_dim: width ``D`` of the tables and of the layers.
        num_layers: number of HSTU layers.
        num_heads: number of attention heads.
        qk_dim: width of a head's queries and keys; ``D / num_heads`` by default.
        v_dim: width of a head's values; ``D / num_heads`` by default.
        max_history: longest history you expect, in events. It sets the size of the position bias. Longer histories work; their
            longest distances share one bias.
        feature_sizes: number of rows of the table of each categorical feature of the events. The embeddings of the features
            are added to the embedding of the item.
        temperature: temperature of the softmax over cosines.
        dropout: dropout rate of the gated attention output; 0 by default.
        lr: learning rate of AdamW. Tables that the strategy shards have their own optimizer, an argument of the strategy.
        weight_decay: weight decay of AdamW.
        warmup_steps: number of steps in which the learning rate rises linearly.
        max_steps: step at which a cosine has lowered the learning rate to 0; without it the learning rate stays constant.
        max_eval_items: validation ranks all items of a catalogue up to this size. Of a larger catalogue it ranks the target and
            a random sample of this size.
        meta_tables: put the tables on the meta device, for tables that do not fit one rank. The strategy allocates and
            initializes the shards; without such a strategy the model cannot run.
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
                f"num_heads: {num_heads} does not divide embedding_dim {embedding_dim}; "
                "choose another num_heads, or set qk_dim and v_dim"
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
        """Output at every event, ``[sum(L), D]``, scaled to length 1. It predicts the direction of the next item's embedding."""
        return self.encode(self.embedding(batch.features), batch)

    def encode(self, embedded: Mapping[str, Any], batch: SeqBatch) -> Tensor:
        """:meth:`forward` after the lookup: ``embedded`` maps each feature to a ``JaggedTensor`` of its embeddings."""
        x = embedded[HISTORY].values()
        for name in self.feature_names[2:]:
            x = x + embedded[name].values()
        offsets = _offsets(batch.lengths)
        plan = plan_attention(offsets, batch.timestamps)
        for layer in self.layers:
            x = layer(x, offsets, batch.timestamps, plan)
        return unit_rows(x)

    def training_step(self, batch: SeqBatch, batch_idx: int) -> Tensor:
        """Mean loss over the positions of this rank that predict an item."""
        self._check_features(batch, self.feature_names)
        loss = self.loss(self.embedding(batch.features), batch)
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=batch.num_samples)
        return loss

    def loss(self, embedded: Mapping[str, Any], batch: SeqBatch) -> Tensor:
        """The loss of :meth:`training_step` after the lookup: all of its dense compute. ``embedded`` as in :meth:`encode`."""
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
        """Correct the loss for negatives that are drawn in proportion to ``item_counts [num_items]`` and not uniformly.

        The loss subtracts from each logit the log probability that the item is drawn. Otherwise popular items would get lower
        scores only because they are drawn often. Call it before ``fit``: checkpoints do not contain it.
        """
        counts = item_counts.double().clamp(min=1)  # an item that is never drawn can still be a target
        self.log_q = (counts / counts.sum()).log().float().to(self.device)

    @staticmethod
    def num_predicted(batch: SeqBatch) -> Tensor:
        """Number of positions that predict an item, which is the weight of this rank's mean loss. Scalar int64, on the device."""
        return (batch.lengths - 1).clamp(min=0).sum()

    # Validation ranks the held-out item among the catalogue.

    def on_validation_epoch_start(self) -> None:
        """Look up the embeddings of the catalogue. If the tables are sharded this is a collective, so every rank does it."""
        count, limit = self.num_items, self.hparams["max_eval_items"]
        if count <= limit:
            ids = torch.arange(count)
        else:
            # The same items on every rank and in every epoch.
            ids = torch.tensor(random.Random(0).sample(range(count), limit))
            log_once(f"validation ranks the target among {limit:,} random items of {count:,} (max_eval_items)")
        lengths = torch.zeros(len(self.feature_names), dtype=torch.int64)
        lengths[0] = len(ids)
        features = KeyedJaggedTensor(keys=self.feature_names, values=ids, lengths=lengths).to(self.device)
        items = self.embedding(features)[HISTORY].values()
        self._catalogue = ids.to(self.device), unit_rows(items)

    def on_validation_epoch_end(self) -> None:
        """Free the embeddings of the catalogue."""
        self._catalogue = None

    def validation_step(self, batch: SeqBatch, batch_idx: int) -> None:
        """Rank ``batch.targets`` by the output at the last event of each history, and log loss, HR@10 and NDCG@10."""
        if batch.targets is None or self._catalogue is None:
            raise InputError(
                "targets: None; validation needs the held-out item of every sample, [B]: set SeqBatch.targets"
            )
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

    # Optimizer and cost.

    def configure_optimizers(self) -> Any:
        """AdamW; with ``warmup_steps`` or ``max_steps`` also a scheduler that changes the learning rate every step."""
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
        """FLOPs of a sample, forward and backward: ``(a, b, c)`` in ``a * L + b * L^2 + c * candidates``.

        ``a``: the two linear maps of a layer take ``2 D H (2 Dqk + 3 Dv)`` per event in forward, and twice that in backward.
        ``b``: causal attention has ``L^2 / 2`` pairs of events. A pair takes ``2 H`` times ``4 Dqk`` (the scores, the scores
        again in backward, dq, dk) ``+ 3 Dv`` (the output, dv, the gradient of the weights) per layer.
        ``c``: ``6 D`` per candidate. A sample of ``L`` events and ``K`` negatives has ``(L - 1) * K`` candidates.
        """
        dim, heads, layers = self.hparams["embedding_dim"], self.hparams["num_heads"], len(self.layers)
        linear = 3.0 * layers * 2 * dim * heads * (2 * self.qk_dim + 3 * self.v_dim)
        attention = float(layers * heads * (4 * self.qk_dim + 3 * self.v_dim))
        return linear, attention, 6.0 * dim


class HSTU(HSTUMixin, pl.LightningModule):
    __doc__ = HSTUMixin.__doc__


def _offsets(lengths: Tensor) -> Tensor:
    """Offsets ``[B + 1]`` int64 of histories with ``lengths [B]``."""
    return F.pad(lengths.long().cumsum(0), (1, 0))


def _draw_rows(weight: Tensor, dim: int) -> None:
    """Fill ``weight``, a table of width ``dim`` or a shard of one, with uniform rows of length about 1. Does nothing on meta."""
    if not weight.is_meta:
        bound = math.sqrt(3 / dim)
        with torch.no_grad():
            weight.uniform_(-bound, bound)


def _table(name: str, rows: int, dim: int, features: list[str]) -> EmbeddingConfig:
    """A table of ``rows`` rows of width ``dim`` that serves ``features``."""
    draw = partial(_draw_rows, dim=dim)
    return EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, init_fn=draw)
