"""Draws the figures of ``benchmarks.figures``, from its own rows and from stored results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import plots
from benchmarks.harness.gpu_cluster.transports import HOST, NCCL, TCP
from benchmarks.harness.labels import label
from benchmarks.harness.results import short_machine
from benchmarks.harness.tables.claims import describe_exchange_machine, exposed_results
from benchmarks.harness.training.bubble import PARTS
from benchmarks.harness.variant_names import DENSE_ONLY, PRIORITIZED, TORCHREC_BASE, TORCHREC_SPARSE_DIST

Row = dict[str, Any]

RANKS, BATCH = 64, 128  # number of ranks and samples per rank in the studies that vary something else


def by_name(rows: Iterable[Row], name: str) -> dict[Any, list[Row]]:
    """The rows grouped by the value of one column."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[name], []).append(row)
    return found


def draw_lines(axes: Any, rows: Sequence[Row], along: str, figure: str, lines: Mapping[str, str]) -> None:
    """Draw the column ``figure`` over the column ``along``: one colour per data set, one line style per balancing mode."""
    for colour, own in zip(plots.COLOURS, by_name(rows, "data").values(), strict=False):
        for balance, line in lines.items():
            part = [row for row in own if row["balance"] == balance]
            values = [row[figure] for row in part]
            axes.plot([row[along] for row in part], values, color=colour, linestyle=line, marker="o", markersize=3)


def draw_history(rows: Sequence[Row], path: Path) -> None:
    """Padding and stragglers over the longest history, computed from costs."""
    figure = plots.figure(10, 4.2)
    padding, idle = figure.subplots(1, 2)
    lines = {"off": "-", "zigzag": ":", "fixed": "--"}
    draw_lines(padding, rows, "max history", "sparsity %", {"off": "-"})
    draw_lines(idle, rows, "max history", "straggler %", lines)
    padding.set(title="Padding, % of a local batch", ylim=(0, 100))
    idle.set(title=f"Stragglers, % of a step, {RANKS} ranks x {BATCH} samples", ylim=(-1, None))
    for axes in (padding, idle):
        plots.doubling_axis(axes, [2**power for power in range(7, 15)], "longest history, events")
    plots.legend(figure, by_name(rows, "data"), lines)
    figure.savefig(path, dpi=plots.DPI)


def draw_size_and_ranks(sizes: Sequence[Row], ranks: Sequence[Row], path: Path) -> None:
    """Stragglers over the batch size and over the number of ranks, computed from costs."""
    figure = plots.figure(10, 4.2)
    lines = {"off": "-", "zigzag": ":", "fixed": "--"}
    axes = figure.subplots(1, 2, sharey=True)
    for one, rows, along in zip(axes, (sizes, ranks), ("samples a rank", "ranks"), strict=True):
        draw_lines(one, rows, along, "straggler %", lines)
        plots.doubling_axis(one, [row[along] for row in rows], label(along))
    axes[0].set(title=f"Stragglers, % of a step, {RANKS} ranks", ylim=(-1, None))
    axes[1].set(title=f"Stragglers, % of a step, {BATCH} samples per rank")
    plots.legend(figure, by_name(sizes, "data"), lines)
    figure.savefig(path, dpi=plots.DPI)


def draw_collisions(rows: Sequence[Row], path: Path) -> None:
    """Collisions over the size of the global batch."""
    figure = plots.figure(5.5, 3.8)
    axes = figure.subplots()
    for colour, (name, own) in zip(plots.COLOURS, by_name(rows, "data").items(), strict=False):
        text = f"{name}, {own[0]['items']:,} items"
        values = [row["collisions %"] for row in own]
        axes.plot([row["samples"] for row in own], values, color=colour, marker="o", markersize=3, label=text)
    axes.set(title="Ids of a batch that the previous batch also has, %", ylim=(0, 100))
    plots.doubling_axis(axes, [row["samples"] for row in rows], "samples per global batch")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=plots.DPI)


def draw_kernels(rows: Sequence[Row], path: Path) -> None:
    """Times of the jagged kernels over the number of ranks."""
    figure = plots.figure(10, 3.8)
    names = {"eager by rank ms": "PyTorch, one mask per rank", "eager by index ms": "PyTorch, one gather", "ms": "ours"}
    for axes, (kernel, own) in zip(figure.subplots(1, 2, sharey=True), by_name(rows, "kernel").items(), strict=True):
        for colour, (column, text) in zip(
            (plots.COLOURS[0], plots.COLOURS[1], plots.COLOURS[4]), names.items(), strict=True
        ):
            values = [row[column] for row in own]
            axes.plot([row["ranks"] for row in own], values, color=colour, marker="o", markersize=3, label=text)
        axes.set(title=f"{kernel.capitalize()} of {own[0]['rows']:,} ids, ms on one core", yscale="log")
        plots.doubling_axis(axes, [row["ranks"] for row in own])
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=plots.DPI)


