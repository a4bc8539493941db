"""SIGTERM and SLURM's requeue signal: all ranks act on them together, at the same batch.

A signal reaches the ranks at different moments. A handler here only notes the request. The header of the next batch
carries it to all ranks, which stop or save a checkpoint before they train that batch.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from lightning_freescale.runtime import lightning_compat as compat
from lightning_freescale.strategy.control import Control, Request

# The exit code of a process that SIGTERM has ended, as shells give it. 0 would tell a scheduler that the training is complete.
STOPPED = 128 + signal.SIGTERM


class SignalRequests:
    """Replaces Lightning's signal handlers for one ``fit``.

    Args:
        trainer: the Trainer.
        control: carries the request to the other ranks.
        launcher: has started the other processes of this host; ``None`` if somebody else has.
        stop: the exception that ends the training, Lightning's ``SIGTERMException``.
    """

    def __init__(self, trainer: Any, control: Control, launcher: Any, stop: type[BaseException]):
        self._trainer, self._control, self._launcher, self._stop = trainer, control, launcher, stop
        self._requeue: Callable[[int, Any], None] = compat.replace_signal_handlers(
            trainer, self._note_sigterm, self._note_requeue
        )
        self._requeue_signal = 0

    def _note_sigterm(self, signum: int, frame: Any) -> None:
        if not self._control.stop:
            compat.forward_signal(self._launcher, signum)
        self._control.stop = True

    def _note_requeue(self, signum: int, frame: Any) -> None:
        self._requeue_signal = signum
        self._control.requeues += 1

    def act_on(self, request: Request) -> None:
        """Do what some rank has asked for. All ranks call it between the same two steps."""
        if request == Request.STOP:
            self._control.stop = False
            compat.mark_sigterm_received(self._trainer)
            raise self._stop(STOPPED)
        if request == Request.REQUEUE:
            self._requeue(self._requeue_signal, None)
