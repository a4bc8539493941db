"""The paper's figures on this machine: padding, stragglers and collisions from lengths and ids alone; the others from results.

    python -m benchmarks.figures [--quick] [--json] [--output FILE] [--folder FOLDER] [--data FILE ...]

Histories: log-normal (mu 7.3, sigma 1.2) to 21,000 events over 1,000,000 items of Zipf popularity, and the files of events
given (CSV, text, Parquet). A history of L events costs L + L^2 / 2048. Files with fewer users than a global batch has samples
are drawn from with repetition for stragglers, and left out where batches must be different people for collisions.
Pictures go to ``--folder``; those of measured figures are drawn from ``benchmarks/results`` as it is.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if __name__ == "__main__" and not __package__:  # started as a file: let it find its neighbours
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import plots, report
from benchmarks.harness.gpu_cluster import launcher as cluster
from benchmarks.harness.tables.claims import exposed_results, kept, where
from benchmarks.harness.training import bubble
from lightning_freescale.balance.planner import default_cost_model
from lightning_freescale.cli.balance_outcomes import RANDOM, evaluate
from lightning_freescale.data.histories import Histories
from lightning_freescale.data.preprocess import preprocess
from lightning_freescale.data.sources import open_source
from lightning_freescale.data.synthetic import Synthetic

Row = dict[str, Any]

RANKS, BATCH = 64, 128  # unless they are what varies
LONGEST = 21_000
SYNTHETIC = "log-normal"
MODES = {RANDOM: "off", "zigzag": "zigzag", "fixed": "fixed"}


@dataclass(frozen=True)
class Data:
    """Histories under a name.

    Attributes:
        lengths: ``[users]`` events, not capped.
        histories: with items, for collisions.
    """

    name: str
    lengths: NDArray[np.int64]
    histories: Histories


def synthetic(quick: bool) -> Data:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(7.3, 1.2, 100_000 if quick else 700_000).clip(1, LONGEST).astype(np.int64)
    options: dict[str, Any] = {"users": 400 if quick else 4000, "items": 1_000_000, "sigma": 1.2}
    return Data(SYNTHETIC, lengths, Synthetic(mean_length=float(np.exp(7.3 + 0.72)), **options).generate())


def read(path: Path) -> Data:
    with tempfile.TemporaryDirectory() as folder:
        preprocess(open_source(path), Path(folder))
        mapped = Histories.load(Path(folder))
        items, offsets = np.array(mapped.items), np.array(mapped.offsets)
        names, users = np.array(mapped.item_ids), np.array(mapped.user_ids)
    return Data(path.stem, np.diff(offsets), Histories(items, np.zeros_like(items), offsets, names, users))


# ---- padding and stragglers --------------------------------------------------------------------------------------------
def measure(data: Data, longest: int, ranks: int, batch_size: int, batches: int) -> list[Row]:
    lengths = np.minimum(data.lengths, longest)
    return [
        {
            "data": data.name,
            "max history": longest,
            "ranks": ranks,
            "samples a rank": batch_size,
            "balance": MODES[found.mode],
            "sparsity %": 100 * found.sparsity,
            "straggler %": 100 * found.straggler,
            "above bound %": 100 * found.above_bound,
        }
        for found in evaluate(lengths, ranks, batch_size, default_cost_model(), batches)
        if found.mode in MODES
    ]


def by_history(data: Data, batches: int) -> list[Row]:
    most = int(data.lengths.max())
    caps = [2**power for power in range(7, 15) if 2**power < most]
    if data.name == SYNTHETIC:
        caps = [cap for cap in caps if cap >= 1024]
    return [row for cap in [*caps, most] for row in measure(data, cap, RANKS, BATCH, batches)]


def by_batch_size(data: Data, batches: int) -> list[Row]:
    sizes = [2**power for power in range(3, 10)]
    return [row for size in sizes for row in measure(data, int(data.lengths.max()), RANKS, size, batches)]


def by_ranks(data: Data, batches: int) -> list[Row]:
    worlds = [2**power for power in range(3, 10)]
    return [row for world in worlds for row in measure(data, int(data.lengths.max()), world, BATCH, batches)]


# ---- collisions --------------------------------------------------------------------------------------------------------
def collisions(data: Data, pairs: int) -> list[Row]:
    """Share of a global batch's ids whose row the batch before asks for, too; users in random order, each once."""
    histories, rows = data.histories, []
    order = np.random.default_rng(0).permutation(histories.num_users)
    for size in (2**power for power in range(4, 12)):
        batches = [order[at : at + size] for at in range(0, len(order) - size + 1, size)][: pairs + 1]
        if len(batches) < 2:
            break
        ids = [np.concatenate([_items(histories, user) for user in batch]) for batch in batches]
        rates = [float(np.isin(second, first).mean()) for first, second in pairwise(ids)]
        rows.append(
            {
                "data": data.name,
                "items": histories.num_items,
                "samples": size,
                "collisions %": 100 * float(np.mean(rates)),
                "ids": int(np.mean([len(part) for part in ids])),
            }
        )
    return rows


