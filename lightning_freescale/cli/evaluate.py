"""``freescale evaluate``: ranks the last event of every user of a file, by a trained model and by popularity."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.cli import trained_model
from lightning_freescale.cli.recommender_files import add_event_arguments
from lightning_freescale.data.samples import MIN_EVENTS
from lightning_freescale.models.evaluation import ranking_metrics, without_seen
from lightning_freescale.models.metrics import target_ranks

LIST_LENGTH = 10  # items of a list, for the coverage


class PopularityComparison(pl.Callback):
    """What the model's own metrics do not say: the same metrics of the most popular items, and the coverage of the lists.

    Args:
        item_counts: ``[num_items]``, how often each item occurs before the evaluated events.
        filter_seen: leave the items of the user's history out of the lists.
    """

    def __init__(self, item_counts: Tensor, filter_seen: bool):
        self.counts, self.filter_seen = item_counts.float(), filter_seen
        self.popularity = ranking_metrics()
        self.recommended: set[int] = set()
        self.popular: set[int] = set()

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.on_predict_start()

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: SeqBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.recommended.update(pl_module.recommend(batch).rows.flatten().tolist())
        batch = batch.to(torch.device("cpu"))
        assert batch.targets is not None
        rows = torch.arange(len(self.counts))
        scores = self.counts.repeat(batch.num_samples, 1)
        if self.filter_seen:
            scores = without_seen(scores, rows, batch)
        self.popular.update(scores.topk(min(LIST_LENGTH, len(rows)), dim=1).indices.flatten().tolist())
        ranks = target_ranks(scores, self.counts[batch.targets], batch.targets[:, None] == rows)
        for metric in self.popularity.values():
            metric.update(ranks)  # type: ignore[operator]

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.on_predict_end()


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run ``freescale evaluate``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Rank the last event of every user among the whole catalogue, by the events before it. The table shows the "
        "model and, beside it, the most popular items of the file.",
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint of an HSTU (a file or a folder)")
    parser.add_argument("data", metavar="DATA", help="a Parquet, CSV or text file of events")
    parser.add_argument("--batch-size", type=int, metavar="N", default=64, help="users per step (default: %(default)s)")
    parser.add_argument("--keep-seen", action="store_true", help="also rank items that are in the user's history")
    add_event_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    filter_seen = not options.keep_seen
    checkpoint = trained_model.read_checkpoint(options.checkpoint)
    model = trained_model.load_model(options.checkpoint, checkpoint, filter_seen)
    model.hparams.update(max_eval_items=model.num_items, top_k=min(LIST_LENGTH, model.num_items))
    data = trained_model.read_data(options.checkpoint, checkpoint, options, MIN_EVENTS)
    comparison = PopularityComparison(torch.from_numpy(data.histories.training_item_counts(held_out=1)), filter_seen)
    # The progress bar writes to standard output, where JSON must stand alone.
    trainer = trained_model.make_trainer(callbacks=[comparison], enable_progress_bar=not options.json)
    (found,) = trainer.test(model, datamodule=data, verbose=False)
    rows = {
        name: {"model": found[f"test/{name}"], "popularity": metric.compute().item()}  # type: ignore[operator]
        for name, metric in comparison.popularity.items()
    }
    shares = [len(items - {-1}) / model.num_items for items in (comparison.recommended, comparison.popular)]
    rows[f"coverage@{LIST_LENGTH}"] = dict(zip(("model", "popularity"), shares, strict=True))
    if options.json:
        print(json.dumps({"users": data.histories.num_users, "items": model.num_items, "metrics": rows}, indent=2))
    else:
        print(_table(rows, data.histories.num_users, model.num_items))
    return 0


def _table(rows: dict[str, dict[str, float]], users: int, items: int) -> str:
    lines = [
        f"The last event of {users:,} users, ranked among {items:,} items",
        "",
        f"{'':12}{'model':>10}{'popularity':>12}",
    ]
    lines += [f"{name:12}{row['model']:>10.4f}{row['popularity']:>12.4f}" for name, row in rows.items()]
    return "\n".join(lines)
