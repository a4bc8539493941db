"""Which format a checkpoint has, and what writes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once
from lightning_freescale.strategy.checkpoints.incremental import Incremental
from lightning_freescale.strategy.checkpoints.tensors import total_bytes

FORMATS = ("auto", "file", "sharded")
FILE_LIMIT_BYTES = 256 << 20  # Tables up to this size are gathered into one file, with checkpoint="auto".


def check_option(option: str | Incremental) -> None:
    """Raise :class:`ConfigurationError` unless ``option`` is a format."""
    if not isinstance(option, Incremental) and option not in FORMATS:
        raise ConfigurationError(
            f"checkpoint={option!r} is unknown; choose one of {', '.join(FORMATS)}, Incremental(...)"
        )


def choose_format(option: str | Incremental, io: Any, weights: Iterable[Any], world_size: int) -> str:
    """``"file"`` or ``"sharded"``, for a model with the given weights.

    Args:
        option: the strategy's ``checkpoint``.
        io: the Trainer's ``CheckpointIO``. One that the user wrote can write files only.
        weights: the values of the model's state dict.
        world_size: number of ranks.
    """
    check_option(option)
    size = total_bytes(weights)
    text = f"{size / (1 << 20):,.1f} MiB"
    if option == "auto":
        chosen = "file" if world_size == 1 or size <= FILE_LIMIT_BYTES else "sharded"
        reason = "there is one rank" if world_size == 1 else f"the tables take {text}" if size else "there is no table"
        log_once(
            f"checkpoints are plain Lightning files, because {reason}"
            if chosen == "file"
            else f"checkpoints are folders to which every rank writes its shards, because the tables take {text}. "
            "`freescale export FOLDER FILE --lightning` makes one file for programs without lightning_freescale"
        )
    else:
        chosen = "sharded" if isinstance(option, Incremental) else option
    if chosen == "sharded" and not is_lightnings_io(writing_io(io)):
        raise ConfigurationError(
            f"{type(io).__name__}: a CheckpointIO writes one file, but checkpoints are folders here "
            f"(checkpoint={option!r}, tables of {text}). Use FreeScaleStrategy(checkpoint='file') if rank 0 has the memory "
            "for all tables, or leave the plugin out"
        )
    return chosen


def _is_lightnings(io: Any, name: str) -> bool:
    kind = type(io)
    return kind.__name__ == name and kind.__module__.split(".")[0] in (
        "lightning",
        "pytorch_lightning",
        "lightning_fabric",
    )


def is_lightnings_io(io: Any) -> bool:
    """Whether ``io`` is Lightning's own, which writes files with ``torch.save``."""
    return _is_lightnings(io, "TorchCheckpointIO")


def is_asynchronous(io: Any) -> bool:
    """Whether the user asked for asynchronous saves with Lightning's ``AsyncCheckpointIO``."""
    return _is_lightnings(io, "AsyncCheckpointIO")


def writing_io(io: Any) -> Any:
    """The ``CheckpointIO`` that writes. This package runs it in a thread of its own if saves are asynchronous."""
    return io.checkpoint_io if is_asynchronous(io) else io
