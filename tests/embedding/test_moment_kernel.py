"""The update of rows by Adam and LAMB on a CPU, beside PyTorch's optimizers and its own sums of gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torch import Tensor, nn
from torchrec.distributed import batched_embedding_kernel

from lightning_freescale import _C
from lightning_freescale.embedding.moment_kernel import MomentKernel, moment_kernels
from lightning_freescale.embedding.table_optimizer import MOMENT_OPTIMIZERS
from lightning_freescale.runtime.errors import ConfigurationError
from tests.gpu.test_moment_kernel import check, on_cpu

ROWS, DIM, RATE, STEPS = 20, 4, 0.1, 5
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def make(
    pooling: PoolingMode = PoolingMode.SUM, optimizer: EmbOptimType = EmbOptimType.ADAM, **options: Any
) -> MomentKernel:
    """A kernel of two tables. The first has two features."""
    spec = (ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)
    kernel = MomentKernel(
        [spec, spec],
        feature_table_map=[0, 0, 1],
        pooling_mode=pooling,
        optimizer=optimizer,
        learning_rate=RATE,
        **options,
    )
    torch.manual_seed(0)
    for weight in kernel.split_embedding_weights():
        weight.copy_(torch.randn(ROWS, DIM))
    return kernel


def lookups(seed: int, samples: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, offsets and weights of three features. Some bags are empty, some rows occur twice."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (3 * samples,), generator=generator)
    ids = torch.randint(0, ROWS // 2, (int(lengths.sum()),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return ids, offsets, torch.rand(len(ids), generator=generator) + 0.5


def by_torch(tables: list[nn.Parameter], pooling: PoolingMode, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """The same look-up with PyTorch's own operations, ``[B, 3 * D]`` or ``[n, D]``."""
    samples, parts = (len(offsets) - 1) // 3, []
    for feature, table in enumerate([tables[0], tables[0], tables[1]]):
        bounds = offsets[feature * samples : (feature + 1) * samples + 1].tolist()
        bags = []
        for begin, end in itertools.pairwise(bounds):
            rows = table[ids[begin:end]] * weights[begin:end, None]
            total = rows.sum(0) / max(end - begin, 1) if pooling == PoolingMode.MEAN else rows.sum(0)
            bags.append(rows if pooling == PoolingMode.NONE else total[None])
        parts.append(torch.cat(bags))
    return torch.cat(parts, dim=0 if pooling == PoolingMode.NONE else 1)


@pytest.mark.parametrize("pooling", [PoolingMode.NONE, PoolingMode.SUM, PoolingMode.MEAN], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_as_torchs_adam_over_the_rows_with_a_gradient(pooling: PoolingMode, weighted: bool) -> None:
    if weighted and pooling == PoolingMode.NONE:
        return  # sequences have no weights
    kernel = make(pooling)
    tables = [nn.Parameter(weight.clone()) for weight in kernel.split_embedding_weights()]
    first = [torch.zeros(ROWS, DIM, dtype=torch.float64) for _ in tables]
    second = [torch.zeros(ROWS, DIM, dtype=torch.float64) for _ in tables]
    for step in range(1, STEPS + 1):
        ids, offsets, weights = lookups(step)
        theirs = weights.clone().requires_grad_()
        mine = weights.clone().requires_grad_() if weighted else None
        output = kernel(ids, offsets, mine)
        expected = by_torch(tables, pooling, ids, offsets, theirs if weighted else torch.ones_like(weights))
        torch.testing.assert_close(output, expected, **CLOSE)
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(step))
        output.backward(direction)
        expected.backward(direction)
        if mine is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, **CLOSE)
        for table, m, v in zip(tables, first, second, strict=True):
            assert table.grad is not None
            g = table.grad.double()
            touched = g.abs().sum(1) > 0
            m[touched] = 0.9 * m[touched] + 0.1 * g[touched]
            v[touched] = 0.999 * v[touched] + 0.001 * g[touched] ** 2
            move = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
            table.data[touched] -= (RATE * move[touched]).float()
            table.grad = None
    for weight, table in zip(kernel.split_embedding_weights(), tables, strict=True):
        torch.testing.assert_close(weight, table.detach(), rtol=1e-4, atol=1e-5)
        assert torch.equal(weight[ROWS // 2 :], table[ROWS // 2 :])  # rows that no batch has used


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SparseAdam])
def test_as_an_optimizer_of_torch(optimizer: Any) -> None:
    """All rows of the table have a gradient in every step, so plain Adam updates the same rows."""
    kernel = make(PoolingMode.NONE)
    table = nn.Embedding.from_pretrained(
        kernel.split_embedding_weights()[1].clone(), freeze=False, sparse=optimizer is torch.optim.SparseAdam
    )
    reference = optimizer(table.parameters(), lr=RATE)
    ids, offsets = torch.arange(ROWS), torch.tensor([0, 0, 0, ROWS])
    for step in range(STEPS):
        direction = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(step))
        kernel(ids, offsets).backward(direction)
        table(ids).backward(direction)
        reference.step()
        reference.zero_grad()
    torch.testing.assert_close(kernel.split_embedding_weights()[1], table.weight.detach(), **CLOSE)
    exp_avg = reference.state[table.weight]["exp_avg"]
    torch.testing.assert_close(kernel.get_optimizer_state()[1]["exp_avg"], exp_avg, **CLOSE)


