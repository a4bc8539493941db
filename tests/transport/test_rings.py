"""Where the buffers between ranks of one host lie. The tests run on host memory, which stands for that of the GPU."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale import ConfigurationError
from lightning_freescale.transport import Options
from lightning_freescale.transport.addresses import Place
from lightning_freescale.transport.rings import place_rings
from tests.ranks import RankFailed, run_ranks
from tests.transport.collectives import all_to_all_case, in_group, same_bits

ON_DEVICE = {"cpu": "queue", "chunk_bytes": 4096, "buffer_bytes": 1 << 20, "rings": "device"}


def _place(host: str, gpu: str, peers: str) -> Place:
    return Place(host, "machine", "", gpu, peers.split())


@pytest.mark.parametrize(
    ("places", "on_device", "reason"),
    [
        ([_place("a", "0", "1 2"), _place("a", "1", "0 2"), _place("a", "2", "0 1")], True, "all GPUs"),
        ([_place("a", "0", "1"), _place("a", "1", ""), _place("b", "2", "")], False, "not all GPUs"),
        ([_place("a", "0", "1"), _place("a", "1", "0"), _place("b", "2", "")], True, "all GPUs"),
        ([_place("a", "0", "1"), _place("a", "0", "1"), _place("a", "1", "0")], False, "share a GPU"),
        ([_place("a", "0", "1"), _place("b", "0", "1")], False, "no other rank"),
        ([_place("a", "", ""), _place("a", "", "")], False, ""),
    ],
)
def test_auto_needs_peer_access_between_all_gpus_of_a_host(places: list[Place], on_device: bool, reason: str) -> None:
    found = place_rings("auto", 0, [Place.from_text(place.as_text()) for place in places])
    assert found.on_device == on_device
    assert reason in found.reason
    assert not place_rings("host", 0, places).on_device
    assert place_rings("device", 0, places).on_device


def test_the_environment_sets_where_the_rings_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options().rings == "auto"
    monkeypatch.setenv("FREESCALE_RINGS", "device")
    assert Options().rings == "device"
    monkeypatch.setenv("FREESCALE_RINGS", "moon")
    with pytest.raises(ConfigurationError, match="rings='moon': use one of 'auto', 'host', 'device'"):
        Options()


def _exchange_then_die(rank: int, world: int, group: Any) -> dict[str, int]:
    works = []
    for seed in range(40):
        source, in_splits, out_splits, right = all_to_all_case(rank, world, seed, torch.float64, 400)
        output = torch.empty_like(right)
        work = dist.all_to_all_single(output, source, out_splits, in_splits, group=group, async_op=True)
        works.append((work, output, right))
    for work, output, right in reversed(works):
        work.wait()
        assert same_bits(output, right)
    report = group.report()["cpu"]
    assert report["device_bytes"] == 1 << 20
    assert report["pinned_bytes"] < 1 << 18, "no ring may be pinned"
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    output = torch.zeros(world * 1000)
    work = dist.all_to_all_single(output, torch.ones(world * 1000), group=group, async_op=True)
    try:
        work.wait()
    finally:
        from_dead = output.view(world, 1000)[1]
        assert bool(from_dead.isnan().all()), "what a dead rank did not send must be NaN"
    return report


def test_exchanges_are_right_and_a_dead_rank_leaves_nan() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(in_group, 3, (3, ON_DEVICE, _exchange_then_die, ()), timeout=60, every_error=True)
    assert "exit code -9" in caught.value.errors[1]
    for rank in (0, 2):
        assert "TransportError" in caught.value.errors[rank], caught.value.errors[rank]
        assert "rank 1" in caught.value.errors[rank]
