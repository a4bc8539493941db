"""The ids of the items of a sequence recommender: 0 to ``num_items - 1``, or any ids if its table has zero-collision ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_freescale.runtime.errors import InputError

# ItemCatalogue is combined with the LightningModule of `lightning` or of `pytorch_lightning`.
if TYPE_CHECKING:
    import lightning.pytorch as pl

    _Base = pl.LightningModule
else:
    _Base = object


class ItemCatalogue(_Base):
    """The items of a model. Each has a number, from 0 on, and an id, which the batches hold."""

    num_items: int
    embedding: Any
    catalogue_ids: Tensor | None  # [n] int64, sorted; None if the ids are 0 to num_items - 1
    catalogue_order: Tensor | None  # [n] int64, the number of each of these items
    _catalogue_was_taken = False  # from a data module, and not set by the user

    def _make_catalogue(self) -> None:
        """Call this in ``__init__``."""
        for name in ("catalogue_ids", "catalogue_order"):
            self.register_buffer(name, None, persistent=False)

    def set_catalogue(self, ids: Any) -> None:
        """Let the items have the ids ``[num_items]`` int64, and not the numbers 0 to ``num_items - 1``.

        Call it before ``fit`` if the item table has zero-collision ids and the data module is not a ``SeqRecDataModule``, whose
        ids the model takes by itself. Validation, test and predictions rank the items of the catalogue, and item counts are in
        its order. Checkpoints do not contain it.
        """
        found = torch.as_tensor(ids, dtype=torch.int64).to(self.device)
        if found.ndim != 1 or not found.numel():
            raise InputError(f"catalogue: needs a list of ids, not an array of shape {list(found.shape)}")
        if (low := int(found.min())) < 0:
            raise InputError(f"catalogue: id {low} is negative; ids are integers from 0 to 2^63 - 1")
        if (repeated := len(found) - len(found.unique())) > 0:
            raise InputError(f"catalogue: {repeated} of the {len(found)} ids are repeated")
        self.catalogue_ids, self.catalogue_order = found.sort()
        self._catalogue_was_taken = False

    def take_catalogue(self) -> None:
        """Take the ids of the items from the data module, if they are raw and the user did not call :meth:`set_catalogue`.

        A catalogue of an earlier data module is replaced: a second fit, or a prediction, may have other items.
        """
        data: Any = getattr(self._trainer, "datamodule", None)
        free = self.catalogue_ids is None or self._catalogue_was_taken
        if free and self._takes_any_id and getattr(data, "ids", None) == "raw":
            self.set_catalogue(data.catalogue)
            self._catalogue_was_taken = True

    def check_catalogue(self, ids: Tensor) -> None:
        """Refuse ids of a batch if the model does not know which items there are: it would rank others."""
        if self.catalogue_ids is not None or not self._takes_any_id or not ids.numel():
            return
        if (largest := int(ids.max())) >= self.num_items:
            raise InputError(
                f"catalogue: a batch has the item {largest}, but as far as the model knows, the items are 0 to "
                f"{self.num_items - 1}. Call model.set_catalogue(ids) with the ids of all items, also after loading a checkpoint"
            )

    @property
    def _takes_any_id(self) -> bool:
        """Whether the table of the items has zero-collision ids."""
        return getattr(self.embedding, "takes_any_id", False)

    def item_numbers(self, ids: Tensor) -> Tensor:
        """The position of each id in the catalogue: int64 of any shape to the same shape. Unknown ids get some position."""
        if self.catalogue_ids is None or self.catalogue_order is None:
            return ids
        return self.catalogue_order[self._nearest(self.catalogue_ids, ids)]

    def known_item_numbers(self, ids: Tensor) -> Tensor:
        """:meth:`item_numbers`, and -1 for every id that is not in the catalogue."""
        if self.catalogue_ids is None or self.catalogue_order is None:
            return ids
        place = self._nearest(self.catalogue_ids, ids)
        return torch.where(self.catalogue_ids[place] == ids, self.catalogue_order[place], -1)

    @staticmethod
    def _nearest(catalogue_ids: Tensor, ids: Tensor) -> Tensor:
        """Where each id is among the sorted ids of the catalogue, or some other place if it is not there."""
        return torch.searchsorted(catalogue_ids, ids).clamp_(max=len(catalogue_ids) - 1)

    @property
    def catalogue_size(self) -> int:
        """Number of items."""
        return self.num_items if self.catalogue_ids is None else len(self.catalogue_ids)

    def item_ids(self, numbers: Tensor) -> Tensor:
        """The id of each item number: int64 of any shape to the same shape."""
        if self.catalogue_ids is None or self.catalogue_order is None:
            return numbers
        place = torch.argsort(self.catalogue_order)
        return self.catalogue_ids[place[numbers.to(place.device)]]
