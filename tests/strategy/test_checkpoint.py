"""Checkpoints: exact resume, any number of ranks, atomic, and clear about damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

import lightning_freescale as fs
from lightning_freescale import FreeScaleStrategy
from lightning_freescale.strategy.checkpoints import folder as checkpoint
from tests import toy
from tests.ranks import run_ranks
from tests.slow import slow


def optimizer_state(strategy: FreeScaleStrategy) -> dict[str, Tensor]:
    """The state of the tables' optimizer, put together from all ranks. A collective."""
    assert strategy._sharded is not None
    local = strategy._sharded.fused_optimizer.state_dict()["state"]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    pieces = {
        f"{key}.{name}": [
            (list(s.metadata.shard_offsets), list(s.metadata.shard_sizes), s.tensor.clone())
            for s in value.local_shards()
        ]
        for key, entry in local.items()
        for name, value in entry.items()
        if hasattr(value, "local_shards")
    }
    torch.distributed.all_gather_object(gathered, pieces)
    whole: dict[str, dict[tuple, Tensor]] = {}
    for part in gathered:
        for key, shards in part.items():
            for offsets, _, tensor in shards:
                whole.setdefault(key, {})[tuple(offsets)] = tensor
    return {key: torch.cat([tensor for _, tensor in sorted(shards.items())]) for key, shards in whole.items()}


def fit(
    rank: int,
    world: int,
    folder: str | None = None,
    resume: str | None = None,
    options: dict[str, Any] | None = None,
    strategy_options: dict[str, Any] | None = None,
    every: int = 5,
    kind: type[toy.Model] = toy.Model,
) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    model = kind()
    defaults = {
        "sharding": "row_wise",
        "embedding_optimizer": {"optimizer": "adam", "lr": 0.1},  # two states of each row, and a count of steps
        "prioritize": True,
        "balance": "off",
    }
    strategy = FreeScaleStrategy(**(defaults | (strategy_options or {})))
    if folder is not None:
        save = pl.callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=every, save_top_k=-1)
        options = {**(options or {}), "enable_checkpointing": True, "callbacks": [save]}
    trainer = toy.trainer(strategy, world, **(options or {}))
    trainer.fit(model, toy.loader(44), toy.loader(8, shuffle=False), ckpt_path=resume)  # 11 steps an epoch
    return {
        "seen": model.seen,
        "losses": model.losses,
        "weights": toy.weights(model),
        "optimizer": optimizer_state(strategy),
        "steps": trainer.global_step,
    }


class ReadsSteppingBatches(toy.Model):
    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class Adagrad(toy.Model):
    """Its optimizer has a state of every parameter from the beginning, that of the tables among them."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


# ---- resume ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("at", "kind"),
    [("epoch=0-step=5", toy.Model), ("epoch=0-step=10", ReadsSteppingBatches), ("epoch=1-step=15", toy.Model)],
)
def test_resume_gives_the_batches_and_losses_of_the_uninterrupted_run(
    full_run: tuple[Path, list[dict]], at: str, kind: type[toy.Model]
) -> None:
    folder, full = full_run
    assert (folder / f"{at}.ckpt").is_file() == folder.name.startswith("file")
    resumed = run_ranks(fit, args=(2, None, str(folder / f"{at}.ckpt"), None, None, 5, kind))
    done = int(at.split("=")[-1])
    for whole, rest in zip(full, resumed, strict=True):
        assert rest["seen"] == whole["seen"][done:]
        assert rest["losses"] == whole["losses"][done:]
        assert toy.same(rest["weights"], whole["weights"])
        assert toy.same(rest["optimizer"], whole["optimizer"])


def test_an_optimizer_that_makes_its_state_in_advance_is_saved_and_resumed(tmp_path: Path) -> None:
    full = run_ranks(fit, args=(2, str(tmp_path), None, None, None, 5, Adagrad))
    resumed = run_ranks(fit, args=(2, None, str(tmp_path / "epoch=0-step=5.ckpt"), None, None, 5, Adagrad))
    for whole, rest in zip(full, resumed, strict=True):
        assert rest["losses"] == whole["losses"][5:]
        assert toy.same(rest["weights"], whole["weights"])


def test_checkpoints_of_both_paths_are_the_same(tmp_path: Path) -> None:
    """Saved in the middle, with gradients under way: they are applied before, and training goes on the same."""
    runs = {
        mode: run_ranks(fit, args=(2, str(tmp_path / str(mode)), None, None, {"prioritize": mode}))[0]
        for mode in (True, False)
    }
    assert runs[True]["losses"] == runs[False]["losses"]
    for name in ("epoch=0-step=5.ckpt", "epoch=1-step=20.ckpt"):
        a, b = (fs.export(tmp_path / str(mode) / name, tmp_path / f"{mode}.pt") for mode in (True, False))
        assert toy.same(a, b)
    crossed = run_ranks(
        fit, args=(2, None, str(tmp_path / "True" / "epoch=0-step=5.ckpt"), None, {"prioritize": False})
    )[0]
    assert crossed["losses"] == runs[True]["losses"][5:]
    assert toy.same(crossed["optimizer"], runs[True]["optimizer"])


def test_tables_on_the_host_transport_train_and_resume_the_same(tmp_path: Path) -> None:
    """``transport="host"`` carries TorchRec's own exchanges too: ids, and rows and gradients of synchronous steps."""
    expected = run_ranks(fit, args=(2,))[0]
    for prioritize in (True, False):  # Without this transport, both give the same, as another test shows.
        folder, options = tmp_path / str(prioritize), {"transport": "host", "prioritize": prioritize}
        got = run_ranks(fit, args=(2, str(folder), None, None, options))[0]
        assert got["losses"] == expected["losses"]
        assert toy.same(got["weights"], expected["weights"])
        assert toy.same(got["optimizer"], expected["optimizer"])
        rest = run_ranks(fit, args=(2, None, str(folder / "epoch=0-step=5.ckpt"), None, options))[0]
        assert rest["losses"] == expected["losses"][5:]


