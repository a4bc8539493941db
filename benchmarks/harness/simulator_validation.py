"""Simulated steps next to measured ones.

Compute and workload are those of the measurements. For the end-to-end steps, the bandwidth and the other costs of the H200
as a cluster come from ``simulator_costs``, where some costs are calibrated on two of the results. For the other benchmarks no
parameter is fitted to the compared times: the bandwidth is what a transport reached in the same run without compute beside
it, and how much it slows the compute was measured separately (``benchmarks.sm_free``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import simulator_costs
from benchmarks.harness import variant_names as names
from benchmarks.harness.gpu_cluster.transports import HOST, NCCL, TCP
from benchmarks.harness.results import StoredResult, load_results
from benchmarks.harness.training.bubble import UNCOUNTED_LAST_STEPS
from lightning_freescale.balance import CostModel
from lightning_freescale.data.synthetic import Synthetic
from lightning_freescale.simulate import SPARSE_DIST, TORCHREC, Cluster, ModelProfile, TrainingVariant, simulate

if TYPE_CHECKING:
    from benchmarks.harness.workload import LongTailWorkload

Row = dict[str, Any]

# The simulated variant of each measured one; for end to end with its transport.
SYNCHRONOUS = {names.TORCHREC_BASE: TORCHREC, names.TORCHREC_SPARSE_DIST: SPARSE_DIST, names.SYNC: TORCHREC}
EXPOSED = SYNCHRONOUS | {names.PRIORITIZED: TrainingVariant("prioritized", "prioritized", sm_free=True)}
_ALL = TrainingVariant("all", "prioritized", "fixed", sm_free=True)
END_TO_END = {name: (variant, NCCL) for name, variant in SYNCHRONOUS.items()} | {
    names.BALANCE: (TrainingVariant("+ balance", "base", "fixed"), NCCL),
    names.PRIORITIZE: (TrainingVariant("+ prioritize", "prioritized"), NCCL),
    names.SM_FREE: (TrainingVariant("+ SM-free", "base", sm_free=True), HOST),
    names.ALL_OVER_NCCL: (TrainingVariant("all over NCCL", "prioritized", "fixed"), NCCL),
    names.ALL_OVER_TCP: (_ALL, TCP),
    names.ALL: (_ALL, HOST),
}
BASELINES = (
    names.COMPUTE_ONLY,
    names.DENSE_ONLY,
)  # exposed time is the time beyond the first of these that was measured
MEDIAN_OF_NORMAL = 0.6745  # median of the absolute value of a normal variable, in standard deviations
MAX_HOST_LATE = 0.1  # share of the steps in which the device waited for the host
BEFORE, AFTER = 2, 1  # steps at both ends that a simulation does not count


def compare(quick: bool) -> dict[str, list[Row]]:
    """Tables by name: the errors of each stored result, and all compared steps."""
    results = load_results()
    made = {
        "exposed": lambda found: exposed(found, 10 if quick else 200),
        "straggler": lambda found: straggler(found, 3 if quick else 50),
        "end_to_end": lambda found: end_to_end(found, 1 if quick else 20),
    }
    tables = {
        benchmark: [
            {"measured in": name} | row
            for name, found in results.items()
            if found["benchmark"] == benchmark and "clicks" not in found.get("workload", {})
            for row in make(found)
            if host_was_ahead(found, row)
        ]
        for benchmark, make in made.items()
    }
    return {"errors": [row for rows in tables.values() for row in errors(rows)], **tables}


def host_was_ahead(found: StoredResult, row: Row) -> bool:
    """Whether the device waited for the host in at most a tenth of the steps of the row's side. The simulator knows no host."""
    if found["benchmark"] != "end_to_end":
        return True
    return float(found["sides"][row["side"]].get("host_late", 0.0)) <= MAX_HOST_LATE


def errors(rows: Sequence[Row]) -> list[Row]:
    """For each stored result: mean and largest error of its steps, and the largest error of idle or exposed times."""
    summary = []
    for name in dict.fromkeys(row["measured in"] for row in rows):
        own = [row for row in rows if row["measured in"] == name]
        relative = [abs(row["error %"]) for row in own]
        waits = [
            (row[what], row[f"simulated {what}"]) for row in own for what in ("exposed ms", "idle ms") if what in row
        ]
        summary.append(
            {
                "measured in": name,
                "ranks": own[0]["ranks"],
                "mean error %": float(np.mean(relative)),
                "largest error %": max(relative),
                "waits off by at most ms": max(abs(measured - simulated) for measured, simulated in waits),
            }
        )
    return summary


