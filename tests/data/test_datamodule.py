"""The data module with a real Trainer, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_freescale.data import Histories, SeqBatch, SeqRecDataModule
from lightning_freescale.runtime.errors import ConfigurationError, InputError
from tests.data.test_stream import HISTORIES, write
from tests.ranks import run_ranks


class Recorder(pl.LightningModule):
    """Trains one number, and records epoch, first timestamps and negatives of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.trained: list[tuple] = []
        self.validated: list[tuple] = []

    def training_step(self, batch: SeqBatch, batch_idx: int) -> Tensor:
        self.trained.append((self.current_epoch, *facts(batch)))
        return self.weight * batch.lengths.float().mean()

    def validation_step(self, batch: SeqBatch, batch_idx: int) -> None:
        assert batch.targets is not None
        self.validated.append((self.current_epoch, *facts(batch)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def facts(batch: SeqBatch) -> tuple:
    """Return the first timestamp of each history, which identifies the user, and the negatives."""
    starts = batch.history.offsets()[:-1]
    return tuple(batch.timestamps[starts].tolist()), tuple(batch.features["negatives"].values().tolist())


def fit(model: Recorder, data: Any, **options: Any) -> Recorder:
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, datamodule=data)
    return model


def module(cache: Path, data: Any = "synthetic", **options: Any) -> SeqRecDataModule:
    defaults = {"batch_size": 8, "max_history": 20, "num_negatives": 3, "cache_dir": cache, "synthetic": {"users": 50}}
    return SeqRecDataModule(data, **{**defaults, **options})


def _fit_as_rank(rank: int, cache: Path, data: Any, options: dict) -> tuple[list, list]:
    model = fit(Recorder(), module(cache, data, batch_size=4, **options), strategy="ddp", devices=2)
    return model.trained, model.validated


def users(steps: list[tuple], epoch: int) -> list[int]:
    return [time for number, times, _ in steps if number == epoch for time in times]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_two_ranks_share_the_data_of_one(tmp_path: Path, workers: int, streaming: bool) -> None:
    data = write(tmp_path / "users.parquet", HISTORIES) if streaming else "synthetic"
    options = {"streaming": streaming, "num_workers": workers}
    alone = fit(Recorder(), module(tmp_path / "cache", data, **options))
    ranks = run_ranks(_fit_as_rank, args=(tmp_path / "cache", data, options))
    samples = 53 if streaming else 50
    for epoch in range(2):
        for one, two in ((alone.trained, 0), (alone.validated, 1)):
            whole = users(one, epoch)
            shared = [users(rank[two], epoch) for rank in ranks]
            assert len(set(whole)) == len(whole) == samples
            assert set(shared[0]) | set(shared[1]) == set(whole)
            assert len(shared[0]) + len(shared[1]) == samples + streaming * samples % 2
    assert users(alone.trained, 0) != users(alone.trained, 1)
    negatives = [sorted(zip(times, _grouped(own), strict=True)) for _, times, own in alone.trained]
    assert not {pair for step in negatives[:7] for pair in step} & {pair for step in negatives[7:] for pair in step}
    shared_negatives = {
        (epoch, pair)
        for rank in ranks
        for epoch, times, own in rank[0]
        for pair in zip(times, _grouped(own), strict=True)
    }
    assert shared_negatives == {
        (epoch, pair) for epoch, times, own in alone.trained for pair in zip(times, _grouped(own), strict=True)
    }


def _grouped(negatives: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [negatives[at : at + 3] for at in range(0, len(negatives), 3)]


def test_table_sizes_are_known_without_a_trainer(tmp_path: Path) -> None:
    data = module(tmp_path, synthetic={"users": 30, "items": 77, "clusters": 7, "feature_sizes": {"action": 3}})
    assert data.num_items == 77
    assert data.feature_sizes == {"action": 3}
    batch = next(iter(data.train_dataloader()))
    assert batch.num_samples == 8
    assert len(data.train_dataloader()) == 4


def test_histories_as_data(tmp_path: Path) -> None:
    data = module(tmp_path, HISTORIES)
    assert data.histories is HISTORIES
    assert not any(tmp_path.iterdir())
    assert fit(Recorder(), data, max_epochs=1).trained


@pytest.mark.parametrize("held_out", [1, 2])
def test_the_last_events_are_held_out(tmp_path: Path, held_out: int) -> None:
    """Histories and targets of the three loaders equal plain slices of each user's events."""
    data = module(tmp_path, HISTORIES, held_out=held_out, shuffle=False, balance="off")
    users = [part.tolist() for part in np.split(HISTORIES.items, HISTORIES.offsets[1:-1])]
    loaders = {"train": data.train_dataloader(), "val": data.val_dataloader()}
    back = {"train": held_out, "val": held_out, "test": 1}
    if held_out == 2:
        loaders["test"] = data.test_dataloader()
    else:
        with pytest.raises(ConfigurationError, match="held_out: 1 leaves no event for the test"):
            data.test_dataloader()
    for stage, loader in loaders.items():
        batches = list(loader)
        histories = [row.tolist() for batch in batches for row in batch.history.to_dense()]
        assert histories == [own[: -back[stage]][-20:] for own in users], stage
        if stage != "train":
            assert [int(target) for batch in batches for target in batch.targets] == [
                own[-back[stage]] for own in users
            ]
    assert data.validation_targets.tolist() == [own[-held_out] for own in users]


def test_popularity_negatives(tmp_path: Path) -> None:
    data = module(tmp_path, negatives="popularity", num_negatives=200)
    drawn = np.concatenate([batch.features["negatives"].values().numpy() for batch in data.train_dataloader()])
    counts = data.item_counts
    assert counts[drawn].min() > 0
    assert np.corrcoef(np.bincount(drawn, minlength=1000), counts)[0, 1] > 0.9


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("options", "steps"),
    [({"overfit_batches": 2}, 2), ({"fast_dev_run": 2}, 2), ({"limit_train_batches": 3}, 3), ({"max_steps": 4}, 4)],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_trainer_options(tmp_path: Path, options: dict, steps: int, streaming: bool) -> None:
    data = write(tmp_path / "users.parquet", HISTORIES) if streaming else "synthetic"
    model = fit(Recorder(), module(tmp_path / "cache", data, streaming=streaming), **options)
    assert len([step for step in model.trained if step[0] == 0]) == steps
    if "overfit_batches" in options:
        assert users(model.trained, 0) == users(model.trained, 1)
        assert len(users(model.trained, 0)) == 16


def test_a_resume_at_a_later_epoch_shuffles_as_without_an_interruption(tmp_path: Path) -> None:
    whole = fit(Recorder(), module(tmp_path, num_workers=1), max_epochs=3)
    trainer_options = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    first = pl.Trainer(max_epochs=2, enable_checkpointing=False, num_sanity_val_steps=0, **trainer_options)
    first.fit(Recorder(), datamodule=module(tmp_path, num_workers=1))
    first.save_checkpoint(tmp_path / "two.ckpt")
    resumed = Recorder()
    second = pl.Trainer(max_epochs=3, enable_checkpointing=False, num_sanity_val_steps=0, **trainer_options)
    second.fit(resumed, datamodule=module(tmp_path, num_workers=1), ckpt_path=tmp_path / "two.ckpt")
    assert resumed.trained == [step for step in whole.trained if step[0] == 2]


def test_movielens(movielens: Path, tmp_path: Path) -> None:
    data = module(tmp_path, movielens, feature_columns=("rating",), batch_size=64)
    assert (data.num_items, data.feature_sizes) == (9066, {"rating": 10})
    seen = 0
    for batch in data.train_dataloader():
        batch.validate()
        seen += batch.num_samples
    assert seen == data.histories.num_users == 671


def _bad_file_as_rank(rank: int, path: Path, cache: Path) -> str:
    with pytest.raises(InputError) as raised:
        _ = module(cache, path).num_items
    return str(raised.value)


def test_every_rank_reports_a_bad_file(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("userId,movieId,timestamp\n1,,1\n")
    messages = run_ranks(_bad_file_as_rank, world=3, args=(tmp_path / "d.csv", tmp_path / "cache"))
    assert all("movieId is null at row 0" in message for message in messages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: must be at least 1, not 0"),
        ({"max_history": 1}, "max_history: must be at least 2, not 1"),
        ({"min_events": 2}, "min_events: must be at least 3, not 2"),
        ({"seed": -1}, "seed: must be at least 0, not -1"),
        ({"held_out": 3}, "held_out: must be 1 or 2, not 3"),
        ({"feature_columns": "rating"}, "feature_columns: must be a sequence of names, not 'rating'"),
    ],
)
def test_bad_settings(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        module(tmp_path, **options)


def _too_many_ranks(rank: int, cache: Path) -> str:
    with pytest.raises(InputError) as raised:
        fit(Recorder(), module(cache, synthetic={"users": 1}), strategy="ddp", devices=2)
    return str(raised.value)


def test_fewer_samples_than_ranks(tmp_path: Path) -> None:
    messages = run_ranks(_too_many_ranks, args=(tmp_path,))
    assert all("1 samples for 2 ranks" in message for message in messages)
    assert isinstance(module(tmp_path, synthetic={"users": 1}).histories, Histories)
