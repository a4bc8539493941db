"""The memory and the turns of CUDA graphs, which need no GPU.

:data:`SCRIPT` runs the layers in Triton's interpreter. There a graph is the function that was captured, which runs again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_freescale.models import HSTU
from lightning_freescale.models.layer_graphs.arena import Arena, load
from lightning_freescale.models.layer_graphs.registry import graphs_of
from lightning_freescale.models.layer_graphs.turn import Turn
from lightning_freescale.runtime.errors import FreeScaleError
from tests.models.interpreter import run_interpreted

SCRIPT = """
import gc, torch, weakref
from lightning_freescale.models import elementwise_triton, norm_triton
from tests.models.test_fused_layer import make_batch, make_layers, run_layers

elementwise_triton.COLUMNS, elementwise_triton.SUM_PROGRAMS, norm_triton.PROGRAMS = 32, 3, 2
from lightning_freescale.models.attention import cuda
from lightning_freescale.models.fused_layer import postpone_gradients
from lightning_freescale.models.layer_graphs import layer, model
from lightning_freescale.models.layer_graphs.arena import Arena
from lightning_freescale.models.layer_graphs.capture import Captured

class Again:
    def __init__(self, run):
        self.run = run
        with torch.no_grad():
            self.results = run()

    def replay(self):
        with torch.no_grad():
            for place, value in zip(tensors(self.results), tensors(self.run()), strict=True):
                place.copy_(value)  # a graph writes to the same memory each time

def tensors(found):
    if isinstance(found, torch.Tensor):
        return [found]
    return [x for part in found if part is not None for x in tensors(part)]

def capture(self, run):
    again = Again(run)
    return Captured(again, again.results)

def has_room(self, key):
    if key.rows > self._arena.rows:
        self._arena = Arena(2 * key.rows, self._device)
    return True

attend = cuda.forward
def forward(*arguments):
    *inputs, out = arguments
    found = attend(*inputs)
    return found if out is None else out.view(found.shape).copy_(found)

cuda.forward = forward
model.LayerGraphs.capture, model.LayerGraphs._has_room = capture, has_room
torch.cuda.is_current_stream_capturing = lambda: False

def prepare(layers, plan, graphs=True):
    if graphs:
        plan.graphs = model.begin_batch(layers, plan, torch.float32, True)
    if plan.graphs is not None:
        maps = [(x.f1.weight, x.f1.bias, x.f2.weight) for x in layers]
        rounded = plan.graphs.rounded(maps, torch.float32) or []
        for weight, place in zip([x for part in maps for x in part], rounded):
            place.copy_(weight.detach())
            plan.rounded[id(weight), torch.float32] = place
    postpone_gradients(layers[0], plan)

def train(graphs):
    layers, found = make_layers(True, count=2), []
    for step in range(3):
        batch["x"], batch["keys"] = x + step, keys + step
        found.append(run_layers(layers, batch, True, lambda *given: prepare(*given, graphs)))
        with torch.no_grad():
            for name, parameter in layers.named_parameters():
                parameter -= 1e-2 * found[-1][name].sign()
    return layers, found

def differing(got, want):
    return [(step, name) for step in range(3) for name in want[step] if not torch.equal(got[step][name], want[step][name])]

batch = make_batch([5, 0, 12, 1])
x, keys = batch["x"], batch["keys"]
_, want = train(False)
layers, got = train(True)
graphs = model.graphs_of[layers[0]]
assert graphs.used == 2, graphs.used
(shape,) = graphs._shapes.values()
assert all(part.parameters is not None for part in shape.layers)
assert differing(got, want) == []

# A rate of dropout that changes is used: the graphs are captured again.
one = model.graphs_of[layers[0]]
for part in layers:
    part.dropout.rate = 0.1
again = run_layers(layers, batch, True, prepare)
plain = run_layers(layers, batch, True, lambda *given: prepare(*given, False))
assert one.used == 3 and not one._shapes
assert all(torch.equal(again[name], plain[name]) for name in plain)

