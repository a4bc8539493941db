"""The order of a step: what is exchanged when, so that the exchange hides behind dense compute and changes no result.

Step N of one module. Time goes down. The right column travels in the background, until the line that needs it:

    hook              this rank                                               in the background
    ----------------  ------------------------------------------------------  ---------------------------------------
    begin_step        tell the owners how many ids of N+2 they get,           numbers of ids N+2      -> before_backward
                      unless a header has announced it
    forward           join the exclusive and the collision rows of N
                      send the gradients of the exclusive rows of N-1         exclusive gradients N-1 -> before_backward
    before_backward   apply the gradients of the exclusive rows of N-1
                      read and send the exclusive rows of N+1                 exclusive rows N+1      -> forward N+1
                      send the ids of N+2 to their owners                     ids of N+2              -> after_backward
    backward          send the gradients of the collision rows of N           collision gradients N   -> after_backward
    after_backward    apply the gradients of the collision rows of N
                      read and send the collision rows of N+1                 collision rows N+1      -> forward N+1
    (look_ahead)      find the collisions of N+1 with N+2, tell requesters    collision marks         -> next step
    (dense optimizer step)

Why nothing changes: every row is read and written in the order of the synchronous run. A row of N+1 is read early only if batch N
does not update it (an exclusive row), and after the exclusive gradients of N-1 have been applied. A collision row is read after
batch N has updated it.

Ids and collisions run one batch further ahead than rows. They need no weights, and this way the sizes of the transfers have
reached the host when it needs them.

``reference_step.py`` has the same step as straight-line code over plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding.all_to_all import COLLISION, EXCLUSIVE, ExchangeGroups
from lightning_freescale.embedding.backward_count import watch_backwards
from lightning_freescale.embedding.prioritized import PrioritizedEmbedding
from lightning_freescale.embedding.prioritized_bags import make_exchange
from lightning_freescale.embedding.stages import (
    ComputingBatch,
    FetchingBatch,
    RequestedBatch,
    ReturningBatch,
    RoutedBatch,
    contents_version,
)
from lightning_freescale.embedding.support import (
    CHANGED_IDS,
    MORE_THAN_ONCE,
    NOT_IN_BATCH,
    OTHER_KEYS,
    SEVERAL_BACKWARDS,
    UNANNOUNCED_BACKWARD,
    VARIABLE_BATCH_SIZE,
)
from lightning_freescale.embedding.zero_collision.sharded import ShardedZeroCollisionCollection
from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.streams import SideStream


class ScheduledModule:
    """One module in the schedule: the three batches that it works on, and whether its exchange is prioritized.

    The first step is synchronous. It shows which KeyedJaggedTensor of the batch the module is called with. A module that is
    called with another object, or more than once a step, stays synchronous: prefetched rows could become stale. So does a
    module that is trained by several backwards in a synchronous step.

    Attributes:
        exchange: the operations on the module.
        kjt_index: which KeyedJaggedTensor of the batch the module is called with; None if that is not known yet.
        synchronous_reason: why the module stays synchronous for good; None if it does not.
        active: whether steps are prioritized at present.
        has_several_backwards: whether more than one backward has run through one synchronous call.
    """

    def __init__(self, name: str, exchange: PrioritizedEmbedding):
        self.name, self.exchange = name, exchange
        self.kjt_index: int | None = None
        self.synchronous_reason: str | None = None
        self.active = True
        self.has_several_backwards = False
        self.keys: list[str] = []  # the features of that KeyedJaggedTensor, in their order
        self.calls: list[KeyedJaggedTensor] = []  # arguments of this step's calls that need gradients
        self.current: FetchingBatch | ComputingBatch | ReturningBatch | None = None
        self.next: RequestedBatch | RoutedBatch | FetchingBatch | None = None
        self.after_next: RequestedBatch | RoutedBatch | None = None
        self._has_new_next = False  # whether the collisions of ``current`` with ``next`` are to be found
        self._synchronous_forward: Callable[..., Any] = type(exchange.module).forward
        exchange.gradients.on_unannounced_backward = self._take_unannounced_backward

    # ---- the module's forward ---------------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the module's ``forward``: prioritized for the batch of this step, synchronous for any other call."""
        features = args[0] if args else kwargs.get("features")
        if torch.is_grad_enabled() and self.exchange.module.training:
            self.calls.append(features)
            if self.kjt_index is not None and self.active:
                reason = self._reason_against(features)
                if reason is None:
                    self.exchange.redo_ahead()
                    assert isinstance(self.current, FetchingBatch)
                    self.current, output = self.exchange.join(self.current)
                    self.exchange.gradients.begin_forward()
                    return output
                self.stay_synchronous(reason)
            self.exchange.forget_ahead()
        self.exchange.gradients.apply_late()
        self.exchange.undo_ahead()
        self.exchange.table_stream.join()  # TorchRec's forward reads the tables on the current stream
        output = self._synchronous_forward(self.exchange.module, *args, **kwargs)
        if torch.is_grad_enabled():
            self.exchange.tables.optimizer.continue_count()  # the kernels have counted this call
            if self.synchronous_reason is None:
                watch_backwards(output, self._note_several_backwards)
        return output

    def _note_several_backwards(self) -> None:
        self.has_several_backwards = True

    def _reason_against(self, features: KeyedJaggedTensor | None) -> str | None:
        """Why this call cannot use the rows that were fetched for the current batch; None if it can."""
        if features is None or self.current is None or self.current.kjt is not features:
            return NOT_IN_BATCH
        if not isinstance(self.current, FetchingBatch):
            return MORE_THAN_ONCE
        unchanged = contents_version(features) == self.current.routed.ids_version
        return None if unchanged else CHANGED_IDS

    # ---- a step -----------------------------------------------------------------------------------------------------
    def begin_step(
        self, kjt: KeyedJaggedTensor, next_kjt: KeyedJaggedTensor | None, after_next_kjt: KeyedJaggedTensor | None
    ) -> None:
        exchange = self.exchange
        exchange.redo_ahead()
        if self.current is None or self.current.kjt is not kjt:  # the first step, or the previous step had no backward
            exchange.gradients.apply_late()
            self.drop()
            exchange.resume()
            self.current = exchange.plan_rows(exchange.route(exchange.request(kjt)))
            exchange.send_rows(self.current, EXCLUSIVE)
        if self.next is not None and self.next.kjt is not next_kjt:  # another batch than the one announced before
            exchange.forget_ahead(self.next)
            self.next = self.after_next = None
        if next_kjt is None:
            self.next = None
        elif self.next is None:
            self.next = exchange.request(next_kjt, ahead=True)
        if after_next_kjt is None:
            self.after_next = None
        elif self.after_next is None or self.after_next.kjt is not after_next_kjt:
            self.after_next = exchange.request(after_next_kjt, ahead=True)

    def before_backward(self) -> None:
        self.exchange.gradients.apply_late()
        self.exchange.redo_ahead()
        current = self.current
        if not isinstance(current, ComputingBatch):  # no forward in this step, or this is its second backward
            return
        if (
            self.synchronous_reason is not None
        ):  # found in this step: prefetch nothing, and return all gradients at once
            current.routed.with_next = None
        elif self.next is not None:
            self._prefetch_next(current)
        self.current = self.exchange.gradients.expect(current)

    def _prefetch_next(self, current: ComputingBatch) -> None:
        exchange = self.exchange
        assert self.next is not None
        assert not isinstance(self.next, FetchingBatch)
        upcoming = self._route(self.next)
        if upcoming.with_previous is None:  # the first prioritized step: otherwise the previous step has found them
            exchange.find_collisions(current.routed, upcoming)
        self.next = exchange.plan_rows(upcoming)
        exchange.send_rows(self.next, EXCLUSIVE)
        if isinstance(self.after_next, RequestedBatch):
            exchange.send_ids(self.after_next)

    def _route(self, batch: RequestedBatch | RoutedBatch) -> RoutedBatch:
        return self.exchange.route(batch) if isinstance(batch, RequestedBatch) else batch

    def _take_unannounced_backward(self, batch: ComputingBatch) -> None:
        """A backward has started without ``before_backward``. All gradients return at once, and nothing is prefetched."""
        if self.current is not batch:
            return  # The backward belongs to an earlier step, which is an error.
        batch.routed.with_next = None
        self.stay_synchronous(UNANNOUNCED_BACKWARD)
        self.current = self.exchange.gradients.expect(batch)

    def after_backward(self) -> None:
        current = self.current
        if not isinstance(current, ReturningBatch) or not current.has_gradients:
            return  # no backward went through this module
        self.exchange.redo_ahead()
        self.exchange.gradients.apply_collisions(current)
        self.current = None
        if isinstance(self.next, FetchingBatch) and self.synchronous_reason is None:
            self.exchange.send_rows(self.next, COLLISION)
            self.current, self.next, self.after_next = self.next, self.after_next, None
            self._has_new_next = self.next is not None

    def look_ahead(self) -> None:
        """After ``after_backward`` of all modules: find the collisions of the next batch with the one after it."""
        if not self._has_new_next:
            return
        self._has_new_next = False
        assert isinstance(self.current, FetchingBatch)
        assert isinstance(self.next, (RequestedBatch, RoutedBatch))
        self.next = self._route(self.next)
        self.exchange.find_collisions(self.current.routed, self.next)

    # ---- the end of prioritized steps -------------------------------------------------------------------------------
    def drop(self) -> None:
        """Forget the prefetched batches. All ranks have started the same transfers, so wait until they are complete."""
        for batch in (self.current, self.next, self.after_next):
            if isinstance(batch, RequestedBatch):
                self.exchange.await_ids(batch)
            elif isinstance(batch, FetchingBatch):
                self.exchange.await_rows(batch)
        self.current = self.next = self.after_next = None
        self._has_new_next = False
        self.exchange.forget_ahead()
        self.exchange.gradients.cancel()

    def stay_synchronous(self, reason: str) -> None:
        """Use TorchRec's own exchange for this module from now on."""
        self.synchronous_reason = reason
        self.kjt_index = None
        log_once(f"prioritize: {self.name} is exchanged synchronously, because it is {reason}")


