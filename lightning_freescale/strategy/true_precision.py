"""``precision="bf16-true"``: the dense part of the model is bfloat16, and the tables keep the type of their configuration.

Lightning converts the whole model. A table of bfloat16 would lose most updates, because they are smaller than the distance of two
neighbouring numbers, and FBGEMM has no such tables on a CPU. So the conversion leaves the tables out. The rows and bags that a
collection returns are converted to bfloat16, as a layer behind it expects. Their gradients arrive in bfloat16, and the update of
the tables is computed in float32. Metrics of torchmetrics keep their type, too: a count in bfloat16 ends at 256.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from lightning_freescale.embedding.plan import embedding_modules
from lightning_freescale.runtime.log import log_once

TRUE_PRECISIONS = {"bf16-true": torch.bfloat16}
_ATTRIBUTE = "_freescale_output_type"


def convert_dense_part(plugin: Any, model: nn.Module) -> None:
    """Convert ``model`` as Lightning's precision ``plugin`` does, without its tables and metrics."""
    with _unchanged_parts(model):
        plugin.convert_module(model)


@contextmanager
def _unchanged_parts(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block, ``model.to()`` leaves tables, sharded or not, and metrics as they are."""
    parts: list[nn.Module] = list(embedding_modules(model).values())
    # ``isinstance`` would ask each of the hundreds of classes of metrics, because theirs is an abstract class.
    parts += [child for child in model.modules() if {ShardedModule, Metric} & set(type(child).__mro__)]
    for part in parts:
        object.__setattr__(part, "_apply", lambda *_, part=part, **__: part)
    try:
        yield
    finally:
        for part in parts:
            part.__dict__.pop("_apply", None)


def convert_outputs(model: nn.Module, precision: str) -> None:
    """Make the sharded collections of ``model`` return rows and bags in the type of ``precision``, from now on.

    It stays so after the training, as the dense part stays in that type.
    """
    dtype = TRUE_PRECISIONS.get(precision)
    if dtype is None:
        return
    log_once(f"precision={precision!r}: the dense part is {dtype}. The tables keep the type of their configuration")
    inside: list[str] = []  # a collection with zero-collision ids returns the output of the collection inside it
    for name, child in model.named_modules():
        if isinstance(child, ShardedModule) and not name.startswith(tuple(inside)):
            inside.append(f"{name}.")
            if not hasattr(child, _ATTRIBUTE):
                object.__setattr__(child, _ATTRIBUTE, dtype)
                child.register_forward_hook(_convert_when_it_arrives)


def _convert_when_it_arrives(module: nn.Module, _: Any, output: Any) -> None:
    output.callbacks.append(lambda arrived: _converted(arrived, getattr(module, _ATTRIBUTE)))


def _converted(output: Any, dtype: torch.dtype) -> Any:
    """The same rows by feature, or bags, in another type."""
    if isinstance(output, KeyedTensor):
        return KeyedTensor(output.keys(), output.length_per_key(), output.values().to(dtype), output.key_dim())
    return {
        feature: JaggedTensor(
            rows.values().to(dtype),
            weights=rows.weights_or_none(),
            lengths=rows.lengths_or_none(),
            offsets=rows.offsets_or_none(),
        )
        for feature, rows in output.items()
    }
