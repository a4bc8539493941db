"""``freescale plan``: how much faster balancing would make training on the user's data. It reads history lengths only."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.planner import CROSSOVER_LENGTH
from lightning_freescale.cli import forecast, id_plan
from lightning_freescale.cli.balance_outcomes import RANDOM, BalanceOutcome, draw_outcomes, evaluate, global_batches
from lightning_freescale.cli.event_file_options import add_file_options, columns_of
from lightning_freescale.cli.history_lengths import read_lengths
from lightning_freescale.data.histories import Histories
from lightning_freescale.data.samples import MIN_EVENTS
from lightning_freescale.data.sources import Source, open_source
from lightning_freescale.data.synthetic import Synthetic
from lightning_freescale.models.personal_tokens import PersonalTokens, attention_work
from lightning_freescale.runtime.errors import ConfigurationError, InputError


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run ``freescale plan``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Show how much time ranks lose to stragglers on your data, with and without balancing. The command reads "
        "only the lengths of the histories and assigns them to ranks. It trains nothing and needs no GPU.",
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``freescale plan``."""
    parser.add_argument("data", metavar="DATA", help="a Parquet, CSV or text file of events, or 'synthetic'")
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
        help="keep the latest N events of a history (default: %(default)s)",
    )
    parser.add_argument(
        "--crossover",
        type=_positive,
        metavar="N",
        default=CROSSOVER_LENGTH,
        help="the cost of a history of L events is L + L^2 / N; for an HSTU, N is about 4.3 times its width "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--personal-tokens",
        type=_personal_tokens,
        metavar="KEY=N,KEY=N",
        help="options of PersonalTokens, for example tokens=4,recent=256,refresh=64,segments=1: in the cost of a history, the "
        "squared lengths of its sequences take the place of L^2",
    )
    parser.add_argument(
        "--batches",
        type=_positive,
        metavar="N",
        default=20,
        help="number of global batches to try (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the shuffling (default: %(default)s)")
    add_file_options(parser, default_columns="by their usual names")
    parser.add_argument(
        "--synthetic",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the synthetic data, for example users=5000 (can be repeated)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the results, for example to out.png")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    forecast.add_arguments(parser, _numbers)
    id_plan.add_arguments(parser, _positive)


def run(args: argparse.Namespace) -> int:
    """Print the outcome of each mode of balancing and, with ``--link-gbps`` and ``--gpus``, the simulated step times.

    With ``--ids`` print tables for the ids instead.
    """
    if args.ids:
        return plan_ids(args)
    with_forecast = forecast.is_requested(args)
    lengths = training_lengths(args)
    model = CostModel(linear=1.0, quadratic=1 / args.crossover, squares=attention_work(args.personal_tokens))
    outcomes = []
    for ranks in args.ranks:
        if len(lengths) < ranks * args.batch_size:
            note = (
                f"note: {len(lengths):,} users do not fill a global batch of {ranks} x {args.batch_size} samples, so samples "
                "are drawn with repetition"
            )
            print(note, file=sys.stderr)
        outcomes += evaluate(lengths, ranks, args.batch_size, model, args.batches, args.seed)
    if args.plot:
        draw_outcomes(args.plot, outcomes, lengths, model, args.batch_size, args.seed)
    results = []
    if with_forecast:
        results = forecast.simulate_variants(
            lengths, args, lambda size, seed: global_batches(lengths, size, args.batches, seed)
        )
    if args.json:
        rows = [asdict(outcome) for outcome in outcomes]
        simulated = [result.as_json() for result in results]
        print(json.dumps({"balance": rows, "simulated": simulated} if with_forecast else rows, indent=2))
    else:
        print(table(args, lengths, outcomes))
        if with_forecast:
            print(f"\n{forecast.table(args, results)}")
    return 0


def plan_ids(args: argparse.Namespace) -> int:
    """Print how the ids come and go, and tables for them."""
    items = id_plan.items_of(_generate(args)) if args.data == "synthetic" else id_plan.read_items(_open(args))
    drift = id_plan.id_drift(*items, args.events_per_step)
    print(json.dumps(asdict(drift), indent=2) if args.json else id_plan.table(args, drift))
    return 0


def _generate(args: argparse.Namespace) -> Histories:
    pairs = list(map(_pair, args.synthetic))
    try:
        options: dict[str, Any] = {key: json.loads(value) for key, value in pairs}
        return Synthetic(**options).generate()
    except (TypeError, json.JSONDecodeError) as error:
        raise ConfigurationError(f"--synthetic: {error}") from error


def _open(args: argparse.Namespace) -> Source:
    columns = columns_of(args)
    return open_source(args.data, args.format, **({"columns": columns} if columns else {}))


def training_lengths(args: argparse.Namespace) -> NDArray[np.int64]:
    """``[users]`` history lengths in training: the last event of a user is held out, and at most ``max_history`` are kept."""
    events = _generate(args).lengths if args.data == "synthetic" else read_lengths(_open(args))
    kept = events[events >= MIN_EVENTS]
    if not len(kept):
        raise InputError(
            f"{args.data}: none of {len(events)} users has {MIN_EVENTS} events or more, which training needs"
        )
    return np.minimum(kept - 1, args.max_history)


def table(args: argparse.Namespace, lengths: NDArray[np.int64], outcomes: Sequence[BalanceOutcome]) -> str:
    """The outcomes as text, with a legend."""
    p50, p99 = np.percentile(lengths, [50, 99])
    cut = args.personal_tokens
    squares = f"L^2 / {args.crossover}"
    if cut is not None:
        squares = f"S / {args.crossover}, where S is the sum of the squared lengths of its sequences with {cut}"
    lines = [
        f"{len(lengths):,} histories of {lengths.mean():,.0f} events on average, median {p50:,.0f}, 99th percentile "
        f"{p99:,.0f}, maximum {lengths.max():,}",
        f"{args.batch_size} samples per rank; the cost of a history of L events is L + {squares}",
        "",
        f"{'ranks':>6}  {'balance':<9} {'straggler':>9} {'above bound':>12} {'padding':>8} {'tokens/rank':>12} "
        f"{'max tokens':>11} {'speedup':>8}",
    ]
    for outcome in outcomes:
        lines.append(
            f"{outcome.ranks if outcome.mode == RANDOM else '':>6}  {outcome.mode:<9} {outcome.straggler:>9.2%} "
            f"{outcome.above_bound:>12.2%} {outcome.sparsity:>8.1%} {outcome.tokens_mean:>12,.0f} "
            f"{outcome.tokens_max:>11,} {outcome.speedup:>7.2f}x"
        )
    return "\n".join(
        [
            *lines,
            "",
            "straggler    share of a step in which a rank, on average, waits for the slowest rank",
            "above bound  by how much the heaviest rank exceeds the smallest load that is possible",
            "padding      share of padding if every local batch were padded to its longest history",
            "tokens/rank  events of a local batch on average; max tokens: the most events of any local batch",
            "speedup      of a step compared with random, from the costs and without communication",
        ]
    )


# ---- types of options -------------------------------------------------------------------------------------------------
def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _personal_tokens(text: str) -> PersonalTokens:
    try:
        options: dict[str, Any] = {key: int(value) for key, value in map(_pair, text.split(","))}
        return PersonalTokens(**options)
    except (TypeError, ValueError, ConfigurationError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"{text!r}: must be KEY=VALUE")
    return key, value
