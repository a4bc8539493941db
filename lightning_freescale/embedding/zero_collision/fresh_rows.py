"""The first row of an id: a function of the seed, the table and the id alone, so that it does not matter who draws it when.

Only integer arithmetic, and one multiplication and one addition of floats: the same bits on every device.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from lightning_freescale.embedding.zero_collision.hashing import finalize, signed
from lightning_freescale.runtime.errors import ConfigurationError


def _words(ids: Tensor, key: int, first: int, count: int) -> Tensor:
    """Random 64-bit words number ``first`` to ``first + count - 1`` of each id: ``[n]`` to ``[n, count]`` int64."""
    start = finalize(ids ^ key)
    counter = torch.arange(first + 1, first + count + 1, device=ids.device) * signed(0x9E3779B97F4A7C15)
    return finalize(start[:, None] + counter)


@dataclass(frozen=True)
class RowDraw:
    """How the first row of an id is drawn.

    Attributes:
        key: 64-bit key of the seed and the table.
        dim: width of a row.
        low, high: bounds of uniform values.
        std: standard deviation of bell-shaped values: sums of eight uniform ones, which lie within 4.9 deviations. ``None``
            for uniform values.
    """

    key: int
    dim: int
    low: float = 0.0
    high: float = 0.0
    std: float | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        """The first rows of ``ids [n]`` int64: ``[n, dim]`` float32."""
        if self.std is None:
            uniform = (_words(ids, self.key, 0, self.dim) >> 40) & 0xFFFFFF
            return uniform.to(torch.float32) * ((self.high - self.low) / (1 << 24)) + self.low
        words = _words(ids, self.key, 0, 2 * self.dim).view(-1, self.dim, 2)
        total = sum(((words >> shift) & 0xFFFF for shift in (0, 16, 32, 48)), torch.zeros_like(words)).sum(-1)
        deviation = (8 * ((1 << 32) - 1) / 12) ** 0.5
        return (total - 4 * 0xFFFF).to(torch.float32) * (self.std / deviation)


def row_draw(config: BaseEmbeddingConfig, seed: int, std: float | None) -> RowDraw:
    """The draw for a table. Without ``std``, it follows TorchRec's default, or an ``init_fn`` of ``torch.nn.init``."""
    name = hashlib.blake2b(f"{seed}/{config.name}".encode(), digest_size=8).digest()
    key, dim = int.from_bytes(name, "little", signed=True), config.embedding_dim
    if std is not None:
        return RowDraw(key, dim, std=std)
    init: Any = config.init_fn
    if isinstance(init, functools.partial) and not init.args:
        if init.func is torch.nn.init.uniform_ and set(init.keywords) <= {"a", "b"}:
            return RowDraw(key, dim, low=init.keywords.get("a", 0.0), high=init.keywords.get("b", 1.0))
        if init.func is torch.nn.init.normal_ and set(init.keywords) <= {"std"}:
            return RowDraw(key, dim, std=init.keywords.get("std", 1.0))
    raise ConfigurationError(
        f"zero_collision: table {config.name!r} has an init_fn, which cannot draw the row of one id alone. Pass "
        "ZeroCollision(std=...) for bell-shaped first rows, or leave init_fn out for TorchRec's uniform ones"
    )
