"""The update of rows in one kernel is that of FBGEMM's look-up and backward, within 1e-6 (interpreter) and 1e-5 (CUDA)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_freescale.embedding.grouped_update import GROUPED_OPTIMIZER, GroupedGradients, GroupedUpdate
from lightning_freescale.embedding.row_update import update_by_look_up
from lightning_freescale.embedding.schedule import ExchangeSchedule
from tests.embedding.comparison import case, compare
from tests.embedding.test_row_update import ROWS, Kernel, close, make, train, updates
from tests.embedding.training import SHARDINGS
from tests.models.interpreter import run_interpreted
from tests.ranks import run_ranks

RANKS = 3
FIRST_ROW = torch.tensor([0, 0, ROWS])  # of the table of each feature

# A CPU has FBGEMM's update, to which the interpreted kernel is compared.
SCRIPT = """
import torch
from lightning_freescale.embedding import grouped_update
from lightning_freescale.embedding.adagrad_triton import update_rows
from lightning_freescale.embedding.row_update import update_by_look_up
from tests.embedding import test_grouped_update as test
from tests.embedding.test_row_update import make, train

def grouped(kernel, shift=0):
    weights, (sums,) = kernel.weights_host.detach(), [kernel.momentum1_host]
    group = grouped_update.GroupedUpdate(kernel).group
    def update(keys, places, received, step):
        rate, eps = kernel.get_learning_rate(), kernel.optimizer_args.eps
        update_rows(*group(keys, places), received, weights, sums, test.RANKS + shift, rate, eps)
    return test.by_wire(update)

kernel = make("rowwise_adagrad", "cpu")
found = train(kernel, grouped(kernel), "cpu")
other = make("rowwise_adagrad", "cpu")
want = train(other, test.divided(lambda *given: update_by_look_up(other, *given)), "cpu")
assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(found, want, strict=True)), "differs from FBGEMM"

# Negative control: gradients that are divided by another number of ranks.
kernel = make("rowwise_adagrad", "cpu")
found = train(kernel, grouped(kernel, shift=1), "cpu")
assert not all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(found, want, strict=True))

# Rows with many gradients: the kernels read them in blocks and spans. The width is no power of two.
for counts in ([0, 1], [3, 15, 1], [16, 0, 16], [17, 64], [1, 64, 63], [64, 65], [129, 2, 70, 1], [5, 2000, 3], [60, 4, 64, 64]):
    total = sum(counts)
    keys, places = torch.arange(5)[: len(counts)].repeat_interleave(torch.tensor(counts)), torch.randperm(total)
    gradients, weights, sums = torch.randn(total, 12), torch.randn(60), torch.rand(5)
    before, squares = weights.clone().view(5, 12), sums.clone()
    update_rows(keys, places, gradients, weights, sums, 1, 0.1, 1e-8)
    for row in keys.unique().tolist():
        mean = gradients[places[keys == row]].double().sum(0).float()
        squares[row] += mean.square().mean()
        before[row] -= 0.1 / (squares[row].sqrt() + 1e-8) * mean
    assert torch.allclose(weights.view(5, 12), before, rtol=1e-5, atol=1e-6)
    assert torch.allclose(sums, squares, rtol=1e-5)
