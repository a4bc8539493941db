"""Random collectives and their right results. Every rank computes the inputs of all ranks from a seed and slices them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_freescale.transport import Options

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random bits as a tensor of any dtype, including NaNs and denormals. A bool tensor holds only 0 and 1."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and every bit are equal. NaNs with equal bits are equal."""
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    )


def in_group(rank: int, world: int, options: dict[str, Any], fn: Callable, args: tuple, seconds: float = 30) -> Any:
    """Run ``fn(rank, world, group, *args)`` with a gloo default group and a freescale group."""
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=seconds))
    group = dist.new_group(backend="freescale", pg_options=Options(**options), timeout=timedelta(seconds=seconds))
    try:
        return fn(rank, world, group, *args)
    finally:
        dist.destroy_process_group()


ENGINES: dict[str, dict[str, Any]] = {
    "gloo": {"cpu": "gloo"},
    "queue with small chunks": {"cpu": "queue", "chunk_bytes": 4096, "buffer_bytes": 1 << 20},
    "queue of high priority": {"cpu": "queue", "priority": "high"},
}


def with_each_engine(rank: int, world: int, fn: Callable, args: tuple = (), seconds: float = 30) -> dict[str, Any]:
    """Run ``fn(rank, world, group, *args)`` with a group of each of ``ENGINES``, one after another, by name of the engine."""
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=seconds))
    results = {}
    try:
        for name, options in ENGINES.items():
            group = dist.new_group(
                backend="freescale", pg_options=Options(**options), timeout=timedelta(seconds=seconds)
            )
            try:
                results[name] = fn(rank, world, group, *args)
            except BaseException as error:
                error.add_note(f"with the engine {name!r}")
                raise
            dist.destroy_process_group(group)
    finally:
        dist.destroy_process_group()
    return results


def split_matrix(world: int, largest: int, generator: torch.Generator) -> Tensor:
    """``[world, world]`` rows that rank i sends to rank j. About a third of the entries are zero."""
    counts = torch.randint(0, largest + 1, (world, world), generator=generator)
    return counts * (torch.rand(world, world, generator=generator) > 0.3)


def all_to_all_case(
    rank: int, world: int, seed: int, dtype: torch.dtype, width: int = 3, largest: int = 9
) -> tuple[Tensor, list[int], list[int], Tensor]:
    """The input, input splits, output splits and right output of ``rank`` in a random uneven all-to-all."""
    generator = torch.Generator().manual_seed(seed)
    counts = split_matrix(world, largest, generator)
    inputs = [random_tensor((int(counts[source].sum()), width), dtype, generator) for source in range(world)]
    right = [inputs[source].split(counts[source].tolist())[rank] for source in range(world)]
    # Join the bytes, because torch.cat does not support float8.
    joined = torch.cat([part.reshape(-1).view(torch.uint8) for part in right]).view(dtype).view(-1, width)
    return inputs[rank], counts[rank].tolist(), counts[:, rank].tolist(), joined
