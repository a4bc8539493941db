"""How ranks meet: strangers on the network, ranks that fail on the way, addresses, and what the set-up costs."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import resource
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale import _C, ConfigurationError
from lightning_freescale.transport import TransportError
from lightning_freescale.transport.addresses import Place, address_of, shared_secret
from lightning_freescale.transport.rendezvous import Rendezvous
from tests.ranks import RankFailed, run_ranks
from tests.transport.collectives import all_to_all_case, same_bits


def eventually(done: Callable[[], bool], seconds: float) -> bool:
    """Whether ``done()`` becomes true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)
    return done()


QUEUE = {"cpu": "queue", "chunk_bytes": 4096, "buffer_bytes": 1 << 20}
MAGIC = 0xF5CA1E02


def _group(rank: int, world: int, seconds: float = 1800) -> Any:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    return dist.new_group(backend="freescale", pg_options=QUEUE, timeout=timedelta(seconds=seconds))


def _exchange(rank: int, world: int, group: Any) -> None:
    source, in_splits, out_splits, right = all_to_all_case(rank, world, 3, torch.float32)
    output = torch.empty_like(right)
    dist.all_to_all_single(output, source, out_splits, in_splits, group=group)
    assert same_bits(output, right)


# ---- strangers ---------------------------------------------------------------------------------------------------------


def _greet_as_rank_1(stranger: socket.socket, token: str, heard: list[bytes]) -> None:
    """Greet as a process that has read the store, and note what the listener sends after that."""
    stranger.settimeout(10)
    challenge = stranger.recv(72, socket.MSG_WAITALL)
    stranger.sendall(hmac.new(token.encode(), challenge, "sha256").digest())
    heard.append(stranger.recv(1 << 16))


def _set_up_among_strangers(rank: int) -> None:
    os.environ["FREESCALE_HOST_ID"] = f"host{rank}"
    group = _group(rank, 2, seconds=12)
    strangers, heard = [], []
    if rank == 1:
        store = dist.PrefixStore("queue/cpu", group._store)
        store.set("places/1", Place.of_this_rank().as_text())
        lines = dict(line.split("=", 1) for line in store.get("addresses/0").decode().splitlines())
        host, port, token = lines["wire"].split()
        key = Path("/dev/shm", lines["segment"]).read_bytes()[:32]
        assert len(key) == 32
        assert key not in store.get("addresses/0") + store.get("places/0"), "the key travels in the clear"
        strangers = [socket.create_connection((host, int(port))) for _ in range(4)]  # three of them never say anything
        strangers[3].sendall(struct.pack("<Ii", MAGIC, 1) + token.encode())
        threading.Thread(target=_greet_as_rank_1, args=(strangers[3], token, heard)).start()
    _exchange(rank, 2, group)
    if rank == 1:
        assert eventually(lambda: heard == [b""], 10), "the listener must hang up on a stranger"
    for connection in strangers:
        connection.close()


def test_strangers_can_neither_take_a_ranks_place_nor_delay_it() -> None:
    run_ranks(_set_up_among_strangers, timeout=40)


def test_hmac_is_that_of_the_standard_library() -> None:
    for size in (0, 1, 31, 55, 56, 63, 64, 65, 119, 120, 1000):
        key, message = os.urandom(size), os.urandom(3 * size + 1)
        assert _C.hmac_sha256(key, message) == hmac.new(key, message, hashlib.sha256).digest()


def _meet_with_secret(rank: int, world: int, secrets: list[str | None]) -> None:
    os.environ["FREESCALE_HOST_ID"] = f"host{rank}"
    if secrets[rank] is not None:
        os.environ["FREESCALE_SECRET"] = str(secrets[rank])
    _exchange(rank, world, _group(rank, world))


def test_ranks_with_the_same_secret_meet() -> None:
    run_ranks(_meet_with_secret, 3, (3, ["0123456789abcdef"] * 3))


