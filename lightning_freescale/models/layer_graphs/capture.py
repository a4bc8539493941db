"""Captures of kernels as CUDA graphs."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from lightning_freescale.runtime.log import log_once

POOL_STREAMS = 32  # torch hands out this many streams of a device in turn
_owned: set[int] = set()  # handles of the streams on which this module captures, now or again later
_idle: defaultdict[torch.device, list[Any]] = defaultdict(list)  # those that no set of graphs uses


class Captured(NamedTuple):
    """A CUDA graph, the arrays that it writes, and the graphs that are destroyed together with it."""

    graph: Any
    results: Any
    graph_set: Any = None


class GraphSet:
    """Graphs that are captured on one stream, in one pool of memory. They are destroyed together, when none is needed any more.

    Matrix products of a graph use memory that cuBLAS has for the stream of the capture. Since torch 2.12, the end of a graph
    frees that memory, though other graphs that were captured on the stream may still run (pytorch issue 193402). So no graph may
    end before the others, and no other set of graphs is captured on the same stream.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.stream = device, _take_stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self._graphs: list[Any] = []

    def keep(self, graph: Any, results: Any) -> Captured:
        """``graph`` lives as long as anything refers to one of the graphs of this set."""
        self._graphs.append(graph)
        return Captured(graph, results, self)

    def __del__(self, idle: defaultdict[torch.device, list[Any]] = _idle) -> None:
        if hasattr(self, "_graphs"):
            self._graphs.clear()  # before another set of graphs can get the stream
            idle[self._device].append(self.stream)


def _take_stream(device: torch.device) -> Any:
    """A stream on which no other set of graphs is captured."""
    if _idle[device]:
        return _idle[device].pop()
    for _ in range(POOL_STREAMS):
        stream = torch.cuda.Stream(device)
        if stream.cuda_stream not in _owned:
            _owned.add(stream.cuda_stream)
            return stream
    raise RuntimeError(f"the graphs of other models use all {POOL_STREAMS} streams of {device}")


class Recorder:
    """Captures kernels beside a training.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.failed = device, False
        self._graph_set: GraphSet | None = None

    def renew(self) -> None:
        """Call it when no later batch uses the graphs so far. New graphs do not keep them alive."""
        self._graph_set = None

    def capture(self, run: Callable[[], Any]) -> Captured | None:
        """The graph of the kernels that ``run`` starts. If it cannot be captured, no graphs are used from now on."""
        if self.failed:
            return None
        try:
            if self._graph_set is None:
                self._graph_set = GraphSet(self._device)
                # PyTorch refuses to capture in a pool that has no graph left. This one stays.
                self._capture(torch.empty(1, device=self._device).zero_, self._graph_set)
            return self._capture(run, self._graph_set)
        except RuntimeError as error:
            self.failed = True
            log_once(f"HSTU: the layers run without CUDA graphs, because a capture failed: {error}")
            # PyTorch's random numbers stay in the state of a capture that failed, until another one has succeeded.
            some = torch.empty(1, device=self._device)
            if self._graph_set is not None:
                with suppress(RuntimeError):
                    self._capture(some.zero_, self._graph_set)
            return None

    @staticmethod
    def _capture(run: Callable[[], Any], graph_set: GraphSet) -> Captured:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # what is freed meanwhile could call the driver
        try:
            with torch.cuda.stream(graph_set.stream):
                # Calls of this and other threads that are not part of the capture do not disturb it.
                graph.capture_begin(pool=graph_set.pool, capture_error_mode="relaxed")
                try:
                    results = run()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph_set.keep(graph, results)
