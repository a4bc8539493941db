"""The Triton kernels of the index work give what ``index.py`` gives, and a training with them is equal bit for bit.

Without a GPU the kernels run in Triton's interpreter, in a process of their own.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.embedding.test_prioritized import _compare, case
from tests.models.interpreter import run_interpreted

CASES = ((1, 1, 2, True), (3, 2, 3, True), (4, 1, 3, False), (2, 2, 0, True))  # ranks, features, longest, permuted

KERNELS = f"""
from tests.embedding.index_cases import check
for seed, case in enumerate({CASES!r}):
    check(*case[:3], seed, case[3])
"""

STAMPS = """
from tests.embedding import index_cases
from lightning_freescale.embedding import fused_index
fused_index.LAST_STAMP = 4  # stamps start again after a few batches
index_cases.check(2, 1, 3, 7, True, steps=7)
"""

TRAINING = """
from tests.embedding.test_fused_index import train_with_kernels
from tests.ranks import run_ranks
for result in run_ranks(train_with_kernels, 2, args=(2,), timeout=240):
    assert result == [True, True, True, False], result
"""


def train_with_kernels(rank: int, world: int) -> list[bool]:
    """Whether prioritized and synchronous training agree in every bit: in three cases, and with stamps that are never written."""
    from lightning_freescale.embedding.collisions import make_fused_indices

    dist.init_process_group("gloo")

    def use_kernels(schedule, write: bool = True) -> None:  # type: ignore[no-untyped-def]
        for module in schedule.modules:
            finder = module.exchange.finder
            finder.fused = make_fused_indices(module.exchange.tables, dist.group.WORLD)
            for index in finder.fused if not write else []:
                index._stamp_of = lambda keys: 77  # type: ignore[method-assign]
                index._write = lambda keys: None  # type: ignore[method-assign]

    cases = [
        case(world, steps=4, kind=kind, optimizer="rowwise_adagrad", seed=seed, sabotage=use_kernels)
        for seed, kind in enumerate(("row_wise", "mixed"))
    ]
    dedup = {"sabotage": use_kernels, "options": {"use_index_dedup": True}}
    from lightning_freescale.embedding.distinct_ids import add_cpu_kernel

    add_cpu_kernel()
    cases.append(case(world, steps=4, kind="row_wise", optimizer="sgd", samples=lambda r, s: 1 + 2 * r, **dedup))
    stale = case(world, steps=4, kind="row_wise", optimizer="sgd", seed=2)
    cases.append(stale | {"sabotage": lambda schedule: use_kernels(schedule, write=False)})
    return [_compare(rank, world, **one) for one in cases]


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(KERNELS)


def test_stamps_that_start_again() -> None:
    run_interpreted(STAMPS)


def test_training_with_the_kernels_in_the_interpreter() -> None:
    run_interpreted(TRAINING)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, (64, 2, 2, True), (16, 3, 40, False)])
def test_kernels_on_a_gpu(case: tuple[int, int, int, bool]) -> None:
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("the kernels are interpreted")
    from tests.embedding.index_cases import check

    world, features, longest, permuted = case
    check(world, features, longest, 3, permuted, device=str(torch.device("cuda")))
