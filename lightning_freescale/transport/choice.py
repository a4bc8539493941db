"""What the transport can do on this machine, and which backend to use for what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from lightning_freescale import _C
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once
from lightning_freescale.transport.backend import BACKEND_NAME
from lightning_freescale.transport.host_staged import refuse_single_connection
from lightning_freescale.transport.rendezvous import host_id

ENOUGH_SHARED_MEMORY = 64 << 20  # bytes; less leaves a handful of small chunks


@dataclass(frozen=True)
class Capabilities:
    """``sm_free`` says whether CUDA tensors can move without GPU cores here, ``reason`` why, or why not."""

    sm_free: bool
    reason: str
    driver: str | None  # version of the CUDA driver, as in "13.0"
    devices: int  # CUDA devices that this process sees
    shared_memory_bytes: int  # free in /dev/shm
    host: str  # ranks with equal values share memory; the others talk over the network
    nccl: bool  # whether torch was built with NCCL


def capabilities() -> Capabilities:
    """Look at this machine. Starts the CUDA driver: call it in the process of a rank, not before forking one."""
    problem, version, devices = _C.cuda_facts()
    shared = _C.shared_memory_free()
    if not problem and not torch.cuda.is_available():
        problem = "this torch has no CUDA"
    if not problem and shared < ENOUGH_SHARED_MEMORY:
        problem = (
            f"/dev/shm has {shared >> 20} MiB free, {ENOUGH_SHARED_MEMORY >> 20} are needed (docker run --shm-size=2g)"
        )
    if not problem:
        try:
            refuse_single_connection()
        except ConfigurationError as error:
            problem = str(error)
    return Capabilities(
        sm_free=not problem,
        reason=problem or "copy engines, pinned shared memory and stream-written words are available",
        driver=f"{version // 1000}.{version % 1000 // 10}" if version else None,
        devices=devices,
        shared_memory_bytes=shared,
        host=host_id(),
        nccl=dist.is_nccl_available(),
    )


@dataclass(frozen=True)
class TransportChoice:
    """A backend for ``dist.new_group`` and why it was chosen."""

    backend: str
    sm_free: bool
    reason: str


def choose(
    transport: Literal["auto", "nccl", "gloo", "host"],
    device: torch.device,
    *,
    overlapped: bool,
    one_host: bool = True,
    found: Capabilities | None = None,
) -> TransportChoice:
    """The backend for exchanges of tensors on ``device``. Says once what was chosen and why.

    Args:
        transport: the user's wish. ``"auto"`` takes the host-staged transport where the exchanges run beside compute,
            which NCCL's kernels would slow down, and NCCL where nothing runs beside them, since it is faster alone.
        overlapped: whether compute runs beside the exchanges.
        one_host: whether all ranks share a host. Between hosts the host-staged transport speaks TCP, which NCCL beats on
            faster networks: ``"auto"`` leaves it to NCCL.
        found: what the machine can do; looked up when it is needed and not given.
    """
    if transport not in ("auto", "nccl", "gloo", "host"):
        raise ConfigurationError(f"transport={transport!r}: use 'auto', 'nccl', 'gloo' or 'host'")
    choice = _on_cpu(transport) if device.type == "cpu" else _on_cuda(transport, overlapped, one_host, found)
    log_once(f"transport={transport!r}: {choice.backend}, {choice.reason}")
    return choice


def _on_cpu(transport: str) -> TransportChoice:
    if transport == "nccl":
        raise ConfigurationError("transport='nccl' moves CUDA tensors only; use 'auto' or 'gloo' on CPU")
    backend = BACKEND_NAME if transport == "host" else "gloo"
    return TransportChoice(backend, False, "CPU tensors move over gloo; there are no GPU cores to spare")


def _on_cuda(transport: str, overlapped: bool, one_host: bool, found: Capabilities | None) -> TransportChoice:
    if transport == "gloo":
        return TransportChoice("gloo", False, "asked for; it copies through host memory with the host waiting")
    if transport == "nccl":
        return TransportChoice("nccl", False, "asked for; its kernels use GPU cores")
    found = found or capabilities()
    if transport == "host":
        if not found.sm_free:
            raise ConfigurationError(f"transport='host' cannot run here: {found.reason}; use 'auto' or 'nccl'")
        return TransportChoice(BACKEND_NAME, True, "asked for; copy engines move the data")
    if found.nccl and not overlapped:
        return TransportChoice("nccl", False, "no compute runs beside the exchanges, and NCCL is faster alone")
    if found.nccl and not one_host:
        return TransportChoice(
            "nccl", False, "ranks are on several hosts, where the SM-free transport has no network but TCP"
        )
    if found.sm_free:
        return TransportChoice(BACKEND_NAME, True, "copy engines move the data and leave the GPU's cores to compute")
    return TransportChoice("nccl" if found.nccl else "gloo", False, f"not SM-free: {found.reason}")
