"""Types and optimizers of the tables: equal to a TorchRec loop under both exchanges, or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import PartialRowWiseAdam
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_freescale import ConfigurationError, FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks
from tests.strategy.test_against_torchrec import by_hand, by_strategy

Trained = tuple[list[float], dict[str, Tensor]]
CLIPPED = {"gradient_clipping": True, "max_gradient": 0.002}


def hand_written(rank: int, kind: str, optimizer: str, bags: bool, half: bool, fused: dict[str, Any]) -> Trained:
    return by_hand(rank, 2, kind, optimizer, bags, half, **fused)


def compare(kind: str, optimizer: str, bags: bool, half: bool, limit: float | None) -> list[bool]:
    """Whether the loop and the strategy are equal on each rank, with synchronous and with prioritized exchange."""
    fused = {} if limit is None else CLIPPED
    expected = run_ranks(hand_written, args=(kind, optimizer, bags, half, fused))
    equal = []
    for prioritize in (False, True):
        tables = {"optimizer": optimizer, "lr": 0.1} | ({} if limit is None else {"max_gradient": limit})
        options = {"sharding": kind, "embedding_optimizer": tables, "prioritize": prioritize}
        got = run_ranks(by_strategy, args=(2, options, bags, half))
        equal += [a[0] == b[0] and toy.same(a[1], b[1]) for a, b in zip(expected, got, strict=True)]
    return equal


@pytest.mark.parametrize("bags", [False, True], ids=["sequence", "pooled"])
def test_half_precision_tables(bags: bool) -> None:
    assert all(compare("row_wise", "rowwise_adagrad", bags, True, None))


@pytest.mark.parametrize(("kind", "optimizer", "bags"), [("row_wise", "sgd", False), ("table_wise", "adagrad", True)])
def test_clipped_gradients(kind: str, optimizer: str, bags: bool) -> None:
    assert all(compare(kind, optimizer, bags, False, CLIPPED["max_gradient"]))


def test_the_comparison_of_clipped_gradients_can_fail() -> None:
    assert not any(compare("row_wise", "sgd", False, False, 2 * CLIPPED["max_gradient"]))


# ---- refused ---------------------------------------------------------------------------------------------------------
class OwnOptimizer(toy.Model):
    def __init__(self) -> None:
        super().__init__()
        apply_optimizer_in_backward(PartialRowWiseAdam, self.embeddings.parameters(), {"lr": 0.1})


def refused(rank: int) -> list[str]:
    found = []
    for model in (toy.Model(data_type=DataType.BF16), OwnOptimizer()):
        with pytest.raises(ConfigurationError) as error:
            toy.trainer(FreeScaleStrategy(), 1).fit(model, toy.loader())
        found.append(str(error.value))
    return found


def test_types_and_optimizers_without_a_kernel_are_refused() -> None:
    half, optimizer = run_ranks(refused, 1)[0]
    assert "table 'item' has data_type BF16: FBGEMM trains it on CUDA only" in half
    assert (
        "apply_optimizer_in_backward: PartialRowWiseAdam of embeddings.item.weight is not supported on cpu" in optimizer
    )


def test_fbgemm_ignores_weight_decay_on_a_cpu() -> None:
    """The reason why it is refused. If this fails, FBGEMM has learned it."""
    plain = run_ranks(hand_written, args=("row_wise", "rowwise_adagrad", False, False, {}))
    decayed = run_ranks(hand_written, args=("row_wise", "rowwise_adagrad", False, False, {"weight_decay": 0.5}))
    assert torch.equal(torch.tensor(plain[0][0]), torch.tensor(decayed[0][0]))
