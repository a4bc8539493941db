"""Which row of an exported table belongs to which zero-collision id, as Parquet files for servers.

The file ``model.item.ids.parquet`` beside ``model.pt`` has one line for each id of the table ``item`` that has a row:

    id    int64, the id
    row   int64, its row in the weights of the table
    seen  int32, the last training step whose batch had the id

An id that is not in the file has no row of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from lightning_freescale.strategy.checkpoints import storage

_IDENTITIES = re.compile(
    r"^(?:(.*)\.)?_managed_collision_collection\._managed_collision_modules\.(.*)\._hash_zch_identities$"
)
_EMPTY = -1  # the identity of a row without an id


def paths(state: Mapping[str, Any], output: str) -> dict[str, str]:
    """The file of each table with zero-collision ids, by the name of the table, for weights in the file ``output``."""
    return {table: path for table, (path, _) in _maps(state, output).items()}


def write(state: Mapping[str, Any], output: str) -> None:
    """Write the files of all tables with zero-collision ids in the state dict ``state``."""
    for path, key in _maps(state, output).values():
        identities: Tensor = state[key].flatten()
        seen: Tensor = state[key.replace("_hash_zch_identities", "_hash_zch_metadata")].flatten()
        rows = (identities != _EMPTY).nonzero().flatten()
        columns = {"id": identities[rows].numpy(), "row": rows.numpy(), "seen": seen[rows].numpy()}
        with storage.open_file(path, "wb") as stream:
            pq.write_table(pa.table(columns), stream)


def _maps(state: Mapping[str, Any], output: str) -> dict[str, tuple[str, str]]:
    """By table: the path of its file, and the key of its identities in the state dict."""
    found = [(match, key) for key in state if (match := _IDENTITIES.match(key))]
    tables = [match[2] for match, _ in found]
    stem, dot, ending = output.rpartition(".")
    base = stem if dot and "/" not in ending else output
    result = {}
    for match, key in found:
        table = match[2] if tables.count(match[2]) == 1 else f"{match[1]}.{match[2]}"
        result[table] = (f"{base}.{table}.ids.parquet", key)
    return result
