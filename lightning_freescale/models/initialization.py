"""Initial values of HSTU: of its tables, which a strategy may shard, and of its linear maps."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from lightning_freescale.batch.torchrec_types import EmbeddingConfig


def draw_rows(weight: Tensor, dim: int, std: float | None) -> None:
    """Fill ``weight``, a table of width ``dim`` or a shard of one. Does nothing on the meta device.

    Args:
        weight: ``[rows, columns]``; a shard may have fewer columns than ``dim``.
        dim: width of the whole table.
        std: standard deviation of normal values. ``None`` draws uniform rows of length about 1.
    """
    if weight.is_meta:
        return
    with torch.no_grad():
        if std is None:
            bound = math.sqrt(3 / dim)
            weight.uniform_(-bound, bound)
        else:
            weight.normal_(0.0, std)


def table_config(name: str, rows: int, dim: int, features: list[str], std: float | None) -> EmbeddingConfig:
    """A table of ``rows`` rows of width ``dim`` that serves ``features``; ``std`` as in :func:`draw_rows`."""
    draw = partial(draw_rows, dim=dim, std=std)
    return EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, init_fn=draw)


def draw_linear_maps(f1: nn.Linear, f2: nn.Linear) -> None:
    """Published initial values of the two linear maps of a layer: ``f1`` normal, ``f2`` Xavier uniform, all biases 0."""
    nn.init.normal_(f1.weight, std=0.02)
    nn.init.xavier_uniform_(f2.weight)
    nn.init.zeros_(f1.bias)
    nn.init.zeros_(f2.bias)
