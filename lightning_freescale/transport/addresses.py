"""Which ranks share memory, which run on one machine, and at which address a rank can be reached by other hosts."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from json import dumps, loads
from pathlib import Path

from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.transport.errors import TransportError

SHORTEST_SECRET = 16  # characters
_ANYWHERE = "192.0.2.1"  # an address that belongs to nobody (RFC 5737); the route to it is the default route
_HOW_TO_FIX = "set FREESCALE_ADDRESS on that host to an address at which the other hosts reach it"


def host_id() -> str:
    """A text that is equal on ranks that can share memory.

    ``FREESCALE_HOST_ID`` overrides it. With a value per rank, one machine acts as several hosts.
    """
    given = os.environ.get("FREESCALE_HOST_ID")
    if given:
        return given
    return f"{_boot_id()}:{os.stat('/dev/shm').st_dev}"  # containers of one machine may have separate /dev/shm mounts


def machine_id() -> str:
    """A text that is equal on ranks that reach each other over the loopback interface."""
    return f"{_boot_id()}:{os.stat('/proc/self/ns/net').st_ino}"


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def shared_secret() -> str:
    """``FREESCALE_SECRET``, which the launcher sets to the same text on all hosts; empty if it is not set."""
    secret = os.environ.get("FREESCALE_SECRET", "")
    if 0 < len(secret) < SHORTEST_SECRET:
        raise ConfigurationError(
            f"FREESCALE_SECRET has {len(secret)} characters, and {SHORTEST_SECRET} are needed: a short secret can be "
            "guessed. Set it to the output of `openssl rand -hex 32`, the same on every host"
        )
    return secret


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        host: ranks with equal values share memory.
        machine: ranks with equal values reach each other over the loopback interface.
        address: the address at which other machines reach this rank; empty if this rank cannot tell.
        gpu: identity of its GPU; empty on a CPU.
        peers: identities of the GPUs that its GPU has peer access to.
        no_rdma: why this rank cannot use RDMA; empty if it can.
    """

    host: str
    machine: str
    address: str
    gpu: str = ""
    peers: Sequence[str] = ()
    no_rdma: str = "not looked for"

    @classmethod
    def of_this_rank(cls, gpu: str = "", peers: Sequence[str] = (), no_rdma: str = "not looked for") -> Place:
        given = os.environ.get("FREESCALE_ADDRESS")
        return cls(host_id(), machine_id(), given or _address_towards_master(), gpu, peers, no_rdma)

    def as_text(self) -> str:
        return dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Place:
        return cls(**loads(text))


def address_of(rank: int, places: list[Place]) -> str:
    """The address at which ``rank``, which is this rank, listens for ranks on other hosts.

    On the host of the master, the name of the master may be that of the loopback interface. Then the address is that of the
    route to a rank on another machine.
    """
    own = places[rank]
    if given := os.environ.get("FREESCALE_ADDRESS"):
        return given
    elsewhere = [place for place in places if place.machine != own.machine]
    if not elsewhere:
        return "127.0.0.1"
    if own.address:
        return own.address
    for place in elsewhere:
        if place.address and not is_loopback(found := source_address(place.address)):
            return found
    raise TransportError(
        f"rank {rank} does not know at which address other hosts reach it: MASTER_ADDR="
        f"{os.environ.get('MASTER_ADDR')!r} is an address of this machine itself, and no rank of another machine knows its "
        f"own address; {_HOW_TO_FIX}"
    )


def _address_towards_master() -> str:
    """The address of the route to ``MASTER_ADDR``; empty if that is the loopback interface.

    Without ``MASTER_ADDR`` it is the address of the default route.
    """
    master = os.environ.get("MASTER_ADDR")
    found = source_address(master or _ANYWHERE)
    return "" if is_loopback(found) else found


def source_address(target: str) -> str:
    """This machine's address on the route to ``target``; empty if there is no route or no such host."""
    try:
        family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: a datagram socket only looks up the route
            return probe.getsockname()[0]
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    """Whether ``address`` is empty, or an address that only processes of this machine can reach."""
    return not address or ipaddress.ip_address(address.split("%")[0]).is_loopback
