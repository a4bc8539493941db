"""SIGTERM stops all ranks together, at the batch whose headers carry it."""

from __future__ import annotations

import signal
from typing import Any

from lightning_freescale.strategy.control import Control


def take_over(trainer: Any, control: Control, launcher: Any) -> None:
    """Take over from Lightning, which broadcasts a flag and reads it back from the device in every step.

    The headers carry it for nothing. Lightning's handler also starts a collective inside a signal, which may interrupt
    another one: ours only takes a note, and passes the signal on to the processes that ``launcher`` has started.
    """

    def notice(signum: int, frame: Any) -> None:
        if not control.stop_requested and launcher is not None:
            launcher.kill(signal.Signals(signum))
        control.stop_requested = True

    trainer._signal_connector._sigterm_notifier_fn = notice
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
