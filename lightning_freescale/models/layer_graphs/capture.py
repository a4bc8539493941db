"""Captures of kernels as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from lightning_freescale.runtime.log import log_once


class Captured(NamedTuple):
    """A CUDA graph and the arrays that it writes."""

    graph: Any
    results: Any


class Recorder:
    """Captures kernels beside a training.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.failed = device, False
        self._pool: Any = None  # memory of the arrays that live within a graph
        self._stream: Any = None
        self._first: Captured | None = None  # see _open()

    def capture(self, run: Callable[[], Any]) -> Captured | None:
        """The graph of the kernels that ``run`` starts. If it cannot be captured, no graphs are used from now on."""
        if self.failed:
            return None
        try:
            if self._pool is None:
                self._open()
            return self._capture(run)
        except RuntimeError as error:
            self.failed = True
            log_once(f"HSTU: the layers run without CUDA graphs, because a capture failed: {error}")
            # PyTorch's random numbers stay in the state of a capture that failed, until another one has succeeded.
            some = torch.empty(1, device=self._device)
            with suppress(RuntimeError):
                self._capture(some.zero_)
            return None

    def _open(self) -> None:
        """Make the pool, and a graph that stays: PyTorch refuses to capture in a pool whose last graph is gone."""
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
        self._first = self._capture(torch.empty(1, device=self._device).zero_)

    def _capture(self, run: Callable[[], Any]) -> Captured:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # what is freed meanwhile could call the driver
        try:
            with torch.cuda.stream(self._stream):
                # Calls of this and other threads that are not part of the capture do not disturb it.
                graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
                try:
                    results = run()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return Captured(graph, results)
