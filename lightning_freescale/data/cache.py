"""A cache on disk: the first process builds an entry, the others wait for it and memory-map the same files."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_freescale.runtime.errors import ConfigurationError, InputError
from lightning_freescale.runtime.log import log_once

FORMAT_VERSION = 1  # of all entries
_META = "meta.json"
T = TypeVar("T")


class DamagedCache(InputError):
    """A folder of the cache is incomplete, or has another format version."""


def save_arrays(folder: Path, arrays: Mapping[str, NDArray], **meta: Any) -> None:
    """Write ``.npy`` files, then a JSON file with ``meta``. A folder without the JSON file is incomplete."""
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    (folder / _META).write_text(json.dumps({"version": FORMAT_VERSION, **meta}))


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the ``meta`` of :func:`save_arrays`, and the version."""
    with damage_detected(folder):
        meta = json.loads((folder / _META).read_text())
        if meta["version"] != FORMAT_VERSION:
            raise DamagedCache(f"{folder}: format version {meta['version']}, expected {FORMAT_VERSION}")
        return meta


def map_array(folder: Path, name: str) -> NDArray:
    """Return one array, memory-mapped and read-only."""
    with damage_detected(folder):
        # np.memmap is slow to index, so return a plain array that keeps the mapping.
        return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))


@contextmanager
def damage_detected(folder: Path) -> Iterator[None]:
    """Turn errors while reading ``folder`` into :class:`DamagedCache`."""
    try:
        yield
    except DamagedCache:
        raise
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DamagedCache(f"{folder}: {type(error).__name__}: {error}") from error


def default_cache_dir() -> Path:
    """Return ``$FREESCALE_CACHE`` or, by default, ``lightning_freescale`` in the user's cache folder."""
    if folder := os.environ.get("FREESCALE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_freescale"


def fingerprint(paths: list[Path]) -> list[list[Any]]:
    """Return absolute path, size in bytes and modification time in ns of each file: they change when a file does."""
    return [[str(path.resolve()), (stat := path.stat()).st_size, stat.st_mtime_ns] for path in paths]


def cached(
    name: str,
    identity: Mapping[str, Any],
    build: Callable[[Path], None],
    load: Callable[[Path], T],
    cache_dir: Path | None = None,
) -> T:
    """Return ``load(folder)`` for an entry of the cache. If the entry is missing, ``build(folder)`` writes it first.

    Any number of processes may call this at the same time, also before a process group exists. An entry that is damaged or
    has another format version is built again.

    Args:
        name: the readable part of the folder's name.
        identity: everything that the entry depends on, as JSON types.
        build: writes the entry into the empty folder that it is given.
        load: reads the entry. Raises :class:`DamagedCache` if it is incomplete.
        cache_dir: the folder of the cache, by default :func:`default_cache_dir`.
    """
    root = cache_dir or default_cache_dir()
    key = hashlib.sha256(json.dumps([FORMAT_VERSION, identity], sort_keys=True).encode()).hexdigest()[:16]
    folder = root / f"{name}-{key}"
    if folder.exists():
        try:
            return load(folder)  # the usual case needs no lock
        except DamagedCache:
            pass  # another process may be replacing it, so load it again under the lock
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{folder.name}.lock"):
            return _load_or_build(folder, build, load)
    except OSError as error:  # for example missing permission, a full disk, or a file with the name of a folder
        raise ConfigurationError(f"cache_dir: cannot write to {root} ({error}); pass another cache_dir") from error


def _load_or_build(folder: Path, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    if folder.exists():
        try:
            return load(folder)
        except DamagedCache as error:
            log_once(
                f"The preprocessed data in the cache are damaged, so they are built again: {error}", logging.WARNING
            )
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        build(work)
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)  # atomic, so a folder with the final name is complete
        return load(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``. The kernel releases it when the process dies, so no stale lock can remain."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
