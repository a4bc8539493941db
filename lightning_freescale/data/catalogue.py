"""``Catalogue``: the raw ids behind the row numbers of a model, which a checkpoint carries with it.

A model knows items by the rows of its table. Preprocessing numbers the items of each file anew, so a model can read another file
only through the catalogue of its own training data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_freescale.data.histories import Histories
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.runtime.jagged import lengths_to_offsets


@dataclass(frozen=True, eq=False)
class Catalogue:
    """Attributes:
    item_ids: ``[num_items]``, the raw id of each row of the item table, sorted.
    feature_values: by name, the raw value of each row of a feature's table, sorted.
    """

    item_ids: NDArray
    feature_values: Mapping[str, NDArray] = field(default_factory=dict)

    @staticmethod
    def of(histories: Histories) -> Catalogue:
        return Catalogue(histories.item_ids, dict(histories.feature_values))

    def difference(self, other: Catalogue, items: bool = True) -> str:
        """What differs, for a message; empty if both name the same rows. ``items=False`` compares the features alone."""
        pairs = [("items", self.item_ids, other.item_ids)] if items else []
        if self.feature_values.keys() != other.feature_values.keys():
            return f"the features are {sorted(self.feature_values)} and {sorted(other.feature_values)}"
        pairs += [(name, values, other.feature_values[name]) for name, values in self.feature_values.items()]
        for name, ours, theirs in pairs:
            if len(ours) != len(theirs):
                return f"{name}: {len(ours):,} and {len(theirs):,} values"
            if (unequal := ours != theirs).any():
                at = int(unequal.argmax())
                return f"{name}: row {at} is {ours[at]!r} and {theirs[at]!r}"
        return ""

    # ---- checkpoints -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Tensors only, so that ``torch.load`` reads it with ``weights_only=True``."""
        values = {name: _to_tensors(array) for name, array in self.feature_values.items()}
        return {"item_ids": _to_tensors(self.item_ids), "feature_values": values}

    @staticmethod
    def from_state_dict(state: Mapping[str, Any]) -> Catalogue:
        values = {name: _to_array(tensors) for name, tensors in state["feature_values"].items()}
        return Catalogue(_to_array(state["item_ids"]), values)

    # ---- other data ------------------------------------------------------------------------------------------------
    def rows(self, values: Sequence[Any], feature: str | None = None) -> NDArray[np.int64]:
        """The row of each raw id of an item or, with ``feature``, of each raw value of that feature; -1 if it is unknown.

        An integer and its decimal digits as text are the same id.
        """
        known = self.item_ids if feature is None else self.feature_values[feature]
        if known.dtype.kind in "US":
            text = [str(value) for value in values]
            # Of the type of ``known``, because a search in text of another width would copy the whole catalogue.
            found = _codes(np.array(text, dtype=known.dtype), known)
            width = known.dtype.itemsize // np.dtype("U1").itemsize
            return np.where([len(value) > width for value in text], -1, found)
        parsed = [_number(value, known.dtype) for value in values]
        found = _codes(np.array([0 if value is None else value for value in parsed], dtype=known.dtype), known)
        return np.where([value is None for value in parsed], -1, found)

    # ---- other files -----------------------------------------------------------------------------------------------
    def recode(self, histories: Histories, min_events: int = 1) -> tuple[Histories, int]:
        """The histories with the row numbers of this catalogue, and the number of events that are left out.

        An event is left out if its item, or the value of one of its features, is not in the catalogue. A user with fewer than
        ``min_events`` remaining events is left out, too.
        """
        if missing := self.feature_values.keys() - histories.features.keys():
            raise InputError(f"{min(missing)}: the model needs this feature of the events, but the data do not have it")
        items = _codes(histories.item_ids, self.item_ids)[histories.items]
        features = {
            name: _codes(histories.feature_values[name], values)[histories.features[name]]
            for name, values in self.feature_values.items()
        }
        known = items >= 0
        for codes in features.values():
            known &= codes >= 0
        users = np.repeat(np.arange(histories.num_users), histories.lengths)
        lengths = np.bincount(users[known], minlength=histories.num_users)
        kept = lengths >= min_events
        if not kept.any():
            raise InputError(
                f"items: no user has {min_events} events with items of the model's catalogue; is it the right file?"
            )
        known &= kept[users]
        recoded = Histories(
            items=items[known],
            timestamps=histories.timestamps[known],
            offsets=lengths_to_offsets(lengths[kept]),
            item_ids=self.item_ids,
            user_ids=histories.user_ids[kept],
            features={name: codes[known] for name, codes in features.items()},
            feature_values=self.feature_values,
        )
        return recoded, int((~known).sum())


def _codes(raw: NDArray, known: NDArray) -> NDArray[np.int64]:
    """For each of ``raw [n]`` its position in the sorted ``known``, or -1."""
    if (raw.dtype.kind in "US") != (known.dtype.kind in "US"):  # numbers on one side, text on the other
        raw, known = raw.astype(str), known.astype(str)
        order = np.argsort(known, kind="stable")
        found = _codes(raw, known[order])
        return np.where(found >= 0, order[found], -1)
    at = np.minimum(np.searchsorted(known, raw), len(known) - 1)
    return np.where(known[at] == raw, at, -1).astype(np.int64)


def _number(value: Any, dtype: np.dtype) -> Any:
    """``value`` as a number of type ``dtype``, or ``None`` if it is not exactly such a number."""
    try:
        number = dtype.type(value)
    except (ValueError, OverflowError, TypeError):
        return None
    text = isinstance(value, str)
    return number if (str(number) == value if text else number == value) else None


def _to_tensors(values: NDArray) -> torch.Tensor | dict[str, torch.Tensor]:
    """Numbers as one tensor; text as UTF-8 bytes and their lengths."""
    if values.dtype.kind not in "US":
        return torch.from_numpy(np.array(values))
    encoded = [str(value).encode() for value in values]
    text = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    return {"bytes": torch.from_numpy(text.copy()), "lengths": torch.tensor([len(part) for part in encoded])}


def _to_array(stored: torch.Tensor | Mapping[str, torch.Tensor]) -> NDArray:
    if isinstance(stored, torch.Tensor):
        return stored.numpy()
    text, offsets = stored["bytes"].numpy().tobytes(), lengths_to_offsets(stored["lengths"].numpy())
    return np.array([text[start:end].decode() for start, end in pairwise(offsets)], dtype=str)
