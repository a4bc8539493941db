"""No speed-up expected: FreeScale's default settings must not be slower than freescale_sync where its techniques cannot help.

    python -m benchmarks.cannot_help [--quick] [--json] [--output FILE] [--ranks N] [--device cpu|cuda] [--repeats 3]
    python -m benchmarks.cannot_help --control  # freescale_sync against itself: the error of the comparison

The histories are short and of equal length, and every row of the tiny table collides. There are no stragglers and no
exchange that could be hidden. The ``auto`` settings detect this in the first steps and switch to the synchronous path.
The steps after that are compared. The two variants train in separate processes, because streams and threads of one
would slow the other, and alternate in blocks of a second or two (``harness/training/alternation.py``). Each block is
compared with the next block of the other variant. Two sets of processes may differ by chance for as long as they run. So the
comparison is repeated with new processes, and the variants take turns to train first. After the blocks, the work of the host in
a step is counted: Python calls, torch operators and collectives of the main thread. These counts do not depend on the machine.

On CUDA one GPU acts as a cluster of nodes. There each training measures the AllReduce and chooses the size of DDP's buckets, as
it does for every user.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import rank_setup, report
from benchmarks.harness.free_ports import free_port
from benchmarks.harness.gpu_cluster import launcher
from benchmarks.harness.gpu_cluster.matrix_product_check import check_products
from benchmarks.harness.gpu_cluster.rank_process import ClusterFailed
from benchmarks.harness.host_counters import CountedSteps
from benchmarks.harness.training import alternation
from benchmarks.harness.training.bubble import POINTS, UNCOUNTED_LAST_STEPS, compare_losses, global_losses
from benchmarks.harness.training.bubble_report import loss_lines
from benchmarks.harness.training.variants import JobBatches, TrainedVariant, TrainingJob, train
from benchmarks.harness.variant_names import FREESCALE, SYNC
from benchmarks.harness.workload import LongTailWorkload
from lightning_freescale.embedding.mode_trial import FIRST_TRIAL_STEPS

Figures = dict[str, Any]

LARGEST_RATIO = 1.01  # of the step times, freescale to freescale_sync
FIRST_BLOCK_STEPS = (
    FIRST_TRIAL_STEPS + 5
)  # steps of the first block; for both variants, although only freescale has settings to try
WAIT = 60.0  # longest wait of a rank for another, seconds
FIGURES_FOLDER = "VARIANTS_FOLDER"  # environment variable of the ranks: where they leave their figures
TRAINS_FIRST = "TRAINS_FIRST"  # environment variable of the ranks: which of the two variants trains first, 0 or 1


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="few and short blocks")
    launcher.add_options(parser)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank; default 32")
    parser.add_argument(
        "--turns", type=int, help="blocks of each variant after the warm-up, in each repeat; default 12"
    )
    parser.add_argument("--repeats", type=int, help="comparisons, each with new processes; default 3")
    parser.add_argument("--steps", type=int, help="steps of a block; default 30")
    parser.add_argument("--control", action="store_true", help="compare freescale_sync with itself")
    arguments = parser.parse_args(argv)
    launcher.resolve_options(arguments)
    arguments.turns = arguments.turns or (2 if arguments.quick else 12)
    if arguments.repeats is None:
        arguments.repeats = 1 if arguments.quick else 3
    arguments.steps = arguments.steps or (6 if arguments.quick else 30)
    # Steps whose Python calls are counted. In as many further steps the operators are counted.
    arguments.counted = 2 if arguments.quick else 32
    uncounted = alternation.UNCOUNTED_STEPS_OF_BLOCK
    if arguments.steps <= uncounted:
        parser.error(f"--steps: the first {uncounted} steps of a block do not count; use more than {uncounted}")
    if arguments.repeats < 1:
        parser.error("--repeats: at least one comparison is needed")
    if arguments.ranks < 2:
        parser.error("--ranks: a single rank exchanges nothing; use two or more")
    return arguments


# ---- the launcher ------------------------------------------------------------------------------------------------------------
def launch(arguments: argparse.Namespace) -> int:
    """Compare the variants, each time in new processes."""
    pairs = []
    try:
        for repeat in range(arguments.repeats):
            print(f"repeat {repeat + 1} of {arguments.repeats}", file=sys.stderr, flush=True)
            pairs.append(run_pair(arguments, first=repeat % 2))
    except ClusterFailed as failure:
        print(failure, file=sys.stderr)
        return failure.status
    known = pairs[0][0]
    figures = report.head("cannot_help", known["machine"])
    figures["parameters"] = {key: value for key, value in vars(arguments).items() if key not in ("json", "output")}
    figures |= {name: known[name] for name in ("workload", "model")} | compare(pairs, arguments.device)
    title = f"No speed-up expected, {arguments.ranks} ranks, {figures['machine']}"
    report.publish(arguments, figures, {title: figures["sides"]}, *describe(figures))
    return int(not figures["losses"]["equal"])


def run_pair(arguments: argparse.Namespace, first: int) -> tuple[Figures, Figures]:
    """Start this script on every rank of both variants. Returns their figures; those of ``freescale_sync`` come first.

    Args:
        arguments: the options of the command.
        first: which variant trains first, 0 or 1.
    """
    gpu = arguments.device == "cuda"
    with tempfile.TemporaryDirectory(prefix="cannot-help-") as folder:
        env = {alternation.PORT: str(free_port()), FIGURES_FOLDER: folder, TRAINS_FIRST: str(first)}
        argv = ["-m", "benchmarks.cannot_help", *sys.argv[1:]]
        launcher.run(arguments.ranks, argv, gpu=gpu, clusters=2, env=env, echo=True)
        before, after = (json.loads((Path(folder) / str(variant)).read_text()) for variant in range(2))
        return before, after


def compare(pairs: Sequence[tuple[Figures, Figures]], device: str) -> Figures:
    """The ratio of the second variant's step times to the first one's, in each pair and on average."""
    rows = []
    for variant in zip(*pairs, strict=True):
        times = [time for one in variant for time in one["turn_ms"]]
        exchanges = {one["notes"].get("verdict", "synchronous"): None for one in variant}  # in order, each once
        rows.append(
            {
                "side": variant[0]["side"],
                "ms a step": statistics.mean(times),
                "shortest turn": min(times),
                "longest turn": max(times),
                "last loss": variant[0]["losses"][-1],
                "exchange": "; ".join(exchanges),
            }
            | {f"{what} a step": statistics.mean(one["host"][what] for one in variant) for what in variant[0]["host"]}
        )
    ratios = [statistics.mean(after["turn_ms"]) / statistics.mean(before["turn_ms"]) for before, after in pairs]
    measured = ratios
    if len(pairs) == 1:  # Its blocks give an error, which leaves out that two sets of processes may differ.
        before, after = pairs[0]
        measured = [later / earlier for earlier, later in zip(before["turn_ms"], after["turn_ms"], strict=True)]
    curves = [pair[variant]["losses"] for pair in pairs for variant in range(2)]
    return {
        "sides": rows,
        "turn_ms": [[one["turn_ms"] for one in variant] for variant in zip(*pairs, strict=True)],
        "losses": compare_losses({f"training {number}": curve for number, curve in enumerate(curves)}, device),
        "goal": {
            "ratio": LARGEST_RATIO,
            "reached": statistics.mean(ratios),
            "repeats": ratios,
            # Standard error of the mean ratio.
            "error": statistics.stdev(measured) / len(measured) ** 0.5 if len(measured) > 1 else None,
        },
    }


def describe(figures: Figures) -> list[str]:
    """The conclusions as lines of text."""
    goal = figures["goal"]
    error = "" if goal["error"] is None else f" +- {goal['error']:.3f}"
    outcome = "reached" if goal["reached"] <= goal["ratio"] else "missed"
    repeats = ", ".join(f"{ratio:.3f}" for ratio in goal["repeats"])
    return [
        *loss_lines(figures),
        f"ratio of each repeat: {repeats}",
        f"goal, at most {goal['ratio']:.2f} of freescale_sync's step time: {outcome}, {goal['reached']:.4f}{error}",
    ]


# ---- on every rank -----------------------------------------------------------------------------------------------------------
def run_rank(arguments: argparse.Namespace) -> int:
    """Train as a rank of one of the variants. The variant's rank 0 leaves its figures for the launcher."""
    rank_setup.silence_libraries()
    place, rank, folder = int(os.environ["CLUSTER"]), int(os.environ["RANK"]), Path(os.environ[FIGURES_FOLDER])
    variant = place ^ int(os.environ[TRAINS_FIRST])  # the cluster in the first place trains first
    name = (SYNC, SYNC if arguments.control else FREESCALE)[variant]
    shape = {"warm": FIRST_BLOCK_STEPS, "steps": arguments.steps, "count": arguments.turns}
    device = rank_setup.use_device(arguments.device)
    workload = LongTailWorkload(arguments.batch_size, 64, 256 * arguments.batch_size, collisions=1.0, log_std=0.0)
    dim, layers, heads = (128, 4, 4) if device.type == "cuda" else (32, 2, 2)
    model = {"embedding_dim": dim, "num_layers": layers, "num_heads": heads}
    # The first step after the blocks does not count, because the variants wait for each other there.
    counted = FIRST_BLOCK_STEPS + arguments.steps * arguments.turns + 1
    steps = counted + 2 * arguments.counted + UNCOUNTED_LAST_STEPS
    job = TrainingJob(device, rank, arguments.ranks, workload, model, steps, WAIT)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=WAIT))
    if device.type == "cuda":
        check_products(device, rank, dim)
    blocks = alternation.AlternatingBlocks.open(place, rank, WAIT, ranks=arguments.ranks, **shape)
    host = CountedSteps(counted, arguments.counted)
    found = gather(train(name, job, JobBatches(job), [blocks, host]), **shape) | {"host": host.means}
    if rank == 0:
        machine = rank_setup.describe_machine(device)
        found |= {"side": name, "machine": machine, "workload": asdict(workload), "model": model}
        (folder / str(variant)).write_text(json.dumps(found))
    blocks.leave()
    rank_setup.leave_group()
    return 0


def gather(trained: TrainedVariant, **shape: int) -> Figures:
    """The figures of a variant from the time stamps and losses of all its ranks, equal on all of them. A collective."""
    timestamps = trained.timestamps
    own = [
        timestamps.seconds()[:, POINTS.index("end")],
        torch.stack(timestamps.losses),
        torch.stack(timestamps.predicted),
    ]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, [np.asarray(torch.as_tensor(part).double().cpu()) for part in own])
    ends, losses, predicted = (np.stack(part) for part in zip(*ranks, strict=True))
    return {
        "turn_ms": (1e3 * alternation.block_times(ends, **shape)).tolist(),
        "losses": global_losses(losses, predicted),
        "notes": trained.notes,
    }


def main() -> int:
    arguments = parse()
    return run_rank(arguments) if FIGURES_FOLDER in os.environ else launch(arguments)


if __name__ == "__main__":
    sys.exit(main())
