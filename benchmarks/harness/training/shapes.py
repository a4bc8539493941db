"""Several shapes of model and data for the end-to-end benchmark, and one table of all of them.

The shapes differ in what a step is spent on. Long histories take much compute for each row that travels; short histories take
little. A figure of one shape says little about another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.training.bubble import PARTS
from benchmarks.harness.training.rounds import mean_and_spread
from benchmarks.harness.variant_names import DENSE_ONLY, TORCHREC_BASE, TORCHREC_SPARSE_DIST

# Options of benchmarks.end_to_end on a GPU. Where a step is short, more steps count, so that a few slow ones matter less.
SHAPES = {
    "long": "",  # the defaults of the benchmark
    "medium": "--dim 256 --layers 2 --heads 4 --longest 2048 --batch-size 256 --steps 48",
    "wide": "--dim 512 --layers 8 --heads 4 --longest 8192 --batch-size 32",
    "context": "--context 8",
    "short": "--longest 128 --batch-size 2048 --rows 40000000 --negatives 4 --steps 48",
    "dlrm": "--clicks 26 --dim 64 --batch-size 8192 --rows 20000000",
}
# The same kinds of shapes for two CPU cores: they show that the benchmark works, and nothing else.
TINY_SHAPES = {
    "long": "",
    "medium": "--dim 32 --layers 1 --longest 32 --batch-size 8",
    "wide": "--dim 32 --layers 2 --longest 64 --batch-size 2",
    "context": "--context 2",
    "short": "--longest 8 --batch-size 32 --rows 6000 --negatives 2",
    "dlrm": "--clicks 5 --batch-size 16 --rows 1000",
}


def shape_options(name: str, device: str, quick: bool) -> list[str]:
    """Options of the benchmark for one shape."""
    return (TINY_SHAPES if quick or device == "cpu" else SHAPES)[name].split()


def without_shapes(words: Sequence[str]) -> list[str]:
    """The options of a command without ``--shapes`` and ``--output``, which are not options of a single measurement.

    >>> without_shapes(["--shapes", "long", "short", "--quick", "--output", "x.json"])
    ['--quick']
    """
    kept: list[str] = []
    skip = False
    for word in words:
        if word.startswith("--"):
            skip = word.split("=")[0] in ("--shapes", "--output")
        if not skip:
            kept.append(word)
    return kept


def describe(figures: Mapping[str, Any]) -> str:
    """The table of all shapes for the console, with what makes a shape doubtful.

    "step / limit" is the step divided by the longer one of the dense compute and of the transfers alone.
    """
    rows, notes = [], []
    for shape, found in figures["shapes"].items():
        rows += _rows(shape, found)
        links = ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in found["link_gb_per_s"].items())
        notes.append(f"{shape}: {found['machine']}; links: {links}")
        notes += [f"{shape}: no bubble. {doubt}" for doubt in found["doubts"] if found["parameters"]["strict"]]
        notes += [f"{shape}: {name} FAILED, {reason}" for name, reason in found["failed"].items()]
        if not found.get("losses", {}).get("equal", True):
            notes.append(f"{shape}: the losses are DIFFERENT")
    return "\n".join([figures["title"], "", report.table(rows), "", *notes])


def _rows(shape: str, found: Mapping[str, Any]) -> list[dict[str, str]]:
    rows = []
    for name, by_round in found["rounds"].items():
        if name == DENSE_ONLY:
            continue
        texts = {
            "step ms": mean_and_spread(by_round["step_ms"]),
            "samples/s": mean_and_spread(by_round["samples_per_second"], 0),
            "MFU %": mean_and_spread(by_round.get("mfu", []), 1, 100),
            "bubble ms": mean_and_spread(by_round.get("bubble_ms", [])),
        }
        texts |= {part: mean_and_spread(by_round.get(part, [])) for part in PARTS}
        for baseline in (TORCHREC_BASE, TORCHREC_SPARSE_DIST):
            texts[f"% of {baseline} gone"] = mean_and_spread(by_round.get(f"gone of {baseline}", []), 1, 100)
        texts["MB sent"] = mean_and_spread(by_round["sent_bytes"], 2, 1e-6)
        texts["transfers alone ms"] = mean_and_spread(by_round.get("transfers_ms", []))
        texts["step / limit"] = mean_and_spread(by_round.get("of_limit", []), 2)
        texts["CPU cores busy"] = mean_and_spread(by_round.get("busy_cores", []))
        texts["peak GiB"] = mean_and_spread(by_round["peak_bytes"], 1, 2**-30)
        texts["warm-up"] = str(found["sides"].get(name, {}).get("warm_up", {}).get("steps", "-"))
        rows.append({"shape": shape, "variant": name} | texts)
    return rows
