"""From the time stamps of all ranks to the figures of the end-to-end benchmark. Pure functions.

The bubble of a variant is its step time minus the mean dense compute time of the ranks, which is measured alone. Its
parts, in milliseconds per step:

    straggler           wait of the ranks for the slowest rank's compute, mean over the ranks
    exposed embedding   wait for ids, rows and gradients: from the batch to its rows, between forward and backward, from the
                        gradient of the rows to the end of the graph, and from the reduced dense gradients to the optimizer
    exposed dense       from the end of the graph to the reduced dense gradients
    input               between steps: the training loop and the wait for a batch
    slower compute      how much longer the compute takes, mean over the ranks, than alone: it runs beside transfers
    other               everything else: the optimizer, and time that the ranks do not spend simultaneously

A wait is that of the rank that waits least. The others additionally wait for that rank's compute, which counts as
straggler.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.training.steadiness import compute_apart, doubts
from benchmarks.harness.training.transfers import transfers_ms
from benchmarks.harness.variant_names import ALL, DENSE_ONLY, TORCHREC_BASE, TORCHREC_SPARSE_DIST

# The points of a step at which time stamps are taken.
POINTS = (
    "batch",  # the batch is available
    "arrived",  # its embedding rows have arrived
    "forward",  # the loss is computed
    "begun",  # backward begins
    "gradient",  # the gradient of the rows is computed
    "graph",  # all gradients are through the autograd graph, including those of the tables
    "backward",  # the dense gradients are reduced over the ranks
    "optimizer",  # the optimizer begins
    "end",  # the step is over
)
PARTS = ("straggler", "exposed embedding", "exposed dense", "input", "slower compute", "other")
UNCOUNTED_LAST_STEPS = 4  # last steps of a variant, which do not count: there are fewer batches left to prefetch
BUBBLE_GOAL = 0.903  # share of TorchRec's bubble that is removed
# Largest relative difference of the losses. Without balancing they are equal bit for bit on the CPU. Balancing changes the order
# of sums. So do atomic operations and bfloat16 weight gradients on CUDA, and later steps build on these differences.
TRAINING_LOSS_TOLERANCE = {"cpu": 1e-5, "cuda": 5e-3}

Figures = dict[str, Any]


def step_ms(seconds: NDArray[np.float64], steps: slice) -> NDArray[np.float64]:
    """Time of each of these steps on the slowest rank, in milliseconds. The arguments are those of :func:`account`."""
    ends = 1e3 * seconds[:, :, POINTS.index("end")]
    return (ends[:, steps] - ends[:, steps.start - 1 : steps.stop - 1]).max(axis=0)


def account(seconds: NDArray[np.float64], counted: slice) -> Figures:
    """Times of a variant from its time stamps, in milliseconds.

    Args:
        seconds: ``[ranks, steps, len(POINTS)]``, each rank on its own clock.
        counted: steps that count; not the first step, because its start is unknown.
    """
    ms = 1e3 * seconds
    column = {name: ms[:, counted, index] for index, name in enumerate(POINTS)}
    began = ms[:, counted.start - 1 : counted.stop - 1, POINTS.index("end")]
    steps = step_ms(seconds, counted)
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
    """Mean loss per step over the predicted positions of all ranks; both arguments are ``[ranks, steps]``."""
    return ((losses * predicted).sum(axis=0) / predicted.sum(axis=0)).tolist()


def summarise(figures: Figures) -> Figures:
    """Add to the measured figures: bubbles, their parts, removed shares of the baselines' bubbles, equality of the losses."""
    variants = figures["sides"]
    trained = {name: variant for name, variant in variants.items() if name != DENSE_ONLY}
    figures["doubts"] = doubts(variants)
    figures["compute_apart"] = compute_apart(variants)
    if DENSE_ONLY in variants and not (figures["parameters"]["strict"] and figures["doubts"]):
        alone = variants[DENSE_ONLY]
        figures["dense_ms"] = statistics.mean(alone["rank_ms"])
        for variant in trained.values():
            variant["bubble_ms"] = variant["step_ms"]["mean"] - figures["dense_ms"]
            parts = variant["parts_ms"]
            parts["slower compute"] = variant["compute_ms"] - alone["compute_ms"]
            parts["other"] = variant["bubble_ms"] - sum(parts[name] for name in PARTS if name != "other")
    for variant in trained.values():
        variant["samples_per_second"] = figures["global_batch"] / variant["step_ms"]["mean"] * 1e3
        variant["straggler_percent"] = 100 * variant["parts_ms"]["straggler"] / variant["step_ms"]["mean"]
        if "flops" in figures and figures["peak_flops"]:
            variant["mfu"] = figures["flops"] / (variant["step_ms"]["mean"] / 1e3) / figures["peak_flops"]
        variant["gone"] = {
            name: 1 - variant["bubble_ms"] / variants[name]["bubble_ms"]
            for name in (TORCHREC_BASE, TORCHREC_SPARSE_DIST)
            if variants.get(name, {}).get("bubble_ms", 0.0) > 0
        }
    _add_transfers(figures, trained)
    if (apart := repeatability(variants)) is not None:
        figures["same_batch_apart"] = apart
    if trained:
        figures["losses"] = compare_losses(
            {name: variant["losses"] for name, variant in trained.items()}, figures["parameters"]["device"]
        )
    if removed := variants.get(ALL, {}).get("gone"):
        figures["goal"] = {"gone": BUBBLE_GOAL, "reached": min(removed.values())}
    return figures


