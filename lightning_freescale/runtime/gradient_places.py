"""Where DDP sums the gradients of parameters, for code that computes gradients itself.

DDP copies each gradient into a bucket, by a kernel for every parameter before release 2.12 of torch. With
``gradient_as_bucket_view``, ``parameter.grad`` is a part of the bucket afterwards. A backward that writes a gradient to this
place, and returns the place, saves the copy: DDP sees that the gradient is in the bucket already.

A place can be written in the backward of a training step alone. Elsewhere, for example in ``torch.autograd.grad``, the caller may
keep a gradient, and a later backward would change it. For the same reason the place of a parameter with hooks is not written: a
hook may keep the gradient of this rank, and DDP would replace it by the sum over all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class _Place:
    """The place of one parameter.

    Args:
        parameter: the parameter. It is not kept alive, and its place is forgotten with it.
        memory: the part of the bucket.
    """

    def __init__(self, parameter: Tensor, memory: Tensor):
        number = id(parameter)
        self.parameter, self.memory = weakref.ref(parameter, lambda _: _places.pop(number, None)), memory
        self.backward: int | None = None  # the last backward that wrote it


_places: dict[int, _Place] = {}  # by the id of the parameter
_in_training_step = False


@contextmanager
def backward_of_training_step(accumulates: bool = True) -> Iterator[None]:
    """Places are written inside the ``with`` block.

    Args:
        accumulates: whether the block does nothing but to accumulate gradients into ``grad``. Otherwise no place is written.
    """
    global _in_training_step
    before, _in_training_step = _in_training_step, accumulates
    try:
        yield
    finally:
        _in_training_step = before


def remember_places(parameters: Iterable[Tensor]) -> None:
    """The gradients of ``parameters`` are parts of buckets now. Call it when DDP has summed them."""
    for parameter in parameters:
        if parameter.grad is not None:
            _places[id(parameter)] = _Place(parameter, parameter.grad)


def free_places(parameters: Sequence[Tensor]) -> list[Tensor] | None:
    """The places of ``parameters``, to be written now.

    ``None`` if one of the parameters has no place, has hooks, has a gradient already, or needs none.
    """
    if not _in_training_step or torch.is_grad_enabled():  # with a graph of the gradients, DDP needs a copy
        return None
    backward, found = torch._C._current_graph_task_id(), []
    for parameter in parameters:
        place = _places.get(id(parameter))
        # A parameter that is used twice has two gradients in one backward. Autograd adds them after the second one.
        if place is None or place.parameter() is not parameter or place.backward == backward:
            return None
        if parameter.grad is not None or not parameter.requires_grad or place.memory.device != parameter.device:
            return None
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return None
        found.append(place)
    for place in found:
        place.backward = backward
    return [place.memory for place in found]
