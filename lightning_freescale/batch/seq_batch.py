"""``SeqBatch``: what a sequence recommender trains on, jagged from end to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from lightning_freescale.runtime.errors import InputError

HISTORY = "history"
NEGATIVES = "negatives"


@dataclass
class SeqBatch(Pipelineable):
    """``B`` samples of one rank, a sample being one user's history.

    Attributes:
        features: integer ids, jagged, ``stride() == B``. Key ``"history"`` holds the items of each history in time
            order. Key ``"negatives"`` (training) holds each sample's own sampled negatives: they travel with their
            sample, so moving samples between ranks changes no gradient. Every other key is a categorical feature of the
            events, aligned with ``"history"``.
        timestamps: ``[sum(L)]`` int64, seconds, aligned with the values of ``"history"``.
        targets: ``[B]`` int64, the held-out next item of each sample; ``None`` in training, where the target of every
            position is the item after it.
    """

    features: KeyedJaggedTensor
    timestamps: Tensor
    targets: Tensor | None = None

    @property
    def num_samples(self) -> int:
        """``B``, the number of samples on this rank."""
        return self.features.stride()

    @property
    def history(self) -> JaggedTensor:
        """Item ids of the histories, ``values [sum(L)]``, ``lengths [B]``."""
        return self.features[HISTORY]

    @property
    def lengths(self) -> Tensor:
        """``[B]``, the number of events of each history."""
        return self.features[HISTORY].lengths()

    def to(self, device: torch.device, non_blocking: bool = False) -> SeqBatch:
        return SeqBatch(
            self.features.to(device, non_blocking=non_blocking),
            self.timestamps.to(device, non_blocking=non_blocking),
            None if self.targets is None else self.targets.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> SeqBatch:
        return SeqBatch(
            self.features.pin_memory(),
            self.timestamps.pin_memory(),
            None if self.targets is None else self.targets.pin_memory(),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)
        self.timestamps.record_stream(stream)
        if self.targets is not None:
            self.targets.record_stream(stream)

    def validate(self) -> None:
        """Raise :class:`InputError` if the batch's parts do not fit together. Host tensors only: no device sync."""
        if self.num_samples == 0:
            raise InputError("features: an empty batch (0 samples)")
        check_jagged(self.features)
        lengths = self.lengths
        if (empty := (lengths == 0).nonzero().flatten()).numel():
            raise InputError(f"{HISTORY}: length 0 at sample {int(empty[0])}; a history needs at least one event")
        total = int(lengths.sum())
        if self.timestamps.numel() != total:
            raise InputError(f"timestamps: {self.timestamps.numel()} values for {total} events in {HISTORY!r}")
        for key in self.features.keys():  # noqa: SIM118 - a KeyedJaggedTensor is no mapping
            if key not in (HISTORY, NEGATIVES) and not torch.equal(self.features[key].lengths(), lengths):
                raise InputError(f"{key}: lengths differ from those of {HISTORY!r}, with which it must be aligned")
        if self.targets is not None and self.targets.numel() != self.num_samples:
            raise InputError(f"targets: {self.targets.numel()} values for {self.num_samples} samples")


register_dataclass(SeqBatch, field_names=["features", "timestamps", "targets"], drop_field_names=[])


def check_jagged(features: KeyedJaggedTensor, rows: Mapping[str, int] | None = None) -> None:
    """Raise :class:`InputError` unless lengths fit the values and every id lies in its table.

    Args:
        features: host tensors; keys ``F``, stride ``B``.
        rows: number of rows of the table behind each key; keys that are absent are not checked for range.
    """
    lengths, values = features.lengths(), features.values()
    keys, stride = features.keys(), features.stride()
    if (bad := (lengths < 0).nonzero().flatten()).numel():
        at = int(bad[0])
        raise InputError(
            f"{keys[at // max(stride, 1)]}: negative length {int(lengths[at])} at sample {at % max(stride, 1)}"
        )
    if int(lengths.sum()) != values.numel():
        raise InputError(
            f"{', '.join(keys)}: lengths sum to {int(lengths.sum())} but there are {values.numel()} values"
        )
    if not rows or not values.numel():
        return
    for key, part in zip(keys, values.split(features.length_per_key()), strict=True):
        limit = rows.get(key)
        if limit is None or not part.numel():
            continue
        low, high = (int(edge) for edge in torch.aminmax(part))
        if low < 0 or high >= limit:
            raise InputError(
                f"{key}: id {low if low < 0 else high} is outside its table of {limit} rows (0 to {limit - 1})"
            )
