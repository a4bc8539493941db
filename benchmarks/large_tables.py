"""Tables that are larger than the memory of a GPU: in host memory behind a cache on the GPU, beside the same tables on the GPU.

    python -m benchmarks.large_tables [--quick] [--json] [--output FILE] [--ranks N] [--device cpu|cuda] [--gigabytes 60]

Both tables hold the same rows and train on the same batches, with the synchronous and with the prioritized exchange, over the
transport that the strategy would choose. Constraints for TorchRec's planner put them where they are: row-wise over the ranks,
with FBGEMM's kernel ``fused`` or ``fused_uvm_caching``. The cache holds ``--cache`` of the rows. Ids follow a power law: the
row of popularity ``r`` is drawn with a probability proportional to ``r ** -skew``. The cache begins with the most popular rows,
as after a long training, and is then FBGEMM's LRU cache.

The exchanges alternate in blocks of steps. The slowest rank defines the time of a step. The bubble is the time of a step beyond
that of the dense part alone, which is measured in the same run. Hits are distinct rows of a step that the cache held when the
step first asked for them; FBGEMM counts them. The losses of both tables are compared.

cpu: FBGEMM has no tables behind a cache there. The script trains the other table on an emulated device, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.gpu_cluster import launcher

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.harness.exchange.machine import Machine
    from benchmarks.harness.exchange.variants import FreeScaleSteps, Steps
    from benchmarks.harness.power_law import PowerLawWorkload

ON_DEVICE, BEHIND_CACHE = "on the device", "in host memory behind a cache"
KERNELS = {ON_DEVICE: "fused", BEHIND_CACHE: "fused_uvm_caching"}
SYNCHRONOUS, PRIORITIZED_MODE = "synchronous", "prioritized"
LOOK_UPS = {SYNCHRONOUS: 1, PRIORITIZED_MODE: 2}  # of each row in a step: to read it, and in its update
FIRST_STEPS, LATER_STEPS = 8, 3  # steps that do not count: before the first block, and of every block
FILLED = (
    0.9  # share of the cache that is filled with the most popular rows: some of its sets fill up earlier than others
)
CHUNK = 1 << 19  # rows that are looked up together to fill the cache
NO_CACHE_ON_CPU = "tables behind a cache were left out, because FBGEMM has its kernel fused_uvm_caching on CUDA only"


# ---- on every rank -----------------------------------------------------------------------------------------------------------
class TrainedTable:
    """One of the tables, with both exchanges of it."""

    def __init__(self, where: str, arguments: argparse.Namespace, workload: PowerLawWorkload, machine: Machine):
        from benchmarks.harness.exchange.variants import FreeScaleSteps
        from lightning_freescale.embedding.table_optimizer import kernels_of

        start = time.perf_counter()
        self.model: FreeScaleSteps = FreeScaleSteps(
            True,
            workload,
            machine,
            machine.exchange_group("low"),
            placement=_placement(where, arguments, machine),
        )
        self.kernel: Any = kernels_of(self.model.embeddings)[0]
        self.cache_rows = len(self.kernel.lxu_cache_weights) if where == BEHIND_CACHE else 0
        if self.cache_rows:
            fill_cache(self.kernel, workload, arguments.ranks, round(FILLED * self.cache_rows * arguments.ranks))
            self.kernel.gather_uvm_cache_stats = True
            self.kernel._init_uvm_cache_stats()
        self.seconds_to_make = time.perf_counter() - start

    def choose(self, mode: str) -> None:
        """Exchange in this mode from the next step on."""
        schedule = self.model.schedule
        assert schedule is not None
        schedule.activate(schedule.names if mode == PRIORITIZED_MODE else [])

    def cache_counts(self) -> tuple[int, int]:
        """Distinct rows that were looked up on this rank, and misses among them, summed over all look-ups so far."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the look-ups of the prioritized exchange have a stream of their own
        if not self.cache_rows:
            return 0, 0
        counts = self.kernel.get_uvm_cache_stats().tolist()
        return counts[2], counts[3]


