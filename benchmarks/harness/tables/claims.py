"""The README's table of results: one row a claim, every figure out of ``benchmarks/results``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.gpu_cluster.launcher import HOST, NCCL, TCP
from benchmarks.harness.report import RESULTS
from benchmarks.harness.training.bubble import ALL, BASE, OVER_NCCL, OVER_TCP, SM_FREE, SPARSE_DIST

GOAL_RATE = 0.12  # of collisions, where exposed times are quoted
FEWEST = 4  # ranks; results of fewer are there for the simulator to be compared with
NOT_PART = ("--output", "--plot")  # of a command: they change where its figures go, not the figures


class Claim(NamedTuple):
    claim: str
    before: str
    after: str
    command: str
    date: str = ""


def kept(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """All kept results by the names of their files, without suffix."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def command(found: dict[str, Any]) -> str:
    """What made a result, without where it was written."""
    words = iter(shlex.split(found["command"]))
    shown: list[str] = []
    for word in words:
        if word in NOT_PART:
            next(words)
        elif word != "--json":
            shown.append(word)
    return shlex.join(shown)


def claims(results: dict[str, dict[str, Any]]) -> Iterator[Claim]:
    """A row for each result that there is."""
    makers = {
        "end_to_end": end_to_end,
        "cannot_help": cannot_help,
        "exposed": exposed,
        "straggler": straggler,
        "sm_free": sm_free,
        "balance": partition,
        "balance_exchange": exchange,
        "monitor_overhead": monitor,
        "quality": quality,
        "simulate": simulated,
    }
    for benchmark, make in makers.items():
        for found in results.values():
            if found["benchmark"] == benchmark and (claim := make(found)):
                yield claim._replace(date=found["date"][:10])


def end_to_end(found: dict[str, Any]) -> Claim | None:
    """Nothing where a side is missing: the table of that result says what there is."""
    if "goal" not in found:
        return None
    device = found["machine"] if isinstance(found["machine"], str) else found["machine"]["device"]
    sides = found["sides"]
    if not {BASE, ALL} <= set(sides):
        return None
    before, after = sides[BASE], sides[ALL]
    equal = "equal" if found["losses"]["equal"] else "different"
    parts = sorted(after["parts_ms"].items(), key=lambda part: -part[1])
    left = ", ".join(f"{name} {ms:.1f}" for name, ms in parts if ms >= 0.05)
    noise = ""
    if "same_batch_apart" in found:
        noise = f"; the same batch's compute differs by ±{found['same_batch_apart']:.1%} from side to side"
    return Claim(
        f"bubble of a step, end to end, histories to {found['workload']['longest']:,} events, "
        f"{found['parameters']['ranks']} ranks, {device}; losses {equal}",
        f"{before['bubble_ms']:.1f} of {before['step_ms']['mean']:.1f} ms (TorchRec), "
        f"{before['samples_per_second']:,.0f} samples/s",
        f"{after['bubble_ms']:.1f} of {after['step_ms']['mean']:.1f} ms, {after['samples_per_second']:,.0f} samples/s: "
        f"{after['gone'][BASE]:.1%} gone"
        + (f", {after['gone'][SPARSE_DIST]:.1%} of SparseDist's" if SPARSE_DIST in after["gone"] else "")
        + f"{same_link(sides)}. What is left: {left} ms{noise}",
        command(found),
    )


def same_link(sides: Mapping[str, Any]) -> str:
    """What is gone where both sides have the same link: NCCL's TCP is slower than the SM-free transport on one machine."""
    said = ""
    if SM_FREE in sides:
        gone = 1 - sides[ALL]["bubble_ms"] / sides[SM_FREE]["bubble_ms"]
        said += f", {gone:.1%} of the {sides[SM_FREE]['bubble_ms']:.1f} ms of a synchronous exchange over the SM-free transport"
    for name in (OVER_NCCL, OVER_TCP):  # TorchRec's link
        if name in sides:
            said += f"; {name} {sides[name]['gone'][BASE]:.1%} gone"
    return said


