"""Gradients that a backward writes where DDP sums them train as gradients that DDP copies, bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_freescale.embedding.batched_copies import BATCHES_COPIES, FIRST_BACKWARDS
from lightning_freescale.runtime import gradient_places
from lightning_freescale.runtime.gradient_places import backward_of_training_step, free_places, remember_places
from tests import toy
from tests.embedding.test_batched_copies import CASES, STEPS, Net, batched, copies, inputs, once
from tests.ranks import run_ranks

written = 0  # gradients
factor = 1.0  # of the gradients that are written, for the negative control


class _Scale(torch.autograd.Function):
    """``x * weight``. The gradient of the weight is written to its place, if that is free."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        global written
        gradient = (grads[0] * ctx.saved_tensors[0]).sum(0)
        places = free_places([ctx.weight])
        if places is not None:
            written += 1
            torch._foreach_copy_(places, [factor * gradient])
            gradient = places[0].view_as(places[0])
        return grads[0] * ctx.weight, gradient


class Scaled(Net):
    """``second`` is used once, and ``first`` twice in one backward."""

    def forward(self, x: Tensor, everything: bool = True) -> Tensor:
        hidden = self.norm(self.shared(self.convolution(x).flatten(1)))
        output = self.narrow(hidden.bfloat16()).float()
        output = _Scale.apply(torch.tanh(_Scale.apply(_Scale.apply(output, self.first), self.second)), self.first)
        return (self.sometimes(output) if everything else output).square().mean()


def train(case: str, places: bool, hooks: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(0)
    backward, options = CASES[case]
    net = Scaled()
    ddp = batched(net, **options)
    optimizer, seen = torch.optim.AdamW(net.parameters(), lr=0.05), []
    if hooks:
        net.second.register_hook(lambda gradient: gradient * 2)
        net.second.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    for step in range(STEPS):
        optimizer.zero_grad()
        with backward_of_training_step(accumulates=places):
            backward(ddp, step)
        seen.append(torch.cat([p.grad.flatten().float() for p in net.parameters() if p.grad is not None]))
        optimizer.step()
    return {f"seen {index}": value for index, value in enumerate(seen)} | net.state_dict()


def compare(rank: int, world: int) -> None:
    global written, factor
    dist.init_process_group("gloo")
    for case in list(CASES)[: None if world == 2 else 2]:  # further ranks change only the rounding of the division
        for hooks in (False, True):
            expected = train(case, places=False, hooks=hooks)
            assert written == 0
            assert toy.same(train(case, places=True, hooks=hooks), expected), (case, hooks)
            assert written > 0, case
            written = 0
    factor = 2.0
    assert not toy.same(train("one backward", places=True), train("one backward", places=False))  # it can fail


@pytest.mark.parametrize("world", [2, 3])
def test_the_same_bits(world: int) -> None:
    run_ranks(compare, world, (world,), timeout=200)


def count(rank: int) -> list[int]:
    """How many gradients DDP copies, without and with places."""
    dist.init_process_group("gloo")
    found = []
    for places in (False, True):
        ddp = batched(Scaled(), **{"batched_grad_copy": False} if BATCHES_COPIES else {})
        with backward_of_training_step(accumulates=places):
            once(ddp, 0)
            found.append(copies(ddp)["single"])
    return found


def test_ddp_does_not_copy_what_is_in_its_place() -> None:
    number = len(list(Scaled().parameters()))
    assert run_ranks(count) == [[number, number - 1]] * 2  # DDP copies the sum of the two gradients of ``first``


def twice(rank: int) -> tuple[int, bool]:
    """How many gradients of a parameter that is used twice are written, and whether the sum is wrong without the guard."""
    global written
    dist.init_process_group("gloo")
    written = 0
    expected = train("one backward", places=True)
    found, real = written, torch._C._current_graph_task_id
    numbers = iter(range(10**6))
    torch._C._current_graph_task_id = lambda: next(numbers)  # every call seems to be in another backward
    wrong = train("one backward", places=True)
    torch._C._current_graph_task_id = real
    return found, not toy.same(expected, wrong)


def test_a_parameter_that_is_used_twice_has_one_gradient_in_its_place() -> None:
    # The places are known after the first backward. ``first`` is the first parameter: it has a hook until all are learnt.
    second, first = STEPS - 1, STEPS - FIRST_BACKWARDS
    assert run_ranks(twice) == [(second + first, True)] * 2


def keep_gradients(rank: int) -> None:
    """A gradient of ``torch.autograd.grad`` stays as it is, though a later backward writes the places."""
    dist.init_process_group("gloo")
    ddp = batched(Scaled())
    for step in range(STEPS):
        ddp.zero_grad()
        loss = ddp(inputs(step))
        (kept,) = torch.autograd.grad(loss, ddp.module.second, retain_graph=True)
        before = kept.clone()
        with backward_of_training_step():
            (3 * loss).backward()
        assert torch.equal(kept, before)
        assert not torch.equal(ddp.module.second.grad, before)


def test_gradients_outside_a_training_step_are_not_places() -> None:
    run_ranks(keep_gradients)


def with_places(*parameters: nn.Parameter) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    remember_places(parameters)


def first_places() -> tuple[list[nn.Parameter], Callable[[], list[Tensor] | None]]:
    parameters = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    with_places(*parameters)
    places = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None

    def find() -> list[Tensor] | None:
        with torch.no_grad(), backward_of_training_step():
            found = free_places(parameters)
        assert found is None or all(one is other for one, other in zip(found, places, strict=True))
        return found

    return parameters, find


def test_places_are_free_in_a_backward_of_a_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, find = first_places()
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 7)
    assert find() is not None
    assert find() is None  # written in this backward
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 8)
    assert find() is not None
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 9)
    with torch.no_grad():
        assert free_places(parameters) is None  # not in a training step
    with backward_of_training_step():
        assert free_places(parameters) is None  # with a graph of the gradients
    parameters[1].grad = torch.zeros(3)
    assert find() is None  # to be accumulated
    parameters[1].grad = None
    assert find() is not None


