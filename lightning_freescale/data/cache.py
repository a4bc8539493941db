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
from typing import Any

from lightning_freescale._log import say_once
from lightning_freescale.data.histories import FORMAT_VERSION, DamagedHistories, Histories
from lightning_freescale.errors import ConfigurationError


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
    cache_dir: Path | None = None,
) -> Histories:
    """The histories that ``build(folder)`` writes, from the cache if they are there.

    Safe to call from any number of processes at once, before any process group exists. A folder that is damaged or of
    another format version is built anew.

    Args:
        name: readable part of the folder's name.
        identity: all that the result depends on, as JSON types.
        build: writes complete histories into the empty folder it is given.
        cache_dir: see :func:`default_cache_dir`.
    """
    root = cache_dir or default_cache_dir()
    key = hashlib.sha256(json.dumps([FORMAT_VERSION, identity], sort_keys=True).encode()).hexdigest()[:16]
    folder = root / f"{name}-{key}"
    if folder.exists():
        try:
            return Histories.load(folder)  # the usual case takes no lock
        except DamagedHistories:
            pass  # looked at again under the lock: another process may be replacing it
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{folder.name}.lock"):
            _build_unless_there(folder, build)
            return Histories.load(folder)
    except PermissionError as error:
        raise ConfigurationError(f"cache_dir: cannot write to {root} ({error}); pass another cache_dir") from error


def _build_unless_there(folder: Path, build: Callable[[Path], None]) -> None:
    if folder.exists():
        try:
            Histories.load(folder)
            return
        except DamagedHistories as error:
            say_once(f"The preprocessed data are damaged and are built anew: {error}", logging.WARNING)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        build(work)
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)  # atomic: a folder of the final name is complete
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``. The kernel releases it when the process dies, so none is ever stale."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
