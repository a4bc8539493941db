"""``freescale plan --link-gbps X --gpus N``: step time, bubble and samples a second to expect on one's own histories."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.cost import CostModel
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.simulate.run import COOL, WARM, Result, simulate
from lightning_freescale.simulate.setting import FREESCALE, SPARSE_DIST, TORCHREC, Cluster, Model

STEPS = 8  # that count


def add_arguments(parser: argparse.ArgumentParser, numbers: Callable[[str], list[int]]) -> None:
    """Options of the forecast; ``numbers`` reads a list of positive integers."""
    group = parser.add_argument_group("expected step time, simulated", "needs --link-gbps and --gpus")
    group.add_argument("--link-gbps", type=float, metavar="X", help="gigabits a second that a GPU sends and receives")
    group.add_argument("--gpus", type=numbers, metavar="N,N", help="numbers of GPUs")
    group.add_argument(
        "--compute-ms", type=float, metavar="X", help="forward and backward of a step on a GPU (default: by FLOPs)"
    )
    group.add_argument(
        "--layers", type=int, metavar="N", default=8, help="of the HSTU whose FLOPs are counted (default: %(default)s)"
    )
    group.add_argument(
        "--tflops", type=float, metavar="X", default=100.0, help="that a GPU reaches on it (default: %(default)s)"
    )
    group.add_argument("--dim", type=int, metavar="N", help="width of the embeddings (default: that of the HSTU)")
    group.add_argument(
        "--collisions", type=float, metavar="X", default=12.0, help="percent of the rows (default: %(default)s)"
    )
    group.add_argument(
        "--latency-us", type=float, metavar="X", default=10.0, help="of an exchange (default: %(default)s)"
    )
    group.add_argument(
        "--nccl-slowdown", type=float, metavar="X", default=1.1, help="of compute beside NCCL (default: %(default)s)"
    )


def asked_for(args: argparse.Namespace) -> bool:
    """Whether there is anything to forecast."""
    if (args.link_gbps is None) != (args.gpus is None):
        missing = "--gpus" if args.gpus is None else "--link-gbps"
        raise ConfigurationError(f"{missing}: --link-gbps and --gpus are needed together")
    for name in ("link_gbps", "compute_ms", "tflops", "layers", "dim"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ConfigurationError(f"--{name.replace('_', '-')}: must be positive, not {value}")
    return args.gpus is not None


def model_of(lengths: NDArray[np.int64], args: argparse.Namespace) -> Model:
    """An HSTU whose attention costs as much as all else at ``crossover`` events, on histories like ``lengths [users]``."""
    shape = CostModel(linear=1.0, quadratic=1 / args.crossover)
    # CostModel.from_hstu of width D: 30 D^2 a layer and event, 7 D a layer and event squared.
    width = args.crossover * 7 / 30
    if args.compute_ms is None:
        seconds = 30 * args.layers * width**2 / (args.tflops * 1e12)
    else:
        seconds = args.compute_ms / 1e3 / (args.batch_size * shape(lengths).mean())
    cost = CostModel(linear=seconds, quadratic=seconds / args.crossover)
    weights = 5 * args.layers * width**2
    return Model(cost, 4.0 * (args.dim or round(width)), args.collisions / 100, dense_bytes=4 * weights)


def forecast(
    lengths: NDArray[np.int64], args: argparse.Namespace, draw: Callable[[int, int], list[NDArray[np.int64]]]
) -> list[Result]:
    """TorchRec and FreeScale on each number of GPUs.

    Args:
        lengths: ``[users]`` events of the histories.
        draw: gives some global batches, as an epoch would have them: ``draw(samples of each, seed)``.
    """
    model = model_of(lengths, args)
    results = []
    for gpus in args.gpus:
        cluster = Cluster(gpus, args.link_gbps / 8 * 1e9, args.latency_us / 1e6, args.nccl_slowdown)
        batches: list[NDArray[np.int64]] = []
        while len(batches) < WARM + STEPS + COOL:  # further epochs, if one is too short
            batches += draw(gpus * args.batch_size, args.seed + len(batches))
        results += [simulate(side, cluster, model, batches, args.seed) for side in (TORCHREC, SPARSE_DIST, FREESCALE)]
    return results


def table(args: argparse.Namespace, results: Sequence[Result]) -> str:
    lines = [
        f"simulated: {args.link_gbps:g} Gb/s a GPU, {args.collisions:g}% collisions, "
        f"{1e3 * results[0].compute:,.1f} ms of compute a step",
        "",
        f"{'GPUs':>6}  {'':<19} {'step ms':>9} {'straggler':>10} {'exposed':>8} {'bubble':>7} {'samples/s':>11} {'faster':>7}",
    ]
    first = results[0]
    for result in results:
        first = result if result.side == TORCHREC.name else first
        lines.append(
            f"{result.ranks if result is first else '':>6}  {result.side:<19} {1e3 * result.step:>9,.1f} "
            f"{result.parts['straggler'] / result.step:>10.1%} {result.exposed / result.step:>8.1%} "
            f"{result.bubble / result.step:>7.1%} {result.qps:>11,.0f} {first.step / result.step:>6.2f}x"
        )
    return "\n".join(
        [
            *lines,
            "",
            "bubble: time of a step in which a GPU does not compute, or only because transfers slow it. straggler: waiting for",
            "other ranks. exposed: waiting for rows, gradients or the AllReduce. Left out: look-ups, input, the training loop,",
            "and whatever makes equal work take unequal time.",
        ]
    )
