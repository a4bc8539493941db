"""The time of a training step with zero-collision ids, divided by that of the same step with dense ids.

    python -m benchmarks.zero_collision_step [--quick] [--json] [--output FILE] [--ranks N] [--device cpu|cuda]

The model, the batches and the machine are those of ``benchmarks.exposed``, and all variants train with the prioritized exchange,
over the transport that the strategy would choose. Dense ids are row numbers. Raw ids are 63-bit numbers, one for each dense id.
Their table begins at a load of 0.75, in buckets of 1,024 rows, and 1% of the ids of every batch are new. The variants alternate
in blocks of steps; the slowest rank defines the time of a step. A second variant with dense ids shows the noise.

The last two columns are the times of the remapping alone: the ids that one rank owns in a batch, inserted or looked up.

cpu: an emulated device, whose virtual time does not contain the remapping. This only checks that the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.gpu_cluster import launcher

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.harness.exchange.machine import Machine
    from benchmarks.harness.exchange.variants import FreeScaleSteps
    from benchmarks.harness.workload import EqualCostWorkload, ExchangeBatch

MAX_PROBES = (16, 64, 256)
BUCKET_SIZE, LOAD, NEW, TTL = 1024, 0.75, 0.01, 100_000
COLLISIONS = 0.12  # share of the ids of a batch that the previous batch has, too
ODD = 0x9E3779B97F4A7C15 >> 1 | 1
DENSE, DENSE_AGAIN = "dense ids", "dense ids, again"


def raw_ids(numbers: Tensor) -> Tensor:
    """A 63-bit id for each number; different ids for different numbers."""
    return (numbers * ODD) & (2**63 - 1)


def live_numbers(rows: int) -> Tensor:
    """The numbers of the ids that are in the table from the start: all that batches use, and others up to the load."""
    import torch

    numbers = torch.arange(rows)
    return numbers[(numbers % 3 != 0) | (numbers < 3 * (LOAD - 2 / 3) * rows)]


def with_raw_ids(batch: ExchangeBatch, rank: int, step: int, rows: int) -> ExchangeBatch:
    """The batch with raw ids, a share of which are new."""
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from benchmarks.harness.workload import ExchangeBatch

    features = batch.features
    numbers = features.values().clone()
    count = round(NEW * len(numbers))
    at = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(step))[:count]
    numbers[at] = rows + torch.arange(count) + count * (1000 * step + rank)
    return ExchangeBatch(KeyedJaggedTensor(features.keys(), raw_ids(numbers), lengths=features.lengths()))


def fill(steps: FreeScaleSteps, rows: int) -> float:
    """Insert the ids that are in the table from the start. Returns the share of the rows of this rank that ids own."""
    identities = steps.embeddings.tables["catalogue"].identities
    identities.insert(_owned(raw_ids(live_numbers(rows)), identities).to(identities.state.identities.device))
    return float((identities.state.identities >= 0).float().mean())


def _owned(ids: Tensor, identities: Any) -> Tensor:
    bucket = ids % identities.layout.buckets - identities.layout.first_bucket
    return ids[(bucket >= 0) & (bucket < identities.layout.held)]


def remap_times(steps: FreeScaleSteps, ids: Tensor, repeats: int) -> dict[str, float]:
    """Milliseconds to insert and to look up the ids of a batch that this rank owns, each the median of several calls."""
    identities = steps.embeddings.tables["catalogue"].identities
    own = _owned(ids, identities).to(identities.state.identities.device)

    def inserted() -> None:
        _, insertion = identities.insert(own)
        insertion.swap(identities.state)  # so that the next call finds the same state
        identities.step -= 1

    calls: dict[str, Callable[[], Any]] = {"insert ms": inserted, "look-up ms": lambda: identities.look_up(own)}
    return {name: _milliseconds(call, own.is_cuda, repeats) for name, call in calls.items()}


def _milliseconds(call: Callable[[], Any], cuda: bool, repeats: int) -> float:
    import torch

    times = []
    for _ in range(repeats + 2):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


# ---- on every rank -----------------------------------------------------------------------------------------------------------
def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, equal on all ranks."""
    import torch
    import torch.distributed as dist

    from benchmarks.harness.exchange.block_times import run_steps
    from benchmarks.harness.exchange.make_machine import make_machine

    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    machine, workload = make_machine(arguments.device, arguments.ranks, "counted", 0.05, "auto")
    workload = dataclasses.replace(workload, rows=1 << (23 if arguments.device == "cuda" else 16))
    warm, later, counted = (8, 3, arguments.steps) if machine.device.type == "cuda" else (3, 1, arguments.steps)
    total = warm + arguments.rounds * (later + counted)
    rank = dist.get_rank()
    dense = [workload.batch(rank, step, arguments.ranks, COLLISIONS) for step in range(total)]
    raw = [machine.pin(with_raw_ids(batch, rank, step, workload.rows)) for step, batch in enumerate(dense)]
    dense = [machine.pin(batch) for batch in dense]
    made, load = _make_variants(workload, machine)
    running = {name: steps.steps(dense if name in (DENSE, DENSE_AGAIN) else raw) for name, steps in made.items()}
    for steps in running.values():
        run_steps(steps, machine, warm)
    rounds: list[dict[str, float]] = []
    for number in range(arguments.rounds):
        turn = list(running)[number % len(running) :] + list(running)[: number % len(running)]
        found = {name: run_steps(running[name], machine, later + counted)[0][later:] for name in turn}
        rounds.append({name: statistics.mean(times) for name, times in found.items()})
    numbers = [workload.ids(peer, total, arguments.ranks, COLLISIONS) for peer in range(arguments.ranks)]
    ids = raw_ids(torch.cat(numbers))
    remaps = {name: remap_times(made[name], ids, 20) for name in made if name not in (DENSE, DENSE_AGAIN)}
    return {
        "machine": machine.describe(),
        "parameters": {
            "ranks": arguments.ranks,
            "rounds": arguments.rounds,
            "steps": counted,
            "device": arguments.device,
        },
        "workload": dataclasses.asdict(workload) | {"ids_per_rank": workload.ids_per_rank},
        "load": load,
        "new_ids_percent": 100 * NEW,
        "step_times": summarize(rounds, remaps),
        "rounds_ms": rounds,
    }


