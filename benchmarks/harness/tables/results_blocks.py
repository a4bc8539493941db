"""The generated tables of ``docs/results.md``, by the name of their marker. The page's text is written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.gpu_cluster.transports import HOST, NCCL, TCP
from benchmarks.harness.labels import value_label
from benchmarks.harness.results import StoredResult, command, shape_of, short_machine, trained_on
from benchmarks.harness.tables import large_tables_block, markdown
from benchmarks.harness.tables.claims import (
    Claim,
    claims,
    describe_exchange_machine,
    exposed_results,
    sm_free_rows,
)
from benchmarks.harness.tables.exchange_blocks import (
    accumulation,
    forecast,
    host_work,
    index_work,
    layer_graphs,
    matrix_products,
    shapes,
)
from benchmarks.harness.training.bubble import PARTS
from benchmarks.harness.variant_names import (
    ALL,
    ALL_OVER_NCCL,
    ALL_OVER_TCP,
    FLASH,
    PRIORITIZED,
    SM_FREE,
    TORCHREC_BASE,
    TORCHREC_SPARSE_DIST,
)

Results = Mapping[str, StoredResult]
Row = dict[str, Any]

# Names of balancing modes in stored results, and what they mean.
BALANCING_MODES = {
    "off": "no balancing",
    "zigzag": "`zigzag`, as in the paper",
    "fixed, cost by FLOPs": "`fixed`, costs from the model's FLOPs (the default)",
    "fixed": "`fixed`, costs fitted to measured steps beforehand",
    "variable": "`variable`, costs fitted to measured steps beforehand",
    "fixed, by exchange": "`fixed`, fitted beforehand, samples exchanged between ranks",
    "fixed, fitted online": "`fixed`, costs fitted while training (`fit_costs=True`)",
}


def blocks(results: Results) -> dict[str, str]:
    """All blocks."""
    return {
        "summary": summary(results),
        "end to end": _with_commands(results, "end_to_end", end_to_end(results)),
        "same link": markdown.table(list(same_link(results))),
        "remaining bubble": markdown.table(list(remaining_bubble(results))),
        "shapes": markdown.table(list(shapes(results))),
        "layer graphs": _with_commands(results, "layer_graphs", layer_graphs(results)),
        "matrix products": _with_commands(results, "matrix_products", matrix_products(results)),
        "index work": _with_commands(results, "exchange_index", index_work(results)),
        "host work": _with_commands(results, "exchange_host_work", host_work(results)),
        "exposed exchange": _with_commands(results, "exposed", exposed(results)),
        "accumulation": _with_commands(results, "accumulation", accumulation(results)),
        "large tables": large_tables_block.block(results),
        "stragglers": _with_commands(results, "straggler", straggler(results)),
        "compute beside communication": _with_commands(results, "sm_free", sm_free(results)),
        "no speed-up expected": _with_commands(results, "cannot_help", cannot_help(results)),
        "quality": _with_commands(results, "quality", quality(results)),
        "forecast": markdown.table(list(forecast(results))),
        "simulator": _with_commands(results, "simulate", simulator(results)),
        "learning": _learning_block(results, experts=False),
        "learning with experts": _learning_block(results, experts=True),
        "attention": _with_commands(results, "hstu_attention", attention(results)),
        "dense step": _with_commands(results, "dense_step", dense_step(results)),
        "mixture of experts": _with_commands(results, "moe", mixture_of_experts(results)),
        "shared experts": shared_experts(results),
        "other costs": _claims_block(results, ("balance", "balance_exchange", "monitor_overhead", "plain_ddp")),
    }


def summary(results: Results) -> str:
    """One line per stored result."""
    return markdown.table([_claim_row(claim) for claim in claims(results)])


def _claim_row(claim: Claim) -> Row:
    return {name: value for name, value in claim._asdict().items() if name != "command"}


def _claims_block(results: Results, benchmarks: Sequence[str]) -> str:
    own = {name: found for name, found in results.items() if found["benchmark"] in benchmarks}
    lines = [_claim_row(claim) for claim in claims(own)]
    return f"{markdown.table(lines)}\n\n{_commands(own)}"


def _with_commands(results: Results, benchmark: str, rows: Iterable[Row]) -> str:
    own = {name: found for name, found in results.items() if found["benchmark"] == benchmark}
    return f"{markdown.table(list(rows))}\n\n{_commands(own)}"


def _commands(results: Results) -> str:
    """A list of the stored results with their commands."""
    return "\n".join(
        f"- [`{name}.json`](../benchmarks/results/{name}.json): `{command(found)}`, {found['date'][:10]}"
        for name, found in results.items()
    )


def _of(results: Results, benchmark: str) -> Iterator[StoredResult]:
    return (found for found in results.values() if found["benchmark"] == benchmark)


def attention(results: Results) -> Iterator[Row]:
    """Mean and spread of the attention kernels, forward and backward together."""
    for found in _of(results, "hstu_attention"):
        softmax = {
            (row["case"], row["width"]): row["both TFLOP/s"] for row in found["attention"] if row["kernel"] == FLASH
        }
        for row in found["attention"]:
            yield {
                "histories": row["case"],
                "head width": row["width"],
                "kernel": row["kernel"],
                "TFLOP/s": f"{row['both TFLOP/s']:.0f} ({row['both spread']})",
                "relative to flash": f"{row['both TFLOP/s'] / softmax[row['case'], row['width']]:.2f}x",
            }


def _learning_block(results: Results, experts: bool) -> str:
    """The results of ``benchmarks.learning`` with or without the variant "experts", which has a section of its own."""
    own = {
        name: found
        for name, found in results.items()
        if found["benchmark"] == "learning" and any(row["variant"] == "experts" for row in found["rows"]) == experts
    }
    return _with_commands(own, "learning", learning(own))


def learning(results: Results) -> Iterator[Row]:
    """HR@10 and NDCG@10 by epoch: mean over the seeds, and the smallest and the largest HR@10."""
    for found in _of(results, "learning"):
        cases: dict[tuple[str, str, int], list[Row]] = {}
        for row in found["rows"]:
            cases.setdefault((row["data"].split(".")[0], row["variant"], row["epoch"]), []).append(row)
        for (data, variant, epoch), rows in sorted(cases.items()):
            hits = [row["HR@10"] for row in rows]
            yield {
                "data": data,
                "variant": variant,
                "epoch": epoch,
                "HR@10": f"{sum(hits) / len(hits):.3f} ({min(hits):.3f} to {max(hits):.3f})",
                "NDCG@10": f"{sum(row['NDCG@10'] for row in rows) / len(rows):.3f}",
                "seeds": len(rows),
            }


def dense_step(results: Results) -> Iterator[Row]:
    """Time and MFU of the dense part of a step."""
    for found in _of(results, "dense_step"):
        for row in [*found["dense_step"], *found.get("ranks", [])]:
            yield {
                "model": row["model"],
                "histories": row["histories"],
                "bias": f"`{row['bias']}`",
                "variant": row.get("variant") or f"fused layer, {row['ranks']} ranks of {row['SMs']} SMs",
                "ms": f"{row['ms']:.1f}",
                "TFLOP/s": f"{row['TFLOP/s']:.0f} ({row['spread']})",
                "MFU": f"{row['MFU %']:.1f}%",
            }


def _spread(text: str) -> str:
    """The lowest and the highest value, as a benchmark has stored them. One run has no spread."""
    lowest, _, highest = text.partition(" to ")
    return "one run" if lowest == highest else text


def mixture_of_experts(results: Results) -> Iterator[Row]:
    """Time and memory of a mixture of experts."""
    for found in _of(results, "moe"):
        for row in found["moe"]:
            yield {
                "width, experts, top_k": f"{row['dim']:,}, {row['experts']}, {row['top_k']}",
                "variant": row["variant"],
                "ms": f"{row['ms']:.2f} ({_spread(row['spread'])})",
                "speed": f"{row['speed']:.2f}x",
                "MFU": f"{row['MFU %']:.1f}%",
                "kept": f"{row['kept MB']:,.0f} MB",
                "peak": f"{row['peak MB']:,.0f} MB",
                "peak of 8 layers": f"{row['peak of 8 MB']:,.0f} MB",
            }


def shared_experts(results: Results) -> str:
    """Step times with experts that the ranks share."""
    rows: list[Row] = []
    for found in _of(results, "expert_parallel"):
        for row in found["expert_parallel"]:
            shown: Row = {"machine": short_machine(found), "ranks": found["ranks"], "transport": row["transport"]}
            shown |= {"micro-chunks": row["micro_chunks"], "ms": f"{row['ms']:.2f} ({_spread(row['spread'])})"}
            shown |= {"exposed": f"{row['exposed ms']:.2f} ms", "relative to the first": f"{row['times']:.2f}x"}
            rows.append(shown | {"sent by a rank": f"{row['sent MB']:,.0f} MB"})
    return _with_commands(results, "expert_parallel", rows) if rows else "There is no measured result yet."


# ---- end to end --------------------------------------------------------------------------------------------------------------
def _whole(results: Results) -> Iterator[StoredResult]:
    """End-to-end results that contain the baseline and all techniques, and whose bubbles are not doubtful. Not other shapes."""
    chosen = (found for found in _of(results, "end_to_end") if shape_of(found) is None)
    whole = (found for found in chosen if {TORCHREC_BASE, ALL} <= set(found["sides"]))
    return (found for found in whole if "bubble_ms" in found["sides"][ALL])


def _setting(found: StoredResult) -> Row:
    return {
        "longest history": trained_on(found),
        "ranks": found["parameters"]["ranks"],
        "machine": short_machine(found),
    }


def end_to_end(results: Results) -> Iterator[Row]:
    """TorchRec's pipelines and all techniques."""
    for found in _whole(results):
        for name in (TORCHREC_BASE, TORCHREC_SPARSE_DIST, ALL):
            if (variant := found["sides"].get(name)) is None:
                continue
            yield _setting(found) | {
                "variant": name,
                "step ms": f"{variant['step_ms']['mean']:.1f}",
                "bubble ms": f"{variant['bubble_ms']:.1f}",
                "bubble removed": "-" if name == TORCHREC_BASE else f"{variant['gone'][TORCHREC_BASE]:.1%}",
                "samples/s": f"{variant['samples_per_second']:,.0f}",
                "losses": "equal" if found["losses"]["equal"] else "different",
            }


