"""Draws ``docs/timeline.png``: one step of ``freescale_sync`` and the same step of ``freescale``, as the monitor recorded them.

    python -m benchmarks.timeline_picture [--quick] [--json] [--output FILE] [--device cpu|cuda] [--picture FILE]

Both strategies train through the Trainer on the same histories of very different lengths. The drawn step is the one whose time
under ``freescale_sync`` is the median.

cpu: an emulated device and network around the real exchange. The emulated compute time is proportional to the events of a rank's
batch and uses no CPU, so ranks do not need a core each. Rows and gradients are real and travel over
``harness/emulation/realtime_network.py``.

cuda: an HSTU in bfloat16 on one GPU as a cluster of nodes. Rows travel over NCCL, and over the transport that
``freescale`` chooses.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from typing_extensions import override

import lightning_freescale as fs
from benchmarks.harness import rank_setup, report
from benchmarks.harness.emulation.network import new_emulated_group
from benchmarks.harness.emulation.realtime_network import RealtimeGroup, RealtimeWire
from benchmarks.harness.gpu_cluster import launcher, reserved_sms
from benchmarks.harness.gpu_cluster.rank_process import ClusterFailed
from benchmarks.harness.variant_names import FREESCALE, SYNC
from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES
from lightning_freescale.bubbles import picture
from lightning_freescale.bubbles.analysis import Analysis, analyse
from lightning_freescale.bubbles.attribution import PARTS
from lightning_freescale.bubbles.records import RecordedRun, read_run
from lightning_freescale.embedding.exchange_mode import ExchangeMode
from lightning_freescale.models import HSTU

STRATEGIES = (SYNC, FREESCALE)
WARM_UP = 6  # steps before the counted ones
# Emulated times of a batch of average length, in seconds. They are long compared with disturbances by a busy host.
FORWARD, BACKWARD, EXCHANGE = 0.15, 0.30, 0.10
SAMPLES_PER_RANK, MEAN_EVENTS, DIM = 8, 100.0, 64


# ---- emulated --------------------------------------------------------------------------------------------------------------
class _TimedIdentity(torch.autograd.Function):
    """The identity. Its forward and its backward take the given times."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class EmulatedRecommender(pl.LightningModule):
    """Real rows, a small real dense part, and emulated compute time proportional to the events of the batch."""

    loss_reduction = "token"

    def __init__(self, num_items: int):
        super().__init__()
        table = EmbeddingConfig(
            name="item", embedding_dim=DIM, num_embeddings=num_items, feature_names=[HISTORY, NEGATIVES]
        )
        self.embedding = EmbeddingCollection(tables=[table])
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 4)

    def training_step(self, batch: fs.SeqBatch, batch_idx: int) -> Tensor:
        rows = self.embedding(batch.features)[HISTORY].values()
        share = len(rows) / (SAMPLES_PER_RANK * MEAN_EVENTS)
        return self.last(_TimedIdentity.apply(self.first(rows), FORWARD * share, BACKWARD * share)).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)

    def cost_coefficients(self) -> tuple[float, float, float]:
        return 1.0, 0.0, 0.0


class EmulatedNetworkPaths(ExchangeMode):
    """Exchange paths over the emulated network, for rows, ids and gradients."""

    def __init__(self, wire: RealtimeWire, prioritize: bool):
        super().__init__(prioritize, "auto", timedelta(seconds=60))
        self._wire = wire

    @override
    def table_group(self) -> Any:
        return new_emulated_group(self._wire, 0, RealtimeGroup)

    @override
    def new_group(self, priority: Any, beside_compute: bool = False) -> Any:
        return new_emulated_group(self._wire, 0 if priority == "high" else 1, RealtimeGroup)


# ---- on a rank -------------------------------------------------------------------------------------------------------------
def train(name: str, arguments: argparse.Namespace) -> None:
    """Train with one strategy; the monitor records every step."""
    pl.seed_everything(1, verbose=False)
    cuda, ranks = arguments.device == "cuda", arguments.ranks
    reserved_sms.use(torch.device(arguments.device))
    mean, longest, size = (2000.0, 8192, 16) if cuda else (MEAN_EVENTS, 512, SAMPLES_PER_RANK)
    chosen: dict[str, Any] = {"balance": "off", "prioritize": False} if name == SYNC else {"prioritize": True}
    data = fs.SeqRecDataModule(
        batch_size=size,
        max_history=longest,
        balance=chosen.get("balance", "fixed"),
        num_negatives=32 if cuda else 1,
        cache_dir=arguments.folder / "cache",
        synthetic={
            "users": size * ranks * (arguments.steps + 4),
            "items": 100_000,
            "mean_length": mean,
            "max_length": longest,
        },
    )
    model: pl.LightningModule
    strategy = fs.FreeScaleStrategy(**chosen)
    if cuda:
        model = HSTU(data.num_items, embedding_dim=256, num_layers=4, num_heads=4, max_history=longest)
    else:
        off_rank = SAMPLES_PER_RANK * MEAN_EVENTS * DIM * 4 * (ranks - 1) / ranks
        strategy._exchange_mode = EmulatedNetworkPaths(RealtimeWire(off_rank / EXCHANGE), chosen["prioritize"])
        model = EmulatedRecommender(data.num_items)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cuda" if cuda else "cpu",
        devices=1,
        num_nodes=ranks,
        precision="bf16-mixed" if cuda else "32-true",
        callbacks=[fs.BubbleMonitor(every=1, image_every=0)],
        logger=CSVLogger(arguments.folder, name="", version=name),
        log_every_n_steps=2 * arguments.steps,  # the monitor gathers its records at the end only
        max_steps=arguments.steps,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)