def test_resume_at_the_end_of_a_limited_epoch_and_once_more(tmp_path: Path) -> None:
    """Lightning does not count the epoch that follows the first resume. The second one must not begin that epoch anew."""
    options = {"limit_train_batches": 5}
    full = run_ranks(fit, args=(2, str(tmp_path / "a"), None, options))
    resumed = run_ranks(
        fit, args=(2, str(tmp_path / "b"), str(tmp_path / "a" / "epoch=0-step=5.ckpt"), options, None, 7)
    )
    again = run_ranks(fit, args=(2, None, str(tmp_path / "b" / "epoch=1-step=7.ckpt"), options))
    for done, runs in ((5, resumed), (7, again)):
        for whole, rest in zip(full, runs, strict=True):
            assert rest["seen"] == whole["seen"][done:]
            assert rest["losses"] == whole["losses"][done:]


def load_all(rank: int, world: int, paths: list[str], extra: dict[str, Any]) -> list[dict[str, Any]]:
    # max_steps is reached already, so the result is what was loaded.
    return [fit(rank, world, None, path, {"max_steps": 5}, extra) for path in paths]


def save_in_both_formats(rank: int, folder: str, extra: dict[str, Any]) -> dict[str, Any]:
    saved = fit(rank, 2, f"{folder}/sharded", None, {"max_steps": 5}, {**extra, "checkpoint": "sharded"})
    again = fit(rank, 2, f"{folder}/file", None, {"max_steps": 5}, {**extra, "checkpoint": "file"})
    assert toy.same(saved["weights"], again["weights"])
    return saved


@pytest.mark.parametrize(
    ("sharding", "optimizer"),
    [slow("row_wise", "adam"), ("row_wise", "rowwise_adagrad"), ("table_wise", "sgd")],
)
def test_two_ranks_to_one_and_three(tmp_path: Path, sharding: str, optimizer: str) -> None:
    extra = {"sharding": sharding, "embedding_optimizer": {"optimizer": optimizer, "lr": 0.1}}
    saved = run_ranks(save_in_both_formats, args=(str(tmp_path), extra))[0]
    assert optimizer == "sgd" or saved["optimizer"]
    paths = [str(tmp_path / kind / "epoch=0-step=5.ckpt") for kind in ("file", "sharded")]
    assert [Path(path).is_file() for path in paths] == [True, False]
    for world in (1, 3):
        for loaded in run_ranks(load_all, world, args=(world, paths, extra))[0]:
            assert loaded["losses"] == []
            assert toy.same(loaded["weights"], saved["weights"])
            assert toy.same(loaded["optimizer"], saved["optimizer"])