"""


def divided(update: Callable[..., None]) -> Callable[..., None]:
    """``update`` with gradients that are divided by the number of ranks."""
    return lambda ids, offsets, gradient, step: update(ids, offsets, gradient / RANKS, step)


def by_wire(update: Callable[..., None]) -> Callable[..., None]:
    """Calls ``update`` with the numbers of rows, their places in some wire order, and the gradients in this order."""

    def run(ids: Tensor, offsets: Tensor, gradient: Tensor, step: int) -> None:
        by_feature = offsets[:: (len(offsets) - 1) // len(FIRST_ROW)].diff()
        keys = ids.long() + FIRST_ROW.to(ids.device).repeat_interleave(by_feature)
        places = torch.randperm(len(ids), generator=torch.Generator().manual_seed(step)).to(ids.device)
        received = torch.empty_like(gradient)
        received[places] = gradient
        update(keys, places, received, step)

    return run


def test_interpreted_kernel_updates_as_fbgemm() -> None:
    run_interpreted(SCRIPT)


@pytest.mark.gpu
def test_as_the_backward_of_a_look_up() -> None:
    kernel, other = make("rowwise_adagrad", "cuda"), make("rowwise_adagrad", "cuda")
    update = GroupedUpdate(kernel)
    assert update.is_possible()
    found = train(
        kernel, by_wire(lambda keys, places, received, _: update(update.group(keys, places), received, RANKS)), "cuda"
    )
    want = train(other, divided(lambda *given: update_by_look_up(other, *given)), "cuda")
    assert close(found, want, "cuda")
    kernel = make("rowwise_adagrad", "cuda")
    update = GroupedUpdate(kernel)
    found = train(  # negative control: the gradients of other rows
        kernel,
        by_wire(lambda keys, places, received, _: update(update.group(keys, places.flip(0)), received, RANKS)),
        "cuda",
    )
    assert not close(found, want, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["adam", "sgd", "adagrad", "rowwise_adagrad, L2", "rowwise_adagrad, half"])
def test_other_tables_are_left_to_fbgemm_on_cuda(case: str) -> None:
    assert not GroupedUpdate(make(case, "cuda")).is_possible()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("rowwise_adagrad", "memory of the GPU"),
        ("sgd", "the optimizer is"),
        ("rowwise_adagrad, L2", "weights decay"),
    ],
)
def test_other_tables_are_left_to_fbgemm(case: str, reason: str) -> None:
    update = GroupedUpdate(make(case, "cpu"))
    assert not update.is_possible()
    found = update._reason_against()
    assert found is not None
    assert reason in found


def test_deterministic_algorithms_leave_the_update_to_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    update = GroupedUpdate(make("rowwise_adagrad", "cpu"))
    monkeypatch.setattr(update, "_reason_against", lambda: None)
    assert update.is_possible()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not update.is_possible()


def test_gradients_of_a_row_are_side_by_side_in_their_order() -> None:
    ids, offsets, _ = next(iter(updates("cpu")))
    assert len(offsets) > 1
    wire = torch.randperm(len(ids))
    keys, places = GroupedUpdate(make("rowwise_adagrad", "cpu")).group(ids, wire)
    assert torch.equal(keys, ids.sort().values)
    lookup = wire.argsort()[places]  # the place in lookup order of each gradient
    assert torch.equal(ids[lookup], keys)
    same = keys[1:] == keys[:-1]
    assert bool(same.any())
    assert bool((lookup[1:] > lookup[:-1])[same].all())


def test_options_that_are_replaced_are_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: Kernel = make("rowwise_adagrad", "cpu")
    update, checks = GroupedUpdate(kernel), list[bool]()
    monkeypatch.setattr(update, "_reason_against", lambda: checks.append(True))
    assert update.is_possible()
    assert update.is_possible()
    kernel.update_hyper_parameters({"eps": 0.01})
    assert update.is_possible()
    assert len(checks) == 2


# ---- in the exchange, on a CPU: FBGEMM's update takes the place of the kernel ------------------------------------------
class ByFbgemm(GroupedUpdate):
    """Updates rows by FBGEMM, from gradients that were grouped. It adds those of a row in their order, so all bits are equal."""

    used = 0

    def is_possible(self) -> bool:
        return self._kernel.optimizer == GROUPED_OPTIMIZER

    def __call__(self, grouped: GroupedGradients, received: Tensor, divisor: int) -> None:
        type(self).used += 1
        kernel, (keys, places) = self._kernel, grouped
        rows = torch.tensor([0, *(spec[0] for spec in kernel.embedding_specs)]).cumsum(0)
        bounds = torch.searchsorted(keys, rows)
        tables = kernel.feature_table_map
        # All ids of a table are those of its first feature.
        counts = [
            int(bounds[table + 1] - bounds[table]) if tables.index(table) == feature else 0
            for feature, table in enumerate(tables)
        ]
        ids = keys - rows[torch.searchsorted(rows, keys, right=True) - 1]
        offsets = torch.tensor([0, *counts]).cumsum(0)
        step = int(kernel.iter_cpu)
        update_by_look_up(kernel, ids, offsets, received[places].float() / divisor, step)


def group(schedule: ExchangeSchedule) -> None:
    tables = schedule.modules[0].exchange.tables
    tables._grouped_updates = [update and ByFbgemm(update._kernel) for update in tables._grouped_updates]


def group_without_order(schedule: ExchangeSchedule) -> None:
    group(schedule)
    for update in filter(None, schedule.modules[0].exchange.tables._grouped_updates):
        in_order = update.group
        update.group = lambda keys, places, in_order=in_order: in_order(keys, places.roll(1))  # type: ignore[method-assign]


def compare_grouped(rank: int, world: int, cases: list[dict]) -> tuple[list[bool], int]:
    ByFbgemm.used = 0
    return compare(rank, world, cases), ByFbgemm.used


def test_an_exchange_that_groups_gradients_gives_the_same_bits() -> None:
    world = 3
    shapes = [lambda rank, step: 4, lambda rank, step: 0 if (rank + step) % 3 == 0 else 1 + 3 * rank]
    cases = [
        case(world, kind=kind, optimizer="rowwise_adagrad", sabotage=group, samples=shape, seed=seed, steps=5 + seed)
        for seed, shape in enumerate(shapes)
        for kind in SHARDINGS
    ]
    for equal, used in run_ranks(compare_grouped, world, args=(world, cases)):
        assert equal == [True] * len(cases)
        assert used > 5 * len(cases)


def test_the_exchange_notices_gradients_of_other_rows() -> None:
    cases = [case(2, kind="mixed", optimizer="rowwise_adagrad", sabotage=group_without_order)]
    assert not all(equal[0] for equal, _ in run_ranks(compare_grouped, 2, args=(2, cases)))