class ExchangeSchedule:
    """Leads all prioritized modules through a step, in the same order on every rank.

    The training loop calls ``begin_step``, the model's forward, ``before_backward``, the backward and ``after_backward``.
    """

    def __init__(
        self,
        modules: dict[str, ShardedEmbeddingCollection | ShardedEmbeddingBagCollection | ShardedZeroCollisionCollection],
        groups: ExchangeGroups,
        copies: SideStream | None = None,
        timeline: Timeline | None = None,
    ):
        self.modules = [
            ScheduledModule(name, make_exchange(module, groups, copies, timeline)) for name, module in modules.items()
        ]
        for scheduled in self.modules:
            scheduled.exchange.module.forward = scheduled.forward  # TorchRec's own pipelines do the same
        self._batch: list[KeyedJaggedTensor] = []

    @property
    def prioritized(self) -> list[str]:
        """Names of the modules whose exchange is prioritized at present."""
        return [module.name for module in self.modules if module.active and module.kjt_index is not None]

    @property
    def names(self) -> list[str]:
        """Names of all modules."""
        return [module.name for module in self.modules]

    @property
    def active(self) -> list[str]:
        """Names of the modules that are to be prioritized, whether or not they can be."""
        return [module.name for module in self.modules if module.active]

    @property
    def capable(self) -> list[str]:
        """Names of the modules that have not been found to stay synchronous for good."""
        return [module.name for module in self.modules if module.synchronous_reason is None]

    @property
    def holds_gradients(self) -> bool:
        """Whether a backward has computed gradients, and ``after_backward`` has not been called."""
        return any(isinstance(part.current, ReturningBatch) and part.current.has_gradients for part in self.modules)

    def activate(self, names: Collection[str]) -> None:
        """Prioritize these modules from the next step on, and use TorchRec's own exchange for the others.

        All settings give the same training.
        """
        for module in self.modules:
            active = module.name in names
            if module.active and not active:
                module.exchange.gradients.apply_late()
                module.drop()
                module.exchange.table_stream.join()
            module.active = active

    # ---- a step -----------------------------------------------------------------------------------------------------
    def begin_step(
        self,
        batch: list[KeyedJaggedTensor],
        next_batch: list[KeyedJaggedTensor],
        after_next: list[KeyedJaggedTensor],
    ) -> None:
        """Before the forward of a batch.

        Args:
            batch: the KeyedJaggedTensors of the batch, in the same order in every step.
            next_batch: those of the next batch; empty if the data end before it.
            after_next: those of the batch after the next one; empty if the data end before it.
        """
        self._end_step()
        self._batch = batch
        for module in self.modules:
            index = module.kjt_index
            if index is not None and module.active:
                kjts = batch[index], _at(next_batch, index), _at(after_next, index)
                if any(kjt is not None and kjt.keys() != module.keys for kjt in kjts):
                    module.stay_synchronous(OTHER_KEYS)
                    module.drop()
                else:
                    module.begin_step(*kjts)

    def before_backward(self) -> None:
        for module in self.modules:
            module.before_backward()

    def after_backward(self) -> None:
        for module in self.modules:
            module.after_backward()
        for module in self.modules:  # after the urgent rows of all modules
            module.look_ahead()

    def _end_step(self) -> None:
        """Look at the calls of the previous step. The first step shows which features each module is called with."""
        for module in self.modules:
            module.after_backward()  # does nothing, unless the backward was not announced
            module.look_ahead()
            if module.has_several_backwards and module.synchronous_reason is None:
                module.stay_synchronous(SEVERAL_BACKWARDS)
            if module.kjt_index is None and module.synchronous_reason is None and module.calls:
                self._learn_features(module)
            if module.synchronous_reason is not None:
                module.drop()
            module.calls = []

    def _learn_features(self, module: ScheduledModule) -> None:
        found = [index for index, kjt in enumerate(self._batch) if kjt is module.calls[0]]
        if len(module.calls) > 1:
            module.stay_synchronous(MORE_THAN_ONCE)
        elif not found:
            module.stay_synchronous(NOT_IN_BATCH)
        elif self._batch[found[0]].variable_stride_per_key():
            module.stay_synchronous(VARIABLE_BATCH_SIZE)
        else:
            module.kjt_index, module.keys = found[0], list(module.calls[0].keys())

    def apply_late(self) -> None:
        """Apply the gradients of the previous step that have not been applied. ``before_backward`` would do it."""
        for module in self.modules:
            module.exchange.gradients.apply_late()

    # ---- the end ----------------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Apply every gradient that has not been applied. These gradients change no prefetched row.

        Ids that were inserted for later batches are taken out. The next step inserts them again.
        """
        for module in self.modules:
            module.after_backward()  # does nothing, unless the backward was not announced
            module.look_ahead()
            module.exchange.gradients.apply_late()
            module.exchange.undo_ahead()
            module.exchange.table_stream.join()  # the caller reads the tables on the current stream

    def close(self) -> None:
        """Flush, drop the prefetched batches, and give the modules their own forward back."""
        self.flush()
        for module in self.modules:
            module.drop()
            module.exchange.table_stream.join()
            module.exchange.module.__dict__.pop("forward", None)


def _at(batch: Sequence[KeyedJaggedTensor], index: int) -> KeyedJaggedTensor | None:
    return batch[index] if index < len(batch) else None
