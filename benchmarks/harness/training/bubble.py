"""From the marks of all ranks to the figures of the end-to-end benchmark: pure.

Bubble of a side: its step time less the mean dense compute time of the ranks, measured alone. Its parts, in milliseconds a step:

    straggler           what ranks wait for the slowest one's compute, mean of the ranks
    exposed embedding   from the batch to its rows, between forward and backward, from the rows' gradient to the end of the graph,
                        and from the reduced dense gradients to the optimizer: where ids, rows and gradients are waited for
    exposed dense       from the end of the graph to the reduced dense gradients
    input               between steps: the training loop and the wait for a batch
    slower compute      what the mean compute of the ranks takes longer than alone, beside transfers
    other               the rest: the optimizer, what the ranks do not do at the same time

A wait counts as that of the rank that waits least: the others wait for that rank's compute, too, which is straggling.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The moments of a step. The batch is there; its rows have arrived; the loss is known; its backward begins; the rows' gradient is
# known; all gradients are through the graph, those of the tables included; the dense ones are reduced; the optimizer begins; the
# step is over.
MARKS = ("batch", "arrived", "forward", "begun", "gradient", "graph", "backward", "optimizer", "end")

DENSE = "dense alone"
BASE = "TrainPipelineBase"
SPARSE_DIST = "TrainPipelineSparseDist"
SYNC = "freescale_sync"
BALANCE = "+ balance"
PRIORITIZE = "+ prioritize"
SM_FREE = "+ SM-free"
OVER_NCCL = "all over NCCL"
OVER_TCP = "all over TCP"
ALL = "all"
SIDES = (DENSE, BASE, SPARSE_DIST, SYNC, BALANCE, PRIORITIZE, SM_FREE, OVER_NCCL, OVER_TCP, ALL)
DEFAULT = "freescale"  # with the settings it has by itself; see cannot_help.py

COOL = 4  # last steps of a side, for which there is less and less to work ahead on: not counted
GOAL = 0.903  # of TorchRec's bubble gone
PARTS = ("straggler", "exposed embedding", "exposed dense", "input", "slower compute", "other")
# Without balancing all losses are equal bit for bit on CPU. Balancing adds up the same terms in another order; on CUDA atomics
# and bfloat16 weight gradients do as well, and the steps carry it on.
TOLERANCE = {"cpu": 1e-5, "cuda": 5e-3}

Figures = dict[str, Any]


def account(seconds: NDArray[np.float64], counted: slice) -> Figures:
    """Times of a side from its marks, in milliseconds.

    Args:
        seconds: ``[ranks, steps, len(MARKS)]``, each rank on its own clock.
        counted: steps that count; not the first, whose beginning is not known.
    """
    ms = 1e3 * seconds
    column = {name: ms[:, counted, index] for index, name in enumerate(MARKS)}
    began = ms[:, counted.start - 1 : counted.stop - 1, MARKS.index("end")]
    steps = (column["end"] - began).max(axis=0)
    compute = column["forward"] - column["arrived"] + column["gradient"] - column["begun"]

    def least(start: NDArray[np.float64], end: NDArray[np.float64]) -> float:
        return float((end - start).min(axis=0).mean())

    return {
        "step_ms": {
            "mean": float((column["end"][:, -1] - began[:, 0]).max() / len(steps)),
            "median": statistics.median(steps.tolist()),
            "spread": float(steps.max() - steps.min()),
            "steps": steps.tolist(),
        },
        "rank_ms": (column["end"] - column["batch"]).mean(axis=1).tolist(),
        "compute_ms": float(compute.mean()),
        "compute_rank_ms": compute.round(2).tolist(),  # [ranks, steps]
        "parts_ms": {
            "straggler": float((compute.max(axis=0) - compute).mean()),
            "exposed embedding": least(column["batch"], column["arrived"])
            + least(column["forward"], column["begun"])
            + least(column["gradient"], column["graph"])
            + least(column["backward"], column["optimizer"]),
            "exposed dense": least(column["graph"], column["backward"]),
            "input": least(began, column["batch"]),
        },
    }


def global_losses(losses: NDArray[np.float64], predicted: NDArray[np.float64]) -> list[float]:
    """Mean over the predicted positions of all ranks, by step; both ``[ranks, steps]``."""
    return ((losses * predicted).sum(axis=0) / predicted.sum(axis=0)).tolist()


def summarise(figures: Figures) -> Figures:
    """Add what follows from the measured sides: bubbles, their parts, what is gone of the baselines', equal losses."""
    sides = figures["sides"]
    trained = {name: side for name, side in sides.items() if name != DENSE}
    if DENSE in sides:
        alone = sides[DENSE]
        figures["dense_ms"] = statistics.mean(alone["rank_ms"])
        for side in trained.values():
            side["bubble_ms"] = side["step_ms"]["mean"] - figures["dense_ms"]
            parts = side["parts_ms"]
            parts["slower compute"] = side["compute_ms"] - alone["compute_ms"]
            parts["other"] = side["bubble_ms"] - sum(parts[name] for name in PARTS if name != "other")
    for side in trained.values():
        _rates(side, figures["global_batch"])
        side["gone"] = {
            name: 1 - side["bubble_ms"] / sides[name]["bubble_ms"]
            for name in (BASE, SPARSE_DIST)
            if sides.get(name, {}).get("bubble_ms", 0.0) > 0
        }
    if (apart := repeatability(sides)) is not None:
        figures["same_batch_apart"] = apart
    if trained:
        figures["losses"] = compare_losses(
            {name: side["losses"] for name, side in trained.items()}, figures["parameters"]["device"]
        )
    if gone := sides.get(ALL, {}).get("gone"):
        figures["goal"] = {"gone": GOAL, "reached": min(gone.values())}
    return figures


