"""Checkpoints: a folder in Lightning's layout, written atomically, read back on any number of ranks.

    NAME.ckpt/
      .metadata, __R_K.distcp    torch.distributed.checkpoint: weights (sharded tables too) and the state of their optimizer
      meta.pt                    Lightning's part: loops, callbacks, dense optimizers, schedulers, hyperparameters
      checksums.json             size and CRC-32 of every other file

The folder is written beside its name and renamed into place, so a crash at any moment leaves the previous one whole.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from lightning_freescale.runtime.errors import CheckpointError
from lightning_freescale.strategy.control import Control

META = "meta.pt"
CHECKSUMS = "checksums.json"
FORMAT = "freescale_checkpoint"
_CHUNK = 1 << 22  # bytes read at a time for a checksum


# ---- save --------------------------------------------------------------------------------------------------------
def save(path: Path, sharded: Mapping[str, Any], meta: dict[str, Any], control: Control) -> None:
    """Write ``sharded`` (tensors, sharded ones too) and ``meta`` to the folder ``path``. A collective."""
    partial = path.with_name(f".{path.name}.partial")
    error: Exception | None = None
    if control.rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)  # of an earlier crash
            partial.mkdir()
        except OSError as failure:
            error = failure
    control.agree(error, where=f"saving {path}")
    try:
        dcp.save(dict(sharded), checkpoint_id=partial, process_group=control.group)
    except BaseException as failure:  # DCP's CheckpointException is no Exception, and is raised on every rank
        raise CheckpointError(f"rank {control.rank}: saving {path} failed: {failure}") from failure
    if control.rank == 0:
        try:
            torch.save({**meta, FORMAT: 1}, partial / META)
        except Exception as failure:
            error = failure
    control.agree(error, where=f"saving {path}")
    sums = _checksums(partial, control)
    if control.rank == 0:
        try:
            (partial / CHECKSUMS).write_text(json.dumps(sums, indent=1))
            _replace(partial, path)
        except OSError as failure:
            error = failure
    control.agree(error, where=f"saving {path}")


def _replace(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``, which may exist; at every moment one whole checkpoint is there."""
    _sync(source)
    previous = _previous(target)
    shutil.rmtree(previous, ignore_errors=True)
    if target.is_dir():
        target.rename(previous)
    elif target.exists():
        target.unlink()
    source.rename(target)
    shutil.rmtree(previous, ignore_errors=True)


def _previous(path: Path) -> Path:
    """Where the checkpoint that ``path`` replaces stands while the two are exchanged."""
    return path.with_name(f".{path.name}.previous")


def _sync(folder: Path) -> None:
    for file in [*folder.iterdir(), folder]:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _checksums(folder: Path, control: Control) -> dict[str, list[int]]:
    """``{file name: [size, CRC-32]}`` of all files but the list itself; the ranks share the reading. A collective."""
    names = sorted(file.name for file in folder.iterdir() if file.name != CHECKSUMS)
    mine = {name: _checksum(folder / name) for name in names[control.rank :: control.world_size]}
    return {name: value for part in control.gather(mine) for name, value in part.items()}


def _checksum(file: Path) -> list[int]:
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return [file.stat().st_size, value]


# ---- load --------------------------------------------------------------------------------------------------------
def verify(path: Path, control: Control) -> None:
    """Raise :class:`CheckpointError` on every rank unless ``path`` is one of our folders, whole. A collective."""
    error: Exception | None = None
    if control.rank == 0 and not path.exists() and _previous(path).is_dir():
        _previous(path).rename(path)  # a crash between the two renames of a save
    control.agree(None)  # all ranks look after rank 0 has mended
    try:
        expected = _expected_files(path)
        for name in sorted(expected)[control.rank :: control.world_size]:
            if not (path / name).is_file():
                raise CheckpointError(f"{path} is damaged: {name} is missing")
            if (found := _checksum(path / name)) != expected[name]:
                raise CheckpointError(
                    f"{path} is damaged: {name} has {found[0]} bytes, CRC {found[1]:08x}; "
                    f"{expected[name][0]} bytes, CRC {expected[name][1]:08x} were written"
                )
    except Exception as failure:
        error = failure
    control.agree(error, where="loading a checkpoint")


