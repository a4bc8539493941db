"""The C++ queue: its scenarios under sanitizers, and ranks that die, dawdle, disagree or live on other hosts."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale import _C, ConfigurationError
from lightning_freescale.transport import TransportError
from lightning_freescale.transport.host_staged import refuse_single_connection
from lightning_freescale.transport.rank_buffers import RankBuffers
from lightning_freescale.transport.rendezvous import Rendezvous
from tests.ranks import RankFailed, run_ranks
from tests.transport.collectives import all_to_all_case, in_group, same_bits

ROOT = Path(__file__).resolve().parents[2]
QUEUE = {"cpu": "queue", "chunk_bytes": 4096, "buffer_bytes": 1 << 20}
SCENARIOS = [
    "random2",
    "random4",
    "random_high",
    "random_hosts",
    "random_hosts_high",
    "random_hosts_apart",
    "random_hosts_one_thread",
    "random_wrap",
    "random_hosts_wrap",
    "priority",
    "one_queue",
    "timeout",
    "timeout_hosts",
    "leaver",
    "leaver_hosts",
    "disagreement",
    "disagreement_hosts",
    "bad_chunk",
    "ring",
    "segments",
]


# -- C++ scenarios -----------------------------------------------------------------------------------------------------


def _build(folder: Path, flags: list[str]) -> Path:
    """The scenarios as one program, built in one go, which is the quickest."""
    sources = sorted(path for path in (ROOT / "csrc" / "transport").glob("*.cpp") if "bindings" not in path.name)
    whole = folder / "whole.cpp"
    whole.write_text("".join(f'#include "{path}"\n' for path in [*sources, ROOT / "tests/transport/queue_test.cpp"]))
    command = ["g++", "-std=c++17", "-g1", *flags, str(whole), "-o", str(folder / "queue_test"), "-ldl", "-lpthread"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode != 0 and "sanitize" in built.stderr + built.stdout:
        pytest.skip(f"this g++ has no {flags}: {built.stderr[-200:]}")
    assert built.returncode == 0, built.stderr
    return folder / "queue_test"


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Programs by the sanitizer they were built with, built on first use."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")

    class Built(dict):
        def __missing__(self, name: str) -> Path:
            self[name] = _build(tmp_path_factory.mktemp(name), [f"-fsanitize={name}", "-O0"])
            return self[name]

    return Built()


def _run(program: Path, *scenarios: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [str(program), *scenarios], capture_output=True, text=True, timeout=100, env=environment, check=False
    )


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_scenarios_under_a_sanitizer(sanitized: dict[str, Path], sanitizer: str) -> None:
    ran = _run(sanitized[sanitizer], *SCENARIOS)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    assert ran.stdout.split() == [word for scenario in SCENARIOS for word in (scenario, "ok")]


def test_thread_sanitizer_sees_a_flag_that_is_set_too_early(sanitized: dict[str, Path]) -> None:
    ran = _run(sanitized["thread"], "early_flag")
    assert ran.returncode != 0
    assert "data race" in ran.stderr


def test_wrong_bytes_of_an_early_flag_are_counted(sanitized: dict[str, Path]) -> None:
    ran = _run(sanitized["address"], "early_flag")  # the scenario succeeds when its own check finds wrong bytes
    assert ran.returncode == 0, ran.stderr


# -- the calls to the CUDA driver, answered by one that runs on the host ----------------------------------------------


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).parent / "fake_driver.cpp"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=100)
    return library


def _queue_of_fake_gpu(rank: int, world: int, driver: str, host: str, **options: Any) -> Any:
    ctypes.CDLL(driver, mode=ctypes.RTLD_GLOBAL)  # found by its name when the transport asks for libcuda.so.1
    problem, version, devices = _C.cuda_facts()
    assert (problem, version, devices) == ("", 13000, 1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    store = dist.PrefixStore("queue", dist.distributed_c10d._get_default_store())
    meeting = Rendezvous(store, rank, world, timedelta(seconds=20))
    settings = {
        "high": False,
        "chunk_bytes": 4096,
        "buffer_bytes": 1 << 20,
        "timeout": 20,
        "network_threads": 2,
    } | options
    device = _C.cuda_device(0)
    assert device.name == "Fake GPU (cuda:0)"
    queue = _C.TransportQueue(
        device=device, rank=rank, hosts=meeting.tell("hosts", host), bind_to="127.0.0.1", **settings
    )
    queue.connect(meeting.tell("addresses", queue.address()))
    meeting.tell("connected", "")
    queue.seal()
    return queue


def _all_to_all(queue: Any, rank: int, world: int, seed: int) -> tuple[Any, ...]:
    """An exchange under way, its input, which must live as long, its output, and what that must become."""
    source, in_splits, out_splits, right = all_to_all_case(rank, world, seed, torch.float32, width=3000)
    output = torch.empty_like(right)
    send, receive = RankBuffers.split(source, in_splits, world, "input"), RankBuffers.split(output, out_splits, world, "output")
    pointers = [[part.data_ptr() for part in parts] for parts in (send.parts, receive.parts)]
    exchange = queue.exchange("all_to_all", pointers[0], send.sizes, pointers[1], receive.sizes, 0)
    return exchange, source, output, right


def _on_fake_gpu(rank: int, world: int, driver: str, priority: str) -> None:
    # Two ranks share memory, the third is elsewhere.
    queue = _queue_of_fake_gpu(rank, world, driver, f"host{rank % 2}", high=priority == "high")
    flying = [_all_to_all(queue, rank, world, seed) for seed in range(30)]
    for exchange, _, output, right in flying:
        exchange.hold(0)
        exchange.block(20)
        assert exchange.done()
        assert same_bits(output, right)
    assert queue.report()["ring_bytes"] > 0
    dist.barrier()
    queue.close(10)
    assert queue.failure() is None


@pytest.mark.parametrize("priority", ["low", "high"])
def test_driver_calls_keep_the_rules(driver: Path, priority: str) -> None:
    run_ranks(_on_fake_gpu, 3, (3, str(driver), priority))


def _copy_to_pageable_memory(driver: str) -> None:
    """As ``tensor.cpu()`` does: waits for the default stream, and lets no other thread call the driver meanwhile."""
    numbers = (ctypes.c_byte * 8)()
    assert (
        ctypes.CDLL(driver).cuMemcpyDtoH_v2(ctypes.byref(numbers), ctypes.c_uint64(ctypes.addressof(numbers)), 8) == 0
    )


def _held_up(rank: int, driver: str, host: str) -> None:
    queue = _queue_of_fake_gpu(rank, 2, driver, host.format(rank=rank))
    for seed in range(5):
        if rank == 1:
            time.sleep(0.1)  # so long rank 0 waits inside the driver
        exchange, _, output, right = _all_to_all(queue, rank, 2, seed)
        exchange.hold(0)
        _copy_to_pageable_memory(driver)
        assert exchange.done()
        assert same_bits(output, right)
    dist.barrier()
    queue.close(10)
    assert queue.failure() is None


@pytest.mark.parametrize("host", ["one", "host{rank}"])
def test_an_exchange_ends_while_its_caller_waits_for_it_inside_the_driver(driver: Path, host: str) -> None:
    run_ranks(_held_up, 2, (str(driver), host), timeout=20)


def _waits_in_vain(rank: int, driver: str, host: str) -> str:
    queue = _queue_of_fake_gpu(rank, 2, driver, host.format(rank=rank), timeout=1)
    message = ""
    if rank == 0:
        exchange, *_ = _all_to_all(queue, rank, 2, 0)
        exchange.hold(0)
        _copy_to_pageable_memory(driver)
        with pytest.raises(RuntimeError) as failure:
            exchange.done()
        message = str(failure.value)
    dist.barrier()
    return message


@pytest.mark.parametrize("host", ["one", "host{rank}"])
def test_a_wait_inside_the_driver_has_an_end(driver: Path, host: str) -> None:
    message = run_ranks(_waits_in_vain, 2, (str(driver), host), timeout=20)[0]
    assert re.match(r"rank 0, all_to_all #0: not done after 1\.\d* s; waits for \d+ bytes from rank 1", message), (
        message
    )


# -- processes ---------------------------------------------------------------------------------------------------------


def _segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("freescale-")}


def _across_hosts(rank: int, world: int, hosts: int) -> dict[str, int]:
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


@pytest.mark.parametrize(("world", "hosts"), [(2, 2), (3, 2), (4, 2), (4, 4)])
def test_ranks_on_several_hosts(world: int, hosts: int) -> None:
    reports = run_ranks(_across_hosts, world, (world, hosts))
    assert all(report["exchanges"] == 40 for report in reports)
    assert sum(report["sent_bytes"] for report in reports) == sum(report["received_bytes"] for report in reports) > 0


def test_buffers_are_bounded_reused_and_nameless() -> None:
    before = _segments()
    for report in run_ranks(in_group, 2, (2, QUEUE, _names_then_many, ())):
        assert report["sent_bytes"] > 3 * report["ring_bound_bytes"]  # so every slot was used again and again
        assert 0 < report["ring_bytes"] <= report["ring_bound_bytes"] <= QUEUE["buffer_bytes"]
    assert _segments() == before


def _names_then_many(rank: int, world: int, group: Any) -> dict[str, int]:
    dist.all_to_all_single(torch.empty(world), torch.empty(world), group=group)
    dist.barrier()
    # Unlinked, and mapped from a file that nobody else may open.
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/freescale-" in line]
    assert maps
    assert all("(deleted)" in line for line in maps)
    return _exchange_many(rank, world, group, 30, width=4000)


def _die(rank: int, world: int, host: str, marker: str) -> None:
    os.environ["FREESCALE_HOST_ID"] = host.format(rank=rank)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    group = dist.new_group(backend="freescale", pg_options=QUEUE)
    # Rank 2 needs nothing of rank 1, which dies; rank 0 needs both.
    dist.all_to_all_single(torch.empty(world), torch.empty(world), group=group)
    dist.barrier()  # all have what they were sent
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    counts = [[0] * 3, [5, 0, 0], [0] * 3]
    output = torch.empty(sum(counts[source][rank] for source in range(world)))
    splits = [counts[source][rank] for source in range(world)]
    dist.all_to_all_single(output, torch.empty(0), splits, [0] * 3, group=group)
    dist.all_to_all_single(torch.empty(2), torch.empty(2), [1, 0, 1], [1, 0, 1], group=group)


@pytest.mark.parametrize("host", ["one", "host{rank}"])
def test_every_rank_hears_of_a_dead_peer(host: str, tmp_path: Path) -> None:
    before, started = _segments(), time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_ranks(_die, 3, (3, host, str(tmp_path)), timeout=40, every_error=True)
    assert time.monotonic() - started < 30  # far below the group's timeout of half an hour
    errors = caught.value.errors
    assert "exit code -9" in errors[1]
    for rank in (0, 2):
        assert "TransportError: rank 0, all_to_all #1: waits for 20 bytes from rank 1" in errors[rank], errors[rank]
    assert "died" in errors[0] or "is gone" in errors[0]
    assert _segments() == before


def _late(rank: int, world: int, group: Any) -> None:
    if rank == 0:
        with pytest.raises(
            TransportError, match=r"rank 0, all_to_all #0: not done after .* waits for 4 bytes from rank 1"
        ):
            dist.all_to_all_single(torch.empty(2), torch.empty(2), group=group)
        with pytest.raises(TransportError, match="rank 0, all_to_all #0"):  # and it stays so
            dist.broadcast(torch.empty(2), src=0, group=group)
    dist.barrier()


def _with_engine(rank: int, world: int, seconds: float, fn: Any) -> Any:
    """As ``in_group`` with the queue, set up before ``fn`` runs; only the transfers have the short timeout."""
    dist.init_process_group("gloo", rank=rank, world_size=world)
    group: Any = dist.new_group(backend="freescale", pg_options=QUEUE)
    group._timeout = timedelta(seconds=seconds)
    group._mover(torch.device("cpu"))
    return fn(rank, world, group)


def test_a_late_peer_is_named() -> None:
    run_ranks(_with_engine, 2, (2, 1.0, _late))


def _disagree(rank: int, world: int, group: Any) -> str:
    try:
        splits = [3, 3] if rank == 0 else [2, 2]
        dist.all_to_all_single(torch.empty(4), torch.empty(sum(splits)), [2, 2], splits, group=group)
    except TransportError as error:
        return str(error)
    return ""


def test_sizes_that_do_not_match_are_named() -> None:
    told = run_ranks(_with_engine, 2, (2, 20.0, _disagree))
    assert any("rank 0 sends 12 bytes to rank" in text or "expects 8" in text for text in told), told


def _different_options(rank: int, world: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    group = dist.new_group(backend="freescale", pg_options=QUEUE | {"chunk_bytes": 4096 * (1 + rank)})
    with pytest.raises(TransportError, match=r"chunk is .* on rank"):
        dist.all_to_all_single(torch.empty(2), torch.empty(2), group=group)


def test_options_that_differ_are_named() -> None:
    run_ranks(_different_options, 2, (2,))


def _forks(rank: int, world: int, group: Any) -> int:
    dist.all_to_all_single(torch.empty(2), torch.empty(2), group=group)
    child = os.fork()  # as a DataLoader's worker is made
    if child == 0:
        mover = group._movers.pop(torch.device("cpu"))
        del mover  # destroyed here, where its threads do not exist
        os._exit(7)
    _, status = os.waitpid(child, 0)
    dist.all_to_all_single(torch.empty(2), torch.empty(2), group=group)
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_leaves_the_queue_alone() -> None:
    assert run_ranks(in_group, 2, (2, QUEUE, _forks, ())) == [7, 7]


def _two_classes(rank: int, world: int) -> int:
    """A low- and a high-priority group at once, and each rank waits in an order of its own."""
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
    assert run_ranks(_two_classes, 3, (3,)) == [60] * 3


def test_one_hardware_queue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    refuse_single_connection()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ConfigurationError, match="CUDA_DEVICE_MAX_CONNECTIONS=1"):
        refuse_single_connection()
