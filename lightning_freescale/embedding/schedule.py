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

With gradient accumulation the tables change after the last micro-batch only. Until then all rows are exclusive, and the owners
hold all gradients. The last micro-batch N then stands for all of its window: a row of N+1 collides if any of them has read it.

``reference_step.py`` has the same step as straight-line code over plain tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding.all_to_all import ExchangeGroups
from lightning_freescale.embedding.call_agreement import CallAgreement
from lightning_freescale.embedding.held_gradients import MicroBatch
from lightning_freescale.embedding.prioritized_bags import make_exchange
from lightning_freescale.embedding.scheduled_module import ScheduledModule
from lightning_freescale.embedding.stages import ReturningBatch
from lightning_freescale.embedding.table_watch import Gather
from lightning_freescale.embedding.zero_collision.sharded import ShardedZeroCollisionCollection
from lightning_freescale.runtime.streams import SideStream


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
        gather: Gather | None = None,
        agreement: CallAgreement | None = None,
    ):
        self._agreement = agreement
        self.modules = [
            ScheduledModule(name, make_exchange(module, groups, copies, timeline), gather, agreement)
            for name, module in modules.items()
        ]
        for scheduled in self.modules:
            scheduled.exchange.module.forward = scheduled.forward  # TorchRec's own pipelines do the same
        self._batch: list[KeyedJaggedTensor] | None = None  # None before the first step

    @property
    def prioritized(self) -> list[str]:
        """Names of the modules whose exchange is prioritized at present."""
        return [module.name for module in self.modules if module.active and module.kjt_index is not None]

    def is_prioritized(self, name: str) -> bool:
        """Whether the module of this name has been called in this step and was given prioritized rows."""
        return any(module.name == name and module.has_prioritized_rows for module in self.modules)

    @property
    def names(self) -> list[str]:
        """Names of all modules."""
        return [module.name for module in self.modules]

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
        micro_batch: MicroBatch | None = None,
    ) -> None:
        """Before the forward of a batch.

        Args:
            batch: the KeyedJaggedTensors of the batch, in the same order in every step.
            next_batch: those of the next batch; empty if the data end before it.
            after_next: those of the batch after the next one; empty if the data end before it.
            micro_batch: set if gradients are accumulated.
        """
        self._end_step()
        self._batch = batch
        for module in self.modules:
            module.begin_micro_batch(micro_batch)
            index = module.kjt_index
            if index is not None and module.active:
                module.begin_step(*(_at(part, index) for part in (batch, next_batch, after_next)))

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
            module.agree_on_gradients()
        if self._batch is None:
            return
        found = {module.name: module.end_calls(self._batch) for module in self.modules}
        reasons = {name: reason for name, reason in found.items() if reason is not None}
        if self._agreement is not None:
            reasons = self._agreement.after_step(reasons)
        for module in self.modules:
            module.learn(self._batch, reasons.get(module.name))

    def end_step(self) -> None:
        """A step has queued all of its updates. From now on, user code that changes tables is found."""
        for module in self.modules:
            if module.watch is not None:
                module.watch.step_ended()

    def set_evaluation(self, evaluates: bool) -> None:
        """Say whether a validation runs. Its look-ups are no part of a step, even if gradients are enabled in it."""
        for module in self.modules:
            module.evaluates = evaluates

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
            module.flush()

    def discard(self) -> None:
        """After a flush: drop the rows of the next step, so that the caller may change the tables. All ranks must call it."""
        for module in self.modules:
            module.discard()

    def close(self) -> None:
        """Flush, drop the prefetched batches, and give the modules their own forward back."""
        self.flush()
        for module in self.modules:
            module.drop()
            module.exchange.table_stream.join()
            module.exchange.module.__dict__.pop("forward", None)


def _at(batch: Sequence[KeyedJaggedTensor], index: int) -> KeyedJaggedTensor | None:
    return batch[index] if index < len(batch) else None
