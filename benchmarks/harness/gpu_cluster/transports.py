"""The transports that benchmarks compare, and a way to make ranks of one host treat each other as separate hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# Names of the transports in results: NCCL; the SM-free transport through the memory of one host; and the SM-free transport
# over TCP, between ranks that treat each other as separate hosts.
NCCL, HOST, TCP = "nccl", "freescale", "freescale over TCP"


@contextmanager
def as_separate_host(rank: int) -> Iterator[None]:
    """SM-free groups that are connected inside the block treat ``rank`` as its own host, as ``NCCL_HOSTID`` does for NCCL."""
    os.environ["FREESCALE_HOST_ID"] = f"node{rank}"
    try:
        yield
    finally:
        del os.environ["FREESCALE_HOST_ID"]
