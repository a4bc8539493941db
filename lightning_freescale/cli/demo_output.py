"""What the demo prints: its data and model, the results, and the comparison of two trainings."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor

import lightning_freescale as fs
from lightning_freescale.bubbles.analysis import Analysis, analyse
from lightning_freescale.bubbles.records import read_run
from lightning_freescale.cli import report
from lightning_freescale.models.metrics import popularity_hit_rate

ROUNDING = 1e-3  # relative: balancing changes the order of sums, and training amplifies the rounding from step to step
SAME_WORK = (
    0.05  # relative: both trainings do the same work; if its time differs more, another program used the machine
)


@dataclass(frozen=True)
class FinishedTraining:
    """The results of one training."""

    strategy: str
    trainer: pl.Trainer
    data: fs.SeqRecDataModule
    folder: str  # of its logs
    checkpoint: str
    losses: Tensor  # [steps], of the global batches
    samples_per_second: float


def introduction(
    data: fs.SeqRecDataModule, options: argparse.Namespace, trainer: pl.Trainer, strategy: str, first: bool
) -> str:
    """Data, model and trainer. The second training prints only the trainer."""
    line = f'Trainer  strategy="{strategy}", {trainer.world_size} x {trainer.strategy.root_device.type}\n'
    if not first:
        return f"\nThe same training again, with another strategy\n{line}"
    histories = data.histories
    median, longest = int(torch.from_numpy(histories.lengths).median()), int(histories.lengths.max())
    return (
        f"\nData     {options.data}: {histories.num_users:,} users, {histories.num_items:,} items, "
        f"{len(histories.items):,} events; the median history has {median} events, the longest {longest:,}\n"
        f"Model    HSTU with {options.layers} layers, {options.heads} heads and embeddings of width {options.embedding_dim}\n"
        f"{line}"
    )


def results(trainings: Sequence[FinishedTraining]) -> str:
    """A table of the figures of the last epoch, one column per training.

    For HR@10 and NDCG@10, the item of every user that validation holds out is ranked among all items.
    """
    data = trainings[0].data
    popular = popularity_hit_rate(torch.from_numpy(data.item_counts), torch.from_numpy(data.validation_targets))
    metrics = [{name: float(value) for name, value in one.trainer.callback_metrics.items()} for one in trainings]
    rows: list[tuple[str, list[float | None], str]] = [
        ("training loss, last step", [float(one.losses[-1]) if len(one.losses) else None for one in trainings], ".3f"),
        ("validation loss", [found.get("val/loss") for found in metrics], ".3f"),
        ("HR@10", [found.get("val/hr@10") for found in metrics], ".3f"),
        ("  popularity recommender", [popular] * len(trainings), ".3f"),
        ("NDCG@10", [found.get("val/ndcg@10") for found in metrics], ".3f"),
        ("samples/s", [one.samples_per_second for one in trainings], ".0f"),
    ]
    head = [["", *(one.strategy for one in trainings)]] if len(trainings) > 1 else []
    cells = [
        [name, *("-" if value is None else format(value, spec) for value in values)] for name, values, spec in rows
    ]
    return f"\n{report.table([*head, *cells])}\n"


def comparison(trainings: Sequence[FinishedTraining], page: Path) -> str:
    """The losses and bubbles of two trainings. Writes the page with every step to ``page``."""
    runs = [read_run(Path(one.folder)) for one in trainings]
    # How many steps are recorded depends on the load of the machine: compare the steps that both runs have.
    common = sorted(set(runs[0].indices) & set(runs[1].indices))
    first, second = analyses = [analyse(run.only(common)) for run in runs]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(report.page(analyses))
    losses = compare_losses(trainings[0].losses, trainings[1].losses)
    return (
        f"{losses}\n\n{report.compare(first, second)}\n\n{verdict(first, second)}\n\n"
        f"See every step:    {_short(str(page.resolve()))} (open it in a browser)"
    )


def compare_losses(first: Tensor, second: Tensor) -> str:
    """A sentence that says whether two trainings have the same losses ``[steps]``."""
    if len(first) != len(second):
        return f"The trainings took different numbers of steps, {len(first)} and {len(second)}."
    difference = float(((first - second).abs() / first.abs().clamp(min=1e-12)).max()) if len(first) else 0.0
    if difference == 0.0:
        return f"The losses of all {len(first)} steps are equal bit for bit."
    if difference <= ROUNDING:
        return (
            f"The losses of all {len(first)} steps are equal up to rounding: the largest relative difference is "
            f"{difference:.0e}."
        )
    return (
        f"The losses DIFFER: the largest relative difference is {difference:.1e}. Both strategies should give the same losses. "
        "Please report this."
    )


def verdict(first: Analysis, second: Analysis) -> str:
    """The change of the straggler wait and of the step time, and a warning if the machine seems to have disturbed the runs."""
    shares = [f"{one.summary['bubble/straggler']:.0%}" for one in (first, second)]
    text = (
        f"Straggler wait: {shares[0]} of the ranks' time in A, {shares[1]} in B. "
        f"Step time: {first.ms('wall'):.0f} ms in A, {second.ms('wall'):.0f} ms in B."
    )
    before, after = first.ms("useful"), second.ms("useful")
    if abs(after / before - 1) <= SAME_WORK and second.ms("wall") < first.ms("wall"):
        return text
    return (
        f"{text}\nBoth runs do the same useful work. It took {before:.0f} ms per step in A and {after:.0f} ms in B. Ranks on "
        "one machine compete\nfor its cores and memory with each other and with other programs, so times vary. Compare the "
        "shares of a step instead."
    )


def next_commands(log_dir: str, checkpoint: str) -> str:
    """What the user can do next."""
    lines = [f"See the curves:    {_command('tensorboard')} --logdir {log_dir}"]
    if checkpoint:
        lines.append(f"Export the model:  {_command('freescale')} export '{_short(checkpoint)}' hstu.pt")
    return "\n".join(lines)


def _command(name: str) -> str:
    """How to call a program of this Python environment from the user's shell."""
    program = Path(sys.executable).with_name(name)
    return name if shutil.which(name) == str(program) else _short(str(program))


def _short(path: str) -> str:
    """``path`` relative to the current folder, if it is inside of it."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
