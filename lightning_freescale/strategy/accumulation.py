"""Gradient accumulation: an optimizer step over several micro-batches is the step of one large batch.

The *window* of an optimizer step is its micro-batches. Lightning divides the loss of each of them by
``accumulate_grad_batches``, so a small micro-batch would count as much as a large one, and the gradient of the last window of an
epoch would be too small if it has fewer micro-batches. Here each loss counts by its samples (or tokens), and the gradient is that
of the mean over all samples of the window on all ranks. Where all micro-batches have the same size and the window is complete,
that is Lightning's division, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from lightning_freescale.embedding.held_gradients import HeldTableGradients, MicroBatch
from lightning_freescale.runtime import lightning_compat as compat
from lightning_freescale.runtime.log import log_once


class WindowFactors(NamedTuple):
    """Factors that turn sums of losses into the mean over a window."""

    loss: float  # of the loss of this micro-batch, which Lightning has divided by ``accumulate_grad_batches``
    gradients: float  # of the gradients of the micro-batches before it


def window_factors(sizes: Sequence[int], number: int, last: bool) -> WindowFactors:
    """The factors of the newest micro-batch of a window.

    The sizes of later micro-batches are not known yet. So the first micro-batch sets the unit, and the last one corrects all
    gradients of the window.

    Args:
        sizes: samples (or tokens) of all ranks in each micro-batch of the window so far.
        number: ``accumulate_grad_batches``.
        last: whether the optimizer steps after this micro-batch.

    >>> window_factors([4, 4], 2, last=True)
    WindowFactors(loss=1.0, gradients=1.0)
    >>> window_factors([4, 2], 2, last=True)  # the mean over 6 samples: 4/6 and 2/6 in place of 1/2 and 1/2
    WindowFactors(loss=0.6666666666666666, gradients=1.3333333333333333)
    >>> window_factors([4], 2, last=True)  # the epoch ends inside of the window
    WindowFactors(loss=2.0, gradients=2.0)
    """
    unit = next((size for size in sizes if size), 1)
    relative = sizes[-1] / unit
    if not last or not any(sizes):
        return WindowFactors(relative, 1.0)
    correction = number * unit / sum(sizes)
    return WindowFactors(relative * correction, correction)


class GradientAccumulation:
    """The accumulation of one strategy. It does nothing while ``accumulate_grad_batches`` is 1.

    Args:
        await_gradients: makes the current stream see all gradients of tables that have left for their owners. A collective.
        await_tables: makes the current stream wait for what is queued on the streams of the tables. No collective.
    """

    def __init__(self, await_gradients: Callable[[], None], await_tables: Callable[[], None]) -> None:
        self._await_gradients, self._await_tables = await_gradients, await_tables
        self._tables: HeldTableGradients | None = None
        self._sizes: list[int] = []  # of the micro-batches of this window that had a backward
        self._window = compat.EVERY_BATCH

    def begin(self, trainer: Any, model: nn.Module) -> MicroBatch | None:
        """Before the forward of a micro-batch. Returns ``None`` if no gradients are accumulated."""
        before, self._window = self._window, compat.accumulation_window(trainer)
        if self._window.number != before.number:  # Gradients of the step before are applied as that step has begun.
            self._await_gradients()
        if self._window.number == 1:
            if self._tables is not None:
                self._tables.hold(False)
            return None
        if self._tables is None:
            self._tables = HeldTableGradients(model)
        # A window that the end of an epoch or a stop has cut short is left as it is. Between two windows nothing is held.
        if self._window.place == 0 or (self._window.number != before.number and not self._sizes):
            if self._sizes:  # The same on all ranks.
                self._await_gradients()
            self._tables.drop()
            self._sizes = []
        self._tables.hold(True)
        return MicroBatch(self._tables, *self._window)

    @property
    def number(self) -> int:
        """``accumulate_grad_batches`` of this step."""
        return self._window.number

    @property
    def last(self) -> bool:
        """Whether the tables are updated after the backward of this step."""
        return self._window.last

    def loss_factor(self, weights: Sequence[int], model: nn.Module) -> float:
        """Before the backward: the factor of this loss. It may also correct the gradients of earlier micro-batches.

        Args:
            weights: samples (or tokens) of each rank; empty if they are not known.
            model: the model. Its dense parameters hold the gradients so far.
        """
        if self._window.number == 1:
            return 1.0
        self._sizes.append(sum(weights) if weights else 1)
        factors = window_factors(self._sizes, self._window.number, self._window.last)
        if factors.gradients != 1.0:
            assert self._tables is not None
            self._await_gradients()
            self._tables.scale(factors.gradients)
            for parameter in model.parameters():
                if parameter.grad is not None and len(self._sizes) > 1:
                    parameter.grad.mul_(factors.gradients)
        return factors.loss

    def end_backward(self) -> None:
        """After the backward: the last micro-batch of a window updates the tables, unless the schedule has done it."""
        if self._window.number == 1 or not self._window.last:
            return
        assert self._tables is not None
        if not self._tables.all_applied:  # Other ranks may differ: they may have no rows of these tables.
            self._await_tables()
            self._tables.apply()
        log_once(
            f"accumulate_grad_batches={self._window.number}: the gradients of the tables are held until the last of "
            f"{len(self._sizes)} micro-batches. They take about {self._tables.applied_bytes / 2**20:.1f} MiB on this rank"
        )
        self._sizes = []

    def end_window(self) -> None:
        """After a step of the optimizer: update the tables with what is held, if the last micro-batch had no backward.

        ``training_step`` may return ``None`` on a single rank. On several, Lightning raises an error.
        """
        if self._window.number > 1 and self._window.last and self._tables is not None and not self._tables.all_applied:
            self._await_gradients()
            self._tables.apply()
            self._sizes = []

    def close(self) -> None:
        """Drop the gradients of a window that has not ended, as Lightning does with those of the dense parameters."""
        if self._tables is not None:
            self._tables.close()
        self._tables, self._sizes = None, []
