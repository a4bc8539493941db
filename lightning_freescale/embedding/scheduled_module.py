"""One module in the schedule of the prioritized exchange: its part of each step, and why it may stay synchronous.

``schedule.py`` has the order of a step, and calls the modules in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding.all_to_all import COLLISION, EXCLUSIVE
from lightning_freescale.embedding.backward_count import watch_backwards
from lightning_freescale.embedding.call_agreement import CALL_ALIKE, LEAVE_OUT, CallAgreement
from lightning_freescale.embedding.held_gradients import HeldLookup, MicroBatch
from lightning_freescale.embedding.prioritized import PrioritizedEmbedding
from lightning_freescale.embedding.stages import (
    ComputingBatch,
    FetchingBatch,
    RequestedBatch,
    ReturningBatch,
    RoutedBatch,
)
from lightning_freescale.embedding.support import (
    CHANGED_IDS,
    CHANGED_TABLES,
    MORE_THAN_ONCE,
    NOT_IN_BATCH,
    OTHER_BATCH,
    OTHER_KEYS,
    SEVERAL_BACKWARDS,
    UNANNOUNCED_BACKWARD,
    VARIABLE_BATCH_SIZE,
    WITHOUT_GRADIENTS,
    WITHOUT_INSERTION,
)
from lightning_freescale.embedding.table_watch import Gather, TableWatch
from lightning_freescale.runtime.errors import FreeScaleError
from lightning_freescale.runtime.log import log_once


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
        micro_batch: set in steps whose gradients are accumulated.
        has_several_backwards: whether more than one backward has run through one synchronous call.
        evaluates: whether a validation runs. Its look-ups are no part of a step.
        watch: finds changes of the tables by user code; None if nobody looks for them.
    """

    def __init__(
        self,
        name: str,
        exchange: PrioritizedEmbedding,
        gather: Gather | None = None,
        agreement: CallAgreement | None = None,
    ):
        self.name, self.exchange, self._agreement = name, exchange, agreement
        self.watch: TableWatch | None = None
        if gather is not None and exchange.remaps is None:
            self.watch = TableWatch(exchange.collection, exchange.table_stream, gather)
            exchange.gradients.on_update = self.watch.forget
        self.kjt_index: int | None = None
        self.synchronous_reason: str | None = None
        self.active = True
        self.micro_batch: MicroBatch | None = None
        self.has_several_backwards = False
        self.evaluates = False
        self.keys: list[str] = []  # the features of that KeyedJaggedTensor, in their order
        self.calls: list[KeyedJaggedTensor | None] = []  # arguments of this step's calls that need gradients
        self._reason_in_call: str | None = None  # why a call of this step rules out prioritized ones
        self.current: FetchingBatch | ComputingBatch | ReturningBatch | None = None
        self.next: RequestedBatch | RoutedBatch | FetchingBatch | None = None
        self.after_next: RequestedBatch | RoutedBatch | None = None
        self._begun: KeyedJaggedTensor | None = None  # the batch of the last step that began
        self._had_gradients = True  # whether the last prioritized step had gradients of rows
        self._has_new_next = False  # whether the collisions of ``current`` with ``next`` are to be found
        self._window: list[RoutedBatch] = []  # the prioritized micro-batches of this optimizer step
        self._divides_window = False  # whether their collisions with the batch after them are known
        self._discarded = False  # whether the rows of the next step were dropped
        self._synchronous_forward: Callable[..., Any] = type(exchange.module).forward
        exchange.gradients.on_unannounced_backward = self._take_unannounced_backward

    @property
    def has_prioritized_rows(self) -> bool:
        """Whether the module has been called with the batch of this step, and was given the rows that were sent for it."""
        return isinstance(self.current, ComputingBatch | ReturningBatch)

    # ---- the module's forward ---------------------------------------------------------------------------------------
    @torch.compiler.disable  # of a model that torch.compile wraps as a whole
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the module's ``forward``: prioritized for the batch of this step, synchronous for any other call."""
        features = args[0] if args else kwargs.get("features")
        if torch.is_grad_enabled() and not self.evaluates:  # TorchRec updates tables in evaluation mode, too
            self.calls.append(features)
            if self.exchange.remaps is not None and not self.exchange.module.training:
                self._reason_in_call = WITHOUT_INSERTION
            if self.watch is not None and self.synchronous_reason is None:
                self._refuse_changed_tables(self.watch)
            if self.kjt_index is not None and self.active and not self._discarded:
                reason = self._reason_against(features)
                if reason is None:
                    self.exchange.redo_ahead()
                    assert isinstance(self.current, FetchingBatch)
                    self.current, output = self.exchange.join(self.current, self._held_by(self.current.routed))
                    self.exchange.gradients.begin_forward()
                    return output
                self._settle(reason, f"call {len(self.calls)}")
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

    def _held_by(self, routed: RoutedBatch) -> list[HeldLookup | None] | None:
        """Where the gradients of this step wait; None if they are not accumulated."""
        if self.micro_batch is None:
            return None
        self._window.append(routed)
        return self.micro_batch.held.of(self.exchange.collection)

    def _refuse_changed_tables(self, watch: TableWatch) -> None:
        """If user code has changed the tables since the last step: raise if that was too late, else stay synchronous."""
        agreed = watch.agrees
        if not watch.found_change():
            return
        if self.exchange.gradients.has_late or isinstance(self.current, FetchingBatch):
            raise self._changed_too_late()
        if agreed:  # otherwise other ranks may not know; this step reads the tables as they are
            self.stay_synchronous(CHANGED_TABLES)

    def _refuse_change_before_updates(self) -> None:
        """Before gradients of the last step are applied: raise if user code has changed tables since that step."""
        if self.watch is not None and self.exchange.gradients.has_late and self.watch.differs():
            raise self._changed_too_late()

    def _changed_too_late(self) -> FreeScaleError:
        return FreeScaleError(
            f"{self.name}: user code has changed its tables after a step, on this rank or another one. Gradients of the step "
            "were not applied then, and rows of the next step had been read. Call trainer.strategy.flush() on all ranks before "
            "each change, or set prioritize=False"
        )

    def _note_several_backwards(self) -> None:
        self.has_several_backwards = True

    def _reason_against(self, features: KeyedJaggedTensor | None) -> str | None:
        """Why this call cannot use the rows that were fetched for the current batch; None if it can."""
        if features is None or self.current is None or self.current.kjt is not features:
            return NOT_IN_BATCH
        if not isinstance(self.current, FetchingBatch):
            return MORE_THAN_ONCE
        return CHANGED_IDS if self.current.routed.contents.changed(features) else self._reason_in_call

    def _settle(self, reason: str, place: str, advice: str = CALL_ALIKE) -> None:
        """Raise unless all ranks settle the same place in this step: otherwise they would wait for different transfers."""
        if self._agreement is not None:
            self._agreement.settle(self.name, reason, place, advice)

    # ---- a step -----------------------------------------------------------------------------------------------------
    def begin_micro_batch(self, micro_batch: MicroBatch | None) -> None:
        """Before every step, also a synchronous one: a window may be exchanged in both modes, after a change of the mode."""
        self.micro_batch, self.exchange.accumulates = micro_batch, micro_batch is not None
        if micro_batch is None or micro_batch.place == 0:
            self._window = []

    def begin_step(self, *kjts: KeyedJaggedTensor | None) -> None:
        """Before the forward of a batch.

        Args:
            kjts: what the module is called with in this step, in the next one, and in the one after it. None if the batch is
                not known, or has nothing there.
        """
        if any(kjt is not None and kjt.keys() != self.keys for kjt in kjts):
            self._settle(OTHER_KEYS, "keys")
            self.stay_synchronous(OTHER_KEYS)
            self.drop()
            return
        self._discarded = False
        self.exchange.redo_ahead()
        kjt, next_kjt, after_next_kjt = kjts
        if self.current is None or self.current.kjt is not kjt:  # the first step, or the previous step had no backward
            self._begin_anew(kjt)
        self._begun = kjt
        if kjt is not None:
            self._request_ahead(next_kjt, after_next_kjt)

    def _begin_anew(self, kjt: KeyedJaggedTensor | None) -> None:
        """Begin a step whose rows were not sent in advance."""
        exchange = self.exchange
        if self.current is not None and self.current.kjt is not self._begun:  # not that of a step without a call
            self._settle(OTHER_BATCH, "batch")
        self._refuse_change_before_updates()
        if self.watch is not None:  # without pending gradients a change is right, because all rows are read now
            self.watch.forget()
        exchange.gradients.apply_late()
        self.drop()
        exchange.resume()
        if kjt is not None:
            self.current = exchange.plan_rows(exchange.route(exchange.request(kjt)))
            exchange.send_rows(self.current, EXCLUSIVE)

    def _request_ahead(self, next_kjt: KeyedJaggedTensor | None, after_next_kjt: KeyedJaggedTensor | None) -> None:
        """Send the numbers of ids of the next two batches, unless they are on their way."""
        exchange = self.exchange
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
        # After a micro-batch that is not the last one no row is updated.
        all_late = self.micro_batch is not None and not self.micro_batch.last and self.synchronous_reason is None
        self.current = self.exchange.gradients.expect(current, all_late)

    def _prefetch_next(self, current: ComputingBatch) -> None:
        exchange = self.exchange
        assert self.next is not None
        assert not isinstance(self.next, FetchingBatch)
        upcoming = self._route(self.next)
        if self.micro_batch is None:
            if upcoming.with_previous is None:  # the first prioritized step: otherwise the previous step has found them
                exchange.find_collisions(current.routed, upcoming)
            self.next = exchange.plan_rows(upcoming)
        elif self.micro_batch.last and self._divides_window and upcoming.with_previous is not None:
            self.next = exchange.plan_rows(upcoming)
        else:  # no row changes before the last micro-batch, and then any row may
            current.routed.with_next = None
            self.next = exchange.plan_rows(upcoming, COLLISION if self.micro_batch.last else EXCLUSIVE)
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
        self._settle(UNANNOUNCED_BACKWARD, "backward")
        self.stay_synchronous(UNANNOUNCED_BACKWARD)
        self.current = self.exchange.gradients.expect(batch)

    def after_backward(self) -> None:
        current = self.current
        if not isinstance(current, ReturningBatch) or not current.has_gradients:
            return  # no backward went through this module
        self._had_gradients = True
        self.exchange.redo_ahead()
        self.exchange.gradients.apply_collisions(current)
        if self.micro_batch is not None and self.micro_batch.last:
            self.exchange.gradients.apply_held(current)
            self._window = []
        self.current = None
        if isinstance(self.next, FetchingBatch) and self.synchronous_reason is None:
            self.exchange.send_rows(self.next, COLLISION)
            self.current, self.next, self.after_next = self.next, self.after_next, None
            self._has_new_next = self.next is not None

    def agree_on_gradients(self) -> None:
        """After a step. Ranks whose loss depends on the rows wait for the gradients of all ranks, and would wait in vain."""
        if isinstance(self.current, ReturningBatch) and self._had_gradients:
            self._settle(WITHOUT_GRADIENTS, "gradients", LEAVE_OUT)
            self._had_gradients = False

    def look_ahead(self) -> None:
        """After ``after_backward`` of all modules: find the collisions of the next batch with the one after it."""
        if not self._has_new_next:
            return
        self._has_new_next = False
        assert isinstance(self.current, FetchingBatch)
        assert isinstance(self.next, (RequestedBatch, RoutedBatch))
        self.next = self._route(self.next)
        if self.micro_batch is None:
            self.exchange.find_collisions(self.current.routed, self.next)
            return
        # The ids of micro-batches that were exchanged synchronously are not known here.
        has_all = len(self._window) == self.micro_batch.place + 1
        self._divides_window = self.exchange.divides_windows and self.micro_batch.next_is_last and has_all
        if self._divides_window:
            self.exchange.find_window_collisions([*self._window, self.current.routed], self.next)

    def end_calls(self, batch: Sequence[KeyedJaggedTensor]) -> str | None:
        """Why the calls of the step that has ended rule out a prioritized exchange; None if they do not, or are known to."""
        if self.synchronous_reason is not None or not self.calls:
            return None
        if self.has_several_backwards:
            return SEVERAL_BACKWARDS
        if len(self.calls) > 1:
            return MORE_THAN_ONCE
        index = self._index_in(batch)
        if index is None:
            return NOT_IN_BATCH
        return VARIABLE_BATCH_SIZE if batch[index].variable_stride_per_key() else self._reason_in_call

    def learn(self, batch: Sequence[KeyedJaggedTensor], reason: str | None) -> None:
        """Note what the calls of the step that has ended show.

        Args:
            batch: the KeyedJaggedTensors of that step.
            reason: what :meth:`end_calls` has returned on any rank.
        """
        if reason is not None and self.synchronous_reason is None:
            self.stay_synchronous(reason)
        if self.synchronous_reason is not None:
            self.drop()
        elif self.kjt_index is None and self.calls:
            self.kjt_index = self._index_in(batch)
            assert self.kjt_index is not None
            self.keys = list(batch[self.kjt_index].keys())
        self.calls, self._reason_in_call = [], None

    def _index_in(self, batch: Sequence[KeyedJaggedTensor]) -> int | None:
        """Which KeyedJaggedTensor of ``batch`` the module was called with."""
        return next((index for index, kjt in enumerate(batch) if kjt is self.calls[0]), None)

    # ---- the end of prioritized steps -------------------------------------------------------------------------------
    def flush(self) -> None:
        """Apply the gradients that have not been applied."""
        self.after_backward()  # does nothing, unless the backward was not announced
        self.look_ahead()
        self._refuse_change_before_updates()
        pending = self.exchange.gradients.has_late
        self.exchange.gradients.apply_late()
        self.exchange.undo_ahead()
        self.exchange.table_stream.join()  # the caller reads the tables on the current stream
        if self.watch is not None:
            self.watch.flushed(updated=pending)

    def discard(self) -> None:
        """After a flush: drop the rows of the next step, so that the caller may change the tables. A collective."""
        if self.watch is not None:
            self.watch.forget()
        if isinstance(self.current, FetchingBatch):
            self.drop()
            self._discarded = True

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
