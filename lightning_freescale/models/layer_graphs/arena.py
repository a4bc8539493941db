"""The memory that all graphs of a model share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Arena:
    """The memory of all graphs of a model. Arrays of the same name share it, whatever their number of rows.

    Args:
        rows: most rows of an array.
        device: where the arrays are.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows, self._device = rows, device
        self._flat: dict[Any, Tensor] = {}

    def take(self, name: Any, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """The array ``[rows, width]`` of this name, contiguous."""
        if name not in self._flat:
            self._flat[name] = torch.empty(max(self.rows, rows) * width, dtype=dtype, device=self._device)
        return self._flat[name][: rows * width].view(rows, width)


def load(place: Tensor, value: Tensor | None) -> None:
    """Copy ``value`` to ``place``, if it is not there."""
    if value is not None and value.data_ptr() != place.data_ptr():
        place.copy_(value)
