"""``Stopwatch``: how long a rank computes in a step, without its waits for other ranks.

It runs from the start of forward to its end, and from the start of backward to the last gradient of the rows that came from
other ranks; it stands still while a sharded module exchanges ids and rows. What comes after those gradients, their exchange
and the wait for the dense AllReduce, is not part of it.

On CPU a moment is a reading of the monotonic clock. On CUDA it is an event on the compute stream, read some steps later, when
the device has got there: nobody waits for it.
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

Moment = float | torch.cuda.Event


class _Step:
    """A step that is timed: the moments at which its compute began and ended, each time it did."""

    def __init__(self, note: Any):
        self.note = note
        self.began: list[Moment] = []
        self.ended: list[Moment] = []

    @property
    def events(self) -> list[torch.cuda.Event]:
        return [moment for moment in (*self.began, *self.ended) if not isinstance(moment, float)]

    def seconds(self) -> float:
        return sum(_between(*span) for span in zip(self.began, self.ended, strict=True))


class Stopwatch:
    """Times the steps it is told to start; does nothing in between.

    ``start -> (pause, resume) ... end_forward -> begin_backward -> end_step``, and :meth:`take` at any time.
    """

    def __init__(self) -> None:
        self._cuda = self._sharded = False
        self._hooks: list[Any] = []
        self._step: _Step | None = None
        self._waits = 0  # under way: one may be inside another
        self._last: Moment | None = None  # gradient of rows, or end of the graph, of this step
        self._done: deque[_Step] = deque()
        self._pool: list[torch.cuda.Event] = []

    def watch(self, model: nn.Module, device: torch.device) -> None:
        """Stand still while ``model``'s sharded modules exchange."""
        self.close()
        self._cuda = device.type == "cuda"
        modules = [module for module in model.modules() if isinstance(module, ShardedModule)]
        self._sharded = bool(modules)
        for module in modules:
            self._hooks.append(module.register_forward_pre_hook(self._called))
            self._hooks.append(module.register_forward_hook(self._returned))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._done.clear()
        self._step = None

    # ---- a step ----------------------------------------------------------------------------------------------------
    def start(self, note: Any) -> None:
        """Forward begins. ``note`` comes back with the time. A step that was started and not ended is forgotten."""
        self._step, self._waits, self._last = _Step(note), 0, None
        self._step.began.append(self._mark())

    def pause(self) -> None:
        """A wait for other ranks begins."""
        self._waits += 1
        if self._step is not None and self._waits == 1:
            self._step.ended.append(self._mark())

    def resume(self) -> None:
        """A wait for other ranks is over."""
        self._waits -= 1
        if self._step is not None and self._waits == 0:
            self._step.began.append(self._mark())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for other ranks."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def end_forward(self) -> None:
        """Stand still until backward begins."""
        step = self._step
        if step is not None and len(step.began) > len(step.ended):
            step.ended.append(self._mark())
        self._waits = 0

    def begin_backward(self, loss: Tensor) -> None:
        step, self._last = self._step, None
        if step is None:
            return
        if not self._sharded and loss.requires_grad:
            loss.register_hook(self._queue_end_of_graph)
        step.began.append(self._mark())

    def end_step(self) -> None:
        """Backward is done. Without a gradient that it could end with, the step does not count."""
        step, self._step = self._step, None
        if step is not None and self._last is not None:
            step.ended.append(self._last)
            self._done.append(step)

    def take(self) -> Iterator[tuple[Any, float]]:
        """Note and seconds of the steps that are over, on the device too. Waits for nothing."""
        while self._done and all(event.query() for event in self._done[0].events):
            step = self._done.popleft()
            yield step.note, step.seconds()
            self._pool.extend(step.events)

    # ---- where waits and gradients are -----------------------------------------------------------------------------
    def _called(self, module: nn.Module, args: Any) -> None:
        self.pause()

    def _returned(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.resume()
        if self._step is None or not torch.is_grad_enabled():
            return None
        if isinstance(output, LazyAwaitable):
            return _Watched(output, self)
        self.follow(output)
        return None

    def follow(self, rows: Any) -> None:
        """Note when the gradient of ``rows``, which have come from other ranks, is there."""
        for tensor in find_tensors(rows):
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_came)

    def _gradient_came(self, _: Tensor) -> None:
        if self._step is not None:
            self._last = self._mark(self._last)

    def _queue_end_of_graph(self, _: Tensor) -> None:
        # Runs before DDP's own callback, which is queued later and waits for the AllReduce.
        engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(lambda: self._gradient_came(_))

    def _mark(self, again: Moment | None = None) -> Moment:
        """This moment; an event ``again`` is recorded anew."""
        if not self._cuda:
            return time.perf_counter()
        event = again if isinstance(again, torch.cuda.Event) else self._event()
        event.record()
        return event

    def _event(self) -> torch.cuda.Event:
        return self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)


class _Watched(LazyAwaitable[Any]):
    """A module's output, the wait for which is none of this rank's compute."""

    def __init__(self, inner: Awaitable[Any], stopwatch: Stopwatch):
        super().__init__()
        self._inner, self._stopwatch = inner, stopwatch

    def _wait_impl(self) -> Any:
        with self._stopwatch.waiting():
            rows = self._inner.wait()
        self._stopwatch.follow(rows)
        return rows


def _between(began: Moment, ended: Moment) -> float:
    if isinstance(began, float) or isinstance(ended, float):
        assert isinstance(began, float)
        assert isinstance(ended, float)
        return ended - began
    return began.elapsed_time(ended) / 1e3