# ---- exposed ----------------------------------------------------------------------------------------------------------
def exposed(found: StoredResult, steps: int) -> list[Row]:
    """The steps of ``benchmarks.exposed``: every variant at every collision rate."""
    ids, dim = found["workload"]["ids_per_rank"], found["workload"]["dim"]
    ranks = found["parameters"]["ranks"]
    batches = [np.full(ranks, ids)] * (
        BEFORE + steps + AFTER
    )  # one history per rank: only the number of its rows matters here
    rows = []
    for result in found["results"]:
        alone = next(result["step_ms"][name] for name in BASELINES if name in result["step_ms"])
        for variant, measured in result["step_ms"].items():
            if variant not in EXPOSED:
                continue
            cluster, optimizer = machine_of(found, EXPOSED[variant].sm_free)
            cost = CostModel(0.0, constant=alone / 1e3 - optimizer)
            model = ModelProfile(cost, 4.0 * dim, result["collisions_measured"], optimizer=optimizer)
            simulated = 1e3 * simulate(EXPOSED[variant], cluster, model, batches).step
            rows.append(
                {
                    "ranks": ranks,
                    "collisions": result["collisions"],
                    "side": variant,
                    **_step(measured, simulated),
                    "exposed ms": measured - alone,
                    "simulated exposed ms": simulated - alone,
                }
            )
    return rows


def machine_of(found: StoredResult, sm_free: bool) -> tuple[Cluster, float]:
    """The cluster of a measurement, and the compute after backward in seconds."""
    machine, ranks = found["machine"], found["parameters"]["ranks"]
    if "bandwidth_mb_per_s" in machine:  # emulated
        bandwidth, latency = 1e6 * machine["bandwidth_mb_per_s"], machine["latency_ms"] / 1e3
        return Cluster(ranks, bandwidth, latency, host_waits=True), machine["after_backward_ms"] / 1e3
    return one_gpu(found, machine["exchange"] if sm_free else NCCL, "gemm"), 0.0


def one_gpu(found: StoredResult, transport: str, compute: str) -> Cluster:
    """A GPU as a cluster: the bandwidth of a transport without compute, and how much the transport slows a kind of compute."""
    slowdown = {(row["mode"], row["compute"]): row["slowdown"] for row in load_results()["sm_free_h200"]["rows"]}
    bandwidth = 1e9 * found["link_gb_per_s"][transport]
    return Cluster(found["parameters"]["ranks"], bandwidth, nccl_slowdown=max(1.0, slowdown[transport, compute]))


# ---- straggler --------------------------------------------------------------------------------------------------------
def straggler(found: StoredResult, seeds: int) -> list[Row]:
    """The figures of ``benchmarks.straggler``: compute of the slowest rank and idle time of the ranks, per balancing mode."""
    cost, noise = measured_cost(found)
    batches = measured_batches(found["setting"])
    batches = [*batches[:BEFORE], *batches, *batches[-AFTER:]]
    cluster = Cluster(int(found["setting"]["ranks"]), np.inf)
    rows = []
    for measured in found["straggler"]:
        mode = measured["balance"]
        if mode not in ("off", "zigzag", "fixed", "variable"):
            continue
        variant = TrainingVariant(mode, "base", mode)
        runs = [
            simulate(variant, cluster, ModelProfile(cost, 0.0, noise=noise), batches, seed) for seed in range(seeds)
        ]
        rows.append(
            {
                "ranks": cluster.ranks,
                "balance": mode,
                "compute ms": measured["compute ms"],
                "simulated compute ms": 1e3 * float(np.mean([run.compute for run in runs])),
                **_step(measured["slowest ms"], 1e3 * float(np.mean([run.step for run in runs]))),
                "idle ms": measured["idle ms"],
                "simulated idle ms": 1e3 * float(np.mean([run.parts["straggler"] for run in runs])),
            }
        )
    return rows


def measured_cost(found: StoredResult, row: int = -1) -> tuple[CostModel, float]:
    """The cost of a sample in seconds, fitted to measured steps, and its relative standard deviation.

    Args:
        row: which fit to use. With more than one rank, the last one is the online fit, which uses the most steps.
    """
    fitted = found["cost model"][row]
    # All but one of a history's positions are scored against the negatives, so their cost is almost linear in the length.
    linear = fitted["linear"] + int(found["setting"]["negatives"]) * fitted["candidate"]
    cost = CostModel(linear, fitted["quadratic"], constant=fitted["constant"])
    return cost, fitted["error %"] / 100 / MEDIAN_OF_NORMAL


def measured_batches(setting: Mapping[str, str]) -> list[NDArray[np.int64]]:
    """Lengths of the measured global batches in the order of the ranks: the data and order of ``benchmarks.straggler``."""
    ranks, size, longest = (int(setting[name]) for name in ("ranks", "batch_size", "max_history"))
    warm, steps = int(setting["warmup"]), int(setting["warmup"]) + int(setting["steps"])
    users = ranks * size * steps
    lengths = Synthetic(
        users=users,
        items=int(setting["items"]),
        mean_length=float(np.exp(7.3 + 1.2**2 / 2) * min(1.0, longest / 21_000)),
        sigma=1.2,
        max_length=longest + 1,
    ).generate()
    batches = np.minimum(lengths.lengths - 1, longest).reshape(steps, size, ranks)
    return [batch.T.ravel() for batch in batches[warm:]]  # sample i of a global batch belongs to rank i modulo ranks


