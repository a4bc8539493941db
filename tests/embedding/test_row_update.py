"""The update of rows without a look-up is that of FBGEMM's look-up and backward: bit for bit on a CPU, within 1e-5 on CUDA."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from lightning_freescale.embedding import row_update
from lightning_freescale.embedding.moment_kernel import MomentKernel
from lightning_freescale.embedding.row_update import RowUpdate, update_by_look_up
from lightning_freescale.embedding.table_optimizer import TABLE_OPTIMIZERS, WeightDecayMode
from lightning_freescale.runtime.log import _log_first_time, logger

ROWS, DIM, SAMPLES, STEPS = 30, 8, 4, 5
DECAYED = {"weight_decay": 0.01}
CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in TABLE_OPTIMIZERS},
    "sgd, clipped": {"gradient_clipping": True, "max_gradient": 0.5},
    "adam, clipped": {"gradient_clipping": True, "max_gradient": 0.5},
    "adam, decayed": DECAYED,
    "rowwise_adagrad, L2": DECAYED | {"weight_decay_mode": WeightDecayMode.L2},
    "rowwise_adagrad, decoupled": DECAYED | {"weight_decay_mode": WeightDecayMode.DECOUPLE},
    "rowwise_adagrad, half": {"weights_precision": SparseType.FP16, "stochastic_rounding": False},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Kernel = SplitTableBatchedEmbeddingBagsCodegen
Update = Callable[[Tensor, Tensor, Tensor, int], None]


def make(case: str, device: str) -> Kernel:
    """A kernel of two tables. The first has two features."""
    on = (
        (EmbeddingLocation.HOST, ComputeDevice.CPU)
        if device == "cpu"
        else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    )
    kind = MomentKernel if device == "cpu" else Kernel
    kernel = kind(
        [(ROWS, DIM, *on), (ROWS, DIM, *on)],
        feature_table_map=[0, 0, 1],
        pooling_mode=PoolingMode.NONE,
        optimizer=TABLE_OPTIMIZERS[case.split(",")[0]],
        output_dtype=SparseType.FP32,
        device=device,
        learning_rate=0.1,
        **CASES[case],
    )
    torch.manual_seed(0)
    for weight in kernel.split_embedding_weights():
        weight.copy_(torch.randn(ROWS, DIM))
    return kernel


def updates(device: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Ids, offsets and gradients of each step. Some bags are empty, and some rows occur several times."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        lengths = torch.randint(0, 6, (3 * SAMPLES,), generator=generator)
        ids = torch.randint(0, ROWS // 2, (int(lengths.sum()),), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        gradient = torch.randn(len(ids), DIM, generator=generator)
        if step == 2:  # the type of the ids depends on the batch
            ids, offsets = ids.int(), offsets.int()
        yield ids.to(device), offsets.to(device), gradient.to(device)


def train(kernel: Kernel, update: Update, device: str, late: int = 0) -> list[Tensor]:
    """Update rows with a rate that falls, and step counts that do not follow each other. Returns weights and state."""
    for number, (ids, offsets, gradient) in enumerate(updates(device)):
        kernel.set_learning_rate(0.1 / (number + 1))
        if number == 3:  # the options of the kernel are replaced
            kernel.update_hyper_parameters({"lr": 0.02, "eps": 0.01})
        update(ids, offsets, gradient, 2 * number + 1 + late)
    states = [state for states in kernel.split_optimizer_states() for state in states]
    return [tensor.detach().float().cpu() for tensor in (*kernel.split_embedding_weights(), *states)]


def by_look_up(case: str, device: str, late: int = 0) -> list[Tensor]:
    kernel = make(case, device)
    return train(kernel, lambda *arguments: update_by_look_up(kernel, *arguments), device, late)


def close(one: list[Tensor], other: list[Tensor], device: str) -> bool:
    assert len(one) == len(other)
    if device == "cpu":
        return all(map(torch.equal, one, other))
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_as_the_backward_of_a_look_up(case: str, device: str) -> None:
    kernel = make(case, device)
    update = RowUpdate(kernel)
    assert close(train(kernel, update, device), by_look_up(case, device), device)
    own = isinstance(kernel, MomentKernel) and kernel.updates_rows
    assert own or update.repeats
    assert kernel.step == (0 if own else 2)  # look-ups: the first update, and the one after the options were replaced


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["adam", "lamb"])
def test_the_comparison_notices_another_step_count(case: str, device: str) -> None:
    kernel = make(case, device)
    found = train(kernel, RowUpdate(kernel), device)
    assert not close(found, by_look_up(case, device, late=1), device)


@pytest.mark.parametrize("device", DEVICES)
def test_the_comparison_notices_an_old_learning_rate(device: str) -> None:
    kernel = make("rowwise_adagrad", device)
    update = RowUpdate(kernel)

    def at_first_rate(*arguments: Any) -> None:
        kernel.set_learning_rate(0.1)
        update(*arguments)

    assert not close(train(kernel, at_first_rate, device), by_look_up("rowwise_adagrad", device), device)


def test_in_another_thread() -> None:
    kernel, found = make("rowwise_adagrad", "cpu"), list[Tensor]()
    thread = threading.Thread(target=lambda: found.extend(train(kernel, RowUpdate(kernel), "cpu")))
    thread.start()
    thread.join(60)
    assert close(found, by_look_up("rowwise_adagrad", "cpu"), "cpu")


def _without_eps(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_update, "FIXED", tuple(name for name in row_update.FIXED if name != "eps"))


def _other_operator(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_update, "OPERATOR", ("split_embedding_of_a_later_release_", "_wrapper"))


def _other_learning_rate(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["rate_of_a_later_release" if name == "learning_rate_tensor" else name for name in row_update.SET_EACH_TIME]
    monkeypatch.setattr(row_update, "SET_EACH_TIME", tuple(names))


def _hook(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.register_full_backward_pre_hook(lambda *_: None)


def _global_decay(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_update, "DECAYS", ())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_without_eps, "the argument eps"),
        (_other_operator, "0 times, not once"),
        (_other_learning_rate, "has no argument rate_of_a_later_release"),
        (_hook, "hooks"),
        (_global_decay, "weight decay mode"),
    ],
)
def test_what_is_not_known_is_updated_by_look_ups(
    change: Callable[[Kernel, pytest.MonkeyPatch], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _log_first_time.cache_clear()
    kernel = make("rowwise_adagrad", "cpu")
    change(kernel, monkeypatch)
    with caplog.at_level(logging.INFO, logger.name):
        found = train(kernel, RowUpdate(kernel), "cpu")
    assert close(found, by_look_up("rowwise_adagrad", "cpu"), "cpu")
    assert kernel.step == STEPS
    assert sum(reason in record.message for record in caplog.records) == 1
