"""``docs/paper.md``: our figures beside the paper's, out of ``benchmarks/results``. ``benchmarks.tables`` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.harness.gpu_cluster.launcher import HOST, NCCL
from benchmarks.harness.tables.claims import GOAL_RATE, command, exposed_results, left_exposed, where
from benchmarks.harness.tables.claims import end_to_end as claim_of_end_to_end
from benchmarks.harness.tables.claims import quality as claim_of_quality
from benchmarks.harness.training.bubble import BASE

PICTURES = "../benchmarks/results"
INTRODUCTION = """<!-- made by `python -m benchmarks.tables` -->
# Our figures beside the paper's

FreeScale ([arXiv 2604.24073](https://arxiv.org/abs/2604.24073)) was measured on up to 256 H100. Here stand what one H200 that
plays a cluster, an emulated link, lengths of real and synthetic histories, and a simulator say of the same questions. The
settings differ: compare directions and ratios, not milliseconds. Figures come from the commands below them, pictures from
`python -m benchmarks.figures --folder benchmarks/results` and the one that is named last.
"""

Results = dict[str, dict[str, Any]]


class Section(NamedTuple):
    title: str
    paper: str
    ours: str
    picture: str
    made_by: list[str]  # results


def page(results: Results) -> str:
    """The page; sections whose results are missing are left out."""
    lines = [INTRODUCTION]
    for section in sections(results):
        pictures = f"![{section.title}]({PICTURES}/{section.picture})\n"
        lines += [f"## {section.title}\n", f"**Paper.** {section.paper}\n", f"**Ours.** {section.ours}\n", pictures]
        lines += [f"`{made_by}`\n" for made_by in dict.fromkeys(command(results[name]) for name in section.made_by)]
    return "\n".join(lines)


def sections(results: Results) -> Iterator[Section]:
    if "figures" in results:
        yield history(results)
        yield batch_and_ranks(results)
        yield collisions(results)
    if "balance_cpu" in results:
        yield kernels(results)
    yield from exposed(results)
    if "sm_free_h200" in results:
        yield contention(results)
    if "end_to_end_h200" in results:
        yield end_to_end(results)
    if "quality_cpu" in results:
        yield quality(results)
    if "simulate" in results:
        yield many_ranks(results)


def history(results: Results) -> Section:
    rows = [row for row in results["figures"]["history"] if row["data"] == "log-normal"]
    longest = max(row["max history"] for row in rows)
    at = {row["balance"]: row for row in rows if row["max history"] == longest}
    measured, setting = results["straggler_h200"]["straggler"], results["straggler_h200"]["setting"]
    off, fixed = (next(row for row in measured if row["balance"] == balance) for balance in ("off", "fixed"))
    return Section(
        "Padding and stragglers against the longest history (Fig. 2, 8a)",
        "Balancing takes stragglers from 22% to 2.4% of a step at 21K events on 64 GPUs, 4x to 9x less than TorchRec.",
        f"By cost, log-normal histories to {longest:,} events on {at['off']['ranks']} ranks: {at['off']['sparsity %']:.0f}% "
        f"padding; stragglers {at['off']['straggler %']:.0f}% without balancing, {at['zigzag']['straggler %']:.1f}% dealt "
        f"zig-zag as in the paper, {at['fixed']['straggler %']:.4f}% with `fixed`. Measured on an H200 as {setting['ranks']} "
        f"nodes, to {int(setting['max_history']):,} events: {off['straggler %']:.1f}% to {fixed['straggler %']:.1f}%, "
        f"{fixed['times less']:.1f}x less idle time. The difference: costs are known exactly in the one, fitted in the other.",
        "figure_history.png",
        ["figures", "straggler_h200"],
    )


def batch_and_ranks(results: Results) -> Section:
    ranks = [row for row in results["figures"]["ranks"] if row["data"] == "log-normal" and row["balance"] == "off"]
    sizes = [row for row in results["figures"]["batch size"] if row["data"] == "log-normal"]
    off = [row for row in sizes if row["balance"] == "off"]
    small = {row["balance"]: row for row in sizes if row["samples a rank"] == sizes[0]["samples a rank"]}
    return Section(
        "Stragglers against batch size and ranks (Fig. 8b, 8c)",
        "No figures of it are quoted here.",
        f"By cost, log-normal histories: from {ranks[0]['ranks']} to {ranks[-1]['ranks']} ranks stragglers grow from "
        f"{ranks[0]['straggler %']:.0f}% to {ranks[-1]['straggler %']:.0f}% without balancing. Larger batches even out by "
        f"themselves, {off[0]['straggler %']:.0f}% at {off[0]['samples a rank']} samples a rank to {off[-1]['straggler %']:.0f}% "
        f"at {off[-1]['samples a rank']}. With few samples the longest history alone makes the step: at "
        f"{sizes[0]['samples a rank']} a rank even `fixed` leaves {small['fixed']['straggler %']:.0f}%, its heaviest rank "
        f"{small['fixed']['above bound %']:.2f}% above the least that equal counts allow.",
        "figure_batch_and_ranks.png",
        ["figures"],
    )


def collisions(results: Results) -> Section:
    said = []
    for name in dict.fromkeys(row["data"] for row in results["figures"]["collisions"]):
        first, *_, last = (row for row in results["figures"]["collisions"] if row["data"] == name)
        said.append(
            f"{name}, {last['items']:,} items: {first['collisions %']:.0f}% at {first['samples']:,} samples a global batch "
            f"to {last['collisions %']:.0f}% at {last['samples']:,}"
        )
    return Section(
        "Collisions of consecutive batches (Fig. 3)",
        "About 12% of the rows, 14% at the 99th percentile.",
        f"These catalogues are small beside the ids of a batch: {'; '.join(said)}. That is more than in the paper; "
        '`prioritize="auto"` tries both exchanges in the first steps and keeps the faster.',
        "figure_collisions.png",
        ["figures"],
    )


def kernels(results: Results) -> Section:
    rows = {(row["ranks"], row["kernel"]): row for row in results["balance_cpu"]["kernels"]}
    speedups = {
        ranks: " and ".join(f"{rows[ranks, kernel]['speedup']:,.0f}x" for kernel in ("dispatch", "combine"))
        for ranks in (32, 512)
    }
    return Section(
        "Index kernels against the ranks (Fig. 7)",
        "Dispatch and combine in eager PyTorch are 20x slower than Triton kernels at 32 ranks, 600x at 512 (GPU).",
        f"On one CPU core, for samples exchanged on the host: eager PyTorch rank by rank is {speedups[32]} slower than our "
        f"kernels at 32 ranks, {speedups[512]} at 512. Eager PyTorch at its best, one gather, is "
        f"{rows[512, 'dispatch']['speedup over it']:.0f}x slower on any number of ranks.",
        "figure_kernels.png",
        ["balance_cpu"],
    )


def exposed(results: Results) -> Iterator[Section]:
    found = exposed_results(results)
    if not found:
        return
    said = []
    for result in found.values():
        row = next(row for row in result["results"] if row["collisions"] == GOAL_RATE)
        r2 = result["line"]["r2"]
        growth = f"linear in the rate with R² {r2:.4f}" if r2 > 0.9 else "no growth with the rate to be seen"
        said.append(
            f"{where(result)}, {result['parameters']['ranks']} ranks, {GOAL_RATE:.0%} collisions: "
            f"{row['exposed_ms'][BASE]:.0f} ms to {left_exposed(row)}; {growth}"
        )
    yield Section(
        "Exposed exchange against the collision rate (Fig. 9)",
        "111 ms to 13 ms at 8K histories; exposure grows linearly with the collision rate.",
        f"{'. '.join(said)}.",
        "figure_exposed.png",
        list(found),
    )


def contention(results: Results) -> Section:
    def said(name: str) -> str:
        slow = {(row["compute"], row["mode"]): f"{row['slowdown']:.2f}x" for row in results[name]["rows"]}
        return (
            f"beside NCCL matrix products take {slow['gemm', NCCL]} and HSTU layers {slow['hstu', NCCL]} of their time alone; "
            f"beside the SM-free transport {slow['gemm', HOST]} and {slow['hstu', HOST]}"
        )

    own, shared = "sm_free_h200", "sm_free_h200_share"
    return Section(
        "Compute beside communication (Fig. 10)",
        "NCCL slows the compute it overlaps by about 10%, whatever its channel settings.",
        f"{results[own]['machine']}: {said(own)}. In an earlier run, where MPS shared the cores out and ranks may meet on them: "
        f"{said(shared)}.",
        "figure_sm_free.png",
        [own, shared],
    )


def end_to_end(results: Results) -> Section:
    claim = claim_of_end_to_end(results["end_to_end_h200"])
    assert claim is not None
    return Section(
        "End to end (Fig. 11)",
        "Losses and accuracy equal TorchRec's, in less time.",
        f"{claim.claim[0].upper()}{claim.claim[1:]}: {claim.before}; with all techniques {claim.after}.",
        "figure_end_to_end.png",
        ["end_to_end_h200"],
    )


def quality(results: Results) -> Section:
    claim = claim_of_quality(results["quality_cpu"])
    return Section(
        "Model quality (Fig. 11)",
        "Accuracy curves equal TorchRec's.",
        f"{claim.claim.capitalize()}, beside {claim.before}, {claim.after}. (`freescale_sync` equals plain TorchRec bit for "
        "bit on CPU; the tests compare them.)",
        "quality_cpu.png",
        ["quality_cpu"],
    )


def many_ranks(results: Results) -> Section:
    found = results["simulate"]
    rows = {(row["ranks"], row["side"]): row for row in found["scaling"]}
    least, most = min(ranks for ranks, _ in rows), max(ranks for ranks, _ in rows)
    errors = "; ".join(
        f"{row['measured in']} {row['mean error %']:.1f}% in the mean, {row['largest error %']:.1f}% at most"
        for row in found["errors"]
    )
    return Section(
        "Many ranks, simulated",
        "Exposed communication falls by 90.3% on 256 H100 at 21K histories.",
        f"Not measured: a simulation, which is off the measured steps by: {errors}. With {found['setting']['link GB/s']:g} "
        f"GB/s a rank and {found['setting']['collisions']:.0%} collisions, on 256 ranks "
        f"{rows[256, 'FreeScale']['bubble gone %']:.0f}% of TorchRec's bubble is gone, stragglers and exposed exchange "
        f"together. From {least} to {most:,} ranks TorchRec keeps "
        f"{rows[most, 'TorchRec']['efficiency %']:.0f}% of its samples a second and rank, FreeScale "
        f"{rows[most, 'FreeScale']['efficiency %']:.0f}%.",
        "simulate.png",
        ["simulate"],
    )
