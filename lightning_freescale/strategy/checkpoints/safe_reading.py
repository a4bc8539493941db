"""Readers of ``torch.distributed.checkpoint`` that run no code from a checkpoint.

DCP describes a checkpoint in a pickle, ``.metadata``. Its own readers load it without a limit, so a foreign folder could run any
code. The readers here accept only the types of which such a description consists, and files of the folder itself.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from lightning_freescale.runtime.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "Path"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("collections", "OrderedDict"),
}


class MetadataUnpickler(pickle.Unpickler):
    """Loads a description by DCP, and refuses every other type."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into the description of a checkpoint")


def load_metadata(stream: Any, path: str) -> Metadata:
    """The description of a checkpoint from an open file. Raises :class:`CheckpointError`."""
    try:
        metadata = MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        for part in (metadata.storage_data or {}).values():
            if "/" in part.relative_path or "\\" in part.relative_path:
                raise ValueError(f"it refers to {part.relative_path!r}, which is not in this folder")
    except Exception as failure:
        raise CheckpointError(f"{path} is damaged or foreign: {type(failure).__name__}: {failure}") from failure
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    return metadata


class SafeFileReader(FileSystemReader):
    """Reads local folders."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return _read_metadata(self)


class SafeRemoteReader(FsspecReader):
    """Reads folders in remote stores."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return _read_metadata(self)


def _read_metadata(reader: FileSystemReader) -> Metadata:
    path = reader.fs.concat_path(reader.path, ".metadata")
    with reader.fs.create_stream(path, "rb") as stream:
        metadata = load_metadata(stream, str(path))
    metadata.storage_meta.load_id = reader.load_id  # type: ignore[union-attr]
    return metadata


class _SafeBytes:
    """Values that are not tensors, such as extra states of modules, are loaded with ``weights_only``."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        plain = BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)  # Raises unless the value has harmless types only.
        plain.seek(0)
        super().load_bytes(read_item, plain)  # type: ignore[misc]


class SafeLoadPlanner(_SafeBytes, DefaultLoadPlanner):
    """Loads into given tensors."""


class SafeWholePlanner(_SafeBytes, _EmptyStateDictLoadPlanner):
    """Loads full tensors with given names."""
