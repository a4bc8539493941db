"""Gradient accumulation: the gradients of the tables are held until the last micro-batch of an optimizer step.

TorchRec's fused optimizer updates the rows in every backward. With gradient accumulation, all micro-batches of an optimizer step
must read the rows as they were before it, and one update of each row must follow. So, while gradients are accumulated:

    forward of a micro-batch     the kernels look the rows up as always, and count no step
    backward of a micro-batch    the owner of the rows keeps the ids and their gradients; nothing is updated
    after the last backward      one look-up of all held ids, and its backward with all held gradients: FBGEMM sums the
                                 gradients of each row and updates it once

The held gradients are those that TorchRec would have applied: they have travelled to the owner, and they are divided by the
number of ranks. The order of a sum is: by feature, by micro-batch, and then as in the micro-batch.

The prioritized exchange reads rows without the look-ups. It hands the gradients that arrive at the owner to
:meth:`HeldLookup.hold` itself, so that both exchanges sum the same gradients in the same order. After the last micro-batch it
updates first the rows that the next batch uses (:meth:`HeldLookup.apply_urgent`), and all others during the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding.index import true_first
from lightning_freescale.embedding.index_results import Features, as_kjt
from lightning_freescale.embedding.table_optimizer import kernels_in, set_count
from lightning_freescale.embedding.zero_collision.sharded import ShardedZeroCollisionCollection
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.streams import current_stream, int64_on_device, mark_used_on

if TYPE_CHECKING:
    from lightning_freescale.embedding.stages import Requests


class LookedUp(NamedTuple):
    """What one look-up of a micro-batch has read: ``T`` features of ``B`` samples with ``n`` ids together."""

    keys: list[str]
    by_feature: list[int]  # [T] number of ids
    ids: Tensor  # [n], by feature and then by sample
    lengths: Tensor  # [T, B]
    weights: Tensor | None  # [n], of weighted bags


class HeldGradient(NamedTuple):
    """The gradient of one look-up: ``[n, D]`` for sequences, ``[B, D of all features]`` for bags."""

    looked_up: LookedUp
    gradient: Tensor
    requests: Requests | None = None  # of a prioritized micro-batch: they say which rows are urgent after the window
    urgent: bool | None = None  # of one part of the last micro-batch; None for all gradients of a micro-batch

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors() if tensor is not None)

    def tensors(self) -> list[Tensor | None]:
        return [self.gradient, self.looked_up.ids, self.looked_up.lengths, self.looked_up.weights]


class HeldLookup:
    """One of TorchRec's look-ups. While ``holds`` is set, its gradients are held and not applied.

    Args:
        lookup: TorchRec's module that looks up the rows of one sharding group of a collection, on this rank.
        sequence: whether the rows are returned one by one, as an ``EmbeddingCollection`` does, and not pooled.

    Attributes:
        held: the gradients of the micro-batches so far.
        late: those of the window before, while some of their rows have not been updated.
        applied: whether the rows have been updated since the begin of the window.
        applied_bytes: how many bytes were held before the last update.
        on_compute_stream: whether some of ``held`` were computed on the stream of the model, by TorchRec's own exchange.
    """

    def __init__(self, lookup: nn.Module, sequence: bool):
        self._lookup, self._sequence = lookup, sequence
        self._look_up: Callable[[KeyedJaggedTensor], Tensor] = lookup.forward
        self._kernels = kernels_in(lookup)
        self.holds = self.applied = self.on_compute_stream = False
        self.held: list[HeldGradient] = []
        self.late: list[HeldGradient] = []
        self.applied_bytes = 0
        lookup.forward = self._forward

    def _forward(self, features: KeyedJaggedTensor) -> Tensor:
        if not self.holds or not torch.is_grad_enabled() or not self._kernels:
            return self._look_up(features)
        looked_up = what_is_read(features)
        counts = [int(kernel.iter_cpu) for kernel in self._kernels]
        with torch.no_grad():
            rows = self._look_up(features)
        for kernel, count in zip(self._kernels, counts, strict=True):
            set_count([kernel], count)
        anchor = torch.empty(0, device=rows.device, requires_grad=True)
        return _HoldGradient.apply(anchor, self, looked_up, rows)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(one.nbytes for one in self.held)

    def drop(self) -> None:
        """Forget what is held: a window begins."""
        self.held, self.applied, self.on_compute_stream = [], False, False

    def hold(self, looked_up: LookedUp, gradient: Tensor, requests: Requests | None = None) -> None:
        """When the gradients of a micro-batch are at their owner. A micro-batch without ids has no row to update."""
        ids = looked_up.ids.numel()
        if ids:
            gradient = gradient.reshape(ids, -1) if self._sequence else gradient
            self.held.append(HeldGradient(looked_up, gradient, requests))

    def hold_part(self, features: Features, gradient: Tensor, urgent: bool) -> None:
        """When one part of the gradients of the last micro-batch, ``[n, D]``, is at its owner."""
        counts, ids = features.length_per_key(), features.values()
        part = HeldGradient(_one_sample(as_kjt(features).keys(), counts, ids), gradient, urgent=urgent)
        (self.held if urgent else self.late).append(part)

    def apply(self) -> None:
        """Update each row that the micro-batches have read once, with the sum of its gradients, and count one step."""
        self._update(self._take())

    def apply_urgent(self) -> None:
        """The same for the rows that the batch after the window uses, too. The others wait for :meth:`apply_late`."""
        self.late = self._take()
        self._update(_parts(self.late, urgent=True))

    def apply_late(self, step: int) -> None:
        """The same for the other rows, as a part of the step ``step``."""
        late, self.late = self.late, []
        set_count(self._kernels, step - 1)
        self._update(_parts(late, urgent=False))

    def _take(self) -> list[HeldGradient]:
        held, self.applied_bytes = self.held, self.nbytes
        self.drop()
        self.applied = True
        return held

    def _update(self, held: Sequence[HeldGradient]) -> None:
        """Update each row once, with the sum of its gradients, and count one step."""
        counts = [int(kernel.iter_cpu) + 1 for kernel in self._kernels]
        if held:
            features, gradient = _join(held, self._sequence)
            with torch.enable_grad():
                rows = self._look_up(features)
            rows.backward(gradient.reshape(rows.shape))  # the fused optimizer runs in here
        for kernel, count in zip(self._kernels, counts, strict=True):
            set_count([kernel], count)

    def close(self) -> None:
        self.drop()
        self.late = []
        self._lookup.__dict__.pop("forward", None)


class _HoldGradient(torch.autograd.Function):
    """Returns the rows of a look-up. Its backward hands their gradient to :class:`HeldLookup`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookup: HeldLookup, looked_up: LookedUp, rows: Tensor) -> Tensor:
        """``anchor`` requires a gradient, so that autograd calls backward."""
        ctx.lookup, ctx.looked_up = lookup, looked_up
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.lookup.on_compute_stream = True
        ctx.lookup.hold(ctx.looked_up, gradients[0])
        return (None,) * 4


