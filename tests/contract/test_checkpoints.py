"""Checkpoints that everyone can open: Lightning, torch, other strategies, and what goes wrong."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

import lightning_freescale as fs
from lightning_freescale import CheckpointError, ConfigurationError, FreeScaleStrategy
from lightning_freescale.cli import main as cli
from lightning_freescale.strategy.checkpoints import format as checkpoint_format
from lightning_freescale.strategy.checkpoints import meeting as checkpoint_meeting
from lightning_freescale.strategy.checkpoints import storage
from tests import toy
from tests.contract.checkpoints import FORMATS, Model, resume
from tests.ranks import run_ranks


def test_load_from_checkpoint_and_torch_load(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = saved
    model = Model.load_from_checkpoint(folder / "file.ckpt")
    assert model.hparams.width == 6
    assert toy.same(dict(model.state_dict()), weights)
    plain = torch.load(folder / "file.ckpt", weights_only=True)
    assert toy.same(dict(plain["state_dict"]), weights)
    assert all(type(value) is Tensor and value.device.type == "cpu" for value in plain["state_dict"].values())


def test_export_to_a_lightning_checkpoint(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, weights = saved
    for kind in FORMATS:
        out = tmp_path / f"{kind}.ckpt"
        assert cli.main(["export", str(folder / f"{kind}.ckpt"), str(out), "--lightning"]) == 0
        model = Model.load_from_checkpoint(out)
        assert model.hparams.width == 6
        assert toy.same(dict(model.state_dict()), weights)
        assert torch.load(out, weights_only=True)["freescale"]["table_optimizer"].keys()
    resumed = run_ranks(resume, args=([str(tmp_path / f"{k}.ckpt") for k in FORMATS] + [str(folder / "sharded.ckpt")],))
    assert resumed[0][0] == resumed[0][1] == resumed[0][2]
    assert len(resumed[0][0]) == 5


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_load_from_checkpoint_reads_a_folder(saved: tuple[Path, dict[str, Tensor]], package: str) -> None:
    """In both namespaces, by path and by text, and to the device that ``map_location`` names."""
    folder, weights = saved
    core = "lightning.pytorch" if package == "lightning" else package
    load = importlib.import_module(f"{core}.core.saving").pl_load
    whole = load(folder / "sharded.ckpt", weights_only=True)
    assert toy.same(dict(whole["state_dict"]), weights)
    assert "optimizer_states" not in whole
    other = torch.empty(0, device="meta").untyped_storage()
    for place in ("meta", torch.device("meta"), {"cpu": "meta"}, lambda storage, location: other):
        moved = load(str(folder / "sharded.ckpt"), map_location=place, weights_only=True)
        assert {value.device.type for value in moved["state_dict"].values()} == {"meta"}
    if package == "lightning":
        model = Model.load_from_checkpoint(folder / "sharded.ckpt")
        assert model.hparams.width == 6
        assert toy.same(dict(model.state_dict()), weights)


def test_other_folders_are_left_to_lightning_and_damage_is_named(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    with pytest.raises(IsADirectoryError):
        Model.load_from_checkpoint(tmp_path)
    damaged = tmp_path / "damaged.ckpt"
    shutil.copytree(saved[0] / "sharded.ckpt", damaged)
    shards = sorted(damaged.glob("*.distcp"))
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=shards[0].name):
        Model.load_from_checkpoint(damaged)


def test_the_log_names_the_export_of_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(checkpoint_format, "log_once", messages.append)
    monkeypatch.setattr(checkpoint_format, "total_bytes", lambda weights: 300 << 20)
    assert checkpoint_format.choose_format("auto", TorchCheckpointIO(), [], 2) == "sharded"
    assert "300.0 MiB" in messages[0]
    assert "freescale export FOLDER FILE --lightning" in messages[0]


def other_strategies(rank: int, path: str) -> dict[str, Any]:
    """Load our file with ddp for every evaluation, and a file of ddp with our strategy."""
    found: dict[str, Any] = {}
    for name in ("ddp", FreeScaleStrategy()):
        model = Model(6)
        trainer = toy.trainer(name, 2, limit_val_batches=2, use_distributed_sampler=False)
        kwargs = {"dataloaders": toy.loader(8, shuffle=False), "ckpt_path": path, "verbose": False}
        found[str(type(trainer.strategy).__name__)] = (
            trainer.validate(model, **kwargs)[0],
            trainer.test(model, **kwargs)[0],
        )
    return found


@pytest.mark.parametrize("kind", FORMATS)
def test_ddp_evaluates_our_checkpoint(saved: tuple[Path, dict[str, Tensor]], kind: str) -> None:
    found = run_ranks(other_strategies, args=(str(saved[0] / f"{kind}.ckpt"),))[0]
    assert found["DDPStrategy"] == found["FreeScaleStrategy"]


class Plain(pl.LightningModule):
    """Has no tables."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(toy.DIM, 1)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def without_tables(rank: int, folder: str) -> dict[str, list[float]]:
    """Train one epoch with each strategy, and the second epoch with the other one."""
    data = torch.randn(32, toy.DIM, generator=torch.Generator().manual_seed(1))
    found = {}
    for name, strategy in (("ddp", "ddp"), ("ours", FreeScaleStrategy())):
        pl.seed_everything(1, verbose=False)
        model = Plain()
        trainer = toy.trainer(strategy, 2, max_epochs=1)
        trainer.fit(model, torch.utils.data.DataLoader(data, 4))
        trainer.save_checkpoint(f"{folder}/{name}.ckpt")
    for source in ("ddp", "ours"):
        for name, strategy in (("ddp", "ddp"), ("ours", FreeScaleStrategy())):
            model = Plain()
            trainer = toy.trainer(strategy, 2, max_epochs=3)
            trainer.fit(model, torch.utils.data.DataLoader(data, 4), ckpt_path=f"{folder}/{source}.ckpt")
            found[f"{source} to {name}"] = model.losses
    return found


