"""Gradients of parameters that are computed after the gradient of the embeddings."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_freescale.models.late_gradients import LateGradients, postpone


class LookUp(torch.autograd.Function):
    """Stands for the lookup of rows. Its backward notes that the gradient of the rows has arrived."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: list[str]) -> Tensor:
        ctx.order = order
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.order.append("rows")
        return grads[0], None


class Product(torch.autograd.Function):
    """``x @ weight``, whose gradient of the weight may be postponed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, order: list[str], held: list[Any] | None, ticket: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.order, ctx.held = order, held
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors

        def compute() -> tuple[Tensor]:
            ctx.order.append("weight")
            return (x.T @ grads[0],)

        if ctx.held is None:
            return grads[0] @ weight.T, *compute(), None, None, None
        ctx.held[:] = [compute]
        return grads[0] @ weight.T, None, None, None, grads[0].new_empty(0)


def train(when: str) -> tuple[list[str], Tensor, Tensor]:
    """The order of the gradients, and both of them. ``when`` the gradient of the weight is postponed, or ``"never"``."""
    torch.manual_seed(0)
    rows, weight = torch.randn(5, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    order: list[str] = []
    late: LateGradients | None = postpone([weight]) if when == "before the lookup" else None
    x = LookUp.apply(rows, order)
    late = postpone([weight]) if when == "after the lookup" else late
    ticket, held = (None, None) if late is None else late
    Product.apply(torch.tanh(x), weight, order, held, ticket).square().sum().backward()
    assert rows.grad is not None
    assert weight.grad is not None
    assert not held
    return order, rows.grad, weight.grad


def test_the_gradient_of_the_rows_comes_first_and_nothing_changes() -> None:
    (order, *got), (usual, *want) = train("before the lookup"), train("never")
    assert (order, usual) == (["rows", "weight"], ["weight", "rows"])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_node_that_is_made_after_the_lookup_is_too_late() -> None:
    order, *_ = train("after the lookup")
    assert order == ["weight", "rows"]


@pytest.mark.parametrize("passes", [1, 2])
def test_a_graph_that_is_kept_gives_the_same_gradient_in_each_pass(passes: int) -> None:
    weight = torch.ones(3, 4, requires_grad=True)
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    late = postpone([weight])
    out = functools.partial(Product.apply, x, weight, [], late.held)(late.ticket).sum()
    for number in range(passes):
        out.backward(retain_graph=number + 1 < passes)
    assert weight.grad is not None
    assert torch.equal(weight.grad, passes * (x.detach().sum(0)[:, None].expand(3, 4)))


def test_what_follows_runs_after_the_gradients_were_accumulated() -> None:
    """DDP sums the gradients in such hooks, so the sum has begun when the work that follows starts."""
    rows, weight = torch.randn(5, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    order: list[str] = []
    weight.register_post_accumulate_grad_hook(lambda _: order.append("accumulated"))
    late = postpone([weight], then=lambda: order.append("then"))
    x = LookUp.apply(rows, order)
    Product.apply(torch.tanh(x), weight, order, late.held, late.ticket).square().sum().backward()
    assert order == ["rows", "weight", "accumulated", "then"]


def test_nothing_follows_if_no_gradient_of_the_parameters_is_asked_for() -> None:
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    order: list[str] = []
    late = postpone([weight], then=lambda: order.append("then"))
    torch.autograd.grad(Product.apply(x, weight, order, late.held, late.ticket).sum(), x)
    assert order == []


def test_nothing_follows_a_backward_whose_graph_is_kept() -> None:
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    order: list[str] = []
    late = postpone([weight], then=lambda: order.append("then"))
    loss = Product.apply(x, weight, order, late.held, late.ticket).sum()
    loss.backward(retain_graph=True)
    assert order == ["weight"]
    loss.backward()
    assert order == ["weight", "weight", "then"]
