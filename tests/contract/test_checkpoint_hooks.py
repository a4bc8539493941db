"""Hooks, strict loading and plugins that concern checkpoints work as with DDP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

from lightning_freescale import CheckpointError, ConfigurationError, FreeScaleStrategy
from tests import toy
from tests.contract.checkpoints import FORMATS, TABLE, Model, trained
from tests.ranks import run_ranks

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
