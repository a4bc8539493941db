"""``trainer.predict``: the best items for the next event of every user, with the ids of the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightning_freescale.batch.seq_batch import HISTORY, SeqBatch
from lightning_freescale.batch.torchrec_types import KeyedJaggedTensor
from lightning_freescale.models.item_catalogue import ItemCatalogue
from lightning_freescale.models.norm import unit_rows
from lightning_freescale.models.top_k import JaggedRows, Ranked, part_of, top_k
from lightning_freescale.runtime.errors import ConfigurationError, InputError

# Recommending is combined with the LightningModule of `lightning` or of `pytorch_lightning`.
if TYPE_CHECKING:
    import lightning.pytorch as pl

    _Base = pl.LightningModule
else:
    _Base = object


class Recommendations(NamedTuple):
    """The best items of ``B`` users, the best first.

    Attributes:
        users: ``[B]`` ids of the users in the data. Without a data module that names users, their positions in the batch.
        items: ``[B, k]`` ids of the items in the data. Without such a data module, the numbers of the items.
        scores: ``[B, k]`` float32: cosines. It is minus infinity where a user has fewer than ``k`` candidates; the item there is
            the first of the catalogue and means nothing.
    """

    users: NDArray
    items: NDArray
    scores: NDArray[np.float32]


class Recommending(ItemCatalogue, _Base):
    """The hooks of ``trainer.predict`` of a LightningModule with ``embedding``, ``encode`` and ``feature_names``.

    The hyperparameter ``top_k`` is the number of items of a user. With ``filter_seen`` the items of the user's own history are
    left out.
    """

    feature_names: list[str]
    embedding: Any
    _own_items: Tensor | None = None

    def encode(self, embedded: Any, batch: SeqBatch) -> Tensor:
        """Output at every event, ``[sum(L), D]``, of length 1."""
        raise NotImplementedError

    def encode_last(self, embedded: Any, batch: SeqBatch) -> Tensor:
        """:meth:`encode` at the last event of each history alone, ``[B, D]``."""
        return self.encode(embedded, batch)[batch.lengths.cumsum(0) - 1]

    def on_predict_start(self) -> None:
        """Look up this rank's part of the catalogue. If the tables are sharded this is a collective."""
        self.take_catalogue()
        several = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        rows = part_of(rank, world, self.catalogue_size)
        lengths = torch.zeros(len(self.feature_names), dtype=torch.int64)
        lengths[0] = len(rows)
        features = KeyedJaggedTensor(
            keys=self.feature_names, values=self.item_ids(torch.arange(rows.start, rows.stop)).cpu(), lengths=lengths
        ).to(self.device)
        with torch.no_grad():
            self._own_items = unit_rows(self.embedding(features)[HISTORY].values())

    def on_predict_end(self) -> None:
        self._own_items = None  # frees the embeddings

    def predict_step(self, batch: SeqBatch, batch_idx: int) -> Recommendations:
        """The best items after the last event of each history."""
        ranked = self.recommend(batch)
        data: Any = getattr(self.trainer, "datamodule", None)
        users = torch.arange(batch.num_samples) if batch.users is None else batch.users.cpu()
        rows = ranked.rows.clamp(min=0).cpu().numpy()
        named = hasattr(data, "item_ids") and hasattr(data, "user_ids") and batch.users is not None
        if named and self.catalogue_ids is not None and len(data.item_ids) != self.catalogue_size:
            raise InputError(
                f"catalogue: the model ranks {self.catalogue_size} items, but the data module has names for "
                f"{len(data.item_ids)}. Leave model.set_catalogue() out, or call it with the catalogue of this data module"
            )
        return Recommendations(
            users=data.user_ids[users.numpy()] if named else users.numpy(),
            items=data.item_ids[rows] if named else rows,
            scores=ranked.scores.cpu().numpy(),
        )

    def recommend(self, batch: SeqBatch) -> Ranked:
        """Row numbers and scores of the best items. A collective if there are several ranks."""
        self.check_catalogue(batch.by_key[HISTORY].values())
        outputs = self.encode_last(self.embedding(batch.features), batch)
        seen = (
            JaggedRows(batch.lengths.long(), self.known_item_numbers(batch.features[HISTORY].values()))
            if self.hparams["filter_seen"]
            else None
        )
        return self.best_items(outputs, self.hparams["top_k"], seen)

    def best_items(self, outputs: Tensor, k: int, left_out: JaggedRows | None = None) -> Ranked:
        """The best ``k`` items, or all if there are fewer, for ``outputs [B, D]``. A collective if there are several ranks.

        ``left_out``: for each output, item numbers that are not candidates.
        """
        if self._own_items is None:
            raise ConfigurationError("recommend: call on_predict_start() first, as trainer.predict does")
        with torch.autocast(outputs.device.type, enabled=False):
            return top_k(
                outputs.float(), self._own_items.float(), self.catalogue_size, min(k, self.catalogue_size), left_out
            )