def draw_exposed(results: Mapping[str, Row], path: Path) -> None:
    """Exposed exchange over the collision rate."""
    found = exposed_results(results)
    figure = plots.figure(5 * len(found), 3.8)
    for axes, result in zip(figure.subplots(1, len(found), squeeze=False)[0], found.values(), strict=True):
        rates = [100 * row["collisions_measured"] for row in result["results"]]
        lines = {TORCHREC_BASE: "-", TORCHREC_SPARSE_DIST: "--", PRIORITIZED: "-"}
        for colour, (name, line) in zip(
            (plots.COLOURS[0], plots.COLOURS[1], plots.COLOURS[4]), lines.items(), strict=True
        ):
            values = [row["exposed_ms"][name] for row in result["results"]]
            axes.plot(rates, values, color=colour, linestyle=line, marker="o", markersize=3, label=name)
        axes.set(title=f"Exposed exchange, ms per step\n{describe_exchange_machine(result)}", xlabel="collisions, %")
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        plots.tidy(axes)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=plots.DPI)


TRANSPORTS = {
    NCCL: ("NCCL", plots.COLOURS[0]),
    HOST: ("SM-free", plots.COLOURS[4]),
    "freescale, NCCL's bytes": ("SM-free, as many bytes as NCCL", plots.COLOURS[3]),
    TCP: ("SM-free over TCP", plots.COLOURS[2]),
}


def draw_sm_free(results: Mapping[str, Row], path: Path) -> None:
    """Slow-down of compute beside each transport."""
    found = {name: result for name, result in results.items() if result["benchmark"] == "sm_free"}
    figure = plots.figure(5 * len(found), 3.8)
    for axes, result in zip(figure.subplots(1, len(found), squeeze=False)[0], found.values(), strict=True):
        drawn = {
            mode: style for mode, style in TRANSPORTS.items() if any(row["mode"] == mode for row in result["rows"])
        }
        width = 0.81 / len(drawn)
        for place, rows in enumerate(by_name(result["rows"], "compute").values()):
            for number, (mode, (text, colour)) in enumerate(drawn.items()):
                row = next(row for row in rows if row["mode"] == mode)
                at = place + width * (number - (len(drawn) - 1) / 2)
                axes.bar(at, row["slowdown"], 0.93 * width, color=colour, label=None if place else text)
                value = f"{row['slowdown']:.2f}x\n{row['gb_per_s_per_rank']:.1f} GB/s"
                axes.text(at, row["slowdown"] + 0.03, value, ha="center", fontsize=7)
        axes.axhline(1, color="black", linewidth=0.6)
        setting = f"{result['rows'][0]['world']} ranks, {short_machine(result)}"
        axes.set_title(f"Compute beside an all-to-all, relative to compute alone\n{setting}", fontsize=9)
        axes.set_ylim(0, 2.2)
        axes.set_xticks([0, 1], ["matrix products", "HSTU layers"])
        plots.tidy(axes)
        axes.legend(frameon=False, fontsize=8, loc="upper right")
    figure.savefig(path, dpi=plots.DPI)


def draw_end_to_end(results: Mapping[str, Row], path: Path) -> None:
    """The parts of a step of each variant, and the losses of all variants on top of each other."""
    found = results["end_to_end_h200"]
    variants = {name: variant for name, variant in found["sides"].items() if name != DENSE_ONLY}
    figure = plots.figure(11, 4.2)
    bars, curves = figure.subplots(1, 2, width_ratios=(3, 2))
    left = np.full(len(variants), found["dense_ms"])
    bars.barh(list(variants), left, color="#dddddd", label="dense compute alone")
    for colour, part in zip(plots.COLOURS, PARTS, strict=True):
        width = np.array([max(0.0, variant["parts_ms"][part]) for variant in variants.values()])
        bars.barh(list(variants), width, left=left, color=colour, label=part)
        left = left + width
    for place, (end, variant) in enumerate(zip(left, variants.values(), strict=True)):
        bars.text(end + 3, place, f"{variant['samples_per_second']:,.0f}/s", va="center", fontsize=8)
    bars.invert_yaxis()
    bars.set(title="A step of each variant, ms; samples per second", xlim=(0, 1.15 * left.max()))
    for number, (name, variant) in enumerate(variants.items()):
        style = {"color": plots.COLOURS[number % len(plots.COLOURS)], "linewidth": max(0.8, 4.5 - 0.6 * number)}
        curves.plot(variant["losses"], label=name, **style)
    curves.set(title="Losses; the curves lie on top of each other", xlabel="step")
    for axes, centre, columns in ((bars, 0.4, 4), (curves, 0.5, 3)):
        plots.tidy(axes)
        axes.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(centre, -0.12), ncols=columns)
    figure.savefig(path, dpi=plots.DPI)
