"""Tables of ``docs/results.md`` about the limits of the exchange: other shapes, the host, the index work, and many ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.harness.results import StoredResult, shape_of, short_machine
from benchmarks.harness.training.rounds import mean_and_spread
from benchmarks.harness.variant_names import DENSE_ONLY, PRIORITIZED, SYNC, TORCHREC_BASE, TORCHREC_SPARSE_DIST

Row = dict[str, Any]

SIDES = "TorchRec SparseDist", "FreeScale"  # variants of the simulator


def shapes(results: Mapping[str, StoredResult]) -> Iterator[Row]:
    """End-to-end results of ``--shapes``. Parts of the bubble are those of the first round."""
    shown = {name: found for name, found in results.items() if found["benchmark"] == "end_to_end" and shape_of(found)}
    limits_known = any("of_limit" in side for found in shown.values() for side in found.get("rounds", {}).values())
    for name, found in shown.items():
        shape = shape_of(found)
        for side, variant in found["sides"].items():
            if side == DENSE_ONLY:
                continue
            steps, rounds = variant["step_ms"]["steps"], found.get("rounds", {}).get(side, {}).get("step_ms", [])
            dense = found.get("dense_ms") or found["sides"][DENSE_ONLY]["step_ms"]["mean"]
            parts = variant["parts_ms"]
            yield {
                "shape": shape if name.endswith(f"_{shape}") else f"{shape} (`{name}`)",
                "dense compute ms": f"{dense:.1f}",
                "variant": side,
                "step ms (range of the rounds)": mean_and_spread(rounds if len(rounds) > 1 else steps),
                "bubble removed": _removed_in_rounds(found, side),
                "steps that waited for the host": f"{variant['host_late']:.0%}",
                "MB sent": f"{variant['sent_bytes'] / 1e6:.1f}",
                **(_limit(found, side) if limits_known else {}),
                "exposed embedding ms": f"{parts['exposed embedding']:.1f}",
                "exposed dense ms": f"{parts['exposed dense']:.1f}",
                "slower compute ms": f"{parts['slower compute']:.1f}" if "slower compute" in parts else "",
            }


def _limit(found: StoredResult, side: str) -> Row:
    """How long the bytes of a step take alone, and the step divided by the longer one of that and the dense compute."""
    return {
        "transfers alone ms": _mean_of_rounds(found, side, "transfers_ms", 1),
        "step / limit": _mean_of_rounds(found, side, "of_limit", 2),
    }


def _mean_of_rounds(found: StoredResult, side: str, key: str, digits: int) -> str:
    """Mean of a figure over the rounds; empty if the result does not have it."""
    values = found.get("rounds", {}).get(side, {}).get(key)
    return f"{statistics.mean(values):.{digits}f}" if values else ""


def _removed_in_rounds(found: StoredResult, side: str) -> str:
    """The part of the bubble of each pipeline of TorchRec that is gone, as a mean over the rounds; empty if it is not known."""
    of_side = found.get("rounds", {}).get(side, {})
    parts = [
        f"{statistics.mean(of_side[name]):.0%} of {pipeline}"
        for pipeline in (TORCHREC_BASE, TORCHREC_SPARSE_DIST)
        if side not in (TORCHREC_BASE, TORCHREC_SPARSE_DIST) and (name := f"gone of {pipeline}") in of_side
    ]
    return ", ".join(parts)


def matrix_products(results: Mapping[str, StoredResult]) -> Iterator[Row]:
    """Host time of the products of a layer, by whether their shapes repeat."""
    for found in results.values():
        if found["benchmark"] != "matrix_products":
            continue
        for row in found["products"]:
            times = {name: f"{row[name]:.0f}" for name in ("same shape us", "new shapes us", "rounded shapes us")}
            ratio = f"{row['ratio']:.1f}x ({row['spread']})"
            yield {"machine": short_machine(found), "product": row["product"]} | times | {"new to rounded": ratio}


def layer_graphs(results: Mapping[str, StoredResult]) -> Iterator[Row]:
    """Steps with and without CUDA graphs of the layers."""
    for found in results.values():
        if found["benchmark"] != "layer_graphs":
            continue
        for row in found["rows"]:
            yield {
                "machine": short_machine(found),
                "shape": found["shape"],
                "variant": row["variant"],
                "layers": row["layers"],
                "step ms (range of the rounds)": f"{row['step_ms']:.1f} ({row['lowest']:.1f} to {row['highest']:.1f})",
                "ratio": f"{row['ratio']:.2f}",
                "steps that waited for the host": f"{row['waited for the host']:.0%}",
                "peak GiB": f"{row['peak_gib']:.1f}",
            }


def index_work(results: Mapping[str, StoredResult]) -> Iterator[Row]:
    """The index work of one step, by number of ranks."""
    for found in results.values():
        if found["benchmark"] != "exchange_index":
            continue
        for row in found["rows"]:
            times = {name: f"{value:.1f}" for name, value in row.items() if name.endswith("ms")}
            yield {"machine": short_machine(found), "ranks": row["ranks"], "index work": row["index work"]} | times


def host_work(results: Mapping[str, StoredResult]) -> Iterator[Row]:
    """The work of the host in a step, by part."""
    for found in results.values():
        if found["benchmark"] != "exchange_host_work":
            continue
        for row in found["rows"]:
            counts = {name: f"{row[name]:.0f}" for name in ("Python calls", "operators", "collectives")}
            yield {"exchange": row["side"], "part": row["part"], "CPU ms": f"{row['CPU ms']:.2f}"} | counts


def accumulation(results: Mapping[str, StoredResult]) -> Iterator[Row]:
    """Exposed exchange of micro-batches, by their number."""
    for found in results.values():
        if found["benchmark"] != "accumulation":
            continue
        machine = "emulated device" if found["parameters"]["device"] == "cpu" else short_machine(found)
        for row in found["exposed"]:
            yield {
                "machine": machine,
                "micro-batches": row["micro-batches"],
                "compute ms": f"{row['compute ms']:.1f}",
                **{f"{name} ms": f"{row[f'{name} exposed ms']:.1f}" for name in (SYNC, PRIORITIZED)},
                "removed": "all" if row["removed %"] >= 100 else f"{row['removed %']:.1f}%",
            }


def forecast(results: Mapping[str, StoredResult]) -> Iterator[Row]:
    """Simulated steps of TorchRec and FreeScale on many ranks, with the measured and with faster compute."""
    found = results["simulate"]
    for setting, rows in (("setting", "scaling"), ("fast_setting", "fast_scaling")):
        for ranks in sorted({row["ranks"] for row in found[rows]}):
            before, after = ({row["side"]: row for row in found[rows] if row["ranks"] == ranks}[name] for name in SIDES)
            gaps = [row["step ms"] - row["compute ms"] for row in (before, after)]
            yield {
                "compute faster by": f"{found[setting]['compute faster by']:.2f}x",
                "ranks": ranks,
                "compute ms": f"{after['compute ms']:.1f}",
                "TorchRec SparseDist ms": f"{before['step ms']:.1f}",
                "FreeScale ms": f"{after['step ms']:.1f}",
                "its bubble": f"{after['bubble %']:.1f}%",
                "bubble removed": f"{1 - gaps[1] / gaps[0]:.1%}",
            }
