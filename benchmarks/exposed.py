"""Exposed embedding exchange per step against the collision rate: TorchRec's pipelines, freescale_sync, prioritized.

    python -m benchmarks.exposed [--quick] [--json] [--output FILE] [--ranks N] [--device cpu|cuda]

A step's exposed time is its time less that of the same compute alone, measured in the same run: dense layers, their AllReduce,
look-ups and updates of as many rows, but no row travels. (The time beyond the dense part alone is kept beside it.) All sides
train the same model on the same batches, row-wise over all ranks; their losses are compared.

cpu: an emulated device and network (``machines.py``, ``link.py``) around the real exchange. Time is counted by default, which
makes the result the same on every machine; ``--clock real`` lets it pass, and adds what the host does. The emulated step has
5 % of its compute after backward (``--tail``), where rows that collide can still hide; their gradients cannot.
cuda: real ranks and compute. TorchRec exchanges over NCCL, the prioritized side over what the strategy would choose
(``--transport``), in three rounds. The script starts one GPU as a cluster of nodes; under another launcher it takes its place
there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # started as a file: let it find its neighbours
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.gpu_cluster import launcher as cluster

RATES = (0.0, 0.06, 0.12, 0.25, 0.40, 0.60)
QUICK_RATES = (0.0, 0.12, 0.40)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="three rates, few steps")
    cluster.add_options(parser)
    parser.add_argument("--rates", type=float, nargs="+", help="collision rates in percent")
    parser.add_argument("--steps", type=int, help="measured steps of each side, rate and round")
    parser.add_argument("--rounds", type=int, help="through all rates; default 3 where time is real, else 1")
    parser.add_argument("--clock", choices=("counted", "real"), default="counted", help="cpu: how emulated time passes")
    parser.add_argument("--tail", type=float, default=5.0, help="cpu: compute after backward, percent of the rest")
    parser.add_argument(
        "--transport", choices=("auto", "nccl", "host"), default="auto", help="cuda: of the prioritized exchange"
    )
    arguments = parser.parse_args(argv)
    cluster.settle(arguments)
    if arguments.ranks < 2:
        parser.error("--ranks: one rank exchanges nothing; use two or more")
    return arguments


def take_part(arguments: argparse.Namespace) -> int:
    """Be one of the ranks; rank 0 reports. Fails if the sides did not train alike."""
    # The streams of five sides share the hardware's queues; four ranks with 32 each are more than MPS has.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")

    from benchmarks import measure  # heavy, and of no use to the launcher

    real = arguments.device == "cuda" or arguments.clock == "real"
    rates = [rate / 100 for rate in arguments.rates] if arguments.rates else (QUICK_RATES if arguments.quick else RATES)
    options = measure.Options(
        device=arguments.device,
        ranks=arguments.ranks,
        rates=tuple(rates),
        rounds=arguments.rounds or (3 if real and not arguments.quick else 1),
        warm=8 if arguments.device == "cuda" else 3,  # the allocator needs some steps to have all sizes
        steps=arguments.steps or (10 if real and not arguments.quick else 4),
        clock=arguments.clock,
        tail=arguments.tail / 100,
        transport=arguments.transport,
    )
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print is not part of the result
        figures = measure.summarise(measure.measure(options))
    if os.environ["RANK"] == "0":
        tell(figures, arguments)
    measure.leave()
    return 0 if figures["losses"]["equal"] else 1


def tell(figures: dict[str, Any], arguments: argparse.Namespace) -> None:
    from benchmarks.harness.exchange.measurement import describe

    text = json.dumps(report.head("exposed") | figures, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text if arguments.json else describe(figures), flush=True)


def main() -> int:
    arguments = parse()
    if "RANK" in os.environ:
        return take_part(arguments)
    gpu = arguments.device == "cuda"
    return cluster.launch("benchmarks.exposed", sys.argv[1:], arguments.ranks, gpu=gpu, timeout=300, own_cores=gpu)


if __name__ == "__main__":
    sys.exit(main())