def same_link(results: Results) -> Iterator[Row]:
    """All techniques next to a baseline over the same link."""
    for found in _whole(results):
        variants = found["sides"]
        for link, before, after in (
            ("host memory (SM-free)", SM_FREE, ALL),
            ("TCP (NCCL)", TORCHREC_BASE, ALL_OVER_NCCL),
            ("TCP (NCCL before, SM-free after)", TORCHREC_BASE, ALL_OVER_TCP),
        ):
            if before in variants and after in variants:
                ms = variants[before]["bubble_ms"], variants[after]["bubble_ms"]
                yield {
                    "longest history": trained_on(found),
                    "link": link,
                    "before": f"{before}: {ms[0]:.1f} ms",
                    "after": f"{after}: {ms[1]:.1f} ms",
                    "bubble removed": f"{1 - ms[1] / ms[0]:.1%}",
                }


def remaining_bubble(results: Results) -> Iterator[Row]:
    """The parts of the bubble with all techniques, and the noise of the machine."""
    for found in _whole(results):
        variant = found["sides"][ALL]
        row = _setting(found) | {"bubble ms": f"{variant['bubble_ms']:.1f}"}
        row |= {part: f"{variant['parts_ms'][part]:.1f}" for part in PARTS if part in variant["parts_ms"]}
        if "same_batch_apart" in found:
            row["noise of the compute"] = f"±{found['same_batch_apart']:.1%}"
        yield row


