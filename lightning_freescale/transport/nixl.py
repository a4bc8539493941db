"""NIXL, the library that writes into the memory of other hosts over RDMA: where it is installed, and what it can use.

The packages ``nixl-cu12`` and ``nixl-cu13`` contain it (the extras ``nixl-cu12`` and ``nixl-cu13`` of this package). It is loaded
when a group needs it. UCX, which NIXL uses, may not use TCP unless ``UCX_TLS`` permits it: over TCP, UCX lets every process that
reaches its port write into the memory of the rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once
from lightning_freescale.transport.addresses import Place

RDMA_DEVICES = Path("/sys/class/infiniband")


def nixl_library() -> str:
    """The path of NIXL's C library, or an empty text if NIXL is not installed. ``FREESCALE_NIXL_LIBRARY`` overrides it."""
    if given := os.environ.get("FREESCALE_NIXL_LIBRARY"):
        return given
    for folder in sys.path:
        found = sorted(Path(folder or ".").glob(".nixl_cu*.mesonpy.libs/libnixl_capi.so"))
        if found:
            return str(found[-1])
    return ""


def rdma_devices() -> list[str]:
    """Names of the RDMA devices of this machine, for example ``["mlx5_0"]``."""
    return sorted(device.name for device in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []


def why_no_rdma() -> str:
    """Why transfers cannot go over RDMA from this machine; empty if they can."""
    if os.environ.get("FREESCALE_NETWORK") == "tcp":
        return "FREESCALE_NETWORK=tcp is set"
    if not rdma_devices():
        return "this machine has no RDMA device"
    if not nixl_library():
        return "NIXL is not installed (pip install nixl-cu13)"
    return ""


def library_of_group(wanted: str, places: Sequence[Place]) -> str:
    """The library that moves chunks between the hosts of a group, or an empty text if TCP does.

    Every rank gets an answer of the same kind from the same places. Raises a ConfigurationError if ``wanted`` is ``"nixl"`` and
    NIXL is not installed.
    """
    several = len({place.host for place in places}) > 1
    if not several or wanted == "tcp":
        return ""
    if wanted == "auto":
        missing = {place.no_rdma for place in places} - {""}
        if missing:
            log_once(f"ranks on several hosts exchange data over TCP: {sorted(missing)[0]}")
            return ""
        log_once("ranks on several hosts exchange data by NIXL, over RDMA")
    library = nixl_library()
    if not library:
        raise ConfigurationError(
            "network='nixl' cannot run here: NIXL is not installed; pip install nixl-cu13, or nixl-cu12"
        )
    os.environ.setdefault("UCX_TLS", "^tcp")
    return library
