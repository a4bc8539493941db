"""``ComputeTimer``: measures how long a rank computes in a step, without its waits for other ranks.

The timer runs in forward, and in backward until the last gradient of the embedding rows that came from other ranks. It is
paused while a sharded module exchanges ids and rows. It does not include what follows those gradients: their exchange and the
wait for the dense AllReduce.

On CPU the timer reads the monotonic clock. On CUDA it records events on the compute stream. It reads those events some steps
later, when the device has passed them, so that the host never waits for the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardedModule

from lightning_freescale.batch.contents import find_tensors

TimePoint = float | torch.cuda.Event  # seconds, or a recorded event


class _TimedStep:
    """The time spans of one step in which this rank computed. ``label`` identifies the step for the caller."""

    def __init__(self, label: Any):
        self.label = label
        self.began: list[TimePoint] = []
        self.ended: list[TimePoint] = []

    @property
    def events(self) -> list[torch.cuda.Event]:
        return [point for point in (*self.began, *self.ended) if not isinstance(point, float)]

    def seconds(self) -> float:
        return sum(_seconds_between(*span) for span in zip(self.began, self.ended, strict=True))


class ComputeTimer:
    """Measures the steps for which :meth:`start` is called, and ignores all others.

    The order of calls is ``start -> (pause, resume) ... end_forward -> begin_backward -> end_step``. :meth:`finished_steps`
    may be called at any time.
    """

    def __init__(self) -> None:
        self._cuda = self._sharded = False
        self._hooks: list[Any] = []
        self._step: _TimedStep | None = None
        self._waits = 0  # waits for other ranks that have begun and not ended; they may be nested
        self._last_gradient: TimePoint | None = None  # latest gradient of rows, or the end of the autograd graph
        self._done: deque[_TimedStep] = deque()
        self._free_events: list[torch.cuda.Event] = []

    def watch(self, model: nn.Module, device: torch.device) -> None:
        """Pause from now on whenever a sharded module of ``model`` communicates.

        Args:
            model: the sharded model.
            device: where it computes.
        """
        self.close()
        self._cuda = device.type == "cuda"
        modules = [module for module in model.modules() if isinstance(module, ShardedModule)]
        self._sharded = bool(modules)
        for module in modules:
            self._hooks.append(module.register_forward_pre_hook(self._before_forward))
            self._hooks.append(module.register_forward_hook(self._after_forward))

    def close(self) -> None:
        """Remove the hooks from the model, and drop all measurements."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._done.clear()
        self._step = None

    # ---- a step ----------------------------------------------------------------------------------------------------
    def start(self, label: Any) -> None:
        """Start at the start of forward. An earlier step that has not ended is dropped.

        Args:
            label: any object; :meth:`finished_steps` returns it with the measured time.
        """
        self._step, self._waits, self._last_gradient = _TimedStep(label), 0, None
        self._step.began.append(self._now())

    def pause(self) -> None:
        """Pause: a wait for other ranks begins."""
        self._waits += 1
        if self._step is not None and self._waits == 1:
            self._step.ended.append(self._now())

    def resume(self) -> None:
        """Resume: a wait for other ranks has ended."""
        self._waits -= 1
        if self._step is not None and self._waits == 0:
            self._step.began.append(self._now())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Pause inside this context, which encloses a wait for other ranks."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def end_forward(self) -> None:
        """Pause until backward begins."""
        step = self._step
        if step is not None and len(step.began) > len(step.ended):
            step.ended.append(self._now())
        self._waits = 0

    def begin_backward(self, loss: Tensor) -> None:
        """Resume at the start of the backward of ``loss``."""
        step, self._last_gradient = self._step, None
        if step is None:
            return
        if not self._sharded and loss.requires_grad:
            loss.register_hook(self._queue_end_of_graph)
        step.began.append(self._now())

    def end_step(self) -> None:
        """End at the last gradient of backward. A step without such a gradient is dropped."""
        step, self._step = self._step, None
        if step is not None and self._last_gradient is not None:
            step.ended.append(self._last_gradient)
            self._done.append(step)

    def finished_steps(self) -> Iterator[tuple[Any, float]]:
        """Yield label and seconds of each step that the device has finished, each step once. The host does not wait."""
        while self._done and all(event.query() for event in self._done[0].events):
            step = self._done.popleft()
            yield step.label, step.seconds()
            self._free_events.extend(step.events)

    # ---- hooks on sharded modules and on gradients -----------------------------------------------------------------
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self.pause()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.resume()
        if self._step is None or not torch.is_grad_enabled():
            return None
        if isinstance(output, LazyAwaitable):
            return _PausingAwaitable(output, self)
        self.watch_gradients(output)
        return None

    def watch_gradients(self, rows: Any) -> None:
        """Record from now on when the gradients of ``rows``, which came from other ranks, are computed."""
        for tensor in find_tensors(rows):
            if tensor.requires_grad:
                tensor.register_hook(self._on_gradient)

    def _on_gradient(self, _: Tensor) -> None:
        if self._step is not None:
            self._last_gradient = self._now(reuse=self._last_gradient)

    def _queue_end_of_graph(self, gradient: Tensor) -> None:
        # This callback runs before the callback of DDP, which is queued later and waits for the AllReduce.
        engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(lambda: self._on_gradient(gradient))

    def _now(self, reuse: TimePoint | None = None) -> TimePoint:
        """Return the current time, or an event recorded now. ``reuse`` is an event that may be recorded again."""
        if not self._cuda:
            return time.perf_counter()
        event = reuse if isinstance(reuse, torch.cuda.Event) else self._new_event()
        event.record()
        return event

    def _new_event(self) -> torch.cuda.Event:
        return self._free_events.pop() if self._free_events else torch.cuda.Event(enable_timing=True)


class _PausingAwaitable(LazyAwaitable[Any]):
    """The output of a sharded module. The wait for it does not count as compute of this rank."""

    def __init__(self, inner: Awaitable[Any], timer: ComputeTimer):
        super().__init__()
        self._inner, self._timer = inner, timer

    def _wait_impl(self) -> Any:
        with self._timer.waiting():
            rows = self._inner.wait()
        self._timer.watch_gradients(rows)
        return rows


def _seconds_between(began: TimePoint, ended: TimePoint) -> float:
    if isinstance(began, float) or isinstance(ended, float):
        assert isinstance(began, float)
        assert isinstance(ended, float)
        return ended - began
    return began.elapsed_time(ended) / 1e3
