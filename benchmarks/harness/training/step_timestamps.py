"""Time stamps inside a training step, at the same points for every variant, read after the training.

On a GPU a time stamp is an event on the compute stream, on a CPU the time of the host. Taking one does not block the
host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec import JaggedTensor

from benchmarks.harness.training.bubble import POINTS
from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.models import HSTU


class ProfilerTrace:
    """Writes a trace of a few steps for Perfetto. The traced steps take longer.

    Args:
        path: JSON file to write.
        first: number of the first traced step.
        last: number of the last traced step.
        with_host: also trace the operators on the host, which makes the traced steps slower still.
    """

    def __init__(self, path: Path, first: int, last: int, with_host: bool = True):
        self._path, self._first, self._last, self._with_host = path, first, last, with_host
        self._profile: Any = None

    def step_ended(self, step: int) -> None:
        """Start or stop the profiler after this step, if it is time to."""
        if step == self._first - 1:
            only_device = torch.cuda.is_available() and not self._with_host
            self._profile = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA] if only_device else None
            )
            self._profile.start()
        elif step == self._last and self._profile is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._profile.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))


class StepTimestamps:
    """Time stamps of all steps of one training on this rank, and the losses of the training.

    Args:
        trace: writes a trace of some of the steps.

    Attributes:
        losses: per step, the mean over this rank's predicted positions.
        predicted: per step, the number of these positions.
        late: per step except the first, whether the device had finished the previous step before the host started this one.
        host: per step, the time of the host and the CPU time of this process at the end of the step, in seconds.
    """

    def __init__(self, device: torch.device, trace: ProfilerTrace | None = None):
        self._device, self._trace = device, trace
        self._steps: list[dict[str, Any]] = [{}]
        self.losses: list[Tensor] = []
        self.predicted: list[Tensor] = []
        self.late: list[bool] = []
        self.host: list[tuple[float, float]] = []

    def take(self, point: str) -> None:
        """Take the time stamp of one of ``bubble.POINTS`` in the current step; ``"end"`` starts the next step."""
        if point == "batch" and len(self._steps) > 1:
            ended = self._steps[-2]["end"]
            self.late.append(isinstance(ended, float) or ended.query())
        self._steps[-1][point] = self._now()
        if point == "end":
            if self._trace is not None:
                self._trace.step_ended(len(self._steps) - 1)
            self._steps.append({})
            self.host.append((time.perf_counter(), time.process_time()))

    def busy_cores(self, counted: slice) -> float:
        """How many CPU cores this process keeps busy in these steps, with all its threads."""
        (began, used), (ended, more) = self.host[counted.start - 1], self.host[counted.stop - 1]
        return (more - used) / (ended - began)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()  # on the current stream; inside backward that is the stream of autograd
        return event

    def seconds(self) -> NDArray[np.float64]:
        """``[steps, len(POINTS)]`` seconds since the first time stamp. Waits for the device."""
        steps = [[step[name] for name in POINTS] for step in self._steps if "end" in step]
        if self._device.type != "cuda":
            return np.array(steps) - steps[0][0]
        torch.cuda.synchronize(self._device)
        first = steps[0][0]
        return np.array([[first.elapsed_time(event) / 1e3 for event in step] for step in steps])


class TimestampedHSTU(HSTU):
    """Takes the time stamps between the arrival of the rows and the end of the autograd graph, and keeps the losses."""

    timestamps: StepTimestamps

    def loss(self, embedded: Mapping[str, Any], batch: SeqBatch) -> Tensor:
        rows, compute = embedded[HISTORY].values(), super().loss
        return timed_loss(self.timestamps, rows, lambda: self.num_predicted(batch), lambda: compute(embedded, batch))

    def random_rows(self, batch: SeqBatch, on_device: SeqBatch) -> dict[str, Any]:
        """Embeddings of a batch, drawn at random. ``batch`` is in host memory."""
        device, dim = on_device.timestamps.device, self.hparams["embedding_dim"]
        return {
            key: JaggedTensor(
                torch.randn(batch.features[key].values().numel(), dim, device=device, requires_grad=True),
                lengths=on_device.features[key].lengths(),
            )
            for key in (HISTORY, NEGATIVES)
        }


def timed_loss(
    timestamps: StepTimestamps, rows: Tensor, predicted: Callable[[], Tensor], compute_loss: Callable[[], Tensor]
) -> Tensor:
    """The loss that ``compute_loss`` computes from ``rows``, with time stamps from their arrival to the end of the graph.

    ``predicted`` computes the number of predicted positions, after the loss: the forward should not wait for it.
    """
    timestamps.take("arrived")
    loss = compute_loss()
    timestamps.losses.append(loss.detach())
    timestamps.predicted.append(predicted())

    def backward_begins(_: Tensor) -> None:
        timestamps.take("begun")
        # Callbacks run in the order in which they are queued. This one comes before the callback of DDP, which waits for the
        # reduced gradients.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: timestamps.take("graph"))  # type: ignore[attr-defined]

    rows.register_hook(lambda _: timestamps.take("gradient"))
    loss.register_hook(backward_begins)
    timestamps.take("forward")
    return loss


class TimestampCallback(pl.Callback):
    """Takes the time stamps at the start and end of a Trainer's steps.

    Attributes:
        prioritized: modules whose exchange was prioritized in the last step.
    """

    def __init__(self, timestamps: StepTimestamps):
        self.timestamps = timestamps
        self.prioritized: list[str] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.timestamps.take("batch")

    def on_after_backward(self, trainer: Any, *_: Any) -> None:
        self.timestamps.take("backward")

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self.timestamps.take("optimizer")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.timestamps.take("end")
        schedule = trainer.strategy.schedule
        self.prioritized = [] if schedule is None else schedule.prioritized
