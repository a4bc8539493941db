"""Groups in a /dev/shm of their own: a small one, such as Docker's 64 MiB, or with a foreign file. Needs the right to mount."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_freescale.transport  # noqa: F401  (registers the backend)
from lightning_freescale import _C
from tests.ranks import RankFailed, run_ranks

CLONE_NEWNS = 0x00020000


def _exchange_in_groups(rank: int, groups: int) -> int:
    """Exchange 16 bytes, then 24 MiB, in each of several groups with the default buffer, and see that every byte is right."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    opened: list[Any] = [dist.new_group(backend="freescale", pg_options={"cpu": "queue"}) for _ in range(groups)]
    for numbers in (4, 6 << 20):
        for group in opened:
            sent, received = torch.full((numbers,), float(rank)), torch.empty(numbers)
            dist.all_to_all_single(received, sent, group=group)
            assert received.view(2, -1).mean(1).tolist() == [0.0, 1.0]
    return groups


def _use_small_memory(kibibytes: int) -> bool:
    """Give this process and its children a /dev/shm of their own. Returns whether it is permitted."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        return False
    commands = (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "x", "/dev/shm"],
    )
    return all(subprocess.run(command, capture_output=True, check=False).returncode == 0 for command in commands)


def _ranks_in_small_memory(_: int, kibibytes: int, fn: Callable, args: tuple) -> Any:
    if not _use_small_memory(kibibytes):
        return "not permitted"
    try:
        return run_ranks(fn, 2, args, timeout=60, every_error=True)
    except RankFailed as failure:
        return failure.errors


def _run_in_small_memory(kibibytes: int, groups: int) -> Any:
    (result,) = run_ranks(_ranks_in_small_memory, 1, (kibibytes, _exchange_in_groups, (groups,)), timeout=80)
    if result == "not permitted":
        pytest.skip("needs the right to mount (root)")
    return result


def test_several_groups_share_a_small_shared_memory() -> None:
    before = os.stat("/dev/shm").st_dev
    assert _run_in_small_memory(64 << 10, 4) == [4, 4]
    assert os.stat("/dev/shm").st_dev == before


def test_too_little_shared_memory_is_an_error_of_the_set_up() -> None:
    errors = _run_in_small_memory(48, 1)
    assert sorted(errors) == [0, 1]
    for text in errors.values():
        assert "the transport cannot be set up" in text
        assert "docker run --shm-size=2g" in text


def _set_up_beside_a_fifo(_: int) -> bool | str:
    if not _use_small_memory(4 << 10):
        return "not permitted"
    os.mkfifo("/dev/shm/freescale-fifo", 0o644)  # nobody writes to it
    _C.TransportQueue(
        device=_C.host_device(),
        rank=0,
        hosts=["one"],
        high_priority=False,
        chunk_bytes=4096,
        buffer_bytes=1 << 20,
        timeout=20,
        bind_to="127.0.0.1",
        secret="",
        network_threads=1,
    )
    return os.path.exists("/dev/shm/freescale-fifo")


def test_a_fifo_with_the_name_of_a_segment_does_not_block_the_set_up() -> None:
    (result,) = run_ranks(_set_up_beside_a_fifo, 1, timeout=10)
    if result == "not permitted":
        pytest.skip("needs the right to mount (root)")
    assert result is True
