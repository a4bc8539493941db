"""The paper's figures: padding, stragglers and collisions computed from lengths and ids, the others drawn from stored results.

    python -m benchmarks.figures [--quick] [--json] [--output FILE] [--folder FOLDER] [--data FILE ...]

The histories are log-normal (mu 7.3, sigma 1.2, at most 21,000 events) over 1,000,000 items of Zipf popularity, and the
given files of events (CSV, text, Parquet). A history of L events costs L + L^2 / 2048. If a file has fewer users than a
global batch has samples, stragglers are computed from users drawn with repetition, and collisions at this batch size
are left out, because its batches must contain different users. The images go to ``--folder``. Those of measured figures
are drawn from ``benchmarks/results``.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import figure_drawing, report
from benchmarks.harness.figure_drawing import BATCH, RANKS
from benchmarks.harness.results import load_results
from lightning_freescale.balance.planner import default_cost_model
from lightning_freescale.cli.balance_outcomes import RANDOM, evaluate
from lightning_freescale.data.histories import Histories
from lightning_freescale.data.preprocess import preprocess
from lightning_freescale.data.sources import open_source
from lightning_freescale.data.synthetic import Synthetic

Row = dict[str, Any]

LONGEST = 21_000
SYNTHETIC = "log-normal"
MODES = {RANDOM: "off", "zigzag": "zigzag", "fixed": "fixed"}


@dataclass(frozen=True)
class FigureData:
    """A named data set.

    Attributes:
        lengths: ``[users]`` events, not truncated.
        histories: the items, for collisions.
    """

    name: str
    lengths: NDArray[np.int64]
    histories: Histories


def synthetic(quick: bool) -> FigureData:
    """Log-normal histories."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(7.3, 1.2, 100_000 if quick else 700_000).clip(1, LONGEST).astype(np.int64)
    options: dict[str, Any] = {"users": 400 if quick else 4000, "items": 1_000_000, "sigma": 1.2}
    return FigureData(SYNTHETIC, lengths, Synthetic(mean_length=float(np.exp(7.3 + 0.72)), **options).generate())


def read(path: Path) -> FigureData:
    """The histories of a file of events."""
    with tempfile.TemporaryDirectory() as folder:
        preprocess(open_source(path), Path(folder))
        mapped = Histories.load(Path(folder))
        items, offsets = np.array(mapped.items), np.array(mapped.offsets)
        names, users = np.array(mapped.item_ids), np.array(mapped.user_ids)
    return FigureData(path.stem, np.diff(offsets), Histories(items, np.zeros_like(items), offsets, names, users))


# ---- padding and stragglers --------------------------------------------------------------------------------------------
def measure(data: FigureData, longest: int, ranks: int, batch_size: int, batches: int) -> list[Row]:
    """Padding and stragglers of the global batches, one row per balancing mode."""
    lengths = np.minimum(data.lengths, longest)
    return [
        {
            "data": data.name,
            "max history": longest,
            "ranks": ranks,
            "samples a rank": batch_size,
            "balance": MODES[found.mode],
            "sparsity %": 100 * found.sparsity,
            "straggler %": 100 * found.straggler,
            "above bound %": 100 * found.above_bound,
        }
        for found in evaluate(lengths, ranks, batch_size, default_cost_model(), batches)
        if found.mode in MODES
    ]


def by_history(data: FigureData, batches: int) -> list[Row]:
    """Padding and stragglers for several longest histories."""
    most = int(data.lengths.max())
    caps = [2**power for power in range(7, 15) if 2**power < most]
    if data.name == SYNTHETIC:
        caps = [cap for cap in caps if cap >= 1024]
    return [row for cap in [*caps, most] for row in measure(data, cap, RANKS, BATCH, batches)]


def by_batch_size(data: FigureData, batches: int) -> list[Row]:
    """Padding and stragglers for several batch sizes."""
    sizes = [2**power for power in range(3, 10)]
    return [row for size in sizes for row in measure(data, int(data.lengths.max()), RANKS, size, batches)]


def by_ranks(data: FigureData, batches: int) -> list[Row]:
    """Padding and stragglers for several numbers of ranks."""
    worlds = [2**power for power in range(3, 10)]
    return [row for world in worlds for row in measure(data, int(data.lengths.max()), world, BATCH, batches)]


# ---- collisions --------------------------------------------------------------------------------------------------------
def collisions(data: FigureData, pairs: int) -> list[Row]:
    """Share of the ids of a global batch whose rows the previous batch uses, too. Users are in random order, each once."""
    histories, rows = data.histories, []
    order = np.random.default_rng(0).permutation(histories.num_users)
    for size in (2**power for power in range(4, 12)):
        batches = [order[at : at + size] for at in range(0, len(order) - size + 1, size)][: pairs + 1]
        if len(batches) < 2:
            break
        ids = [np.concatenate([_items(histories, user) for user in batch]) for batch in batches]
        rates = [float(np.isin(second, first).mean()) for first, second in pairwise(ids)]
        rows.append(
            {
                "data": data.name,
                "items": histories.num_items,
                "samples": size,
                "collisions %": 100 * float(np.mean(rates)),
                "ids": int(np.mean([len(part) for part in ids])),
            }
        )
    return rows


def _items(histories: Histories, user: int) -> NDArray[np.int64]:
    return histories.items[histories.offsets[user] : histories.offsets[user + 1]]


def main() -> None:
    parser = report.make_parser(__doc__, quick="fewer batches and histories")
    parser.add_argument("--data", type=Path, nargs="+", default=[], metavar="FILE", help="files of events")
    parser.add_argument("--folder", type=Path, help="folder for the images; without it none are drawn")
    arguments = parser.parse_args()
    batches, pairs = (2, 1) if arguments.quick else (10, 4)
    data = [synthetic(arguments.quick), *map(read, arguments.data)]
    results: dict[str, list[Row]] = {
        "history": [row for part in data for row in by_history(part, batches)],
        "batch size": [row for part in data for row in by_batch_size(part, batches)],
        "ranks": [row for part in data for row in by_ranks(part, batches)],
        "collisions": [row for part in data for row in collisions(part, pairs)],
    }
    if arguments.folder:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        stored = load_results()
        figure_drawing.draw_history(results["history"], arguments.folder / "figure_history.png")
        figure_drawing.draw_size_and_ranks(
            results["batch size"], results["ranks"], arguments.folder / "figure_batch_and_ranks.png"
        )
        figure_drawing.draw_collisions(results["collisions"], arguments.folder / "figure_collisions.png")
        figure_drawing.draw_kernels(stored["balance_cpu"]["kernels"], arguments.folder / "figure_kernels.png")
        figure_drawing.draw_exposed(stored, arguments.folder / "figure_exposed.png")
        figure_drawing.draw_sm_free(stored, arguments.folder / "figure_sm_free.png")
        figure_drawing.draw_end_to_end(stored, arguments.folder / "figure_end_to_end.png")
    titles = {
        "Padding and stragglers by longest history (Fig. 2, 8a)": results["history"],
        "Stragglers by samples per rank (Fig. 8b)": results["batch size"],
        "Stragglers by number of ranks (Fig. 8c)": results["ranks"],
        "Collisions of consecutive global batches (Fig. 3)": results["collisions"],
    }
    report.publish(arguments, report.head("figures") | results, titles)


if __name__ == "__main__":
    main()
