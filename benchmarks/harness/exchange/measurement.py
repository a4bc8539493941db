"""The measurement of the exposed exchange: all sides at all collision rates, and what follows from their step times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import report
from benchmarks.harness.exchange.machine import Transport, make_machine
from benchmarks.harness.exchange.variants import BASE, COMPUTE, DENSE, PRIORITIZED, SIDES, SPARSE_DIST, make_sides
from benchmarks.harness.gpu_cluster import link_bandwidth as rates

GOAL = {"collisions": 0.12, "gone": 0.903}
WARM_AGAIN = 3  # steps of each rate before the clock counts, in later rounds
COOL = 1  # steps at the end of a rate that see the next rate's first batch: not counted
# The losses of all sides are equal bit for bit on CPU. On CUDA, sums of bfloat16 products come in another order at times.
TOLERANCE = {"cpu": 0.0, "cuda": 1e-4}


@dataclass(frozen=True)
class Options:
    device: str
    ranks: int
    rates: tuple[float, ...]
    rounds: int  # through all rates
    warm: int  # steps of each rate before the clock counts, in the first round; twice as many before the very first
    steps: int  # steps of each rate and round that count
    clock: str
    tail: float
    transport: Transport


# ---- on every rank -----------------------------------------------------------------------------------------------------------
def measure(options: Options) -> dict[str, Any]:
    """Train all sides at all rates. Returns the same figures on every rank: a step lasts until its slowest rank is through."""
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    machine, workload = make_machine(options.device, options.ranks, options.clock, options.tail, options.transport)
    links = rates.links(machine.device) if machine.device.type == "cuda" else {}
    blocks = _blocks(options)
    schedule = [block.rate for block in blocks for _ in range(block.warm + options.steps + COOL)]
    batches = [
        machine.pin(workload.batch(dist.get_rank(), step, options.ranks, rate)) for step, rate in enumerate(schedule)
    ]
    sides, prioritized = make_sides(workload, machine, batches)
    losses: dict[str, list[Any]] = {name: [] for name in sides}
    memory = {name: machine.memory() for name in sides}
    step_ms: dict[float, list[dict[str, list[float]]]] = {rate: [] for rate in options.rates}  # by round, of each side
    for block in blocks:
        step_ms[block.rate].append({})
        for name, steps in sides.items():
            memory[name].open()
            marks = [machine.mark()]
            for _ in range(block.warm + options.steps + COOL):
                losses[name].append(next(steps))
                marks.append(machine.mark())
            times = _slowest([machine.seconds(*pair) for pair in pairwise(marks)], machine.device)
            memory[name].close()
            step_ms[block.rate][-1][name] = [1e3 * seconds for seconds in times[block.warm :][: options.steps]]
    seen = {
        rate: [
            c for block in blocks if block.rate == rate for c in prioritized.collisions[block.counted(options.steps)]
        ]
        for rate in options.rates
    }
    results = [
        {"collisions": rate, "collisions_measured": _mean(statistics.mean(seen[rate]), machine.device)}
        | _rate_figures(rounds)
        for rate, rounds in step_ms.items()
    ]
    values = {name: torch.stack(kept).double().cpu() for name, kept in losses.items() if name in SIDES}
    reference = values[SIDES[0]]
    apart = {
        name: max(_slowest([float(((value - reference) / reference).abs().max())], machine.device))
        for name, value in values.items()
    }
    return {
        "parameters": asdict(options),
        "versions": report.versions(),
        "machine": machine.describe(),
        "link_gb_per_s": links,
        "workload": asdict(workload) | {"ids_per_rank": workload.ids_per_rank},
        "results": results,
        "losses": {
            "steps": len(schedule),
            "first": _mean(float(reference[0]), machine.device),
            "last": _mean(float(reference[-1]), machine.device),
            "apart": apart,
        },
        "memory": {
            "rows_of_a_batch_bytes": workload.row_bytes,
            "rows_prefetched_bytes": max(prioritized.prefetched),
            "peak_bytes": {name: kept.peak for name, kept in memory.items() if kept.peak},
        },
        "lane": prioritized.schedule.lanes[0].off or PRIORITIZED if prioritized.schedule else None,
    }


@dataclass(frozen=True)
class _Block:
    """The steps of one rate in one round."""

    rate: float
    warm: int
    start: int  # number of its first step

    def counted(self, steps: int) -> slice:
        return slice(self.start + self.warm, self.start + self.warm + steps)


def _blocks(options: Options) -> list[_Block]:
    blocks: list[_Block] = []
    start = 0
    for number in range(options.rounds):
        for rate in options.rates:
            warm = WARM_AGAIN if number else options.warm if blocks else 2 * options.warm
            blocks.append(_Block(rate, warm, start))
            start += warm + options.steps + COOL
    return blocks


def _rate_figures(rounds: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """From the step times of each round and side, in milliseconds."""
    times = {name: [ms for one in rounds for ms in one[name]] for name in rounds[0]}

    def beyond(baseline: str, of: dict[str, list[float]]) -> dict[str, float]:
        # Means: work that runs ahead of its step moves time from one step to another.
        return {name: statistics.mean(of[name]) - statistics.mean(of[baseline]) for name in SIDES}

    return {
        "step_ms": {name: statistics.mean(values) for name, values in times.items()},
        "step_ms_spread": {name: max(values) - min(values) for name, values in times.items()},
        "exposed_ms": beyond(COMPUTE, times),
        "beyond_dense_ms": beyond(DENSE, times),
        "exposed_ms_by_round": [beyond(COMPUTE, one) for one in rounds],
    }


def leave() -> None:
    """End this rank's part, together with the others."""
    dist.barrier()
    dist.destroy_process_group()


