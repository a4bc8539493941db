"""Preprocess once: the first process to ask builds, the others wait for it and map the same files."""

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

FORMAT_VERSION = 1  # of everything in the cache
_META = "meta.json"
T = TypeVar("T")


class DamagedCache(InputError):
    """A folder that is not whole, or of another format version."""


def save_arrays(folder: Path, arrays: Mapping[str, NDArray], **meta: Any) -> None:
    """Write ``.npy`` files, then a JSON that describes them: no JSON, nothing there."""
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    (folder / _META).write_text(json.dumps({"version": FORMAT_VERSION, **meta}))


def read_meta(folder: Path) -> dict[str, Any]:
    """What :func:`save_arrays` was told."""
    with whole(folder):
        meta = json.loads((folder / _META).read_text())
        if meta["version"] != FORMAT_VERSION:
            raise DamagedCache(f"{folder}: format version {meta['version']}, this one reads {FORMAT_VERSION}")
        return meta


def map_array(folder: Path, name: str) -> NDArray:
    """Memory-map one array, read-only."""
    with whole(folder):
        # An np.memmap is slow to index: keep the mapping, drop the subclass.
        return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))


@contextmanager
def whole(folder: Path) -> Iterator[None]:
    """Whatever goes wrong while reading the folder means that it is damaged."""
    try:
        yield
    except DamagedCache:
        raise
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DamagedCache(f"{folder}: {type(error).__name__}: {error}") from error


def default_cache_dir() -> Path:
    """``$FREESCALE_CACHE``, else ``lightning_freescale`` in the user's cache folder."""
    if folder := os.environ.get("FREESCALE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_freescale"


def fingerprint(paths: list[Path]) -> list[list[Any]]:
    """What changes when a file does: absolute path, size in bytes and time of change in ns."""
    return [[str(path.resolve()), (stat := path.stat()).st_size, stat.st_mtime_ns] for path in paths]


def cached(
    name: str,
    identity: Mapping[str, Any],
    build: Callable[[Path], None],
    load: Callable[[Path], T],
    cache_dir: Path | None = None,
) -> T:
    """What ``load(folder)`` makes of what ``build(folder)`` wrote, built only if it is not in the cache.

    Safe to call from any number of processes at once, before any process group exists. A folder that is damaged or of
    another format version is built anew.

    Args:
        name: readable part of the folder's name.
        identity: all that the result depends on, as JSON types.
        build: writes into the empty folder it is given.
        load: raises :class:`DamagedCache` if the folder is not whole.
        cache_dir: see :func:`default_cache_dir`.
    """
    root = cache_dir or default_cache_dir()
    key = hashlib.sha256(json.dumps([FORMAT_VERSION, identity], sort_keys=True).encode()).hexdigest()[:16]
    folder = root / f"{name}-{key}"
    if folder.exists():
        try:
            return load(folder)  # the usual case takes no lock
        except DamagedCache:
            pass  # looked at again under the lock: another process may be replacing it
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{folder.name}.lock"):
            return _load_or_build(folder, build, load)
    except OSError as error:  # permissions, no space, a file in the way
        raise ConfigurationError(f"cache_dir: cannot write to {root} ({error}); pass another cache_dir") from error


def _load_or_build(folder: Path, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    if folder.exists():
        try:
            return load(folder)
        except DamagedCache as error:
            log_once(f"The preprocessed data are damaged and are built anew: {error}", logging.WARNING)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        build(work)
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)  # atomic: a folder of the final name is complete
        return load(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``. The kernel releases it when the process dies, so none is ever stale."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
