"""Where the training thread spends the time of a save: the functions of the save are timed, each without those it calls."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.strategy.checkpoints.background import BackgroundSaves
from lightning_freescale.strategy.checkpoints.device_copy import DeferredCopy
from lightning_freescale.strategy.control import Control

REST = "rest"
DEVICE = "wait for the device"
PARTS: dict[str, list[tuple[type, str]]] = {  # The functions of each part.
    "pending gradients": [(FreeScaleStrategy, "flush")],
    "weights": [(FreeScaleStrategy, "lightning_module_state_dict")],
    "Lightning's entries": [(_CheckpointConnector, "dump_checkpoint")],
    "gathers between ranks": [(Control, "gather")],
    "losses": [(Control, "check_losses")],
    "wait for the save before": [(BackgroundSaves, "finish")],
    "own entries": [(FreeScaleStrategy, "_entry"), (FreeScaleStrategy, "_own_state")],
    "state of the tables' optimizer": [(FreeScaleStrategy, "_optimizer_tensors")],
    "copy of the state": [(DeferredCopy, "__init__")],
    "start of the thread": [(BackgroundSaves, "start")],
}


class SaveParts:
    """Times of the parts of each save, in seconds."""

    def __init__(self) -> None:
        self.saves: list[dict[str, float]] = []
        # For each timed function that runs, the time of the timed functions that it has called.
        self._inside: list[float] = []
        self._thread: int | None = None  # The thread that saves, during a save.

    @contextmanager
    def of_a_save(self) -> Iterator[dict[str, float]]:
        """Times what runs inside, in this thread."""
        found = dict.fromkeys([*PARTS, DEVICE, REST], 0.0)
        originals = [
            (owner, name, owner.__dict__.get(name)) for functions in PARTS.values() for owner, name in functions
        ]
        for part, functions in PARTS.items():
            for owner, name in functions:
                setattr(owner, name, self._timed(getattr(owner, name), part, found))
        self._thread, self._inside = threading.get_ident(), [0.0]
        begin = time.perf_counter()
        try:
            yield found
        finally:
            found[REST] = time.perf_counter() - begin - self._inside[0] - found[DEVICE]
            self._thread = None
            self.saves.append(found)
            for owner, name, original in originals:
                if original is None:  # The function is that of a base class.
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)

    def _timed(self, function: Any, part: str, found: dict[str, float]) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self._inside.append(0.0)
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - begin
                found[part] += seconds - self._inside.pop()
                self._inside[-1] += seconds

        return timed

    def of_the_shortest(self) -> dict[str, float]:
        """The parts of the shortest save from the third on, in ms. Their sum is the time of that save."""
        shortest = min(self.saves[2:] or self.saves, key=lambda parts: sum(parts.values()))
        return {part: 1e3 * seconds for part, seconds in shortest.items()}
