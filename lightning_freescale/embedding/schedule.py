"""The order of a step: what is exchanged when, so that the exchange hides behind dense compute and changes nothing.

Step N, for every prioritized module (time goes down; `|` runs in the background meanwhile):

    begin_step      ask for the ids of N+2
    forward         join the collision and exclusive rows of N
                    send the exclusive gradients of N-1                   | they travel
    before_backward apply the exclusive gradients of N-1
                    look up and send the exclusive rows of N+1            | they travel
                    find the collisions of N+1 with N+2                   | requesters are told
    backward        send the collision gradients of N                     | they travel
    after_backward  apply the collision gradients of N
                    look up and send the collision rows of N+1            | they travel during the dense optimizer step

Rows are read and written in the order of the synchronous run: a row of N+1 is looked up early only if N does not update it
(exclusive) and after the exclusive gradients of N-1 are in; a collision row is looked up after N's update of it.
Exclusive gradients could leave as soon as they are known. They wait until the collision rows, for which the next forward waits,
are there: transfers of one machine, or of several ranks on it, meet on the same engines and wires.
Ids and collisions run one more batch ahead: they need no weights, and their sizes are on the host when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding.prioritized import PrioritizedEmbedding
from lightning_freescale.embedding.stages import COLLISION, EXCLUSIVE, BatchState, Groups
from lightning_freescale.runtime.host_pacing import HostPacer
from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.streams import SideStream

MORE_THAN_ONCE = "called more than once a step"
NOT_IN_BATCH = "called with features that are not part of the batch"


class Lane:
    """One module on the schedule: the batches on their way through it, and whether it is prioritized at all.

    The first step is synchronous and shows which KeyedJaggedTensor of the batch the module is called with. A module that is
    called with any other object, or more than once a step, stays synchronous: its rows would change under the prefetch.
    """

    def __init__(self, name: str, moves: PrioritizedEmbedding):
        self.name, self.moves = name, moves
        self.pace = HostPacer(moves.device)
        self.slot: int | None = None  # which KeyedJaggedTensor of the batch, once known
        self.off: str | None = None  # why the module stays synchronous
        self.active = True  # whether steps are prioritized for the time being
        self.calls: list[KeyedJaggedTensor] = []  # of this step, with gradients
        self.late: BatchState | None = None  # its exclusive gradients are not applied yet, maybe not even sent
        self.current: BatchState | None = None
        self.next: BatchState | None = None
        self.after: BatchState | None = None
        self._synchronous: Callable[..., Any] = type(moves.module).forward

    # ---- the module's forward ------------------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the module's ``forward``: prioritized for the batch that is due, synchronous for all else."""
        features = args[0] if args else kwargs.get("features")
        if torch.is_grad_enabled() and self.moves.module.training:
            self.calls.append(features)
            if self.slot is not None and self.active:
                current = self.current
                if current is not None and current.kjt is features and not current.used:
                    output = self.moves.join(current, self._gradient_arrived)
                    self.pace.forward_starts()
                    self._send_late()
                    return output
                again = current is not None and current.kjt is features
                self.turn_off(MORE_THAN_ONCE if again else NOT_IN_BATCH)
        self.apply_late()
        self.moves.table_stream.join()  # the synchronous path reads the tables as they are
        return self._synchronous(self.moves.module, *args, **kwargs)

    def _gradient_arrived(self, state: BatchState) -> None:
        if all(gradient is not None for gradient in state.gradient):
            self.pace.hold_host()
            self.moves.send_gradients(state, COLLISION)

    # ---- a step ----------------------------------------------------------------------------------------------------------
    def begin(self, now: KeyedJaggedTensor, soon: KeyedJaggedTensor | None, later: KeyedJaggedTensor | None) -> None:
        moves = self.moves
        if self.current is None or self.current.kjt is not now:  # the first step, or the one before took no backward
            self.apply_late()
            self.drop()
            moves.take_over()
            self.current = moves.ask(now)
            moves.finish_ids(self.current)
            moves.settle_rows(self.current)
            moves.send_rows(self.current, EXCLUSIVE)
        self.next = self._upcoming(self.next, soon)
        self.after = self._upcoming(self.after, later)

    def _upcoming(self, state: BatchState | None, kjt: KeyedJaggedTensor | None) -> BatchState | None:
        if kjt is None:
            return None
        return state if state is not None and state.kjt is kjt else self.moves.ask(kjt)

    def before_backward(self) -> None:
        current, moves = self.current, self.moves
        self.apply_late()
        if current is None or not current.used or current.gradients:
            return
        if self.off is not None:  # turned off in this step: whatever else it does to the rows, nothing is prefetched
            current.split_after = None
        elif self.next is not None:
            moves.finish_ids(self.next)
            if current.split_after is None:
                moves.collide(current, self.next)
            moves.settle_rows(self.next)
            moves.send_rows(self.next, EXCLUSIVE)
            if self.after is not None:
                moves.finish_ids(self.after)
                moves.collide(self.next, self.after)
        moves.settle_gradients(current)
        self.pace.backward_starts()

    def after_backward(self) -> None:
        current, moves = self.current, self.moves
        if current is None or all(gradient is None for gradient in current.gradient):
            return  # no step was taken through this module
        if not current.outgoing:  # some groups have no gradient: the loss does not depend on them
            moves.send_gradients(current, COLLISION)
        moves.apply_gradients(current, COLLISION)
        self.late = current
        if self.next is not None and self.off is None:
            moves.send_rows(self.next, COLLISION)
        self.current, self.next, self.after = self.next, self.after, None

    def _send_late(self) -> None:
        """Send the exclusive gradients of the step before, if they are still here."""
        if self.late is not None and EXCLUSIVE not in self.late.outgoing:
            self.moves.send_gradients(self.late, EXCLUSIVE)

    def apply_late(self) -> None:
        """Apply the exclusive gradients of the step before, if that is not done yet."""
        self._send_late()
        late, self.late = self.late, None
        if late is not None:
            self.moves.apply_gradients(late, EXCLUSIVE)

    def drop(self) -> None:
        """Forget what was prefetched. All ranks have issued the same transfers: let them finish."""
        for state in (self.current, self.next, self.after):
            if state is not None:
                self.moves.finish_ids(state)
                self.moves.await_rows(state)
        self.current = self.next = self.after = None

    def turn_off(self, reason: str) -> None:
        self.off = reason
        self.slot = None
        log_once(f"prioritize: {self.name} is exchanged synchronously: it is {reason}")