# ---- the other claims --------------------------------------------------------------------------------------------------------
def exposed(results: Results) -> Iterator[Row]:
    """Every collision rate of the quoted results."""
    for found in exposed_results(results).values():
        fit = found.get("line", {"r2": 0.0})["r2"]
        for row in found["results"]:
            ms, beyond = row["exposed_ms"], row["beyond_dense_ms"]
            yield {
                "machine": describe_exchange_machine(found),
                "collisions": f"{row['collisions']:.0%}",
                "TorchRec base ms": f"{ms[TORCHREC_BASE]:.1f}",
                "SparseDist ms": f"{ms[TORCHREC_SPARSE_DIST]:.1f}",
                "prioritized ms": f"{ms[PRIORITIZED]:.1f}",
                "removed": _removed(ms),
                "removed, with lookups and updates": _removed(beyond),
                "linear in the rate": f"R² {fit:.4f}" if fit > 0.9 else "no",
            }


def _removed(ms: Mapping[str, float]) -> str:
    return "all" if ms[PRIORITIZED] < 0 else f"{1 - ms[PRIORITIZED] / ms[TORCHREC_BASE]:.1%}"


def straggler(results: Results) -> Iterator[Row]:
    """Every balancing mode of every result with several ranks."""
    for found in _of(results, "straggler"):
        setting = found["setting"]
        if int(setting["ranks"]) == 1:  # a single rank never waits
            continue
        for row in found["straggler"]:
            yield {
                "ranks": setting["ranks"],
                "machine": short_machine(found),
                "longest history": f"{int(setting['max_history']):,}",
                "balancing": BALANCING_MODES.get(row["balance"], row["balance"]),
                "idle ms per step": f"{row['idle ms']:.2f}",
                "straggler": f"{row['straggler %']:.1f}%",
                "idle time reduced": f"{row['times less']:.1f}x",
            }


