"""The kernels of the loss against its PyTorch operations: in Triton's interpreter, and compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_freescale.models.loss import sampled_softmax
from lightning_freescale.models.norm import unit_rows
from tests.models.interpreter import run_interpreted

CASES = (  # lengths, K, D, whether the draw is corrected, sets of each sample
    ([70, 1, 0, 33, 2], 5, 40, False, None),
    ([70, 1, 0, 33, 2], 5, 40, True, None),
    ([200, 3], 4, 16, True, [3, 1]),
    ([40], 1, 8, False, None),
)


def loss_inputs(
    lengths: list[int], negatives: int, dim: int, correct: bool, sets: list[int] | None
) -> tuple[list[Tensor], list[Tensor | int | None]]:
    """Outputs, items and negatives; and the other arguments of ``sampled_softmax``. Many negatives equal a target."""
    rng = torch.Generator().manual_seed(0)
    counts = negatives * torch.tensor(sets or [1] * len(lengths))
    total, drawn = sum(lengths), int(counts.sum())
    learned = [torch.randn(size, dim, generator=rng) for size in (total, total, drawn)]
    rest: list[Tensor | int | None] = [
        torch.randint(6, (total,), generator=rng),
        torch.randint(9, (drawn,), generator=rng),
        torch.tensor([0, *lengths]).cumsum(0),
        torch.randn(9, generator=rng) if correct else None,
        *((counts, negatives) if sets else (None, None)),
    ]
    return learned, rest


def run_loss(
    learned: list[Tensor], rest: list[Tensor | int | None], unit: Callable[..., Tensor] | None = None
) -> list[Tensor]:
    """The loss, and the gradients of outputs, items and negatives. ``unit`` scales their rows to length 1 before.

    Then the outputs have some rows more than there are positions, as those of HSTU on CUDA have.
    """
    leaves = [x.detach().requires_grad_() for x in learned]
    if unit is not None:
        leaves[0] = torch.nn.functional.pad(learned[0], (0, 0, 0, 3), value=1.0).requires_grad_()
    outputs, items, negatives = (
        leaves if unit is None else (unit(x, len(y)) for x, y in zip(leaves, learned, strict=True))
    )
    item_ids, negative_ids, *others = rest
    options = outputs, items, item_ids, negatives, negative_ids, *others
    loss = sampled_softmax(*options, temperature=0.3) * 0.7  # type: ignore[arg-type]
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def largest_error(got: list[Tensor], want: list[Tensor]) -> float:
    """Largest ``|got - want| / |want|``."""
    return max(float((x.cpu().double() - y).norm() / y.norm().clamp(min=1e-9)) for x, y in zip(got, want, strict=True))


SCRIPT = """
from lightning_freescale.models import loss, loss_triton, norm_triton
from lightning_freescale.models.norm import unit_rows
from tests.models.test_loss_triton import CASES, largest_error, loss_inputs, run_loss

for case in CASES:
    inputs = loss_inputs(*case)
    want = run_loss(*inputs)
    loss_triton.SEGMENT = 2  # a set has several segments, the last one is not full
    plain, loss._loss_and_gradients = loss._loss_and_gradients, loss_triton.loss_and_gradients
    assert largest_error(run_loss(*inputs), want) < 1e-5, case
    inputs[0][2][0] += 0.1  # negative control: one negative
    assert largest_error(run_loss(*inputs), want) > 1e-3, case
    loss._loss_and_gradients = plain

    # Rows of length 1: the gradient of what they were made of is computed in one pass.
    want = run_loss(*inputs, unit_rows)
    own, loss._origin = loss._origin, norm_triton.origin_of
    passes, backward = [], norm_triton.unit_rows_backward
    norm_triton.unit_rows_backward = lambda *a, **k: passes.append(k["factor"]) or backward(*a, **k)
    assert largest_error(run_loss(*inputs, norm_triton.unit_rows), want) < 1e-5, case
    assert len(passes) == 3, passes
    norm_triton.unit_rows_backward = lambda *a, factor: backward(*a)  # negative control: without the factor
    assert largest_error(run_loss(*inputs, norm_triton.unit_rows), want) > 1e-1, case
    norm_triton.unit_rows_backward, loss._origin = backward, own

unit = norm_triton.unit_rows(inputs[0][0])
assert norm_triton.origin_of(unit) is inputs[0][0]
assert norm_triton.origin_of(unit.mul_(2)) is None  # changed
assert norm_triton.origin_of(unit[:1]) is None  # another tensor
"""


def test_interpreted_kernels_equal_the_operations() -> None:
    run_interpreted(SCRIPT)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*CASES, ([3000, 0, 700, 1], 128, 512, True, None), ([900, 40], 100, 64, False, [7, 2])]
)
def test_compiled_kernels_equal_the_operations_in_float64(case: tuple) -> None:
    learned, rest = loss_inputs(*case)
    want = run_loss(
        [x.double() for x in learned], [x.double() if i == 3 and x is not None else x for i, x in enumerate(rest)]
    )
    on_cuda = [x.cuda() if isinstance(x, Tensor) else x for x in rest]
    got = run_loss([x.cuda() for x in learned], on_cuda)
    assert largest_error(got, want) < 1e-5
    again = run_loss([x.cuda() for x in learned], on_cuda)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))  # every sum has a fixed order


@pytest.mark.gpu
def test_compiled_kernels_with_rows_of_length_1_equal_the_operations() -> None:
    learned, rest = loss_inputs([3000, 0, 700, 1], 128, 512, True, None)
    want = run_loss(learned, rest, unit_rows)
    on_cuda = [x.cuda() for x in learned], [x.cuda() if isinstance(x, Tensor) else x for x in rest]
    got, again = run_loss(*on_cuda, unit_rows), run_loss(*on_cuda, unit_rows)
    assert largest_error(got, [x.double() for x in want]) < 1e-5
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