def test_a_model_without_tables_resumes_exactly_with_either_strategy(tmp_path: Path) -> None:
    for found in run_ranks(without_tables, args=(str(tmp_path),)):
        assert len(found["ddp to ddp"]) == 8
        assert all(losses == found["ddp to ddp"] for losses in found.values())


def from_ddp(rank: int, path: str) -> dict[str, Any]:
    """A checkpoint of ddp, whose Adam has trained the tables."""
    pl.seed_everything(1, verbose=False)
    model = Model(6)
    trainer = toy.trainer("ddp", 2, max_epochs=1)
    trainer.fit(model, toy.loader(64))
    trainer.save_checkpoint(path)
    dense = trainer.optimizers[0].state[model.head[0].weight]["exp_avg"].clone()
    ours = Model(6)
    resumed = toy.trainer(FreeScaleStrategy(), 2, max_epochs=1)
    resumed.fit(ours, toy.loader(64), ckpt_path=path)
    state = resumed.optimizers[0].state[ours.head[0].weight]["exp_avg"]
    onwards = Model(6)
    toy.trainer(FreeScaleStrategy(), 2, max_epochs=2).fit(onwards, toy.loader(64), ckpt_path=path)
    return {
        "weights": toy.same(toy.weights(ours), {name: value.detach() for name, value in model.state_dict().items()}),
        "optimizer": torch.equal(state, dense),
        "steps": (resumed.global_step, len(onwards.losses)),
    }


def test_a_checkpoint_of_ddp_resumes_with_weights_and_dense_optimizers(tmp_path: Path) -> None:
    for found in run_ranks(from_ddp, args=(str(tmp_path / "ddp.ckpt"),)):
        assert found == {"weights": True, "optimizer": True, "steps": (16, 16)}


# ---- errors ----------------------------------------------------------------------------------------------------------
def before_fit(rank: int, folder: str) -> None:
    with pytest.raises(AttributeError, match="model is attached"):
        toy.trainer(FreeScaleStrategy(), 2).save_checkpoint(f"{folder}/none.ckpt")
    trainer, model = toy.trainer(FreeScaleStrategy(), 2), Model(6)
    trainer.strategy.connect(model)
    model.trainer = trainer
    trainer.save_checkpoint(f"{folder}/early.ckpt")
    if rank == 0:
        assert toy.same(dict(Model.load_from_checkpoint(f"{folder}/early.ckpt").state_dict()), dict(model.state_dict()))
    on_meta = toy.Model(device="meta")
    trainer.strategy.connect(on_meta)
    on_meta.trainer = trainer
    with pytest.raises(CheckpointError, match=r"Call fit\(\), validate\(\)"):
        trainer.save_checkpoint(f"{folder}/meta.ckpt")


def test_save_before_fit_writes_the_unsharded_model_or_says_what_to_do(tmp_path: Path) -> None:
    run_ranks(before_fit, args=(str(tmp_path),))


def on_meta(rank: int, paths: list[str]) -> list[bool]:
    equal = []
    for path in paths:
        model = toy.Model(device="meta")
        model.head = Model(6).head
        toy.trainer(FreeScaleStrategy(), 2, limit_val_batches=1).validate(
            model, toy.loader(8), ckpt_path=path, verbose=False
        )
        equal.append(toy.weights(model))
    return equal


def test_tables_on_meta_load_both_formats(saved: tuple[Path, dict[str, Tensor]]) -> None:
    for loaded in run_ranks(on_meta, args=([str(saved[0] / f"{kind}.ckpt") for kind in FORMATS],))[0]:
        assert toy.same(loaded, saved[1])


class FailsInSetup(Model):
    def setup(self, stage: str) -> None:
        raise ZeroDivisionError("the user's own error")


