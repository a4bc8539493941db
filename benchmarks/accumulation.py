"""Exposed embedding exchange with gradient accumulation: the synchronous and the prioritized exchange of micro-batches.

    python -m benchmarks.accumulation [--quick] [--json] [--output FILE] [--ranks N] [--device cpu|cuda]

The model, the batches and the machine are those of ``benchmarks.exposed``, with 12% collisions between consecutive batches. The
exposed time of a micro-batch is its time minus the time of the same compute without the exchange. The variants alternate in
blocks of complete optimizer steps. The first half of a block does not count. The slowest rank defines the time of a micro-batch.
Every micro-batch reduces its dense gradients, in all variants. The losses of the two exchanges are compared.

cpu: an emulated device and network, whose time is virtual and therefore the same on every machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.gpu_cluster import launcher
from benchmarks.harness.variant_names import COMPUTE_ONLY, PRIORITIZED, SYNC

if TYPE_CHECKING:
    from torch import Tensor

WINDOWS = (1, 2, 4, 8)  # micro-batches of an optimizer step
COLLISIONS = 0.12  # share of the ids of a batch that the previous batch has, too


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, equal on all ranks."""
    import torch
    import torch.distributed as dist

    from benchmarks.harness.exchange.block_times import run_steps
    from benchmarks.harness.exchange.make_machine import make_machine
    from benchmarks.harness.exchange.variants import FreeScaleSteps, compute_alone

    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    machine, workload = make_machine(arguments.device, arguments.ranks, "counted", 0.05, "auto")
    rank, longest = dist.get_rank(), max(arguments.windows)
    total = (1 + arguments.rounds) * 2 * longest + 2  # a block has two of the longest windows
    batches = [machine.pin(workload.batch(rank, step, arguments.ranks, COLLISIONS)) for step in range(total)]
    running = {}
    for window in arguments.windows:
        running[COMPUTE_ONLY, window] = compute_alone(workload, machine, batches, window)
        for name, group in ((SYNC, machine.sharding_group()), (PRIORITIZED, machine.exchange_group("low"))):
            trained = FreeScaleSteps(name == PRIORITIZED, workload, machine, group, window=window)
            running[name, window] = trained.steps(batches)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in running}
    losses: dict[tuple[str, int], list[Tensor]] = {key: [] for key in running}
    for key, steps in running.items():
        losses[key] += run_steps(steps, machine, 2 * longest)[1]
    for _ in range(arguments.rounds):
        for key, steps in running.items():
            found, block_losses = run_steps(steps, machine, 2 * longest)
            times[key].append(statistics.mean(found[longest:]))
            losses[key] += block_losses
    apart = [
        float(
            (torch.stack(losses[SYNC, window]) - torch.stack(losses[PRIORITIZED, window])).abs().max()
            / losses[SYNC, window][0].abs()
        )
        for window in arguments.windows
    ]
    return {
        "machine": machine.describe(),
        "parameters": {
            "ranks": arguments.ranks,
            "rounds": arguments.rounds,
            "device": arguments.device,
            "collisions_percent": 100 * COLLISIONS,
        },
        "exposed": summarize(times, arguments.windows),
        "ms_by_round": [{"variant": name, "micro-batches": window, "ms": ms} for (name, window), ms in times.items()],
        "losses_apart": dict(zip(map(str, arguments.windows), apart, strict=True)),
    }


def summarize(times: dict[tuple[str, int], list[float]], windows: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each number of micro-batches: medians over the rounds of the mean times in ms.

    Args:
        times: by variant and number of micro-batches, the mean time of a micro-batch in each round.
    """
    rows = []
    for window in windows:
        alone = times[COMPUTE_ONLY, window]
        exposed = {
            name: statistics.median(own - compute for own, compute in zip(times[name, window], alone, strict=True))
            for name in (SYNC, PRIORITIZED)
        }
        rows.append(
            {
                "micro-batches": window,
                "compute ms": statistics.median(alone),
                **{f"{name} exposed ms": value for name, value in exposed.items()},
                "removed %": 100 * (1 - exposed[PRIORITIZED] / exposed[SYNC]),
            }
        )
    return rows


def run_rank(arguments: argparse.Namespace) -> int:
    """Measure as one of the ranks; rank 0 reports."""
    # The streams of all variants share the hardware queues. Four ranks with 32 queues each are more than MPS has.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    from benchmarks.harness import rank_setup  # imported late: the launcher does not need torch

    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result only
        figures = measure(arguments)
    if os.environ["RANK"] == "0":
        head = report.head("accumulation", str(figures["machine"]["device"]))
        title = f"{arguments.ranks} ranks, exposed time of a micro-batch"
        report.publish(arguments, figures | head, {title: figures["exposed"]})
    rank_setup.leave_group()
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="one and four micro-batches, two rounds")
    launcher.add_options(parser)
    parser.add_argument("--rounds", type=int, help="blocks of each variant; default 6, or 2 in virtual time")
    arguments = parser.parse_args(argv)
    launcher.resolve_options(arguments)
    arguments.rounds = arguments.rounds or (6 if arguments.device == "cuda" and not arguments.quick else 2)
    arguments.windows = (1, 4) if arguments.quick else WINDOWS
    return arguments


def main() -> int:
    return launcher.on_every_rank("benchmarks.accumulation", parse(), run_rank)


if __name__ == "__main__":
    sys.exit(main())
