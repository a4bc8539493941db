"""Where the buffers between ranks of one host lie: in pinned host memory, or in the memory of the receiving GPU (CUDA IPC).

Between two GPUs with peer access, the sender's copy engine writes over NVLink or PCIe directly into the GPU of the receiver,
which then copies within its own memory. The GPU runs that second copy, and a fill of the buffer after it, on its SMs. They move
at the speed of its memory, so they take a small part of the time of the transfer. Where ranks share a GPU, all copies between
them would run on its SMs, so host memory is better there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once
from lightning_freescale.transport.addresses import Place
from lightning_freescale.transport.rendezvous import Rendezvous


def gpu_of(device: torch.device) -> tuple[str, list[str]]:
    """The identity of this rank's GPU, and those of the GPUs that it has peer access to. Empty on a CPU."""
    if device.type != "cuda":
        return "", []
    own = torch.cuda.current_device() if device.index is None else device.index
    others = [index for index in range(torch.cuda.device_count()) if index != own]
    reached = [_identity(index) for index in others if torch.cuda.can_device_access_peer(own, index)]
    return _identity(own), reached


def _identity(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


@dataclass(frozen=True)
class RingPlacement:
    """Whether the rings of a host are to lie in device memory, and why. There is no reason if there is no GPU."""

    on_device: bool
    reason: str


def place_rings(wanted: str, rank: int, places: Sequence[Place]) -> RingPlacement:
    """Decide for the host of ``rank``. Every rank of the host gets the same answer from the same places."""
    if wanted != "auto":
        return RingPlacement(wanted == "device", f"rings={wanted!r} was set")
    here = [place for place in places if place.host == places[rank].host]
    gpus = [place.gpu for place in here]
    if "" in gpus:
        return RingPlacement(False, "")
    if len(here) == 1:
        return RingPlacement(False, "no other rank is on this host")
    if len(set(gpus)) < len(gpus):
        return RingPlacement(False, "ranks share a GPU, and copies within a GPU run on its SMs")
    if any(set(gpus) - {place.gpu, *place.peers} for place in here):
        return RingPlacement(False, "not all GPUs of this host have peer access to each other")
    return RingPlacement(True, "all GPUs of this host have peer access to each other")


def map_rings(queue: Any, wanted: str, rank: int, placement: RingPlacement, meeting: Meeting) -> None:
    """Map the rings of the ranks of this host. A collective of all ranks, also of those whose rings are in host memory.

    Raises a ConfigurationError if ``wanted`` is ``"device"`` and a rank of this host cannot map them.
    """
    problem = queue.map_device_rings(meeting.addresses) if placement.on_device else ""
    problems = meeting.rendezvous.share("rings", problem)
    here = [text for text, host in zip(problems, meeting.hosts, strict=True) if host == meeting.hosts[rank] and text]
    if here and wanted == "device":
        raise ConfigurationError(
            f"rings='device' cannot run here: {here[0]}; use rings='host' (FREESCALE_RINGS=host). Memory of a GPU can only be "
            "shared between processes of one user and one container"
        )
    if here:
        queue.drop_device_rings()
        placement = RingPlacement(False, f"{placement.reason}, but their memory cannot be shared: {here[0]}")
    where = "the memory of the receiving GPU" if placement.on_device else "host memory"
    if wanted == "auto" and placement.reason:
        log_once(f"the buffers of transfers between ranks of one host are in {where}: {placement.reason}")


@dataclass(frozen=True)
class Meeting:
    """What the ranks of a group know of each other during set-up."""

    rendezvous: Rendezvous
    hosts: Sequence[str]
    addresses: list[str]