# Batches that need no gradients of the parameters run in graphs, too.
def input_gradient(graphs):
    rows = batch["x"].detach().requires_grad_()
    plan, out = cuda.CudaPlan(batch["offsets"], batch["timestamps"], True), rows
    prepare(layers, plan, graphs)
    for part in layers:
        out = part._fused(out, plan, batch["keys"])
    return torch.autograd.grad(out.total(), rows, batch["dout"])[0]

found = [input_gradient(graphs) for graphs in (True, True, False)]
(shape,) = one._shapes.values()
assert one.used == 4 and shape.layers[0].parameters is None and shape.layers[1].parameters is not None
assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])

# Where the gradients of the parameters are in no graph, the next batch does not write to those of the batch before.
third = run_layers(layers, batch, True, prepare)
values = {name: value.clone() for name, value in third.items() if name != "out"}
batch["x"] = x + 7
run_layers(layers, batch, True, prepare)
assert one.used == 6 and shape.layers[0].parameters is None
assert all(torch.equal(third[name], value) for name, value in values.items())

# Negative control: graphs that read the rows and keys of the batch before.
layer.load = lambda place, value: None
assert differing(train(True)[1], want) != []

# Graphs that nothing needs are freed at once, without a garbage collection.
gc.disable()
owner = model.LayerGraphs(layers, torch.device("cpu"))
shape, turn = owner.begin(model.ShapeKey(18, 5, torch.float32, False))
gone = [weakref.ref(owner), weakref.ref(shape), weakref.ref(shape.layers[0])]
kept = shape.layers[0]
assert turn is None
del owner
assert shape.owner is None
del shape, kept
assert [ref() for ref in gone] == [None, None, None]
"""


def test_interpreted_layers_in_graphs_compute_the_same_bits() -> None:
    run_interpreted(SCRIPT)


def test_arrays_of_one_name_share_memory() -> None:
    arena = Arena(10, torch.device("cpu"))
    large, small = arena.take("x", 10, 4, torch.float32), arena.take("x", 3, 4, torch.float32)
    assert small.shape == (3, 4)
    assert small.is_contiguous()
    assert small.data_ptr() == large.data_ptr()
    assert arena.take("y", 3, 4, torch.float32).data_ptr() != large.data_ptr()
    more = arena.take("sums", 50, 2, torch.float32)  # not an array of rows
    assert more.shape == (50, 2)


def test_rows_that_are_in_their_place_are_not_copied() -> None:
    place = torch.zeros(2, 2)
    load(place, torch.ones(2, 2))
    assert place.eq(1).all()
    version = place._version
    load(place, place.detach())
    load(place, None)
    assert place._version == version


def test_a_model_that_moves_has_no_graphs_any_more() -> None:
    moved, other = HSTU(10, embedding_dim=8), HSTU(10, embedding_dim=8)
    for model in (moved, other):
        graphs_of[model.layers[0]] = object()
    moved.double()
    assert moved.layers[0] not in graphs_of
    assert other.layers[0] in graphs_of
    other.load_state_dict(other.state_dict())  # a resume writes to the same addresses
    assert other.layers[0] in graphs_of


class Owner:
    """What a turn asks the graphs of its model for."""

    def __init__(self) -> None:
        self.turn: Any = None

    def current(self) -> Any:
        return self.turn


def test_a_turn_is_over_after_the_backward_of_all_layers() -> None:
    owner, keys = Owner(), torch.zeros(3, dtype=torch.int32)
    turn = owner.turn = Turn(owner, keys)  # type: ignore[arg-type]
    assert not turn.is_over()  # it has not begun
    turn.began = True
    turn.pending |= {0, 1}
    turn.check()
    turn.pending.discard(1)
    assert not turn.is_over()
    turn.pending.discard(0)
    assert turn.is_over()
    turn.load_keys(torch.tensor([1, 2, 3], dtype=torch.int32))
    turn.load_keys(torch.tensor([4, 5, 6], dtype=torch.int32))  # those of another layer are the same
    assert keys.tolist() == [1, 2, 3]
    owner.turn = Turn(owner, None)  # type: ignore[arg-type]
    with pytest.raises(FreeScaleError, match="cuda_graphs=False"):
        turn.check()
