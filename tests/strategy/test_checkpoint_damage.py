"""Crashes while a checkpoint is written, and damaged or foreign checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_freescale as fs
from lightning_freescale import CheckpointError, FreeScaleError, FreeScaleStrategy
from tests import toy
from tests.ranks import RankFailed, run_ranks
from tests.strategy.test_checkpoint import fit, validate

CRASHES = {
    ("sharded", "meta"): (torch, "save"),
    ("sharded", "checksums"): (json, "dumps"),
    ("sharded", "rename"): (Path, "rename"),
    ("file", "write"): (torch, "save"),
    ("file", "commit"): (shutil, "move"),  # What fsspec calls when the temporary file is complete.
}


def crash_while_saving(rank: int, path: str, kind: str, stage: str) -> None:
    pl.seed_everything(1, verbose=False)
    model = toy.Model()
    trainer = toy.trainer(FreeScaleStrategy(timeout=20, balance="off", checkpoint=kind), 2, max_steps=3)
    trainer.fit(model, toy.loader(44))  # as in fit()
    trainer.save_checkpoint(path)
    if rank == 0:
        calls = []

        def die(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if stage == "rename" and len(calls) == 1:  # The old one is moved aside, then the power fails.
                os.rename(args[0], args[1])
                return None
            os._exit(9)

        setattr(*CRASHES[kind, stage], die)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.add_(1.0)
    trainer.save_checkpoint(path)


@pytest.mark.parametrize(("kind", "stage"), CRASHES)
def test_a_crash_during_save_leaves_the_last_good_one(tmp_path: Path, kind: str, stage: str) -> None:
    path = tmp_path / "last.ckpt"
    with pytest.raises(RankFailed, match="died with exit code 9"):
        run_ranks(crash_while_saving, args=(str(path), kind, stage), every_error=True)
    good = run_ranks(fit, args=(2, None, None, {"max_steps": 3}, {"embedding_optimizer": None, "sharding": None}))[0]
    assert toy.same(run_ranks(validate, args=(str(path),))[0], good["weights"])


# ---- damage ------------------------------------------------------------------------------------------------------------
def truncate(path: Path) -> str:
    file = next(path.glob("*.distcp")) if path.is_dir() else path
    file.write_bytes(file.read_bytes()[:-10])
    return file.name


def flip(path: Path) -> str:
    file = next(path.glob("*.distcp")) if path.is_dir() else path
    data = bytearray(file.read_bytes())
    position = len(data) // 2
    if not path.is_dir():  # A bit of the records, not one that the zip format pads with.
        table = torch.load(path, weights_only=True)["state_dict"]["embeddings.embeddings.item.weight"]
        position = bytes(data).index(table.numpy().tobytes()) + 5
    data[position] ^= 1
    file.write_bytes(data)
    return file.name


def remove(path: Path) -> str:
    file = next(path.glob("*.distcp"))
    file.unlink()
    return file.name


def no_checksums(path: Path) -> str:
    (path / "checksums.json").unlink()
    return "checksums.json"


def bad_checksums(path: Path) -> str:
    (path / "checksums.json").write_text("{")
    return "checksums.json"


def empty_meta(path: Path) -> str:
    (path / "meta.pt").write_bytes(b"")
    return "meta.pt"


def gone(path: Path) -> str:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return "Checkpoint file not found"


def empty(path: Path) -> str:
    path.write_bytes(b"")
    return "cannot be read"


def text(path: Path) -> str:
    path.write_text("no checkpoint at all")
    return "cannot be read"


def other_content(path: Path) -> str:
    torch.save([1, 2], path)
    return "has no entry 'state_dict'"


def bare_weights(path: Path) -> str:
    torch.save(torch.load(path, weights_only=True)["state_dict"], path)
    return "holds bare weights"


def no_weights(path: Path) -> str:
    torch.save({"state_dict": {}, "pytorch-lightning_version": pl.__version__}, path)
    return "is missing there"


def no_version(path: Path) -> str:
    torch.save({"state_dict": {}}, path)
    return "pytorch-lightning_version"


DAMAGES = {
    "sharded": [truncate, flip, remove, no_checksums, bad_checksums, empty_meta, gone],
    "file": [truncate, flip, gone, empty, text, other_content, bare_weights, no_weights, no_version],
}


def errors_of(rank: int, paths: list[str]) -> list[tuple[str, str, bool]]:
    found = []
    for path in paths:
        with pytest.raises(FreeScaleError) as raised:
            fit(rank, 2, None, path)
        found.append((type(raised.value).__name__, str(raised.value), isinstance(raised.value, FileNotFoundError)))
    return found


def test_a_damaged_checkpoint_is_an_error_on_every_rank(full_run: tuple[Path, list[dict]], tmp_path: Path) -> None:
    good = full_run[0] / "epoch=0-step=5.ckpt"
    damages, paths, expected = DAMAGES["file" if good.is_file() else "sharded"], [], []
    for damage in damages:
        paths.append(tmp_path / f"{damage.__name__}.ckpt")
        (shutil.copy if good.is_file() else shutil.copytree)(good, paths[-1])
        expected.append(damage(paths[-1]))
    for found in run_ranks(errors_of, args=(list(map(str, paths)),)):
        for damage, path, part, (kind, message, not_found) in zip(damages, paths, expected, found, strict=True):
            assert kind == ("CheckpointNotFoundError" if damage is gone else "CheckpointError"), message
            assert not_found == (damage is gone)
            assert message.startswith("rank ")
            assert part in message
            assert str(path) in message
    for damage, path in zip(damages, paths, strict=True):
        if damage in (no_weights, no_version) or (damage is flip and path.is_dir()):
            continue  # Export reads what weights there are, and compares the sizes of a folder's files only.
        with pytest.raises(CheckpointError):
            fs.export(path, tmp_path / "out.pt")


class Wider(toy.Model):
    def __init__(self) -> None:
        super().__init__()
        self.head[0] = torch.nn.Linear(len(toy.FEATURES) * toy.DIM, 32)
        self.extra = torch.nn.Linear(2, 2)


def fit_another_model(rank: int, path: str) -> None:
    toy.trainer(FreeScaleStrategy(), 2).fit(Wider(), toy.loader(), ckpt_path=path)


def test_a_checkpoint_of_another_model(full_run: tuple[Path, list[dict]]) -> None:
    path = full_run[0] / "epoch=0-step=5.ckpt"
    with pytest.raises(RankFailed) as failure:
        run_ranks(fit_another_model, args=(str(path),), every_error=True)
    assert set(failure.value.errors) == {0, 1}
    for message in failure.value.errors.values():
        assert "belongs to another model" in message
        assert "head.0.weight has shape [16, 24] there and [32, 24] here" in message
        assert "extra.weight is missing there" in message


def test_a_moved_copy_loads(full_run: tuple[Path, list[dict]], tmp_path: Path) -> None:
    good, path = full_run[0] / "epoch=0-step=5.ckpt", tmp_path / "copy.ckpt"
    (shutil.copy if good.is_file() else shutil.copytree)(good, path)
    assert run_ranks(fit, args=(2, None, str(path)))[0]["steps"] == 22