def test_a_lookup_without_a_gradient_changes_nothing_and_does_not_count() -> None:
    kernel = make()
    before = [weight.clone() for weight in kernel.split_embedding_weights()]
    with torch.no_grad():
        kernel(*lookups(0)[:2])
    assert int(kernel.iter_cpu) == int(kernel.iter) == 0
    assert all(torch.equal(a, b) for a, b in zip(before, kernel.split_embedding_weights(), strict=True))


def test_gradients_are_clipped_before_they_are_summed() -> None:
    ids, offsets = torch.tensor([3, 3]), torch.tensor([0, 2, 2, 2])
    kernel = make(PoolingMode.NONE, gradient_clipping=True, max_gradient=0.5)
    kernel(ids, offsets).backward(torch.tensor([[9.0, 0.1, -9.0, 0.0], [0.1, 0.1, 0.1, 0.0]]))
    moment = kernel.get_optimizer_state()[0]["exp_avg"]
    torch.testing.assert_close(moment[3], 0.1 * torch.tensor([0.6, 0.2, -0.4, 0.0]), **CLOSE)


def test_half_precision_tables_are_rounded_once_a_step() -> None:
    kernel, exact = make(weights_precision=SparseType.FP16), make()
    ids, offsets, _ = lookups(1)
    for one in (kernel, exact):
        one.split_embedding_weights()[0].copy_(make().split_embedding_weights()[0].half())
        one(ids, offsets).square().sum().backward()
    half, full = (one.split_embedding_weights()[0] for one in (kernel, exact))
    assert half.dtype == torch.float16
    assert torch.equal(half, full.half())


@pytest.mark.parametrize("name", MOMENT_OPTIMIZERS)
def test_state_moves_to_another_kernel(name: str) -> None:
    """The check of ``tests/gpu``, with our kernel on both sides: then the difference is exactly zero."""
    right, without_moments = check(on_cpu, name, PoolingMode.SUM)
    assert right == 0
    assert without_moments > 1e-3


def test_what_it_cannot_train_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="a batch size that varies by feature"):
        make()(*lookups(0)[:2], batch_size_per_feature_per_rank=[[3], [3], [3]])


def test_other_optimizers_stay_fbgemms() -> None:
    kernel = make(optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    kernel(*lookups(0)[:2]).sum().backward()
    assert list(kernel.get_optimizer_state()[0]) == ["sum"]


def test_torchrec_gets_its_kernel_back() -> None:
    theirs = batched_embedding_kernel.SplitTableBatchedEmbeddingBagsCodegen
    with moment_kernels(torch.device("cpu")):
        assert batched_embedding_kernel.SplitTableBatchedEmbeddingBagsCodegen is MomentKernel
    assert batched_embedding_kernel.SplitTableBatchedEmbeddingBagsCodegen is theirs


@pytest.mark.parametrize("change", [{"rows": [9]}, {"source": [-1]}, {"order": [1]}, {"source": [5]}], ids=str)
def test_the_core_refuses_what_lies_outside_of_its_arrays(change: dict[str, list[int]]) -> None:
    index = {name: torch.tensor(change.get(name, [0])).numpy() for name in ("source", "rows", "order")}
    table = [torch.zeros(2, DIM).numpy() for _ in range(3)]
    names = ("rate", "beta1", "beta2", "eps", "weight_decay")
    with pytest.raises(ValueError, match="update_moments"):
        _C.update_moments(
            torch.zeros(8).numpy(),
            index["source"],
            None,
            index["rows"],
            index["order"],
            *table,
            **dict.fromkeys(names, 0.5),
            step=1,
            lamb=False,
        )
