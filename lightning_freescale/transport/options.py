"""Settings of one ``freescale`` process group."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from lightning_freescale.runtime.errors import ConfigurationError


def _environment(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is not a whole number") from None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Passed as ``dist.new_group(backend="freescale", pg_options=Options(...))``, equal on every rank.

    Args:
        priority: class of the group's transfers. On a device, a ``"high"`` transfer that is ready goes before the
            remaining chunks of every ``"low"`` one.
        chunk_bytes: transfers are cut into chunks of at most this size (``FREESCALE_CHUNK_BYTES``). 4 to 16 MiB were
            best on an H200.
        buffer_bytes: bound of the pinned host memory that a rank sends from (``FREESCALE_BUFFER_BYTES``); it starts
            small and grows with the transfers. Ranks on other hosts need as much again to receive into.
        network_threads: that send to other hosts, and as many that receive (``FREESCALE_NETWORK_THREADS``); no more
            than there are ranks there.
        reductions: the inner backend for CUDA tensors of everything the transport does not do itself. ``"auto"``:
            NCCL where it is built in, else gloo. CPU tensors always use gloo.
        cpu: how CPU tensors move: ``"gloo"``, or ``"queue"``, the same queue that moves CUDA tensors with threads in
            the place of copy engines. It exists to test the protocol where no GPU is.
    """

    priority: Literal["high", "low"] = "low"
    chunk_bytes: int = field(default_factory=lambda: _environment("FREESCALE_CHUNK_BYTES", 8 << 20))
    buffer_bytes: int = field(default_factory=lambda: _environment("FREESCALE_BUFFER_BYTES", 256 << 20))
    network_threads: int = field(default_factory=lambda: _environment("FREESCALE_NETWORK_THREADS", 2))
    reductions: Literal["auto", "nccl", "gloo"] = "auto"
    cpu: Literal["gloo", "queue"] = "gloo"

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "buffer_bytes"):
            if getattr(self, name) < 4096:
                raise ConfigurationError(f"{name}={getattr(self, name)}: must be at least 4096 bytes")
        if self.network_threads < 1:
            raise ConfigurationError(f"network_threads={self.network_threads}: must be at least 1")
        choices = {"priority": ("high", "low"), "reductions": ("auto", "nccl", "gloo"), "cpu": ("gloo", "queue")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: use one of {', '.join(map(repr, allowed))}")

    @classmethod
    def of(cls, given: Any) -> Options:
        """The options passed to ``new_group``: an :class:`Options`, a dict of its fields, or nothing."""
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        if isinstance(given, dict):
            unknown = sorted(given.keys() - {field.name for field in fields(cls)})
            if unknown:
                raise ConfigurationError(f"pg_options: unknown field {unknown[0]!r} of the freescale backend")
            return cls(**given)
        raise ConfigurationError(
            f"pg_options={given!r}: the freescale backend takes lightning_freescale.transport.Options"
        )