def repeatability(sides: Mapping[str, Figures]) -> float | None:
    """How far apart the compute of one and the same batch is on sides that leave it on its rank: standard deviation, relative.

    Every side computes alike, so this is the machine's doing, where ranks share one GPU above all.
    """
    same = [sides[name]["compute_rank_ms"] for name in (DENSE, BASE, SPARSE_DIST) if name in sides]
    if len(same) < 2:
        return None
    times = np.array(same)  # [sides, ranks, steps]
    times /= times.mean(axis=(1, 2), keepdims=True)  # beside transfers all batches are slower alike
    return float(np.sqrt(times.var(axis=0, ddof=1).mean()))


def _rates(side: Figures, samples: int) -> None:
    side["samples_per_second"] = samples / side["step_ms"]["mean"] * 1e3
    side["straggler_percent"] = 100 * side["parts_ms"]["straggler"] / side["step_ms"]["mean"]


def compare_losses(curves: Mapping[str, Sequence[float]], device: str) -> Figures:
    """How far each side's losses are from the first one's, relative, at most over all steps."""
    reference = np.array(next(iter(curves.values())))
    apart = {name: float(np.abs(np.array(curve) / reference - 1).max()) for name, curve in curves.items()}
    tolerance = TOLERANCE[device]
    return {
        "first": float(reference[0]),
        "last": float(reference[-1]),
        "apart": apart,
        "tolerance": tolerance,
        "equal": max(apart.values()) <= tolerance,
    }


# ---- as text -----------------------------------------------------------------------------------------------------------------
def describe(figures: Figures) -> str:
    """The figures as tables."""
    lines = [_title(figures), ""]
    rows = [["", "ms/step", "median", "spread", "samples/s", "straggler", "bubble", "GiB", "last loss"]]
    for name, side in figures["sides"].items():
        if "samples_per_second" not in side:
            continue
        step = side["step_ms"]
        rows.append(
            [
                name,
                *(f"{step[key]:.1f}" for key in ("mean", "median", "spread")),
                f"{side['samples_per_second']:.0f}",
                f"{side['straggler_percent']:.1f} %",
                _number(side.get("bubble_ms")),
                f"{side['peak_bytes'] / 2**30:.1f}" if side["peak_bytes"] else "-",
                f"{side['losses'][-1]:.5f}",
            ]
        )
    lines += _table(rows)
    if "dense_ms" in figures:
        each = ", ".join(f"{value:.1f}" for value in figures["sides"][DENSE]["rank_ms"])
        lines += ["", f"dense compute alone: {figures['dense_ms']:.1f} ms a step, mean of the ranks ({each})"]
        if "same_batch_apart" in figures:
            lines.append(f"compute of one and the same batch, from side to side: +-{figures['same_batch_apart']:.2%}")
        lines += ["", "Where the bubble is, ms a step, and what is gone of TorchRec's:"]
        gone = list(dict.fromkeys(key for side in figures["sides"].values() for key in side.get("gone", ())))
        rows = [["", *PARTS, "bubble", *(f"of {key}" for key in gone)]]
        for name, side in figures["sides"].items():
            if "bubble_ms" in side:
                shares = [f"{side['gone'][key]:.1%}" if key in side["gone"] else "-" for key in gone]
                parts = [_number(side["parts_ms"].get(part)) for part in PARTS]
                rows.append([name, *parts, f"{side['bubble_ms']:.1f}", *shares])
        lines += _table(rows)
    lines.append("")
    notes = {name: side["notes"]["verdict"] for name, side in figures["sides"].items() if "verdict" in side["notes"]}
    lines += [f"{name}: {verdict}" for name, verdict in notes.items()]
    lines += [f"{name}: FAILED, {reason}" for name, reason in figures["failed"].items()]
    return "\n".join(lines + _verdicts(figures))


def _title(figures: Figures) -> str:
    shape = figures["workload"] | figures["model"] | figures["versions"]
    return (
        f"{figures['title']}, {figures['parameters']['ranks']} ranks, {figures['machine']}\n"
        f"{', '.join(f'{name} {value}' for name, value in shape.items())}\n"
        f"collisions met {figures['collisions']:.1%}; {figures['counted']} steps of {figures['steps']} count"
    )


def _verdicts(figures: Figures) -> list[str]:
    lines = []
    if "losses" in figures:
        losses = figures["losses"]
        lines.append(
            f"losses over {figures['steps']} steps, {losses['first']:.4g} to {losses['last']:.4g}: "
            f"{'equal' if losses['equal'] else 'DIFFERENT'}, apart by at most {max(losses['apart'].values()):.1e} "
            f"(tolerance {losses['tolerance']:.0e})"
        )
    goal = figures.get("goal", {})
    if "gone" in goal:
        met = "reached" if goal["reached"] >= goal["gone"] else "missed"
        lines.append(f"goal, {goal['gone']:.1%} of TorchRec's bubble gone with all on: {met}, {goal['reached']:.1%}")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
