"""Exposed embedding exchange at several collision rates: TorchRec's pipelines, freescale_sync, prioritized exchange.

    python -m benchmarks.exposed [--quick] [--json] [--output FILE] [--ranks N] [--device cpu|cuda]

The exposed time of a step is its time minus the time of the same compute without the exchange, measured in the same
run. That compute contains the dense layers, their AllReduce, and lookups and updates of the same number of rows, but no
row travels. (The result also contains the time beyond the dense part alone.) All variants train the same model on the
same batches; the table is sharded row-wise over all ranks. The losses of the variants are compared.

cpu: an emulated device and network (``harness/emulation``) around the real exchange. Time is virtual by default, which
makes the result the same on every machine. With ``--clock real`` time passes, and the host's work counts, too. The
emulated step has 5% of its compute after backward (``--tail``). The collision rows can hide behind this tail; their
gradients cannot.

cuda: real ranks and compute. TorchRec exchanges over NCCL, the prioritized variant over the transport that the strategy
would choose (``--transport``), in three rounds. The script starts one GPU as a cluster of nodes. Under another launcher
each process of the script is one of that launcher's ranks.
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

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.exchange import summary
from benchmarks.harness.gpu_cluster import launcher

RATES = (0.0, 0.06, 0.12, 0.25, 0.40, 0.60)
QUICK_RATES = (0.0, 0.12, 0.40)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="three collision rates, few steps")
    launcher.add_options(parser)
    parser.add_argument("--rates", type=float, nargs="+", help="collision rates in percent")
    parser.add_argument("--steps", type=int, help="counted steps of each variant, rate and round")
    parser.add_argument(
        "--rounds", type=int, help="passes through all rates; default 3 in real time, 1 in virtual time"
    )
    parser.add_argument(
        "--clock", choices=("counted", "real"), default="counted", help="cpu: virtual time (counted) or real time"
    )
    parser.add_argument(
        "--tail",
        type=float,
        default=5.0,
        help="cpu: compute after backward, percent of forward and backward (default 5)",
    )
    parser.add_argument(
        "--transport",
        choices=("auto", "nccl", "host"),
        default="auto",
        help="cuda: transport of the prioritized exchange",
    )
    arguments = parser.parse_args(argv)
    launcher.resolve_options(arguments)
    if arguments.ranks < 2:
        parser.error("--ranks: a single rank exchanges nothing; use two or more")
    return arguments


def run_rank(arguments: argparse.Namespace) -> int:
    """Measure as one of the ranks; rank 0 reports. Returns 1 if the losses of the variants differ."""
    # The streams of five variants share the hardware queues. Four ranks with 32 queues each are more than MPS has.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")

    from benchmarks.harness import rank_setup  # imported late: the launcher does not need torch
    from benchmarks.harness.exchange import measurement

    real = arguments.device == "cuda" or arguments.clock == "real"
    rates = [rate / 100 for rate in arguments.rates] if arguments.rates else (QUICK_RATES if arguments.quick else RATES)
    options = measurement.ExchangeOptions(
        device=arguments.device,
        ranks=arguments.ranks,
        rates=tuple(rates),
        rounds=arguments.rounds or (3 if real and not arguments.quick else 1),
        warm=8 if arguments.device == "cuda" else 3,  # CUDA's caching allocator needs some steps to see all sizes
        steps=arguments.steps or (10 if real and not arguments.quick else 4),
        clock=arguments.clock,
        tail=arguments.tail / 100,
        transport=arguments.transport,
    )
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result only
        figures = summary.summarise(measurement.measure(options))
    if os.environ["RANK"] == "0":
        publish(figures, arguments)
    rank_setup.leave_group()
    return 0 if figures["losses"]["equal"] else 1


def publish(figures: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print the result; write it to ``--output``."""
    text = json.dumps(report.head("exposed") | figures, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text if arguments.json else summary.describe(figures), flush=True)


def main() -> int:
    return launcher.on_every_rank("benchmarks.exposed", parse(), run_rank)


if __name__ == "__main__":
    sys.exit(main())
