"""Lightning's ``ModelPruning``: with parameters that are named it prunes the dense part, and tables are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning

from lightning_freescale import CheckpointError, ConfigurationError, FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks


def fit(rank: int, folder: str, named: bool, bags: bool = False, fits: int = 1) -> Any:
    pl.seed_everything(1, verbose=False)
    model = toy.Model(bags=bags)
    for _ in range(fits - 1):
        toy.trainer(FreeScaleStrategy(), 2, max_steps=1).fit(model, toy.loader())
    chosen = [(model.head[0], "weight")] if named else ()
    callbacks = [ModelPruning("l1_unstructured", chosen), ModelCheckpoint(folder, filename="last")]
    trainer = toy.trainer(FreeScaleStrategy(), 2, max_epochs=1, callbacks=callbacks, enable_checkpointing=True)
    try:
        trainer.fit(model, toy.loader(16))
    except ConfigurationError as error:
        return str(error)
    return toy.weights(model)


@pytest.mark.parametrize(("bags", "fits"), [(False, 1), (True, 1), (False, 2)])
def test_pruned_tables_are_refused(bags: bool, fits: int, tmp_path: Path) -> None:
    for message in run_ranks(fit, args=(str(tmp_path), False, bags, fits)):
        assert message.startswith("ModelPruning would prune embeddings.embedding")
        assert ".item.weight, " in message
        assert "parameters_to_prune=[(model.head, 'weight')]" in message


def test_named_parameters_are_pruned_and_saved_beside_whole_tables(tmp_path: Path) -> None:
    for weights in run_ranks(fit, args=(str(tmp_path), True)):
        assert (weights["head.0.weight"] == 0).float().mean() == 0.5
        saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
        assert toy.same({key: saved[key] for key in weights}, weights)


class PutsShards(toy.Model):
    """Its hook changes the weights of the checkpoint on rank 0 alone."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            checkpoint["state_dict"] = self.state_dict()


def save_shards(rank: int, folder: str) -> str:
    trainer = toy.trainer(FreeScaleStrategy(), 2, max_steps=1)
    trainer.fit(PutsShards(), toy.loader())
    with pytest.raises(CheckpointError) as error:
        trainer.save_checkpoint(f"{folder}/shards.ckpt")
    return str(error.value)


def test_shards_of_one_rank_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(save_shards, args=(str(tmp_path),)):
        assert message.startswith("rank 1: on_save_checkpoint has put the sharded tables [] into the checkpoint")
