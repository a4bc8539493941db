"""What moves data between the hosts of a test."""

from __future__ import annotations

import pytest

from lightning_freescale.transport.nixl import nixl_library


def use_network(monkeypatch: pytest.MonkeyPatch, network: str) -> None:
    """Make the ranks of a test exchange data between hosts over ``"tcp"``, or by ``"nixl"`` over the loopback interface."""
    if network == "nixl" and not nixl_library():
        pytest.skip("NIXL is not installed (pip install nixl-cu13)")
    monkeypatch.setenv("FREESCALE_NETWORK", network)
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
