"""When CUDA graphs end, and on which streams they are captured. No GPU is needed: CUDA is replaced by objects that are counted.

Torch frees memory that all graphs of a stream use when one of them ends (pytorch issue 193402).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch

from lightning_freescale.models.layer_graphs import capture
from lightning_freescale.models.layer_graphs.capture import Captured, GraphSet, Recorder

DEVICE = torch.device("meta")
STREAMS = 3  # that torch hands out in turn


class Graph:
    """Counts the graphs that have been captured and have not ended, by stream."""

    living: ClassVar[weakref.WeakSet[Graph]] = weakref.WeakSet()
    current: ClassVar[Any] = None  # the stream that is selected

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.pool, self.stream = pool, Graph.current.cuda_stream

    def capture_end(self) -> None:
        Graph.living.add(self)


class Stream:
    numbers: ClassVar[Iterator[int]]

    def __init__(self, device: torch.device):
        self.cuda_stream = next(Stream.numbers) % STREAMS


def select(stream: Stream) -> Any:
    Graph.current = stream
    return nullcontext()


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stand_in in {"CUDAGraph": Graph, "Stream": Stream, "stream": select}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(capture, "_owned", set())
    capture._idle[DEVICE].clear()
    Stream.numbers = itertools.count()


def captured(recorder: Recorder, result: str) -> Captured:
    found = recorder.capture(lambda: result)
    assert found is not None
    assert found.results == result
    return found


def test_graphs_of_a_stream_end_together() -> None:
    recorder = Recorder(DEVICE)
    graphs = [captured(recorder, name) for name in "abc"]
    assert len({graph.graph.stream for graph in graphs}) == len({graph.graph.pool for graph in graphs}) == 1
    ends = [weakref.ref(graph.graph) for graph in graphs]
    del graphs[:2]
    assert None not in [end() for end in ends]  # the third one may still run
    recorder.renew()
    assert None not in [end() for end in ends]
    graphs.clear()
    assert [end() for end in ends] == [None] * 3
    assert not Graph.living


def test_graphs_end_with_their_model() -> None:
    recorder = Recorder(DEVICE)
    captured(recorder, "a")
    assert len(Graph.living) == 2  # and the one that keeps the pool
    del recorder
    assert not Graph.living


def test_no_two_sets_share_a_stream() -> None:
    recorders = [Recorder(DEVICE) for _ in range(STREAMS)]
    streams = [captured(recorder, "a").graph.stream for recorder in recorders]
    assert sorted(streams) == list(range(STREAMS))
    late = Recorder(DEVICE)
    assert late.capture(lambda: "no stream is left") is None
    assert late.failed
    del recorders[1]  # its stream is used again
    assert captured(Recorder(DEVICE), "b").graph.stream == streams[1]


def test_a_capture_that_fails_ends_no_graph() -> None:
    recorder = Recorder(DEVICE)
    kept = captured(recorder, "a")

    def fail() -> None:
        raise RuntimeError("out of memory")

    assert recorder.capture(fail) is None
    assert recorder.failed
    assert kept.graph in Graph.living
    assert recorder.capture(lambda: "no graphs any more") is None


def test_without_the_set_a_graph_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(GraphSet, "keep", lambda self, graph, results: Captured(graph, results))
    recorder = Recorder(DEVICE)
    kept, other = captured(recorder, "a"), captured(recorder, "b")
    end = weakref.ref(other.graph)
    del other
    assert end() is None
    assert kept.graph.stream == 0