def _expected_files(path: Path) -> dict[str, list[int]]:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_file():
        raise CheckpointError(
            f"{path} is a single file, not a checkpoint folder of this strategy; to start from its weights, call "
            "model.load_state_dict(torch.load(...)['state_dict']) before fit()"
        )
    try:
        expected = json.loads((path / CHECKSUMS).read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is not a checkpoint of this strategy, or is incomplete: {CHECKSUMS} is missing"
        ) from None
    except (ValueError, OSError) as failure:
        raise CheckpointError(f"{path} is damaged: {CHECKSUMS} cannot be read ({failure})") from failure
    for name in (META, ".metadata"):
        if name not in expected:
            raise CheckpointError(f"{path} is damaged: {CHECKSUMS} does not list {name}")
    return expected


def check_same_model(path: Path, wanted: Mapping[str, Any], strict: bool) -> None:
    """Raise :class:`CheckpointError` if the weights in ``path`` are not those of the model with state dict ``wanted``."""
    stored = {name: tuple(entry.size) for name, entry in _tensors(read_metadata(path), "state_dict.").items()}
    shapes = {name: tuple(value.size()) for name, value in wanted.items() if hasattr(value, "size")}
    problems = [
        f"{name} has shape {list(stored[name])} there and {list(shapes[name])} here"
        for name in sorted(stored.keys() & shapes.keys())
        if stored[name] != shapes[name]
    ]
    problems += [f"{name} is missing there" for name in sorted(shapes.keys() - stored.keys())]
    if strict:
        problems += [f"{name} is unknown here" for name in sorted(stored.keys() - shapes.keys())]
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise CheckpointError(f"{path} belongs to another model: {'; '.join(problems[:5])}{more}")


def read_metadata(path: Path) -> Metadata:
    return FileSystemReader(path).read_metadata()


def _tensors(metadata: Metadata, prefix: str) -> dict[str, TensorStorageMetadata]:
    return {
        name.removeprefix(prefix): entry
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def load_sharded(path: Path, state: dict[str, Any], control: Control) -> None:
    """Fill the tensors of ``state`` in place, whatever the number of ranks that wrote them. A collective."""
    try:
        state = {key: part for key, part in state.items() if part}  # DCP looks for empty mappings too
        dcp.load(state, checkpoint_id=path, process_group=control.group)
    except BaseException as failure:  # CheckpointException is no Exception; raised on every rank
        if isinstance(failure, KeyboardInterrupt):
            raise
        raise CheckpointError(f"rank {control.rank}: {path} cannot be loaded here: {failure}") from failure


def load_meta(path: Path, weights_only: bool | None = None) -> dict[str, Any]:
    """Lightning's part of the checkpoint. Plain data unless ``weights_only`` is ``False``."""
    try:
        meta = torch.load(path / META, map_location="cpu", weights_only=weights_only is not False)
    except Exception as failure:
        raise CheckpointError(
            f"{path / META} cannot be read: {failure}. If it holds objects of your own and you trust the file, allow their "
            "types with torch.serialization.add_safe_globals([...])"
        ) from failure
    if FORMAT not in meta:
        raise CheckpointError(f"{path} was not written by this strategy")
    return meta


# ---- export ------------------------------------------------------------------------------------------------------
def export(checkpoint: str | os.PathLike, output: str | os.PathLike) -> dict[str, torch.Tensor]:
    """Write the weights of ``checkpoint`` to ``output`` as one plain, unsharded state dict, and return it.

    Needs no process group and no GPU: ``model.load_state_dict(torch.load(output))`` then works on the unsharded model.
    """
    path, target = Path(checkpoint), Path(output)
    for name, (size, _) in _expected_files(path).items():
        if not (path / name).is_file() or (path / name).stat().st_size != size:
            raise CheckpointError(f"{path} is damaged: {name} is missing or has another size")
    nested: dict[str, Any] = {}
    _load_state_dict(
        nested,
        storage_reader=FileSystemReader(path),
        planner=_EmptyStateDictLoadPlanner(keys={"state_dict"}),
        no_dist=True,
    )
    state = nested["state_dict"]
    partial = target.with_name(f".{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, partial)
    partial.replace(target)
    return state
