"""Which models have graphs. This file is imported on machines without Triton, too."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

graphs_of: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()  # by the first layer of a model


def release(layer: nn.Module) -> None:
    """Free the graphs of the model whose first layer is ``layer``, if it has some. They are captured again when needed."""
    graphs_of.pop(layer, None)
