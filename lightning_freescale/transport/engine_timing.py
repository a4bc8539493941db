"""Times each engine that can start on this machine: two or more ranks exchange data, one engine after another."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_freescale.transport.nixl import nixl_library, rdma_devices
from lightning_freescale.transport.options import Options

PATIENCE = 30.0  # seconds that a collective may take before the engine counts as broken
START_SECONDS = 120.0  # in which all ranks must have started
_SMALL_BYTES = 4096


@dataclass(frozen=True)
class Engine:
    """Something that can move data between ranks.

    Attributes:
        name: in tables.
        options: fields of :class:`Options`; None if it is a backend of torch with this name.
        variables: environment variables in which ``{rank}`` stands for the rank.
        missing: why it cannot start here; empty if that is not known yet.
    """

    name: str
    options: Mapping[str, Any] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""


def engines(device: str) -> list[Engine]:
    """The engines for tensors on ``"cpu"`` or ``"cuda"``. On a CPU, threads stand for copy engines."""
    common = {"reductions": "gloo", "cpu": "queue"}
    apart = {"FREESCALE_HOST_ID": "host{rank}"}  # the ranks treat each other as separate hosts
    own = "gloo" if device == "cpu" else "nccl"
    found = [
        Engine(own, missing="" if own == "gloo" or dist.is_nccl_available() else "torch has no NCCL"),
        Engine("host staging", common | {"rings": "host"}),
        Engine("peer copies", common | {"rings": "device"}),
        Engine("host staging over TCP", common | {"network": "tcp"}, apart),
        Engine("host staging over NIXL", common | {"network": "nixl"}, apart | _network_of_nixl(), _missing_nixl()),
    ]
    return found


def _missing_nixl() -> str:
    return "" if nixl_library() else "NIXL is not installed (pip install nixl-cu13)"


def _network_of_nixl() -> dict[str, str]:
    """Variables with which NIXL starts on one machine: without an RDMA device it uses TCP over the loopback interface."""
    if rdma_devices() or "UCX_TLS" in os.environ:
        return {}
    return {"UCX_TLS": "tcp,cuda_copy" if torch.cuda.is_available() else "tcp", "UCX_NET_DEVICES": "lo"}


class EngineTime(NamedTuple):
    """What an engine takes on this machine. If it could not start, there is a problem instead of figures."""

    engine: str
    gb_per_second: float | None = None  # that leave a rank, mean over the ranks
    microseconds: float | None = None  # of a small exchange, until the host sees its end
    problem: str = ""


def time_engines(device: str, ranks: int, mebibytes: int = 64, repeats: int = 5) -> list[EngineTime]:
    """Start ``ranks`` processes and time each engine in turn. It takes a few seconds for each.

    Args:
        mebibytes: what leaves a rank in one exchange.
    """
    listed = engines(device)
    context: Any = mp.get_context("spawn" if device == "cuda" else "fork")  # CUDA does not survive a fork
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (ranks, f"file://{folder}/store", device, mebibytes, repeats, answers)
        processes = [context.Process(target=_rank, args=(rank, *args), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + START_SECONDS + len(listed) * 2 * PATIENCE
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                deadline = min(deadline, time.monotonic() + PATIENCE)
            time.sleep(0.05)
        for process in processes:
            process.kill()
            process.join()
        found: dict[str, EngineTime] = {}
        while not answers.empty():
            answer = EngineTime(*answers.get())
            found[answer.engine] = answer
    lost = "a rank ended or did not answer while this engine or an earlier one ran"
    return [found.get(engine.name, EngineTime(engine.name, problem=engine.missing or lost)) for engine in listed]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str], rank: int) -> Iterator[None]:
    os.environ.update({name: value.format(rank=rank) for name, value in variables.items()})
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def _rank(rank: int, world: int, store: str, device: str, mebibytes: int, repeats: int, answers: Any) -> None:
    """Time the engines as one of the ranks. Rank 0 answers."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=PATIENCE)
    at = torch.device(device, rank % torch.cuda.device_count()) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(at)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=limit)
    for engine in engines(device):
        if engine.missing:
            continue
        with _environment(engine.variables, rank):
            figures, problem = _attempt(engine, at, mebibytes, repeats)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, (figures, problem))
        problems = [text for _, text in everyone if text]
        if rank == 0 and problems:
            answers.put((engine.name, None, None, problems[0]))
        elif rank == 0:
            answers.put((engine.name, *(statistics.mean(found[i] for found, _ in everyone) for i in range(2)), ""))
    os._exit(0)  # a group that failed would keep the process


def _attempt(engine: Engine, device: torch.device, mebibytes: int, repeats: int) -> tuple[tuple[float, float], str]:
    """Bandwidth and time of a small exchange, or why the engine cannot run. A collective."""
    try:
        backend = engine.name if engine.options is None else "freescale"
        options = None if engine.options is None else Options(**engine.options)
        group: Any = dist.new_group(backend=backend, pg_options=options, timeout=timedelta(seconds=PATIENCE))
        world = dist.get_world_size()
        large = _median_seconds(group, device, (mebibytes << 20) // 4 // (world - 1), repeats)
        small = _median_seconds(group, device, _SMALL_BYTES // 4, 10 * repeats)
        dist.barrier()
        dist.destroy_process_group(group)
    except Exception as error:  # whatever it is, the other engines are timed all the same
        return (0.0, 0.0), str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    return ((mebibytes << 20) / large / 1e9, 1e6 * small), ""


def _median_seconds(group: Any, device: torch.device, floats: int, repeats: int) -> float:
    """Seconds of an all-to-all in which each rank sends ``floats`` numbers to every other rank. Checks the bytes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    splits = [0 if peer == rank else floats for peer in range(world)]
    send = torch.full((sum(splits),), float(rank), device=device)
    received = torch.empty_like(send)

    def exchange() -> float:
        dist.barrier()
        start = time.perf_counter()
        dist.all_to_all_single(received, send, splits, splits, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    exchange()  # connects the ranks
    seconds = statistics.median(exchange() for _ in range(repeats))
    right = [float(peer) for peer in range(world) if peer != rank]
    if received.view(world - 1, -1)[:, -1].tolist() != right:
        raise RuntimeError("wrong bytes arrived")
    return seconds
