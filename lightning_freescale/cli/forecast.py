"""Simulated step times of ``freescale plan --link-gbps X --gpus N``, for TorchRec and FreeScale on the user's histories."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.cost import CostModel
from lightning_freescale.models.personal_tokens import attention_work
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.simulate.run import FIRST_STEPS, LAST_STEPS, SimulationResult, simulate
from lightning_freescale.simulate.scenario import FREESCALE, SPARSE_DIST, TORCHREC, Cluster, ModelProfile

COUNTED_STEPS = 8


def add_arguments(parser: argparse.ArgumentParser, numbers: Callable[[str], list[int]]) -> None:
    """Add the options of the simulation; ``numbers`` parses a list of positive integers."""
    group = parser.add_argument_group(
        "simulated step time",
        "Needs --link-gbps and --gpus. Simulates training steps of TorchRec and FreeScale.",
    )
    group.add_argument(
        "--link-gbps", type=float, metavar="X", help="bandwidth of the link of a GPU, in gigabits per second"
    )
    group.add_argument("--gpus", type=numbers, metavar="N,N", help="numbers of GPUs")
    group.add_argument(
        "--compute-ms",
        type=float,
        metavar="X",
        help="time of forward and backward of a local batch on a GPU, in ms (default: from --layers and --tflops)",
    )
    group.add_argument("--layers", type=int, metavar="N", default=8, help="layers of the HSTU (default: %(default)s)")
    group.add_argument(
        "--tflops", type=float, metavar="X", default=100.0, help="TFLOP/s that a GPU reaches (default: %(default)s)"
    )
    group.add_argument("--dim", type=int, metavar="N", help="width of the embeddings (default: the width of the HSTU)")
    group.add_argument(
        "--collisions",
        type=float,
        metavar="X",
        default=12.0,
        help="percentage of the rows of a batch that the previous batch uses too (default: %(default)s)",
    )
    group.add_argument(
        "--latency-us",
        type=float,
        metavar="X",
        default=10.0,
        help="latency of an exchange, in us (default: %(default)s)",
    )
    group.add_argument(
        "--nccl-slowdown",
        type=float,
        metavar="X",
        default=1.1,
        help="time of compute while NCCL uses SMs, over its time without NCCL (default: %(default)s)",
    )


def is_requested(args: argparse.Namespace) -> bool:
    """Whether to simulate.

    Raises:
        ConfigurationError: if an option is missing or not positive.
    """
    if (args.link_gbps is None) != (args.gpus is None):
        missing = "--gpus" if args.gpus is None else "--link-gbps"
        raise ConfigurationError(f"{missing}: is missing; --link-gbps and --gpus are needed together")
    for name in ("link_gbps", "compute_ms", "tflops", "layers", "dim"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ConfigurationError(f"--{name.replace('_', '-')}: must be positive, not {value}")
    return args.gpus is not None


def model_profile(lengths: NDArray[np.int64], args: argparse.Namespace) -> ModelProfile:
    """An HSTU whose attention costs as much as its other operations at ``args.crossover`` events.

    Args:
        lengths: ``[users]`` events of the histories. With ``--compute-ms``, they scale the cost.
        args: options of the command.
    """
    squares = attention_work(args.personal_tokens)
    shape = CostModel(linear=1.0, quadratic=1 / args.crossover, squares=squares)
    # CostModel.from_hstu, for width D and per layer: 30 D^2 FLOPs per event and 7 D FLOPs per event squared.
    width = args.crossover * 7 / 30
    if args.compute_ms is None:
        seconds = 30 * args.layers * width**2 / (args.tflops * 1e12)
    else:
        seconds = args.compute_ms / 1e3 / (args.batch_size * shape(lengths).mean())
    cost = CostModel(linear=seconds, quadratic=seconds / args.crossover, squares=squares)
    weights = 5 * args.layers * width**2
    return ModelProfile(cost, 4.0 * (args.dim or round(width)), args.collisions / 100, dense_bytes=4 * weights)


def simulate_variants(
    lengths: NDArray[np.int64], args: argparse.Namespace, draw: Callable[[int, int], list[NDArray[np.int64]]]
) -> list[SimulationResult]:
    """Simulate TorchRec, TorchRec SparseDist and FreeScale on each number of GPUs.

    Args:
        lengths: ``[users]`` events of the histories.
        args: options of the command.
        draw: ``draw(samples per global batch, seed)`` returns the lengths of some global batches of an epoch.
    """
    model = model_profile(lengths, args)
    results = []
    for gpus in args.gpus:
        cluster = Cluster(gpus, args.link_gbps / 8 * 1e9, args.latency_us / 1e6, args.nccl_slowdown)
        batches: list[NDArray[np.int64]] = []
        while len(batches) < FIRST_STEPS + COUNTED_STEPS + LAST_STEPS:  # use more epochs if one is too short
            batches += draw(gpus * args.batch_size, args.seed + len(batches))
        results += [
            simulate(variant, cluster, model, batches, args.seed) for variant in (TORCHREC, SPARSE_DIST, FREESCALE)
        ]
    return results


def table(args: argparse.Namespace, results: Sequence[SimulationResult]) -> str:
    """The results as text, with a legend."""
    lines = [
        f"simulated: link of {args.link_gbps:g} Gb/s per GPU, {args.collisions:g}% collisions, "
        f"{1e3 * results[0].compute:,.1f} ms of compute per step",
        "",
        f"{'GPUs':>6}  {'':<19} {'step ms':>9} {'straggler':>10} {'exposed':>8} {'bubble':>7} {'samples/s':>11} {'speedup':>8}",
    ]
    first = results[0]
    for result in results:
        first = result if result.variant == TORCHREC.name else first
        lines.append(
            f"{result.ranks if result is first else '':>6}  {result.variant:<19} {1e3 * result.step:>9,.1f} "
            f"{result.parts['straggler'] / result.step:>10.1%} {result.exposed / result.step:>8.1%} "
            f"{result.bubble / result.step:>7.1%} {result.qps:>11,.0f} {first.step / result.step:>7.2f}x"
        )
    return "\n".join(
        [
            *lines,
            "",
            "straggler  share of a step in which a GPU waits for other ranks",
            "exposed    share of a step in which a GPU waits for rows, gradients or the AllReduce",
            "bubble     share of a step in which a GPU does no useful work: both of the above, and the time by which NCCL",
            "           slows down compute",
            "speedup    of a step compared with the first row of the same number of GPUs",
            "The simulation leaves out table lookups, the input, the training loop, and differences in speed between GPUs.",
        ]
    )
