"""States of users as a Parquet file: one row per user, for one model.

    user     the id of the user, int64 or text
    first    int64, how many events the user had before those that the state stands for
    digest   16 bytes, a hash of the events that the state stands for
    ...      a column for each tensor of ``UserStates.tensors()``, such as ``lengths`` or ``keys.0``: bytes of the user's row

``first + lengths`` events of the user are in the state. With this, and with the number of events that the user has now, a server
knows when the state must be refreshed. The metadata of the file name the model by its fingerprint, and the types and shapes of
the tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_freescale.models.personalization import UserStates
from lightning_freescale.runtime.errors import InputError

STATES_FORMAT = "lightning_freescale.user_states"
STATES_VERSION = "1"
DIGEST_BYTES = 16


class StoredStates(NamedTuple):
    """The states of ``B`` users.

    Attributes:
        users: ``[B]`` ids of the users, int64 or text.
        first: ``[B]`` int64, events of each user before those that the state stands for.
        digests: ``B`` hashes of these events, 16 bytes each.
        states: the states, on the CPU.
    """

    users: NDArray
    first: NDArray[np.int64]
    digests: list[bytes]
    states: UserStates


def save_states(path: str | os.PathLike[str], stored: StoredStates, fingerprint: str) -> None:
    """Write the states of users of the model ``fingerprint``. The file appears when it is complete."""
    count = len(stored.users)
    columns: dict[str, Any] = {
        "user": pa.array(stored.users.tolist(), pa.int64() if stored.users.dtype.kind in "iu" else pa.string()),
        "first": pa.array(stored.first, pa.int64()),
        "digest": pa.array(stored.digests, pa.binary(DIGEST_BYTES)),
    }
    described = {}
    for name, tensor in stored.states.tensors().items():
        if len(tensor) != count:
            raise InputError(f"{name}: {len(tensor)} states for {count} users")
        described[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape[1:])}
        columns[name] = _rows_as_bytes(tensor)
    meta = {"format": STATES_FORMAT, "version": STATES_VERSION, "fingerprint": fingerprint}
    meta["tensors"] = json.dumps(described)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    pq.write_table(pa.table(columns).replace_schema_metadata(meta), partial)
    partial.replace(target)


def load_states(path: str | os.PathLike[str], fingerprint: str) -> StoredStates:
    """The states of a file of :func:`save_states`.

    Raises :class:`InputError` if the file is of another kind, damaged, or of another model than ``fingerprint``.
    """
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: it cannot be read as states of users: {error}") from error
    meta = {
        key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items() if key != b"ARROW:schema"
    }
    if meta.get("format") != STATES_FORMAT or meta.get("version") != STATES_VERSION:
        raise InputError(f"{path}: it does not hold states of users of format {STATES_FORMAT!r} {STATES_VERSION}")
    if meta.get("fingerprint") != fingerprint:
        raise InputError(
            f"{path}: fingerprint {meta.get('fingerprint')!r} is of another model than {fingerprint!r}; a state is of no use to "
            "another model, so remove the file"
        )
    described: Mapping[str, Any] = json.loads(meta.get("tensors", "{}"))
    if missing := {"user", "first", "digest", *described} - set(table.column_names):
        raise InputError(f"{path}: incomplete, because it has no column {min(missing)!r}")
    tensors = {name: _bytes_as_rows(table[name], what, table.num_rows) for name, what in described.items()}
    users = table["user"].to_pylist()
    return StoredStates(
        users=np.array(users, dtype=np.int64 if pa.types.is_integer(table["user"].type) else str),
        first=table["first"].to_numpy().astype(np.int64),
        digests=table["digest"].to_pylist(),
        states=UserStates.from_tensors(tensors),
    )


def join_states(parts: list[UserStates]) -> UserStates:
    """The states of all users of ``parts``, in this order."""
    if len(parts) == 1:
        return parts[0]
    tensors = [part.tensors() for part in parts]
    return UserStates.from_tensors({name: torch.cat([part[name] for part in tensors]) for name in tensors[0]})


def _rows_as_bytes(tensor: Tensor) -> pa.Array:
    width = tensor.element_size() * math.prod(tensor.shape[1:])
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(tensor), [None, pa.py_buffer(raw)])


def _bytes_as_rows(column: pa.ChunkedArray, described: Mapping[str, Any], count: int) -> Tensor:
    raw = bytearray(b"".join(column.to_pylist()))
    dtype = getattr(torch, described["dtype"])
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(count, *described["shape"])
