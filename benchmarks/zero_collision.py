"""Zero-collision ids: how many ids share rows at each load of a table, next to ``id % rows``, and how long look-ups take.

    python -m benchmarks.zero_collision [--quick] [--json] [--output FILE]

Runs on one core. Ids are uniform 64-bit numbers. Collisions are 1 less distinct rows over distinct ids, in a table that all ids
have been inserted into, without eviction. The times are those of one batch of ids at a load of 0.75.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fbgemm_gpu  # noqa: F401  registers the read-only look-up
import torch
from torch import Tensor

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from lightning_freescale.embedding.zero_collision.collection import RESERVED_SHARE
from lightning_freescale.embedding.zero_collision.layout import Eviction, Layout
from lightning_freescale.embedding.zero_collision.remap import IdentityState, empty_state, insert, look_up

Row = dict[str, float | int | str]
CPU = torch.device("cpu")
LOADS = (0.5, 0.75, 0.9, 0.95)
BUCKET_SIZES = (128, 1024, 8192)
MAX_PROBE = 256


def layout_of(rows: int, bucket_size: int) -> Layout:
    buckets = rows // bucket_size
    return Layout(buckets, 0, buckets, bucket_size, max(1, int(bucket_size * RESERVED_SHARE)), MAX_PROBE)


def distinct_ids(count: int, seed: int) -> Tensor:
    """``[count]`` distinct ids in random order."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 2**63 - 1, (count + count // 100 + 100,), generator=generator).unique()
    return ids[torch.randperm(len(ids), generator=generator)[:count]]


def collisions(slots: Tensor) -> float:
    """In percent."""
    return 100 * (1 - len(slots.unique()) / len(slots))


def loads(rows: int) -> list[Row]:
    """Collisions of ``id % rows`` and of zero-collision ids, by load and by the size of a bucket."""
    table = []
    for load in LOADS:
        ids = distinct_ids(int(load * rows), seed=1)
        row: Row = {"load": load, "id % rows": collisions(ids % rows)}
        for size in BUCKET_SIZES:
            slots, _ = insert(empty_state(rows, CPU), layout_of(rows, size), Eviction(), ids, 0)
            row[f"buckets of {size:,}"] = collisions(slots)
        table.append(row)
    return table


def fastest(repeats: int, call: Callable[[], object]) -> float:
    """Shortest CPU time of several calls on this thread, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return 1e3 * min(times)


def times(rows: int, batch: int, repeats: int) -> list[Row]:
    """Milliseconds for one batch of ids, by the share of new ids among them."""
    layout = layout_of(rows, 8192)
    known = distinct_ids(int(0.75 * rows), seed=1)
    state = empty_state(rows, CPU)
    insert(state, layout, Eviction("ttl", 10), known, 0)
    table: list[Row] = []
    for share in (0.0, 0.01, 0.1):
        new = distinct_ids(int(share * batch), seed=2)
        ids = torch.cat([known[: batch - len(new)], new])[torch.randperm(batch)]

        def inserted(ids: Tensor = ids) -> None:
            _, insertion = insert(state, layout, Eviction("ttl", 10), ids, 1)
            insertion.swap(state)  # so that the next call finds the same state

        table.append(
            {
                "ids": batch,
                "new ids, %": 100 * share,
                "insert ms": fastest(repeats, inserted),
                "look-up ms": fastest(repeats, lambda ids=ids: look_up(state, layout, ids)),  # type: ignore[misc]
                "FBGEMM's look-up ms": fastest(repeats, lambda ids=ids: look_up_by_fbgemm(state, layout, ids)),  # type: ignore[misc]
            }
        )
    return table


def look_up_by_fbgemm(state: IdentityState, layout: Layout, ids: Tensor) -> Tensor:
    """The slots ``[n]`` of ``ids [n]``, by FBGEMM's read-only operator."""
    return torch.ops.fbgemm.zero_collision_hash(
        input=ids,
        identities=state.identities[:, None],
        max_probe=layout.max_probe,
        circular_probe=True,
        readonly=True,
        local_sizes=torch.full_like(ids, layout.bucket_size),
        offsets=(ids % layout.buckets) * layout.bucket_size,
        opt_in_prob=100,
        num_reserved_slots=layout.reserved,
    )[0]


def main() -> None:
    parser = report.make_parser(__doc__, quick="a smaller table, and fewer repetitions")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, batch, repeats = (1 << 16, 1 << 12, 2) if arguments.quick else (1 << 22, 1 << 18, 5)
    results: dict[str, list[Row]] = {"loads": loads(rows), "times": times(rows, batch, repeats)}
    titles = {
        f"Collisions in percent of the ids, {rows:,} rows": results["loads"],
        f"Time of one batch on one core, best of {repeats}, buckets of 8,192": results["times"],
    }
    machine = f"one of {os.cpu_count()} cores ({platform.machine()})"
    report.publish(arguments, report.head("zero_collision", machine) | {"rows": rows, **results}, titles)


if __name__ == "__main__":
    main()
