"""``ZeroCollisionModule``: the identities of one table, as a managed-collision module of TorchRec.

Its buffers have the names and shapes of TorchRec's ``HashZchManagedCollisionModule``, so checkpoints look the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torchrec.modules.mc_modules import ManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from lightning_freescale.embedding.zero_collision import remap
from lightning_freescale.embedding.zero_collision.fresh_rows import RowDraw
from lightning_freescale.embedding.zero_collision.layout import EMPTY, Eviction, Layout
from lightning_freescale.embedding.zero_collision.remap import IdentityState, Insertion
from lightning_freescale.runtime.errors import CheckpointError, InputError


class ZeroCollisionModule(ManagedCollisionModule):
    """The identities of one table, or of the buckets of it that this rank holds.

    Args:
        name: name of the table.
        layout: how the slots are arranged, and which of them are held here.
        eviction: when a slot is taken back from its id.
        draw: draws the first row of an id.
        read_only: features of the table whose ids are only looked up.
        device: the device of the identities.
    """

    _hash_zch_identities: Tensor  # [slots, 1] int64: the id that owns each slot
    _hash_zch_metadata: Tensor  # [slots, 1] int32: the last training step whose batch had it
    _hash_zch_bucket: Tensor  # [1, 1] int64: number of buckets
    _current_iter_tensor: Tensor  # [1] int64: number of training steps so far

    def __init__(
        self,
        name: str,
        layout: Layout,
        eviction: Eviction,
        draw: RowDraw,
        read_only: frozenset[str],
        device: torch.device,
    ) -> None:
        rows = layout.buckets * layout.bucket_size
        super().__init__(device=device, output_segments=[0, rows])  # registers _current_iter_tensor, too
        self.name, self.layout, self.eviction, self.draw, self.read_only = name, layout, eviction, draw, read_only
        self.register_buffer(
            "_hash_zch_identities", torch.full((layout.slots, 1), EMPTY, dtype=torch.int64, device=device)
        )
        self.register_buffer("_hash_zch_metadata", torch.full((layout.slots, 1), -1, dtype=torch.int32, device=device))
        self.register_buffer("_hash_zch_bucket", torch.tensor([[layout.buckets]]))
        self._step: int | None = None  # a copy of _current_iter_tensor in host memory

    # ---- state ------------------------------------------------------------------------------------------------------
    @property
    def state(self) -> IdentityState:
        return IdentityState(self._hash_zch_identities.view(-1), self._hash_zch_metadata.view(-1))

    @property
    def step(self) -> int:
        """Number of training steps whose ids have been inserted. It is the clock of evictions."""
        if self._step is None:
            self._step = int(self._current_iter_tensor)
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = value
        self._current_iter_tensor.fill_(value)

    def validate_state(self) -> None:
        """Called after a state dict has been loaded."""
        self._step = None
        stored = int(self._hash_zch_bucket)
        if stored != self.layout.buckets:
            self._hash_zch_bucket.fill_(self.layout.buckets)
            raise CheckpointError(
                f"table {self.name!r} has buckets={self.layout.buckets}, but the checkpoint was written with "
                f"buckets={stored}, so its ids have other slots. Use buckets={stored}"
            )

    # ---- from ids to slots ------------------------------------------------------------------------------------------
    def insert(self, ids: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Insertion]:
        """Insert the ids of the next training step: ``[n]`` int64 to ``[n]`` slots of this part, and what has changed."""
        slots, insertion = remap.insert(self.state, self.layout, self.eviction, ids, self.step, chosen)
        self.step += 1
        return slots, insertion

    def look_up(self, ids: Tensor, chosen: Tensor | None = None) -> Tensor:
        """``[n]`` int64 ids to ``[n]`` slots of this part, without any change."""
        return remap.look_up(self.state, self.layout, ids, chosen)

    # ---- what TorchRec asks of a managed-collision module -----------------------------------------------------------
    def forward(self, features: dict[str, JaggedTensor], *_: Any, **__: Any) -> dict[str, JaggedTensor]:
        return self.remap(features)

    def remap(self, features: dict[str, JaggedTensor], *_: Any, **__: Any) -> dict[str, JaggedTensor]:
        """Look-ups without any change, for a table that is not sharded."""
        found = {}
        for key, jagged in features.items():
            ids = jagged.values().to(torch.int64)
            if (
                ids.is_cuda and len(ids) and (low := int(ids.min())) < 0
            ):  # the kernel cannot tell; no strategy has checked
                raise InputError(f"{key}: id {low} is negative; zero-collision ids are integers from 0 to 2^63 - 1")
            found[key] = JaggedTensor(values=self.look_up(ids), lengths=jagged.lengths())
        return found

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        return features

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        return features

    def evict(self) -> Tensor | None:
        return None

    def open_slots(self) -> Tensor:
        return (self._hash_zch_identities == EMPTY).sum().view(1)

    def output_size(self) -> int:
        return self.layout.slots

    def input_size(self) -> int:
        return 0  # TorchRec's way to say: any 64-bit id, in bucket id % buckets

    def buckets(self) -> int:
        return self.layout.buckets

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int] | None = None,
        device: torch.device | None = None,
    ) -> ZeroCollisionModule:
        """The part of this module with the rows ``output_id_range``, for the rank that holds them."""
        start, end = output_id_range
        size = self.layout.bucket_size
        assert start % size == end % size == 0, "shards are cut at buckets"
        layout = dataclasses.replace(self.layout, first_bucket=start // size, held=(end - start) // size)
        part = ZeroCollisionModule(
            self.name, layout, self.eviction, self.draw, self.read_only, device or self._hash_zch_identities.device
        )
        if not self._hash_zch_identities.is_meta:
            for mine, parts in zip(self.state, part.state, strict=True):
                parts.copy_(mine[start:end])
            part.step = self.step
        return part