def test_a_wrong_secret_ends_the_set_up_of_every_rank_at_once() -> None:
    secrets = ["0123456789abcdef", "fedcba9876543210", "0123456789abcdef"]
    with pytest.raises(RankFailed) as caught:  # the group's timeout is half an hour
        run_ranks(_meet_with_secret, 3, (3, secrets), timeout=40, every_error=True)
    assert sorted(caught.value.errors) == [0, 1, 2]
    for text in caught.value.errors.values():
        assert "FREESCALE_SECRET must be the same on every host" in text, text


def test_a_short_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREESCALE_SECRET", "hello")
    with pytest.raises(ConfigurationError, match="FREESCALE_SECRET has 5 characters"):
        shared_secret()


def test_the_network_is_refused_without_a_secret() -> None:
    options: dict[str, Any] = {"high_priority": False, "chunk_bytes": 4096, "buffer_bytes": 1 << 20, "timeout": 5}
    options |= {"device": _C.host_device(), "rank": 0, "hosts": ["a", "b"], "network_threads": 1}
    with pytest.raises(RuntimeError, match=r"set the environment variable FREESCALE_SECRET"):
        _C.TransportQueue(bind_to="0.0.0.0", secret="", **options)
    _C.TransportQueue(bind_to="0.0.0.0", secret="0123456789abcdef", **options)
    _C.TransportQueue(bind_to="127.0.0.1", secret="", **options)  # only processes of this machine can connect


# ---- ranks that fail on the way ----------------------------------------------------------------------------------------


def _meet_without_descriptors(rank: int) -> None:
    group = _group(rank, 2)
    if rank == 1:
        used = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
        with contextlib.suppress(OSError):
            while True:
                os.dup(0)
    _exchange(rank, 2, group)


def test_an_error_of_the_system_on_one_rank_ends_the_set_up_of_all_at_once() -> None:
    with pytest.raises(RankFailed) as caught:  # the group's timeout is half an hour
        run_ranks(_meet_without_descriptors, timeout=30, every_error=True)
    assert sorted(caught.value.errors) == [0, 1]
    assert "rank 1: [Errno 24] Too many open files" in caught.value.errors[0]


def test_a_rank_that_does_not_come_is_named() -> None:
    rendezvous = Rendezvous(dist.HashStore(), 0, 3, timedelta(seconds=1))
    with pytest.raises(TransportError, match=r"rank 0: rank 1, 2 did not take part .* \(step 'places'\) within 1 s"):
        rendezvous.share("places", "here")


