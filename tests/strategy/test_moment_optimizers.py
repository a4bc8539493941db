"""Adam and LAMB of the tables on a CPU: equal to a loop written by hand around TorchRec, under both exchanges."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

from tests import toy
from tests.ranks import run_ranks
from tests.strategy.test_against_torchrec import SAMPLES, STEPS, by_strategy, nn_loss, plan_by_hand

Trained = tuple[list[float], dict[str, Tensor]]
BETAS, EPS, RATE, DECAY = (0.8, 0.9), 1e-6, 0.1, 0.01


class RowOptimizer:
    """The update of the rows that have a gradient, with one operation of PyTorch after the other."""

    def __init__(self, name: str, table: Tensor, first_step: int):
        self.name, self.table, self.steps = name, table, first_step
        self.first = torch.zeros_like(table)
        self.second = torch.zeros(len(table)) if name.startswith("partial") else torch.zeros_like(table)

    def before_backward(self) -> None:
        """FBGEMM's SGD with rate -1 then turns the table, which is zero, into the gradient."""
        self.kept = self.table.clone()
        self.table.zero_()

    def step(self, rate: float) -> None:
        self.steps += 1
        gradient = self.table.clone()
        self.table.copy_(self.kept)
        rows = gradient.abs().sum(1).nonzero().flatten()
        g, w = gradient[rows], self.table[rows]
        beta1, beta2, eps, decay = (torch.tensor(value) for value in (*BETAS, EPS, DECAY))
        squares = g * g
        if self.second.ndim == 1:
            squares = sum_of(squares) / g.shape[1]
        self.first[rows] = beta1 * self.first[rows] + (1 - beta1) * g
        self.second[rows] = beta2 * self.second[rows] + (1 - beta2) * squares
        second = self.second[rows]
        second = second[:, None] if second.ndim == 1 else second
        of_step = [torch.tensor(1 - float(beta) ** self.steps) for beta in (beta1, beta2)]
        r = (self.first[rows] / of_step[0]) / (root(second / of_step[1]) + eps) + decay * w
        rates = torch.tensor(rate).expand(len(rows))
        if "lamb" in self.name:
            rates = rates * (root(sum_of(w * w)) / root(sum_of(r * r)))
        self.table[rows] = w - rates[:, None] * r


def sum_of(rows: Tensor) -> Tensor:
    """The sum of each row, from its first element to its last."""
    total = torch.zeros(len(rows))
    for column in rows.unbind(1):
        total = total + column
    return total


def root(values: Tensor) -> Tensor:
    """The square root, rounded to the nearest float. That of torch may be one bit apart on x86, where it calls MKL."""
    return torch.from_numpy(np.sqrt(values.numpy()))


def by_hand(rank: int, kind: str, optimizer: str, bags: bool, first_step: int = 0) -> Trained:
    """A TorchRec loop that updates the tables itself."""
    pl.seed_everything(1, verbose=False)
    model = toy.Model(bags=bags)
    initial = {key: value.clone() for key, value in model.embeddings.state_dict().items()}
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": -1.0}
    sharder = (EmbeddingBagCollectionSharder if bags else EmbeddingCollectionSharder)(fused_params=fused)
    plan = plan_by_hand(model, 2, kind, sharder)
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    tables = []
    for key, value in model.embeddings.state_dict().items():
        for shard in value.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(initial[key][row : row + rows, column : column + columns])
            tables.append(RowOptimizer(optimizer, shard.tensor.data, first_step))
    dense = torch.optim.Adam(model.head.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(dense, step_size=3, gamma=0.5)
    samples = toy.Samples(SAMPLES)
    sampler = DistributedSampler(samples, 2, rank, shuffle=True, seed=1)
    losses: list[float] = []
    while len(losses) < STEPS:
        sampler.set_epoch(len(losses) * 4 // SAMPLES)
        for batch in DataLoader(samples, batch_size=2, collate_fn=toy.collate, sampler=sampler):
            rate = RATE * schedule.get_last_lr()[0] / 0.05
            loss = nn_loss(dmp(batch.features), batch.label)
            dense.zero_grad()
            for table in tables:
                table.before_backward()
            loss.backward()
            for table in tables:
                table.step(rate)
            dense.step()
            schedule.step()
            losses.append(loss.item())
            if len(losses) == STEPS:
                break
    return losses, toy.weights(model)


def loops(rank: int, cases: list[tuple[Any, ...]]) -> list[Trained]:
    dist.init_process_group("gloo")
    return [by_hand(rank, *case) for case in cases]


def strategies(rank: int, cases: list[tuple[Any, ...]]) -> list[Trained]:
    """Each case with the synchronous and with the prioritized exchange."""
    found = []
    for kind, optimizer, bags, *_ in cases:
        tables = {"optimizer": optimizer, "lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
        for prioritize in (False, True):
            options = {"sharding": kind, "embedding_optimizer": tables, "prioritize": prioritize}
            found.append(by_strategy(rank, 2, options, bags))
    return found


def test_equal_to_a_hand_written_loop() -> None:
    cases = [
        ("row_wise", "adam", False),
        ("table_wise", "adam", True),
        ("column_wise", "lamb", True),
        ("table_wise", "partial_rowwise_adam", False),
        ("row_wise", "partial_rowwise_lamb", True),
    ]
    wrong = ("row_wise", "adam", False, 1)  # The loop corrects the bias as if it had trained a step before.
    by_rank = zip(run_ranks(loops, args=([*cases, wrong],)), run_ranks(strategies, args=(cases,)), strict=True)
    for expected, got in by_rank:
        for (losses, weights), pair in zip(expected, zip(got[::2], got[1::2], strict=True), strict=False):
            assert len(losses) == STEPS
            assert all(losses == other[0] and toy.same(weights, other[1]) for other in pair)
        assert expected[-1][0] != got[0][0]  # the comparison can fail
        assert not toy.same(expected[-1][1], got[0][1])