def test_a_parameter_without_a_place() -> None:
    parameters, _ = first_places()
    with torch.no_grad(), backward_of_training_step():
        assert free_places([*parameters, nn.Parameter(torch.zeros(2))]) is None


def test_a_parameter_that_needs_no_gradient() -> None:
    parameters, find = first_places()
    parameters[0].requires_grad_(False)
    assert find() is None
    parameters[0].requires_grad_(True)
    assert find() is not None


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameter_with_hooks(register: str) -> None:
    parameters, find = first_places()
    handle = getattr(parameters[1], register)(lambda value: None)
    assert find() is None
    handle.remove()
    assert find() is not None


def keep_in_hooks(rank: int) -> None:
    """Hooks may keep the gradient of this rank. DDP must not write the sum over all ranks into it."""
    dist.init_process_group("gloo")
    ddp, kept, copied = batched(Scaled()), [], []

    def keep(gradient: Tensor) -> None:
        kept.append(gradient)
        copied.append(gradient.clone())

    ddp.module.second.register_hook(keep)
    for step in range(STEPS):
        ddp.zero_grad()
        with backward_of_training_step():
            once(ddp, step)
    assert len(kept) == STEPS
    assert all(torch.equal(one, other) for one, other in zip(kept, copied, strict=True))
    assert not torch.equal(kept[-1], ddp.module.second.grad)


def test_gradients_that_hooks_keep_are_not_places() -> None:
    run_ranks(keep_in_hooks)


def test_places_do_not_outlive_their_parameters() -> None:
    parameters, _ = first_places()
    numbers = {id(parameter) for parameter in parameters}
    assert numbers <= gradient_places._places.keys()
    del parameters, _
    gc.collect()
    assert numbers.isdisjoint(gradient_places._places)