def test_another_sharding_loads_the_same_weights(full_run: tuple[Path, list[dict]]) -> None:
    path = str(full_run[0] / "epoch=1-step=20.ckpt")
    same, other = ({"sharding": kind} for kind in ("row_wise", "table_wise"))
    expected = run_ranks(fit, args=(2, None, path, {"max_steps": 20}, same))[0]
    loaded = run_ranks(fit, args=(2, None, path, {"max_steps": 20}, other))[0]
    assert loaded["losses"] == []
    assert toy.same(loaded["weights"], expected["weights"])
    assert toy.same(loaded["optimizer"], expected["optimizer"])


# ---- another number of ranks, in the middle of an epoch --------------------------------------------------------------
class Seen(pl.LightningModule):
    """Remembers the first timestamp of every history it trains on: it names the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.samples: list[int] = []

    def training_step(self, batch: fs.SeqBatch, batch_idx: int) -> Tensor:
        starts = torch.cumsum(batch.lengths, 0) - batch.lengths
        self.samples += batch.timestamps[starts].tolist()
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def see(rank: int, world: int, folder: str, resume: str | None, balance: str, num_workers: int = 0) -> list[int]:
    pl.seed_everything(1, verbose=False)
    data = fs.SeqRecDataModule(
        "synthetic",
        batch_size=4,
        max_history=20,
        balance=balance,
        num_workers=num_workers,
        cache_dir=folder,
        synthetic={"users": 88, "mean_gap": 50_000},
    )
    model = Seen()
    options: dict[str, Any] = {"max_epochs": 1}
    if resume is None:
        save = pl.callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=5)
        options |= {"max_steps": 5, "enable_checkpointing": True, "callbacks": [save]}
    trainer = toy.trainer(FreeScaleStrategy(balance=balance), world, **options)
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    return model.samples


@pytest.mark.parametrize(
    ("world", "balance", "num_workers"),
    [(1, "fixed", 0), (2, "off", 0), (4, "fixed", 0), (4, "off", 0), (2, "fixed", 1)],
)
def test_the_epoch_goes_on_with_every_sample_once_on_any_number_of_ranks(
    tmp_path: Path, world: int, balance: str, num_workers: int
) -> None:
    path = str(tmp_path / "epoch=0-step=5.ckpt")
    before = run_ranks(see, 2, args=(2, str(tmp_path), None, balance, num_workers))
    after = run_ranks(see, world, args=(world, str(tmp_path), path, balance, num_workers))
    everything = [sample for part in (*before, *after) for sample in part]
    assert sum(map(len, before)) == 40
    assert len(everything) == len(set(everything)) == 88


# ---- validate, weights only, export ----------------------------------------------------------------------------------
def validate(rank: int, path: str | None) -> dict[str, Tensor]:
    pl.seed_everything(2, verbose=False)  # another initial model
    model = toy.Model()
    trainer = toy.trainer(FreeScaleStrategy(), 2, limit_val_batches=1)
    trainer.validate(model, toy.loader(8, shuffle=False), ckpt_path=path, verbose=False)
    return toy.weights(model)


def save_weights_only(rank: int, path: str, kind: str) -> dict[str, Tensor]:
    pl.seed_everything(1, verbose=False)
    model = toy.Model()
    trainer = toy.trainer(FreeScaleStrategy(checkpoint=kind), 2, max_epochs=1)
    trainer.fit(model, toy.loader())
    trainer.save_checkpoint(path, weights_only=True)
    return toy.weights(model)


@pytest.mark.parametrize("kind", ["file", "sharded"])
def test_weights_only_checkpoint_and_validation(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "weights.ckpt")
    saved = run_ranks(save_weights_only, args=(path, kind))[0]
    assert toy.same(run_ranks(validate, args=(path,))[0], saved)
    assert not toy.same(run_ranks(validate, args=(None,))[0], saved)
    meta = checkpoint.load_meta(path) if kind == "sharded" else torch.load(path, weights_only=True)
    assert "optimizer_states" not in meta


def test_export_loads_into_the_unsharded_model(full_run: tuple[Path, list[dict]], tmp_path: Path) -> None:
    path = full_run[0] / "epoch=1-step=20.ckpt"
    exported = fs.export(path, tmp_path / "out.pt")
    model = toy.Model()
    model.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
    saved = run_ranks(validate, args=(str(path),))[0]
    assert toy.same(dict(model.state_dict()), saved)
    assert toy.same(exported, saved)
