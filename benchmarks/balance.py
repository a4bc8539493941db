"""Load balancing: how evenly the partitions spread the cost, how long they take, and how fast the jagged kernels are.

    python -m benchmarks.balance [--quick] [--json] [--output FILE]

Runs on one core. Lengths of histories are log-normal (mu 7.3, sigma 1.2), at most 21,000 events. A history of L events
costs L + L^2 / 2048.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from lightning_freescale.balance import fixed, loads, lower_bound, straggler, variable, zigzag
from lightning_freescale.balance.partition import Mode
from lightning_freescale.runtime import jagged

Row = dict[str, float | int | str]
WORLDS = (8, 16, 32, 64, 128, 256, 512)  # numbers of ranks for the kernels
QUICK_WORLDS = (8, 32)


def histories(samples: int, seed: int) -> NDArray[np.int64]:
    """``[samples]`` lengths in events."""
    return np.minimum(np.random.default_rng(seed).lognormal(7.3, 1.2, samples), 21_000).astype(np.int64)


def cost(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Cost of each history."""
    return lengths + lengths.astype(np.float64) ** 2 / 2048


def in_order(costs: NDArray, ranks: int) -> NDArray[np.int64]:
    """No balancing: each rank keeps the samples that it loaded."""
    return np.arange(len(costs)) * ranks // len(costs)


def fastest(repeats: int, call: Callable, *args: object) -> float:
    """Shortest CPU time of several calls on this thread, in milliseconds. Other processes on the machine do not count."""
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        call(*args)
        times.append(time.thread_time() - start)
    return 1e3 * min(times)


def straggler_shares(draws: int = 10) -> list[Row]:
    """Means over ``draws`` global batches: idle share of the ranks, and how far the heaviest rank is above the lower bound."""
    rows: list[Row] = []
    for world, batch_size in [(8, 32), (64, 128), (256, 128), (512, 128)]:
        batches = [cost(histories(world * batch_size, seed)) for seed in range(draws)]
        for name, solve in {"none": in_order, "zigzag": zigzag, "fixed": fixed, "variable": variable}.items():
            partitions = [(costs, solve(costs, world)) for costs in batches]
            mode: Mode = "variable" if name == "variable" else "fixed"
            gaps = [
                loads(costs, partition, world).max() / lower_bound(costs, world, mode) - 1
                for costs, partition in partitions
            ]
            rows.append(
                {
                    "ranks x batch": f"{world} x {batch_size}",
                    "plan": name,
                    "straggler %": 100
                    * float(np.mean([straggler(costs, partition, world) for costs, partition in partitions])),
                    "above bound %": 100 * float(np.mean(gaps)),
                }
            )
    return rows


def solver_times(repeats: int = 20) -> list[Row]:
    """The time of each solver next to ``numpy.argsort`` of the same array, in the same run."""
    rows: list[Row] = []
    for world, batch_size in [(8, 32), (64, 128), (512, 128)]:
        costs = cost(histories(world * batch_size, seed=0))
        argsort = fastest(repeats, np.argsort, costs)
        solvers = {"zigzag": zigzag, "fixed": fixed, "variable": variable}
        solvers["variable, shares"] = partial(variable, shares=np.linspace(0.9, 1.1, world))
        for name, solve in solvers.items():
            took = fastest(repeats, solve, costs, world)
            rows.append(
                {
                    "ranks x batch": f"{world} x {batch_size}",
                    "plan": name,
                    "ms": took,
                    "argsort ms": argsort,
                    "over argsort": took / argsort,
                }
            )
    return rows


def dispatch_by_rank(values: Tensor, lengths: Tensor, ranks: Tensor, world: int) -> Tensor:
    """Eager PyTorch with one mask per rank: the simple way, whose work grows with the number of ranks."""
    row_ranks = ranks.repeat_interleave(lengths)
    return torch.cat([values[row_ranks == rank] for rank in range(world)])


