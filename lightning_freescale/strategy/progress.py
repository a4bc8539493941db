"""Values for the progress bar without a wait for the device.

Lightning turns every value logged with ``prog_bar=True`` into a number at the end of every step, whether a bar shows it or not:
the host waits until the device is through with the step, and then the device waits for the host to come to the next one. Here
a bar gets the newest number that has arrived by itself, a step or two old; loggers, callbacks and epoch ends get what they did.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_freescale.runtime.streams import Readback


class LateNumbers:
    """Numbers of device tensors, by name: the newest that has arrived. Only the first of each name is waited for."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}
        self._coming: dict[str, Readback] = {}  # one at a time
        self._last: dict[str, Tensor] = {}

    def read(self, name: str, value: Tensor) -> float:
        """A recent number of ``name``, whose tensor is ``value`` now."""
        self._last[name] = value
        coming = self._coming.get(name)
        if coming is None or coming.arrived():
            self._coming[name] = Readback(value)
            self._known[name] = (coming or self._coming[name]).wait().item()
        return self._known[name]

    def settle(self) -> dict[str, float]:
        """The numbers of the last tensors of all names. Waits for the device."""
        return {name: value.item() for name, value in self._last.items()}


class LateBars:
    """Stands in for ``metrics`` of Lightning's results of a training loop: values of steps reach the bar late."""

    def __init__(self, results: Any):
        self._results = results
        self.numbers = LateNumbers()

    def __call__(self, on_step: bool) -> Any:
        results = self._results
        late = [
            metric
            for _, metric in results.valid_items()
            if on_step and metric.meta.prog_bar and _on_device(results._get_cache(metric, on_step))
        ]
        try:
            for metric in late:
                metric.meta.prog_bar = False
            metrics = type(results).metrics(results, on_step)
        finally:
            for metric in late:
                metric.meta.prog_bar = True
        for metric in late:
            _, name = results._forked_name(metric, on_step)
            metrics["pbar"][name] = self.numbers.read(name, results._get_cache(metric, on_step))
        return metrics


def read_bars_late(trainer: Any) -> None:
    """For the training of ``trainer``, where its values are on a GPU."""
    results = trainer.fit_loop.epoch_loop._results
    results.metrics = LateBars(results)


def settle_bars(trainer: Any) -> None:
    """At the end of training: what is read from the Trainer afterwards is the last step's."""
    bars = vars(trainer.fit_loop.epoch_loop._results).get("metrics")
    if bars is not None:
        trainer._logger_connector._progress_bar_metrics.update(bars.numbers.settle())


def _on_device(value: Any) -> bool:
    """One number on a GPU. Anything else is Lightning's own affair."""
    return isinstance(value, Tensor) and value.is_cuda and value.numel() == 1
