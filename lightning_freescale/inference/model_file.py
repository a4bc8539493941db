"""The exported file: one trained model with everything that inference needs.

``torch.save`` writes it, and ``torch.load`` reads it with ``weights_only=True``, which runs no code of the file. Its entries:

    format            ``EXPORT_FORMAT``
    version           ``EXPORT_VERSION``
    hyper_parameters  the arguments of ``HSTU``, without those that only training and evaluation use
    weights           by name, the tensors of the model
    catalogue         the raw ids of the items and of the features' values (``Catalogue.state_dict``)
    reading           how the data are read: names of columns, unit of times, longest history
    fingerprint       hash of all that is above

The fingerprint shows that the file is whole. It also names the model: the state of a user belongs to one model.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_freescale.runtime.errors import CheckpointError, CheckpointNotFoundError

EXPORT_FORMAT = "lightning_freescale.inference"
EXPORT_VERSION = 1
_CONTENT = {"hyper_parameters": Mapping, "weights": Mapping, "catalogue": Mapping, "reading": Mapping}
_NOT_OF_THE_MODEL = ("filter_seen", "top_k", "max_eval_items", "meta_tables")  # arguments that inference has of its own
_HINT = "write it again with: freescale export --inference CKPT OUT"


def contents(
    hyper_parameters: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    catalogue: Mapping[str, Any],
    reading: Mapping[str, Any],
) -> dict[str, Any]:
    """The entries of a file, with their fingerprint."""
    settings = {name: value for name, value in hyper_parameters.items() if name not in _NOT_OF_THE_MODEL}
    found: dict[str, Any] = {
        "format": EXPORT_FORMAT,
        "version": EXPORT_VERSION,
        "hyper_parameters": settings,
        "weights": {name: weight.detach().cpu().contiguous() for name, weight in weights.items()},
        "catalogue": dict(catalogue),
        "reading": dict(reading),
    }
    return {**found, "fingerprint": fingerprint_of(found)}


def fingerprint_of(content: Mapping[str, Any]) -> str:
    """A hash of all entries except the fingerprint itself, as hexadecimal digits."""
    digest = hashlib.sha256()
    _update(digest, {name: value for name, value in content.items() if name != "fingerprint"})
    return digest.hexdigest()[:32]


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        digest.update(f"{{{len(value)}".encode())
        for name in sorted(value):
            digest.update(json.dumps(name).encode())
            _update(digest, value[name])
    elif isinstance(value, Tensor):
        digest.update(f"{value.dtype}{list(value.shape)}".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    else:
        digest.update(json.dumps(value, sort_keys=True).encode())  # a tuple and a list are the same setting


def write(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write :func:`contents` to a file, which appears when it is complete."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    torch.save(dict(content), partial)
    partial.replace(target)


def is_exported(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a file of :func:`write`. False for everything else, and for damaged files."""
    if not Path(path).is_file():
        return False
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # many kinds of files raise many kinds of errors; none of them is ours
        return False
    return isinstance(content, Mapping) and content.get("format") == EXPORT_FORMAT


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The entries of a file of :func:`write`. The weights are memory-mapped.

    Raises :class:`CheckpointError` if the file is of another kind, damaged or incomplete.
    """
    if not Path(path).exists():
        raise CheckpointNotFoundError(f"{path}: there is no such file")
    try:
        with zipfile.ZipFile(path):
            pass
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"{path}: it cannot be read as an exported model: {type(error).__name__}: {error}. It is of another kind or "
            f"incomplete; {_HINT}"
        ) from error
    if not isinstance(content, Mapping) or content.get("format") != EXPORT_FORMAT:
        raise CheckpointError(
            f"{path}: it is not an exported model, because it has no format {EXPORT_FORMAT!r}; {_HINT}"
        )
    if content.get("version") != EXPORT_VERSION:
        raise CheckpointError(
            f"{path}: version is {content.get('version')!r}, but this package reads version {EXPORT_VERSION}; {_HINT}"
        )
    for name, kind in _CONTENT.items():
        if not isinstance(content.get(name), kind):
            raise CheckpointError(f"{path}: incomplete, because it has no entry {name!r}; {_HINT}")
    if content.get("fingerprint") != fingerprint_of(content):
        raise CheckpointError(f"{path}: damaged, because its content does not have the fingerprint it names; {_HINT}")
    return dict(content)
