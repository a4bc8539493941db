"""Trains all variants of the exchange benchmark at all collision rates and takes the times of their steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import report
from benchmarks.harness.exchange.machine import Machine, Transport
from benchmarks.harness.exchange.make_machine import make_machine
from benchmarks.harness.exchange.variants import FreeScaleSteps, make_variants
from benchmarks.harness.gpu_cluster import link_bandwidth
from benchmarks.harness.variant_names import COMPUTE_ONLY, DENSE_ONLY, EXCHANGE_VARIANTS, PRIORITIZED
from benchmarks.harness.workload import EqualCostWorkload

LATER_WARM_UP_STEPS = 3  # steps of a collision rate that do not count, in all rounds but the first
UNCOUNTED_LAST_STEPS_OF_RATE = (
    1  # the last step of a rate does not count: it already prefetches for the first batch of the next rate
)


@dataclass(frozen=True)
class ExchangeOptions:
    """What to measure.

    Attributes:
        rounds: passes through all collision rates.
        warm: steps of a rate that do not count, in the first round; twice as many for the very first rate.
        steps: steps of each rate and round that count.
        clock, tail, transport: see ``make_machine``.
    """

    device: str
    ranks: int
    rates: tuple[float, ...]
    rounds: int
    warm: int
    steps: int
    clock: str
    tail: float
    transport: Transport


@dataclass(frozen=True)
class _Block:
    """The steps of one collision rate in one round."""

    rate: float
    warm: int
    start: int  # number of its first step

    def counted(self, steps: int) -> slice:
        return slice(self.start + self.warm, self.start + self.warm + steps)


def measure(options: ExchangeOptions) -> dict[str, Any]:
    """Train all variants at all rates. Every rank returns the same figures; the slowest rank defines the time of a step."""
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    machine, workload = make_machine(options.device, options.ranks, options.clock, options.tail, options.transport)
    links = link_bandwidth.all_links(machine.device) if machine.device.type == "cuda" else {}
    blocks = _blocks(options)
    rates = [block.rate for block in blocks for _ in range(block.warm + options.steps + UNCOUNTED_LAST_STEPS_OF_RATE)]
    batches = [
        machine.pin(workload.batch(dist.get_rank(), step, options.ranks, rate)) for step, rate in enumerate(rates)
    ]
    variants, prioritized = make_variants(workload, machine, batches)
    losses: dict[str, list[Tensor]] = {name: [] for name in variants}
    memory = {name: machine.memory_meter() for name in variants}
    step_ms: dict[float, list[dict[str, list[float]]]] = {
        rate: [] for rate in options.rates
    }  # by rate, round and variant
    for block in blocks:
        step_ms[block.rate].append({})
        for name, steps in variants.items():
            memory[name].start()
            timestamps = [machine.timestamp()]
            for _ in range(block.warm + options.steps + UNCOUNTED_LAST_STEPS_OF_RATE):
                losses[name].append(next(steps))
                timestamps.append(machine.timestamp())
            times = _largest([machine.seconds(*pair) for pair in pairwise(timestamps)], machine.device)
            memory[name].stop()
            step_ms[block.rate][-1][name] = [1e3 * seconds for seconds in times[block.warm :][: options.steps]]
    return {
        "parameters": asdict(options),
        "versions": report.versions(),
        "machine": machine.describe(),
        "link_gb_per_s": links,
        "workload": asdict(workload) | {"ids_per_rank": workload.ids_per_rank},
        "results": [
            {
                "collisions": rate,
                "collisions_measured": _measured_collisions(rate, blocks, options, prioritized, machine),
            }
            | _figures_of_rate(rounds)
            for rate, rounds in step_ms.items()
        ],
        "losses": {"steps": len(rates)} | _loss_figures(losses, machine),
        "memory": _memory_figures(workload, prioritized)
        | {"peak_bytes": {name: meter.peak for name, meter in memory.items() if meter.peak}},
        "lane": prioritized.schedule.modules[0].synchronous_reason or PRIORITIZED if prioritized.schedule else None,
    }


def _blocks(options: ExchangeOptions) -> list[_Block]:
    blocks: list[_Block] = []
    start = 0
    for number in range(options.rounds):
        for rate in options.rates:
            warm = LATER_WARM_UP_STEPS if number else options.warm if blocks else 2 * options.warm
            blocks.append(_Block(rate, warm, start))
            start += warm + options.steps + UNCOUNTED_LAST_STEPS_OF_RATE
    return blocks


def _measured_collisions(
    rate: float, blocks: Sequence[_Block], options: ExchangeOptions, prioritized: FreeScaleSteps, machine: Machine
) -> float:
    """Mean collision rate of the counted steps, over all ranks. A collective."""
    found = [
        collisions
        for block in blocks
        if block.rate == rate
        for collisions in prioritized.collisions[block.counted(options.steps)]
    ]
    return _mean(statistics.mean(found), machine.device)


def _figures_of_rate(rounds: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """Figures of one collision rate from the step times of each round and variant, in milliseconds."""
    times = {name: [ms for one in rounds for ms in one[name]] for name in rounds[0]}

    def beyond(baseline: str, of: dict[str, list[float]]) -> dict[str, float]:
        # Means, not medians: work that runs ahead of its step moves time from one step to another.
        return {name: statistics.mean(of[name]) - statistics.mean(of[baseline]) for name in EXCHANGE_VARIANTS}

    return {
        "step_ms": {name: statistics.mean(values) for name, values in times.items()},
        "step_ms_spread": {name: max(values) - min(values) for name, values in times.items()},
        "exposed_ms": beyond(COMPUTE_ONLY, times),
        "beyond_dense_ms": beyond(DENSE_ONLY, times),
        "exposed_ms_by_round": [beyond(COMPUTE_ONLY, one) for one in rounds],
    }


def _loss_figures(losses: dict[str, list[Tensor]], machine: Machine) -> dict[str, Any]:
    """First and last loss, and the largest relative difference of each variant from the first one. A collective."""
    values = {name: torch.stack(kept).double().cpu() for name, kept in losses.items() if name in EXCHANGE_VARIANTS}
    reference = values[EXCHANGE_VARIANTS[0]]
    return {
        "first": _mean(float(reference[0]), machine.device),
        "last": _mean(float(reference[-1]), machine.device),
        "apart": {
            name: max(_largest([float(((value - reference) / reference).abs().max())], machine.device))
            for name, value in values.items()
        },
    }


def _memory_figures(workload: EqualCostWorkload, prioritized: FreeScaleSteps) -> dict[str, int]:
    return {
        "rows_of_a_batch_bytes": workload.row_bytes,
        "rows_prefetched_bytes": max(prioritized.prefetched),
    }


def _largest(values: Sequence[float], device: Any) -> list[float]:
    """Element-wise maximum over the ranks. A collective."""
    gathered = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(gathered, op=dist.ReduceOp.MAX)
    return gathered.tolist()


def _mean(value: float, device: Any) -> float:
    """Mean over the ranks. A collective."""
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