def _items(histories: Histories, user: int) -> NDArray[np.int64]:
    return histories.items[histories.offsets[user] : histories.offsets[user + 1]]


# ---- pictures ----------------------------------------------------------------------------------------------------------
def by_name(rows: Iterable[Row], name: str) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[name], []).append(row)
    return found


def draw_lines(axes: Any, rows: Sequence[Row], along: str, figure: str, lines: Mapping[str, str]) -> None:
    """``figure`` of each data set, a colour, and balance, a style of line, against ``along``."""
    for colour, own in zip(plots.COLOURS, by_name(rows, "data").values(), strict=False):
        for balance, line in lines.items():
            part = [row for row in own if row["balance"] == balance]
            values = [row[figure] for row in part]
            axes.plot([row[along] for row in part], values, color=colour, linestyle=line, marker="o", markersize=3)


def draw_history(rows: Sequence[Row], path: Path) -> None:
    figure = plots.figure(10, 4.2)
    padding, idle = figure.subplots(1, 2)
    lines = {"off": "-", "zigzag": ":", "fixed": "--"}
    draw_lines(padding, rows, "max history", "sparsity %", {"off": "-"})
    draw_lines(idle, rows, "max history", "straggler %", lines)
    padding.set(title="Sparsity: padding, % of a local batch", ylim=(0, 100))
    idle.set(title=f"Straggler, % of a step by cost, {RANKS} ranks x {BATCH}", ylim=(-1, None))
    for axes in (padding, idle):
        plots.ranks_axis(axes, [2**power for power in range(7, 15)], "max history, events")
    plots.legend(figure, by_name(rows, "data"), lines)
    figure.savefig(path, dpi=plots.DPI)


def draw_size_and_ranks(sizes: Sequence[Row], ranks: Sequence[Row], path: Path) -> None:
    figure = plots.figure(10, 4.2)
    lines = {"off": "-", "zigzag": ":", "fixed": "--"}
    axes = figure.subplots(1, 2, sharey=True)
    for one, rows, along in zip(axes, (sizes, ranks), ("samples a rank", "ranks"), strict=True):
        draw_lines(one, rows, along, "straggler %", lines)
        plots.ranks_axis(one, [row[along] for row in rows], along)
    axes[0].set(title=f"Straggler, % of a step by cost, {RANKS} ranks", ylim=(-1, None))
    axes[1].set(title=f"Straggler, % of a step by cost, {BATCH} samples a rank")
    plots.legend(figure, by_name(sizes, "data"), lines)
    figure.savefig(path, dpi=plots.DPI)


