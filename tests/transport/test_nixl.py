"""When NIXL moves the data between hosts, and what happens where it cannot. Other files exchange data over it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale import ConfigurationError
from lightning_freescale.transport import nixl
from lightning_freescale.transport.addresses import Place
from tests.ranks import RankFailed, run_ranks
from tests.transport.collectives import in_group
from tests.transport.networks import use_network

HERE, THERE = Place("a", "m", "", no_rdma=""), Place("b", "m", "", no_rdma="")
WITHOUT = Place("b", "m", "", no_rdma="this machine has no RDMA device")


def test_nixl_is_used_between_hosts_that_have_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREESCALE_NIXL_LIBRARY", "/somewhere/libnixl_capi.so")
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert nixl.library_of_group("auto", [HERE, HERE]) == ""
    assert nixl.library_of_group("auto", [HERE, WITHOUT]) == ""
    assert nixl.library_of_group("tcp", [HERE, THERE]) == ""
    assert "UCX_TLS" not in os.environ
    assert nixl.library_of_group("auto", [HERE, THERE]) == "/somewhere/libnixl_capi.so"
    assert nixl.library_of_group("nixl", [HERE, WITHOUT]) == "/somewhere/libnixl_capi.so"
    assert os.environ["UCX_TLS"] == "^tcp"


def test_the_error_says_that_nixl_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "nixl_library", lambda: "")
    with pytest.raises(ConfigurationError, match="NIXL is not installed; pip install nixl-cu13"):
        nixl.library_of_group("nixl", [HERE, THERE])
    monkeypatch.setattr(nixl, "rdma_devices", lambda: ["mlx5_0"])
    assert "pip install nixl-cu13" in nixl.why_no_rdma()
    monkeypatch.setattr(nixl, "rdma_devices", lambda: [])
    assert nixl.why_no_rdma() == "this machine has no RDMA device"


def _start(rank: int, world: int) -> None:
    os.environ["FREESCALE_HOST_ID"] = f"host{rank}"
    in_group(rank, world, {"cpu": "queue", "buffer_bytes": 1 << 20}, _exchange, ())


def _exchange(rank: int, world: int, group: Any) -> None:
    dist.all_to_all_single(torch.empty(world), torch.empty(world), group=group)


def _errors_of_start() -> dict[int, str]:
    with pytest.raises(RankFailed) as caught:
        run_ranks(_start, 2, (2,), timeout=30, every_error=True)
    return caught.value.errors


def test_a_machine_without_rdma_is_an_error_of_the_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    use_network(monkeypatch, "nixl")
    if nixl.rdma_devices():
        pytest.skip("for machines without RDMA")
    monkeypatch.delenv("UCX_TLS")
    monkeypatch.delenv("UCX_NET_DEVICES")
    for text in _errors_of_start().values():
        assert "NIXL cannot start" in text
        assert "UCX_TLS=^tcp" in text
        assert "FREESCALE_NETWORK=tcp" in text


def test_a_library_that_cannot_be_loaded_is_an_error_of_the_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREESCALE_NETWORK", "nixl")
    monkeypatch.setenv("FREESCALE_NIXL_LIBRARY", "/nowhere/libnixl_capi.so")
    for text in _errors_of_start().values():
        assert "NIXL cannot be loaded: /nowhere/libnixl_capi.so" in text
