"""The batch that uses the graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lightning_freescale.models.layer_graphs.arena import load
from lightning_freescale.runtime.errors import FreeScaleError

if TYPE_CHECKING:
    from lightning_freescale.models.layer_graphs.model import LayerGraphs

STALE = (
    "HSTU: a backward was run after the forward of another batch, which has overwritten what it needs. "
    "Use HSTU(cuda_graphs=False) to run a backward again, with retain_graph=True, after another batch."
)


class Turn:
    """A batch that runs in the graphs. It lasts until the backward of all its layers, or until nothing refers to it.

    Args:
        owner: the graphs of the model.
        keys: where the graphs read the keys of dropout.
    """

    def __init__(self, owner: LayerGraphs, keys: Tensor | None) -> None:
        self._owner, self._keys, self._loaded = owner, keys, False
        self.pending: set[int] = set()  # layers whose backward has not run
        self.began = False

    def load_keys(self, keys: Tensor) -> None:
        """Copy the keys of dropout to where the graphs read them, once for all layers."""
        assert self._keys is not None
        if not self._loaded:
            load(self._keys, keys)
            self._loaded = True

    def is_over(self) -> bool:
        """Whether another batch may run in the graphs."""
        return self.began and not self.pending

    def check(self) -> None:
        """Raise an error if another batch has overwritten what the layers kept."""
        if self._owner.current() is not self:
            raise FreeScaleError(STALE)
