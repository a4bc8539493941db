"""Types and optimizers of the tables: equal to a TorchRec loop under both exchanges, or refused with a reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import LarsSGD, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_freescale import ConfigurationError, FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks
from tests.strategy.test_against_torchrec import by_hand, by_strategy

Trained = tuple[list[float], dict[str, Tensor]]


@dataclass(frozen=True)
class TableCase:
    """A training with the tables of one type and one optimizer."""

    kind: str = "row_wise"
    optimizer: str = "rowwise_adagrad"
    bags: bool = False
    half: bool = False
    fused: dict[str, Any] = field(default_factory=dict)  # FBGEMM's arguments in the loop
    options: dict[str, Any] = field(default_factory=dict)  # further keys of embedding_optimizer


def loops(rank: int, cases: list[TableCase]) -> list[Trained]:
    return [by_hand(rank, 2, case.kind, case.optimizer, case.bags, case.half, **case.fused) for case in cases]


def strategies(rank: int, cases: list[TableCase]) -> list[Trained]:
    """Each case with the synchronous and with the prioritized exchange."""
    found = []
    for case in cases:
        tables = {"optimizer": case.optimizer, "lr": 0.1, **case.options}
        for prioritize in (False, True):
            options = {"sharding": case.kind, "embedding_optimizer": tables, "prioritize": prioritize}
            found.append(by_strategy(rank, 2, options, case.bags, case.half))
    return found


def compare(cases: list[TableCase]) -> list[bool]:
    """For each case, whether the loop and both trainings with the strategy are equal on both ranks."""
    expected, got = run_ranks(loops, args=(cases,)), run_ranks(strategies, args=(cases,))
    equal = [True] * len(cases)
    for one, pairs in zip(expected, got, strict=True):
        for number, (losses, weights) in enumerate(one):
            for other in pairs[2 * number : 2 * number + 2]:
                equal[number] &= losses == other[0] and toy.same(weights, other[1])
    return equal


def test_equal_to_a_hand_written_loop() -> None:
    clipped = {"gradient_clipping": True, "max_gradient": 0.002}
    l2, decoupled = ({"weight_decay": 0.1, "weight_decay_mode": mode} for mode in (1, 2))
    cases = {
        "half": TableCase(half=True),
        "half bags": TableCase(half=True, bags=True),
        "clipped": TableCase(optimizer="sgd", fused=clipped, options={"max_gradient": 0.002}),
        "clipped bags": TableCase("table_wise", "adagrad", True, fused=clipped, options={"max_gradient": 0.002}),
        "l2": TableCase(fused=fbgemm(l2), options=l2 | {"weight_decay_mode": "l2"}),
        "decoupled": TableCase(
            bags=True, fused=fbgemm(decoupled), options=decoupled | {"weight_decay_mode": "decoupled"}
        ),
    }
    wrong = {
        "another limit": TableCase(optimizer="sgd", fused=clipped, options={"max_gradient": 0.004}),
        "another mode": TableCase(fused=fbgemm(decoupled), options=l2 | {"weight_decay_mode": "l2"}),
    }
    equal = dict(zip([*cases, *wrong], compare([*cases.values(), *wrong.values()]), strict=True))
    assert equal == dict.fromkeys(cases, True) | dict.fromkeys(wrong, False)


def fbgemm(decay: dict[str, Any]) -> dict[str, Any]:
    return decay | {"weight_decay_mode": WeightDecayMode(decay["weight_decay_mode"])}


# ---- refused ---------------------------------------------------------------------------------------------------------
class OwnOptimizer(toy.Model):
    def __init__(self, kind: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__()
        apply_optimizer_in_backward(kind, self.embeddings.parameters(), {"lr": 0.1, **options})


def refused(rank: int) -> list[str]:
    found = []
    models = (
        toy.Model(data_type=DataType.BF16),
        OwnOptimizer(LarsSGD),
        OwnOptimizer(RowWiseAdagrad, weight_decay=0.1),
    )
    for model in models:
        with pytest.raises(ConfigurationError) as error:
            toy.trainer(FreeScaleStrategy(), 1).fit(model, toy.loader())
        found.append(str(error.value))
    return found


def test_types_and_optimizers_without_a_kernel_are_refused() -> None:
    half, optimizer, decay = run_ranks(refused, 1)[0]
    assert "table 'item' has data_type BF16: FBGEMM trains it on CUDA only" in half
    assert "apply_optimizer_in_backward: LarsSGD of embeddings.item.weight is not supported on cpu" in optimizer
    assert "weight_decay of RowWiseAdagrad of embeddings.item.weight: FBGEMM ignores the weight decay" in decay


def test_fbgemm_ignores_weight_decay_without_a_mode() -> None:
    """The reason why it is refused. If this fails, FBGEMM has learned it."""
    plain, decayed = run_ranks(loops, args=([TableCase(), TableCase(fused={"weight_decay": 0.5})],))[0]
    assert plain[0] == decayed[0]
