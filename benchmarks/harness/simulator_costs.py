"""Costs of the H200 as a cluster that the simulator needs besides compute, from stored results of ``benchmarks.end_to_end``.

Rates of the transports are medians over all stored results. A single measurement of NCCL scatters by a fifth around it.

These are calibrated once, on the results in ``CALIBRATED_ON``. All other results, and all other sides of these, are predicted:

- work on the tables: ``slower compute`` of the side ``all``, of two results that differ in the bytes of their rows
- slow-down of compute beside NCCL: compute of ``all over NCCL`` and of ``all``
- exchange of ids: ``TrainPipelineBase`` against ``TrainPipelineSparseDist``, the mean of two results
- update and look-up of collisions, latency of FreeScale's last AllReduce, overhead: what ``all`` waits for
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.harness import variant_names as names
from benchmarks.harness.gpu_cluster.transports import HOST, NCCL
from benchmarks.harness.results import StoredResult, load_results
from lightning_freescale.embedding.gradient_buckets import choose_bucket_bytes, divide_layers
from lightning_freescale.simulate import Cluster

# Two results of the newest code, and one with the side "all over NCCL".
LARGE, SMALL, OVER_NCCL = CALIBRATED_ON = (
    "end_to_end_h200_long_newest",
    "end_to_end_h200_short_newest",
    "end_to_end_h200_long",
)
# An AllReduce on this cluster, as ``embedding/gradient_buckets.py`` measures and logs it at the start of a training.
REDUCE_SECONDS = 0.35e-3
REDUCE_SECONDS_PER_BYTE = 0.55e-3 / 2**20


@dataclass(frozen=True)
class ClusterCosts:
    """Calibrated costs, in seconds where nothing else is said.

    Attributes:
        table_seconds: look-ups, updates and index work of one module in a step, without the part that depends on its rows.
        table_seconds_per_byte: the part that depends on its rows, for each byte of rows that a rank exchanges.
        nccl_slowdown: time of compute beside an exchange over NCCL, over its time alone.
        id_seconds: latency of TorchRec's exchange of ids, whatever their number.
        collision_seconds: update and look-up of the collisions of one module, between their gradients and their rows.
        reduce_latency: of FreeScale's last AllReduce, beside which the collisions are exchanged.
        overhead: the part ``other`` of a step.
    """

    table_seconds: float
    table_seconds_per_byte: float
    nccl_slowdown: float
    id_seconds: float
    collision_seconds: float
    reduce_latency: float
    overhead: float


@cache
def costs() -> ClusterCosts:
    """The calibrated costs."""
    results = load_results()
    large, small, over_nccl = (results[name] for name in CALIBRATED_ON)
    beside = [median_of_rounds(found, names.ALL, "slower compute") / 1e3 for found in (large, small)]
    sent = [_row_bytes(found) for found in (large, small)]
    per_byte = (beside[0] - beside[1]) / (sent[0] - sent[1])
    # Collisions travel between backward and the next forward, and slow down nothing.
    travels = (1 - over_nccl["collisions"]) * over_nccl["sides"][names.ALL_OVER_NCCL]["sent_bytes"] / rate(NCCL)
    slower = _apart(over_nccl, names.ALL_OVER_NCCL, names.ALL, "compute_ms")
    ids = [_apart(found, names.TORCHREC_BASE, names.TORCHREC_SPARSE_DIST, "step_ms") for found in (large, small)]
    last_bucket = dense_bytes(large["model"]) / buckets(large["model"]) * REDUCE_SECONDS_PER_BYTE
    reduced = median_of_rounds(large, names.ALL, "exposed dense") / 1e3
    return ClusterCosts(
        table_seconds=max(0.0, beside[0] - per_byte * sent[0]),
        table_seconds_per_byte=per_byte,
        nccl_slowdown=1 / (1 - slower / travels),
        id_seconds=float(np.mean(ids)),
        collision_seconds=float(np.mean([_collision_seconds(found) for found in (large, small)])),
        reduce_latency=reduced - last_bucket,
        overhead=median_of_rounds(large, names.ALL, "other") / 1e3,
    )


def cluster(ranks: int, transport: str, prioritized: bool) -> Cluster:
    """The H200 as a cluster. Its ranks share one host. The dense gradients travel over TCP, by NCCL.

    Args:
        prioritized: whether FreeScale's exchange runs beside the AllReduce. TorchRec's does not, so there the AllReduce has the
            latency that it has alone.
    """
    return Cluster(
        ranks,
        rate(transport),
        nccl_slowdown=costs().nccl_slowdown,
        shared=True,
        reduce_bandwidth=2 * (ranks - 1) / ranks / REDUCE_SECONDS_PER_BYTE,
        reduce_latency=costs().reduce_latency if prioritized else REDUCE_SECONDS,
        reduce_path=transport == HOST,
    )


@cache
def rate(transport: str) -> float:
    """Bytes per second and rank of a transport without compute beside it: the median of all stored end-to-end results."""
    stored = [found["link_gb_per_s"] for found in load_results().values() if found["benchmark"] == "end_to_end"]
    return 1e9 * float(np.median([rates[transport] for rates in stored if transport in rates]))


def buckets(shape: dict[str, int]) -> int:
    """Into how many buckets the dense gradients of an HSTU are divided.

    FreeScale's buckets have different sizes, and those of the simulator are equal. A step waits for the last one, so the last one
    has the size of FreeScale's.
    """
    layers = [int(dense_bytes(shape)) // shape["num_layers"]] * shape["num_layers"]
    chosen = choose_bucket_bytes(layers, REDUCE_SECONDS, REDUCE_SECONDS_PER_BYTE)
    return len(layers) // divide_layers(layers, chosen)[-1]


def dense_bytes(shape: dict[str, int]) -> float:
    """Bytes of the gradients of an HSTU: each layer has projections to four times its width, and one back."""
    return 4.0 * 5 * shape["num_layers"] * shape["embedding_dim"] ** 2


def median_of_rounds(found: StoredResult, side: str, what: str) -> float:
    """The median of the rounds of ``what``. Results without rounds have one."""
    if "rounds" in found:
        return float(np.median(found["rounds"][side][what]))
    measured = found["sides"][side]
    if what == "step_ms":
        return float(measured["step_ms"]["mean"])
    return float(measured[what] if what in measured else measured["parts_ms"][what])


def _apart(found: StoredResult, side: str, other: str, what: str) -> float:
    """The seconds by which ``side`` takes longer than ``other``."""
    return (median_of_rounds(found, side, what) - median_of_rounds(found, other, what)) / 1e3


def _collision_seconds(found: StoredResult) -> float:
    """Update and look-up of collisions: what ``all`` waits for from backward to the next forward, without the transfers."""
    # The gradients and rows of collisions travel beside the last AllReduce.
    waits = sum(median_of_rounds(found, names.ALL, part) for part in ("exposed dense", "exposed embedding"))
    return waits / 1e3 - 2 * found["collisions"] * _row_bytes(found) / rate(HOST)


def _row_bytes(found: StoredResult) -> float:
    """Bytes of the rows that a rank exchanges in a step in one direction. Rows and gradients are nearly all it sends."""
    return float(found["sides"][names.ALL]["sent_bytes"]) / 2