def what_is_read(features: KeyedJaggedTensor) -> LookedUp:
    """What a look-up of ``features`` reads.

    Raises:
        ConfigurationError: if its gradients cannot be held.
    """
    if features.variable_stride_per_key():
        raise ConfigurationError(
            "accumulate_grad_batches: a collection is called with a batch size that varies by feature, whose gradients "
            "cannot be held. Use accumulate_grad_batches=1"
        )
    weights = features.weights_or_none()
    if weights is not None and weights.requires_grad:
        raise ConfigurationError(
            "accumulate_grad_batches: the weights of a weighted bag need gradients, which cannot be held. Use "
            "accumulate_grad_batches=1"
        )
    lengths = features.lengths().view(len(features.keys()), features.stride())
    return LookedUp(list(features.keys()), features.length_per_key(), features.values(), lengths, weights)


def _one_sample(keys: list[str], by_feature: list[int], ids: Tensor) -> LookedUp:
    """``ids`` of sequences, by feature, as those of a single sample: the samples do not matter to an update."""
    return LookedUp(keys, by_feature, ids, int64_on_device(by_feature, ids.device).view(-1, 1), None)


def _parts(held: Sequence[HeldGradient], urgent: bool) -> list[HeldGradient]:
    """The gradients of the rows that the batch after the window uses, or of all others."""
    return [_part(one, urgent) if one.urgent is None else one for one in held if one.urgent in (None, urgent)]


def _part(one: HeldGradient, urgent: bool) -> HeldGradient:
    assert one.requests is not None
    assert one.requests.after_window is not None
    found, read = one.requests.after_window, one.looked_up
    shared, all_ids = found.by_feature.wait()
    counts = (shared if urgent else all_ids - shared).tolist()
    order = true_first(found.shared if urgent else ~found.shared)[: sum(counts)]
    return HeldGradient(_one_sample(read.keys, counts, read.ids[order]), one.gradient[order])


