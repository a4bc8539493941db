"""Model quality: losses and metrics of an HSTU trained with freescale_sync and with freescale from the same seed.

    python -m benchmarks.quality [FILE ...] [--quick] [--json] [--output FILE] [--plot FILE.png] [--ranks N] [--device cpu|cuda]

The data are synthetic histories and the given files of events. ``freescale`` uses all techniques: balanced batches, the
prioritized exchange and, on CUDA, the SM-free transport. Both strategies train on the same global batches. Losses are
means over the predicted positions of the global batch. HR@10 and NDCG@10 rank the held-out item of every user among all
items. The noise of a metric is the standard error of its mean over the users, at most ``sqrt(m (1 - m) / users)``. A
third run, ``freescale_sync`` from another seed, shows how much the seed alone changes the metrics. A fourth run, also with
``freescale_sync``, trains a SASRec of the same size instead of HSTU, to show how good the model itself is.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.gpu_cluster import launcher
from benchmarks.harness.variant_names import FREESCALE, SYNC

RESEEDED = "freescale_sync, another seed"
SASREC = "SASRec"
METRICS = {"HR@10": "val/hr@10", "NDCG@10": "val/ndcg@10"}
Figures = dict[str, Any]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="a tiny model, few users, one epoch, only the first two runs")
    parser.add_argument("data", nargs="*", type=Path, metavar="FILE", help="Parquet, CSV or text file of events")
    parser.add_argument("--plot", type=Path, help="draw the curves of both strategies into this PNG file")
    launcher.add_options(parser)
    parser.add_argument("--epochs", type=int, help="default 8")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    arguments = parser.parse_args(argv)
    for path in arguments.data:
        if not path.exists():
            parser.error(f"{path}: no such file")
    launcher.resolve_options(arguments)
    arguments.epochs = arguments.epochs or (1 if arguments.quick else 8)
    return arguments


# ---- on every rank -----------------------------------------------------------------------------------------------------------
def run_rank(arguments: argparse.Namespace) -> int:
    """Train as one of the ranks; rank 0 reports."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rank = int(os.environ["RANK"])  # read now: Lightning deletes the variables
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result only
        figures = measure(arguments, rank)
    if rank == 0:
        publish(figures, arguments)
    return 0


