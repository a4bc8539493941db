"""Trainings with synchronous and asynchronous saves, and the comparison of what they save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import lightning_freescale as fs
from lightning_freescale import FreeScaleStrategy
from tests import toy


def train(
    rank: int,
    folder: str,
    kind: str,
    asynchronous: bool,
    prioritize: Any = "auto",
    optimizer: str = "adagrad",
    **options: Any,
) -> pl.Trainer:
    """Train 12 steps on this rank of two, and save every fourth one."""
    pl.seed_everything(1, verbose=False)
    save = pl.callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=4, **{"save_top_k": -1, **options})
    trainer = toy.trainer(
        FreeScaleStrategy(
            checkpoint=kind,
            balance="off",
            timeout=20,
            prioritize=prioritize,
            embedding_optimizer={"optimizer": optimizer},
        ),
        2,
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[save],
        plugins=[AsyncCheckpointIO()] if asynchronous else [],
    )
    trainer.fit(toy.Model(), toy.loader(48))  # 12 steps
    return trainer


def train_only(rank: int, folder: str, kind: str, asynchronous: bool) -> None:
    train(rank, folder, kind, asynchronous)


def contents(path: Path) -> dict[str, Any]:
    """Weights and optimizer states, dense and of the tables."""
    fs.export(path, path.with_suffix(".full"), lightning=True)
    whole = torch.load(path.with_suffix(".full"), weights_only=True)
    return {
        "weights": dict(whole["state_dict"]),
        "tables": whole["freescale"]["table_optimizer"],
        "dense": {f"{i}.{k}": v for i, s in whole["optimizer_states"][0]["state"].items() for k, v in s.items()},
        "others": leaves({name: whole[name] for name in ("global_step", "loops", "lr_schedulers", "freescale")}),
    }


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """The numbers, texts and tensors in nested mappings and sequences, by their place."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {name: value.tolist() if isinstance(value, torch.Tensor) else value}
    return {place: leaf for key, part in value.items() for place, leaf in leaves(part, f"{name}/{key}").items()}


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    for part in ("weights", "tables", "dense"):
        assert toy.same(a[part], b[part]), part
    assert a["tables"]
    assert a["dense"]
    assert a["others"] == b["others"]
    assert any("random" in name for name in a["others"])
