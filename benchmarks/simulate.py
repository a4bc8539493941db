"""The simulator: how far it is from what was measured, then TorchRec and FreeScale on 8 to 1024 ranks.

    python -m benchmarks.simulate [--quick] [--json] [--output FILE] [--plot FILE] [--ranks N ...] [--link-gbps X]

Against measurements (``benchmarks/results``): step and exposed time of every side at every collision rate; idle time of the
ranks by balancing, on the very batches that were measured. Nothing is fitted to what is compared: compute, link and workload
are those of the measurement.

The scaling study takes what a sample costs from the straggler measurement of the H200, where a rank had a quarter of the GPU:
four times as fast here. A rank's compute varies around its cost as it did there, less by the root of the samples it has more.
The other parameters are options. Collisions are the same on any number of ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if __name__ == "__main__" and not __package__:  # started as a file: let it find its neighbours
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import plots, report
from lightning_freescale.balance import CostModel
from lightning_freescale.data.synthetic import Synthetic
from lightning_freescale.simulate import SIDES, SPARSE_DIST, TORCHREC, Cluster, Model, Result, Side, simulate

Row = dict[str, Any]

# By the names of benchmarks/sides.py, which is too heavy to import.
MEASURED = {
    "TrainPipelineBase": TORCHREC,
    "TrainPipelineSparseDist": SPARSE_DIST,
    "freescale_sync": TORCHREC,
    "prioritized": Side("prioritized", "prioritized", sm_free=True),
}
ALONE = ("compute alone", "dense alone")  # what a step is compared with: the first that was measured
MEDIAN_OF_NORMAL = 0.6745  # of absolute values, in standard deviations
SPARE = 3  # steps that a simulation does not count
GPU_SHARE = 4  # ranks on the GPU of the straggler measurement


def kept(name: str) -> dict[str, Any]:
    """A result in ``benchmarks/results``."""
    return json.loads((report.RESULTS / name).read_text())


# ---- against measurements ---------------------------------------------------------------------------------------------
def against_exposed(name: str, steps: int) -> list[Row]:
    """Steps of every side at every collision rate, from a file of ``benchmarks.exposed``."""
    found = kept(name)
    ids, dim = found["workload"]["ids_per_rank"], found["workload"]["dim"]
    ranks = found["parameters"]["ranks"]
    batches = [np.full(ranks, ids)] * (steps + SPARE)  # what counts is the rows of a rank: one history holds them all
    rows = []
    for result in found["results"]:
        alone = next(result["step_ms"][name] for name in ALONE if name in result["step_ms"])
        for side, measured in result["step_ms"].items():
            if side not in MEASURED:
                continue
            cluster, optimizer = machine_of(found, side)
            cost = CostModel(0.0, constant=alone / 1e3 - optimizer)
            model = Model(cost, 4.0 * dim, result["collisions_measured"], optimizer=optimizer)
            simulated = 1e3 * simulate(MEASURED[side], cluster, model, batches).step
            rows.append(
                {
                    "measured in": name,
                    "collisions": result["collisions"],
                    "side": side,
                    "step ms": measured,
                    "simulated ms": simulated,
                    "error %": 100 * (simulated / measured - 1),
                    "exposed ms": measured - alone,
                    "simulated exposed ms": simulated - alone,
                }
            )
    return rows


def machine_of(found: dict[str, Any], side: str) -> tuple[Cluster, float]:
    """The cluster of a measurement, and the seconds of compute after backward."""
    machine, ranks = found["machine"], found["parameters"]["ranks"]
    if "bandwidth_mb_per_s" in machine:  # emulated
        bandwidth, latency = 1e6 * machine["bandwidth_mb_per_s"], machine["latency_ms"] / 1e3
        return Cluster(ranks, bandwidth, latency, host_waits=True), machine["after_backward_ms"] / 1e3
    # A GPU as a cluster: what its transports carry with nothing beside them, and how they slow matrix products.
    mode = machine["exchange"] if side == "prioritized" else "nccl"
    rates = {row["mode"]: row for row in kept("sm_free_h200.json")["rows"] if row["compute"] == "gemm"}
    slowdown = max(1.0, rates[mode]["slowdown"])
    return Cluster(ranks, 1e9 * rates[mode]["bare_gb_per_s_per_rank"], nccl_slowdown=slowdown), 0.0


def measured_cost(found: dict[str, Any]) -> tuple[CostModel, float]:
    """Seconds of a sample on a rank, as fitted to measured steps; and its relative standard deviation."""
    fitted = next(row for row in found["cost model"] if row["cost"] == "fitted online")  # the one from most steps
    # All but one of a history's positions are scored against the negatives: as good as linear in its length.
    linear = fitted["linear"] + int(found["setting"]["negatives"]) * fitted["candidate"]
    return CostModel(linear, fitted["quadratic"], constant=fitted["constant"]), fitted[
        "error %"
    ] / 100 / MEDIAN_OF_NORMAL


def measured_batches(setting: dict[str, str]) -> list[NDArray[np.int64]]:
    """Lengths of the measured global batches, in the order of the ranks: the data and order of ``benchmarks.straggler``."""
    ranks, size, longest = (int(setting[name]) for name in ("ranks", "batch_size", "max_history"))
    warm, steps = int(setting["warmup"]), int(setting["warmup"]) + int(setting["steps"])
    users = ranks * size * steps
    lengths = Synthetic(
        users=users,
        items=int(setting["items"]),
        mean_length=float(np.exp(7.3 + 1.2**2 / 2) * min(1.0, longest / 21_000)),
        sigma=1.2,
        max_length=longest + 1,
    ).generate()
    batches = np.minimum(lengths.lengths - 1, longest).reshape(steps, size, ranks)
    return [batch.T.ravel() for batch in batches[warm:]]  # dealt like cards


def against_straggler(name: str, seeds: int) -> list[Row]:
    """Idle time of the ranks by balancing, from a file of ``benchmarks.straggler``."""
    found = kept(name)
    cost, noise = measured_cost(found)
    batches = measured_batches(found["setting"])
    batches = [*batches[:2], *batches, batches[-1]]  # the simulation leaves two out at the start and one at the end
    cluster = Cluster(int(found["setting"]["ranks"]), np.inf)
    rows = []
    for measured in found["straggler"]:
        mode = measured["balance"]
        if mode not in ("off", "zigzag", "fixed", "variable"):
            continue
        side = Side(mode, "base", mode)
        runs = [simulate(side, cluster, Model(cost, 0.0, noise=noise), batches, seed) for seed in range(seeds)]
        rows.append(
            {
                "measured in": name,
                "balance": mode,
                "compute ms": measured["compute ms"],
                "simulated compute ms": 1e3 * float(np.mean([run.compute for run in runs])),
                "slowest ms": measured["slowest ms"],
                "simulated slowest ms": 1e3 * float(np.mean([run.step for run in runs])),
                "idle ms": measured["idle ms"],
                "simulated idle ms": 1e3 * float(np.mean([run.parts["straggler"] for run in runs])),
            }
        )
    return rows


def errors(exposed: Sequence[Row], straggler: Sequence[Row]) -> list[Row]:
    """Of each file: largest and mean error of steps, and error of what the bubble is made of."""
    summary = []
    for name in dict.fromkeys(row["measured in"] for row in exposed):
        rows = [row for row in exposed if row["measured in"] == name]
        relative = [abs(row["error %"]) for row in rows]
        off = [abs(row["simulated exposed ms"] - row["exposed ms"]) for row in rows]
        summary.append(_error(name, "step", relative, max(off)))
    for name in dict.fromkeys(row["measured in"] for row in straggler):
        rows = [row for row in straggler if row["measured in"] == name]
        relative = [100 * abs(row["simulated slowest ms"] / row["slowest ms"] - 1) for row in rows]
        off = [abs(row["simulated idle ms"] - row["idle ms"]) for row in rows]
        summary.append(_error(name, "slowest rank", relative, max(off)))
    return summary


def _error(name: str, what: str, relative: Sequence[float], bubble_off: float) -> Row:
    return {
        "measured in": name,
        "of": what,
        "mean error %": float(np.mean(relative)),
        "largest error %": max(relative),
        "bubble off by at most ms": bubble_off,
    }


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
    found = kept("straggler_h200.json")
    cost, noise = measured_cost(found)
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


def present(patterns: Iterable[str]) -> list[str]:
    """Names of the kept results that fit."""
    return [path.name for pattern in patterns for path in sorted(report.RESULTS.glob(pattern))]


def main() -> None:
    arguments = parse()
    steps = 10 if arguments.quick else 200
    exposed = [row for name in present(["exposed_*.json"]) for row in against_exposed(name, steps)]
    straggler = [
        row for name in present(["straggler_*.json"]) for row in against_straggler(name, 3 if arguments.quick else 50)
    ]
    setting, rows = study(arguments)
    if arguments.plot:
        draw(arguments.plot, rows)
    figures = {"errors": errors(exposed, straggler), "exposed": exposed, "straggler": straggler}
    report.publish(
        arguments,
        report.head("simulate") | figures | {"setting": setting, "scaling": rows},
        {
            "Simulated against measured": figures["errors"],
            "Steps by side and collision rate": exposed,
            "Idle time by balancing": straggler,
            f"Simulated, {arguments.batch_size} samples a rank, {arguments.link_gbps:g} Gb/s": rows,
        },
    )


if __name__ == "__main__":
    main()
