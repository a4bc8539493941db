"""The C++ queue between processes: ranks on several hosts, and ranks that die, are late or disagree."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale import _C, ConfigurationError
from lightning_freescale.transport import TransportError
from lightning_freescale.transport.host_staged import check_cuda_connections
from tests.ranks import RankFailed, run_ranks
from tests.transport.collectives import all_to_all_case, in_group, same_bits
from tests.transport.networks import use_network

QUEUE = {"cpu": "queue", "chunk_bytes": 4096, "buffer_bytes": 1 << 20}


def _segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("freescale-")}


def _exchange_across_hosts(rank: int, world: int, hosts: int) -> dict[str, int]:
    os.environ["FREESCALE_HOST_ID"] = f"host{rank % hosts}"
    return in_group(rank, world, QUEUE, _exchange_many, (40,))


def _exchange_many(rank: int, world: int, group: Any, count: int, width: int = 400) -> dict[str, int]:
    works = []
    for seed in range(count):
        source, in_splits, out_splits, right = all_to_all_case(rank, world, seed, torch.float64, width)
        output = torch.empty_like(right)
        works.append(
            (dist.all_to_all_single(output, source, out_splits, in_splits, group=group, async_op=True), output)
        )
        works[-1] += (right,)
    for work, output, right in reversed(works):
        work.wait()
        assert same_bits(output, right)
    return group.report()["cpu"]


@pytest.mark.parametrize("network", ["tcp", "nixl"])
@pytest.mark.parametrize(("world", "hosts"), [(2, 2), (3, 2), (4, 2), (4, 4)])
def test_exchanges_between_ranks_on_several_hosts(
    world: int, hosts: int, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_network(monkeypatch, network)
    reports = run_ranks(_exchange_across_hosts, world, (world, hosts))
    assert all(report["exchanges"] == 40 for report in reports)
    assert sum(report["sent_bytes"] for report in reports) == sum(report["received_bytes"] for report in reports) > 0


def test_buffers_are_bounded_and_reused_and_have_no_name() -> None:
    before = _segments()
    for report in run_ranks(in_group, 2, (2, QUEUE, _names_then_many, ())):
        assert report["sent_bytes"] > 3 * report["ring_bound_bytes"]  # so every slot was used several times
        assert 0 < report["ring_bytes"] <= report["ring_bound_bytes"] <= QUEUE["buffer_bytes"]
    assert _segments() == before


def _names_then_many(rank: int, world: int, group: Any) -> dict[str, int]:
    dist.all_to_all_single(torch.empty(world), torch.empty(world), group=group)
    dist.barrier()
    # The files are unlinked, so no other process can open them.
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/freescale-" in line]
    assert maps
    assert all("(deleted)" in line for line in maps)
    return _exchange_many(rank, world, group, 30, width=4000)


def _exchange_with_a_rank_that_dies(rank: int, world: int, host: str) -> None:
    os.environ["FREESCALE_HOST_ID"] = host.format(rank=rank)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    group = dist.new_group(backend="freescale", pg_options=QUEUE)
    dist.all_to_all_single(torch.empty(world), torch.empty(world), group=group)
    dist.barrier()  # every rank has received its data
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # Rank 1 should send 5 floats to rank 0. Rank 2 needs nothing from rank 1, only from rank 0 afterwards.
    counts = [[0] * 3, [5, 0, 0], [0] * 3]
    output = torch.empty(sum(counts[source][rank] for source in range(world)))
    splits = [counts[source][rank] for source in range(world)]
    dist.all_to_all_single(output, torch.empty(0), splits, [0] * 3, group=group)
    dist.all_to_all_single(torch.empty(2), torch.empty(2), [1, 0, 1], [1, 0, 1], group=group)


@pytest.mark.parametrize(("host", "network"), [("one", "tcp"), ("host{rank}", "tcp"), ("host{rank}", "nixl")])
def test_every_rank_raises_an_error_that_names_the_dead_peer(
    host: str, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_network(monkeypatch, network)
    before = _segments()
    with pytest.raises(RankFailed) as caught:
        # The limit is far below the group's timeout of half an hour.
        run_ranks(_exchange_with_a_rank_that_dies, 3, (3, host), timeout=30, every_error=True)
    errors = caught.value.errors
    assert "exit code -9" in errors[1]
    for rank in (0, 2):
        assert "TransportError: rank 0, all_to_all #1: waiting for 20 bytes from rank 1" in errors[rank], errors[rank]
    assert "died" in errors[0] or "cannot be reached" in errors[0]
    assert _segments() == before


def _wait_for_a_late_peer(rank: int, world: int, group: Any) -> None:
    if rank == 0:
        with pytest.raises(
            TransportError, match=r"rank 0, all_to_all #0: not finished after .* waiting for 4 bytes from rank 1"
        ):
            dist.all_to_all_single(torch.empty(2), torch.empty(2), group=group)
        with pytest.raises(TransportError, match="rank 0, all_to_all #0"):  # later collectives raise it too
            dist.broadcast(torch.empty(2), src=0, group=group)
    dist.barrier()


def _with_queue(rank: int, world: int, seconds: float, fn: Any) -> Any:
    """Run ``fn(rank, world, group)`` with a queue that is set up beforehand, so only the transfers have the short timeout."""
    if host := os.environ.get("TEST_HOST"):
        os.environ["FREESCALE_HOST_ID"] = host.format(rank=rank)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    group: Any = dist.new_group(backend="freescale", pg_options=QUEUE)
    group._timeout = timedelta(seconds=seconds)
    group._mover(torch.device("cpu"))
    return fn(rank, world, group)


@pytest.mark.parametrize(("host", "network"), [("one", "tcp"), ("host{rank}", "nixl")])
def test_the_timeout_error_names_the_late_peer(host: str, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_network(monkeypatch, network)
    monkeypatch.setenv("TEST_HOST", host)
    run_ranks(_with_queue, 2, (2, 1.0, _wait_for_a_late_peer))


def _disagree(rank: int, world: int, group: Any) -> str:
    try:
        splits = [3, 3] if rank == 0 else [2, 2]
        dist.all_to_all_single(torch.empty(4), torch.empty(sum(splits)), [2, 2], splits, group=group)
    except TransportError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("host", "network"), [("one", "tcp"), ("host{rank}", "nixl")])
def test_the_error_names_sizes_that_do_not_match(host: str, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_network(monkeypatch, network)
    monkeypatch.setenv("TEST_HOST", host)
    messages = run_ranks(_with_queue, 2, (2, 20.0, _disagree))
    assert any("rank 0 sends 12 bytes to rank" in text or "expects 8" in text for text in messages), messages


def _queue_across_hosts(device: _C.TransportDevice, **options: Any) -> _C.TransportQueue:
    """The queue of rank 0 of two, which is not connected."""
    settings: dict[str, Any] = {"high_priority": True, "chunk_bytes": 4096, "buffer_bytes": 1 << 20, "timeout": 5}
    settings |= {"bind_to": "127.0.0.1", "secret": "", "network_threads": 1, "device_rings": True} | options
    return _C.TransportQueue(device=device, rank=0, hosts=["a", "b"], **settings)


def test_a_queue_that_cannot_be_made_holds_nothing() -> None:
    device, before = _C.host_device(), _segments()
    for _ in range(40):  # a device has 32 gates
        with pytest.raises(RuntimeError, match="FREESCALE_SECRET"):
            _queue_across_hosts(device, bind_to="0.0.0.0")
    assert _segments() == before
    _queue_across_hosts(device).close(1)
    assert _segments() == before


def test_a_queue_that_was_never_connected_stops_to_listen_when_it_is_closed() -> None:
    queue = _queue_across_hosts(_C.host_device())
    (wire,) = (line for line in queue.address().splitlines() if line.startswith("wire="))
    host, port, _ = wire.removeprefix("wire=").split()
    socket.create_connection((host, int(port))).close()
    queue.close(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


def _close_twice(rank: int, world: int, group: Any) -> float:
    """Close a queue while another thread closes it and waits three seconds for the peer. Return how long the second call took."""
    queue, seconds = group._mover(torch.device("cpu"))._queue, 0.0
    if rank == 0:
        work = dist.all_to_all_single(torch.empty(2), torch.empty(2), group=group, async_op=True)
        first = threading.Thread(target=queue.close, args=(3,))
        first.start()
        time.sleep(0.2)
        start = time.monotonic()
        queue.close(0)
        seconds = time.monotonic() - start
        first.join()
        with pytest.raises(TransportError, match="closed before all exchanges were done"):
            work.wait()
    dist.barrier()
    return seconds


def test_a_second_close_waits_for_the_first() -> None:
    assert run_ranks(in_group, 2, (2, QUEUE, _close_twice, ()))[0] > 0.3


def _different_options(rank: int, world: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    group = dist.new_group(backend="freescale", pg_options=QUEUE | {"chunk_bytes": 4096 * (1 + rank)})
    with pytest.raises(TransportError, match=r"chunk is .* on rank"):
        dist.all_to_all_single(torch.empty(2), torch.empty(2), group=group)


def test_the_error_names_options_that_differ() -> None:
    run_ranks(_different_options, 2, (2,))


def _exchange_around_a_fork(rank: int, world: int, group: Any) -> int:
    dist.all_to_all_single(torch.empty(2), torch.empty(2), group=group)
    child = os.fork()  # a DataLoader forks its workers like this
    if child == 0:
        mover = group._movers.pop(torch.device("cpu"))
        del mover  # destroyed in the child, which does not have its threads
        os._exit(7)
    _, status = os.waitpid(child, 0)
    dist.all_to_all_single(torch.empty(2), torch.empty(2), group=group)
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_does_not_break_the_queue() -> None:
    assert run_ranks(in_group, 2, (2, QUEUE, _exchange_around_a_fork, ())) == [7, 7]


def _exchange_with_two_priorities(rank: int, world: int) -> int:
    """Use a low- and a high-priority group at the same time. Rank 0 waits in the opposite order of the others."""
    dist.init_process_group("gloo", rank=rank, world_size=world)
    groups = [dist.new_group(backend="freescale", pg_options=QUEUE | {"priority": p}) for p in ("low", "high")]
    works = []
    for seed in range(60):
        source, in_splits, out_splits, right = all_to_all_case(
            rank, world, seed, torch.int64, width=1 if seed % 2 else 2000
        )
        output = torch.empty_like(right)
        work = dist.all_to_all_single(output, source, out_splits, in_splits, group=groups[seed % 2], async_op=True)
        works.append((work, output, right))
    for work, output, right in works if rank else reversed(works):
        work.wait()
        assert same_bits(output, right)
    dist.destroy_process_group()
    return len(works)


def test_two_priorities_at_once() -> None:
    assert run_ranks(_exchange_with_two_priorities, 3, (3,)) == [60] * 3


def _receive_before_a_late_rank_sends(rank: int, world: int, group: Any) -> None:
    """Rank 1 sends only when the rows of rank 2 have arrived at rank 0, which also waits for those of rank 1."""
    go = torch.zeros(1)
    group._mover(torch.device("cpu"))  # sets up the queue
    if rank == 1:
        dist.recv(go, src=0)
    received = torch.zeros(world)
    work = dist.all_to_all_single(received, torch.full((world,), rank + 1.0), group=group, async_op=True)
    if rank == 0:
        late = time.monotonic() + 20
        while received[2] == 0 and time.monotonic() < late:
            time.sleep(0.001)
        arrived = received.tolist()
        dist.send(go, dst=1)
        assert arrived[1:] == [0.0, 3.0]
    work.wait()
    assert received.tolist() == [1.0, 2.0, 3.0]


def test_urgent_rows_are_copied_as_they_arrive() -> None:
    run_ranks(in_group, 3, (3, QUEUE | {"priority": "high"}, _receive_before_a_late_rank_sends, ()))


def test_a_single_hardware_queue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    check_cuda_connections()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ConfigurationError, match="CUDA_DEVICE_MAX_CONNECTIONS=1"):
        check_cuda_connections()