def cannot_help(found: dict[str, Any]) -> Claim:
    goal, (before, after) = found["goal"], found["sides"]
    what, how = ("", ", all on `auto`") if not found["parameters"]["control"] else (": control", " once more")
    error = "" if goal["error"] is None else f" ± {goal['error']:.3f}"
    return Claim(
        f"where nothing is to be won (equal short histories, a tiny table), {found['parameters']['ranks']} ranks, "
        f"{found['machine']}{what}",
        f"`{before['side']}`: {before['ms a step']:.1f} ms a step",
        f"`{after['side']}`{how}: {after['ms a step']:.1f} ms, {goal['reached']:.3f}{error} of it",
        command(found),
    )


def quality(found: dict[str, Any]) -> Claim:
    """The worst of all data sets."""
    data = found["data"].values()
    apart = max(part["loss"]["apart"]["largest"] for part in data)
    metrics = [metric for part in data for metric in part["metrics"].values()]
    difference = max(abs(metric["difference"]) for metric in metrics)
    within = "all within" if all(metric["within_noise"] for metric in metrics) else "not all within"
    return Claim(
        f"model quality after {found['parameters']['epochs']} epochs, {' and '.join(sorted(found['data']))}, "
        f"{found['parameters']['ranks']} ranks, {found['machine']}; same seed",
        "`freescale_sync`",
        f"`freescale`: losses at most {apart:.0e} apart over all steps; HR@10 and NDCG@10 at most {difference:.4f}, {within} "
        "their noise",
        command(found),
    )


def where(found: dict[str, Any]) -> str:
    """The machine of an exposed exchange, in words."""
    parameters = found["parameters"]
    if parameters["device"] != "cpu":
        return found["machine"]["device"]
    after = f"{parameters['tail']:.0%} of the compute" if parameters["tail"] else "no compute"
    return f"emulated, {after} after backward"


def exposed_results(results: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: found
        for name, found in results.items()
        if found["benchmark"] == "exposed" and found["parameters"]["ranks"] >= FEWEST
    }


def left_exposed(row: dict[str, Any]) -> str:
    """Of TorchRec's exposed exchange at one rate of collisions."""
    ms, gone = row["exposed_ms"]["prioritized"], row["gone"]
    if ms < 0:
        return f"none: a step is {-ms:.1f} ms shorter than its compute with look-ups and updates in line, which are hidden, too"
    return f"{ms:.1f} ms: {gone[BASE]:.1%} gone, {gone[SPARSE_DIST]:.1%} of SparseDist's"


def exposed(found: dict[str, Any]) -> Claim | None:
    if found["parameters"]["ranks"] < FEWEST:
        return None
    row = next(row for row in found["results"] if row["collisions"] == GOAL_RATE)
    fit = found.get("line", {"r2": 0.0})
    line = f"; linear in the collisions, R² {fit['r2']:.4f}" if fit["r2"] > 0.9 else ""
    tables, others = "", ""
    if found["parameters"]["device"] != "cpu":  # the emulated device has no time for the tables, nor any noise
        baseline = [other["exposed_ms"][BASE] for other in found["results"] if other is not row]
        others = f"; at other rates of collisions {min(baseline):.1f} to {max(baseline):.1f}" if baseline else ""
        tables = f"; look-ups and updates counted in, {min(row['gone_beyond_dense'].values()):.1%} gone"
    return Claim(
        f"exposed embedding exchange at {GOAL_RATE:.0%} collisions, {found['parameters']['ranks']} ranks, {where(found)}",
        f"{row['exposed_ms'][BASE]:.1f} ms (TorchRec), {row['exposed_ms'][SPARSE_DIST]:.1f} (SparseDist){others}",
        f"{left_exposed(row)}{tables}{line}",
        command(found),
    )


