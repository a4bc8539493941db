"""The transport's calls to the CUDA driver, answered by a fake driver that runs on the host and checks them."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale import _C
from lightning_freescale.transport.rank_buffers import RankBuffers
from lightning_freescale.transport.rendezvous import Rendezvous
from tests.ranks import run_ranks
from tests.transport.collectives import all_to_all_case, same_bits

SETTINGS: dict[str, Any] = {
    "high_priority": False,
    "chunk_bytes": 4096,
    "buffer_bytes": 1 << 20,
    "timeout": 20,
    "network_threads": 2,
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).parent / "cpp" / "fake_driver.cpp"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=300)
    return library


def _queue_on_fake_gpu(rank: int, world: int, driver: str, host: str, **options: Any) -> Any:
    ctypes.CDLL(driver, mode=ctypes.RTLD_GLOBAL)  # the transport finds it when it asks for libcuda.so.1
    problem, version, devices = _C.cuda_facts()
    assert (problem, version, devices) == ("", 13000, 1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank, world_size=world)
    store = dist.PrefixStore("queue", dist.distributed_c10d._get_default_store())
    rendezvous = Rendezvous(store, rank, world, timedelta(seconds=20))
    settings = SETTINGS | options
    device = _C.cuda_device(0)
    assert device.name == "Fake GPU (cuda:0)"
    queue = _C.TransportQueue(
        device=device, rank=rank, hosts=rendezvous.share("hosts", host), bind_to="127.0.0.1", secret="", **settings
    )
    addresses = rendezvous.share("addresses", queue.address())
    if options.get("device_rings"):
        problems = rendezvous.share("rings", queue.map_device_rings(addresses))
        if "FAKE_GPU_RINGS" in os.environ:
            assert all(os.environ["FAKE_GPU_RINGS"] in problem for problem in problems), problems
            queue.drop_device_rings()
        else:
            assert problems == [""] * world
    queue.connect(addresses, rendezvous.raise_failure)
    rendezvous.share("connected", "")
    queue.unlink_segment()
    return queue


def _all_to_all(queue: Any, rank: int, world: int, seed: int) -> tuple[Any, ...]:
    """Issue an exchange. Returns it, its input, which must live as long, its output, and the right output."""
    source, in_splits, out_splits, right = all_to_all_case(rank, world, seed, torch.float32, width=3000)
    output = torch.empty_like(right)
    send = RankBuffers.split(source, in_splits, world, "input")
    receive = RankBuffers.split(output, out_splits, world, "output")
    addresses = [side.addresses for side in (send, receive)]
    exchange = queue.exchange("all_to_all", addresses[0], send.sizes, addresses[1], receive.sizes, 0)
    return exchange, source, output, right


def _exchange_on_fake_gpu(rank: int, world: int, driver: str, priority: str, device_rings: bool) -> dict[str, int]:
    # Ranks 0 and 2 share a host, rank 1 is on another one.
    options = {"high_priority": priority == "high", "device_rings": device_rings}
    queue = _queue_on_fake_gpu(rank, world, driver, f"host{rank % 2}", **options)
    outstanding = [_all_to_all(queue, rank, world, seed) for seed in range(30)]
    for exchange, _, output, right in outstanding:
        exchange.block_stream(0)
        exchange.wait(20)
        assert exchange.done()
        assert same_bits(output, right)
    report = queue.report()
    assert report["ring_bytes"] > 0
    dist.barrier()
    queue.close(10)
    assert queue.failure() is None
    return report


@pytest.mark.parametrize("priority", ["low", "high"])
def test_driver_calls_follow_the_rules_of_cuda(driver: Path, priority: str) -> None:
    run_ranks(_exchange_on_fake_gpu, 3, (3, str(driver), priority, False))


def _memory_of_fake_gpus() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith("fake-gpu-")]


@pytest.mark.parametrize("priority", ["low", "high"])
def test_rings_in_device_memory_follow_the_rules_of_cuda(driver: Path, priority: str) -> None:
    before = _memory_of_fake_gpus()
    reports = run_ranks(_exchange_on_fake_gpu, 3, (3, str(driver), priority, True))
    assert [report["device_bytes"] for report in reports] == [1 << 20] * 3
    assert _memory_of_fake_gpus() == before  # it is freed, after the other ranks have unmapped it


@pytest.mark.parametrize(("variable", "call"), [("CANNOT_MAP", "OpenMemHandle"), ("WITHOUT_IPC", "GetMemHandle")])
def test_rings_fall_back_to_host_memory_if_the_driver_cannot_share(
    driver: Path, monkeypatch: pytest.MonkeyPatch, variable: str, call: str
) -> None:
    monkeypatch.setenv(f"FAKE_GPU_{variable}", "1")
    monkeypatch.setenv("FAKE_GPU_RINGS", f"cuIpc{call} failed")
    before = _memory_of_fake_gpus()
    reports = run_ranks(_exchange_on_one_host, 2, (str(driver),))
    assert [report["device_bytes"] for report in reports] == [0, 0]
    assert _memory_of_fake_gpus() == before


def _leave_long_after_the_other(rank: int, driver: str) -> list[int]:
    """Rank 1 goes on for longer than rank 0 waits. Return how many blocks of memory there are in the end, and then."""
    before = len(_memory_of_fake_gpus())
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.barrier()
    queue = _queue_on_fake_gpu(rank, 2, driver, "one", device_rings=True)
    exchange, _, output, right = _all_to_all(queue, rank, 2, 0)
    exchange.wait(20)
    assert same_bits(output, right)
    dist.barrier()
    if rank == 0:
        queue.close(5)
    dist.barrier()
    if rank == 1:
        queue.close(5)
    dist.barrier()
    kept = len(_memory_of_fake_gpus()) - before
    dist.barrier()
    if rank == 0:
        later = _C.TransportQueue(device=_C.cuda_device(0), rank=0, hosts=["one"], bind_to="", secret="", **SETTINGS)
        later.close(5)
    dist.barrier()
    return [kept, len(_memory_of_fake_gpus()) - before]


def test_memory_of_a_rank_that_leaves_early_is_freed_later(driver: Path) -> None:
    assert run_ranks(_leave_long_after_the_other, args=(str(driver),)) == [[1, 0]] * 2


def _exchange_on_one_host(rank: int, driver: str) -> dict[str, int]:
    queue = _queue_on_fake_gpu(rank, 2, driver, "one", device_rings=True)
    exchange, _, output, right = _all_to_all(queue, rank, 2, 0)
    exchange.wait(20)
    assert same_bits(output, right)
    dist.barrier()
    queue.close(10)
    return queue.report()


def _copy_to_pageable_memory(driver: str) -> None:
    """Do as ``tensor.cpu()`` does: wait for the default stream, and block all other calls of the driver meanwhile."""
    numbers = (ctypes.c_byte * 8)()
    copy = ctypes.CDLL(driver).cuMemcpyDtoH_v2
    assert copy(ctypes.byref(numbers), ctypes.c_uint64(ctypes.addressof(numbers)), 8) == 0


def _exchange_with_a_late_rank(rank: int, driver: str, host: str) -> None:
    queue = _queue_on_fake_gpu(rank, 2, driver, host.format(rank=rank))
    for seed in range(5):
        if rank == 1:
            time.sleep(0.1)  # rank 0 waits inside the driver for this long
        exchange, _, output, right = _all_to_all(queue, rank, 2, seed)
        exchange.block_stream(0)
        _copy_to_pageable_memory(driver)
        assert exchange.done()
        assert same_bits(output, right)
    dist.barrier()
    queue.close(10)
    assert queue.failure() is None


@pytest.mark.parametrize("host", ["one", "host{rank}"])
def test_an_exchange_ends_while_its_caller_waits_inside_the_driver(driver: Path, host: str) -> None:
    run_ranks(_exchange_with_a_late_rank, 2, (str(driver), host), timeout=20)


def _exchange_without_the_peer(rank: int, driver: str, host: str, device_rings: bool) -> str:
    # Only rank 1 has a short timeout. As the higher rank it waits for no connection, which must come within the timeout, too.
    options = {"timeout": 1 if rank == 1 else 20, "device_rings": device_rings}
    queue = _queue_on_fake_gpu(rank, 2, driver, host.format(rank=rank), **options)
    message = ""
    if rank == 1:
        exchange, _, output, right = _all_to_all(queue, rank, 2, 0)
        exchange.block_stream(0)
        _copy_to_pageable_memory(driver)
        assert bool(output.isnan().any()), "the missing bytes must be NaN"
        assert bool(((output == right) | output.isnan()).all()), "no other bytes may differ"
        with pytest.raises(RuntimeError) as failure:
            exchange.done()
        message = str(failure.value)
    dist.barrier()
    queue.close(5)  # on both ranks at the same time, because each waits for the other to unmap its memory
    return message


@pytest.mark.parametrize(("host", "device_rings"), [("one", False), ("one", True), ("host{rank}", False)])
def test_the_timeout_ends_a_wait_inside_the_driver(driver: Path, host: str, device_rings: bool) -> None:
    message = run_ranks(_exchange_without_the_peer, 2, (str(driver), host, device_rings), timeout=20)[1]
    assert re.match(r"rank 1, all_to_all #0: not finished after [\d.]+ s \(the timeout is 1 s\)", message), message
    assert re.search(r"still waiting for \d+ bytes from rank 0\.", message), message


def _look_while_the_driver_blocks(rank: int, driver: str, call: str) -> None:
    queue = _queue_on_fake_gpu(rank, 2, driver, "one")
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["go"], timedelta(seconds=15))
    exchange, _, output, right = _all_to_all(queue, rank, 2, 0)
    exchange.block_stream(0)
    if rank == 0:
        # The copy holds the lock of the driver until rank 1 sends. Rank 1 waits for the word of a Python thread of rank 0,
        # which can only run if the call below, which waits for the driver, does not hold the lock of the interpreter.
        copy = threading.Thread(target=_copy_to_pageable_memory, args=(driver,))
        copy.start()
        time.sleep(0.2)
        word = threading.Timer(0.2, lambda: store.set("go", "now"))
        word.start()
        exchange.done() if call == "done" else exchange.block_stream(0)
        copy.join()
    exchange.wait(20)
    assert same_bits(output, right)
    dist.barrier()
    queue.close(10)


@pytest.mark.parametrize("call", ["done", "block_stream"])
def test_python_threads_run_while_a_call_waits_for_the_driver(driver: Path, call: str) -> None:
    run_ranks(_look_while_the_driver_blocks, 2, (str(driver), call), timeout=20)
