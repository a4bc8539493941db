"""Values for the progress bar, without a wait for the device.

At the end of every step Lightning turns each value that was logged with ``prog_bar=True`` into a number, even if no bar
is shown. The host then waits for the device, and afterwards the device waits for the host. With the functions of this
file the progress bar shows the newest number that has already arrived on the host. It is one or two steps old.
Loggers, callbacks and epoch ends receive the same values as before.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_freescale.runtime import lightning_compat as compat
from lightning_freescale.runtime.streams import Readback


class LateNumbers:
    """The newest number of each device tensor that has arrived on the host. Only the first number is waited for."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}
        self._in_transit: dict[str, Readback] = {}  # At most one copy for each name.
        self._last: dict[str, Tensor] = {}

    def read(self, name: str, value: Tensor) -> float:
        """A recent number for ``name``, whose current tensor is ``value``."""
        self._last[name] = value
        copy = self._in_transit.get(name)
        if copy is None or copy.arrived():
            self._in_transit[name] = Readback(value)
            self._known[name] = (copy or self._in_transit[name]).wait().item()
        return self._known[name]

    def settle(self) -> dict[str, float]:
        """The numbers of the last tensors of all names. Waits for the device."""
        return {name: value.item() for name, value in self._last.items()}


class LateProgressBar:
    """Replaces the method ``metrics`` of the training loop's results: the progress bar gets values that are late."""

    def __init__(self, results: Any):
        self._results = results
        self.numbers = LateNumbers()

    def __call__(self, on_step: bool) -> Any:
        results = self._results
        late = [
            metric
            for _, metric in results.valid_items()
            if on_step and metric.meta.prog_bar and _is_device_number(compat.logged_value(results, metric, on_step))
        ]
        try:
            for metric in late:
                metric.meta.prog_bar = False
            metrics = type(results).metrics(results, on_step)
        finally:
            for metric in late:
                metric.meta.prog_bar = True
        for metric in late:
            name = compat.logged_name(results, metric, on_step)
            metrics["pbar"][name] = self.numbers.read(name, compat.logged_value(results, metric, on_step))
        return metrics


def show_late_values(trainer: Any) -> None:
    """Let the progress bar of this training show values that are one or two steps old, if they are on a GPU."""
    results = compat.train_results(trainer)
    results.metrics = LateProgressBar(results)


def show_last_values(trainer: Any) -> None:
    """At the end of the training: the values that remain on the Trainer are those of the last step."""
    bar = vars(compat.train_results(trainer)).get("metrics")
    if bar is not None:
        compat.update_progress_bar_metrics(trainer, bar.numbers.settle())


def _is_device_number(value: Any) -> bool:
    """Whether ``value`` is one number on a GPU. Lightning handles all other values itself."""
    return isinstance(value, Tensor) and value.is_cuda and value.numel() == 1