def _slowest(values: Sequence[float], device: Any) -> list[float]:
    """The largest of all ranks, one by one."""
    gathered = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(gathered, op=dist.ReduceOp.MAX)
    return gathered.tolist()


def _mean(value: float, device: Any) -> float:
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


# ---- the figures -------------------------------------------------------------------------------------------------------------
def line_through(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Least squares ``y = intercept + slope * x``, and the share of the variance that it explains."""
    slope, intercept = statistics.linear_regression(x, y)
    residual = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    total = sum((b - statistics.mean(y)) ** 2 for b in y)
    return {"intercept": intercept, "slope": slope, "r2": 1.0 - residual / total if total else 1.0}


def summarise(figures: dict[str, Any]) -> dict[str, Any]:
    """Add what follows from the measured figures: shares gone, the line, whether the losses agree and the goal is met."""
    results = figures["results"]
    for row in results:
        row["gone"] = _gone(row["exposed_ms"])
        row["gone_by_round"] = [_gone(one) for one in row["exposed_ms_by_round"]]
        row["gone_beyond_dense"] = _gone(row["beyond_dense_ms"])
    if len(results) > 1:
        rates = [row["collisions_measured"] for row in results]
        figures["line"] = line_through(rates, [row["exposed_ms"][PRIORITIZED] for row in results])
    tolerance = TOLERANCE[figures["parameters"]["device"]]
    figures["losses"] |= {"tolerance": tolerance, "equal": max(figures["losses"]["apart"].values()) <= tolerance}
    memory = figures["memory"]
    memory["extra_batches"] = memory["rows_prefetched_bytes"] / memory["rows_of_a_batch_bytes"]
    for row in results:
        if row["collisions"] == GOAL["collisions"]:
            beyond = min(row["gone_beyond_dense"].values())
            figures["goal"] = GOAL | {
                "reached": min(row["gone"].values()),
                "reached_by_round": [min(one.values()) for one in row["gone_by_round"]],
                "reached_beyond_dense": beyond,
            }
    return figures


def _gone(ms: dict[str, float]) -> dict[str, float]:
    """Share of TorchRec's time that the prioritized side does not take."""
    return {side: 1.0 - ms[PRIORITIZED] / ms[side] for side in (BASE, SPARSE_DIST)}


def _listed(values: dict[str, Any]) -> str:
    shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in values.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown.items())


def describe(figures: dict[str, Any]) -> str:
    """The figures as a table."""
    parameters, machine = figures["parameters"], figures["machine"]
    lines = [
        f"Exposed embedding exchange, {parameters['ranks']} ranks, {machine['device']}",
        _listed({name: value for name, value in machine.items() if name != "device"}),
        _listed({**figures["workload"], **figures["versions"]}),
        "",
        "collisions  dense compute  "
        + "  ".join(f"{side:>{max(12, len(side))}}" for side in SIDES)
        + "   gone, of exposed time",
        "asked  met  ms/step ms/step "
        + "  ".join(f"{'exposed ms':>{max(12, len(side))}}" for side in SIDES)
        + "   of base  of sparse",
    ]
    for row in figures["results"]:
        lines.append(
            f"{row['collisions']:4.0%} {row['collisions_measured']:6.1%}"
            + "".join(f"{row['step_ms'][side]:8.1f}" for side in (DENSE, COMPUTE))
            + " "
            + "  ".join(f"{row['exposed_ms'][side]:{max(12, len(side))}.1f}" for side in SIDES)
            + f"   {row['gone'][BASE]:7.1%}  {row['gone'][SPARSE_DIST]:8.1%}"
        )
    lines.append("")
    if "line" in figures:
        line = figures["line"]
        lines.append(
            f"{PRIORITIZED}: exposed ms = {line['intercept']:.2f} + {line['slope'] / 100:.3f} a point of collisions "
            f"(R2 {line['r2']:.4f})"
        )
    memory, losses = figures["memory"], figures["losses"]
    lines.append(
        f"rows held ahead of their step: {memory['rows_prefetched_bytes'] / 2**20:.2f} MiB a rank, "
        f"{memory['extra_batches']:.2f} of a batch"
    )
    if memory["peak_bytes"]:
        peaks = ", ".join(f"{side} {peak / 2**20:.0f}" for side, peak in memory["peak_bytes"].items())
        lines.append(f"peak of device memory beyond the models, MiB: {peaks}")
    lines.append(
        f"losses over {losses['steps']} steps, {losses['first']:.4g} to {losses['last']:.4g}: "
        f"{'equal' if losses['equal'] else 'DIFFERENT'}, apart by at most {max(losses['apart'].values()):.1e} "
        f"(tolerance {losses['tolerance']:.0e})"
    )
    if "goal" in figures:
        goal = figures["goal"]
        reached = "reached" if goal["reached"] >= goal["gone"] else "missed"
        lines.append(
            f"goal at {goal['collisions']:.0%} collisions, {goal['gone']:.1%} of TorchRec's exposed time gone: {reached}, "
            f"{goal['reached']:.1%} ({goal['reached_beyond_dense']:.1%} of the time beyond the dense part alone)"
        )
        if len(goal["reached_by_round"]) > 1:
            lines.append(f"by round: {', '.join(f'{share:.1%}' for share in goal['reached_by_round'])}")
    return "\n".join(lines)
