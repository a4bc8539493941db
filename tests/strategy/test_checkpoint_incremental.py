"""Incremental checkpoints hold the bits of full ones, on any number of ranks, with a fraction of the bytes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

import lightning_freescale as fs
from lightning_freescale import CheckpointError, ConfigurationError, FreeScaleStrategy, Incremental
from lightning_freescale.strategy.checkpoints import changes
from lightning_freescale.strategy.checkpoints.changes import Piece
from lightning_freescale.strategy.checkpoints.plain_loading import read_whole
from lightning_freescale.strategy.checkpoints.verify import verify
from tests import toy
from tests.ranks import RankFailed, run_ranks

SAVE_EVERY, FULL_EVERY = 2, 3


# ---- which rows have changed -----------------------------------------------------------------------------------------
def test_every_changed_bit_is_found() -> None:
    before = torch.tensor([[1.0, 2.0], [0.0, 3.0], [float("nan"), 1.0], [4.0, 5.0]])
    now = before.clone()
    now[1, 0] = -0.0
    now[3, 1] = torch.nextafter(now[3, 1], torch.tensor(9.0))
    assert changes.changed_rows(before, now).tolist() == [1, 3]
    assert changes.changed_rows(before[:, 0], now[:, 0]).tolist() == [1]
    assert changes.changed_rows(before, before.clone()).tolist() == []


@st.composite
def two_shardings(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[Any], list[Any]]:
    """Two states of a tensor, and two ways to cut it into rectangles."""
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    before = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    now = torch.where(mask[:, None], before + 100, before)

    def cuts(size: int) -> list[tuple[int, int]]:
        inner = sorted(draw(st.sets(st.integers(1, size - 1), max_size=2))) if size > 1 else []
        return list(zip([0, *inner], [*inner, size], strict=True))

    return before, now, *([(r, c) for r in cuts(rows) for c in cuts(columns)] for _ in range(2))  # type: ignore[return-value]


@settings(max_examples=20, deadline=None)
@given(two_shardings())
def test_changes_of_one_sharding_reach_every_shard_of_another(case: Any) -> None:
    before, now, old_cuts, new_cuts = case

    def pieces(state: Tensor, cuts: list[Any]) -> list[Piece]:
        return [Piece((r[0], c[0]), state[r[0] : r[1], c[0] : c[1]].clone()) for r, c in cuts]

    found = changes.find({"t": pieces(before, old_cuts)}, {"t": pieces(now, old_cuts)})
    for target, expected in zip(pieces(before, new_cuts), pieces(now, new_cuts), strict=True):
        for entry in found.get("t", []):
            changes.apply(entry, target.values, target.offsets)
        assert torch.equal(target.values, expected.values)


# ---- checkpoints of a training ---------------------------------------------------------------------------------------
def train(
    rank: int,
    world: int,
    folder: str,
    checkpoint: Any,
    resume: str | None = None,
    asynchronous: bool = False,
    keep: int = -1,
) -> dict[str, Tensor]:
    pl.seed_everything(1, verbose=False)
    saves = pl.callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=SAVE_EVERY, save_top_k=keep)
    trainer = toy.trainer(
        FreeScaleStrategy(checkpoint=checkpoint, timeout=20, embedding_optimizer={"optimizer": "adagrad"}),
        world,
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[saves],
        plugins=[AsyncCheckpointIO()] if asynchronous else [],
    )
    model = toy.Model(lr=0.05)
    trainer.fit(model, toy.loader(size=8 * world, batch_size=1), ckpt_path=resume)
    return toy.weights(model)


def both(rank: int) -> None:
    train(rank, 2, "full", "sharded")
    train(rank, 2, "increments", Incremental(full_every=FULL_EVERY))
    train(rank, 2, "background", Incremental(full_every=FULL_EVERY), asynchronous=True)
    train(rank, 2, "last", Incremental(), keep=1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("saved")
        patch.chdir(root)
        run_ranks(both)
    return root


def names(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.iterdir()), key=lambda name: int(name.split("step=")[1].split(".")[0]))


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return True


def states(path: Path) -> dict[str, Any]:
    whole = read_whole(str(path), weights_only=False)
    return {"weights": whole["state_dict"], "tables": whole["freescale"]["table_optimizer"]}


def shards(path: Path) -> dict[str, int]:
    """The files of the shards and where they are on the disk."""
    return {file.name: file.stat().st_ino for file in path.glob("*.distcp")}


@pytest.mark.parametrize("folder", ["increments", "background"])
def test_incremental_checkpoints_hold_what_full_ones_hold(saved: Path, folder: str) -> None:
    found = names(saved / folder)
    assert found == names(saved / "full")
    partial = [(saved / folder / name / "changes_1.pt").exists() for name in found]
    assert partial == [False, True, True, False]  # FULL_EVERY
    for name in found:
        assert equal(states(saved / folder / name), states(saved / "full" / name))
        assert verify(saved / folder / name).step == int(name.split("step=")[1].split(".")[0])
    places = [shards(saved / folder / name) for name in found]
    assert places[0] == places[1] == places[2] != places[3]  # Linked, not copied.


def test_the_last_checkpoint_alone_is_kept(saved: Path) -> None:
    """Each save finds the files of the full checkpoint in its predecessor, and the full one is removed."""
    (name,) = names(saved / "last")
    assert (saved / "last" / name / "changes_0.pt").exists()
    assert equal(states(saved / "last" / name), states(saved / "full" / name))


def test_without_the_changes_a_checkpoint_is_another_one(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the comparison above."""
    name = names(saved / "increments")[1]
    monkeypatch.setattr(changes, "apply_all", lambda *arguments: None)
    assert not equal(states(saved / "increments" / name), states(saved / "full" / name))


