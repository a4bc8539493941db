"""The graphs of all layers of a model, and which batches use them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_freescale.models.attention import cuda
from lightning_freescale.models.layer_graphs.arena import Arena
from lightning_freescale.models.layer_graphs.capture import Captured, Recorder
from lightning_freescale.models.layer_graphs.layer import Before, LayerGraph
from lightning_freescale.models.layer_graphs.registry import graphs_of
from lightning_freescale.models.layer_graphs.turn import Turn
from lightning_freescale.models.layer_passes import LayerBatch, LayerShape, LayerWeights
from lightning_freescale.models.norm_triton import Drop
from lightning_freescale.runtime.log import log_once

SLACK = 1.25  # rows for which memory is allocated, relative to the first batch that needs more
MAX_UNUSED = 32  # shapes that were captured and have not come again; with more of them, nothing is captured
MAX_SHAPES = 256  # shapes that have graphs; each takes some megabytes
MAX_TRIES = 3  # captures of a shape whose backward was not captured
MEMORY_SHARE = 0.5  # of the free memory that graphs may take


class ShapeKey(NamedTuple):
    """What all launches of a batch depend on, beside the addresses of the parameters."""

    rows: int
    offsets: int  # histories and one
    dtype: torch.dtype
    drops: bool


class ShapeGraphs:
    """The graphs of all layers for one shape.

    Args:
        owner: the graphs of the model.
        keys: where the graphs read the keys of dropout, if anything is dropped.
    """

    def __init__(self, owner: LayerGraphs, keys: Tensor | None) -> None:
        self._owner, self.used = weakref.ref(owner), 0
        self.layers = [LayerGraph(self, number) for number in range(owner.count)]
        self.places: dict[Any, Tensor] = {}  # arrays of the plan of the attention
        self._keys = keys
        self._turn: weakref.ref[Turn] | None = None

    @property
    def owner(self) -> LayerGraphs | None:
        """The graphs of the model; ``None`` if the model is gone."""
        return self._owner()

    def is_complete(self) -> bool:
        """Whether all passes have been captured."""
        return all(layer.is_complete() for layer in self.layers)

    def begin(self) -> Turn:
        """Begin a batch that runs in the graphs."""
        owner = self.owner
        assert owner is not None
        turn = Turn(owner, self._keys)
        self._turn = weakref.ref(turn)
        self.used += 1
        return turn

    def turn(self) -> Turn:
        """The batch that runs."""
        turn = None if self._turn is None else self._turn()
        assert turn is not None
        turn.began = True
        return turn

    def arranged(self, batch: LayerBatch) -> LayerBatch:
        """``batch`` with the keys of dropout where the graphs read them."""
        if batch.drop is None:
            return batch
        assert self._keys is not None
        return batch._replace(drop=batch.drop._replace(keys=self._keys))


class BatchGraphs:
    """The graphs that one batch uses.

    Args:
        graphs: those of its shape.
        turn: if the batch runs in them. Otherwise they are captured.
        layers: the layers of the model.
    """

    def __init__(self, graphs: ShapeGraphs, turn: Turn | None, layers: Sequence[Any]) -> None:
        self._graphs, self._turn = graphs, turn
        self._left = {id(layer.f1.weight): graph for layer, graph in zip(layers, graphs.layers, strict=True)}

    @property
    def places(self) -> dict[Any, Tensor]:
        """Arrays of the plan of the attention."""
        return self._graphs.places

    def take(
        self, weight: Tensor, before: Before, weights: LayerWeights, shape: LayerShape, drop: Drop | None
    ) -> LayerGraph | None:
        """The graphs of the layer with this ``weight`` of its first linear map. A layer that runs again gets none.

        Args:
            before: the input of the layer.
            weights: its parameters, the linear maps where the graphs read them if the batch runs in graphs.
            shape: its settings.
            drop: its dropout.
        """
        graph = self._left.pop(id(weight), None)
        if graph is None or self._turn is None or graph.fits(before, weights, shape, drop):
            return graph
        owner = self._graphs.owner
        assert owner is not None
        owner.reset("a parameter has moved or a setting has changed")
        return None

    def place(self) -> Tensor | None:
        """Where the first layer reads its input, if the batch runs in the graphs."""
        return None if self._turn is None else self._graphs.layers[0].input_place()

    def rounded(self, maps: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor] | None:
        """Where the graphs read the linear maps of all layers, if the batch runs in them. ``maps`` are the parameters."""
        if self._turn is None:
            return None
        owner = self._graphs.owner
        assert owner is not None
        return [x for number, weights in enumerate(maps) for x in owner.rounded(number, weights, dtype)]


class LayerGraphs:
    """The graphs of the layers of one model.

    Args:
        layers: the layers of the model, see :class:`~.hstu_layer.HSTULayer`.
        device: the GPU.
    """

    def __init__(self, layers: Sequence[Any], device: torch.device) -> None:
        self.count, self._device = len(layers), device
        self._width = sum(layers[0].split), layers[0].split[0], layers[0].f1.weight.shape[1]
        self._shapes: dict[ShapeKey, ShapeGraphs] = {}
        self._tries: dict[ShapeKey, int] = {}  # captures of a shape
        self._arena = Arena(0, device)
        self._weights: dict[Any, Tensor] = {}  # weights of the linear maps as another type
        self._current: weakref.ref[Turn] | None = None
        self._off, self.used = False, 0  # number of batches that ran in graphs
        self._recorder = Recorder(device)

    # Which batches use graphs.

    def is_busy(self) -> bool:
        """Whether a batch runs in the graphs, so that no other one can."""
        current = self.current()
        return current is not None and not current.is_over()

    def begin(self, key: ShapeKey) -> tuple[ShapeGraphs, Turn | None] | None:
        """The graphs of a batch, and its turn if it runs in them. Without a turn they are captured; or there are none.

        Args:
            key: the shape of the batch.
        """
        if self._off or self._recorder.failed or torch.cuda.is_current_stream_capturing() or self.is_busy():
            return None
        graphs = self._shapes.get(key)
        if graphs is not None and graphs.is_complete():
            turn = graphs.begin()
            self.used += 1
            self._current = weakref.ref(turn)
            return graphs, turn
        unused = sum(not found.used for found in self._shapes.values())
        if unused >= MAX_UNUSED or len(self._shapes) >= MAX_SHAPES:
            log_once(
                f"HSTU: batches of further shapes run without CUDA graphs. {len(self._shapes)} shapes have graphs, "
                f"and {unused} of these shapes have not come again"
            )
            return None
        if not self._has_room(key):
            return None
        self._tries[key] = self._tries.get(key, 0) + 1
        if self._tries[key] > MAX_TRIES:
            log_once("HSTU: batches run without CUDA graphs if the backward of batches of their shape was not run")
            return None
        keys = torch.empty(key.rows, dtype=torch.int32, device=self._device) if key.drops else None
        self._shapes[key] = graphs = ShapeGraphs(self, keys)
        return graphs, None

    def current(self) -> Turn | None:
        """The last batch that ran in a graph, while something refers to it."""
        return None if self._current is None else self._current()

    def reset(self, why: str) -> None:
        """Drop all graphs. They are captured again."""
        log_once(f"HSTU: the CUDA graphs of the layers are captured again, because {why}")
        self._shapes, self._tries, self._weights = {}, {}, {}
        self._arena = Arena(self._arena.rows, self._device)
        self._recorder.renew()

    def _has_room(self, key: ShapeKey) -> bool:
        """Whether there is memory for this shape. If the arena is too small, it is replaced and all graphs are dropped."""
        if key.rows <= self._arena.rows:
            return True
        rows = int(key.rows * SLACK)
        columns, gates, width = self._width
        # Bytes of a row: the total; normed and branch, projected and active, attended and gated.
        kept = 4 * width + 2 * (2 * width + 2 * columns + gates)
        needed = rows * (self.count * kept + 2 * (3 * width + columns))
        free = torch.cuda.mem_get_info(self._device)[0]
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        if needed > MEMORY_SHARE * free:
            self._off = True
            log_once(
                f"HSTU: the layers run without CUDA graphs, because these would take {needed / 2**30:.1f} GiB, "
                f"more than {MEMORY_SHARE:.0%} of the {free / 2**30:.1f} GiB that are free"
            )
            return False
        log_once("HSTU: the layers run as CUDA graphs; HSTU(cuda_graphs=False) runs them without")
        self._shapes, self._tries, self._arena = {}, {}, Arena(rows, self._device)
        self._recorder.renew()
        return True

    # Memory and capture.

    def take(self, name: Any, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Arena.take`."""
        return self._arena.take(name, rows, width, dtype)

    def rounded(self, number: int, weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Where the graphs of layer ``number`` read its linear maps, of which ``weights`` are the parameters."""
        places = []
        for name, weight in enumerate(weights):
            key = number, name, dtype
            if key not in self._weights:
                self._weights[key] = torch.empty(weight.shape, dtype=dtype, device=weight.device)
            places.append(self._weights[key])
        return places

    def fixed(self, weights: LayerWeights, number: int) -> LayerWeights:
        """``weights`` with the linear maps where the graphs read them."""
        w1, b1, w2 = self.rounded(number, (weights.w1, weights.b1, weights.w2), weights.w1.dtype)
        return weights._replace(w1=w1, b1=b1, w2=w2)

    def capture(self, run: Callable[[], Any]) -> Captured | None:
        """See :meth:`Recorder.capture`."""
        return self._recorder.capture(run)


def begin_batch(layers: Sequence[Any], plan: cuda.CudaPlan, dtype: torch.dtype, drops: bool) -> BatchGraphs | None:
    """See :meth:`LayerGraphs.begin`. The graphs live until the layers move to another device or are deleted.

    Args:
        layers: all layers of a model.
        plan: the plan of the attention of a batch.
        dtype: type of the arrays between the products, which is not that of the parameters.
        drops: whether anything is dropped.
    """
    first = layers[0]
    if first not in graphs_of:
        graphs_of[first] = LayerGraphs(layers, plan.offsets.device)
    key = ShapeKey(len(plan.timestamps), len(plan.offsets), dtype, drops)
    owner: LayerGraphs = graphs_of[first]
    found = owner.begin(key) if key.rows else None
    return None if found is None else BatchGraphs(*found, layers)
