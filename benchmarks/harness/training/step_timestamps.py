"""Moments of a training step in the time of a rank's compute engine: the same ones whoever trains, read when all is done.

A mark is an event on the compute stream of a GPU, a reading of the clock on a CPU. Nobody waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.harness.training.bubble import MARKS
from lightning_freescale.batch.seq_batch import HISTORY, SeqBatch
from lightning_freescale.models import HSTU


class Trace:
    """A profiler's trace of some steps, for Perfetto. Those steps take longer.

    Args:
        path: of the trace, JSON.
        first, last: steps.
    """

    def __init__(self, path: Path, first: int, last: int):
        self._path, self._first, self._last = path, first, last
        self._profile: Any = None

    def ended(self, step: int) -> None:
        if step == self._first - 1:
            self._profile = torch.profiler.profile()
            self._profile.start()
        elif step == self._last and self._profile is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._profile.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))


class Marks:
    """The moments of all steps of one training on this rank, and what the training saw.

    Args:
        trace: takes a trace of some of them.

    Attributes:
        losses: of each step, the mean over this rank's predicted positions.
        predicted: their number.
        late: of each step but the first, whether the host came to it after the device was through with the one before.
    """

    def __init__(self, device: torch.device, trace: Trace | None = None):
        self._device, self._trace = device, trace
        self._steps: list[dict[str, Any]] = [{}]
        self.losses: list[Tensor] = []
        self.predicted: list[Tensor] = []
        self.late: list[bool] = []

    def mark(self, name: str) -> None:
        """Now, in the step under way; ``"end"`` begins the next one."""
        if name == "batch" and len(self._steps) > 1:
            ended = self._steps[-2]["end"]
            self.late.append(isinstance(ended, float) or ended.query())
        self._steps[-1][name] = self._now()
        if name == "end":
            if self._trace is not None:
                self._trace.ended(len(self._steps) - 1)
            self._steps.append({})

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()  # on the current stream: inside backward, the one that autograd has chosen
        return event

    def seconds(self) -> NDArray[np.float64]:
        """``[steps, len(MARKS)]`` since the first mark. Waits for the device."""
        steps = [[step[name] for name in MARKS] for step in self._steps if "end" in step]
        if self._device.type != "cuda":
            return np.array(steps) - steps[0][0]
        torch.cuda.synchronize(self._device)
        first = steps[0][0]
        return np.array([[first.elapsed_time(event) / 1e3 for event in step] for step in steps])


class MarkedHSTU(HSTU):
    """Marks what happens between the arrival of the rows and the end of the graph; keeps the losses."""

    marks: Marks

    def loss(self, embedded: Mapping[str, Any], batch: SeqBatch) -> Tensor:
        marks, rows = self.marks, embedded[HISTORY].values()
        marks.mark("arrived")
        loss = super().loss(embedded, batch)
        marks.losses.append(loss.detach())
        marks.predicted.append(self.num_predicted(batch))

        def backward_begins(_: Tensor) -> None:
            marks.mark("begun")
            # Before DDP queues its own callback, which waits for the reduced gradients: callbacks run in this order.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: marks.mark("graph"))  # type: ignore[attr-defined]

        rows.register_hook(lambda _: marks.mark("gradient"))
        loss.register_hook(backward_begins)
        marks.mark("forward")
        return loss


class Marker(pl.Callback):
    """Marks the steps of a Trainer.

    Attributes:
        prioritized: modules whose exchange was prioritized in the last step.
    """

    def __init__(self, marks: Marks):
        self.marks = marks
        self.prioritized: list[str] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.marks.mark("batch")

    def on_after_backward(self, trainer: Any, *_: Any) -> None:
        self.marks.mark("backward")

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self.marks.mark("optimizer")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.marks.mark("end")
        schedule = trainer.strategy.schedule
        self.prioritized = [] if schedule is None else schedule.prioritized