def resume_both(rank: int, world: int, root: str, name: str) -> list[dict[str, Tensor]]:
    return [train(rank, world, f"{kind}{world}", "sharded", f"{root}/{kind}/{name}") for kind in ("full", "increments")]


@pytest.mark.parametrize("world", [2, 3])
def test_resume_on_any_number_of_ranks(saved: Path, world: int) -> None:
    for full, increments in run_ranks(resume_both, world, args=(world, str(saved), names(saved / "full")[1])):
        assert toy.same(full, increments)


def test_a_checkpoint_stays_complete_when_the_full_one_is_removed(saved: Path, tmp_path: Path) -> None:
    full, increment, *_ = names(saved / "increments")
    moved = tmp_path / increment
    shutil.move(saved / "increments" / increment, moved)
    aside = saved / "aside"
    shutil.move(saved / "increments" / full, aside)
    try:
        assert equal(states(moved), states(saved / "full" / increment))
        exported = fs.export(moved, tmp_path / "model.pt", weights_only=False)
        assert toy.same(exported, states(saved / "full" / increment)["weights"])
    finally:
        shutil.move(moved, saved / "increments" / increment)
        shutil.move(aside, saved / "increments" / full)


def test_damage_of_the_changes_is_named(saved: Path, tmp_path: Path) -> None:
    copied = tmp_path / "damaged.ckpt"
    shutil.copytree(saved / "increments" / names(saved / "increments")[1], copied)
    data = bytearray((copied / "changes_1.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (copied / "changes_1.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"changes_1\.pt"):
        verify(copied)
    with pytest.raises(RankFailed, match=r"changes_1\.pt"):
        run_ranks(train, args=(2, "again", "sharded", str(copied)))


# ---- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_bad_distances_of_full_saves_are_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"full_every={value}"):
        Incremental(full_every=value)


def save_remotely(rank: int) -> None:
    train(rank, 2, "memory://increments", Incremental())


def test_a_remote_store_is_refused() -> None:
    with pytest.raises(RankFailed, match="a remote store cannot"):
        run_ranks(save_remotely)
