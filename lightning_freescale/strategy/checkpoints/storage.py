"""Where a checkpoint folder lies: paths and remote addresses, atomic replacement, and checksums.

A local folder is written under another name and renamed at the end. A remote store has no atomic rename. There, each save
writes into a subfolder of its own, and ``checksums.json``, which names the files that count, is written last. So at every
moment one complete checkpoint can be found, and a crash during a save leaves the one before it.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zlib
from pathlib import Path
from typing import IO, Any

from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from lightning_freescale.runtime.errors import CheckpointError, CheckpointNotFoundError

META = "meta.pt"
METADATA = ".metadata"
CHECKSUMS = "checksums.json"
PREVIOUS_CHECKSUMS = "checksums.previous.json"
_CHUNK_BYTES = 1 << 22  # Bytes read at a time for a checksum.

Checksums = dict[str, list[int]]  # The size in bytes and the CRC-32 of each file, by its name in the folder.


def is_local(path: str) -> bool:
    return get_protocol(path) == "file"


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def open_file(path: str, mode: str) -> IO[Any]:
    fs, inner = url_to_fs(path)
    return fs.open(inner, mode)


def exists(path: str) -> bool:
    fs, inner = url_to_fs(path)
    return fs.exists(inner)


def is_folder(path: str) -> bool:
    """Whether ``path`` is a folder. Web servers have none."""
    if get_protocol(path).startswith("http"):
        return False
    fs, inner = url_to_fs(path)
    return fs.isdir(inner)


def remove(path: str) -> None:
    """Remove the file or folder ``path`` if there is one."""
    fs, inner = url_to_fs(path)
    if fs.exists(inner):
        fs.rm(inner, recursive=True)


def previous_of(path: str) -> str:
    """The name of the checkpoint that a save to ``path`` replaces, while the two are exchanged."""
    parent, slash, name = path.rstrip("/").rpartition("/")
    return f"{parent}{slash}.{name}.previous"


def find(path: str) -> str:
    """The path at which the checkpoint ``path`` lies. A crash while two checkpoints are exchanged leaves the old one."""
    previous = previous_of(path)
    if exists(path) and not (is_folder(path) and _read_json(join(path, CHECKSUMS)) is None and exists(previous)):
        return path
    if exists(previous):
        return previous
    raise CheckpointNotFoundError(f"Checkpoint file not found: {path}")


def is_checkpoint_folder(path: str) -> bool:
    """Whether ``path`` is a folder that this package wrote, or one whose predecessor is left after a crash."""
    return is_folder(path) and (exists(join(path, CHECKSUMS)) or exists(previous_of(path)))


def set_aside(path: str, unless: str) -> None:
    """Rename ``path`` to :func:`previous_of` if it exists and is not of the kind ``unless``: ``"file"`` or ``"folder"``."""
    if not exists(path) or is_folder(path) == (unless == "folder"):
        return
    remove(previous_of(path))
    fs, inner = url_to_fs(path)
    fs.mv(inner, url_to_fs(previous_of(path))[1], recursive=unless == "file")


# ---- writing -----------------------------------------------------------------------------------------------------
class LocalTarget:
    """Writes a folder beside ``path`` and renames it into place."""

    def __init__(self, path: str):
        self._path = Path(url_to_fs(path)[1])
        self._partial = self._path.with_name(f".{self._path.name}.partial")

    def prepare(self) -> str:
        """Make the folder to write into, and return its path."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._partial, ignore_errors=True)  # An earlier save may have crashed.
        self._partial.mkdir()
        return str(self._partial)

    def commit(self, checksums: Checksums) -> None:
        """Write the list of files and put the folder into its place."""
        (self._partial / CHECKSUMS).write_text(json.dumps(checksums, indent=1))
        _sync(self._partial)
        previous = Path(previous_of(str(self._path)))
        if self._path.exists():
            _remove_local(previous)
            self._path.rename(previous)
        self._partial.rename(self._path)
        _remove_local(previous)


