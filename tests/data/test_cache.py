"""The cache: an entry is built once for any number of processes, rebuilt if damaged, and never incomplete."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest

import lightning_freescale.data.cache as cache_module
from lightning_freescale.data import Histories, SeqRecDataModule, Synthetic
from lightning_freescale.data.cache import cached, fingerprint
from lightning_freescale.runtime.errors import ConfigurationError, InputError
from tests.ranks import run_ranks

SMALL = Synthetic(users=20, items=30, clusters=3, mean_length=8, feature_sizes={"action/kind": 4})


def equal(a: Histories, b: Histories) -> bool:
    columns = ("items", "timestamps", "offsets", "item_ids", "user_ids")
    same = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in columns)
    for ours, theirs in ((a.features, b.features), (a.feature_values, b.feature_values)):
        same &= list(ours) == list(theirs) and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    return same


class Builder:
    """Builds histories, and counts its calls from all processes in a file."""

    def __init__(self, calls: Path, seconds: float = 0.0):
        self.calls, self.seconds = calls, seconds

    def __call__(self, folder: Path) -> None:
        with self.calls.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(self.seconds)
        SMALL.generate().save(folder)

    @property
    def count(self) -> int:
        return len(self.calls.read_text().split()) if self.calls.exists() else 0


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    return Builder(tmp_path / "calls")


def ask(builder: Builder, root: Path) -> Histories:
    return cached("small", {"a": 1}, builder, Histories.load, root)


def test_loaded_histories_equal_the_saved_ones_and_are_mapped(tmp_path: Path, builder: Builder) -> None:
    histories = ask(builder, tmp_path / "cache")
    assert equal(histories, SMALL.generate())
    assert not equal(histories, Synthetic(users=20, items=30, clusters=3, mean_length=8, seed=1).generate())
    assert isinstance(histories.items.base, np.memmap)
    assert not histories.items.flags.writeable


def test_pickling_maps_the_same_files(tmp_path: Path, builder: Builder) -> None:
    histories = ask(builder, tmp_path / "cache")
    data = pickle.dumps(histories)
    assert len(data) < 1000  # a path instead of the events
    assert equal(pickle.loads(data), histories)
    in_memory = SMALL.generate()
    assert equal(pickle.loads(pickle.dumps(in_memory)), in_memory)


def test_an_entry_is_built_once(tmp_path: Path, builder: Builder) -> None:
    ask(builder, tmp_path / "cache")
    ask(builder, tmp_path / "cache")
    assert builder.count == 1
    cached("small", {"a": 2}, builder, Histories.load, tmp_path / "cache")
    assert builder.count == 2


def _ask_as_rank(rank: int, builder: Builder, root: Path) -> int:
    return int(ask(builder, root).items.sum())


def test_many_processes_build_an_entry_once(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "calls", seconds=0.3)  # the other processes arrive meanwhile
    sums = run_ranks(_ask_as_rank, world=4, args=(builder, tmp_path / "cache"))
    assert builder.count == 1
    assert sums == [int(SMALL.generate().items.sum())] * 4
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and path.name.startswith(".")]


def _cut(folder: Path) -> None:
    data = (folder / "items.npy").read_bytes()
    (folder / "items.npy").write_bytes(data[: len(data) // 2])


def _other_version(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"version": 999}))


def _other_length(folder: Path) -> None:
    np.save(folder / "timestamps.npy", np.arange(3))


DAMAGE = {
    "cut": _cut,
    "no array": lambda folder: (folder / "offsets.npy").unlink(),
    "no json": lambda folder: (folder / "meta.json").unlink(),
    "bad json": lambda folder: (folder / "meta.json").write_text("{"),
    "other version": _other_version,
    "not an array": lambda folder: (folder / "item_ids.npy").write_bytes(b"hello"),
    "other length": _other_length,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_rebuilt_with_a_warning(
    tmp_path: Path, builder: Builder, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(cache_module, "log_once", lambda message, level: messages.append(message))
    ask(builder, tmp_path / "cache")
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert not messages
    DAMAGE[damage](folder)
    assert equal(ask(builder, tmp_path / "cache"), SMALL.generate())
    assert builder.count == 2
    assert len(messages) == 1
    assert "built again" in messages[0]


def test_a_failed_build_leaves_no_entry(tmp_path: Path, builder: Builder) -> None:
    def fail(folder: Path) -> None:
        (folder / "items.npy").write_bytes(b"half")
        raise InputError("no")

    with pytest.raises(InputError, match="no"):
        cached("small", {"a": 1}, fail, Histories.load, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []
    assert equal(ask(builder, tmp_path / "cache"), SMALL.generate())


def test_cache_dir_that_is_a_file(tmp_path: Path, builder: Builder) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cache_dir: cannot write to .*file"):
        ask(builder, tmp_path / "file")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "pairs.txt"
    path.write_text("1 1\n1 2\n1 3\n")
    before = fingerprint([path])
    assert SeqRecDataModule(path, batch_size=1, max_history=5, cache_dir=tmp_path / "cache").num_items == 3
    path.write_text("1 1\n1 2\n1 3\n1 4\n")
    assert fingerprint([path]) != before
    assert SeqRecDataModule(path, batch_size=1, max_history=5, cache_dir=tmp_path / "cache").num_items == 4


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FREESCALE_CACHE", str(tmp_path / "here"))
    assert cache_module.default_cache_dir() == tmp_path / "here"
    monkeypatch.delenv("FREESCALE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_module.default_cache_dir() == tmp_path / "lightning_freescale"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"items": np.array([0, 5])}, "items: 5 is outside 0 to 1"),
        ({"items": np.array([-1, 0])}, "items: -1 is outside 0 to 1"),
        ({"items": np.array([0, 1], dtype=np.int32)}, "items: must be int64, not int32"),
        ({"timestamps": np.array([0])}, "timestamps: 1 values for 2 events"),
        ({"offsets": np.array([0, 1])}, "offsets: must grow from 0 to 2"),
        ({"user_ids": np.array([7, 8])}, "user_ids: 2 values for 1 users"),
        ({"features": {"f": np.array([0, 0])}}, "feature_values"),
        ({"features": {"history": np.array([0, 0])}}, "'history' is a reserved key of the batch"),
    ],
)
def test_inconsistent_histories_are_refused(change: dict, message: str) -> None:
    good = {
        "items": np.array([0, 1]),
        "timestamps": np.array([3, 4]),
        "offsets": np.array([0, 2]),
        "item_ids": np.array([10, 11]),
        "user_ids": np.array([7]),
    }
    Histories(**good)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        Histories(**{**good, **change})  # type: ignore[arg-type]
