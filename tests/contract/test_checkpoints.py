"""Checkpoints as any Lightning user expects them: hooks, plugins, other strategies, and errors that say what to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

import lightning_freescale as fs
from lightning_freescale import CheckpointError, ConfigurationError, FreeScaleStrategy
from lightning_freescale.cli import main as cli
from lightning_freescale.strategy import checkpoint_format, checkpoint_meeting
from tests import toy
from tests.ranks import run_ranks

FORMATS = ["file", "sharded"]
TABLE = "embeddings.embeddings.item.weight"


class Model(toy.Model):
    """Has a hyperparameter without a default, so that ``load_from_checkpoint`` must find it in the checkpoint."""

    def __init__(self, width: int, lr: float = 0.05):
        super().__init__(lr=lr)
        self.save_hyperparameters()
        self.head = nn.Sequential(nn.Linear(len(toy.FEATURES) * toy.DIM, width), nn.ReLU(), nn.Linear(width, 1))

    def test_step(self, batch: toy.Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True, batch_size=len(batch.label))


def trained(world: int, path: str | None = None, model: Any = None, **options: Any) -> tuple[Any, pl.Trainer]:
    pl.seed_everything(1, verbose=False)
    strategy = {key: options.pop(key) for key in ("checkpoint", "embedding_optimizer", "balance") if key in options}
    model = model or Model(6)
    trainer = toy.trainer(FreeScaleStrategy(**strategy), world, **{"max_steps": 3, **options})
    trainer.fit(model, toy.loader())
    if path is not None:
        trainer.save_checkpoint(path)
    return model, trainer


# ---- everyone can open them ------------------------------------------------------------------------------------------
def save_both(rank: int, folder: str) -> dict[str, Tensor]:
    for kind in FORMATS:
        model, _ = trained(2, f"{folder}/{kind}.ckpt", checkpoint=kind)
    return toy.weights(model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """``file.ckpt`` and ``sharded.ckpt`` of the same training on two ranks, and its weights."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(save_both, args=(str(folder),))[0]


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


def resume(rank: int, paths: list[str]) -> list[list[float]]:
    losses = []
    for path in paths:
        pl.seed_everything(1, verbose=False)
        model = Model(6)
        toy.trainer(FreeScaleStrategy(), 2, max_steps=8).fit(model, toy.loader(), ckpt_path=path)
        losses.append(model.losses)
    return losses


