"""The simulator: its error against measured steps, then TorchRec and FreeScale on 8 to 1024 simulated ranks.

    python -m benchmarks.simulate [--quick] [--json] [--output FILE] [--plot FILE] [--ranks N ...] [--link-gbps X]

The comparison with the stored results contains step and exposed time of every variant at every collision rate, idle
time of the ranks per balancing mode, and the end-to-end steps of every variant. It simulates the same batches that were
measured (``harness/simulator_validation.py``).

The scaling study takes the cost of a sample from the straggler measurement on the H200. There a rank had a quarter of
the GPU, so the simulated ranks are four times as fast. A rank's compute varies around its cost as it did there; the
variation shrinks with the square root of the number of samples. Work on the tables takes what it takes in the end-to-end
steps on the H200 (``harness/simulator_costs.py``), and its part that depends on the rows is four times as fast, too. The
study is made with the compute of that measurement, and again with the compute of today's kernels. The other parameters are
options. The collision rate is the same for any number of ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import plots, report, simulator_costs, simulator_validation
from benchmarks.harness.results import load_results
from lightning_freescale.balance import CostModel
from lightning_freescale.simulate import VARIANTS, Cluster, ModelProfile, SimulationResult, simulate

Row = dict[str, Any]

UNCOUNTED_STEPS = simulator_validation.BEFORE + simulator_validation.AFTER
RANKS_PER_GPU = 4  # in the straggler measurement
OLD_DENSE_STEP = (
    "parts, Triton attention, loss in PyTorch"  # the variant of the dense step that the stragglers were measured with
)


# ---- many ranks -------------------------------------------------------------------------------------------------------
def log_normal_batches(ranks: int, arguments: argparse.Namespace) -> list[NDArray[np.int64]]:
    """Lengths of the global batches, in events."""
    rng = np.random.default_rng(ranks)
    shape = (arguments.steps + UNCOUNTED_STEPS, ranks * arguments.batch_size)
    return list(np.minimum(rng.lognormal(7.3, 1.2, shape), arguments.max_history).astype(np.int64))


def noise_scale(found: dict[str, Any], arguments: argparse.Namespace) -> float:
    """The factor by which the noise of a rank's compute shrinks with more samples per rank."""
    return float(np.sqrt(int(found["setting"]["batch_size"]) / arguments.batch_size))


def speed_up_of_compute() -> float:
    """How much faster the dense step has become since the costs of the study were measured.

    The largest of the measured factors, because it leaves the least compute to hide the exchange behind.
    """
    ms: dict[str, dict[str, float]] = {}
    for row in load_results()["dense_step_h200"]["dense_step"]:
        if row["histories"].startswith("log-normal") and row["bias"] == "relative":
            ms.setdefault(row["model"], {})[row["variant"]] = row["ms"]
    return max(times[OLD_DENSE_STEP] / min(times.values()) for times in ms.values())


def studied_model(arguments: argparse.Namespace, faster: float) -> ModelProfile:
    """The model of the scaling study: its compute, its rows, and its work on the tables."""
    found, costs = load_results()["straggler_h200"], simulator_costs.costs()
    cost, noise = simulator_validation.measured_cost(found)
    dim, layers = (int(found["setting"][name]) for name in ("embedding_dim", "layers"))
    return ModelProfile(
        CostModel(*(value / RANKS_PER_GPU / faster for value in cost.state_dict().values())),
        4.0 * dim,
        arguments.collisions / 100,
        dense_bytes=simulator_costs.dense_bytes({"num_layers": layers, "embedding_dim": dim}),
        noise=arguments.noise / 100 if arguments.noise is not None else noise * noise_scale(found, arguments),
        table_seconds=costs.table_seconds,
        row_seconds=costs.table_seconds_per_byte * 4.0 * dim / RANKS_PER_GPU,
        id_seconds=costs.id_seconds,
        collision_seconds=costs.collision_seconds,
        overhead=costs.overhead,
    )


