"""Experts that the ranks share: time of a step over both transports, in one part and in two parts of the batch.

    python -m benchmarks.expert_parallel [--quick] [--json] [--output FILE] [--ranks 4] [--device cpu|cuda] [--rounds 3]

The dense part of a training step of HSTU with experts, forward and backward, without lookup and without AllReduce. On a GPU it
is in bfloat16 by autocast. Every rank has its own samples. "all experts on every rank" exchanges nothing: it is the compute
alone, and "exposed" is what a step takes beyond it. The other variants send events to the ranks of their experts, over NCCL
(gloo on a CPU) or over the SM-free transport, in one or two micro-chunks. The exposed time of two chunks also contains what the
compute of two smaller parts takes longer.

A step ends when the last rank has ended it. The variants run in turn in each round. "sent" is what a rank sends to other ranks
in a step; of ``W`` ranks, each is taken to keep one in ``W`` bytes. The losses of all variants are compared with that of the
first one.

cuda: the script starts one GPU as a cluster of ranks, with SMs reserved for each. cpu: two ranks and a small model; such times
only show that the script works, because all ranks share the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.gpu_cluster import launcher

ALONE = "all experts on every rank"


class ExpertShape(NamedTuple):
    """A model, and the samples of a rank."""

    dim: int
    heads: int
    layers: int
    experts: int
    top_k: int
    hidden: int
    samples: int
    mean_length: int
    longest: int
    negatives: int = 64


GPU_SHAPE = ExpertShape(512, 4, 4, 8, 2, 1024, 32, 512, 4096)
CPU_SHAPE = ExpertShape(32, 2, 2, 4, 2, 64, 16, 32, 128, 16)


def parse() -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="fewer steps and one round")
    launcher.add_options(parser)
    parser.add_argument("--rounds", type=int, help="times that every variant is measured (default: 3)")
    arguments = parser.parse_args()
    launcher.resolve_options(arguments)
    if arguments.ranks < 2:
        parser.error("--ranks: a single rank exchanges nothing; use two or more")
    return arguments


def run_rank(arguments: argparse.Namespace) -> int:
    """Measure as one of the ranks; rank 0 reports. Returns 1 if the losses of the variants differ."""
    # The streams of five variants share the hardware queues. Four ranks with 32 queues each are more than MPS has.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    import torch.distributed as dist  # imported late: the launcher does not need torch

    import lightning_freescale.transport  # noqa: F401 - registers the backend
    from benchmarks.harness import expert_step, rank_setup

    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result only
        rank_setup.silence_libraries()
        device = rank_setup.use_device(arguments.device)
        standard = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(standard)
        shape = GPU_SHAPE if device.type == "cuda" else CPU_SHAPE
        steps = {ALONE: expert_step.ExpertStep(shape, device, None, 1)}
        for backend in (standard, "freescale"):
            group = dist.new_group(backend=backend)
            for chunks in (1, 2):
                steps[f"{backend}, {chunks}"] = expert_step.ExpertStep(shape, device, group, chunks)
        rounds = arguments.rounds or (1 if arguments.quick else 3)
        found = measure(steps, rounds, 3 if arguments.quick else 8)
        machine = rank_setup.describe_machine(device)
    rows = describe(found)
    if os.environ["RANK"] == "0":
        publish(arguments, rows, shape, machine)
    rank_setup.leave_group()
    return 0 if all(row["loss difference"] < 0.01 for row in rows) else 1


def measure(steps: dict[str, Any], rounds: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of the steps of each variant in each round, its loss, and the bytes that a step sends. A collective."""
    found: dict[str, dict[str, Any]] = {}
    for name, step in steps.items():
        for _ in range(2):  # compile, and let the allocator see all sizes
            loss = step()
        found[name] = {"ms": [], "loss": step.mean(loss), "sent": step.mean(step.sent_bytes)}
    for _ in range(rounds):
        for name, step in steps.items():
            step.meet()
            began = time.perf_counter()
            for _ in range(repeats):
                step()
            step.meet()
            found[name]["ms"].append((time.perf_counter() - began) / repeats * 1e3)
    return found


def describe(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the table."""
    alone = statistics.mean(found[ALONE]["ms"])
    rows = []
    for name, one in found.items():
        transport, _, chunks = name.partition(", ")
        ms, exact = statistics.mean(one["ms"]), found[ALONE]["loss"]
        row: dict[str, Any] = {"transport": transport, "micro_chunks": int(chunks or 1), "ms": ms}
        row |= {
            "spread": f"{min(one['ms']):.2f} to {max(one['ms']):.2f}",
            "exposed ms": ms - alone,
            "times": ms / alone,
        }
        row |= {"sent MB": one["sent"] / 1e6, "loss difference": abs(one["loss"] - exact) / exact}
        rows.append(row)
    return rows


def publish(arguments: argparse.Namespace, rows: list[dict[str, Any]], shape: ExpertShape, machine: str) -> None:
    title = (
        f"HSTU, {shape.layers} layers of {shape.dim}, {shape.experts} experts of {shape.hidden}, {shape.top_k} of them an event, "
        f"{arguments.ranks} ranks, {machine}"
    )
    results = {"ranks": arguments.ranks, "shape": shape._asdict(), "expert_parallel": rows}
    report.publish(arguments, report.head("expert_parallel", machine) | results, {title: rows})


def main() -> int:
    return launcher.on_every_rank("benchmarks.expert_parallel", parse(), run_rank)


if __name__ == "__main__":
    sys.exit(main())