class RemoteTarget:
    """Writes a subfolder of ``path``, then the list that names its files, then removes what the list does not name."""

    def __init__(self, path: str):
        self._path = path.rstrip("/")
        self._subfolder = uuid.uuid4().hex[:12]

    def prepare(self) -> str:
        set_aside(self._path, unless="folder")
        folder = join(self._path, self._subfolder)
        fs, inner = url_to_fs(folder)
        fs.makedirs(inner, exist_ok=True)
        return folder

    def commit(self, checksums: Checksums) -> None:
        current, previous = join(self._path, CHECKSUMS), join(self._path, PREVIOUS_CHECKSUMS)
        if (old := _read_json(current)) is not None:
            # Not every store replaces a file atomically. The copy counts while the list itself cannot be read.
            _write_text(previous, json.dumps(old, indent=1))
        named = {f"{self._subfolder}/{name}": value for name, value in checksums.items()}
        _write_text(current, json.dumps(named, indent=1))
        fs, inner = url_to_fs(self._path)
        for entry in fs.ls(inner, detail=False):
            if entry.rstrip("/").rsplit("/", 1)[-1] not in (CHECKSUMS, self._subfolder):
                fs.rm(entry, recursive=True)
        remove(previous_of(self._path))


def target_of(path: str) -> LocalTarget | RemoteTarget:
    return LocalTarget(path) if is_local(path) else RemoteTarget(path)


def _write_text(path: str, text: str) -> None:
    with open_file(path, "wb") as stream:
        stream.write(text.encode())


def _remove_local(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    for file in [*folder.iterdir(), folder]:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# ---- checksums ---------------------------------------------------------------------------------------------------
def file_names(folder: str) -> list[str]:
    """The sorted names of the files in ``folder``."""
    fs, inner = url_to_fs(folder)
    fs.invalidate_cache()  # Other ranks have written files here.
    return sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(inner, detail=False))


def checksum(path: str) -> list[int]:
    """The size in bytes and the CRC-32 of a file."""
    size = value = 0
    with open_file(path, "rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            size += len(chunk)
            value = zlib.crc32(chunk, value)
    return [size, value]


def _read_json(path: str) -> Checksums | None:
    """The list of files at ``path``; ``None`` if it is missing or incomplete."""
    try:
        with open_file(path, "rb") as stream:
            return json.loads(stream.read())
    except (ValueError, OSError, RecursionError):
        return None


def read_checksums(path: str) -> Checksums:
    """The files that belong to the checkpoint folder ``path``."""
    current = join(path, CHECKSUMS)
    checksums = _read_json(current)
    if checksums is None:
        checksums = _read_json(join(path, PREVIOUS_CHECKSUMS))
    if checksums is None and not exists(current):
        raise CheckpointError(
            f"{path} is not a checkpoint of this strategy, or it is incomplete: {CHECKSUMS} is missing"
        )
    if not isinstance(checksums, dict):
        raise CheckpointError(f"{path} is damaged: {CHECKSUMS} cannot be read")
    for name, entry in checksums.items():
        if ".." in name.split("/") or name.startswith("/"):
            raise CheckpointError(f"{path} is damaged: {CHECKSUMS} lists {name!r}, which is not in this folder")
        if not isinstance(entry, list) or len(entry) != 2 or not all(type(part) is int for part in entry):
            raise CheckpointError(f"{path} is damaged: {CHECKSUMS} has no size and CRC of {name!r}")
    for name in (META, METADATA):
        if sum(file.rsplit("/", 1)[-1] == name for file in checksums) != 1:
            raise CheckpointError(f"{path} is damaged: {CHECKSUMS} does not list {name} once")
    return checksums


def check_file(path: str, name: str, expected: list[int], whole: bool = True) -> None:
    """Raise :class:`CheckpointError` unless the file ``name`` of ``path`` is what was written.

    Args:
        whole: read the file and compare its CRC-32, not only its size.
    """
    fs, inner = url_to_fs(join(path, name))
    if not fs.isfile(inner):
        raise CheckpointError(f"{path} is damaged: {name} is missing")
    found = checksum(join(path, name)) if whole else [fs.size(inner), expected[1]]
    if found != expected:
        raise CheckpointError(
            f"{path} is damaged: {name} has {found[0]} bytes, CRC {found[1]:08x}; "
            f"{expected[0]} bytes, CRC {expected[1]:08x} were written"
        )


def data_folder(path: str) -> str:
    """The folder that holds the tensors of the checkpoint ``path``: itself, or the subfolder of the last remote save."""
    (metadata,) = [name for name in read_checksums(path) if name.rsplit("/", 1)[-1] == METADATA]
    return join(path, metadata.rpartition("/")[0]) if "/" in metadata else path
