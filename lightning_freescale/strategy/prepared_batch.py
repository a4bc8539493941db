"""``PreparedBatch``: one batch together with everything that belongs to it.

The loss weight, the place in the epoch, the announcements of the other ranks and the following batches travel with the
batch. So it does not matter how many batches Lightning fetches before it trains one, or how many loaders it combines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.batch.contents import find_tensors
from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.runtime.streams import SideStream
from lightning_freescale.strategy.headers import Header, PendingHeaders, Status
from lightning_freescale.strategy.loss_weighting import known_weights

if TYPE_CHECKING:
    from lightning_freescale.strategy.prefetch import PrefetchLoader


COPIED_TYPES = (Tensor, KeyedJaggedTensor, SeqBatch)  # what start_copy() copies at once, with all that it holds


class PreparedBatch:
    """One batch of one loader on this rank. The prefetch loader yields it, and the strategy unpacks it.

    This class is not a dataclass, because Lightning would look inside a dataclass and convert its fields.

    Attributes:
        batch: what the loader yielded, on the device if it was copied. ``None`` if the loader yielded no batch.
        index: number of batches of this epoch that come before it.
        pending: the headers of all ranks for this batch; ``None`` if no other rank was told.
        features: the jagged tensors in ``batch``, as they were when it was prepared. They announce the ids of the batch to
            the steps before it. Its own step looks into ``batch`` once more, because hooks of the user may replace them.
        copied: recorded when the copy to the device is complete; ``None`` if nothing was copied in advance.
        moved: whether the batch was moved to the device in advance.
        cost_sums: sums of the batch for the cost model, see ``Balancer.sums``.
        loader: the prefetch loader that yields the batch.
        loader_state: the state of the user's loader after this batch, if the loader has one.
        error: why the loader yielded no batch, if it failed.
        next: the batch after this one from the same loader, once it has been fetched.
        announced: whether the jagged tensors of the batch know how many ids each rank sends.
    """

    def __init__(
        self,
        batch: Any,
        index: int,
        pending: PendingHeaders | None = None,
        *,
        features: Sequence[KeyedJaggedTensor] = (),
        copied: torch.cuda.Event | None = None,
        moved: bool = False,
        cost_sums: Any = None,
        loader: PrefetchLoader | None = None,
        loader_state: dict | None = None,
        error: Exception | None = None,
    ):
        self.batch, self.index, self.pending, self.features = batch, index, pending, features
        self.copied, self.moved, self.cost_sums = copied, moved, cost_sums
        self.loader, self.loader_state, self.error = loader, loader_state, error
        self.next: PreparedBatch | None = None
        self.announced = False

    @property
    def headers(self) -> list[Header]:
        """The headers of all ranks for this batch, in rank order. Waits for the slowest rank."""
        assert self.pending is not None
        return self.pending.wait()

    @property
    def on_all_ranks(self) -> bool:
        """Whether all ranks have a sound batch here. Waits for the slowest rank."""
        assert self.pending is not None
        return self.pending.are_all_batches()

    @property
    def weights(self) -> list[int]:
        """Samples or tokens of this batch on each rank, ``[ranks]``."""
        headers = self.headers
        return known_weights(
            [header.weight for header in headers], [header.status == Status.BATCH for header in headers]
        )

    def follower(self) -> PreparedBatch | None:
        """The batch of the next step, or ``None`` if any rank has no batch there. Equal on all ranks."""
        return self.next if self.next is not None and self.next.on_all_ranks else None

    def is_last(self) -> bool:
        """Whether the data of this rank end after this batch."""
        return self.next is not None and self.next.batch is None and self.next.error is None

    def use(self) -> Any:
        """The batch, safe to use on the current stream."""
        if self.copied is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.copied)
            for tensor in find_tensors(self.batch):
                tensor.record_stream(stream)  # The memory belongs to the copy stream.
        return self.batch


def prepared_batches(batch: Any) -> list[PreparedBatch]:
    """The prepared batches inside what Lightning passes on: one, or one for each train loader in any nesting."""
    if isinstance(batch, PreparedBatch):  # The search would take longer than all other work on the batch.
        return [batch]
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, PreparedBatch)]


def unpack(batch: Any) -> Any:
    """``batch`` with every :class:`PreparedBatch` in it replaced by its contents."""
    if isinstance(batch, PreparedBatch):
        return batch.use()
    return tree_map_only(PreparedBatch, PreparedBatch.use, batch)


def features_of(batches: Iterable[PreparedBatch | None]) -> list[KeyedJaggedTensor]:
    """The jagged tensors of all ``batches``, each once; none if a batch is not known or was not moved in advance."""
    found: dict[int, KeyedJaggedTensor] = {}
    for batch in batches:
        if batch is None or not batch.moved:
            return []
        for features in batch.features:
            found[id(features)] = features
    return list(found.values())


def start_copy(batch: Any, device: torch.device) -> Any:
    """Start the copies of a batch's tensors to ``device``, including jagged tensors, without waiting for them.

    Lightning moves jagged tensors with copies that block the host.
    """
    return apply_to_collection(
        batch,
        COPIED_TYPES,
        lambda part: part.to(device, non_blocking=True),
        allow_frozen=True,  # A frozen dataclass stays as it is. Lightning moves it later.
    )


def copy_in_advance(move: Callable[[], Any], copies: SideStream | None) -> tuple[Any, torch.cuda.Event | None]:
    """Run ``move`` on the stream ``copies``, so that the copy does not wait for the compute of the current step.

    Returns:
        the moved batch, and an event that is recorded when the copy is complete (``None`` without a stream).
    """
    if copies is None or copies.stream is None:
        return move(), None
    with copies.work():
        batch = move()
        copied = torch.cuda.Event()
        copied.record(copies.stream)
    return batch, copied
