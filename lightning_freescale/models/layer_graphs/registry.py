"""This file knows which models have graphs and plans. It is imported on machines without Triton, too."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

# By the first layer of a model: its graphs, and the plan of its next batch (:mod:`lightning_freescale.models.preparation`).
graphs_of: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
plans_of: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def release(layer: nn.Module) -> None:
    """Free the graphs of the model whose first layer is ``layer``, if it has some. They are captured again when needed."""
    graphs_of.pop(layer, None)
    plans_of.pop(layer, None)