def _limits_of_connections(rank: int, seconds: float) -> set[int]:
    os.environ["FREESCALE_HOST_ID"] = f"host{rank}"
    group = _group(rank, 2, seconds)
    _exchange(rank, 2, group)
    limits = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=os.dup(int(entry.name)))
            with connection:
                limits.add(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    dist.barrier()
    return limits


@pytest.mark.parametrize(("seconds", "limit"), [(90, 90_000), (12, 30_000)])
def test_a_connection_may_be_silent_for_the_timeout_and_for_30_seconds_at_least(seconds: float, limit: int) -> None:
    for limits in run_ranks(_limits_of_connections, args=(seconds,)):
        assert limits == {0, limit}  # those of gloo have none


# ---- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("master", [None, "localhost", "127.0.0.1"])
def test_the_master_host_does_not_publish_loopback(monkeypatch: pytest.MonkeyPatch, master: str | None) -> None:
    monkeypatch.delenv("FREESCALE_ADDRESS", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if master:
        monkeypatch.setenv("MASTER_ADDR", master)
    own = Place.of_this_rank()
    assert not own.address.startswith("127.")
    outside = (
        address_of(0, [own, Place("there", "another machine", "192.0.2.7")]) if _has_route("192.0.2.7") else "10.0.0.1"
    )
    assert not outside.startswith("127.")
    assert address_of(0, [own, Place("there", own.machine, "")]) == "127.0.0.1"  # one machine acts as two hosts
    if not own.address:
        with pytest.raises(TransportError, match="set FREESCALE_ADDRESS"):
            address_of(0, [own, Place("there", "another machine", "")])
    monkeypatch.setenv("FREESCALE_ADDRESS", "10.1.2.3")
    assert address_of(0, [own, Place("there", "another machine", "")]) == "10.1.2.3"


def _has_route(target: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return False
        return True


# ---- what it costs -----------------------------------------------------------------------------------------------------


class _CountingStore:
    """A store that counts the calls of one rank."""

    def __init__(self, store: Any):
        self._store, self.calls = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return getattr(self._store, name)(*args)

        return call


@pytest.mark.parametrize("world", [2, 16])
def test_the_calls_of_the_store_do_not_grow_with_the_ranks(world: int) -> None:
    shared = dist.HashStore()
    stores = [_CountingStore(shared) for _ in range(world)]
    texts: dict[int, list[str]] = {}

    def meet(rank: int) -> None:
        texts[rank] = Rendezvous(stores[rank], rank, world, timedelta(seconds=20)).share("places", f"rank {rank}")

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(texts[rank] == [f"rank {peer}" for peer in range(world)] for rank in range(world))
    for store in stores:
        assert store.calls["set"] == store.calls["multi_get"] == 1
        assert store.calls.keys() <= {"set", "multi_get", "has_extended_api", "check"}, store.calls


def _descriptors(rank: int, world: int) -> int:
    group = _group(rank, world)
    before = len(os.listdir("/proc/self/fd"))
    _exchange(rank, world, group)
    return len(os.listdir("/proc/self/fd")) - before


def test_ranks_of_one_host_keep_no_descriptors() -> None:
    assert run_ranks(_descriptors, 4, (4,)) == [0] * 4


def _switches() -> int:
    """How often the threads of this process have slept and woken so far."""
    return sum(
        int(line.split()[1])
        for thread in Path("/proc/self/task").iterdir()
        for line in (thread / "status").read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


def _wait_for_a_sleeper(rank: int, host: str) -> int:
    os.environ["FREESCALE_HOST_ID"] = host.format(rank=rank)
    group = _group(rank, 2)
    _exchange(rank, 2, group)
    dist.barrier()
    woken = 0
    if rank == 0:
        work = dist.all_to_all_single(torch.empty(4096), torch.empty(4096), group=group, async_op=True)
        time.sleep(0.2)
        before = _switches()
        time.sleep(1)
        woken = _switches() - before
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        dist.all_to_all_single(torch.empty(4096), torch.empty(4096), group=group)
    return woken


@pytest.mark.parametrize("host", ["one", "host{rank}"])
def test_a_waiting_rank_sleeps(host: str) -> None:
    woken = run_ranks(_wait_for_a_sleeper, args=(host,))[0]
    assert 0 < woken < 3000, f"{woken} wake-ups in a second"


def _exact_timers(rank: int, priority: str) -> int:
    os.environ["FREESCALE_HOST_ID"] = f"host{rank}"
    dist.init_process_group("gloo", rank=rank, world_size=2)
    group = dist.new_group(backend="freescale", pg_options=QUEUE | {"priority": priority})
    dist.all_to_all_single(torch.empty(8), torch.ones(8), group=group)
    dist.barrier()  # Each rank has received rows of the other one, so the threads that send them have started.
    exact = set()
    for _ in range(10):  # Linux may leave a thread out of the list if another one ends at that moment.
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended
                if Path(f"/proc/{thread}/timerslack_ns").read_text().strip() == "1":
                    exact.add(thread)
        time.sleep(0.01)
    dist.barrier()
    return len(exact)


@pytest.mark.parametrize(("priority", "threads"), [("high", 1), ("low", 0)])
def test_threads_that_send_urgent_chunks_are_woken_in_time(priority: str, threads: int) -> None:
    """Linux may end other waits 50 us late."""
    assert run_ranks(_exact_timers, args=(priority,)) == [threads, threads]
