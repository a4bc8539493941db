"""The index work of the prioritized exchange: host time, device time and kernels of one step, by number of ranks.

    python -m benchmarks.exchange_index [--quick] [--json] [--output FILE] [--device cpu|cuda] [--ids N]

One process computes what one rank of a cluster computes in each step, for one table of two features. It numbers the rows that it
owns, finds the collisions of two batches, counts them, and divides both batches into collision and exclusive rows. Nothing is
exchanged: the marks of other ranks are random. "PyTorch operators" is ``embedding/index.py``. "fused" is
``embedding/fused_index.py``, which the exchange uses. The results of both are compared first.

"host ms" is the time until the host has launched everything. "device ms" is the time from the first kernel to the end of the last
one when the host is ahead. On a CPU there is only "CPU ms", the processor time of the one thread that does the work.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.gpu_cluster.launcher import has_gpu
from lightning_freescale.embedding.collisions import CollisionDetector
from lightning_freescale.embedding.cpp_index import CppIndex
from lightning_freescale.embedding.fused_index import FusedIndex
from lightning_freescale.embedding.index import (
    feature_and_requester,
    inverse_permutation,
    own_rank_last,
    split_counts,
    split_orders,
    wire_bounds,
)
from lightning_freescale.embedding.stages import Requests, with_places
from lightning_freescale.runtime.streams import Readback, int64_on_device

FEATURES = ["history", "negatives"]
SAMPLES = 256  # of each rank
COLLISIONS = 0.12
PYTORCH, FUSED = "PyTorch operators", "fused"
HEAD_START = 40_000_000  # cycles that the device sleeps, so that the host is ahead of it


class RankInCluster:
    """Rank 0 of a cluster: two consecutive batches as they arrive there.

    Args:
        ranks: number of ranks.
        ids: number of ids that the rank owns, and that it requests, in each batch.
        rows: rows of the table on each rank.
    """

    def __init__(self, ranks: int, ids: int, rows: int, device: torch.device):
        self.ranks, self.rows, self.device = ranks, rows, device
        generator = torch.Generator().manual_seed(ranks)
        self.features: list[KeyedJaggedTensor] = []
        self.unbucketize: list[Tensor] = []
        self.by_owner: list[list[int]] = []
        self.detect = CollisionDetector(rows, device)
        for _ in range(2):
            lengths = torch.bincount(
                torch.randint(len(FEATURES) * SAMPLES * ranks, (ids,), generator=generator),
                minlength=len(FEATURES) * SAMPLES * ranks,
            )
            values = torch.randint(rows, (ids,), generator=generator)
            kjt = KeyedJaggedTensor(FEATURES, values, lengths=lengths, stride=SAMPLES * ranks)
            self.features.append(kjt.to(device))
            self.features[-1].offsets()
            asked = torch.bincount(torch.randint(ranks, (ids,), generator=generator), minlength=ranks)
            self.by_owner.append(asked.tolist())
            self.unbucketize.append(torch.randperm(ids, generator=generator).to(device))
        self.by_requester = [
            kjt.lengths().view(len(FEATURES), ranks, SAMPLES).sum(dim=(0, 2)).tolist() for kjt in self.features
        ]
        for counts, owned in zip(self.by_owner, self.by_requester, strict=True):  # what a rank asks of itself
            other = max(range(1, ranks), key=counts.__getitem__)
            counts[other] += counts[0] - owned[0]
            counts[0] = owned[0]
        received = sum(sum(counts) for counts in self.by_owner)
        self.received = (torch.rand(received, generator=generator) < COLLISIONS).to(torch.uint8).to(device)
        self.first_key = torch.zeros(len(FEATURES), dtype=torch.int64, device=device)


def with_operators(rank: RankInCluster) -> list[Tensor]:
    """The step of ``index.py``. Returns what must be equal in both implementations."""
    device = rank.device
    requests = []
    for number, features in enumerate(rank.features):
        by_requester, by_owner = rank.by_requester[number], rank.by_owner[number]
        samples = int64_on_device([SAMPLES] * rank.ranks, device)
        total, ids = SAMPLES * rank.ranks, features.values().numel()
        feature, requester = feature_and_requester(features.lengths().to(torch.int64), samples, total, ids)
        requests.append(
            Requests(
                features,
                features.values() + rank.first_key[feature],
                own_rank_last(torch.argsort(requester, stable=True), by_requester, 0),
                own_rank_last(torch.arange(sum(by_owner), device=device), by_owner, 0),
                by_requester,
                by_owner,
                rank.unbucketize[number],
                inverse_permutation(rank.unbucketize[number]),
            )
        )
    found: list[Tensor] = []
    for number, collides in enumerate(rank.detect(requests[0].row_keys, requests[1].row_keys)):
        found += _divide_with_operators(rank, requests[number], collides, number)
    return found


def _divide_with_operators(rank: RankInCluster, request: Requests, collides: Tensor, number: int) -> list[Tensor]:
    collides.to(torch.uint8).index_select(0, request.owner_wire_order)  # what travels
    received = _received_by_batch(rank)[number].bool()
    bounds = [place for counts in (request.by_requester, request.by_owner) for place in wire_bounds(counts, 0)]
    uploaded = int64_on_device([place for ends in bounds for place in ends], rank.device).split(rank.ranks)
    offsets = request.features.offsets().to(torch.int64)
    counts = split_counts(
        collides,
        received,
        request.owner_wire_order,
        (uploaded[0], uploaded[1]),
        (uploaded[2], uploaded[3]),
        offsets[:: SAMPLES * rank.ranks],
    )
    on_host = Readback(counts)
    orders = split_orders(collides, received, request.owner_wire_order, request.requester_wire_order, offsets)
    values, lengths = request.features.values()[orders.lookup], request.features.lengths() - orders.collisions
    sizes = on_host.wait()
    owned, requested = sum(sizes[: rank.ranks].tolist()), sum(sizes[-rank.ranks :].tolist())
    parts = orders.wire[:owned], orders.wire[owned:]
    assert request.batch_position is not None
    batch_position = request.batch_position[orders.request]
    for part in parts:
        inverse_permutation(part)
    ids = [values[:owned][parts[0]], values[owned:][parts[1]]]
    return [
        *(values[:owned], values[owned:]),
        *parts,
        *ids,
        *(batch_position[:requested], batch_position[requested:]),
        inverse_permutation(batch_position),
        lengths,
        counts,
    ]


def _received_by_batch(rank: RankInCluster) -> list[Tensor]:
    """The marks of each batch in its own wire order. In the common transfer each rank sends those of the first batch first."""
    order = [*range(1, rank.ranks), 0]
    sizes = [size for peer in order for size in (rank.by_owner[0][peer], rank.by_owner[1][peer])]
    parts = rank.received.split(sizes)
    return [torch.cat(parts[0::2]), torch.cat(parts[1::2])]


def with_fused(rank: RankInCluster, index: FusedIndex) -> list[Tensor]:
    """The step of ``fused_index.py``. Returns the same as :func:`with_operators`."""
    requests = []
    for number, features in enumerate(rank.features):
        by_owner, unbucketize = rank.by_owner[number], rank.unbucketize[number]
        placed = index.place(features, [SAMPLES] * rank.ranks, by_owner, unbucketize)
        requests.append(with_places(features, placed, rank.by_requester[number], by_owner, unbucketize))
    bounds = index.bounds(requests[0], requests[1])
    marks, _ = index.mark(requests[0], requests[1], bounds)
    marks[len(marks) - len(rank.received) :] = rank.received
    pair = index.count(requests[0], requests[1], marks, bounds)
    found: list[Tensor] = []
    for number, rows in enumerate(index.divide(requests[0], requests[1], pair)):
        for parts in (rows.values, rows.wire_order, rows.wire_ids, rows.batch_position):
            found += parts
        found += [rows.batch_order, rows.offsets[1].diff(), pair.counts[number]]
    return found


def measure(step: Callable[[], Any], device: torch.device, repeats: int) -> dict[str, float]:
    """Median times of a step in ms; on CUDA also the number of its kernels."""
    step()
    if device.type == "cpu":
        return {"CPU ms": statistics.median(_seconds(step, time.thread_time) * 1e3 for _ in range(repeats))}
    host, on_device = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        host.append(_seconds(step, time.perf_counter) * 1e3)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START)
        start.record()
        step()
        end.record()
        end.synchronize()
        on_device.append(start.elapsed_time(end))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
    return {
        "host ms": statistics.median(host),
        "device ms": statistics.median(on_device),
        "kernels": float(kernels),
    }


def _seconds(step: Callable[[], Any], clock: Callable[[], float]) -> float:
    began = clock()
    step()
    return clock() - began


def fused_index(device: torch.device) -> type[FusedIndex]:
    """The fused index work that the exchange uses on this device."""
    if device.type == "cpu":
        return CppIndex
    from lightning_freescale.embedding.triton_index import TritonIndex  # needs Triton

    return TritonIndex


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="few ids, few repeats")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--ids", type=int, help="ids that a rank owns in a batch; default 84,000, the shape 'medium'")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 64, 512], help="default: 4 64 512")
    return parser.parse_args(argv)


def main() -> int:
    arguments = parse()
    device = torch.device(arguments.device or ("cuda" if has_gpu() else "cpu"))
    torch.set_num_threads(1)
    ids, repeats = arguments.ids or (2_000 if arguments.quick else 84_000), 3 if arguments.quick else 15
    rows = []
    for ranks in arguments.ranks:
        rank = RankInCluster(ranks, ids, 2_000_000 // ranks, device)
        index = fused_index(device)(rank.rows, rank.first_key, 0, ranks)
        for ours, theirs in zip(with_fused(rank, index), with_operators(rank), strict=True):
            if not torch.equal(ours, theirs.to(ours.dtype)):
                raise RuntimeError(f"{ranks} ranks: the fused index work and the PyTorch operators differ")
        for name, step in ((PYTORCH, partial(with_operators, rank)), (FUSED, partial(with_fused, rank, index))):
            rows.append({"ranks": ranks, "index work": name} | measure(step, device, repeats))
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    head = report.head("exchange_index", machine) | {"ids": ids, "samples": SAMPLES, "collisions": COLLISIONS}
    report.publish(arguments, head | {"rows": rows}, {f"Index work of one step, {ids:,} ids": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
