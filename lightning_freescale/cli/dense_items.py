"""A checkpoint with zero-collision ids, turned into one of an ordinary HSTU.

Training needs rows that can be given to other ids. A command only reads: every item of the catalogue that owns a row gets a
number, and the table is the rows of these items in this order. Items that own no row, because they were evicted or never got one,
have no embedding of their own and are left out.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import torch

from lightning_freescale.data.catalogue import Catalogue
from lightning_freescale.data.raw_ids import raw_item_ids
from lightning_freescale.models import HSTU
from lightning_freescale.runtime.errors import CheckpointError
from lightning_freescale.runtime.log import log_once

_TABLE = re.compile(r"^embedding\._embedding_module\.embeddings\.(\w+)\.weight$")
_IDENTITIES = "embedding._managed_collision_collection._managed_collision_modules.{}._hash_zch_identities"


def with_dense_items(path: str, checkpoint: dict[str, Any], data_key: str) -> dict[str, Any]:
    """``checkpoint``, or an equal one without zero-collision ids if it has them.

    Args:
        path: name of the checkpoint, for messages.
        checkpoint: with full tensors.
        data_key: the key of the state of the data module.
    """
    data = checkpoint.get(data_key, {})
    if data.get("reading", {}).get("ids") != "raw":
        return checkpoint
    state = dict(checkpoint["state_dict"])
    tables = [match[1] for key in state if (match := _TABLE.match(key))]
    if len(tables) != 1 or _IDENTITIES.format(tables[0]) not in state:
        raise CheckpointError(
            f"{path}: its ids are raw, and this command reads models with one table of zero-collision ids, the table of the "
            f"items; this one has {sorted(tables) or 'none'}. Use trainer.predict()"
        )
    owners = state[_IDENTITIES.format(tables[0])].flatten().numpy()
    catalogue = Catalogue.from_state_dict(data["catalogue"])
    rows, owns = _rows_of(raw_item_ids(catalogue.item_ids), owners)
    if not owns.all():
        log_once(f"{path}: {int((~owns).sum()):,} of {len(owns):,} items own no row of the table and are left out")
    weight = state[f"embedding._embedding_module.embeddings.{tables[0]}.weight"][torch.from_numpy(rows[owns])]
    state = {key: value for key, value in state.items() if not key.startswith("embedding.")}
    known = inspect.signature(HSTU.__init__).parameters
    options = {name: value for name, value in checkpoint["hyper_parameters"].items() if name in known}
    kept = Catalogue(catalogue.item_ids[owns], catalogue.feature_values)
    return checkpoint | {
        "state_dict": state | {f"embedding.embeddings.{tables[0]}.weight": weight},
        "hyper_parameters": options | {"num_items": len(weight)},
        data_key: data | {"catalogue": kept.state_dict(), "reading": data["reading"] | {"ids": "dense"}},
    }


def _rows_of(ids: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row of each id ``[n]``, and whether it owns one; ``owners [rows]`` is the id of each row, negative if it has none."""
    order = owners.argsort(kind="stable")
    place = np.searchsorted(owners, ids, sorter=order).clip(max=len(owners) - 1)
    rows = order[place]
    return rows, owners[rows] == ids
