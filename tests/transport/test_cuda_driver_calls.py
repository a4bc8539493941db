"""The transport's calls to the CUDA driver, answered by a fake driver that runs on the host and checks them."""

from __future__ import annotations

import ctypes
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


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).parent / "cpp" / "fake_driver.cpp"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=100)
    return library


def _queue_on_fake_gpu(rank: int, world: int, driver: str, host: str, **options: Any) -> Any:
    ctypes.CDLL(driver, mode=ctypes.RTLD_GLOBAL)  # the transport finds it when it asks for libcuda.so.1
    problem, version, devices = _C.cuda_facts()
    assert (problem, version, devices) == ("", 13000, 1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    store = dist.PrefixStore("queue", dist.distributed_c10d._get_default_store())
    rendezvous = Rendezvous(store, rank, world, timedelta(seconds=20))
    settings = {
        "high_priority": False,
        "chunk_bytes": 4096,
        "buffer_bytes": 1 << 20,
        "timeout": 20,
        "network_threads": 2,
    } | options
    device = _C.cuda_device(0)
    assert device.name == "Fake GPU (cuda:0)"
    queue = _C.TransportQueue(
        device=device, rank=rank, hosts=rendezvous.share("hosts", host), bind_to="127.0.0.1", secret="", **settings
    )
    queue.connect(rendezvous.share("addresses", queue.address()), rendezvous.raise_failure)
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


def _exchange_on_fake_gpu(rank: int, world: int, driver: str, priority: str) -> None:
    # Ranks 0 and 2 share a host, rank 1 is on another one.
    queue = _queue_on_fake_gpu(rank, world, driver, f"host{rank % 2}", high_priority=priority == "high")
    outstanding = [_all_to_all(queue, rank, world, seed) for seed in range(30)]
    for exchange, _, output, right in outstanding:
        exchange.block_stream(0)
        exchange.wait(20)
        assert exchange.done()
        assert same_bits(output, right)
    assert queue.report()["ring_bytes"] > 0
    dist.barrier()
    queue.close(10)
    assert queue.failure() is None


@pytest.mark.parametrize("priority", ["low", "high"])
def test_driver_calls_follow_the_rules_of_cuda(driver: Path, priority: str) -> None:
    run_ranks(_exchange_on_fake_gpu, 3, (3, str(driver), priority))


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


def _exchange_without_the_peer(rank: int, driver: str, host: str) -> str:
    # Only rank 1 has a short timeout. As the higher rank it waits for no connection, which must come within the timeout, too.
    queue = _queue_on_fake_gpu(rank, 2, driver, host.format(rank=rank), timeout=1 if rank == 1 else 20)
    message = ""
    if rank == 1:
        exchange, *_ = _all_to_all(queue, rank, 2, 0)
        exchange.block_stream(0)
        _copy_to_pageable_memory(driver)
        with pytest.raises(RuntimeError) as failure:
            exchange.done()
        message = str(failure.value)
    dist.barrier()
    return message


@pytest.mark.parametrize("host", ["one", "host{rank}"])
def test_the_timeout_ends_a_wait_inside_the_driver(driver: Path, host: str) -> None:
    message = run_ranks(_exchange_without_the_peer, 2, (str(driver), host), timeout=20)[1]
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
