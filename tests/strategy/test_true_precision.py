"""``precision="bf16-true"``: the dense part is bfloat16, the tables are not, and both exchanges equal a TorchRec loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import SumMetric
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

from lightning_freescale import FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks
from tests.strategy.test_against_torchrec import nn_loss, plan_by_hand

STEPS = 12
Trained = tuple[list[float], dict[str, Tensor]]
HALF = torch.bfloat16


class Half(toy.Model):
    """Computes in the type of what the collection returns."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        output = self.embeddings(features)
        parts = [self.arrived(output[key] if self.bags else output[key].values()) for key in toy.FEATURES]
        if not self.bags:
            parts = [sums(rows, output[key].lengths()) for key, rows in zip(toy.FEATURES, parts, strict=True)]
        assert all(part.dtype == HALF for part in parts)
        return self.head(torch.cat(parts, dim=1)).squeeze(-1)

    def __init__(self, bags: bool) -> None:
        super().__init__(bags=bags)
        self.count = SumMetric()

    def arrived(self, rows: Tensor) -> Tensor:
        return rows

    def on_before_zero_grad(self, optimizer: Any) -> None:
        schedule = self.trainer.strategy.schedule  # type: ignore[attr-defined]
        self.prioritized = [] if schedule is None else list(schedule.prioritized)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ByHand(Half):
    def arrived(self, rows: Tensor) -> Tensor:
        assert rows.dtype == torch.float32
        return rows.to(HALF)


def sums(rows: Tensor, lengths: Tensor) -> Tensor:
    sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
    return torch.zeros(len(lengths), rows.shape[1], dtype=rows.dtype).index_add(0, sample, torch.tanh(rows))


def by_hand(rank: int, kind: str, bags: bool, round_tables: bool = False) -> Trained:
    """A TorchRec loop whose dense part is bfloat16."""
    pl.seed_everything(1, verbose=False)
    model = ByHand(bags=bags)
    if round_tables:
        model.embeddings.to(HALF).float()
    initial = {key: value.clone() for key, value in model.embeddings.state_dict().items()}
    model.head.to(HALF)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    sharder = (EmbeddingBagCollectionSharder if bags else EmbeddingCollectionSharder)(fused_params=fused)
    plan = plan_by_hand(model, 2, kind, sharder)
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    for key, value in model.embeddings.state_dict().items():
        for shard in value.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(initial[key][row : row + rows, column : column + columns])
    dense = torch.optim.SGD(model.head.parameters(), lr=0.05)
    samples = toy.Samples(4 * STEPS)
    sampler = DistributedSampler(samples, 2, rank, shuffle=True, seed=1)
    losses = []
    for batch in DataLoader(samples, batch_size=2, collate_fn=toy.collate, sampler=sampler):
        loss = nn_loss(dmp(batch.features), batch.label.to(HALF))
        dense.zero_grad()
        loss.backward()
        dense.step()
        losses.append(loss.item())
    return losses, toy.weights(model)


def by_strategy(kind: str, bags: bool, **options: Any) -> Trained:
    pl.seed_everything(1, verbose=False)
    model = Half(bags=bags)
    options = {"balance": "off", "sharding": kind, "embedding_optimizer": {"lr": 0.1}, **options}
    trainer = toy.trainer(FreeScaleStrategy(**options), 2, max_epochs=1, precision="bf16-true", limit_val_batches=1)
    trainer.fit(model, toy.loader(4 * STEPS), toy.loader(8, shuffle=False))
    assert model.prioritized == (["embeddings"] if options["prioritize"] else [])
    assert model.count.sum_value.dtype == torch.float32
    assert {parameter.dtype for parameter in model.head.parameters()} == {HALF}
    losses, weights = list(model.losses), toy.weights(model)
    tables = {key: value for key, value in weights.items() if key.startswith("embeddings")}
    assert all(
        value.dtype == torch.float32 and not torch.equal(value, value.to(HALF).float()) for value in tables.values()
    )
    trainer = toy.trainer(FreeScaleStrategy(**options), 2, precision="bf16-true", limit_val_batches=1)
    trainer.validate(model, toy.loader(8, shuffle=False), verbose=False)  # The model was converted and sharded before.
    assert toy.same(toy.weights(model), weights)
    return losses, weights


def loops(rank: int, cases: list[tuple[Any, ...]]) -> list[Trained]:
    dist.init_process_group("gloo")
    return [by_hand(rank, *case) for case in cases]


def strategies(rank: int, cases: list[tuple[str, bool, dict[str, Any]]]) -> list[Trained]:
    return [by_strategy(kind, bags, **options) for kind, bags, options in cases]


def same(one: Trained, other: Trained) -> bool:
    return one[0] == other[0] and toy.same(one[1], other[1])


def test_equal_to_a_hand_written_loop() -> None:
    expected = run_ranks(loops, args=([("row_wise", False), ("table_wise", True), ("row_wise", False, True)],))
    cases: list[tuple[str, bool, dict[str, Any]]] = [
        ("row_wise", False, {"prioritize": False}),
        ("row_wise", False, {"prioritize": True}),
        ("row_wise", False, {"prioritize": True, "wire": "bfloat16"}),  # rounds what is bfloat16 already
        ("table_wise", True, {"prioritize": False}),
        ("table_wise", True, {"prioritize": True}),
    ]
    for (rows, bags, rounded), trained in zip(expected, run_ranks(strategies, args=(cases,)), strict=True):
        assert len(rows[0]) == STEPS
        assert all(same(rows, one) for one in trained[:3])
        assert all(same(bags, one) for one in trained[3:])
        assert not same(rounded, trained[0])  # If the tables had been converted, the comparison would show it.


def resumed(rank: int, folder: str) -> list[list[float]]:
    """The losses of a run, and those of one that resumes in its middle. Micro-batches are accumulated in both."""
    found = []
    for path in (None, f"{folder}/step=5.ckpt"):
        pl.seed_everything(1, verbose=False)
        model = Half(bags=False)
        save = pl.callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=5, filename="{step}", save_top_k=-1)
        strategy = FreeScaleStrategy(embedding_optimizer={"optimizer": "adam", "lr": 0.1}, balance="off")
        options = {"accumulate_grad_batches": 2, "max_epochs": 1, "precision": "bf16-true"}
        trainer = toy.trainer(strategy, 2, enable_checkpointing=True, callbacks=[save], **options)
        trainer.fit(model, toy.loader(4 * STEPS), ckpt_path=path)
        found.append(model.losses)
    return found


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    for whole, rest in run_ranks(resumed, args=(str(tmp_path),)):
        assert len(whole) == STEPS
        assert rest == whole[10:]