def _join(held: Sequence[HeldGradient], sequence: bool) -> tuple[KeyedJaggedTensor, Tensor]:
    """The look-ups of all micro-batches as one: each feature with the samples of one micro-batch after the other.

    Returns:
        the ids, and their gradient as :class:`HeldGradient` describes it.
    """

    def by_feature(parts: Sequence[Tensor]) -> Tensor:
        """``[n of a micro-batch, ...]`` each, to one tensor: by feature, and then by micro-batch."""
        split = [part.split(one.looked_up.by_feature) for part, one in zip(parts, held, strict=True)]
        return torch.cat([part for feature in zip(*split, strict=True) for part in feature])

    read = [one.looked_up for one in held]
    weights = [part.weights for part in read if part.weights is not None]
    lengths = torch.cat([part.lengths for part in read], dim=1)
    features = KeyedJaggedTensor(
        read[0].keys,
        by_feature([part.ids for part in read]),
        weights=by_feature(weights) if weights else None,
        lengths=lengths.flatten(),
        stride=lengths.shape[1],
        length_per_key=[sum(counts) for counts in zip(*(part.by_feature for part in read), strict=True)],
    )
    gradients = [one.gradient for one in held]
    return features, by_feature(gradients) if sequence else torch.cat(gradients)


class HeldTableGradients:
    """The gradients of all sharded tables of a model, while they are accumulated.

    Args:
        model: the sharded model.

    Raises:
        ConfigurationError: if a table of the model has zero-collision ids.
    """

    def __init__(self, model: nn.Module):
        self._lookups: dict[nn.Module, HeldLookup] = {}  # by TorchRec's look-up
        for name, module in model.named_modules():
            if isinstance(module, ShardedZeroCollisionCollection):
                raise ConfigurationError(
                    f"accumulate_grad_batches: {name} has zero-collision ids. A micro-batch could give a row to another id "
                    "while a gradient of the first id is held. Use accumulate_grad_batches=1 and a larger batch_size"
                )
            if isinstance(module, (ShardedEmbeddingCollection, ShardedEmbeddingBagCollection)):
                sequence = isinstance(module, ShardedEmbeddingCollection)
                for lookup in module._lookups:
                    if kernels_in(lookup):
                        self._lookups[lookup] = HeldLookup(lookup, sequence)

    def of(self, collection: Any) -> list[HeldLookup | None]:
        """The look-ups of a sharded collection, by sharding group; None where this rank has no rows."""
        return [self._lookups.get(lookup) for lookup in collection._lookups]

    @property
    def applied_bytes(self) -> int:
        """Bytes that this rank held before the last update."""
        return sum(lookup.applied_bytes for lookup in self._lookups.values())

    @property
    def all_applied(self) -> bool:
        """Whether all rows have been updated since the begin of the window."""
        return all(lookup.applied for lookup in self._lookups.values())

    def hold(self, holds: bool) -> None:
        """Whether the gradients of the next steps are held."""
        for lookup in self._lookups.values():
            lookup.holds = holds

    def drop(self) -> None:
        """Forget what is held: a window begins."""
        for lookup in self._lookups.values():
            lookup.drop()

    def scale(self, factor: float) -> None:
        """Multiply what is held."""
        for lookup in self._lookups.values():
            for one in lookup.held:
                mark_used_on(current_stream(one.gradient.device), [one.gradient])
            lookup.held = [one._replace(gradient=one.gradient * factor) for one in lookup.held]
            lookup.on_compute_stream = True

    def apply(self) -> None:
        """Update the rows that have not been updated. Nothing is exchanged: the gradients are at the owners already."""
        for lookup in self._lookups.values():
            if not lookup.applied:
                for one in lookup.held:
                    mark_used_on(current_stream(one.gradient.device), one.tensors())
                lookup.apply()

    def close(self) -> None:
        """Drop what is held, and give the look-ups their own forward back."""
        for lookup in self._lookups.values():
            lookup.close()


class MicroBatch(NamedTuple):
    """A batch of which several make an optimizer step."""

    held: HeldTableGradients  # the gradients of the tables wait here
    place: int  # in its window, from 0
    number: int  # of micro-batches in a complete window
    last: bool  # whether the tables are updated after it

    @property
    def next_is_last(self) -> bool:
        """Whether the tables are updated after the next batch, unless the data end before it."""
        return not self.last and self.place + 2 == self.number