class FailsInStep(Model):
    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(6)
        self.ranks = ranks

    def training_step(self, batch: toy.Batch, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank in self.ranks:
            raise ZeroDivisionError("the user's own error")
        return super().training_step(batch, batch_idx)


def on_exception(rank: int, folder: str, kind: str) -> str:
    checkpoint_meeting.all_ranks_came.__defaults__ = (1.0,)
    model = {"setup": FailsInSetup(6), "step": FailsInStep((0, 1)), "one": FailsInStep((1,))}[kind]
    trainer = toy.trainer(
        FreeScaleStrategy(timeout=8), 2, callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True
    )
    try:
        trainer.fit(model, toy.loader())
    except BaseException as error:
        return repr(error)
    return ""


@pytest.mark.parametrize("kind", ["setup", "step", "one"])
def test_on_exception_checkpoint_does_not_hide_the_users_error(tmp_path: Path, kind: str) -> None:
    found = run_ranks(on_exception, args=(str(tmp_path), kind))
    expected = 'ZeroDivisionError("the user\'s own error")'
    assert found[1] == expected
    if kind != "one":
        assert found[0] == expected
    assert (tmp_path / "on_exception.ckpt").exists() == (kind != "one")
    if kind == "step":
        weights = fs.export(tmp_path / "on_exception.ckpt", tmp_path / "out.pt")
        assert all(value.isfinite().all() for value in weights.values())


class Diverges(Model):
    def training_step(self, batch: toy.Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 2 else 1.0)


def diverge(rank: int, folder: str) -> str:
    trainer = toy.trainer(
        FreeScaleStrategy(timeout=8), 2, callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True
    )
    with pytest.raises(fs.FreeScaleError) as raised:
        trainer.fit(Diverges(6), toy.loader())
    return str(raised.value)


def test_no_checkpoint_holds_weights_that_a_nan_has_reached(tmp_path: Path) -> None:
    for message in run_ranks(diverge, args=(str(tmp_path),)):
        assert "loss is nan" in message
    assert not list(tmp_path.iterdir())


def other_optimizer(rank: int, paths: list[str]) -> list[str]:
    messages = []
    for path in paths:
        trainer = toy.trainer(FreeScaleStrategy(embedding_optimizer={"optimizer": "adagrad"}), 2)
        with pytest.raises(CheckpointError) as raised:
            trainer.fit(Model(6), toy.loader(), ckpt_path=path)
        messages.append(str(raised.value))
    return messages


def test_another_embedding_optimizer_is_refused(saved: tuple[Path, dict[str, Tensor]]) -> None:
    for messages in run_ranks(other_optimizer, args=([str(saved[0] / f"{kind}.ckpt") for kind in FORMATS],)):
        assert all("another embedding_optimizer" in message for message in messages)


def first_version(path: Path) -> None:
    """Turn a folder into what the first version of this package wrote."""
    meta = torch.load(path / "meta.pt", weights_only=True)
    entry = meta.pop("freescale")
    meta |= {name: entry[name] for name in ("table_optimizer_steps", "balance")} | {"freescale_checkpoint": 1}
    torch.save(meta, path / "meta.pt")
    sums = json.loads((path / "checksums.json").read_text())
    sums["meta.pt"] = storage.checksum(str(path / "meta.pt"))
    (path / "checksums.json").write_text(json.dumps(sums))


def test_a_folder_of_the_first_version_resumes(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    shutil.copytree(saved[0] / "sharded.ckpt", tmp_path / "old.ckpt")
    first_version(tmp_path / "old.ckpt")
    old, new = run_ranks(resume, args=([str(tmp_path / "old.ckpt"), str(saved[0] / "sharded.ckpt")],))[0]
    assert old == new
    assert len(old) == 5


def runs_in_a_row(rank: int, path: str) -> tuple[bool, bool]:
    """A run that fails after it has read a checkpoint, then one without a checkpoint, with the same Trainer."""
    averaging = StochasticWeightAveraging(0.01)
    trainer = toy.trainer(FreeScaleStrategy(), 2, max_steps=1, callbacks=[averaging])
    with pytest.raises(ConfigurationError):
        trainer.fit(Model(6), toy.loader(), ckpt_path=path)
    trainer.callbacks.remove(averaging)
    trainer._checkpoint_connector._loaded_checkpoint = {}  # Lightning itself would load the weights again.
    pl.seed_everything(5, verbose=False)  # Each rank creates the same model.
    model, weights = Model(6), {}
    model.on_fit_start = lambda: weights.update(toy.weights(model))  # type: ignore[method-assign]
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    try:  # A fit inside an exception handler is an ordinary one.
        raise KeyError
    except KeyError:
        trainer.fit(model, toy.loader())
        trainer.save_checkpoint(f"{path}.second")
    return toy.same(weights, expected), os.path.exists(f"{path}.second")


def test_a_failed_run_leaves_nothing_for_the_next_one(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    shutil.copytree(saved[0] / "sharded.ckpt", tmp_path / "x.ckpt")
    assert run_ranks(runs_in_a_row, args=(str(tmp_path / "x.ckpt"),)) == [(True, True)] * 2


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="choose one of auto, file, sharded"):
        FreeScaleStrategy(checkpoint="zip")  # type: ignore[arg-type]
