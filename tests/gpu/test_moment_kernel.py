"""Our update of Adam and LAMB on a CPU is that of FBGEMM on CUDA, and the state moves between the two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from lightning_freescale.embedding.moment_kernel import MomentKernel
from lightning_freescale.embedding.table_optimizer import (
    MOMENT_OPTIMIZERS,
    TABLE_OPTIMIZERS,
    count_training_lookups_only,
    set_count,
)

ROWS, DIM, STEPS = 200, 16, 6
OPTIONS = {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.01}
Kernel = SplitTableBatchedEmbeddingBagsCodegen


def on_cpu(optimizer: EmbOptimType, pooling: PoolingMode) -> Kernel:
    spec = (ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)
    return MomentKernel(
        [spec], feature_table_map=[0, 0], pooling_mode=pooling, optimizer=optimizer, device="cpu", **OPTIONS
    )


def on_cuda(optimizer: EmbOptimType, pooling: PoolingMode) -> Kernel:
    spec = (ROWS, DIM, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    return Kernel([spec], feature_table_map=[0, 0], pooling_mode=pooling, optimizer=optimizer, device="cuda", **OPTIONS)


def take_over(kernel: Kernel, other: Kernel) -> None:
    """What a checkpoint does: weights, state by name, and the count of steps."""
    kernel.split_embedding_weights()[0].copy_(other.split_embedding_weights()[0])
    mine, theirs = kernel.get_optimizer_state()[0], other.get_optimizer_state()[0]
    assert list(mine) == list(theirs)
    for name, state in mine.items():
        assert state.shape == theirs[name].shape
        state.copy_(theirs[name])
    set_count([kernel], int(other.iter_cpu))


def train(kernel: Kernel, steps: range) -> None:
    device = kernel.split_embedding_weights()[0].device
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        lengths = torch.randint(0, 9, (16,), generator=generator)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        output = kernel(ids.to(device), offsets.to(device))
        output.backward(torch.randn(output.shape, generator=generator).to(device))


def error(one: Kernel, other: Kernel) -> float:
    """Largest difference of weights and state, relative to their size."""
    found = 0.0
    states = (kernel.get_optimizer_state()[0].values() for kernel in (one, other))
    for a, b in [(one.split_embedding_weights()[0], other.split_embedding_weights()[0]), *zip(*states, strict=True)]:
        found = max(found, float((a.cpu() - b.cpu()).abs().max() / b.abs().max().cpu()))
    return found


def check(make: Callable[[EmbOptimType, PoolingMode], Kernel], name: str, pooling: PoolingMode) -> tuple[float, float]:
    """The error after a training that moves to a CPU and back in its middle, and the error if the first moments are lost."""
    optimizer = TABLE_OPTIMIZERS[name]
    whole, begun, moved, back, lost = (factory(optimizer, pooling) for factory in (make, make, on_cpu, make, on_cpu))
    torch.manual_seed(0)
    whole.split_embedding_weights()[0].normal_()
    take_over(begun, whole)
    train(whole, range(3 * STEPS))
    train(begun, range(STEPS))
    take_over(moved, begun)
    take_over(lost, begun)
    train(moved, range(STEPS, 2 * STEPS))
    take_over(back, moved)
    train(back, range(2 * STEPS, 3 * STEPS))
    lost.get_optimizer_state()[0]["exp_avg"].zero_()
    train(lost, range(STEPS, 3 * STEPS))
    return error(back, whole), error(lost, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", [PoolingMode.NONE, PoolingMode.SUM, PoolingMode.MEAN], ids=str)
@pytest.mark.parametrize("name", MOMENT_OPTIMIZERS)
def test_state_moves_between_cpu_and_cuda(name: str, pooling: PoolingMode) -> None:
    right, wrong = check(on_cuda, name, pooling)
    assert right < 1e-4
    assert wrong > 1e-3  # the comparison can fail


@pytest.mark.gpu
def test_only_training_lookups_count() -> None:
    kernel = on_cuda(EmbOptimType.ADAM, PoolingMode.SUM)
    count_training_lookups_only(kernel)
    with torch.no_grad():
        kernel(torch.zeros(1, dtype=torch.int64).cuda(), torch.tensor([0, 1, 1]).cuda())
    assert int(kernel.iter_cpu) == int(kernel.iter) == 0
    train(kernel, range(STEPS))
    assert int(kernel.iter_cpu) == int(kernel.iter) == STEPS