def draw_collisions(rows: Sequence[Row], path: Path) -> None:
    figure = plots.figure(5.5, 3.8)
    axes = figure.subplots()
    for colour, (name, own) in zip(plots.COLOURS, by_name(rows, "data").items(), strict=False):
        label = f"{name}, {own[0]['items']:,} items"
        values = [row["collisions %"] for row in own]
        axes.plot([row["samples"] for row in own], values, color=colour, marker="o", markersize=3, label=label)
    axes.set(title="Ids of a batch that the batch before has, too, %", ylim=(0, 100))
    plots.ranks_axis(axes, [row["samples"] for row in rows], "samples of a global batch")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=plots.DPI)


def draw_kernels(rows: Sequence[Row], path: Path) -> None:
    figure = plots.figure(10, 3.8)
    names = {"eager by rank ms": "eager, rank by rank", "eager by index ms": "eager, one gather", "ms": "ours"}
    for axes, (kernel, own) in zip(figure.subplots(1, 2, sharey=True), by_name(rows, "kernel").items(), strict=True):
        for colour, (column, label) in zip(
            (plots.COLOURS[0], plots.COLOURS[1], plots.COLOURS[4]), names.items(), strict=True
        ):
            values = [row[column] for row in own]
            axes.plot([row["ranks"] for row in own], values, color=colour, marker="o", markersize=3, label=label)
        axes.set(title=f"{kernel.capitalize()} of {own[0]['rows']:,} ids, ms on one core", yscale="log")
        plots.ranks_axis(axes, [row["ranks"] for row in own])
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=plots.DPI)


def draw_exposed(results: Mapping[str, Row], path: Path) -> None:
    found = exposed_results(results)
    figure = plots.figure(5 * len(found), 3.8)
    for axes, result in zip(figure.subplots(1, len(found), squeeze=False)[0], found.values(), strict=True):
        rates = [100 * row["collisions_measured"] for row in result["results"]]
        sides = {"TrainPipelineBase": "-", "TrainPipelineSparseDist": "--", "prioritized": "-"}
        for colour, (side, line) in zip(
            (plots.COLOURS[0], plots.COLOURS[1], plots.COLOURS[4]), sides.items(), strict=True
        ):
            values = [row["exposed_ms"][side] for row in result["results"]]
            axes.plot(rates, values, color=colour, linestyle=line, marker="o", markersize=3, label=side)
        axes.set(title=f"Exposed exchange, ms a step\n{where(result)}", xlabel="collisions, %")
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        plots.tidy(axes)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=plots.DPI)


TRANSPORTS = {
    cluster.NCCL: ("NCCL", plots.COLOURS[0]),
    cluster.HOST: ("SM-free", plots.COLOURS[4]),
    "freescale, NCCL's bytes": ("SM-free, NCCL's bytes", plots.COLOURS[3]),
    cluster.TCP: ("SM-free over TCP", plots.COLOURS[2]),
}


def draw_sm_free(results: Mapping[str, Row], path: Path) -> None:
    found = {name: result for name, result in results.items() if result["benchmark"] == "sm_free"}
    figure = plots.figure(5 * len(found), 3.8)
    for axes, result in zip(figure.subplots(1, len(found), squeeze=False)[0], found.values(), strict=True):
        drawn = {
            mode: style for mode, style in TRANSPORTS.items() if any(row["mode"] == mode for row in result["rows"])
        }
        width = 0.81 / len(drawn)
        for place, rows in enumerate(by_name(result["rows"], "compute").values()):
            for number, (mode, (label, colour)) in enumerate(drawn.items()):
                row = next(row for row in rows if row["mode"] == mode)
                at = place + width * (number - (len(drawn) - 1) / 2)
                axes.bar(at, row["slowdown"], 0.93 * width, color=colour, label=None if place else label)
                text = f"{row['slowdown']:.2f}x\n{row['gb_per_s_per_rank']:.1f} GB/s"
                axes.text(at, row["slowdown"] + 0.03, text, ha="center", fontsize=7)
        axes.axhline(1, color="black", linewidth=0.6)
        machine = result["machine"].split(",")[0]
        axes.set_title(f"Compute beside an AllToAll over its time alone\n{machine}", fontsize=9)
        axes.set_ylim(0, 2.2)
        axes.set_xticks([0, 1], ["matrix products", "HSTU layers"])
        plots.tidy(axes)
        axes.legend(frameon=False, fontsize=8, loc="upper right")
    figure.savefig(path, dpi=plots.DPI)


