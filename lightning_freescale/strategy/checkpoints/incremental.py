"""Incremental saves: only the rows that differ from the last full checkpoint are written.

The files of the full checkpoint become part of each incremental one by hard links. So every checkpoint is complete by itself,
shares the space of the full one, and stays readable when the full one is removed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fsspec.core import url_to_fs

from lightning_freescale.runtime.errors import CheckpointError, ConfigurationError
from lightning_freescale.runtime.log import log_once
from lightning_freescale.strategy.checkpoints import changes, folder, storage
from lightning_freescale.strategy.checkpoints.changes import Piece, Pieces
from lightning_freescale.strategy.checkpoints.tensors import is_sharded
from lightning_freescale.strategy.control import Control


@dataclass(frozen=True)
class Incremental:
    """Checkpoints that hold the rows that have changed since the last full one: ``FreeScaleStrategy(checkpoint=...)``.

    Args:
        full_every: every save with this distance is a full one. The first save of a training is always full.
    """

    full_every: int = 10

    def __post_init__(self) -> None:
        if not isinstance(self.full_every, int) or self.full_every < 1:
            raise ConfigurationError(
                f"Incremental(full_every={self.full_every!r}): give a number of saves of at least 1"
            )


class Base(NamedTuple):
    """The last full checkpoint."""

    pieces: Pieces  # This rank's shards as they were saved.
    checksums: storage.Checksums  # Of the files that each incremental checkpoint links.


class IncrementalSaves:
    """Writes full and incremental checkpoints of one run of the Trainer."""

    def __init__(self, options: Incremental):
        self._full_every = options.full_every
        self._base: Base | None = None
        self._since_full = 0
        self._saved: list[str] = []  # Checkpoints with the files of the base, the newest last.

    def save(self, path: str, state: Mapping[str, Any], meta: Mapping[str, Any], control: Control) -> None:
        """Write a checkpoint folder. A collective.

        Args:
            path: as for :func:`folder.save`, in a local file system.
            state: tensors by part and name: ``{"state_dict": {...}, "table_optimizer": {...}}``.
            meta: Lightning's entries.
        """
        if not storage.is_local(path):
            raise CheckpointError(
                f"{path}: incremental checkpoints link files, which a remote store cannot. Use checkpoint='sharded'"
            )
        flat = {f"{part}.{name}": value for part, values in state.items() for name, value in values.items()}
        pieces = {name: pieces_of(value) for name, value in flat.items() if is_sharded(value)}
        source = self._source(flat, pieces, control)
        if source is None:
            folder.save(path, state, meta, control)
            kept = {name: [copy_of(piece) for piece in parts] for name, parts in pieces.items()}
            written = storage.read_checksums(path)
            linked = {name: entry for name, entry in written.items() if name != storage.META}
            self._base, self._since_full, self._saved = Base(kept, linked), 1, [path]
            return
        assert self._base is not None
        whole = {name: value.detach().cpu() for name, value in flat.items() if name not in pieces}
        content = {"sharded": changes.find(self._base.pieces, pieces), "whole": whole if control.rank == 0 else {}}
        write(path, source, self._base.checksums, content, meta, control)
        self._since_full += 1
        self._saved = [*(old for old in self._saved if old != path), path]

    def _source(self, flat: Mapping[str, Any], pieces: Pieces, control: Control) -> str | None:
        """The folder whose files the next checkpoint links; ``None`` if it must be a full one. A collective."""
        base, found = self._base, None
        only_tensors = all(isinstance(value, torch.Tensor) or is_sharded(value) for value in flat.values())
        due = self._since_full >= self._full_every
        if base is not None and not due and only_tensors and changes.same_layout(base.pieces, pieces):
            found = next((old for old in reversed(self._saved) if holds(old, base.checksums)), "")
        answers = control.gather(found)
        if any(answer is None for answer in answers):
            return None
        if not answers[0]:
            log_once("the next checkpoint is a full one: the files of the last full one have been removed")
        return answers[0] or None


def pieces_of(value: Any) -> list[Piece]:
    """The shards of a sharded tensor on this rank."""
    return [Piece(tuple(shard.metadata.shard_offsets), shard.tensor.detach().cpu()) for shard in value.local_shards()]


def copy_of(piece: Piece) -> Piece:
    return Piece(piece.offsets, piece.values.clone())


def holds(path: str, checksums: storage.Checksums) -> bool:
    """Whether the folder ``path`` has the files with these checksums. Their content is not read."""
    try:
        listed = storage.read_checksums(path)
        for name, entry in checksums.items():
            storage.check_file(path, name, entry, whole=False)
    except CheckpointError:
        return False
    return all(listed.get(name) == entry for name, entry in checksums.items())


def write(
    path: str,
    source: str,
    base: storage.Checksums,
    content: Mapping[str, Any],
    meta: Mapping[str, Any],
    control: Control,
) -> None:
    """Write an incremental checkpoint to ``path``. A collective.

    Args:
        source: the folder whose files ``base`` are linked.
        content: the changes of this rank, for :mod:`.changes`.
        meta: Lightning's entries; rank 0 writes them.
    """
    where = f"saving {path}"
    target = storage.target_of(path)
    partial, error = "", None
    if control.rank == 0:
        try:
            partial = target.prepare()
            link(url_to_fs(source)[1], partial, base)
        except Exception as failure:
            error = failure
    folder.raise_together(control, error, where)
    partial = control.gather(partial)[0]
    files = {changes.file_name(control.rank): content} | ({storage.META: dict(meta)} if control.rank == 0 else {})
    own: storage.Checksums = {}
    try:
        for name, value in files.items():
            with storage.open_file(storage.join(partial, name), "wb") as stream:
                torch.save(value, stream)
            own[name] = storage.checksum(storage.join(partial, name))
    except Exception as failure:
        error = failure
    folder.raise_together(control, error, where)
    checksums = dict(base) | {name: entry for part in control.gather(own) for name, entry in part.items()}
    if control.rank == 0:
        try:
            target.commit(checksums)
        except Exception as failure:
            error = failure
    folder.raise_together(control, error, where)


def link(source: str, target: str, names: storage.Checksums) -> None:
    """Make the files of the folder ``source`` part of the folder ``target``, without a copy."""
    for name in names:
        try:
            os.link(Path(source) / name, Path(target) / name)
        except OSError as failure:
            raise CheckpointError(
                f"{target}: the file system cannot link {name} of {source}: {failure}. Incremental checkpoints need hard "
                "links; use checkpoint='sharded'"
            ) from failure
