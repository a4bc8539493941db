"""``freescale plan``: what balancing would win on one's own data. Reads the lengths of the histories, trains nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tqdm.auto import tqdm

from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.partition import PARTITIONS, loads, lower_bound
from lightning_freescale.balance.planner import CROSSOVER
from lightning_freescale.data.columns import Place, ids, list_lengths
from lightning_freescale.data.dataset import MIN_EVENTS
from lightning_freescale.data.sources import ParquetSource, Source, open_source, readable
from lightning_freescale.data.synthetic import Synthetic
from lightning_freescale.runtime.errors import ConfigurationError, InputError
from lightning_freescale.simulate import forecast

RANDOM = "random"  # no balancing: each rank takes its samples as they come
MODES = (RANDOM, *PARTITIONS)


# ---- lengths ----------------------------------------------------------------------------------------------------------
def read_lengths(source: Source) -> NDArray[np.int64]:
    """``[users]`` events of each user, in no particular order."""
    counts, merged = [], 0
    progress = tqdm(_users(source), desc=f"reading {source.path.name}", unit=" events", unit_scale=True, delay=2)
    for users, events in progress:
        counts.append(pa.table({"user": users, "events": pa.array(events)}))
        progress.update(int(events.sum()) - 1)
        if (rows := sum(map(len, counts))) > 2 * merged + (1 << 22):  # keep about one row per user
            counts, merged = [_merge(counts)], rows
    if not counts:
        raise InputError(f"{source.path}: holds no events")
    return np.asarray(_merge(counts)["events"])


def _merge(counts: list[pa.Table]) -> pa.Table:
    events = pa.concat_tables(counts, promote_options="permissive").group_by("user").aggregate([("events", "sum")])
    return events.rename_columns(["user", "events"])


def _users(source: Source) -> Iterator[tuple[pa.Array, NDArray[np.int64]]]:
    """Users and how many events each has here; a user may come several times."""
    if not isinstance(source, ParquetSource):
        for events in source.events():
            yield events.users, np.ones(len(events.users), dtype=np.int64)
        return
    first_row = 0
    for path in source.files():
        with readable(path), pq.ParquetFile(path) as file:
            roles, per_user = source.roles(file, path)
            columns = [name for name in (roles.user, roles.item if per_user else None) if name is not None]
            place = Place(path)
            for batch in file.iter_batches(columns=columns):
                rows = np.arange(first_row, first_row + len(batch))
                users = pa.array(rows) if roles.user is None else ids(batch[roles.user], roles.user, place)
                yield users, list_lengths(batch[roles.item], roles.item, place) if per_user else np.ones_like(rows)
                first_row += len(batch)
                place = Place(path, place.first_row + len(batch))


# ---- what a mode does to the ranks ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Outcome:
    """One mode on one number of ranks, means over global batches unless said otherwise.

    Attributes:
        ranks: their number.
        mode: of balancing.
        straggler: mean idle time of the ranks over the time of a step.
        above_bound: load of the heaviest rank over the least that the mode allows, less 1.
        sparsity: share of padding if every local batch were padded to its longest history.
        tokens_mean: events on a rank.
        tokens_max: most events on any rank in any batch: what memory must hold.
        speedup: time of a step at random over that with this mode, by cost.
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
) -> list[Outcome]:
    """All modes on the same ``batches`` global batches of ``ranks * batch_size`` samples out of ``lengths [users]``."""
    drawn = global_batches(lengths, ranks * batch_size, batches, seed)
    measured: dict[str, list[tuple[float, ...]]] = {mode: [] for mode in MODES}
    for batch in tqdm(drawn, desc=f"{ranks} ranks", unit="batch", delay=2, leave=False):
        for mode in MODES:
            measured[mode].append(_measure(batch, cost_model(batch), mode, ranks))
    columns = {mode: np.array(rows).T for mode, rows in measured.items()}
    return [
        Outcome(
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
    """Of one global batch: heaviest load, straggler share, excess over the bound, share of padding, most tokens."""
    plan = assign(mode, costs, ranks)
    load, tokens = loads(costs, plan, ranks), loads(lengths, plan, ranks)
    bound = lower_bound(costs, ranks, "variable" if mode == "variable" else "fixed")
    longest = np.zeros(ranks)
    np.maximum.at(longest, plan, lengths)
    padded = (np.bincount(plan, minlength=ranks) * longest).sum()
    return load.max(), 1 - load.mean() / load.max(), load.max() / bound - 1, 1 - tokens.sum() / padded, tokens.max()


def assign(mode: str, costs: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    """``[n]`` rank of each sample."""
    if mode == RANDOM:
        return np.arange(len(costs)) * ranks // len(costs)
    return PARTITIONS[mode](costs, ranks)  # type: ignore[index]


def global_batches(lengths: NDArray[np.int64], size: int, count: int, seed: int) -> list[NDArray[np.int64]]:
    """At most ``count`` batches of ``size`` lengths, as an epoch would have them; with repetition if one alone needs it."""
    rng = np.random.default_rng(seed)
    if len(lengths) < size:
        return [rng.choice(lengths, size) for _ in range(count)]
    order = rng.permutation(lengths)
    return [order[at : at + size] for at in range(0, len(order) - size + 1, size)][:count]


# ---- the command ------------------------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Tell what balancing would win, before a line of code is changed: reads only the lengths of the histories and deals "
        "them to ranks, at random and balanced."
    )
    parser.add_argument("data", metavar="DATA", help="Parquet, CSV or text file of events, or 'synthetic'")
    parser.add_argument(
        "--ranks", type=_numbers, metavar="N,N", default="8,64,256", help="numbers of ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=_positive, metavar="N", default=128, help="samples per rank (default: %(default)s)"
    )
    parser.add_argument(
        "--max-history",
        type=_positive,
        metavar="N",
        default=21_000,
        help="events kept of a history (default: %(default)s)",
    )
    parser.add_argument(
        "--crossover",
        type=_positive,
        metavar="N",
        default=CROSSOVER,
        help="a history of L events costs L + L^2 / N; about 4.3 times the width of an HSTU (default: %(default)s)",
    )
    parser.add_argument(
        "--batches", type=_positive, metavar="N", default=20, help="global batches to try (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of the shuffling (default: %(default)s)")
    parser.add_argument("--format", choices=["parquet", "csv", "text"], help="of DATA (default: told by its suffix)")
    parser.add_argument(
        "--column", action="append", default=[], metavar="ROLE=NAME", help="column of a role: user, item or time"
    )
    parser.add_argument(
        "--synthetic",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the synthetic data, e.g. users=5000",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the figures, e.g. out.png")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    forecast.add_arguments(parser, _numbers)


def run(args: argparse.Namespace) -> int:
    """Print what each mode does on each number of ranks and, if asked for, what steps to expect."""
    with_forecast = forecast.asked_for(args)
    lengths = training_lengths(args)
    model = CostModel(linear=1.0, quadratic=1 / args.crossover)
    outcomes = []
    for ranks in args.ranks:
        if len(lengths) < ranks * args.batch_size:
            note = f"{len(lengths):,} users do not fill a batch of {ranks} x {args.batch_size}: drawn with repetition"
            print(note, file=sys.stderr)
        outcomes += evaluate(lengths, ranks, args.batch_size, model, args.batches, args.seed)
    if args.plot:
        draw(args.plot, outcomes, lengths, model, args.batch_size, args.seed)
    expected = []
    if with_forecast:
        expected = forecast.forecast(
            lengths, args, lambda size, seed: global_batches(lengths, size, args.batches, seed)
        )
    if args.json:
        rows = [asdict(outcome) for outcome in outcomes]
        simulated = [asdict(result) | {"bubble": result.bubble} for result in expected]
        print(json.dumps({"balance": rows, "simulated": simulated} if with_forecast else rows, indent=2))
    else:
        print(report(args, lengths, outcomes))
        if with_forecast:
            print(f"\n{forecast.table(args, expected)}")
    return 0


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    parser = argparse.ArgumentParser(prog=prog)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def training_lengths(args: argparse.Namespace) -> NDArray[np.int64]:
    """``[users]`` history lengths in training: the last event is held out, the latest are kept."""
    if args.data == "synthetic":
        pairs = list(map(_pair, args.synthetic))
        try:
            options: dict[str, Any] = {key: json.loads(value) for key, value in pairs}
            events = Synthetic(**options).generate().lengths
        except (TypeError, json.JSONDecodeError) as error:
            raise ConfigurationError(f"--synthetic: {error}") from error
    else:
        columns = dict(map(_pair, args.column))
        events = read_lengths(open_source(args.data, args.format, **({"columns": columns} if columns else {})))
    kept = events[events >= MIN_EVENTS]
    if not len(kept):
        raise InputError(f"{args.data}: none of {len(events)} users has {MIN_EVENTS} events or more")
    return np.minimum(kept - 1, args.max_history)


def report(args: argparse.Namespace, lengths: NDArray[np.int64], outcomes: Sequence[Outcome]) -> str:
    p50, p99 = np.percentile(lengths, [50, 99])
    lines = [
        f"{len(lengths):,} histories of {lengths.mean():,.0f} events in the mean, {p50:,.0f} in the median, {p99:,.0f} at "
        f"the 99th percentile, {lengths.max():,} at most",
        f"{args.batch_size} samples per rank; a history of L events costs L + L^2 / {args.crossover}",
        "",
        f"{'ranks':>6}  {'balance':<9} {'straggler':>9} {'above bound':>12} {'padding':>8} {'tokens/rank':>12} "
        f"{'at most':>10} {'faster':>7}",
    ]
    for outcome in outcomes:
        lines.append(
            f"{outcome.ranks if outcome.mode == RANDOM else '':>6}  {outcome.mode:<9} {outcome.straggler:>9.2%} "
            f"{outcome.above_bound:>12.2%} {outcome.sparsity:>8.1%} {outcome.tokens_mean:>12,.0f} "
            f"{outcome.tokens_max:>10,} {outcome.speedup:>6.2f}x"
        )
    return "\n".join(
        [
            *lines,
            "",
            "straggler: mean idle time of the ranks over the time of a step. above bound: the heaviest rank over the least",
            "possible. padding: if every local batch were padded. faster: steps, by cost, without communication.",
        ]
    )


def draw(
    path: Path,
    outcomes: Sequence[Outcome],
    lengths: NDArray[np.int64],
    model: CostModel,
    batch_size: int,
    seed: int,
) -> None:
    """Left: straggler share by mode. Right: the loads of the ranks in one global batch, at the first number of ranks."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("--plot: needs matplotlib, which is not installed") from error
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
    bars.set(xlabel=f"ranks, by load, of one global batch ({numbers[0]} x {batch_size})", ylabel="load over the mean")
    figure.savefig(path)


# ---- options ----------------------------------------------------------------------------------------------------------
def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"{text!r}: must be KEY=VALUE")
    return key, value
