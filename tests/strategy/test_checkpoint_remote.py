"""Checkpoint folders in a remote store, which has no atomic rename."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

import lightning_freescale as fs
from lightning_freescale import CheckpointError, FreeScaleStrategy
from lightning_freescale.strategy.checkpoints import storage
from tests import toy
from tests.ranks import RankFailed, run_ranks
from tests.slow import slow


class FolderStore(LocalFileSystem):
    """A store that several processes can reach, under the addresses ``testfs://...``. It has no rename."""

    protocol = "testfs"
    root_marker = "/"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        text = os.fspath(path).removeprefix("testfs://")
        return LocalFileSystem._strip_protocol("/" + text.lstrip("/"))

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        fsspec.AbstractFileSystem.mv(self, path1, path2, **kwargs)  # Copies and removes.

    rename = mv


fsspec.register_implementation("testfs", FolderStore, clobber=True)


def fit(
    rank: int, world: int, folder: str | None, resume: str | None, kind: str, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    model = toy.Model()
    options = {"max_epochs": 1, **(options or {})}
    if folder is not None:
        save = pl.callbacks.ModelCheckpoint(
            dirpath=folder, every_n_train_steps=4, save_top_k=2, monitor="step", mode="max"
        )
        options |= {"enable_checkpointing": True, "callbacks": [save]}
    trainer = toy.trainer(FreeScaleStrategy(checkpoint=kind, balance="off"), world, **options)
    trainer.fit(model, toy.loader(48), ckpt_path=resume)  # 12 steps of two ranks, or 24 of one
    if folder is not None:
        assert not Path(folder).exists()  # Once, the address was taken for a local path.
    return {"losses": model.losses, "weights": toy.weights(model), "steps": trainer.global_step}


def in_memory(rank: int, kind: str) -> None:
    full = fit(rank, 1, "memory://runs/one", None, kind)
    store = fsspec.filesystem("memory")
    names = sorted(path.rsplit("/", 1)[-1] for path in store.ls("/runs/one", detail=False))
    assert names == ["epoch=0-step=20.ckpt", "epoch=0-step=24.ckpt"]  # save_top_k removed the older ones.
    assert store.isdir("/runs/one/epoch=0-step=20.ckpt") == (kind == "sharded")
    rest = fit(rank, 1, None, "memory://runs/one/epoch=0-step=20.ckpt", kind)
    assert rest["losses"] == full["losses"][20:]
    assert toy.same(rest["weights"], full["weights"])
    exported = fs.export("memory://runs/one/epoch=0-step=24.ckpt", "memory://runs/model.pt")
    assert toy.same(exported, full["weights"])
    with store.open("/runs/model.pt", "rb") as stream:
        assert toy.same(torch.load(stream, weights_only=True), full["weights"])


@pytest.mark.parametrize("kind", ["file", "sharded"])
def test_one_rank_saves_removes_resumes_and_exports_in_memory(kind: str) -> None:
    run_ranks(in_memory, 1, args=(kind,))


@pytest.mark.parametrize("kind", ["file", "sharded"])
def test_two_ranks_save_remove_and_resume_in_a_store(tmp_path: Path, kind: str) -> None:
    folder = f"testfs://{tmp_path}/runs"
    full = run_ranks(fit, args=(2, folder, None, kind))
    kept = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert kept == ["epoch=0-step=12.ckpt", "epoch=0-step=8.ckpt"]
    rest = run_ranks(fit, args=(2, None, f"{folder}/epoch=0-step=8.ckpt", kind))
    for whole, part in zip(full, rest, strict=True):
        assert part["losses"] == whole["losses"][8:]
        assert toy.same(part["weights"], whole["weights"])
    if kind == "sharded":  # Downloaded, the folder loads from a local path, too.
        (tmp_path / "runs" / "epoch=0-step=8.ckpt").rename(tmp_path / "here.ckpt")
        assert run_ranks(fit, args=(2, None, str(tmp_path / "here.ckpt"), kind))[0]["losses"] == full[0]["losses"][8:]


# ---- crashes ---------------------------------------------------------------------------------------------------------
def crash(rank: int, path: str, stage: str) -> None:
    """Save, change the weights, and die at ``stage`` of the second save to the same address."""
    pl.seed_everything(1, verbose=False)
    model = toy.Model()
    trainer = toy.trainer(FreeScaleStrategy(timeout=20, balance="off", checkpoint="sharded"), 2, max_steps=3)
    trainer.fit(model, toy.loader(48))
    trainer.save_checkpoint(path)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.add_(1.0)
    if rank == 0:
        write, lists = storage._write_text, []

        def die_in_list(target: str, text: str) -> None:
            lists.append(target)
            if stage == "half a list" and target.endswith("checksums.json"):
                write(target, text[: len(text) // 2])
                os._exit(9)
            if (stage, len(lists)) in (("first list", 1), ("second list", 2)):
                os._exit(9)
            write(target, text)
            if stage == "clean-up" and len(lists) == 2:
                FolderStore.rm = die  # type: ignore[method-assign]

        def die(*args: Any, **kwargs: Any) -> None:
            os._exit(9)

        storage._write_text = die_in_list
        if stage == "data":
            torch.save = die
        if stage == "checksums":
            storage.checksum = die
    trainer.save_checkpoint(path)


def validate_and_save_again(rank: int, path: str) -> dict[str, torch.Tensor]:
    """The weights that the checkpoint at ``path`` holds, before another one replaces it."""
    pl.seed_everything(2, verbose=False)
    model = toy.Model()
    trainer = toy.trainer(FreeScaleStrategy(), 2, limit_val_batches=1)
    trainer.validate(model, toy.loader(8, shuffle=False), ckpt_path=path, verbose=False)
    found = {name: value.clone() for name, value in toy.weights(model).items()}
    save_again(rank, path)
    return found


def save_again(rank: int, path: str) -> None:
    trainer = toy.trainer(FreeScaleStrategy(checkpoint="sharded"), 2, max_steps=1)
    trainer.fit(toy.Model(), toy.loader(48))
    trainer.save_checkpoint(path)


@pytest.fixture(scope="module")
def weights_of_first_save() -> dict[str, torch.Tensor]:
    return run_ranks(fit, args=(2, None, None, "file", {"max_steps": 3}))[0]["weights"]


@pytest.mark.parametrize(
    "stage", ["data", "first list", "clean-up", *map(slow, ("checksums", "second list", "half a list"))]
)
def test_a_crash_leaves_one_complete_checkpoint_and_the_next_save_cleans_up(
    tmp_path: Path, stage: str, weights_of_first_save: dict[str, torch.Tensor]
) -> None:
    path = f"testfs://{tmp_path}/last.ckpt"
    with pytest.raises(RankFailed, match="died with exit code 9"):
        run_ranks(crash, args=(path, stage), every_error=True)
    found = run_ranks(validate_and_save_again, args=(path,))[0]
    # The lists are the last step: after them the second save counts.
    change = 1.0 if stage == "clean-up" else 0.0
    for name, value in weights_of_first_save.items():
        torch.testing.assert_close(found[name], value + (change if name.startswith("head") else 0.0), rtol=0, atol=0)
    (subfolder,) = [entry.name for entry in (tmp_path / "last.ckpt").iterdir() if entry.is_dir()]
    assert sorted(os.listdir(tmp_path / "last.ckpt")) == sorted(["checksums.json", subfolder])


def test_an_incomplete_first_save_is_recognised(tmp_path: Path) -> None:
    folder = tmp_path / "new.ckpt" / "abc"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"checksums\.json is missing"):
        fs.export(f"testfs://{tmp_path}/new.ckpt", tmp_path / "out.pt")


def test_an_unfinished_folder_does_not_hide_the_file_that_it_replaces(tmp_path: Path) -> None:
    path = f"testfs://{tmp_path}/last.ckpt"
    (tmp_path / "last.ckpt").write_text("a file")
    target = storage.target_of(path)
    folder = target.prepare()
    assert storage.find(path) == f"testfs://{tmp_path}/.last.ckpt.previous"
    with storage.open_file(f"{folder}/data", "wb") as stream:
        stream.write(b"shards")
    target.commit({"data": storage.checksum(f"{folder}/data")})
    assert storage.find(path) == path
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_format_replaces_the_other_at_the_same_place(tmp_path: Path) -> None:
    for address in (f"testfs://{tmp_path}/remote.ckpt", str(tmp_path / "local.ckpt")):
        weights = run_ranks(alternate, args=(address,))[0]
        assert toy.same(fs.export(address, tmp_path / "out.pt"), weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["local.ckpt", "out.pt", "remote.ckpt"]


def alternate(rank: int, path: str) -> dict[str, torch.Tensor]:
    for kind in ("file", "sharded", "file"):
        model = toy.Model()
        trainer = toy.trainer(FreeScaleStrategy(checkpoint=kind), 2, max_steps=1)
        trainer.fit(model, toy.loader(48))
        trainer.save_checkpoint(path)
    return toy.weights(model)


def test_the_list_names_every_file_of_the_last_save(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    run_ranks(save_again, args=(f"testfs://{path}",))
    listed = set(json.loads((path / "checksums.json").read_text()))
    assert listed == {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {"checksums.json"}
