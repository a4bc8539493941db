"""Trains all variants of the end-to-end benchmark, one after another, and keeps the figures of each as soon as it is done."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.gpu_cluster import link_bandwidth
from benchmarks.harness.gpu_cluster.matrix_product_check import check_products
from benchmarks.harness.rank_setup import describe_machine, silence_libraries, use_device
from benchmarks.harness.report import versions
from benchmarks.harness.training.bubble import UNCOUNTED_LAST_STEPS, Figures, account, global_losses, step_ms
from benchmarks.harness.training.clicks import ClickWorkload
from benchmarks.harness.training.steadiness import WARM_UP_STEPS, steady_after
from benchmarks.harness.training.variants import TRACED_STEPS, JobBatches, TrainedVariant, TrainingJob, train
from benchmarks.harness.variant_names import BALANCE, DENSE_ONLY, TRAINING_VARIANTS
from benchmarks.harness.workload import LongTailWorkload, collision_rate
from lightning_freescale.bubbles.summary import peak_flops

MAX_TRAININGS = 3  # a variant whose steps do not become steady is trained this often


def run(arguments: argparse.Namespace, keep: Path | None, known: Figures | None, wait: float) -> Figures:
    """Train all variants that have no figures yet. A collective.

    Args:
        keep: file for the figures, rewritten after each variant; ``None`` if this rank writes no file.
        known: figures of variants that are done, and failures of others.
        wait: longest wait of a rank for another, seconds.
    """
    silence_libraries()
    job, counted = make_job(arguments, wait)
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo", timeout=timedelta(seconds=wait))
    if job.device.type == "cuda":
        check_products(job.device, job.rank, job.model["embedding_dim"])
    if known is None:
        mebibytes = 1 if arguments.quick and arguments.device == "cpu" else 64
        known = _head(arguments, job, counted) | {"link_gb_per_s": link_bandwidth.all_links(job.device, mebibytes)}
    figures = known
    batches = JobBatches(job)
    possible = [name for name in TRAINING_VARIANTS if not (arguments.clicks and name == BALANCE)]
    figures["wanted"] = wanted = [name for name in possible if not arguments.sides or name in arguments.sides]
    if job.device.type == "cuda":
        train(DENSE_ONLY, job, batches)  # compiles the kernels for the batches that count, too
    for number in range(arguments.rounds):
        sides = figures["sides"] if number == 0 else figures["later_rounds"][number - 1]
        for name in [name for name in wanted if name not in {*sides, *figures["failed"]}]:
            figures["under_way"] = name
            _keep(figures, keep)
            began = time.perf_counter()
            sides[name] = _measure(name, job, batches, counted, MAX_TRAININGS if arguments.strict else 1)
            sides[name]["took_seconds"] = took = time.perf_counter() - began
            if job.rank == 0:
                step, warm_up = sides[name]["step_ms"]["mean"], sides[name]["warm_up"]["steps"]
                text = f"{name}: {step:.1f} ms per step after {warm_up} warm-up steps; took {took:.1f} s"
                print(text, file=sys.stderr, flush=True)
    figures["under_way"] = None
    _keep(figures, keep)
    return figures


def make_job(arguments: argparse.Namespace, wait: float) -> tuple[TrainingJob, slice]:
    """What to train, and which steps count."""
    cuda, quick = arguments.device == "cuda", arguments.quick
    tiny = quick and not cuda
    steps = arguments.steps or (3 if tiny else 12 if quick else 24)
    # First steps of a variant, which do not count. On a GPU each batch that counts is among them: a new shape costs time there.
    warm = arguments.warm_up or (2 if tiny and not arguments.strict else WARM_UP_STEPS + (steps if cuda else 0))
    workload: LongTailWorkload | ClickWorkload = LongTailWorkload(
        samples=arguments.batch_size or (128 if cuda else 4 if tiny else 16),
        longest=arguments.longest or (8192 if cuda else 64 if tiny else 512),
        rows=arguments.rows or (8_000_000 if cuda else 3_000 if tiny else 200_000),
        negatives=arguments.negatives or (32 if cuda else 8),
        context=arguments.context,
    )
    if arguments.clicks:
        workload = ClickWorkload(workload.samples, workload.rows, arguments.clicks)
    model = {
        "embedding_dim": arguments.dim or (128 if cuda else 16 if tiny else 32),
        "num_layers": arguments.layers or (4 if cuda else 1 if tiny else 2),
        "num_heads": arguments.heads or (4 if cuda else 2),
    } | arguments.model
    job = TrainingJob(
        use_device(arguments.device),
        int(os.environ["RANK"]),
        arguments.ranks,
        workload,
        model,
        warm + steps + (1 + TRACED_STEPS if arguments.traces else 0) + UNCOUNTED_LAST_STEPS,
        wait,
        arguments.traces,
        arguments.options,
        warm,
    )
    return job, slice(warm, warm + steps)


def _head(arguments: argparse.Namespace, job: TrainingJob, counted: slice) -> Figures:
    two_batches = [[job.workload.ids(rank, step, job.ranks) for rank in range(job.ranks)] for step in (1, 2)]
    parameters = {
        key: value for key, value in vars(arguments).items() if key not in ("json", "output", "part", "traces")
    }
    return {
        "title": "End to end",
        "parameters": parameters,
        "versions": versions(),
        "machine": describe_machine(job.device),
        "workload": asdict(job.workload),
        "model": job.model,
        "steps": counted.stop + UNCOUNTED_LAST_STEPS,
        "counted": counted.stop - counted.start,
        "global_batch": job.workload.samples * job.ranks,
        "collisions": collision_rate(*two_batches),
        "flops": job.flops(range(counted.start, counted.stop)),
        "peak_flops": _peak_flops(job.device),
        "sides": {},
        "later_rounds": [{} for _ in range(arguments.rounds - 1)],
        "failed": {},
    }


def _peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of all GPUs together, of which ranks may share one; ``None`` if it is not known. A collective."""
    gpus: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gpus, str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None)
    peak = peak_flops(device, "bf16-mixed")
    return None if peak is None else peak * len(set(gpus))