# ---- end to end -------------------------------------------------------------------------------------------------------
def end_to_end(found: StoredResult, seeds: int) -> list[Row]:
    """The steps of ``benchmarks.end_to_end`` on the H200 as a cluster, for every variant.

    A measured step is the median of the rounds, because a single step of a round can take ten times as long as the others.
    Costs of a sample are fitted to the dense compute alone. TorchRec's pipelines compute the same batches a little faster or
    slower, because the GPU changes its clock while it waits. Their simulated compute is scaled to the one that was measured.
    """
    from benchmarks.harness.workload import LongTailWorkload  # imported late: it imports TorchRec

    workload, ranks = LongTailWorkload(**found["workload"]), found["parameters"]["ranks"]
    first = found["steps"] - found["counted"] - UNCOUNTED_LAST_STEPS
    counted = range(first, first + found["counted"])
    lengths = {
        step: [workload.lengths(rank, step).numpy() for rank in range(ranks)]
        for step in range(counted.start - BEFORE, counted.stop + AFTER)
    }
    model = _profile(found, workload, [own for step in counted for own in lengths[step]])
    batches = [np.concatenate(own) for own in lengths.values()]
    rows = []
    for name, (variant, transport) in END_TO_END.items():
        if name not in found["sides"]:
            continue
        prioritized, profile = variant.schedule == "prioritized", model
        cluster = simulator_costs.cluster(ranks, transport, prioritized)
        if prioritized:
            profile = replace(profile, buckets=simulator_costs.buckets(found["model"]))
        else:
            alone = simulator_costs.median_of_rounds(found, names.DENSE_ONLY, "compute_ms")
            faster = alone / simulator_costs.median_of_rounds(found, name, "compute_ms")
            profile = replace(profile, cost=CostModel(*(value / faster for value in model.cost.state_dict().values())))
        runs = [simulate(variant, cluster, profile, batches, seed) for seed in range(seeds)]
        row = {"ranks": ranks, "longest": workload.longest, "side": name}
        measured = simulator_costs.median_of_rounds(found, name, "step_ms")
        row |= _step(measured, 1e3 * float(np.mean([run.step for run in runs])))
        for what, part, simulated in (
            ("idle", "straggler", "straggler"),
            ("exposed", "exposed embedding", "exposed_embedding"),
        ):
            row[f"{what} ms"] = found["sides"][name]["parts_ms"][part]
            row[f"simulated {what} ms"] = 1e3 * float(np.mean([run.parts[simulated] for run in runs]))
        rows.append(row)
    return rows


def _profile(found: StoredResult, workload: LongTailWorkload, lengths: Sequence[NDArray[np.int64]]) -> ModelProfile:
    """The model of an end-to-end result, from ``lengths`` of each counted step and rank."""
    alone, shape = found["sides"][names.DENSE_ONLY], found["model"]
    seconds = np.array(alone["compute_rank_ms"]).T.ravel() / 1e3  # [steps * ranks]
    sums = np.array([CostModel().sums(own) for own in lengths])
    cost = CostModel.from_hstu(**shape).fit(sums, seconds)
    # The negatives of a sample are rows, too. They are spread over the events.
    ids = 1 + workload.negatives * workload.samples * len(lengths) / sums[:, 0].sum()
    row_bytes, ranks = 4.0 * shape["embedding_dim"], found["parameters"]["ranks"]
    modules = 2 if workload.context else 1  # pooled features have an EmbeddingBagCollection of their own
    costs = simulator_costs.costs()
    return ModelProfile(
        cost,
        row_bytes=row_bytes * ids,
        collisions=found["collisions"],
        dense_bytes=simulator_costs.dense_bytes(shape),
        optimizer=(float(np.mean(alone["rank_ms"])) - alone["compute_ms"]) / 1e3,
        noise=cost.error(sums, seconds) / MEDIAN_OF_NORMAL,
        id_bytes=8.0 * ids,
        fixed_bytes=(ranks - 1) * workload.samples * workload.context * row_bytes,  # each rank pools for all others
        table_seconds=modules * costs.table_seconds,
        row_seconds=costs.table_seconds_per_byte * row_bytes * ids,
        id_seconds=modules * costs.id_seconds,
        collision_seconds=modules * costs.collision_seconds,
        overhead=costs.overhead,
    )


def _step(measured: float, simulated: float) -> Row:
    return {"step ms": measured, "simulated ms": simulated, "error %": 100 * (simulated / measured - 1)}