def test_a_folder_is_refused_by_load_from_checkpoint_but_the_log_says_what_to_do(
    saved: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(IsADirectoryError):
        Model.load_from_checkpoint(saved[0] / "sharded.ckpt")
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


def test_ddp_evaluates_our_file(saved: tuple[Path, dict[str, Tensor]]) -> None:
    found = run_ranks(other_strategies, args=(str(saved[0] / "file.ckpt"),))[0]
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
    trainer.fit(model, toy.loader())
    trainer.save_checkpoint(path)
    dense = trainer.optimizers[0].state[model.head[0].weight]["exp_avg"].clone()
    ours = Model(6)
    resumed = toy.trainer(FreeScaleStrategy(), 2, max_epochs=1)
    resumed.fit(ours, toy.loader(), ckpt_path=path)
    state = resumed.optimizers[0].state[ours.head[0].weight]["exp_avg"]
    onwards = Model(6)
    toy.trainer(FreeScaleStrategy(), 2, max_epochs=2).fit(onwards, toy.loader(), ckpt_path=path)
    return {
        "weights": toy.same(toy.weights(ours), {name: value.detach() for name, value in model.state_dict().items()}),
        "optimizer": torch.equal(state, dense),
        "steps": (resumed.global_step, len(onwards.losses)),
    }


def test_a_checkpoint_of_ddp_resumes_with_weights_and_dense_optimizers(tmp_path: Path) -> None:
    for found in run_ranks(from_ddp, args=(str(tmp_path / "ddp.ckpt"),)):
        assert found == {"weights": True, "optimizer": True, "steps": (16, 16)}


# ---- hooks -----------------------------------------------------------------------------------------------------------
ORDER: list[str] = []


class Hooked(Model):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["sum"] = float(sum(value.sum() for value in checkpoint["state_dict"].values()))
        checkpoint["state_dict"]["head.0.bias"] = torch.full_like(checkpoint["state_dict"]["head.0.bias"], 7.0)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        ORDER.append("module.on_load_checkpoint")
        checkpoint["state_dict"]["head.2.bias"] = torch.full_like(checkpoint["state_dict"]["head.2.bias"], 9.0)
        checkpoint["state_dict"][TABLE] = checkpoint["state_dict"][TABLE] + 1

    def on_fit_start(self) -> None:
        ORDER.append("module.on_fit_start")


class DenseHook(Model):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["head.2.bias"] = torch.full_like(state["head.2.bias"], 9.0)


class TableHook(Model):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"][TABLE] += 1


class State(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ORDER.append("callback.load_state_dict")

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        assert TABLE in checkpoint["state_dict"]
        ORDER.append("callback.on_load_checkpoint")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        ORDER.append("callback.on_fit_start")


def hooks(rank: int, folder: str) -> dict[str, Any]:
    path = f"{folder}/hooked.ckpt"
    model, _ = trained(2, path, model=Hooked(6), callbacks=[State()])
    before, total = toy.weights(model), torch.load(path, weights_only=True)["sum"]
    found = {}
    for name, strategy in (("ours", FreeScaleStrategy()), ("ddp", "ddp")):
        ORDER.clear()
        fresh = Hooked(6)
        options = {"callbacks": [State()], "max_steps": 3} | ({} if name == "ours" else {"limit_val_batches": 1})
        trainer = toy.trainer(strategy, 2, **options)
        if name == "ours":
            trainer.fit(fresh, toy.loader(), ckpt_path=path)
            found["order"] = list(ORDER)
        else:  # ddp cannot resume the optimizers of a model with tables.
            trainer.validate(fresh, toy.loader(8), ckpt_path=path, verbose=False)
        found[name] = toy.weights(fresh)
    expected = {**before, "head.0.bias": torch.full((6,), 7.0), "head.2.bias": torch.full((1,), 9.0)}
    expected[TABLE] = before[TABLE] + 1
    found["as expected"] = toy.same(found["ours"], expected)
    found["as ddp"] = toy.same(found["ours"], found["ddp"])
    found["sum"] = abs(total - float(sum(value.sum() for value in before.values()))) < 1e-3
    return {key: found[key] for key in ("order", "as expected", "as ddp", "sum")}


def test_hooks_read_and_change_the_weights_of_a_file_as_with_ddp(tmp_path: Path) -> None:
    for found in run_ranks(hooks, args=(str(tmp_path),)):
        assert found["as expected"]
        assert found["as ddp"]
        assert found["sum"]
        assert found["order"] == [
            "module.on_load_checkpoint",
            "callback.on_load_checkpoint",
            "callback.load_state_dict",
            "callback.on_fit_start",
            "module.on_fit_start",
        ]


def folder_hooks(rank: int, path: str) -> tuple[float, str]:
    model = DenseHook(6)
    trainer = toy.trainer(FreeScaleStrategy(), 2, limit_val_batches=1)
    trainer.validate(model, toy.loader(8), ckpt_path=path, verbose=False)
    with pytest.raises(CheckpointError) as raised:
        toy.trainer(FreeScaleStrategy(), 2).validate(TableHook(6), toy.loader(8), ckpt_path=path, verbose=False)
    return model.head[2].bias.item(), str(raised.value)


def test_hooks_change_dense_weights_of_a_folder_and_learn_what_to_do_about_tables(
    saved: tuple[Path, dict[str, Tensor]],
) -> None:
    for bias, message in run_ranks(folder_hooks, args=(str(saved[0] / "sharded.ckpt"),)):
        assert bias == 9.0
        assert "checkpoint='file'" in message
        assert "freescale export" in message


# ---- strict loading --------------------------------------------------------------------------------------------------
class Grown(Model):
    """Has another layer, and lacks one."""

    def __init__(self, width: int = 6, strict: bool = False):
        super().__init__(width)
        self.head = nn.Sequential(nn.Linear(len(toy.FEATURES) * toy.DIM, width))
        self.more = nn.Linear(2, 2)
        self.strict_loading = strict

    def validation_step(self, batch: toy.Batch, batch_idx: int) -> None:
        self(batch.features)


def not_strict(rank: int, paths: list[str]) -> list[tuple[dict[str, Tensor], Tensor, str]]:
    found = []
    for path in paths:
        model = Grown()
        before = model.more.weight.detach().clone()
        toy.trainer(FreeScaleStrategy(), 2, limit_val_batches=1).validate(
            model, toy.loader(8), ckpt_path=path, verbose=False
        )
        with pytest.raises(CheckpointError) as raised:
            toy.trainer(FreeScaleStrategy(), 2).validate(Grown(5), toy.loader(8), ckpt_path=path, verbose=False)
        with pytest.raises(CheckpointError, match=r"more\.weight is missing there"):
            toy.trainer(FreeScaleStrategy(), 2).validate(Grown(6, True), toy.loader(8), ckpt_path=path, verbose=False)
        found.append((toy.weights(model), before, str(raised.value)))
    return found


def test_strict_loading_false_loads_what_fits(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = saved
    for found in run_ranks(not_strict, args=([str(folder / f"{kind}.ckpt") for kind in FORMATS],)):
        for loaded, before, message in found:
            assert torch.equal(loaded[TABLE], weights[TABLE])
            assert torch.equal(loaded["head.0.weight"], weights["head.0.weight"])
            assert torch.equal(loaded["more.weight"], before)
            assert "head.0.weight has shape [6, 24] there and [5, 24] here" in message


# ---- plugins ---------------------------------------------------------------------------------------------------------
class OwnIO(TorchCheckpointIO):
    """Keeps checkpoints under other names, which fsspec cannot see."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        torch.save({**checkpoint, "options": storage_options}, f"{path}.own")

    def load_checkpoint(self, path: Any, map_location: Any = None, **kwargs: Any) -> dict[str, Any]:
        return torch.load(f"{path}.own", weights_only=True)

    def remove_checkpoint(self, path: Any) -> None:
        os.remove(f"{path}.own")


def own_io(rank: int, folder: str) -> bool:
    model, trainer = trained(2, plugins=[OwnIO()])
    trainer.save_checkpoint(f"{folder}/a.ckpt", storage_options={"fast": True})
    trainer.save_checkpoint(f"{folder}/b.ckpt")
    trainer.strategy.remove_checkpoint(f"{folder}/b.ckpt")
    loaded = Model(6)
    again = toy.trainer(FreeScaleStrategy(), 2, limit_val_batches=1, plugins=[OwnIO()])
    again.validate(loaded, toy.loader(8), ckpt_path=f"{folder}/a.ckpt", verbose=False)
    refused = toy.trainer(FreeScaleStrategy(checkpoint="sharded"), 2, plugins=[OwnIO()])
    with pytest.raises(ConfigurationError, match="OwnIO: a CheckpointIO writes one file"):
        refused.fit(Model(6), toy.loader())
    return toy.same(toy.weights(model), toy.weights(loaded))


def test_a_users_checkpoint_io_is_used_or_refused(tmp_path: Path) -> None:
    assert run_ranks(own_io, args=(str(tmp_path),)) == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt.own"]
    assert torch.load(tmp_path / "a.ckpt.own", weights_only=True)["options"] == {"fast": True}


class Opaque:
    """An object that ``torch.load`` refuses unless ``weights_only=False``."""


class Holds(Model):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["opaque"] = Opaque()


def weights_only(rank: int, folder: str) -> None:
    for kind in FORMATS:
        path = f"{folder}/{kind}.ckpt"
        trained(2, path, model=Holds(6), checkpoint=kind)
        with pytest.raises(CheckpointError, match="weights_only=False"):
            toy.trainer(FreeScaleStrategy(), 2, max_steps=4).fit(Holds(6), toy.loader(), ckpt_path=path)
        model = Holds(6)
        toy.trainer(FreeScaleStrategy(), 2, max_steps=4).fit(model, toy.loader(), ckpt_path=path, weights_only=False)
        assert len(model.losses) == 1


def test_weights_only_is_passed_on(tmp_path: Path) -> None:
    run_ranks(weights_only, args=(str(tmp_path),))


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
        FreeScaleStrategy(timeout=5), 2, callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True
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
        FreeScaleStrategy(timeout=5), 2, callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True
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


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="choose one of auto, file, sharded"):
        FreeScaleStrategy(checkpoint="zip")  # type: ignore[arg-type]
