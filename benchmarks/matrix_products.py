"""Time that the host needs to start a matrix product on CUDA, for shapes that repeat and for shapes that do not.

    python -m benchmarks.matrix_products [--quick] [--json] [--output FILE] [--width 256] [--rounds 3]

The products are those of a layer of HSTU, forward and backward, over the rows of a batch. The number of rows is always the same;
or a new one in every call, as in batches of jagged histories; or a new one that is rounded up as HSTU does
(:mod:`lightning_freescale.models.even_rows`). The GPU is idle before each call. ``ratio`` compares the second with the third.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from lightning_freescale.models.even_rows import even

ROWS = 32_000  # about this many rows of a batch, within 10 %
CALLS = 200


def products(width: int, device: torch.device) -> dict[str, Callable[[int], Any]]:
    """The products of a layer over ``n`` rows: forward, then the gradients of the rows, then those of the weights."""
    kind = torch.bfloat16
    weight, bias = (
        torch.randn(4 * width, width, device=device, dtype=kind),
        torch.randn(4 * width, device=device, dtype=kind),
    )
    rows, wide = (torch.randn(2 * ROWS, size, device=device, dtype=kind) for size in (width, 4 * width))
    square = weight[:width]
    return {
        "projection": lambda n: F.linear(rows[:n], weight, bias),
        "output": lambda n: rows[:n] @ square.T,
        "gradient of the output's rows": lambda n: rows[:n] @ square,
        "gradient of the projection's rows": lambda n: wide[:n] @ weight,
        "gradient of the projection": lambda n: wide[:n].T @ rows[:n],
        "gradient of the output": lambda n: rows[:n].T @ rows[:n],
    }


def microseconds(call: Callable[[int], Any], sizes: Sequence[int]) -> float:
    """The median over the calls of the time that the host needs."""
    found = []
    for size in sizes:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call(size)
        found.append(1e6 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return statistics.median(found)


def measure(width: int, rounds: int, calls: int, device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for name, call in products(width, device).items():
        found: dict[str, list[float]] = {"same shape": [], "new shapes": [], "rounded shapes": []}
        for seed in range(rounds + 1):
            chance = random.Random(f"{name} {seed}")
            sizes = [round(ROWS * chance.uniform(0.9, 1.1)) for _ in range(calls)]
            for kind, chosen in zip(found, ([ROWS] * calls, sizes, [even(size) for size in sizes]), strict=True):
                found[kind].append(microseconds(call, chosen))
        kept = {kind: values[1:] for kind, values in found.items()}  # the first round loads kernels
        ratios = [a / b for a, b in zip(kept["new shapes"], kept["rounded shapes"], strict=True)]
        row = {f"{kind} us": statistics.mean(values) for kind, values in kept.items()}
        rows.append(
            {"product": name}
            | row
            | {"ratio": statistics.mean(ratios), "spread": f"{min(ratios):.1f} to {max(ratios):.1f}"}
        )
    return rows


def parse() -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="few calls")
    parser.add_argument("--width", type=int, default=256, help="width of the layer; default 256")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count; default 3")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.matrix_products needs a CUDA device: it measures cuBLAS")
    device = torch.device("cuda")
    rows = measure(arguments.width, arguments.rounds, 20 if arguments.quick else CALLS, device)
    results = {"width": arguments.width, "rows": ROWS, "products": rows}
    title = f"Host time of a product, width {arguments.width}, about {ROWS:,} rows"
    report.publish(arguments, report.head("matrix_products", torch.cuda.get_device_name()) | results, {title: rows})


if __name__ == "__main__":
    main()
