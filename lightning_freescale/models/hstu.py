"""HSTU (arXiv 2402.17152), a generative sequence recommender. No history is padded between the lookup and the loss."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.batch.torchrec_types import EmbeddingCollection
from lightning_freescale.models.attention.buckets import num_buckets
from lightning_freescale.models.dropout import SampleDropout, row_keys
from lightning_freescale.models.evaluation import RankingEvaluation
from lightning_freescale.models.even_rows import pad_rows
from lightning_freescale.models.event_encoding import EventEncoding
from lightning_freescale.models.feed_forward import FeedForward, make_feed_forwards, take_router_losses
from lightning_freescale.models.hstu_cost import cost_coefficients
from lightning_freescale.models.hstu_layer import HSTULayer
from lightning_freescale.models.hstu_options import Bias, LinearInit, check_options
from lightning_freescale.models.initialization import table_config
from lightning_freescale.models.loss import sampled_softmax
from lightning_freescale.models.micro_chunks import LayerInput, Samples, apply_in_chunks, count_chunks
from lightning_freescale.models.moe import MoE
from lightning_freescale.models.norm import unit_rows
from lightning_freescale.models.personal_tokens import PersonalTokens, attention_work
from lightning_freescale.models.personalization import ChosenStates, Personalization, Personalizing, UserStates
from lightning_freescale.models.preparation import drop_plan, offsets_of, prepare_histories
from lightning_freescale.models.recommendation import Recommending
from lightning_freescale.models.sequences import Attention, PreparedHistories

ITEM_TABLE = "item"


class HSTUMixin(RankingEvaluation, Recommending, Personalizing):
    """HSTU as a LightningModule. :class:`HSTU` combines it with ``lightning``, and another class with ``pytorch_lightning``.

    Args:
        num_items: size of the catalogue; ids are ``0`` to ``num_items - 1``.
        embedding_dim: width ``D`` of the tables and of the layers.
        num_layers: number of HSTU layers.
        num_heads: number of attention heads.
        qk_dim: width of a head's queries and keys; ``D / num_heads`` by default.
        v_dim: width of a head's values; ``D / num_heads`` by default.
        max_history: longest history you expect, in events. It sets the size of the position bias or of the position
            embedding. Longer histories work; their longest distances share one bias, or their last positions one embedding.
        feature_sizes: number of rows of the table of each categorical feature of the events. The embeddings of the features
            are added to the embedding of the item.
        temperature: temperature of the softmax over cosines.
        bias: where position and time enter. ``"relative"``: as biases of the attention, by the distance of two events.
            ``"input"``: as embeddings that are added to the input of the layers; the attention has no bias.
        position_embedding: add an embedding of the position to the input. By default only with ``bias="input"``.
        personalization: compress long histories into a few learned tokens, to which recent events attend
            (:mod:`.personal_tokens`). ``None``: every event attends to all events before it.
        feed_forward: add a feed-forward layer after each layer, dense or a mixture of experts (:mod:`.feed_forward`). A ``MoE``
            gives the sizes alone: every layer has its own weights.
        table_std: standard deviation of the initial values of the tables. ``None`` draws rows of length about 1.
        scale_input: multiply the rows of the tables by ``sqrt(D)`` where they enter the layers.
        linear_init: initial values of the linear maps: ``"hstu"`` as published, ``"torch"`` as ``nn.Linear`` draws them.
        dropout: dropout rate of the gated attention output. The mask of a sample does not depend on its rank
            (:mod:`.dropout`), so balanced and unbalanced training are equal.
        input_dropout: dropout rate of the input of the layers, likewise.
        lr: learning rate of AdamW. Tables that the strategy shards have their own optimizer, an argument of the strategy.
        betas: the two decay rates of AdamW.
        weight_decay: weight decay of AdamW.
        warmup_steps: number of steps in which the learning rate rises linearly.
        max_steps: step at which a cosine has lowered the learning rate to 0; without it the learning rate stays constant.
        max_eval_items: validation and test rank all items of a catalogue up to this size. Of a larger catalogue they rank the
            target and a random sample of this size.
        filter_seen: validation, test and predictions leave out the items of the user's own history, except the target.
        top_k: number of items that ``trainer.predict`` recommends to each user.
        meta_tables: put the tables on the meta device, for tables that do not fit one rank. The strategy allocates and
            initializes the shards; without such a strategy the model cannot run.
        cuda_graphs: start the kernels of a layer in one call, in mixed precision on Hopper GPUs (:mod:`.layer_graphs`).
    """

    loss_reduction = "token"
    log_q: Tensor | None
    _router_log: Mapping[str, Tensor] = MappingProxyType({})  # of the last loss
    _prepared: PreparedHistories | None = None  # from prepare() until encode()

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
        bias: Bias = "relative",
        position_embedding: bool | None = None,
        personalization: PersonalTokens | Mapping[str, int] | None = None,
        feed_forward: FeedForward | MoE | Mapping[str, Any] | None = None,
        table_std: float | None = 0.02,
        scale_input: bool = True,
        linear_init: LinearInit = "hstu",
        dropout: float = 0.2,
        input_dropout: float = 0.2,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        max_steps: int | None = None,
        max_eval_items: int = 50_000,
        filter_seen: bool = False,
        top_k: int = 10,
        meta_tables: bool = False,
        cuda_graphs: bool = True,
    ) -> None:
        super().__init__()
        feed_forward = FeedForward.of(feed_forward, embedding_dim)
        self.save_hyperparameters()
        check_options(self.hparams)
        self.num_items, sizes = num_items, dict(feature_sizes or {})
        self.feature_names = [HISTORY, NEGATIVES, *sizes]
        tables = [table_config(ITEM_TABLE, num_items, embedding_dim, [HISTORY, NEGATIVES], table_std)]
        tables += [table_config(name, rows, embedding_dim, [name], table_std) for name, rows in sizes.items()]
        self.embedding = EmbeddingCollection(tables=tables, device=torch.device("meta" if meta_tables else "cpu"))
        self.qk_dim, self.v_dim = (width or embedding_dim // num_heads for width in (qk_dim, v_dim))
        self.input_scale = math.sqrt(embedding_dim) if scale_input else 1.0
        embeds_positions = bias == "input" if position_embedding is None else position_embedding
        self.event_encoding = None
        if embeds_positions or bias == "input":
            self.event_encoding = EventEncoding(embedding_dim, max_history * embeds_positions, times=bias == "input")
        self.input_dropout = SampleDropout(input_dropout)
        cut = PersonalTokens.of(personalization)
        self.hparams["personalization"] = cut and asdict(cut)  # plain numbers, so that every torch.load reads them
        self.personalization = None if cut is None else Personalization(cut, embedding_dim)
        position_buckets = num_buckets(max_history) if bias == "relative" else 0
        self.layers = nn.ModuleList(
            HSTULayer(embedding_dim, num_heads, self.qk_dim, self.v_dim, position_buckets, dropout, linear_init, layer)
            for layer in range(1, num_layers + 1)
        )
        options = feed_forward, embedding_dim, num_layers, dropout
        self.hparams["feed_forward"], self.feed_forwards = make_feed_forwards(*options)
        self.register_buffer("log_q", None, persistent=False)
        self._make_metrics()

    # Forward

    def forward(self, batch: SeqBatch) -> Tensor:
        """Output at every event, ``[sum(L), D]``, scaled to length 1. It predicts the direction of the next item's embedding."""
        return self.encode(self.embedding(batch.features), batch)

    def encode(self, embedded: Mapping[str, Any], batch: SeqBatch) -> Tensor:
        """:meth:`forward` after the lookup: ``embedded`` maps each feature to a ``JaggedTensor`` of its embeddings."""
        return self._encode(embedded, batch, last=False)

    def encode_last(self, embedded: Mapping[str, Any], batch: SeqBatch) -> Tensor:
        """:meth:`encode` at the last event of each history alone, ``[B, D]``. No history may be empty."""
        return self._encode(embedded, batch, last=True)

    def prepare(self, batch: SeqBatch) -> None:
        """Compute what the layers need of ``batch`` beside its embeddings. :meth:`encode` of the same batch uses it.

        Call it before the lookup, in the same step. The GPU then computes it while embeddings still travel.
        """
        self._prepared = prepare_histories(self, batch)

    def attends_to_whole_histories(self, batch: SeqBatch) -> bool:
        """Whether the layers attend to the histories as they are: all at once, and without personal tokens."""
        return self.personalization is None and self._chunks(batch) == 1

    def _encode(self, embedded: Mapping[str, Any], batch: SeqBatch, last: bool) -> Tensor:
        if self._prepared is None or self._prepared.batch is not batch:
            self.prepare(batch)
        assert self._prepared is not None
        (_, keys, attention), self._prepared = self._prepared, None
        times, ends = batch.timestamps, offsets_of(batch)[1:] if last else None
        if attention is not None:
            x = self.layer_input(embedded, batch, keys, len(attention.timestamps), attention.place)
            return self.apply_layers(x, attention, keys, len(times), ends)
        if (chunks := self._chunks(batch)) > 1:
            outputs = self._encode_in_chunks(embedded, batch, keys, chunks)
            return outputs if ends is None else outputs[ends - 1]
        assert self.personalization is not None
        x = self.layer_input(embedded, batch, keys=keys)
        rows, arranged, keys = self.personalization.insert(x, batch.lengths.long(), times, keys, self.has_bias)
        events = arranged.sequences.events
        if ends is not None:
            return self.apply_layers(rows, arranged, keys, ends=events[ends - 1] + 1)
        return self.apply_layers(rows, arranged, keys)[events]

    def _chunks(self, batch: SeqBatch) -> int:
        return count_chunks(self.feed_forwards, batch.timestamps.device)  # type: ignore[arg-type]

    def _encode_in_chunks(
        self, embedded: Mapping[str, Any], batch: SeqBatch, keys: Tensor | None, count: int
    ) -> Tensor:
        """:meth:`encode` in ``count`` parts of the batch (:mod:`.micro_chunks`)."""
        samples = Samples(self.layer_input(embedded, batch, keys=keys), offsets_of(batch), batch.timestamps, keys)
        parts = [self._arrange(part) for part in samples.split(count)]
        return unit_rows(apply_in_chunks(self.layers, self.feed_forwards, parts))  # type: ignore[arg-type]

    def _arrange(self, samples: Samples) -> LayerInput:
        x, offsets, timestamps, keys = samples
        if self.personalization is None:
            return LayerInput(x, Attention(offsets, timestamps, self.has_bias), keys)
        return LayerInput(*self.personalization.insert(x, offsets.diff(), timestamps, keys, self.has_bias))

    def adds_rows(self, batch: SeqBatch) -> bool:
        """Whether rows are added (:mod:`.even_rows`). Routers of experts would count them."""
        experts = any(layer.settings.experts > 1 for layer in self.feed_forwards)  # type: ignore[union-attr,operator]
        return batch.timestamps.is_cuda and not experts

    def layer_input(
        self,
        embedded: Mapping[str, Any],
        batch: SeqBatch,
        keys: Tensor | None = None,
        total: int | None = None,
        place: Tensor | None = None,
    ) -> Tensor:
        """The input of the layers, ``[sum(L), D]``.

        Without ``keys`` nothing is dropped. With ``total`` the result has so many rows, of which the added ones are 0, and is
        written to ``place`` if that is given.
        """
        x, scale = self.unscaled_input(embedded, batch)
        if keys is None:
            return pad_rows(x if scale == 1 else x * scale, total, place)
        return self.input_dropout(x, keys, scale, total, place)

    def unscaled_input(
        self, embedded: Mapping[str, Any], batch: SeqBatch, states: UserStates | ChosenStates | None = None
    ) -> tuple[Tensor, float]:
        """``[sum(L), D]``, and the factor that makes it the input of the layers.

        With ``states`` the events follow histories that the batch does not have.
        """
        x = embedded[HISTORY].values()
        for name in self.feature_names[2:]:
            x = x + embedded[name].values()
        if self.event_encoding is None:
            return x, self.input_scale
        before = None if states is None else (states.lengths, states.last_times)
        return self.event_encoding(x, offsets_of(batch), batch.timestamps, before, self.input_scale), 1.0

    def apply_layers(
        self,
        x: Tensor,
        attention: Attention,
        keys: Tensor | None = None,
        rows: int | None = None,
        ends: Tensor | None = None,
    ) -> Tensor:
        """All layers, then the first ``rows`` rows, by default all, or the rows ``ends [B] - 1``, each scaled to length 1."""
        add_up = ends is None or torch.is_grad_enabled()
        if x.is_cuda and torch.is_autocast_enabled("cuda") and not attention.plan.rounded:
            from lightning_freescale.models.fused_layer import round_weights  # Triton is on CUDA machines only

            round_weights(self.layers, attention.plan, torch.get_autocast_dtype("cuda"))
        layers = list(self.layers)
        for layer, after in zip_longest(layers, self.feed_forwards):
            x = layer(x, attention, keys, total=after is not None or (add_up and layer is layers[-1]))
            x = x if after is None else after(x, keys)
        if ends is None:
            return unit_rows(x, rows)
        return unit_rows(x[ends - 1]) if isinstance(x, Tensor) else x.last_unit_rows(ends)

    @property
    def has_bias(self) -> bool:
        """Whether the attention has position and time biases."""
        return self.hparams["bias"] == "relative"

    def dropout_keys(self, batch: SeqBatch) -> Tensor | None:
        """``row_keys`` of the batch in this training step; ``None`` if nothing depends on them."""
        return row_keys(batch, self.global_step) if self.drops else None

    @property
    def drops(self) -> bool:
        """Whether a step depends on :meth:`dropout_keys`."""
        h = self.hparams
        return self.training and bool(h["dropout"] or h["input_dropout"] or self.personalization)

    def on_fit_start(self) -> None:
        self.take_catalogue()

    def on_train_end(self) -> None:
        drop_plan(self)

    def training_step(self, batch: SeqBatch, batch_idx: int) -> Tensor:
        """Mean loss over the positions of this rank that predict an item."""
        self._check_features(batch, self.feature_names)
        self.prepare(batch)
        loss = self.loss(self.embedding(batch.features), batch)
        samples = batch.num_samples
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=samples)
        if self._router_log:
            self.log_dict(self._router_log, batch_size=samples)
        return loss

    # Lightning asks for the signature twice in every step. To make it takes longer than to find it here.
    training_step.__signature__ = inspect.signature(training_step)  # type: ignore[attr-defined]

    def loss(self, embedded: Mapping[str, Any], batch: SeqBatch) -> Tensor:
        """The loss of :meth:`training_step` after the lookup: all of its dense compute. ``embedded`` as in :meth:`encode`."""
        outputs = self.encode(embedded, batch)
        by_key = batch.by_key
        negatives, offsets = by_key[NEGATIVES], by_key[HISTORY].offsets().long()
        history, drawn = by_key[HISTORY].values(), negatives.values()
        if self.log_q is not None:  # it has an entry for each item of the catalogue
            history, drawn = self.item_numbers(history), self.item_numbers(drawn)
        with torch.autocast(outputs.device.type, enabled=False):
            total = sampled_softmax(
                outputs,
                unit_rows(embedded[HISTORY].values()),
                history,
                unit_rows(embedded[NEGATIVES].values()),
                drawn,
                offsets,
                self.log_q,
                negatives.lengths(),
                batch.negatives_per_position or None,
                self.hparams["temperature"],
            )
        router_loss, self._router_log = take_router_losses(self.feed_forwards)  # type: ignore[arg-type]
        return total / self.num_predicted(batch).clamp(min=1) + router_loss

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

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Do not scale the input of a model that was saved before ``scale_input`` existed: it was trained without."""
        saved = checkpoint.get("hyper_parameters")
        if saved and "scale_input" not in saved:
            self.hparams["scale_input"] = False
            self.input_scale = 1.0

    # Optimizer and cost.

    def configure_optimizers(self) -> Any:
        """AdamW; with ``warmup_steps`` or ``max_steps`` also a scheduler that changes the learning rate every step."""
        h, parameters = self.hparams, list(self.parameters())
        optimizer = torch.optim.AdamW(
            parameters,
            lr=h["lr"],
            betas=h["betas"],
            weight_decay=h["weight_decay"],
            fused=all(parameter.is_cuda for parameter in parameters) or None,  # fewer launches
        )
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
        """FLOPs of a sample, forward and backward: ``(a, b, c)`` in ``a * L + b * L^2 + c * candidates`` (:mod:`.hstu_cost`)."""
        sizes = self.hparams["embedding_dim"], self.hparams["num_heads"], self.qk_dim, self.v_dim, len(self.layers)
        return cost_coefficients(*sizes, [layer.moe.flops_per_token() for layer in self.feed_forwards])  # type: ignore

    @property
    def squared_lengths(self) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
        """What the second cost coefficient multiplies: ``L^2``, or with personal tokens the squares of all sequences.

        It is a function of the lengths ``[n]`` that refers to no weights, because balanced loaders send it to their workers.
        """
        return attention_work(PersonalTokens.of(self.hparams["personalization"]))


class HSTU(HSTUMixin, pl.LightningModule):
    __doc__ = HSTUMixin.__doc__
