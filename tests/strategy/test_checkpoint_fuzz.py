"""Damaged, foreign and hostile checkpoints: each is a named error, and no code from a checkpoint is run."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lightning_freescale as fs
from lightning_freescale import CheckpointError, FreeScaleStrategy, Incremental
from lightning_freescale.strategy.checkpoints import storage
from lightning_freescale.strategy.checkpoints.plain_loading import read_whole
from lightning_freescale.strategy.checkpoints.verify import verify
from tests import toy
from tests.ranks import run_ranks

KINDS = {"file": "file", "sharded": "sharded", "incremental": Incremental()}
CASES = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(rank: int, root: str) -> None:
    for name, checkpoint in KINDS.items():
        pl.seed_everything(1, verbose=False)
        trainer = toy.trainer(FreeScaleStrategy(checkpoint=checkpoint, timeout=20), 2, max_steps=1)
        trainer.fit(toy.Model(), toy.loader())
        for _ in range(2):  # The second save of Incremental() holds changes.
            trainer.save_checkpoint(f"{root}/{name}.ckpt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_ranks(write, args=(str(root),))
    assert (root / "incremental.ckpt" / "changes_0.pt").exists()
    return root


def read_in_every_way(path: Path) -> None:
    """What a user calls with a checkpoint of unknown origin."""
    verify(path)
    fs.export(path, path.parent / "weights.pt", weights_only=True)
    if path.is_dir():
        read_whole(str(path), weights_only=True)


def test_the_checkpoints_are_read(saved: Path, tmp_path: Path) -> None:
    """The negative control: without damage nothing is refused."""
    for name in KINDS:
        shutil.copytree(saved, tmp_path / name)
        read_in_every_way(tmp_path / name / f"{name}.ckpt")


@CASES
@given(data=st.data())
def test_damage_is_a_named_error(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    root = tmp_path / "copy"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(saved, root)
    path = root / f"{data.draw(st.sampled_from(list(KINDS)))}.ckpt"
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    file = data.draw(st.sampled_from(files))
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    file.write_bytes(content)
    message = None
    try:
        read_in_every_way(path)
    except CheckpointError as error:
        message = str(error)
    if message is not None:
        assert path.name in message
    else:  # PyTorch's archives have padding and dates that no checksum covers.
        assert path.name == "file.ckpt"
        assert toy.same(
            torch.load(path, weights_only=False)["state_dict"],
            torch.load(saved / path.name, weights_only=False)["state_dict"],
        )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just(float("nan")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["meta.pt", ".metadata", "../x"]), inner)
    ),
    max_leaves=6,
)


@CASES
@given(listed=JSON)
def test_any_list_of_files_is_refused(saved: Path, tmp_path: Path, listed: Any) -> None:
    path = tmp_path / "listed.ckpt"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(saved / "sharded.ckpt", path)
    (path / "checksums.json").write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=r"listed\.ckpt"):
        read_in_every_way(path)


# ---- hostile pickles -------------------------------------------------------------------------------------------------
class Payload:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, marker: str):
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def in_metadata(file: Path, payload: Payload) -> None:
    file.write_bytes(pickle.dumps(payload))


def inside_metadata(file: Path, payload: Payload) -> None:
    """A description that is right but for one value."""
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = payload
    file.write_bytes(pickle.dumps(metadata))


def as_object(file: Path, payload: Payload) -> None:
    torch.save({"sharded": {}, "whole": {}, "state_dict": {}, "freescale": payload}, file)


def in_shard(file: Path, payload: Payload) -> None:
    """The shards are records at fixed places of the file. Each is replaced by a pickle."""
    hostile = pickle.dumps(payload)
    file.write_bytes((hostile + bytes(file.stat().st_size))[: file.stat().st_size])


HOSTILE: dict[str, tuple[str, Callable[[Path, Payload], None]]] = {
    "metadata": ("sharded.ckpt/.metadata", in_metadata),
    "value in metadata": ("sharded.ckpt/.metadata", inside_metadata),
    "meta": ("sharded.ckpt/meta.pt", as_object),
    "shard": ("sharded.ckpt/__0_0.distcp", in_shard),
    "changes": ("incremental.ckpt/changes_1.pt", as_object),
    "file": ("file.ckpt", as_object),
}


def give_right_checksums(path: Path) -> None:
    listed = json.loads((path / "checksums.json").read_text())
    (path / "checksums.json").write_text(json.dumps({name: storage.checksum(str(path / name)) for name in listed}))


@pytest.mark.parametrize("name", HOSTILE)
def test_no_code_from_a_checkpoint_is_run(saved: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    marker = tmp_path / "was here"
    where, poison = HOSTILE[name]
    file = tmp_path / "copy" / where
    poison(file, Payload(str(marker)))
    path = tmp_path / "copy" / where.split("/")[0]
    if path.is_dir():
        give_right_checksums(path)
    with pytest.raises(CheckpointError, match=path.name):
        fs.export(path, tmp_path / "whole.ckpt", lightning=True)
    with contextlib.suppress(CheckpointError):  # The weights alone do not need every file.
        fs.export(path, tmp_path / "weights.pt")
    fs.last_checkpoint(tmp_path / "copy")
    assert not marker.exists()


def test_the_payload_works(tmp_path: Path) -> None:
    """The negative control of the test above."""
    pickle.loads(pickle.dumps(Payload(str(tmp_path / "was here"))))
    assert (tmp_path / "was here").exists()