def _measure(name: str, job: TrainingJob, batches: JobBatches, counted: slice, trainings: int) -> Figures:
    """The figures of a variant. It is trained again, up to ``trainings`` times, if its steps were not steady. A collective."""
    before = 0  # warm-up steps of trainings that were not steady
    for attempt in range(trainings):
        variant = gather_figures(train(name, job, batches), counted)
        steady = steady_after(variant["warm_up_ms"])
        if steady is not None:
            break
        before += counted.start if attempt < trainings - 1 else 0
    judged = len(variant["warm_up_ms"])
    steps = before + counted.start - (0 if steady is None else judged - steady)
    return variant | {"warm_up": {"steps": steps, "steady": steady is not None}}


def gather_figures(trained: TrainedVariant, counted: slice) -> Figures:
    """The figures of a variant from the time stamps and losses of all ranks, equal on all ranks. A collective."""
    timestamps = trained.timestamps
    mine = {
        "seconds": timestamps.seconds(),
        "losses": torch.stack(timestamps.losses).double().tolist(),
        "predicted": torch.stack(timestamps.predicted).double().tolist(),
        "peak_bytes": trained.peak_bytes,
        "sent_bytes": trained.sent_bytes / len(timestamps.losses),
        "late": sum(timestamps.late[counted]) / max(1, len(timestamps.late[counted])),
        "busy_cores": timestamps.busy_cores(counted),
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    losses, predicted = (np.array([rank[key] for rank in ranks]) for key in ("losses", "predicted"))
    seconds = np.stack([rank["seconds"] for rank in ranks])
    return account(seconds, counted) | {
        # The time of the first step is unknown.
        "warm_up_ms": step_ms(seconds, slice(max(1, counted.start - WARM_UP_STEPS), counted.start)).tolist(),
        "sent_bytes": float(np.mean([rank["sent_bytes"] for rank in ranks])),  # of a rank and step, to other ranks
        "dense_bytes": trained.dense_bytes,
        "losses": global_losses(losses, predicted),
        "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
        "host_late": max(rank["late"] for rank in ranks),  # share of the steps in which the device waited for the host
        "busy_cores": sum(rank["busy_cores"] for rank in ranks),  # CPU cores that all ranks together keep busy
        "notes": trained.notes,
    }


def _keep(figures: Figures, path: Path | None) -> None:
    """Write the file in one atomic step, because a rank may be killed at any time."""
    if path is not None:
        draft = path.with_name(f"{path.name}.draft")
        draft.write_text(json.dumps(figures, default=str))
        draft.replace(path)