def measure(arguments: argparse.Namespace, rank: int) -> Figures:
    """Train all variants on all data. Every rank returns the same figures."""
    import torch.distributed as dist

    from benchmarks.harness.rank_setup import silence_libraries

    silence_libraries()
    shape = _shape(arguments)
    figures: Figures = {
        "parameters": {"ranks": arguments.ranks, "device": arguments.device, "epochs": arguments.epochs} | shape,
        "versions": report.versions(),
        "machine": _machine(arguments.device),
        "data": {},
    }
    for source in ("synthetic", *arguments.data):
        name = source if isinstance(source, str) else source.name
        runs = {
            variant: train(arguments, shape, source, variant)
            for variant in ((SYNC, FREESCALE) if arguments.quick else (SYNC, FREESCALE, RESEEDED, SASREC))
        }
        figures["data"][name] = compare(runs)
        if rank == 0:
            print(f"{name}: done", file=sys.stderr, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return figures


def _shape(arguments: argparse.Namespace) -> Figures:
    """Sizes of the model, the batches and the synthetic data."""
    if arguments.quick:
        model = {"embedding_dim": 16, "num_layers": 1, "num_heads": 2}
        return {"model": model, "batch_size": 16, "max_history": 32, "negatives": 8, "synthetic": {"users": 120}}
    if arguments.device == "cpu":
        model = {"embedding_dim": 32, "num_layers": 2, "num_heads": 2}
        return {"model": model, "batch_size": 32, "max_history": 128, "negatives": 32, "synthetic": {"users": 2000}}
    model = {"embedding_dim": 128, "num_layers": 4, "num_heads": 4}
    synthetic = {"users": 16_000, "items": 10_000, "mean_length": 200.0, "sigma": 1.2}
    return {"model": model, "batch_size": 64, "max_history": 2048, "negatives": 64, "synthetic": synthetic}


def train(arguments: argparse.Namespace, shape: Figures, source: str | Path, variant: str) -> Figures:
    """One training. Its losses and metrics are equal on every rank. A collective."""
    import lightning.pytorch as pl
    import torch
    import torch.distributed as dist

    import lightning_freescale as fs
    from benchmarks.harness.gpu_cluster import reserved_sms
    from benchmarks.harness.lightning_trainer import plain_trainer
    from benchmarks.harness.training.bubble import global_losses
    from benchmarks.harness.training.sasrec import SASRec
    from benchmarks.harness.training.step_timestamps import StepTimestamps, TimestampedHSTU

    cuda, everything = arguments.device == "cuda", variant == FREESCALE
    reserved_sms.use(torch.device(arguments.device))
    os.environ["WORLD_SIZE"] = str(arguments.ranks)  # Lightning deletes it at the end of every fit
    pl.seed_everything(arguments.seed + (variant == RESEEDED), verbose=False)
    data = fs.SeqRecDataModule(
        source,
        batch_size=shape["batch_size"],
        max_history=shape["max_history"],
        balance="fixed" if everything else "off",
        num_negatives=shape["negatives"],
        seed=arguments.seed,
        synthetic=shape["synthetic"],
        cache_dir=Path(tempfile.gettempdir()) / "freescale-quality",
    )
    kind = SASRec if variant == SASREC else TimestampedHSTU
    model = kind(data.num_items, max_history=shape["max_history"], **shape["model"])
    model.timestamps = StepTimestamps(torch.device("cuda" if cuda else "cpu"))
    options: Figures = {"balance": "off", "prioritize": everything}
    if everything and cuda:
        options["transport"] = "host"
    epochs = _epoch_metrics()
    trainer = plain_trainer(
        fs.FreeScaleStrategy(timeout=120.0, **options),
        arguments.ranks,
        cuda,
        max_epochs=arguments.epochs,
        callbacks=[epochs],
        limit_val_batches=1.0,
    )
    trainer.fit(model, datamodule=data)
    mine = [torch.stack(values).double().tolist() for values in (model.timestamps.losses, model.timestamps.predicted)]
    ranks: list[Any] = [None] * arguments.ranks
    dist.all_gather_object(ranks, mine)
    losses, predicted = (np.array([rank[part] for rank in ranks]) for part in (0, 1))
    result = {
        "users": int(data.histories.num_users),
        "items": data.num_items,
        "losses": global_losses(losses, predicted),
        "metrics": {name: [epoch[key] for epoch in epochs.metrics] for name, key in METRICS.items()},
        "prioritized": epochs.prioritized,
    }
    del trainer, model
    gc.collect()
    return result


def _epoch_metrics() -> Any:
    """A callback that keeps the metrics of every epoch. It is made in a function: the launcher does not import Lightning."""
    import lightning.pytorch as pl

    class EpochMetrics(pl.Callback):
        def __init__(self) -> None:
            self.metrics: list[dict[str, float]] = []
            self.prioritized = False

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            schedule = trainer.strategy.schedule
            self.prioritized = schedule is not None and bool(schedule.prioritized)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self.metrics.append({key: float(trainer.callback_metrics[key]) for key in METRICS.values()})

    return EpochMetrics()


def _machine(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} cores ({platform.machine()})"


# ---- the figures -------------------------------------------------------------------------------------------------------------
def compare(runs: dict[str, Figures]) -> Figures:
    """The curves of all variants, and their differences next to the noise of the metrics."""
    sync, freescale = runs[SYNC], runs[FREESCALE]
    apart = [abs(a - b) for a, b in zip(sync["losses"], freescale["losses"], strict=True)]
    metrics = {}
    for name in METRICS:
        last = {variant: run["metrics"][name][-1] for variant, run in runs.items()}
        mean = last[SYNC]
        noise = math.sqrt(mean * (1 - mean) / sync["users"])
        difference = last[FREESCALE] - last[SYNC]
        metrics[name] = {
            "last": last,
            "difference": difference,
            "noise": noise,
            "within_noise": abs(difference) <= noise,
        }
    return {
        "users": sync["users"],
        "items": sync["items"],
        "steps": len(sync["losses"]),
        "loss": {
            "first": sync["losses"][0],
            "last": {variant: run["losses"][-1] for variant, run in runs.items()},
            "apart": {"first_step": apart[0], "mean": sum(apart) / len(apart), "largest": max(apart)},
        },
        "metrics": metrics,
        "prioritized": {variant: run["prioritized"] for variant, run in runs.items()},
        "curves": {variant: {"losses": run["losses"], "metrics": run["metrics"]} for variant, run in runs.items()},
    }


def publish(figures: Figures, arguments: argparse.Namespace) -> None:
    """Print the result; write it to ``--output`` and draw ``--plot``."""
    text = _in_lines(report.head("quality") | _rounded(figures))
    if arguments.output:
        arguments.output.write_text(text + "\n")
    if arguments.plot:
        draw(figures, arguments.plot)
    print(text if arguments.json else describe(figures), flush=True)


def _rounded(value: Any) -> Any:
    """Round all floats to the seven digits of a float32."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _in_lines(figures: Figures) -> str:
    """JSON with every curve on one line."""
    return re.sub(r"\[[^][{}\"]*\]", lambda found: " ".join(found[0].split()), json.dumps(figures, indent=1))


def describe(figures: Figures) -> str:
    """The figures as a table."""
    parameters = figures["parameters"]
    lines = [f"Model quality, {parameters['epochs']} epochs, {parameters['ranks']} ranks, {figures['machine']}"]
    for name, found in figures["data"].items():
        apart = found["loss"]["apart"]
        lines += ["", f"{name}: {found['users']:,} users, {found['items']:,} items, {found['steps']} steps"]
        lines.append(f"  {'':30}{'last loss':>10}" + "".join(f"{metric:>10}" for metric in METRICS))
        for variant, loss in found["loss"]["last"].items():
            last = "".join(f"{found['metrics'][metric]['last'][variant]:10.4f}" for metric in METRICS)
            lines.append(f"  {variant:30}{loss:10.4f}{last}")
        for label, key in (("difference", "difference"), ("noise (standard error)", "noise")):
            lines.append(f"  {label:40}" + "".join(f"{found['metrics'][metric][key]:10.4f}" for metric in METRICS))
        lines.append(
            f"  difference of the losses: {apart['first_step']:.1e} in the first step, mean {apart['mean']:.1e}, "
            f"largest {apart['largest']:.1e}"
        )
        outside = [metric for metric in METRICS if not found["metrics"][metric]["within_noise"]]
        lines.append(f"  metrics: {'equal within noise' if not outside else 'DIFFERENT: ' + ', '.join(outside)}")
    return "\n".join(lines)


def draw(figures: Figures, path: Path) -> None:
    """Draw losses and metrics of both strategies; one row of plots per data set."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = figures["data"]
    figure, axes = pyplot.subplots(len(data), 2, figsize=(11, 3.2 * len(data)), squeeze=False, layout="constrained")
    styles: dict[str, Figures] = {
        SYNC: {"color": "tab:gray", "linewidth": 3, "alpha": 0.6},
        FREESCALE: {"color": "tab:blue", "linewidth": 1},
    }
    for (left, right), (name, found) in zip(axes, data.items(), strict=True):
        for variant, style in styles.items():
            curves = found["curves"][variant]
            left.plot(curves["losses"], label=variant, **style)
            epochs = range(1, 1 + len(curves["metrics"]["HR@10"]))
            for (metric, values), line in zip(curves["metrics"].items(), ("-", "--"), strict=True):
                right.plot(epochs, values, linestyle=line, label=f"{metric}, {variant}", **style)
        left.set(title=f"{name}: training loss", xlabel="step")
        right.set(title=f"{name}: HR@10, NDCG@10", xlabel="epoch")
        left.legend()
        right.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    arguments = parse()
    if "RANK" in os.environ:
        return run_rank(arguments)
    gpu = arguments.device == "cuda"
    return launcher.launch("benchmarks.quality", sys.argv[1:], arguments.ranks, gpu=gpu, timeout=1800)


if __name__ == "__main__":
    sys.exit(main())
