"""The settings of one ``freescale`` process group."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from lightning_freescale.runtime.errors import ConfigurationError


def from_environment(name: str, default: int) -> int:
    """The integer in an environment variable."""
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"the environment variable {name}={text!r} is not an integer") from None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Pass it as ``dist.new_group(backend="freescale", pg_options=Options(...))``, with equal values on every rank.

    Args:
        priority: priority of the group's transfers. On one device, a ``"high"`` transfer that is ready starts before the
            remaining chunks of every ``"low"`` one.
        chunk_bytes: a transfer is split into chunks of at most this many bytes (environment: ``FREESCALE_CHUNK_BYTES``).
            4 to 16 MiB were fastest on an H200 through host memory. Over TCP a chunk has at most 2 MiB, and at most 512 KiB if
            the priority is ``"high"``.
        buffer_bytes: most bytes of host memory that a rank sends from (``FREESCALE_BUFFER_BYTES``). They are reserved in
            /dev/shm at set-up, at most half of what is free there, and pinned when they are first used. If there are ranks on
            other hosts, a rank receives into as much again.
        network_threads: most threads that send to other hosts, and most that receive from them
            (``FREESCALE_NETWORK_THREADS``). There are never more than ranks on other hosts.
        rings: where the buffers between ranks of one host lie (``FREESCALE_RINGS``). ``"host"`` is pinned host memory.
            ``"device"`` is the memory of the receiving GPU, ``buffer_bytes`` of it for each rank and group, reserved at set-up.
            ``"auto"`` is ``"device"`` if no ranks share a GPU and all GPUs of the host have peer access to each other.
        network: what moves data between hosts (``FREESCALE_NETWORK``). ``"tcp"`` is TCP. ``"nixl"`` is NIXL, over RDMA.
            ``"auto"`` is NIXL if it is installed and every host has an RDMA device, otherwise TCP.
        reductions: the backend of CUDA tensors for every collective that the transport does not implement. ``"auto"`` is
            NCCL if torch was built with it, otherwise gloo. CPU tensors always use gloo.
        cpu: what moves CPU tensors. ``"gloo"``, or ``"queue"``: the queue that moves CUDA tensors, with threads instead of
            copy engines. ``"queue"`` is meant for tests of the protocol on machines without a GPU.
    """

    priority: Literal["high", "low"] = "low"
    chunk_bytes: int = field(default_factory=lambda: from_environment("FREESCALE_CHUNK_BYTES", 8 << 20))
    buffer_bytes: int = field(default_factory=lambda: from_environment("FREESCALE_BUFFER_BYTES", 256 << 20))
    network_threads: int = field(default_factory=lambda: from_environment("FREESCALE_NETWORK_THREADS", 4))
    rings: Literal["auto", "host", "device"] = field(
        default_factory=lambda: os.environ.get("FREESCALE_RINGS", "auto")  # type: ignore[arg-type, return-value]
    )
    network: Literal["auto", "tcp", "nixl"] = field(
        default_factory=lambda: os.environ.get("FREESCALE_NETWORK", "auto")  # type: ignore[arg-type, return-value]
    )
    reductions: Literal["auto", "nccl", "gloo"] = "auto"
    cpu: Literal["gloo", "queue"] = "gloo"

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "buffer_bytes"):
            if getattr(self, name) < 4096:
                raise ConfigurationError(f"{name}={getattr(self, name)}: must be at least 4096 bytes")
        if self.network_threads < 1:
            raise ConfigurationError(f"network_threads={self.network_threads}: must be at least 1")
        choices = {
            "priority": ("high", "low"),
            "rings": ("auto", "host", "device"),
            "network": ("auto", "tcp", "nixl"),
            "reductions": ("auto", "nccl", "gloo"),
            "cpu": ("gloo", "queue"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: use one of {', '.join(map(repr, allowed))}")

    @classmethod
    def of(cls, given: Any) -> Options:
        """The options that were passed to ``new_group``: an :class:`Options`, a dict of its fields, or None for defaults."""
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        if isinstance(given, dict):
            known = [field.name for field in fields(cls)]
            unknown = sorted(given.keys() - set(known))
            if unknown:
                raise ConfigurationError(
                    f"pg_options: unknown field {unknown[0]!r} of the freescale backend; it has {', '.join(known)}"
                )
            return cls(**given)
        raise ConfigurationError(
            f"pg_options={given!r}: the freescale backend takes lightning_freescale.transport.Options or a dict"
        )