class Schedule:
    """Drives all prioritized modules through a step, in the same order on every rank."""

    def __init__(
        self,
        modules: dict[str, ShardedEmbeddingCollection],
        groups: Groups,
        copies: SideStream | None = None,
        timeline: Timeline | None = None,
    ):
        self.lanes = [
            Lane(name, PrioritizedEmbedding(module, groups, copies, timeline)) for name, module in modules.items()
        ]
        for lane in self.lanes:
            lane.moves.module.forward = lane.forward  # as TorchRec's own pipelines do
        self._batch: list[KeyedJaggedTensor] = []

    @property
    def prioritized(self) -> list[str]:
        """Names of the modules whose exchange is prioritized at present."""
        return [lane.name for lane in self.lanes if lane.active and lane.slot is not None]

    def activate(self, active: bool) -> None:
        """Prioritize from the next step on, or go back to the synchronous path. Both paths give the same training."""
        for lane in self.lanes:
            if lane.active and not active:
                lane.apply_late()
                lane.drop()
                lane.moves.table_stream.join()
            lane.active = active

    def begin_step(
        self, batch: list[KeyedJaggedTensor], soon: list[KeyedJaggedTensor], later: list[KeyedJaggedTensor]
    ) -> None:
        """Before the forward of a batch.

        Args:
            batch: the KeyedJaggedTensors of the batch, always in the same order.
            soon: those of the next batch, empty if the data end before it.
            later: those of the batch after the next.
        """
        self._end_step()
        self._batch = batch
        for lane in self.lanes:
            if lane.slot is not None and lane.active:
                lane.begin(*(_pick(part, lane.slot) for part in (batch, soon, later)))

    def before_backward(self) -> None:
        for lane in self.lanes:
            lane.before_backward()

    def after_backward(self) -> None:
        for lane in self.lanes:
            lane.after_backward()

    def _end_step(self) -> None:
        """Look back at the step before: the first one shows what each module is called with."""
        for lane in self.lanes:
            if lane.slot is None and lane.off is None and lane.calls:
                self._learn(lane)
            if lane.off is not None:
                lane.drop()
            lane.calls = []

    def _learn(self, lane: Lane) -> None:
        slots = [index for index, kjt in enumerate(self._batch) if kjt is lane.calls[0]]
        if len(lane.calls) > 1:
            lane.turn_off(MORE_THAN_ONCE)
        elif not slots:
            lane.turn_off(NOT_IN_BATCH)
        elif self._batch[slots[0]].variable_stride_per_key():
            lane.turn_off("called with a batch size that varies by feature")
        else:
            lane.slot = slots[0]

    def flush(self) -> None:
        """Apply every gradient that is still out. What was prefetched stays valid: those rows are not among them."""
        for lane in self.lanes:
            lane.apply_late()

    def close(self) -> None:
        """Flush, forget what was prefetched, give the modules their own forward back."""
        self.flush()
        for lane in self.lanes:
            lane.drop()
            lane.moves.table_stream.join()
            lane.moves.module.__dict__.pop("forward", None)


def _pick(batch: Iterable[KeyedJaggedTensor], slot: int) -> KeyedJaggedTensor | None:
    parts = list(batch)
    return parts[slot] if slot < len(parts) else None
