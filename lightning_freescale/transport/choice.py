"""What the transport can do on this machine, and which backend to use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from lightning_freescale import _C
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once
from lightning_freescale.transport.addresses import host_id
from lightning_freescale.transport.backend import BACKEND_NAME
from lightning_freescale.transport.host_staged import check_cuda_connections
from lightning_freescale.transport.nixl import why_no_rdma
from lightning_freescale.transport.options import Options

MIN_SHARED_MEMORY_BYTES = 64 << 20  # with less, the rings between ranks hold only a few small chunks


@dataclass(frozen=True)
class Capabilities:
    """What the transport can do on this machine.

    Attributes:
        sm_free: whether CUDA tensors can move without SMs.
        reason: why, or why not.
        driver: version of the CUDA driver, for example "13.0"; None without a driver.
        devices: number of CUDA devices that this process sees.
        shared_memory_bytes: free bytes in /dev/shm.
        host: ranks with equal values share memory; other ranks use the network.
        nccl: whether torch was built with NCCL.
        peer_access: whether all CUDA devices that this process sees, at least two, have peer access to each other. False if
            the user wants the buffers of transfers in host memory.
        no_rdma: why transfers to other hosts cannot go over RDMA; empty if they can.
    """

    sm_free: bool
    reason: str
    driver: str | None
    devices: int
    shared_memory_bytes: int
    host: str
    nccl: bool
    peer_access: bool = False
    no_rdma: str = "not looked for"


def capabilities() -> Capabilities:
    """Inspect this machine. It initializes the CUDA driver, so call it in the process of a rank and not before a fork."""
    problem, version, devices = _C.cuda_facts()
    shared = _C.shared_memory_free()
    if not problem and not torch.cuda.is_available():
        problem = "this torch has no CUDA"
    if not problem and shared < MIN_SHARED_MEMORY_BYTES:
        problem = (
            f"/dev/shm has {shared >> 20} MiB free and {MIN_SHARED_MEMORY_BYTES >> 20} MiB are needed; "
            "enlarge it (docker run --shm-size=2g)"
        )
    if not problem:
        try:
            check_cuda_connections()
        except ConfigurationError as error:
            problem = str(error)
    return Capabilities(
        sm_free=not problem,
        reason=problem or "copy engines, pinned shared memory and stream memory operations are available",
        driver=f"{version // 1000}.{version % 1000 // 10}" if version else None,
        devices=devices,
        shared_memory_bytes=shared,
        host=host_id(),
        nccl=dist.is_nccl_available(),
        peer_access=not problem and Options().rings != "host" and all_have_peer_access(),
        no_rdma=why_no_rdma(),
    )


def all_have_peer_access() -> bool:
    """Whether this process sees several CUDA devices, and all of them have peer access to each other."""
    devices = range(torch.cuda.device_count())
    pairs = [(a, b) for a in devices for b in devices if a != b]
    return bool(pairs) and all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)


@dataclass(frozen=True)
class TransportChoice:
    """A backend for ``dist.new_group``, whether it moves data without SMs, why it was chosen, and what moves the data."""

    backend: str
    sm_free: bool
    reason: str
    engine: str


def choose(
    transport: Literal["auto", "nccl", "gloo", "host"],
    device: torch.device,
    *,
    overlapped: bool,
    one_host: bool = True,
    found: Capabilities | None = None,
) -> TransportChoice:
    """Choose the backend for exchanges of tensors on ``device``. Logs the choice and its reason once.

    Args:
        transport: the user's setting. ``"auto"`` is the host-staged transport for exchanges that overlap with compute,
            because NCCL's kernels would slow that compute down, and NCCL for other exchanges, because it is faster alone.
            Between GPUs with peer access, its buffers are in GPU memory.
        device: where the tensors are.
        overlapped: whether the exchanges overlap with compute.
        one_host: whether all ranks share a host. Between hosts without RDMA the host-staged transport uses TCP, and NCCL is
            faster on faster networks, so ``"auto"`` is NCCL there.
        found: what the machine can do; inspected if it is needed and not given.
    """
    choice = decide(transport, device, overlapped, one_host, found)
    log_once(f"transport={transport!r}: the exchanges use {choice.engine}; {choice.reason}")
    return choice


def decide(
    transport: str, device: torch.device, overlapped: bool, one_host: bool, found: Capabilities | None
) -> TransportChoice:
    """As :func:`choose`, without a log."""
    if transport not in ("auto", "nccl", "gloo", "host"):
        raise ConfigurationError(f"transport={transport!r}: use 'auto', 'nccl', 'gloo' or 'host'")
    if device.type == "cpu":
        return _choose_on_cpu(transport)
    return _choose_on_cuda(transport, overlapped, one_host, found)


def _choose_on_cpu(transport: str) -> TransportChoice:
    if transport == "nccl":
        raise ConfigurationError("transport='nccl' moves CUDA tensors only; use 'auto' or 'gloo' on CPU")
    backend = BACKEND_NAME if transport == "host" else "gloo"
    return TransportChoice(backend, False, "CPU tensors move over gloo", "gloo")


def _choose_on_cuda(transport: str, overlapped: bool, one_host: bool, found: Capabilities | None) -> TransportChoice:
    if transport == "gloo":
        return TransportChoice("gloo", False, "it copies through host memory and blocks the host meanwhile", "gloo")
    if transport == "nccl":
        return TransportChoice("nccl", False, "its kernels use SMs", "nccl")
    found = found or capabilities()
    if transport == "host":
        if not found.sm_free:
            raise ConfigurationError(f"transport='host' cannot run here: {found.reason}; use 'auto' or 'nccl'")
        return _copy_engines(one_host, found)
    if found.nccl and not overlapped:
        reason = "the exchanges do not overlap with compute, and NCCL is faster alone"
        return TransportChoice("nccl", False, reason, "nccl")
    if not found.sm_free:
        fallback = "nccl" if found.nccl else "gloo"
        return TransportChoice(fallback, False, f"the SM-free transport cannot run here: {found.reason}", fallback)
    if found.nccl and not one_host and found.no_rdma:
        reason = f"the ranks are on several hosts, where the SM-free transport only has TCP, because {found.no_rdma}"
        return TransportChoice("nccl", False, reason, "nccl")
    return _copy_engines(one_host, found)


def _copy_engines(one_host: bool, found: Capabilities) -> TransportChoice:
    """The SM-free transport. Where its buffers lie, and what its network is, follows from the machine."""
    if one_host and found.peer_access:
        reason = "the GPUs have peer access, so copy engines move the data; a second copy within a GPU takes few SMs"
        return TransportChoice(BACKEND_NAME, False, reason, "peer copies")
    if one_host:
        reason = "copy engines move the data and leave the SMs to compute"
        return TransportChoice(BACKEND_NAME, True, reason, "host staging")
    if not found.no_rdma:
        reason = "copy engines move the data to host memory, and NIXL moves them over RDMA"
        return TransportChoice(BACKEND_NAME, True, reason, "host staging over NIXL")
    reason = f"copy engines move the data to host memory, and threads send them over TCP, because {found.no_rdma}"
    return TransportChoice(BACKEND_NAME, True, reason, "host staging over TCP")
