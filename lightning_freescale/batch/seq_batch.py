"""``SeqBatch``: one rank's samples of one step, as jagged tensors without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import register_dataclass

from lightning_freescale.batch.jagged_checks import check_lengths
from lightning_freescale.batch.torchrec_types import JaggedTensor, KeyedJaggedTensor, Pipelineable
from lightning_freescale.runtime.errors import InputError

HISTORY = "history"
NEGATIVES = "negatives"


@dataclass
class SeqBatch(Pipelineable):
    """``B`` samples of one rank. A sample is the history of one user.

    Attributes:
        features: integer ids with ``stride() == B``. Key ``"history"`` holds the items of each history in time order.
            Key ``"negatives"`` (training) holds the sampled negatives of each sample. They belong to their sample, so
            that moving a sample to another rank changes no gradient. Every other key is a categorical feature of the
            events and is aligned with ``"history"``.
        timestamps: ``[sum(L)]`` int64, seconds, aligned with the values of ``"history"``.
        targets: ``[B]`` int64, the held-out next item of each sample. ``None`` in training, because there the target
            of every position is the next item of the history.
        negatives_per_position: ``K``, equal on all ranks. The negatives of a sample are sets of ``K``, and each position is
            scored against one of them. ``None``: each position is scored against all negatives of its sample.
        users: ``[B]`` int64, the number of the user of each sample. Batches for ``predict`` have it, so that a recommendation
            can name its user.
    """

    features: KeyedJaggedTensor
    timestamps: Tensor
    targets: Tensor | None = None
    negatives_per_position: int | None = None
    users: Tensor | None = None

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
        return self._lengths_of(HISTORY)

    def _lengths_of(self, key: str) -> Tensor:
        """``[B]``, the lengths of one key. TorchRec's ``features[key]`` would also find the ids, which takes much longer."""
        keys = self.features.keys()
        if key not in keys:
            raise KeyError(key)
        return self.features.lengths().view(len(keys), self.num_samples)[keys.index(key)]

    @property
    def by_key(self) -> dict[str, JaggedTensor]:
        """The ids of each key, with offsets. TorchRec keeps the result: its ``features[key]`` does the same work every time."""
        known = getattr(self.features, "_jt_dict", None)
        if known is not None:  # TorchRec's to_dict returns it as well, after checks that take long.
            return known
        if not self.num_samples:  # TorchRec's to_dict fails without samples
            return {key: self.features[key] for key in self.features.keys()}  # noqa: SIM118 - not a mapping
        return self.features.to_dict()

    @property
    def candidates(self) -> Tensor:
        """``[B]`` int64, how many negatives are scored for each sample, over all of its positions."""
        negatives = self._lengths_of(NEGATIVES) if NEGATIVES in self.features.keys() else 0  # noqa: SIM118 - not a mapping
        return self._candidates(self.lengths.long(), negatives)

    def _candidates(self, lengths: Any, negatives: Any) -> Any:
        """:attr:`candidates` of these numbers of events ``[B]`` and of negatives ``[B]``, tensors or arrays."""
        per_position = negatives if self.negatives_per_position is None else self.negatives_per_position
        return (lengths - 1).clip(0) * per_position

    def host_lengths(self) -> dict[str, NDArray]:
        """``[B]``, the lengths of each key. The batch must be in host memory. No operator of torch computes them."""
        keys = self.features.keys()
        return dict(zip(keys, self.features.lengths().numpy().reshape(len(keys), self.num_samples), strict=True))

    def host_sizes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """:attr:`lengths` and :attr:`candidates` of a batch in host memory. No operator of torch computes them."""
        by_key = self.host_lengths()
        lengths = by_key[HISTORY].astype(np.int64)
        return lengths, self._candidates(lengths, by_key.get(NEGATIVES, 0))

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return self._map(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        return self._map(lambda part: part.pin_memory())

    def _tensors(self) -> dict[str, Any]:
        """The tensors and jagged tensors, by field; also those of a subclass."""
        kinds = Tensor, KeyedJaggedTensor
        return {name: part for name, part in vars(self).items() if part is not None and isinstance(part, kinds)}

    def _map(self, change: Callable[[Any], Any]) -> Self:
        """The batch with every tensor changed by ``change``."""
        changed = {name: change(part) for name, part in self._tensors().items()}
        for part in changed.values():
            if isinstance(part, KeyedJaggedTensor):
                part._jt_dict = None  # TorchRec hands the views of the old tensors on
        return replace(self, **changed)

    def record_stream(self, stream: torch.Stream) -> None:
        for part in self._tensors().values():
            part.record_stream(stream)

    def validate(self) -> None:
        """Raise :class:`InputError` if the fields do not fit together. The tensors must be in host memory."""
        keys, samples = self.features.keys(), self.num_samples
        if samples == 0:
            raise InputError("features: an empty batch (0 samples)")
        check_lengths(self.features)
        by_key = self.host_lengths()
        lengths = by_key[HISTORY]
        if not lengths.all():
            at = (lengths == 0).argmax()
            raise InputError(f"{HISTORY}: length 0 at sample {at}; a history needs at least one event")
        if self.timestamps.numel() != (total := int(lengths.sum())):
            raise InputError(f"timestamps: {self.timestamps.numel()} values for {total} events in {HISTORY!r}")
        for key in keys:
            if key not in (HISTORY, NEGATIVES) and not (by_key[key] == lengths).all():
                raise InputError(
                    f"{key}: its lengths differ from those of {HISTORY!r}; an event feature needs one value per event"
                )
        for name, values in (("targets", self.targets), ("users", self.users)):
            if values is not None and values.numel() != samples:
                raise InputError(f"{name}: {values.numel()} values for {samples} samples")
        if self.negatives_per_position and NEGATIVES in by_key:
            counts, size = by_key[NEGATIVES], self.negatives_per_position
            if (bad := (counts < size) | (counts % size != 0)).any():
                raise InputError(
                    f"{NEGATIVES}: {counts[bad.argmax()]} at sample {bad.argmax()}; each sample needs whole sets of "
                    f"negatives_per_position={size}"
                )


register_dataclass(
    SeqBatch,
    field_names=["features", "timestamps", "targets", "negatives_per_position", "users"],
    drop_field_names=[],
)