def sm_free(results: Results) -> Iterator[Row]:
    """Every transport of every result."""
    for found in _of(results, "sm_free"):
        rows = sm_free_rows(found)
        for mode in (NCCL, HOST, TCP):
            if ("gemm", mode) in rows:
                gemm, hstu = (rows[compute, mode] for compute in ("gemm", "hstu"))
                yield {
                    "ranks": gemm["world"],
                    "machine": short_machine(found),
                    "transport": value_label(mode),
                    "matrix products": f"{gemm['slowdown']:.2f}x",
                    "HSTU layers": f"{hstu['slowdown']:.2f}x",
                    "GB/s per rank": f"{gemm['gb_per_s_per_rank']:.1f}",
                }


def cannot_help(results: Results) -> Iterator[Row]:
    """The comparisons and their controls."""
    for found in _of(results, "cannot_help"):
        goal, (before, after) = found["goal"], found["sides"]
        yield {
            "ranks": found["parameters"]["ranks"],
            "machine": short_machine(found),
            "compared": f"`{after['side']}` with `{before['side']}`"
            + (" (control)" if found["parameters"]["control"] else ""),
            "before, ms per step": f"{before['ms a step']:.1f}",
            "after, ms per step": f"{after['ms a step']:.1f}",
            "ratio": f"{goal['reached']:.3f}" + ("" if goal["error"] is None else f" ± {goal['error']:.3f}"),
        } | {what: _both(before, after, f"{what} a step") for what in ("Python calls", "operators", "collectives")}


def _both(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> str:
    """A count of both variants, if the result has it."""
    return f"{before[name]:,.0f}, {after[name]:,.0f}" if name in before else ""


def quality(results: Results) -> Iterator[Row]:
    """Every data set of every result."""
    for found in _of(results, "quality"):
        for name, part in found["data"].items():
            yield {
                "data": name,
                "ranks": found["parameters"]["ranks"],
                "machine": short_machine(found),
                "steps": part["steps"],
                "largest difference of the losses": f"{part['loss']['apart']['largest']:.0e}",
                **{
                    f"{metric}: `freescale_sync`, `freescale` (noise)": f"{value['last']['freescale_sync']:.4f}, "
                    f"{value['last']['freescale']:.4f} (±{value['noise']:.4f})"
                    for metric, value in part["metrics"].items()
                },
            }


def simulator(results: Results) -> Iterator[Row]:
    """The errors of the simulator against each measurement."""
    for found in _of(results, "simulate"):
        for row in found["errors"]:
            yield {
                "stored result": row["measured in"],
                "ranks": row["ranks"],
                "mean error": f"{row['mean error %']:.1f}%",
                "largest error": f"{row['largest error %']:.1f}%",
            }
