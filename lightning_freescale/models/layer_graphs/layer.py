"""The graphs of one layer."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_freescale.models.layer_graphs.arena import load
from lightning_freescale.models.layer_graphs.capture import Captured
from lightning_freescale.models.layer_graphs.turn import STALE, Turn
from lightning_freescale.models.layer_passes import (
    KeptRows,
    LayerBatch,
    LayerGradients,
    LayerShape,
    LayerWeights,
    backward_pass,
    forward_pass,
    parameter_gradients,
    share_shape,
)
from lightning_freescale.models.norm_triton import Drop
from lightning_freescale.runtime.errors import FreeScaleError
from lightning_freescale.runtime.gradient_places import free_places

if TYPE_CHECKING:
    from lightning_freescale.models.layer_graphs.model import LayerGraphs, ShapeGraphs

Before = tuple[Tensor, Tensor | None, Tensor | None]  # summands of the input of a layer


class LayerGraph:
    """The graphs of one layer for one shape.

    Args:
        shape_graphs: those of all layers for this shape.
        number: number of the layer, from 0.
    """

    def __init__(self, shape_graphs: ShapeGraphs, number: int) -> None:
        # The plan of a batch keeps the graphs of its shape. Here a strong reference would keep their memory in a cycle.
        self._of_shape, self._number = weakref.ref(shape_graphs), number
        self.forward: Captured | None = None
        self.backward: Captured | None = None
        self.parameters: Captured | None = None
        # Tensors with the shapes of the gradients of the parameters, without memory.
        self._like: list[Tensor | None] = []
        self._gradients: list[Tensor] = []  # parts of the results of ``parameters``
        self._addresses: list[int | None] = []
        self._settings: tuple[Any, ...] = ()
        self._inputs: list[Tensor] = []
        self._dbranch: Tensor | None = None

    @property
    def _all(self) -> ShapeGraphs:
        found = self._of_shape()
        assert found is not None
        return found

    def _owner(self) -> LayerGraphs | None:
        """The graphs of the model; ``None`` if nothing needs graphs of this layer any more."""
        found = self._of_shape()
        return None if found is None else found.owner

    def is_complete(self) -> bool:
        """Whether both passes have been captured."""
        return self.forward is not None and self.backward is not None

    def runs(self) -> bool:
        """Whether a batch runs in the graphs. Otherwise they are captured."""
        return self._all.used > 0

    def fits(self, before: Before, weights: LayerWeights, shape: LayerShape, drop: Drop | None) -> bool:
        """Whether a batch with this input, these parameters and these settings can run in the graphs."""
        x, branch, shift = before
        same = (branch is not None) == (len(self._inputs) == 2) and x.dtype == self._inputs[0].dtype
        same = same and x.shape == self._inputs[0].shape and _settings(shape, drop) == self._settings
        return same and _addresses(shift, weights) == self._addresses

    def input_place(self) -> Tensor:
        """Where the forward pass reads its input."""
        return self._inputs[0]

    def place(self) -> Tensor | None:
        """Where the backward pass reads the gradient of the branch, if the batch runs in the graphs."""
        return self._dbranch if self.runs() else None

    def capture_forward(self, before: Before, weights: LayerWeights, shape: LayerShape, batch: LayerBatch) -> None:
        """Capture the forward pass. Nothing is computed."""
        x, branch, shift = before
        (rows, width), columns, i = x.shape, weights.w1.shape[0], self._number
        gates, own = shape.split[0], self._owner()
        assert own is not None
        widths = {"normed": width, "projected": columns, "active": columns - gates, "attended": gates, "gated": gates}
        places = {name: own.take((name, i), rows, size, shape.dtype) for name, size in widths.items()}
        places["branch"] = own.take(("branch", i), rows, width, shape.dtype)
        places["total"] = own.take(("total", i), rows, width, x.dtype)
        self._inputs = [places["total"]]
        if branch is not None:  # the layer before writes them
            total = own.take(("total", i - 1), rows, width, x.dtype)
            self._inputs = [total, own.take(("branch", i - 1), rows, width, branch.dtype)]
        inputs: Before = (self._inputs[0], None if branch is None else self._inputs[1], shift)
        fixed, arranged = own.fixed(weights, i), self._all.arranged(batch)
        self._addresses, self._settings = _addresses(shift, fixed), _settings(shape, batch.drop)
        self.forward = own.capture(lambda: forward_pass(inputs, fixed, shape, arranged, places))

    def run_forward(self, x: Tensor, branch: Tensor | None, drop: Drop | None) -> tuple[Turn, Tensor, Tensor]:
        """The sum of the input and the branch. They stay as they are until the next batch runs in a graph."""
        assert self.forward is not None
        turn = self._all.turn()
        for place, value in zip(self._inputs, (x, branch), strict=False):
            load(place, value)
        if drop is not None:
            turn.load_keys(drop.keys)
        self.forward.graph.replay()
        turn.pending.add(self._number)
        kept, out = self.forward.results
        return turn, kept.total.detach(), out.detach()

    def check_captured(self) -> None:
        """Raise an error if a batch has run in the graphs since they were captured: it has overwritten the plan."""
        if self._all.used:
            raise FreeScaleError(STALE)

    def capture_backward(self, weights: LayerWeights, shape: LayerShape, batch: LayerBatch) -> None:
        """Capture the backward pass, if the forward pass was captured. Nothing is computed."""
        own, i = self._owner(), self._number
        if own is None or self.forward is None or self.backward is not None:
            return
        kept: KeptRows = self.forward.results[0]
        (rows, width), columns = kept.total.shape, kept.projected.shape[1]
        places = {
            "dnormed": own.take("dnormed", rows, width, shape.dtype),
            "dprojected": own.take("dprojected", rows, columns, shape.dtype),
            "shares": own.take("shares", *share_shape(shape, columns, width), torch.float32),
        }
        self._dbranch = dbranch = own.take(("dbranch", i % 2), rows, width, shape.dtype)
        fixed, arranged = own.fixed(weights, i), self._all.arranged(batch)
        self.backward = own.capture(lambda: backward_pass(kept, fixed, shape, arranged, dbranch, places))

    def capture_parameters(self, shape: LayerShape) -> None:
        """Capture the gradients of the parameters, if the backward pass was captured. Nothing is computed."""
        own, dbranch = self._owner(), self._dbranch
        if (
            own is None
            or self.forward is None
            or self.backward is None
            or dbranch is None
            or self.parameters is not None
        ):
            return
        found, kept = self.backward.results, self.forward.results[0]
        self.parameters = own.capture(lambda: self._join(parameter_gradients(found, kept, dbranch, shape)))
        if self.parameters is not None:
            self._gradients = self._parts(self.parameters.results)

    def _join(self, grads: Sequence[Tensor | None]) -> Tensor:
        if len(self._inputs) == 1:  # The input is no sum, so there is no shift.
            grads = [*grads[:-1], None]
        self._like = [None if x is None else torch.empty_like(x, device="meta") for x in grads]
        return torch.cat([x.flatten() for x in grads if x is not None])

    def run_backward(self, turn: Turn, dbranch: Tensor) -> tuple[KeptRows, LayerGradients, Tensor, Tensor | None]:
        """What the layer kept, its gradients, that of its branch, and where the layer before reads the gradient of its branch.

        The gradients stay until the backward of the layer before.
        """
        assert self.forward is not None
        assert self.backward is not None
        assert self._dbranch is not None
        turn.check()
        load(self._dbranch, dbranch)
        self.backward.graph.replay()
        turn.pending.discard(self._number)
        place = self._all.layers[self._number - 1].place() if self._number else None
        return self.forward.results[0], self.backward.results, self._dbranch, place

    def _parts(self, joined: Tensor) -> list[Tensor]:
        # This is one call. A split and the views would be eleven calls, in the backward of every layer.
        return torch._C._nn.unflatten_dense_tensors(joined, [x for x in self._like if x is not None])

    def run_parameters(self, parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The results of :func:`~lightning_freescale.models.layer_passes.parameter_gradients`.

        They are where DDP sums them, or in a new array. Call it after the backward of the norm, and before the backward of
        another layer.

        Args:
            parameters: the parameter of each result.
        """
        assert self.parameters is not None
        self.parameters.graph.replay()
        places = free_places(
            [x for x, like in zip(parameters, self._like, strict=True) if x is not None and like is not None]
        )
        if places is None:
            parts = self._parts(self.parameters.results.clone())
        else:
            torch._foreach_copy_(places, self._gradients)
            parts = [x.view_as(x) for x in places]  # new tensors: autograd copies a gradient that others refer to
        found = iter(parts)
        return [None if like is None else next(found) for like in self._like]


def _addresses(shift: Tensor | None, weights: LayerWeights) -> list[int | None]:
    """The addresses of the parameters, which a graph reads."""
    return [None if x is None else x.data_ptr() for x in (shift, *weights)]


def _settings(shape: LayerShape, drop: Drop | None) -> tuple[Any, ...]:
    """The numbers that are part of a graph. A user may change them, for example the rate of dropout."""
    return shape, None if drop is None else drop.constants()