def _make_variants(workload: EqualCostWorkload, machine: Machine) -> tuple[dict[str, FreeScaleSteps], float]:
    from benchmarks.harness.exchange.variants import FreeScaleSteps
    from lightning_freescale.embedding.zero_collision.collection import ZeroCollision

    made = {
        name: FreeScaleSteps(True, workload, machine, machine.exchange_group("low")) for name in (DENSE, DENSE_AGAIN)
    }
    load = 0.0
    for probes in MAX_PROBES:
        ids = ZeroCollision(buckets=workload.rows // BUCKET_SIZE, max_probe=probes, evict="ttl", ttl=TTL)
        name = f"raw ids, max_probe={probes}"
        made[name] = FreeScaleSteps(True, workload, machine, machine.exchange_group("low"), ids)
        load = fill(made[name], workload.rows)
    return made, load


def summarize(rounds: Sequence[dict[str, float]], remaps: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """One row for each variant: medians of the rounds, each of which has a mean step time. Ratios are taken within a round.

    A kernel that is compiled in the middle of a round, or another program on the machine, affects single rounds only.
    """
    rows = []
    for name in rounds[0]:
        times, ratios = [one[name] for one in rounds], [one[name] / one[DENSE] for one in rounds]
        rows.append(
            {
                "ids": name,
                "step ms": statistics.median(times),
                "step / dense": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
                "insert ms": remaps.get(name, {}).get("insert ms"),
                "look-up ms": remaps.get(name, {}).get("look-up ms"),
            }
        )
    return sorted(rows, key=lambda row: [DENSE, DENSE_AGAIN, *remaps].index(str(row["ids"])))


def run_rank(arguments: argparse.Namespace) -> int:
    # The streams of all variants share the hardware queues. Four ranks with 32 queues each are more than MPS has.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    from benchmarks.harness import rank_setup  # imported late: the launcher does not need torch

    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result only
        figures = measure(arguments)
    if os.environ["RANK"] == "0":
        machine = figures["machine"]
        words = [str(machine[key]) for key in ("device", "cores", "exchange") if key in machine]
        head = report.head("zero_collision_step", ", ".join(words) or None)
        title = f"{arguments.ranks} ranks, {figures['workload']['rows']:,} rows, {arguments.rounds} rounds"
        report.publish(arguments, figures | head, {title: figures["step_times"]})
    rank_setup.leave_group()
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="few steps")
    launcher.add_options(parser)
    parser.add_argument("--rounds", type=int, help="blocks of steps of each variant; default 6")
    parser.add_argument("--steps", type=int, help="counted steps of a block; default 10")
    arguments = parser.parse_args(argv)
    launcher.resolve_options(arguments)
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 6)
    arguments.steps = arguments.steps or (2 if arguments.quick else 10)
    return arguments


def main() -> int:
    return launcher.on_every_rank("benchmarks.zero_collision_step", parse(), run_rank)


if __name__ == "__main__":
    sys.exit(main())