def combine_by_rank(values: Tensor, lengths: Tensor, ranks: Tensor, world: int) -> Tensor:
    """Inverse of :func:`dispatch_by_rank`; ``lengths`` and ``ranks`` are in the original order."""
    row_ranks = ranks.repeat_interleave(lengths)
    out, start = torch.empty_like(values), 0
    for rank in range(world):
        mask = row_ranks == rank
        count = int(mask.sum())
        out[mask] = values[start : start + count]
        start += count
    return out


def permute_by_index(values: Tensor, lengths: Tensor, order: Tensor) -> Tensor:
    """The fastest way in eager PyTorch: one index per row, one gather."""
    starts = lengths.cumsum(0) - lengths
    moved = lengths[order]
    shift = starts[order] - (moved.cumsum(0) - moved)
    return values[torch.arange(len(values)) + shift.repeat_interleave(moved)]


def dispatch_by_index(values: Tensor, lengths: Tensor, ranks: Tensor) -> Tensor:
    """Group the samples by destination rank with one gather."""
    return permute_by_index(values, lengths, ranks.argsort(stable=True))


def combine_by_index(values: Tensor, lengths: Tensor, order: Tensor) -> Tensor:
    """Inverse of :func:`dispatch_by_index`."""
    return permute_by_index(values, lengths, order.argsort())


def kernel_times(worlds: Sequence[int] = WORLDS, batch_size: int = 128, repeats: int = 5) -> list[Row]:
    """Times to group one rank's batch of int64 ids by destination (dispatch) and to restore the order (combine)."""
    rows: list[Row] = []
    for world in worlds:
        lengths = histories(batch_size, seed=0)
        values = np.arange(lengths.sum())
        ranks = np.random.default_rng(1).integers(0, world, batch_size)
        sent = jagged.dispatch(values, lengths, ranks, world)
        v, n, r = (torch.from_numpy(array) for array in (values, lengths, ranks))
        moved, moved_n, order = (torch.from_numpy(array) for array in (sent.values, sent.lengths, sent.order))

        assert torch.equal(dispatch_by_rank(v, n, r, world), moved)
        assert torch.equal(dispatch_by_index(v, n, r), moved)
        assert torch.equal(combine_by_rank(moved, n, r, world), v)
        assert torch.equal(combine_by_index(moved, moved_n, order), v)
        assert np.array_equal(jagged.combine(sent.values, sent.lengths, sent.order)[0], values)

        times = {
            "dispatch": (
                fastest(20 * repeats, jagged.dispatch, values, lengths, ranks, world),
                fastest(repeats, dispatch_by_rank, v, n, r, world),
                fastest(repeats, dispatch_by_index, v, n, r),
            ),
            "combine": (
                fastest(20 * repeats, jagged.combine, sent.values, sent.lengths, sent.order),
                fastest(repeats, combine_by_rank, moved, n, r, world),
                fastest(repeats, combine_by_index, moved, moved_n, order),
            ),
        }
        for name, (kernel, by_rank, by_index) in times.items():
            rows.append(
                {
                    "ranks": world,
                    "kernel": name,
                    "rows": len(values),
                    "ms": kernel,
                    "eager by rank ms": by_rank,
                    "speedup": by_rank / kernel,
                    "eager by index ms": by_index,
                    "speedup over it": by_index / kernel,
                }
            )
    return rows


def main() -> None:
    parser = report.make_parser(__doc__, quick="two global batches, fewer ranks and repetitions")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draws, repeats, worlds = (2, 3, QUICK_WORLDS) if arguments.quick else (10, 20, WORLDS)
    results = {
        "straggler": straggler_shares(draws),
        "solver": solver_times(repeats),
        "kernels": kernel_times(worlds),
    }
    titles = {
        f"Straggler share of a step, computed from costs, mean of {draws} global batches": results["straggler"],
        f"Solver time, one core, best of {repeats}": results["solver"],
        "Jagged kernels and eager PyTorch, one core": results["kernels"],
    }
    machine = f"one of {os.cpu_count()} cores ({platform.machine()})"
    report.publish(arguments, report.head("balance", machine) | results, titles)


if __name__ == "__main__":
    main()
