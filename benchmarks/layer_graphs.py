"""CUDA graphs of the layers of HSTU: the time of a step with and without them, in trainings that alternate.

    python -m benchmarks.layer_graphs [--quick] [--json] [--output FILE] [--ranks N] [--device cpu|cuda] [--shape S] [--rounds N]

The variant "all" of ``benchmarks.end_to_end`` trains one of its shapes, and so does the dense part alone, each with
``HSTU(cuda_graphs=True)`` and with ``HSTU(cuda_graphs=False)``. All trainings compute the same batches. Graphs save time of the
host, so the gain depends on the host: it is large where the GPU waits for the host. On a CPU there are no graphs. The two sides
are equal there and only show that the script works.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import end_to_end
from benchmarks.harness import report
from benchmarks.harness.gpu_cluster import launcher
from benchmarks.harness.training.shapes import SHAPES, shape_options
from benchmarks.harness.variant_names import ALL, DENSE_ONLY

SIDES = {"with graphs": True, "without graphs": False}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="a tiny shape, few steps")
    launcher.add_options(parser)
    known = [name for name in SHAPES if name != "dlrm"]
    parser.add_argument("--shape", choices=known, default="short", help="of benchmarks.end_to_end; default short")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each side; default 3")
    arguments = parser.parse_args(argv)
    launcher.resolve_options(arguments)
    return arguments


def run_rank(arguments: argparse.Namespace) -> int:
    """Measure as one of the ranks; rank 0 reports."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")  # as benchmarks.end_to_end
    rank = int(os.environ["RANK"])  # read now: Lightning deletes the variables
    import torch.distributed as dist  # imported late: the launcher does not need torch

    from benchmarks.harness import rank_setup
    from benchmarks.harness.training import all_variants, variants

    words = ["--device", arguments.device, "--ranks", str(arguments.ranks), *["--quick"] * arguments.quick]
    options = shape_options(arguments.shape, arguments.device, arguments.quick)
    rank_setup.silence_libraries()
    job, counted = all_variants.make_job(end_to_end.parse([*words, *options]), end_to_end.WAIT)
    dist.init_process_group(
        "nccl" if arguments.device == "cuda" else "gloo", timeout=timedelta(seconds=end_to_end.WAIT)
    )
    batches = variants.JobBatches(job)
    variants.train(DENSE_ONLY, job, batches)  # compiles the kernels
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(arguments.rounds):
        for name in (DENSE_ONLY, ALL):
            for side, graphs in SIDES.items():
                mine = dataclasses.replace(job, model=job.model | {"cuda_graphs": graphs})
                trained = all_variants.gather_figures(variants.train(name, mine, batches), counted)
                found.setdefault((name, side), []).append(trained)
                if rank == 0:
                    step = trained["step_ms"]["mean"]
                    print(f"round {number + 1}: {name} {side}: {step:.1f} ms per step", file=sys.stderr, flush=True)
    if rank == 0:
        machine = rank_setup.describe_machine(job.device)
        rows = summarise(found)
        result = report.head("layer_graphs", machine) | {"shape": arguments.shape, "rows": rows}
        report.publish(arguments, result, {f"Steps of the shape {arguments.shape}": rows})
    rank_setup.leave_group()
    return 0


def summarise(found: dict[tuple[str, str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each variant and side: milliseconds of a step, their range over the rounds, and the ratio to the other side."""
    rows = []
    without = {name: _mean(rounds) for (name, side), rounds in found.items() if not SIDES[side]}
    for (name, side), rounds in found.items():
        steps = [training["step_ms"]["mean"] for training in rounds]
        rows.append(
            {
                "variant": name,
                "layers": side,
                "step_ms": _mean(rounds),
                "lowest": min(steps),
                "highest": max(steps),
                "ratio": _mean(rounds) / without[name],
                "waited for the host": statistics.mean(training["host_late"] for training in rounds),
                "peak_gib": max(training["peak_bytes"] for training in rounds) / 2**30,
                "last loss": rounds[0]["losses"][-1],
            }
        )
    return rows


def _mean(rounds: Sequence[dict[str, Any]]) -> float:
    return statistics.mean(training["step_ms"]["mean"] for training in rounds)


if __name__ == "__main__":
    chosen = parse()
    sys.exit(launcher.on_every_rank("benchmarks.layer_graphs", chosen, run_rank))