def _add_transfers(figures: Figures, trained: Mapping[str, Figures]) -> None:
    """Add to each variant how long its bytes take, and its step divided by the longer one of that and the dense compute."""
    dense_bytes = figures["sides"].get(DENSE_ONLY, {}).get("dense_bytes")
    if dense_bytes is None or "dense_ms" not in figures:
        return
    ranks, links = figures["parameters"]["ranks"], figures["link_gb_per_s"]
    for name, variant in trained.items():
        needed = transfers_ms(name, variant["sent_bytes"], dense_bytes, ranks, links)
        if needed is not None:
            variant["transfers_ms"] = needed
            variant["of_limit"] = variant["step_ms"]["mean"] / max(figures["dense_ms"], needed)


def repeatability(variants: Mapping[str, Figures]) -> float | None:
    """Relative standard deviation of the compute time of the same batch over variants that do not move samples.

    All variants compute the same, so this is the noise of the machine, mainly of a GPU that several ranks share. ``None`` if
    fewer than two such variants were measured.
    """
    names = (DENSE_ONLY, TORCHREC_BASE, TORCHREC_SPARSE_DIST)
    same = [variants[name]["compute_rank_ms"] for name in names if name in variants]
    if len(same) < 2:
        return None
    times = np.array(same)  # [variants, ranks, steps]
    times /= times.mean(axis=(1, 2), keepdims=True)  # beside transfers all batches are slower by the same factor
    return float(np.sqrt(times.var(axis=0, ddof=1).mean()))


def compare_losses(curves: Mapping[str, Sequence[float]], device: str) -> Figures:
    """The largest difference of each variant's losses from those of the first variant, relative to the loss.

    The warm-up trains some batches several times. Their loss becomes a hundredth of the first one, and a difference of rounding
    becomes large beside it. So a difference is relative to the first loss, if that is larger than the loss of the step.
    """
    reference = np.array(next(iter(curves.values())))
    scale = np.maximum(np.abs(reference), np.abs(reference[0]))
    apart = {name: float((np.abs(np.array(curve) - reference) / scale).max()) for name, curve in curves.items()}
    tolerance = TRAINING_LOSS_TOLERANCE[device]
    return {
        "first": float(reference[0]),
        "last": float(reference[-1]),
        "apart": apart,
        "tolerance": tolerance,
        "equal": max(apart.values()) <= tolerance,
    }
