"""One summary line per stored result: what was compared, before and after, and the change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.harness.gpu_cluster.transports import HOST, NCCL
from benchmarks.harness.results import StoredResult, command, of_rounds, shape_of, short_machine, trained_on
from benchmarks.harness.training.rounds import mean_and_spread
from benchmarks.harness.variant_names import ALL, PRIORITIZED, TORCHREC_BASE

GOAL_RATE = 0.12  # collision rate at which exposed times are quoted
FEWEST_RANKS = 4  # results with fewer ranks only serve to validate the simulator
SIMULATED_RANKS = 256


class Claim(NamedTuple):
    """A summary line; every field is short enough for a table cell."""

    claim: str
    setting: str
    machine: str
    before: str
    after: str
    change: str
    command: str
    date: str = ""


def claims(results: Mapping[str, StoredResult]) -> Iterator[Claim]:
    """The summary lines of all stored results, in the order of the page."""
    for benchmark, make in MAKERS.items():
        for found in results.values():
            if found["benchmark"] == benchmark and (claim := make(found)):
                yield claim._replace(date=found["date"][:10])


def percent_change(before: float, after: float) -> str:
    """For example ``-93.4%``."""
    return f"{after / before - 1:+.1%}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def end_to_end(found: StoredResult) -> Claim | None:
    """``None`` if the baseline or the variant with all techniques is missing."""
    variants = found["sides"]
    if "goal" not in found or not {TORCHREC_BASE, ALL} <= set(variants):
        return None
    before, after = (of_rounds(found, side, "bubble_ms") for side in (TORCHREC_BASE, ALL))

    data = trained_on(found) if "clicks" in found["workload"] else f"histories up to {trained_on(found)} events"
    if shape := shape_of(found):
        data = f"shape `{shape}`, {data}"

    def cell(side: str, bubbles: list[float]) -> str:
        return f"{mean_and_spread(bubbles)} of {mean_and_spread(of_rounds(found, side, 'step_ms'))} ms"

    return Claim(
        "bubble of a training step",
        f"{data}, {found['parameters']['ranks']} ranks",
        short_machine(found),
        f"{cell(TORCHREC_BASE, before)} (TorchRec)",
        cell(ALL, after),
        percent_change(mean(before), mean(after)),
        command(found),
    )


def cannot_help(found: StoredResult) -> Claim:
    goal, (before, after) = found["goal"], found["sides"]
    control = found["parameters"]["control"]
    error = "" if goal["error"] is None else f" ± {goal['error']:.3f}"
    return Claim(
        "no speed-up expected" + (": control" if control else ""),
        f"equal short histories, a tiny table, {found['parameters']['ranks']} ranks",
        short_machine(found),
        f"{before['ms a step']:.1f} ms per step (`{before['side']}`)",
        f"{after['ms a step']:.1f} ms per step (`{after['side']}`" + (" again)" if control else ")"),
        f"ratio {goal['reached']:.3f}{error}",
        command(found),
    )


def exposed_results(results: Mapping[str, StoredResult]) -> dict[str, StoredResult]:
    """The results of ``benchmarks.exposed`` that are quoted."""
    return {
        name: found
        for name, found in results.items()
        if found["benchmark"] == "exposed" and found["parameters"]["ranks"] >= FEWEST_RANKS
    }


def describe_exchange_machine(found: StoredResult) -> str:
    """The machine of an exposed exchange."""
    parameters = found["parameters"]
    if parameters["device"] != "cpu":
        return found["machine"]["device"]
    after = f"{parameters['tail']:.0%} of the compute" if parameters["tail"] else "no compute"
    return f"emulated device, {after} after backward"


def at_goal_rate(found: StoredResult) -> Mapping[str, Any]:
    """The row of an exposed exchange at the quoted collision rate."""
    return next(row for row in found["results"] if row["collisions"] == GOAL_RATE)


def exposed(found: StoredResult) -> Claim | None:
    """``None`` for results with few ranks. On a GPU, lookups and updates count as exposed: see ``docs/results.md``."""
    if found["parameters"]["ranks"] < FEWEST_RANKS:
        return None
    row, gpu = at_goal_rate(found), found["parameters"]["device"] != "cpu"
    ms = row["beyond_dense_ms"] if gpu else row["exposed_ms"]
    return Claim(
        f"exposed embedding exchange at {GOAL_RATE:.0%} collisions" + (", with lookups and updates" if gpu else ""),
        f"{found['parameters']['ranks']} ranks",
        short_machine(found) if gpu else describe_exchange_machine(found),
        f"{ms[TORCHREC_BASE]:.1f} ms per step (TorchRec)",
        f"{ms[PRIORITIZED]:.1f} ms per step",
        percent_change(ms[TORCHREC_BASE], ms[PRIORITIZED]),
        command(found),
    )


def straggler(found: StoredResult) -> Claim | None:
    """``None`` for results with few ranks."""
    setting = found["setting"]
    if int(setting["ranks"]) < FEWEST_RANKS:
        return None
    rows = {row["balance"]: row for row in found["straggler"]}
    off, flops = rows["off"], rows["fixed, cost by FLOPs"]

    def cell(row: Mapping[str, Any]) -> str:
        return f"{row['idle ms']:.1f} ms per step ({row['straggler %']:.1f}%)"

    return Claim(
        "idle time of the ranks caused by stragglers",
        f"histories up to {int(setting['max_history']):,} events, {setting['ranks']} ranks",
        short_machine(found),
        f"{cell(off)}, no balancing",
        f'{cell(flops)}, `balance="fixed"`',
        percent_change(off["idle ms"], flops["idle ms"]),
        command(found),
    )


def sm_free_rows(found: StoredResult) -> dict[tuple[str, str], Mapping[str, Any]]:
    """The rows of a result of ``benchmarks.sm_free`` by compute and transport."""
    return {(row["compute"], row["mode"]): row for row in found["rows"]}


def sm_free(found: StoredResult) -> Claim:
    rows = sm_free_rows(found)

    def cell(mode: str) -> str:
        slow = [rows[compute, mode]["slowdown"] for compute in ("gemm", "hstu")]
        return f"{slow[0]:.2f}x and {slow[1]:.2f}x"

    return Claim(
        "time of compute beside an all-to-all, relative to compute alone",
        f"matrix products and HSTU layers, {found['rows'][0]['world']} ranks",
        short_machine(found),
        f"{cell(NCCL)} (NCCL)",
        f"{cell(HOST)} (SM-free)",
        percent_change(rows["gemm", NCCL]["slowdown"], rows["gemm", HOST]["slowdown"]) + " for matrix products",
        command(found),
    )


def partition(found: StoredResult) -> Claim:
    row = next(row for row in reversed(found["solver"]) if row["plan"] == "fixed")
    return Claim(
        "time to assign samples to ranks",
        f"{row['ranks x batch']} samples",
        "one CPU core",
        f"{row['argsort ms']:.1f} ms (`numpy.argsort`)",
        f"{row['ms']:.1f} ms (`fixed`)",
        f"ratio {row['over argsort']:.2f}",
        command(found),
    )


def sample_exchange(found: StoredResult) -> Claim:
    figures = found["exchange"]
    return Claim(
        "exchange of samples between ranks for balancing",
        f"workload of the demo, {found['ranks']} ranks",
        short_machine(found),
        f"{figures['in line ms']:.1f} ms per step if not hidden",
        f"{figures['exposed ms']:.1f} ms per step exposed",
        percent_change(figures["in line ms"], figures["exposed ms"]),
        command(found),
    )


def monitor(found: StoredResult) -> Claim:
    figures = found["results"]
    every = figures["recorded by default, every"]
    overhead = f"{figures['overhead by default, by step times']:+.2%}"
    return Claim(
        "overhead of the bubble monitor",
        f"{found['ranks']} ranks",
        short_machine(found),
        f"{figures['step ms']:.1f} ms, step not recorded",
        f"{figures['recorded step ms']:.1f} ms, step recorded",
        f"{overhead} with one step in {every} recorded",
        command(found),
    )


def plain_ddp(found: StoredResult) -> Claim:
    """The row without a logger: CPU time, which other work on the machine changes least."""
    row = next(row for row in found["rows"] if row["logger"] == "none")
    ratios = row["CPU time ratio, rounds"]
    return Claim(
        "cost of the strategy for a model without tables",
        f"{found['ranks']} ranks, CPU time of a step",
        short_machine(found),
        f"{row['CPU time ms, ddp']:.2f} ms (`ddp`)",
        f"{row['CPU time ms, freescale']:.2f} ms (`freescale`)",
        f"ratio {row['CPU time ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        command(found),
    )


def quality(found: StoredResult) -> Claim:
    """The largest difference over all data sets."""
    data = found["data"].values()
    apart = max(part["loss"]["apart"]["largest"] for part in data)
    metrics = [metric for part in data for metric in part["metrics"].values()]
    difference = max(abs(metric["difference"]) for metric in metrics)
    within = "within" if all(metric["within_noise"] for metric in metrics) else "NOT within"
    return Claim(
        "model quality",
        f"{found['parameters']['epochs']} epochs, {_count(len(found['data']), 'data set')}, "
        f"{found['parameters']['ranks']} ranks",
        short_machine(found),
        "`freescale_sync`",
        "`freescale`, same seed",
        f"losses: at most {apart:.0e}; metrics: at most {difference:.4f}, {within} noise",
        command(found),
    )


def simulated(found: StoredResult) -> Claim:
    rows = {row["side"]: row for row in found["scaling"] if row["ranks"] == SIMULATED_RANKS}
    before, after = rows["TorchRec"], rows["FreeScale"]
    return Claim(
        "bubble of a training step, *simulated*, not measured",
        f"{SIMULATED_RANKS} ranks, {found['setting']['link GB/s']:g} GB/s per rank",
        "simulator",
        f"{before['bubble %']:.0f}% of a step (TorchRec)",
        f"{after['bubble %']:.0f}% of a step",
        f"-{after['bubble gone %']:.0f}% (in ms)",
        command(found),
    )


MAKERS: dict[str, Callable[[StoredResult], Claim | None]] = {
    "end_to_end": end_to_end,
    "exposed": exposed,
    "straggler": straggler,
    "sm_free": sm_free,
    "cannot_help": cannot_help,
    "balance": partition,
    "balance_exchange": sample_exchange,
    "monitor_overhead": monitor,
    "plain_ddp": plain_ddp,
    "quality": quality,
    "simulate": simulated,
}