def _placement(where: str, arguments: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    """Options of ``shard`` for one of the tables."""
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.types import CacheParams

    if machine.device.type == "cpu":  # TorchRec's planner has no row-wise sharding there
        return {"sharding": "row_wise"}
    cache = CacheParams(load_factor=arguments.cache) if where == BEHIND_CACHE else None
    constraints = ParameterConstraints(
        sharding_types=["row_wise"], compute_kernels=[KERNELS[where]], cache_params=cache
    )
    return {"constraints": {"catalogue": constraints}}


def fill_cache(kernel: Any, workload: PowerLawWorkload, ranks: int, rows: int) -> None:
    """Bring the most popular ``rows`` rows of the table into the caches of their owners, the most popular ones last."""
    import torch
    import torch.distributed as dist

    from lightning_freescale.embedding.table_optimizer import set_count

    ids = workload.id_of(torch.arange(rows - 1, -1, -1, device=kernel.current_device))
    held = -(-workload.rows // ranks)  # rows of each rank
    own = ids[ids // held == dist.get_rank()] % held
    with torch.no_grad():
        for chunk in own.split(CHUNK):
            kernel(chunk, torch.tensor([0, len(chunk)], device=chunk.device))
    set_count([kernel], 0)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, equal on all ranks."""
    import torch.distributed as dist

    from benchmarks.harness.exchange.block_times import run_steps
    from benchmarks.harness.exchange.make_machine import make_machine
    from benchmarks.harness.exchange.variants import dense_alone
    from benchmarks.harness.power_law import PowerLawWorkload

    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    machine, shape = make_machine(arguments.device, arguments.ranks, "counted", 0.05, "auto")
    rows = int(arguments.gigabytes * 1e9 / (4 * shape.dim))
    workload = PowerLawWorkload(**(dataclasses.asdict(shape) | {"rows": rows}), skew=arguments.skew)
    blocks = 2 * arguments.rounds
    total = FIRST_STEPS + blocks * (LATER_STEPS + arguments.steps)
    batches = [machine.pin(workload.batch(dist.get_rank(), step, arguments.ranks, 0.0)) for step in range(total)]
    places = [ON_DEVICE] if arguments.device == "cpu" else list(KERNELS)
    trained = {where: TrainedTable(where, arguments, workload, machine) for where in places}
    running = {where: table.model.steps(batches) for where, table in trained.items()}
    dense = dense_alone(workload, machine, batches)
    losses: dict[str, list[Tensor]] = {where: [] for where in places}
    for where, steps in running.items():
        trained[where].choose(SYNCHRONOUS)
        losses[where] += run_steps(steps, machine, FIRST_STEPS)[1]
    run_steps(dense, machine, FIRST_STEPS)
    rounds: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        modes = list(LOOK_UPS)[:: -1 if number % 2 else 1]
        found: dict[str, Any] = {"dense": _mean_ms(run_steps(dense, machine, LATER_STEPS + arguments.steps)[0])}
        for mode, where in itertools.product(modes, places):
            found[f"{where}, {mode}"], seen = block(trained[where], running[where], mode, arguments.steps, machine)
            losses[where] += seen
        rounds.append(found)
    return {
        "machine": machine.describe(),
        "parameters": {
            name: getattr(arguments, name)
            for name in ("ranks", "rounds", "steps", "device", "gigabytes", "cache", "skew")
        },
        "workload": dataclasses.asdict(workload) | {"ids_per_rank": workload.ids_per_rank},
        "cache_rows_per_rank": max(table.cache_rows for table in trained.values()),
        "seconds_to_make": {where: table.seconds_to_make for where, table in trained.items()},
        "collisions": statistics.mean(filter(None, trained[places[0]].model.collisions)),  # of prioritized steps
        "losses_apart": largest_difference(losses, machine),
        "dense_ms": [one["dense"] for one in rounds],
        "step_times": summarize(rounds),
    }


def block(
    table: TrainedTable, running: Steps, mode: str, steps: int, machine: Machine
) -> tuple[dict[str, float], list[Tensor]]:
    """The figures of one block of steps, and the loss of each step. A collective."""
    from benchmarks.harness.exchange.block_times import run_steps

    table.choose(mode)
    warm = run_steps(running, machine, LATER_STEPS)[1]
    before = table.cache_counts()
    times, seen = run_steps(running, machine, steps)
    rows, misses = (_sum(b - a, machine) for a, b in zip(before, table.cache_counts(), strict=True))
    found = {"step ms": statistics.mean(times)}
    if table.cache_rows:
        distinct = rows / LOOK_UPS[mode]
        found |= {"hits": 1 - misses / distinct, "rows from host memory": misses / steps}
    return found, warm + seen


def _mean_ms(found: Sequence[float]) -> float:
    return statistics.mean(found[LATER_STEPS:])


def _sum(value: float, machine: Machine) -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(value), dtype=torch.float64, device=machine.device)
    dist.all_reduce(total)
    return float(total)


def largest_difference(losses: dict[str, list[Tensor]], machine: Machine) -> float | None:
    """The largest relative difference of the losses of both tables, over all steps and ranks. A collective."""
    import torch
    import torch.distributed as dist

    if len(losses) < 2:
        return None
    first, second = (torch.stack(kept).double() for kept in losses.values())
    worst = ((first - second) / first).abs().max().to(machine.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


# ---- the result --------------------------------------------------------------------------------------------------------------
def summarize(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each table and exchange. The bubble is taken within a round."""
    rows = []
    for name in rounds[0]:
        if name == "dense":
            continue
        table, mode = name.rsplit(", ", 1)
        found = [one[name] for one in rounds]
        times, bubbles = [one["step ms"] for one in found], [one[name]["step ms"] - one["dense"] for one in rounds]
        row: dict[str, Any] = {
            "tables": table,
            "exchange": mode,
            "step ms": statistics.mean(times),
            "lowest": min(times),
            "highest": max(times),
            "bubble ms": statistics.mean(bubbles),
            "bubble ms by round": bubbles,
        }
        for column in ("hits", "rows from host memory"):
            row[column] = statistics.mean(one[column] for one in found) if column in found[0] else None
        rows.append(row)
    return sorted(rows, key=lambda row: (list(KERNELS).index(row["tables"]), list(LOOK_UPS).index(row["exchange"])))


def publish(arguments: argparse.Namespace, figures: dict[str, Any]) -> None:
    machine = figures["machine"]
    words = [str(machine[key]) for key in ("device", "cores", "exchange") if key in machine]
    title = (
        f"{arguments.ranks} ranks, {figures['workload']['rows']:,} rows of {figures['workload']['dim']} numbers "
        f"({arguments.gigabytes} GB), cache for {arguments.cache:.0%}, {arguments.rounds} rounds"
    )
    shown = [{k: v for k, v in row.items() if k != "bubble ms by round"} for row in figures["step_times"]]
    notes = [f"Dense part alone: {statistics.mean(figures['dense_ms']):.2f} ms."]
    notes += [f"Collisions: {figures['collisions']:.0%}."]
    notes += [f"Made {where} in {seconds:.0f} s." for where, seconds in figures["seconds_to_make"].items()]
    if figures["losses_apart"] is None:
        notes.append(f"{NO_CACHE_ON_CPU}.")
    else:
        notes.append(f"Losses of both tables differ by at most {figures['losses_apart']:.1e}.")
    head = report.head("large_tables", ", ".join(words) or None)
    report.publish(arguments, head | figures | {"machine": head["machine"]}, {title: shown}, *notes)


def run_rank(arguments: argparse.Namespace) -> int:
    # The streams of all variants share the hardware queues. Four ranks with 32 queues each are more than MPS has.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    from benchmarks.harness import rank_setup  # imported late: the launcher does not need torch
    from benchmarks.harness.exchange.summary import EXCHANGE_LOSS_TOLERANCE

    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result only
        figures = measure(arguments)
    if os.environ["RANK"] == "0":
        publish(arguments, figures)
    rank_setup.leave_group()
    apart = figures["losses_apart"]
    return 1 if apart is not None and apart > EXCHANGE_LOSS_TOLERANCE[arguments.device] else 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="a small table and few steps")
    launcher.add_options(parser)
    parser.add_argument(
        "--gigabytes", type=float, help="size of the table on all ranks; default 60, small with --quick"
    )
    parser.add_argument("--cache", type=float, default=0.05, help="share of the rows in the cache; default 0.05")
    parser.add_argument("--skew", type=float, default=0.8, help="exponent of the power law, below 1; default 0.8")
    parser.add_argument("--rounds", type=int, help="blocks of steps of each exchange; default 3")
    parser.add_argument("--steps", type=int, help="counted steps of a block; default 10")
    arguments = parser.parse_args(argv)
    launcher.resolve_options(arguments)
    small = arguments.quick or arguments.device == "cpu"
    if not 0 <= arguments.skew < 1:
        parser.error(f"--skew: {arguments.skew} is not at least 0 and below 1")
    if not 0 < arguments.cache <= 1:
        parser.error(f"--cache: {arguments.cache} is not above 0 and at most 1")
    arguments.gigabytes = arguments.gigabytes or (0.05 if arguments.device == "cpu" else 1.0 if small else 60.0)
    arguments.rounds = arguments.rounds or (1 if small else 3)
    arguments.steps = arguments.steps or (3 if small else 10)
    return arguments


def main() -> int:
    return launcher.on_every_rank("benchmarks.large_tables", parse(), run_rank)


if __name__ == "__main__":
    sys.exit(main())