def run_rank(arguments: argparse.Namespace) -> None:
    """Train with both strategies as one of the ranks."""
    rank_setup.silence_libraries()
    torch.set_num_threads(1)
    for name in STRATEGIES:
        train(name, arguments)


# ---- the picture -----------------------------------------------------------------------------------------------------------
def title(name: str, step: Analysis) -> str:
    """The title of a panel, with the figures of its step."""
    wall, bubble = step.ms("wall"), step.ms("bubble")
    parts = sorted(((step.ms(part) / wall, part.replace("_", " ")) for part in PARTS), reverse=True)
    most = ", ".join(f"{part} {share:.0%}" for share, part in parts if share >= 0.02)
    return f'strategy="{name}":  {wall:.0f} ms, {bubble / wall:.0%} of it bubble' + (f" ({most})" if most else "")


def draw(runs: Sequence[RecordedRun], index: int, path: Path) -> None:
    from PIL import Image

    panels = [
        (title(name, analyse(run.only([index]))), run.step(index)) for name, run in zip(STRATEGIES, runs, strict=True)
    ]
    image = Image.fromarray(picture.draw_panels(panels, width=1500, scale=1.6))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.quantize(64).save(path, optimize=True)


def summary(analysis: Analysis) -> dict[str, float]:
    """Means over the counted steps: milliseconds, and values of the monitor's tags."""
    means = {f"{name}_ms": round(analysis.ms(name), 3) for name in ("wall", "useful", "bubble", *PARTS)}
    tags = ("balance/imbalance", "comm/overlap")
    return means | {tag: round(analysis.summary[tag], 4) for tag in tags}


def show(arguments: argparse.Namespace) -> None:
    """Draw the image and publish the figures of the recorded runs."""
    runs = [read_run(arguments.folder / name) for name in STRATEGIES]
    counted = [index for index in runs[0].indices if index >= WARM_UP and index in set(runs[1].indices)]
    runs = [run.only(counted) for run in runs]
    analyses = [analyse(run) for run in runs]
    index = analyses[0].typical
    draw(runs, index, arguments.picture)
    machine = f"emulated device and link on {os.cpu_count()} cores ({platform.machine()})"
    if arguments.device == "cuda":
        machine = runs[0].headers[0]["device"]
    means = {name: summary(analysis) for name, analysis in zip(STRATEGIES, analyses, strict=True)}
    figures = report.head("timeline_picture", machine) | {
        "ranks": arguments.ranks,
        "steps": len(counted),
        "drawn": index,
        "collision_rate": round(analyses[1].summary["embedding/collision_rate"], 4),
        "results": means,
    }
    rows = [{"mean": figure, **{name: means[name][figure] for name in STRATEGIES}} for figure in means[SYNC]]
    heading = (
        f"{machine}, {arguments.ranks} ranks, means of {len(counted)} steps; {arguments.picture} shows step {index}"
    )
    report.publish(arguments, figures, {heading: rows})


def launch(arguments: argparse.Namespace) -> int:
    """Start this script on every rank, then draw what they recorded."""
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = Path(folder)
        words = {
            "--device": arguments.device,
            "--ranks": arguments.ranks,
            "--steps": arguments.steps,
            "--folder": folder,
        }
        argv = ["-m", "benchmarks.timeline_picture", *(str(word) for pair in words.items() for word in pair)]
        try:
            launcher.run(
                arguments.ranks, argv, timeout=300, gpu=arguments.device == "cuda", env={"OMP_NUM_THREADS": "1"}
            )
        except ClusterFailed as failure:
            print(failure, file=sys.stderr)
            return failure.status
        show(arguments)
    return 0


def main() -> int:
    parser = report.make_parser(__doc__, quick="five steps")
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path(__file__).resolve().parents[1] / "docs" / "timeline.png",
        help="PNG file to draw; default docs/timeline.png",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--ranks", type=int, default=4, help="default 4")
    parser.add_argument("--steps", type=int, help="training steps; default 18")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # where the ranks write their records
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or (WARM_UP + 5 if arguments.quick else 18)
    arguments.device = arguments.device or ("cuda" if launcher.has_gpu() else "cpu")
    if "RANK" not in os.environ:
        return launch(arguments)
    run_rank(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
