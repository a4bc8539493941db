"""Compares the prioritized exchange of a collection with the synchronous one on a GPU. The scripts of this folder use it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import lightning_freescale.transport  # noqa: F401 - registers the backend
from benchmarks.harness.rank_setup import use_device
from lightning_freescale.embedding.schedule import ExchangeSchedule
from tests.embedding import training
from tests.embedding.training import Batches, Sharded, make_schedule, random_batches, tables, train
from tests.gpu.sleeping_waits import sleep_in_waits

STEPS = 12
Case = tuple[str, str, dict[str, Any]]  # sharding, optimizer, options of the collection and "window" of the training
ACCUMULATED: dict[str, Any] = {"window": 3}  # micro-batches of an optimizer step
Sabotage = Callable[[ExchangeSchedule], None]  # puts an error into the exchange


def run(
    make: Callable[..., Sharded], cases: list[Case], controls: dict[str, tuple[Case, Sabotage]], longest: int
) -> None:
    """Compare each of ``cases`` on this rank. Rank 0 prints one JSON line.

    Args:
        make: builds the sharded collection.
        controls: cases that are trained once more with an error, by name. The comparison must detect each of them.
        longest: the most ids that a feature of a sample has.
    """
    training.ROWS.update(one=4000, two=600)
    training.DIM = 32
    training.BAG_DIMS.update(one=32, two=96)
    sleep_in_waits()
    use_device("cuda")
    dist.init_process_group("nccl")
    backend = sys.argv[1] if len(sys.argv) > 1 else None  # backend of the process groups for rows and gradients
    batches = random_batches(dist.get_rank(), STEPS, 7, lambda rank, step: 24 + 8 * rank, longest)
    results = [_compare(make, case, batches, backend) for case in cases]
    errors = {name: _error(make, case, sabotage, batches, backend) for name, (case, sabotage) in controls.items()}
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({"cases": results} | errors), flush=True)
    dist.destroy_process_group()


def _compare(make: Callable[..., Sharded], case: Case, batches: Batches, backend: str | None) -> dict[str, Any]:
    kind, optimizer, options = case
    how = _training_options(options) | {"rates": lambda step: 0.05 / (1 + 0.1 * step)}
    plain, module = _twice(make, case)
    expected = train(plain, batches, None, "cuda", **how)
    schedule = make_schedule(module, backend)
    got = train(module, batches, schedule, "cuda", **how)
    torch.cuda.synchronize()
    a, b = tables(plain), tables(module)
    scheduled = schedule.modules[0]
    line = {
        "kind": kind,
        "optimizer": optimizer,
        "options": sorted(options),
        "saved": scheduled.exchange.stats.bytes_saved,
        "lane": scheduled.synchronous_reason or "prioritized",
        "rows": scheduled.exchange.stats.rows,
        "collisions": scheduled.exchange.stats.collisions,
        "loss": _worst([abs(x - y) / max(1.0, abs(x)) for x, y in zip(expected, got, strict=True)]),
        "weights": _worst([float((a[key] - b[key]).abs().max()) for key in a if a[key].numel()]),
        "moved": _worst([float(a[key].abs().max()) for key in a if a[key].numel()]),
    }
    dist.barrier()
    return line


def _error(
    make: Callable[..., Sharded], case: Case, sabotage: Sabotage, batches: Batches, backend: str | None
) -> float:
    """Largest error of the weights with an exchange that ``sabotage`` has changed."""
    plain, module = _twice(make, case)
    how = _training_options(case[2])
    train(plain, batches, None, "cuda", **how)
    schedule = make_schedule(module, backend)
    sabotage(schedule)
    train(module, batches, schedule, "cuda", **how)
    torch.cuda.synchronize()
    right, found = tables(plain), tables(module)
    return _worst([float((right[key] - found[key]).abs().nan_to_num(1e9).max()) for key in right if right[key].numel()])


def do_not_wait_for_compute(schedule: ExchangeSchedule) -> None:
    """The exchange then sends gradients that the compute stream has not computed yet."""
    stream = schedule.modules[0].exchange.table_stream
    work = stream.work
    stream.work = lambda *after, compute=False: work(*after)  # type: ignore[method-assign]


def _twice(make: Callable[..., Sharded], case: Case) -> tuple[Sharded, Sharded]:
    """Two equal collections."""
    kind, optimizer, options = case
    own = {name: value for name, value in options.items() if name not in ACCUMULATED}
    world = dist.get_world_size()
    return make(kind, optimizer, world, "cuda", **own), make(kind, optimizer, world, "cuda", **own)


def _training_options(options: dict[str, Any]) -> dict[str, Any]:
    return {"weighted": options.get("weighted", False), "window": options.get("window", 1)}


def _worst(values: list[float]) -> float:
    worst = torch.tensor(max(values, default=0.0), device="cuda")
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)