def draw_end_to_end(results: Mapping[str, Row], path: Path) -> None:
    """Where the time of a step goes on each side, and the losses of all sides over each other."""
    found = results["end_to_end_h200"]
    sides = {name: side for name, side in found["sides"].items() if name != bubble.DENSE}
    figure = plots.figure(11, 4.2)
    bars, curves = figure.subplots(1, 2, width_ratios=(3, 2))
    left = np.full(len(sides), found["dense_ms"])
    bars.barh(list(sides), left, color="#dddddd", label="dense compute, alone")
    for colour, part in zip(plots.COLOURS, bubble.PARTS, strict=True):
        width = np.array([max(0.0, side["parts_ms"][part]) for side in sides.values()])
        bars.barh(list(sides), width, left=left, color=colour, label=part)
        left = left + width
    for place, (end, side) in enumerate(zip(left, sides.values(), strict=True)):
        bars.text(end + 3, place, f"{side['samples_per_second']:,.0f}/s", va="center", fontsize=8)
    bars.invert_yaxis()
    bars.set(title="A step of each side, ms; samples a second", xlim=(0, 1.15 * left.max()))
    for number, (name, side) in enumerate(sides.items()):
        style = {"color": plots.COLOURS[number % len(plots.COLOURS)], "linewidth": max(0.8, 4.5 - 0.6 * number)}
        curves.plot(side["losses"], label=name, **style)
    curves.set(title="Losses, the first side's below the others'", xlabel="step")
    for axes, centre, columns in ((bars, 0.4, 4), (curves, 0.5, 3)):
        plots.tidy(axes)
        axes.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(centre, -0.12), ncols=columns)
    figure.savefig(path, dpi=plots.DPI)


def main() -> None:
    parser = report.make_parser(__doc__, quick="few batches of fewer histories")
    parser.add_argument("--data", type=Path, nargs="+", default=[], metavar="FILE", help="files of events")
    parser.add_argument("--folder", type=Path, help="where pictures go; none are drawn by default")
    arguments = parser.parse_args()
    batches, pairs = (2, 1) if arguments.quick else (10, 4)
    data = [synthetic(arguments.quick), *map(read, arguments.data)]
    results: dict[str, list[Row]] = {
        "history": [row for part in data for row in by_history(part, batches)],
        "batch size": [row for part in data for row in by_batch_size(part, batches)],
        "ranks": [row for part in data for row in by_ranks(part, batches)],
        "collisions": [row for part in data for row in collisions(part, pairs)],
    }
    if arguments.folder:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        draw_history(results["history"], arguments.folder / "figure_history.png")
        draw_size_and_ranks(results["batch size"], results["ranks"], arguments.folder / "figure_batch_and_ranks.png")
        draw_collisions(results["collisions"], arguments.folder / "figure_collisions.png")
        draw_kernels(kept()["balance_cpu"]["kernels"], arguments.folder / "figure_kernels.png")
        draw_exposed(kept(), arguments.folder / "figure_exposed.png")
        draw_sm_free(kept(), arguments.folder / "figure_sm_free.png")
        draw_end_to_end(kept(), arguments.folder / "figure_end_to_end.png")
    titles = {
        "Sparsity and straggler against the longest history (Fig. 2, 8a)": results["history"],
        "Straggler against the samples a rank (Fig. 8b)": results["batch size"],
        "Straggler against the ranks (Fig. 8c)": results["ranks"],
        "Collisions of consecutive global batches (Fig. 3)": results["collisions"],
    }
    report.publish(arguments, report.head("figures") | results, titles)


if __name__ == "__main__":
    main()
