"""Small trained models with their checkpoints and exported files, which the tests of inference and serving share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np

import lightning_freescale as fs
from lightning_freescale.cli.main import main
from lightning_freescale.models import HSTU, FeedForward, PersonalTokens
from lightning_freescale.models.recommendation import Recommendations

USERS, ITEMS, MAX_HISTORY = 12, 40, 16
CUT = PersonalTokens(tokens=2, recent=4, refresh=3, segments=2)


class Trained(NamedTuple):
    """A file of events, a checkpoint, the exported model, and what ``trainer.predict`` recommends with TorchRec's tables."""

    events: Path
    checkpoint: Path
    exported: Path
    predicted: dict[str, list[tuple[Any, float]]]


def write_events(path: Path, text_ids: bool, times: bool) -> Path:
    """User ``u`` has ``3 + 2 u`` events. Items and genres repeat in an irregular order."""
    rows = ["user_id,item_id,genre" + ",timestamp" * times]
    for user in range(USERS):
        for at in range(3 + 2 * user):
            item = (user * 11 + at * (3 if user % 2 else 7)) % ITEMS
            name = f"film-{item}é" if text_ids else f"{item * 10}"
            time = f",{1_000_000 + 5000 * user + 97 * at * at}" if times else ""
            rows.append(f"user-{user},{name},{'drama' if item % 3 else 'comedy'}{time}")
    path.write_text("\n".join(rows) + "\n")
    return path


def train(
    folder: Path,
    *,
    tokens: bool = False,
    experts: bool = False,
    text_ids: bool = True,
    times: bool = True,
    seed: int = 1,
) -> Trained:
    """Train for two steps in this process, save, export and predict, with lists of 5 items without seen ones."""
    pl.seed_everything(seed, verbose=False)
    events = write_events(folder / "events.csv", text_ids, times)
    data = fs.SeqRecDataModule(
        events,
        batch_size=5,
        max_history=MAX_HISTORY,
        num_negatives=4,
        feature_columns=["genre"],
        columns={} if times else {"time": None},
        cache_dir=folder / "cache",
    )
    model = HSTU(
        data.num_items,
        embedding_dim=16,
        max_history=MAX_HISTORY,
        feature_sizes=data.feature_sizes,
        personalization=CUT if tokens else None,
        feed_forward=FeedForward(experts=3, top_k=2) if experts else None,
        filter_seen=True,
        top_k=5,
        table_std=None,
        lr=0.05,
    )
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", max_steps=2, limit_val_batches=0, enable_model_summary=False, **options)
    trainer.fit(model, datamodule=data)
    checkpoint, exported = folder / "trained.ckpt", folder / "model.pt"
    trainer.save_checkpoint(checkpoint)
    predicted: list[Recommendations] = trainer.predict(model, datamodule=data)  # type: ignore[assignment]
    assert main(["export", "--inference", str(checkpoint), str(exported)]) == 0
    return Trained(events, checkpoint, exported, by_user(predicted))


def by_user(parts: list[Recommendations]) -> dict[str, list[tuple[Any, float]]]:
    """The items and scores of each user."""
    found = {}
    for part in parts:
        for user, items, scores in zip(part.users, part.items, part.scores, strict=True):
            kept = np.isfinite(scores)
            found[str(user)] = list(zip(items[kept].tolist(), scores[kept].tolist(), strict=True))
    return found
