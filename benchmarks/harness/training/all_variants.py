"""All sides of the end-to-end benchmark one after another on every rank, each side's figures kept as soon as they are known."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import time
import warnings
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.gpu_cluster import link_bandwidth as rates
from benchmarks.harness.gpu_cluster import reserved_sms as own_cores
from benchmarks.harness.gpu_cluster.matrix_product_check import check_products
from benchmarks.harness.report import versions
from benchmarks.harness.training.bubble import COOL, SIDES, Figures, account, global_losses
from benchmarks.harness.training.variants import Batches, Job, Trained, train
from benchmarks.harness.workload import LongTail, collision_rate

WARM = 6  # steps before the clock counts


def run(arguments: argparse.Namespace, keep: Path | None, known: Figures | None, wait: float) -> Figures:
    """Train all sides that are not known yet. A collective.

    Args:
        keep: file for the figures after each side; ``None``: this rank keeps none.
        known: figures of sides that are done, and of those that failed.
        wait: seconds that a rank waits for another.
    """
    quiet()
    job, counted = _job(arguments, wait)
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo", timeout=timedelta(seconds=wait))
    if job.device.type == "cuda":
        check_products(job.device, job.rank, job.model["embedding_dim"])
    figures = known or _head(arguments, job, counted) | {"link_gb_per_s": rates.links(job.device)}
    batches = Batches(job)
    wanted = [name for name in SIDES if not arguments.sides or name in arguments.sides]
    done = {*figures["sides"], *figures["failed"]}
    for name in [name for name in wanted if name not in done]:
        figures["under_way"] = name
        _keep(figures, keep)
        began = time.perf_counter()
        side = _gather(train(name, job, batches), counted)
        figures["sides"][name] = side | {"took_seconds": time.perf_counter() - began}
        if job.rank == 0:
            took, step = figures["sides"][name]["took_seconds"], side["step_ms"]["mean"]
            print(f"{name}: {step:.1f} ms a step; took {took:.1f} s", file=sys.stderr, flush=True)
    figures["under_way"] = None
    _keep(figures, keep)
    return figures


def leave() -> None:
    """End this rank's part, together with the others."""
    dist.barrier()
    dist.destroy_process_group()


def _job(arguments: argparse.Namespace, wait: float) -> tuple[Job, slice]:
    """What this run trains, and which steps count."""
    cuda, quick = arguments.device == "cuda", arguments.quick
    tiny = quick and not cuda
    warm = 2 if tiny else WARM
    steps = arguments.steps or (3 if tiny else 12 if quick else 24)
    workload = LongTail(
        samples=arguments.batch_size or (128 if cuda else 4 if tiny else 16),
        longest=arguments.longest or (8192 if cuda else 64 if tiny else 512),
        rows=arguments.rows or (8_000_000 if cuda else 3_000 if tiny else 200_000),
        negatives=32 if cuda else 8,
    )
    model = {
        "embedding_dim": arguments.dim or (128 if cuda else 16 if tiny else 32),
        "num_layers": arguments.layers or (4 if cuda else 1 if tiny else 2),
        "num_heads": arguments.heads or (4 if cuda else 2),
    }
    device, rank = use_device(arguments.device), int(os.environ["RANK"])
    job = Job(
        device, rank, arguments.ranks, workload, model, warm + steps + COOL, wait, arguments.traces, arguments.options
    )
    return job, slice(warm, warm + steps)


def use_device(kind: str) -> torch.device:
    """Make this rank's device the current one."""
    if kind == "cpu":
        torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))  # Lightning looks there, too
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    own_cores.use(device)
    return device


def _head(arguments: argparse.Namespace, job: Job, counted: slice) -> Figures:
    met = [[job.workload.ids(rank, step, job.ranks) for rank in range(job.ranks)] for step in (1, 2)]
    parameters = {
        key: value for key, value in vars(arguments).items() if key not in ("json", "output", "part", "traces")
    }
    return {
        "title": "End to end",
        "parameters": parameters,
        "versions": versions(),
        "machine": machine(job.device),
        "workload": asdict(job.workload),
        "model": job.model,
        "steps": job.steps,
        "counted": counted.stop - counted.start,
        "global_batch": job.workload.samples * job.ranks,
        "collisions": collision_rate(*met),
        "sides": {},
        "failed": {},
    }


def machine(device: torch.device) -> str:
    """What the ranks run on, in words."""
    if device.type == "cpu":
        return f"{os.cpu_count()} cores ({platform.machine()}), gloo"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{torch.cuda.get_device_name(device)}, {own_cores.describe()}, NCCL {nccl}"


def _gather(trained: Trained, counted: slice) -> Figures:
    """A side's figures, from all ranks to all ranks."""
    marks = trained.marks
    mine = {
        "seconds": marks.seconds(),
        "losses": torch.stack(marks.losses).double().tolist(),
        "predicted": torch.stack(marks.predicted).double().tolist(),
        "peak_bytes": trained.peak_bytes,
        "late": sum(marks.late[counted]) / max(1, len(marks.late[counted])),
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    losses, predicted = (np.array([rank[key] for rank in ranks]) for key in ("losses", "predicted"))
    return account(np.stack([rank["seconds"] for rank in ranks]), counted) | {
        "losses": global_losses(losses, predicted),
        "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
        "host_late": max(rank["late"] for rank in ranks),  # share of the steps for which the device had to wait
        "notes": trained.notes,
    }


def _keep(figures: Figures, path: Path | None) -> None:
    """Whole or not at all: a rank may be killed at any time."""
    if path is not None:
        draft = path.with_name(f"{path.name}.draft")
        draft.write_text(json.dumps(figures, default=str))
        draft.replace(path)


def quiet() -> None:
    """Nothing of what libraries say while all is well."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "torchrec"):
        logging.getLogger(name).setLevel(logging.ERROR)
