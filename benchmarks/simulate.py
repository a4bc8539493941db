"""The simulator: how far it is from what was measured, then TorchRec and FreeScale on 8 to 1024 ranks.

    python -m benchmarks.simulate [--quick] [--json] [--output FILE] [--plot FILE] [--ranks N ...] [--link-gbps X]

Against measurements (``benchmarks/results``): step and exposed time of every side at every collision rate; idle time of the
ranks by balancing, and the end-to-end steps of every side, on the very batches that were measured (``validation.py``).

The scaling study takes what a sample costs from the straggler measurement of the H200, where a rank had a quarter of the GPU:
four times as fast here. A rank's compute varies around its cost as it did there, less by the root of the samples it has more.
The other parameters are options. Collisions are the same on any number of ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if __name__ == "__main__" and not __package__:  # started as a file: let it find its neighbours
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import plots, report
from benchmarks.harness import simulator_validation as validation
from benchmarks.harness.tables.claims import kept
from lightning_freescale.balance import CostModel
from lightning_freescale.simulate import SIDES, Cluster, Model, Result, simulate

Row = dict[str, Any]

SPARE = validation.BEFORE + validation.AFTER  # steps that a simulation does not count
GPU_SHARE = 4  # ranks on the GPU of the straggler measurement


# ---- many ranks -------------------------------------------------------------------------------------------------------
def log_normal_batches(ranks: int, arguments: argparse.Namespace) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(ranks)
    shape = (arguments.steps + SPARE, ranks * arguments.batch_size)
    return list(np.minimum(rng.lognormal(7.3, 1.2, shape), arguments.max_history).astype(np.int64))


def root_of_samples(found: dict[str, Any], arguments: argparse.Namespace) -> float:
    """What is left of a noise when it is the mean of more samples, each with its own."""
    return float(np.sqrt(int(found["setting"]["batch_size"]) / arguments.batch_size))


def study(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    """Its setting, and one row per number of ranks and side."""
    found = kept()["straggler_h200"]
    cost, noise = validation.measured_cost(found)
    cost = CostModel(*(value / GPU_SHARE for value in cost.state_dict().values()))
    noise = arguments.noise / 100 if arguments.noise is not None else noise * root_of_samples(found, arguments)
    dim, layers = (int(found["setting"][name]) for name in ("embedding_dim", "layers"))
    model = Model(cost, 4.0 * dim, arguments.collisions / 100, dense_bytes=4.0 * layers * 5 * dim**2, noise=noise)
    rows: list[Row] = []
    for ranks in arguments.ranks:
        cluster = Cluster(
            ranks, arguments.link_gbps / 8 * 1e9, arguments.latency_us / 1e6, nccl_slowdown=arguments.nccl_slowdown
        )
        batches = log_normal_batches(ranks, arguments)
        base: Result | None = None
        for side in SIDES:
            began = time.perf_counter()
            result = simulate(side, cluster, model, batches)
            base = base or result
            first = next((row for row in rows if row["side"] == side.name), None)
            each = result.qps / ranks
            rows.append(
                result.as_row()
                | {
                    "efficiency %": 100 * each / (first["QPS"] / first["ranks"] if first else each),
                    "bubble gone %": 100 * (1 - result.bubble / base.bubble),
                    "simulated in s": time.perf_counter() - began,
                }
            )
    setting = {
        "histories": f"log-normal (7.3, 1.2), at most {arguments.max_history} events",
        "samples per rank": arguments.batch_size,
        "collisions": model.collisions,
        "link GB/s": arguments.link_gbps / 8,
        "latency us": arguments.latency_us,
        "slowdown beside NCCL": arguments.nccl_slowdown,
        "cost, seconds": cost.state_dict(),
        "noise of a rank's compute": noise,
        "row bytes": model.row_bytes,
        "dense bytes": model.dense_bytes,
        "steps": arguments.steps,
    }
    return setting, rows


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Bubble, throughput and efficiency against the ranks."""
    figure = plots.figure(12, 3.6)
    bubble, throughput, efficiency = figure.subplots(1, 3)
    names = list(dict.fromkeys(row["side"] for row in rows))
    for number, name in enumerate(names):
        own = [row for row in rows if row["side"] == name]
        ranks = [row["ranks"] for row in own]
        style = {"marker": "o", "markersize": 3, "color": plots.COLOURS[number], "label": name}
        style |= {} if number else {"linewidth": 5, "alpha": 0.4}  # the next one lies on it
        bubble.plot(ranks, [row["bubble %"] for row in own], **style)
        throughput.plot(ranks, [row["QPS"] for row in own], **style)
        efficiency.plot(ranks, [row["efficiency %"] for row in own], **style)
    bare = [(row["ranks"], row["QPS"] * row["step ms"] / row["compute ms"]) for row in rows if row["side"] == names[0]]
    throughput.plot(*zip(*bare, strict=True), color="grey", linewidth=1, linestyle=":", label="no bubble")
    bubble.set(title="Bubble, % of a step", ylim=(0, None))
    throughput.set(title="Samples a second", yscale="log")
    efficiency.set(title=f"Samples a second and rank, % of {rows[0]['ranks']} ranks", ylim=(0, 110))
    for axes in (bubble, throughput, efficiency):
        plots.ranks_axis(axes, [row["ranks"] for row in rows])
    throughput.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=plots.DPI)


# ---- the command ------------------------------------------------------------------------------------------------------
def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="two numbers of ranks, few steps")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the scaling study, e.g. out.png")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="default: 8, 16, ... 1024")
    parser.add_argument("--steps", type=int, help="that count (default: 12, quick: 2)")
    parser.add_argument("--batch-size", type=int, default=128, help="samples per rank (default: %(default)s)")
    parser.add_argument("--max-history", type=int, default=21_000, help="events (default: %(default)s)")
    parser.add_argument(
        "--link-gbps", type=float, default=200.0, help="gigabits a second a rank (default: %(default)s)"
    )
    parser.add_argument("--latency-us", type=float, default=10.0, help="of an exchange (default: %(default)s)")
    parser.add_argument("--collisions", type=float, default=12.0, help="percent of the rows (default: %(default)s)")
    parser.add_argument(
        "--nccl-slowdown",
        type=float,
        default=1.1,
        help="of compute beside NCCL, as in the paper (default: %(default)s)",
    )
    parser.add_argument(
        "--noise", type=float, help="standard deviation of a rank's compute, percent (default: as measured)"
    )
    arguments = parser.parse_args(argv)
    arguments.ranks = arguments.ranks or ([8, 64] if arguments.quick else [2**power for power in range(3, 11)])
    arguments.steps = arguments.steps or (2 if arguments.quick else 12)
    return arguments


def main() -> None:
    arguments = parse()
    compared = validation.compare(arguments.quick)
    setting, rows = study(arguments)
    if arguments.plot:
        draw(arguments.plot, rows)
    report.publish(
        arguments,
        report.head("simulate") | compared | {"setting": setting, "scaling": rows},
        {
            "Simulated against measured": compared["errors"],
            "Steps by side and collision rate": compared["exposed"],
            "Slowest rank and idle time by balancing": compared["straggler"],
            "Steps end to end": compared["end_to_end"],
            f"Simulated, {arguments.batch_size} samples a rank, {arguments.link_gbps:g} Gb/s": rows,
        },
    )


if __name__ == "__main__":
    main()