def study(arguments: argparse.Namespace, faster: float = 1.0) -> tuple[dict[str, Any], list[Row]]:
    """The scaling study: its setting, and one row per number of ranks and variant.

    Args:
        faster: the compute takes this many times less time than it took when it was measured.
    """
    model = studied_model(arguments, faster)
    rows: list[Row] = []
    for ranks in arguments.ranks:
        cluster = Cluster(
            ranks, arguments.link_gbps / 8 * 1e9, arguments.latency_us / 1e6, nccl_slowdown=arguments.nccl_slowdown
        )
        batches = log_normal_batches(ranks, arguments)
        base: SimulationResult | None = None
        for variant in VARIANTS:
            began = time.perf_counter()
            result = simulate(variant, cluster, model, batches)
            base = base or result
            first = next((row for row in rows if row["side"] == variant.name), None)
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
        "compute faster by": faster,
        "cost, seconds": model.cost.state_dict(),
        "noise of a rank's compute": model.noise,
        "row bytes": model.row_bytes,
        "dense bytes": model.dense_bytes,
        "work on the tables, seconds": {
            name: getattr(model, name)
            for name in ("table_seconds", "row_seconds", "id_seconds", "collision_seconds", "overhead")
        },
        "steps": arguments.steps,
    }
    return setting, rows


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw bubble, throughput and efficiency over the number of ranks."""
    figure = plots.figure(12, 3.6)
    bubble, throughput, efficiency = figure.subplots(1, 3)
    names = list(dict.fromkeys(row["side"] for row in rows))
    for number, name in enumerate(names):
        own = [row for row in rows if row["side"] == name]
        ranks = [row["ranks"] for row in own]
        style = {"marker": "o", "markersize": 3, "color": plots.COLOURS[number], "label": name}
        style |= {} if number else {"linewidth": 5, "alpha": 0.4}  # wide and pale: the next curve lies on top of it
        bubble.plot(ranks, [row["bubble %"] for row in own], **style)
        throughput.plot(ranks, [row["QPS"] for row in own], **style)
        efficiency.plot(ranks, [row["efficiency %"] for row in own], **style)
    no_bubble = [
        (row["ranks"], row["QPS"] * row["step ms"] / row["compute ms"]) for row in rows if row["side"] == names[0]
    ]
    throughput.plot(*zip(*no_bubble, strict=True), color="grey", linewidth=1, linestyle=":", label="no bubble")
    bubble.set(title="Bubble, % of a step", ylim=(0, None))
    throughput.set(title="Samples per second", yscale="log")
    efficiency.set(title=f"Samples per second and rank, % of {rows[0]['ranks']} ranks", ylim=(0, 110))
    for axes in (bubble, throughput, efficiency):
        plots.doubling_axis(axes, [row["ranks"] for row in rows])
    throughput.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=plots.DPI)


# ---- the command ------------------------------------------------------------------------------------------------------
def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="two numbers of ranks, few steps")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw the scaling study, for example into out.png"
    )
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="numbers of ranks; default 8, 16, ... 1024")
    parser.add_argument("--steps", type=int, help="counted steps (default 12, with --quick 2)")
    parser.add_argument("--batch-size", type=int, default=128, help="samples per rank (default: %(default)s)")
    parser.add_argument(
        "--max-history", type=int, default=21_000, help="longest history in events (default: %(default)s)"
    )
    parser.add_argument(
        "--link-gbps", type=float, default=200.0, help="gigabits per second and rank (default: %(default)s)"
    )
    parser.add_argument(
        "--latency-us", type=float, default=10.0, help="latency of an exchange in microseconds (default: %(default)s)"
    )
    parser.add_argument(
        "--collisions", type=float, default=12.0, help="percent of the rows of a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--nccl-slowdown",
        type=float,
        default=1.1,
        help="slow-down of compute beside NCCL; the paper's value by default (%(default)s)",
    )
    parser.add_argument(
        "--noise", type=float, help="standard deviation of a rank's compute in percent (default: as measured)"
    )
    arguments = parser.parse_args(argv)
    arguments.ranks = arguments.ranks or ([8, 64] if arguments.quick else [2**power for power in range(3, 11)])
    arguments.steps = arguments.steps or (2 if arguments.quick else 12)
    return arguments


def main() -> None:
    arguments = parse()
    compared = simulator_validation.compare(arguments.quick)
    setting, rows = study(arguments)
    fast_setting, fast_rows = study(arguments, speed_up_of_compute())
    if arguments.plot:
        draw(arguments.plot, rows)
    report.publish(
        arguments,
        report.head("simulate")
        | compared
        | {
            "calibrated_on": list(simulator_costs.CALIBRATED_ON),
            "costs": asdict(simulator_costs.costs()),
            "setting": setting,
            "scaling": rows,
            "fast_setting": fast_setting,
            "fast_scaling": fast_rows,
        },
        {
            "Error of the simulator against measured steps": compared["errors"],
            "Steps by variant and collision rate": compared["exposed"],
            "Slowest rank and idle time by balancing mode": compared["straggler"],
            "Steps of the end-to-end benchmark": compared["end_to_end"],
            f"Simulated, {arguments.batch_size} samples per rank, {arguments.link_gbps:g} Gb/s": rows,
            f"The same with compute that is {fast_setting['compute faster by']:.2f} times faster": fast_rows,
        },
    )


if __name__ == "__main__":
    main()
