"""When an asynchronous save copies the tables: beside a step of the training, between two updates of the tables.

    step N      the end              a save copies everything but the tables
    step N+1    before the backward  the late gradients of step N are applied, and the copy of the tables begins
                after the backward   the updates of step N+1 wait for the copy

With TorchRec's own exchange no gradients are late, and the tables change in the backward. Then the copy begins with the save, and
the backward waits for it.
"""

from __future__ import annotations

from lightning_freescale.embedding.all_to_all import COLLISION, RowKind
from lightning_freescale.strategy.checkpoints.shared_state import CheckpointState

UNANNOUNCED = (
    "the tables were changed before they were copied, because a backward ran that the Trainer did not start. Let the Trainer run "
    "it, or save without AsyncCheckpointIO and HostCopies"
)
_LIGHTNINGS_HOOKS = ("Callback.on_save_checkpoint", "CheckpointHooks.on_save_checkpoint")


class TableCopies(CheckpointState):
    """The copies of the tables that asynchronous saves make, as a part of the strategy class."""

    def _hooks_read_the_state(self) -> bool:
        """Whether user code gets the checkpoint before it is written, on every rank."""
        owners = [self._module, *self._module.trainer.callbacks]
        return any(type(owner).on_save_checkpoint.__qualname__ not in _LIGHTNINGS_HOOKS for owner in owners)

    def _copies_late(self) -> bool:
        """Whether the tables are copied in the next step, after the gradients of the last one that are still on their way.

        An early end of their exchange would hold the next step up.
        """
        mode = self._exchange_mode
        if not mode.updates_after_backward or mode.holds_gradients or not self._facts.change_in_backward_only:
            return False
        return self._module.automatic_optimization and not self._hooks_read_the_state()

    def copy_tables(self) -> None:
        """Before a backward: start the copies of the tables that wait for it."""
        if not self._open_copies:
            return
        streams = self._exchange_mode.apply_late()
        for copy in self._open_copies:
            copy.start(streams)
        if not self._exchange_mode.updates_after_backward:
            self.before_tables_change()

    def before_tables_change(self) -> None:
        """The tables change from now on, on the streams of the schedule if it updates all of them. Their copies come first.

        The gradients of the step before a save have been applied.
        """
        mode = self._exchange_mode
        streams = mode.table_streams if mode.updates_after_backward else None
        while self._open_copies:
            copy = self._open_copies.pop()
            copy.start(mode.table_streams)  # A save after the begin of the backward is still to be copied.
            copy.protect(streams)

    def complete_copies(self) -> None:
        """Bring copies that wait for the next backward forward: something else comes before it. A collective."""
        if self._open_copies:
            self.complete_tables()

    def _note_update(self, kind: RowKind) -> None:
        """A prioritized step is about to update rows of ``kind``.

        Gradients of exclusive rows are those of the step before a save, which it includes. Those of collision rows are not.
        """
        for copy in self._open_copies:
            copy.compare()
        if kind == COLLISION and self._open_copies:
            if self._exchange_mode.has_late_gradients:
                for copy in self._open_copies:
                    copy.abandon(UNANNOUNCED)
            self.before_tables_change()

    def abandon_copies(self) -> None:
        """The training has ended. Let saves fail that wait for a step which does not come."""
        for copy in self._open_copies:
            copy.abandon("the training ended before the tables were copied; the checkpoint before it is still complete")