def straggler(found: dict[str, Any]) -> Claim | None:
    if int(found["setting"]["ranks"]) < FEWEST:
        return None
    rows = {row["balance"]: row for row in found["straggler"]}
    off, flops, fitted, online = (
        rows[name] for name in ("off", "fixed, cost by FLOPs", "fixed", "fixed, fitted online")
    )
    setting = found["setting"]
    return Claim(
        f"idle time of the ranks, HSTU, histories to {int(setting['max_history']):,} events, {setting['ranks']} ranks, "
        f"{found['machine']}",
        f"{off['idle ms']:.1f} ms a step, straggler {off['straggler %']:.1f}%",
        f'`balance="fixed"`: {flops["idle ms"]:.1f} ms, {flops["straggler %"]:.1f}%, with costs from the model\'s FLOPs; '
        f"{fitted['idle ms']:.1f} ms, {fitted['straggler %']:.1f}%, {fitted['times less']:.1f}x less, with costs fitted to "
        f"measured steps; {online['idle ms']:.1f} ms, {online['times less']:.1f}x less, with `fit_costs`",
        command(found),
    )


def sm_free(found: dict[str, Any]) -> Claim:
    rows = {(row["compute"], row["mode"]): row for row in found["rows"]}

    def slowed(mode: str) -> str:
        products, layers = (rows[compute, mode] for compute in ("gemm", "hstu"))
        rate = products["gb_per_s_per_rank"]
        return f"matrix products {products['slowdown']:.2f}x, HSTU layers {layers['slowdown']:.2f}x ({rate:.1f} GB/s a rank)"

    return Claim(
        f"compute beside an AllToAll over its time alone, {found['machine']}",
        f"NCCL: {slowed(NCCL)}",
        f"SM-free: {slowed(HOST)}" + (f"; over TCP: {slowed(TCP)}" if ("gemm", TCP) in rows else ""),
        command(found),
    )


def partition(found: dict[str, Any]) -> Claim:
    row = next(row for row in reversed(found["solver"]) if row["plan"] == "fixed")
    return Claim(
        f"partition of {row['ranks x batch']} samples, one core",
        f"`numpy.argsort` {row['argsort ms']:.1f} ms",
        f"`fixed` {row['ms']:.1f} ms",
        command(found),
    )


def exchange(found: dict[str, Any]) -> Claim:
    figures = found["exchange"]
    return Claim(
        f"exchange of samples between ranks, workload of the demo, {found['ranks']} ranks on {found['machine']}",
        f"in line it would take {figures['in line ms']:.1f} ms a step, {figures['in line %']:.1f}%",
        f"steps wait {figures['exposed ms']:.1f} ms for it, {figures['exposed %']:.2f}%",
        command(found),
    )


def monitor(found: dict[str, Any]) -> Claim:
    figures = found["results"]
    return Claim(
        f"cost of the monitor, {found['ranks']} ranks, {found['machine']}",
        f"a step that is not recorded: {figures['step ms']:.1f} ms",
        f"a recorded one: {figures['recorded step ms']:.1f} ms; at one in {figures['recorded by default, every']}, as by "
        f"default, {figures['overhead by default, by step times']:.2%} of the time",
        command(found),
    )


def simulated(found: dict[str, Any]) -> Claim:
    ranks = 256
    rows = {row["side"]: row for row in found["scaling"] if row["ranks"] == ranks}
    before, after = rows["TorchRec"], rows["FreeScale"]
    worst = max(row["largest error %"] for row in found["errors"])
    return Claim(
        f"*simulated*, not measured: bubble on {ranks} ranks of {found['setting']['link GB/s']:g} GB/s; the simulator is "
        f"within {worst:.0f}% of the steps that were measured",
        f"{before['bubble %']:.0f}% of a step, {before['QPS']:,.0f} samples/s",
        f"{after['bubble %']:.0f}% of a step, {after['QPS']:,.0f} samples/s: {after['bubble gone %']:.0f}% gone",
        command(found),
    )
