"""``wire``: the type that rows and gradients have while they travel. Tables, updates and the model's input stay float32.

With ``"bfloat16"`` half of the bytes travel. Each value is rounded to 8 significant bits, so its relative error is at most 2^-8.
TorchRec's codecs round the rows and gradients of the synchronous exchange. The prioritized exchange rounds in the same way, so
both give the same training bit for bit on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.types import CommOp

from lightning_freescale.runtime.errors import ConfigurationError

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CODECS = {torch.float32: CommType.FP32, torch.bfloat16: CommType.BF16}
_TRAVELS = ("rows", "gradients")
_OPERATION = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name

Wire = str | Mapping[str, str]


class WireTypes(NamedTuple):
    """The types of rows and of gradients on the wire."""

    rows: torch.dtype = torch.float32
    gradients: torch.dtype = torch.float32


def parse_wire(wire: Wire) -> WireTypes:
    """The types that the strategy's option ``wire`` asks for.

    >>> parse_wire("bfloat16")
    WireTypes(rows=torch.bfloat16, gradients=torch.bfloat16)
    >>> parse_wire({"gradients": "bfloat16"})
    WireTypes(rows=torch.float32, gradients=torch.bfloat16)

    Raises:
        ConfigurationError: if a type or a key is unknown.
    """
    named = dict.fromkeys(_TRAVELS, wire) if isinstance(wire, str) else dict(wire)
    if unknown := sorted(set(named) - set(_TRAVELS)):
        raise ConfigurationError(f"wire: {unknown[0]!r} is unknown; the keys are {', '.join(_TRAVELS)}")
    for value in named.values():
        if value not in _TYPES:
            raise ConfigurationError(f"wire={value!r} is unknown; choose one of {', '.join(_TYPES)}")
    return WireTypes(**{name: _TYPES[value] for name, value in named.items()})


def torchrec_codecs(types: WireTypes) -> dict[str, Any] | None:
    """TorchRec's codecs for the rows and gradients of an ``EmbeddingCollection``; None if both are float32."""
    if types == WireTypes():
        return None
    config = QCommsConfig(forward_precision=_CODECS[types.rows], backward_precision=_CODECS[types.gradients])
    return {_OPERATION: get_qcomm_codecs(config)}


def wire_types_of(module: ShardedEmbeddingCollection) -> WireTypes:
    """The types that TorchRec's codecs of ``module`` stand for. A single rank sends nothing, and TorchRec rounds nothing."""
    codecs = (module.qcomm_codecs_registry or {}).get(_OPERATION)
    if codecs is None or module._env.world_size == 1:
        return WireTypes()
    return WireTypes(*(codec.quantized_dtype for codec in (codecs.forward, codecs.backward)))


def to_wire(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """``rows`` in the type of the wire. As TorchRec's codecs do it, infinite values become the largest finite ones."""
    if dtype == torch.float32:
        return rows.to(dtype)
    if rows.dtype == dtype:
        return rows
    limits = torch.finfo(dtype)
    return rows.float().clamp(limits.min, limits.max).to(dtype)
