"""Where nothing is to be won, nothing must be lost: FreeScale's default settings against freescale_sync.

    python -m benchmarks.cannot_help [--quick] [--json] [--output FILE] [--ranks N] [--device cpu|cuda] [--batch-size 32]
    python -m benchmarks.cannot_help --control  # freescale_sync against itself: what the comparison finds where nothing is

Equal short histories, and a tiny table of which every row collides: no stragglers, nothing to hide. The ``auto`` settings see
that and take the synchronous path; what is compared are the steps after that. The sides train in processes of their own, for
streams and threads of one would slow the other, and take turns of a second or so (``turns.py``): each turn is compared with the
other side's next one. On CUDA one GPU is a cluster of nodes, see ``cluster.py``.
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

if __name__ == "__main__" and not __package__:  # started as a file: let it find its neighbours
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import report
from benchmarks.harness.gpu_cluster import launcher as cluster
from benchmarks.harness.gpu_cluster.matrix_product_check import check_products
from benchmarks.harness.training import all_variants as all_sides
from benchmarks.harness.training import alternation as turns
from benchmarks.harness.training.bubble import COOL, DEFAULT, MARKS, SYNC, compare_losses, global_losses
from benchmarks.harness.training.variants import Batches, Job, Trained, train
from benchmarks.harness.workload import LongTail
from lightning_freescale.embedding.mode_trial import Trial

Figures = dict[str, Any]

ALLOWED = 1.01  # of freescale_sync's step time
WARM = Trial.steps + 5  # steps of the first turn; both sides alike, though only one has something to try
WAIT = 60.0  # seconds that a rank waits for another
FOLDER = "SIDES_FOLDER"  # in the environment of the ranks: where they leave their figures


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="few and short turns")
    cluster.add_options(parser)
    parser.add_argument("--batch-size", type=int, default=32, help="samples a rank; default 32")
    parser.add_argument("--turns", type=int, help="of each side, after the warm-up; default 24")
    parser.add_argument("--steps", type=int, help="of a turn; default 30")
    parser.add_argument("--control", action="store_true", help="freescale_sync on both sides")
    arguments = parser.parse_args(argv)
    cluster.settle(arguments)
    arguments.turns = arguments.turns or (2 if arguments.quick else 24)
    arguments.steps = arguments.steps or (6 if arguments.quick else 30)
    if arguments.steps <= turns.SETTLE:
        parser.error(f"--steps: the first {turns.SETTLE} of a turn do not count; use more than {turns.SETTLE}")
    if arguments.ranks < 2:
        parser.error("--ranks: one rank exchanges nothing; use two or more")
    return arguments


# ---- the launcher ------------------------------------------------------------------------------------------------------------
def launch(arguments: argparse.Namespace) -> int:
    """Start this script once more on every rank of both sides, and compare what they found."""
    gpu = arguments.device == "cuda"
    with tempfile.TemporaryDirectory(prefix="cannot-help-") as folder:
        env = {"OMP_NUM_THREADS": cluster.threads(arguments), turns.PORT: str(cluster.free_port()), FOLDER: folder}
        argv = ["-m", "benchmarks.cannot_help", *sys.argv[1:]]
        try:
            cluster.run(arguments.ranks, argv, gpu=gpu, own_cores=gpu, clusters=2, env=env, echo=True)
        except cluster.ClusterFailed as failure:
            print(failure, file=sys.stderr)
            return failure.status
        first, second = (json.loads((Path(folder) / str(number)).read_text()) for number in range(2))
    figures = report.head("cannot_help", first["machine"])
    figures["parameters"] = {key: value for key, value in vars(arguments).items() if key not in ("json", "output")}
    figures |= {name: first[name] for name in ("workload", "model")} | compare(first, second, arguments.device)
    title = f"Where nothing is to be won, {arguments.ranks} ranks, {figures['machine']}"
    report.publish(arguments, figures, {title: figures["sides"]}, *describe(figures))
    return int(not figures["losses"]["equal"])


def compare(first: Figures, second: Figures, device: str) -> Figures:
    """The second side's steps over the first one's, turn by turn."""
    rows = [
        {
            "side": side["side"],
            "ms a step": statistics.mean(side["turn_ms"]),
            "shortest turn": min(side["turn_ms"]),
            "longest turn": max(side["turn_ms"]),
            "last loss": side["losses"][-1],
            "exchange": side["notes"].get("verdict", "synchronous"),
        }
        for side in (first, second)
    ]
    ratios = [after / before for before, after in zip(first["turn_ms"], second["turn_ms"], strict=True)]
    means = [row["ms a step"] for row in rows]
    return {
        "sides": rows,
        "turn_ms": [first["turn_ms"], second["turn_ms"]],
        "losses": compare_losses({"first": first["losses"], "second": second["losses"]}, device),
        "goal": {
            "ratio": ALLOWED,
            "reached": means[1] / means[0],
            "error": statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None,  # of the mean
        },
    }


def describe(figures: Figures) -> list[str]:
    losses, goal = figures["losses"], figures["goal"]
    error = "" if goal["error"] is None else f" +- {goal['error']:.3f}"
    met = "reached" if goal["reached"] <= goal["ratio"] else "missed"
    return [
        f"losses, {losses['first']:.4g} to {losses['last']:.4g}: {'equal' if losses['equal'] else 'DIFFERENT'}, "
        f"apart by at most {max(losses['apart'].values()):.1e} (tolerance {losses['tolerance']:.0e})",
        f"goal, at most {goal['ratio']:.2f} of freescale_sync's time: {met}, {goal['reached']:.4f}{error}",
    ]


# ---- on every rank -----------------------------------------------------------------------------------------------------------
def take_part(arguments: argparse.Namespace) -> int:
    """Be a rank of one of the sides; the side's rank 0 leaves its figures for the launcher."""
    all_sides.quiet()
    side, rank, folder = int(os.environ["CLUSTER"]), int(os.environ["RANK"]), Path(os.environ[FOLDER])
    name = (SYNC, SYNC if arguments.control else DEFAULT)[side]
    shape = {"warm": WARM, "steps": arguments.steps, "count": arguments.turns}
    device = all_sides.use_device(arguments.device)
    workload = LongTail(arguments.batch_size, 64, 256 * arguments.batch_size, collisions=1.0, log_std=0.0)
    dim, layers, heads = (128, 4, 4) if device.type == "cuda" else (32, 2, 2)
    model = {"embedding_dim": dim, "num_layers": layers, "num_heads": heads}
    job = Job(device, rank, arguments.ranks, workload, model, WARM + arguments.steps * arguments.turns + COOL, WAIT)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=WAIT))
    if device.type == "cuda":
        check_products(device, rank, dim)
    taking = turns.Turns.open(side, rank, WAIT, ranks=arguments.ranks, **shape)
    found = gather(train(name, job, Batches(job), [taking]), **shape)
    if rank == 0:
        found |= {"side": name, "machine": all_sides.machine(device), "workload": asdict(workload), "model": model}
        (folder / str(side)).write_text(json.dumps(found))
    taking.leave()
    all_sides.leave()
    return 0


def gather(trained: Trained, **shape: int) -> Figures:
    """A side's figures, from all its ranks to all of them."""
    marks = trained.marks
    own = [marks.seconds()[:, MARKS.index("end")], torch.stack(marks.losses), torch.stack(marks.predicted)]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, [np.asarray(torch.as_tensor(part).double().cpu()) for part in own])
    ends, losses, predicted = (np.stack(part) for part in zip(*ranks, strict=True))
    return {
        "turn_ms": (1e3 * turns.turn_times(ends, **shape)).tolist(),
        "losses": global_losses(losses, predicted),
        "notes": trained.notes,
    }


def main() -> int:
    arguments = parse()
    return take_part(arguments) if FOLDER in os.environ else launch(arguments)


if __name__ == "__main__":
    sys.exit(main())
