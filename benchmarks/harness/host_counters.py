"""Counts of the work of the host that do not depend on the load of the machine."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
from torch.utils._python_dispatch import TorchDispatchMode


class TorchOperators(TorchDispatchMode):
    """Counts the torch operators of this thread, and the collectives among them."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        self.collectives += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))

    def read(self) -> dict[str, float]:
        return {"operators": self.operators, "collectives": self.collectives}


class PythonCalls:
    """Counts the calls of functions of this thread, without those of this file."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> PythonCalls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call") and frame.f_code.co_filename != __file__

    def read(self) -> dict[str, float]:
        return {"Python calls": self.count}


class CountedSteps(pl.Callback):
    """Counts the work of the main thread in some steps of a training.

    Args:
        first: number of the first step that counts.
        steps: how many steps count for each counter. The operators are counted after the Python calls, because counting
            them makes Python calls.

    Attributes:
        means: the mean of each count in a step, by name.
    """

    def __init__(self, first: int, steps: int):
        # Each counter, by the step before the first one that it counts.
        self._counters: dict[int, PythonCalls | TorchOperators] = {
            first - 1: PythonCalls(),
            first - 1 + steps: TorchOperators(),
        }
        self._steps = steps
        self.means: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        ending, beginning = self._counters.get(batch_idx - self._steps), self._counters.get(batch_idx)
        if ending is not None:
            ending.__exit__(None, None, None)
            self.means |= {name: count / self._steps for name, count in ending.read().items()}
        if beginning is not None:
            beginning.__enter__()
