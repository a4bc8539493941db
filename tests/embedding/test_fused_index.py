"""The fused index work gives what ``index.py`` gives: in C++, and in Triton. A training with the Triton kernels is equal, too.

``test_prioritized.py`` trains with the C++ functions. Without a GPU, the Triton kernels run in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale import _C
from lightning_freescale.embedding import fused_index
from lightning_freescale.embedding.collisions import make_fused_indices
from lightning_freescale.embedding.cpp_index import CppIndex
from lightning_freescale.embedding.distinct_ids import add_cpu_kernel
from tests.embedding.comparison import case, compare_case
from tests.embedding.index_cases import check, check_that_swapped_marks_are_noticed
from tests.models.interpreter import run_interpreted

CASES = (
    (1, 1, 2, True),
    (3, 2, 3, True),
    (2, 2, 0, True),
)  # ranks, features, longest, whether batch and request order differ

KERNELS = f"""
from lightning_freescale.embedding import fused_index
from lightning_freescale.embedding.triton_index import TritonIndex
from tests.embedding.index_cases import check, check_that_swapped_marks_are_noticed
check_that_swapped_marks_are_noticed(TritonIndex)
for seed, case in enumerate({CASES!r}):
    check(TritonIndex, *case[:3], seed, case[3])
fused_index.LAST_STAMP = 4  # stamps start again after a few batches
check(TritonIndex, 2, 1, 3, 7, False, steps=5)
"""

TRAINING = """
from tests.embedding.test_fused_index import train_with_triton
from tests.ranks import run_ranks
for result in run_ranks(train_with_triton, 2, args=(2,), timeout=240):
    assert result == [True, True, False], result
"""


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 5), st.integers(0, 1000), st.booleans())
def test_cpp(world: int, features: int, longest: int, seed: int, permuted: bool) -> None:
    check(CppIndex, world, features, longest, seed, permuted)


def test_cpp_with_swapped_marks() -> None:
    check_that_swapped_marks_are_noticed(CppIndex)


def test_stamps_that_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_index, "LAST_STAMP", 4)
    check(CppIndex, 2, 1, 3, 7, True, steps=9)


def test_wrong_sizes_are_refused() -> None:
    one = torch.tensor([0]).numpy()
    with pytest.raises(ValueError, match="offsets must fit the features and samples"):
        _C.exchange_place(one, one, torch.tensor([0, 2]).numpy(), one, one, None, 0)


def train_with_triton(rank: int, world: int) -> list[bool]:
    """Whether prioritized and synchronous training agree in every bit: in two cases, and with stamps that are never written."""
    from lightning_freescale.embedding.triton_index import TritonIndex

    dist.init_process_group("gloo")
    add_cpu_kernel()

    def use_kernels(schedule: Any, write: bool = True) -> None:
        exchange = schedule.modules[0].exchange
        assert dist.group.WORLD is not None
        exchange.finder.fused = make_fused_indices(TritonIndex, exchange.tables, dist.group.WORLD)
        for index in exchange.finder.fused if not write else []:
            index._stamp_of = lambda keys: 77
            index._write = lambda keys: None

    mixed = case(world, steps=4, kind="mixed", optimizer="rowwise_adagrad", seed=1, sabotage=use_kernels)
    dedup = case(world, steps=4, kind="row_wise", optimizer="sgd", samples=lambda r, s: 1 + 2 * r, sabotage=use_kernels)
    stale = case(world, steps=4, kind="row_wise", optimizer="sgd", seed=2)
    stale["sabotage"] = lambda schedule: use_kernels(schedule, write=False)
    cases = [mixed, dedup | {"options": {"use_index_dedup": True}}, stale]
    return [compare_case(rank, world, **one) for one in cases]


def test_triton_in_the_interpreter() -> None:
    run_interpreted(KERNELS)


def test_training_with_triton_in_the_interpreter() -> None:
    run_interpreted(TRAINING)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, (64, 2, 2, True), (16, 3, 40, False)])
def test_triton_on_a_gpu(case: tuple[int, int, int, bool]) -> None:
    from lightning_freescale.embedding.triton_index import TritonIndex

    world, features, longest, permuted = case
    check(TritonIndex, world, features, longest, 3, permuted, device="cuda")
