"""What each mode of balancing does to the loads of the ranks, for ``freescale plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.partition import PARTITIONS, loads, lower_bound
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.simulate.loads import assign_in_order

RANDOM = "random"  # no balancing: each rank keeps the samples that it draws
MODES = (RANDOM, *PARTITIONS)


@dataclass(frozen=True)
class BalanceOutcome:
    """One mode on one number of ranks: means over global batches, except ``tokens_max``.

    Attributes:
        ranks: number of ranks.
        mode: of balancing.
        straggler: mean idle time of the ranks over the time of a step.
        above_bound: load of the heaviest rank over the smallest load that the mode allows, minus 1.
        sparsity: share of padding if every local batch were padded to its longest history.
        tokens_mean: events on a rank.
        tokens_max: most events on any rank in any batch; the memory of a GPU must hold them.
        speedup: step time without balancing over step time with this mode, from the costs.
    """

    ranks: int
    mode: str
    straggler: float
    above_bound: float
    sparsity: float
    tokens_mean: float
    tokens_max: int
    speedup: float


def evaluate(
    lengths: NDArray[np.int64], ranks: int, batch_size: int, cost_model: CostModel, batches: int = 20, seed: int = 0
) -> list[BalanceOutcome]:
    """Evaluate all modes on the same global batches.

    Args:
        lengths: ``[users]`` events of the histories.
        ranks: number of ranks.
        batch_size: samples per rank.
        cost_model: cost of a sample.
        batches: number of global batches.
        seed: of their samples.
    """
    drawn = global_batches(lengths, ranks * batch_size, batches, seed)
    measured: dict[str, list[tuple[float, ...]]] = {mode: [] for mode in MODES}
    for batch in tqdm(drawn, desc=f"{ranks} ranks", unit="batch", delay=2, leave=False):
        for mode in MODES:
            measured[mode].append(_measure(batch, cost_model(batch), mode, ranks))
    columns = {mode: np.array(rows).T for mode, rows in measured.items()}
    return [
        BalanceOutcome(
            ranks,
            mode,
            straggler=float(idle.mean()),
            above_bound=float(above.mean()),
            sparsity=float(padding.mean()),
            tokens_mean=float(np.mean(drawn) * batch_size),
            tokens_max=int(tokens.max()),
            speedup=float(columns[RANDOM][0].sum() / slowest.sum()),
        )
        for mode, (slowest, idle, above, padding, tokens) in columns.items()
    ]


def _measure(lengths: NDArray[np.int64], costs: NDArray[np.float64], mode: str, ranks: int) -> tuple[float, ...]:
    """Largest load, straggler share, excess over the bound, share of padding and most tokens of one global batch."""
    partition = assign(mode, costs, ranks)
    load, tokens = loads(costs, partition, ranks), loads(lengths, partition, ranks)
    bound = lower_bound(costs, ranks, "variable" if mode == "variable" else "fixed")
    longest = np.zeros(ranks)
    np.maximum.at(longest, partition, lengths)
    padded = (np.bincount(partition, minlength=ranks) * longest).sum()
    return load.max(), 1 - load.mean() / load.max(), load.max() / bound - 1, 1 - tokens.sum() / padded, tokens.max()


def assign(mode: str, costs: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    """``[n]`` rank of each sample."""
    if mode == RANDOM:
        return assign_in_order(len(costs), ranks)
    return PARTITIONS[mode](costs, ranks)  # type: ignore[index]


def global_batches(lengths: NDArray[np.int64], size: int, count: int, seed: int) -> list[NDArray[np.int64]]:
    """At most ``count`` global batches of ``size`` lengths.

    They are the first batches of a shuffled epoch. If the users do not fill one batch, samples are drawn with replacement.
    """
    rng = np.random.default_rng(seed)
    if len(lengths) < size:
        return [rng.choice(lengths, size) for _ in range(count)]
    order = rng.permutation(lengths)
    return [order[at : at + size] for at in range(0, len(order) - size + 1, size)][:count]


def draw_outcomes(
    path: Path,
    outcomes: Sequence[BalanceOutcome],
    lengths: NDArray[np.int64],
    model: CostModel,
    batch_size: int,
    seed: int,
) -> None:
    """Draw the straggler share by mode (left), and the loads of the ranks in one global batch (right).

    The right plot is for the first number of ranks.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("--plot: matplotlib is not installed (pip install matplotlib)") from error
    figure = Figure(figsize=(11, 4), layout="constrained")
    shares, bars = figure.subplots(1, 2)
    numbers = list(dict.fromkeys(outcome.ranks for outcome in outcomes))
    for at, mode in enumerate(MODES):
        own = [100 * outcome.straggler for outcome in outcomes if outcome.mode == mode]
        shares.bar(np.arange(len(numbers)) + (at - 1.5) * 0.2, own, width=0.2, label=mode)
    shares.set(xlabel="ranks", ylabel="straggler %", xticks=range(len(numbers)), xticklabels=numbers)
    shares.legend(frameon=False)
    (batch,) = global_batches(lengths, numbers[0] * batch_size, 1, seed)
    costs = model(batch)
    for at, mode in enumerate(MODES):
        load = loads(costs, assign(mode, costs, numbers[0]), numbers[0])
        bars.bar(np.arange(numbers[0]) + (at - 1.5) * 0.2, np.sort(load / load.mean()), width=0.2, label=mode)
    bars.axhline(1, color="black", linewidth=0.5)
    bars.set(
        xlabel=f"ranks of one global batch, sorted by load ({numbers[0]} x {batch_size} samples)",
        ylabel="load / mean load",
    )
    figure.savefig(path)
