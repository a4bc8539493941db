"""Feature processors compute the weights of bags. They are trained as in a TorchRec loop, and exchanged synchronously."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from lightning_freescale import ConfigurationError, FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks
from tests.strategy.test_against_torchrec import nn_loss, plan_by_hand

STEPS = 16
POSITIONS = "embeddings._feature_processors.position_weights.clicks"
Trained = tuple[list[float], dict[str, Tensor]]


class Positions(toy.Model):
    """The weight of an id in its bag depends on its position, and is trained."""

    def __init__(self) -> None:
        super().__init__(bags=True)
        tables = self.embeddings.embedding_bag_configs()
        weighted = type(self.embeddings)(tables=tables, is_weighted=True)
        weighted.load_state_dict(self.embeddings.state_dict())
        processors = PositionWeightedModuleCollection(dict.fromkeys(toy.FEATURES, 8))
        self.embeddings = FeatureProcessedEmbeddingBagCollection(weighted, processors)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def by_hand(rank: int, kind: str, skip: str = "") -> Trained:
    """A TorchRec loop. It does not train parameters whose name contains ``skip``."""
    pl.seed_everything(1, verbose=False)
    model = Positions()
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    sharder = FeatureProcessedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused_params=fused))
    plan = plan_by_hand(model, 2, kind, sharder)
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    for key, value in model.state_dict().items():
        for shard in value.local_shards() if hasattr(value, "local_shards") else ():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(initial[key][row : row + rows, column : column + columns])
    not_fused = [
        part
        for name, part in model.named_parameters()
        if not hasattr(part, "_in_backward_optimizers") and not (skip and skip in name)
    ]
    dense = torch.optim.SGD(not_fused, lr=0.5)
    samples = toy.Samples(4 * STEPS)
    sampler = DistributedSampler(samples, 2, rank, shuffle=True, seed=1)
    losses = []
    for batch in DataLoader(samples, batch_size=2, collate_fn=toy.collate, sampler=sampler):
        loss = nn_loss(dmp(batch.features), batch.label)
        dense.zero_grad()
        loss.backward()
        dense.step()
        losses.append(loss.item())
    return losses, toy.weights(model)


def loops(rank: int, cases: list[tuple[str, ...]]) -> list[Trained]:
    dist.init_process_group("gloo")
    return [by_hand(rank, *case) for case in cases]


def fit(
    kind: str, prioritize: bool, optimizer: str = "rowwise_adagrad", resume: str | None = None, **options: Any
) -> Trained:
    pl.seed_everything(1, verbose=False)
    model = Positions()
    tables = {"optimizer": optimizer, "lr": 0.1}
    strategy = FreeScaleStrategy(balance="off", sharding=kind, prioritize=prioritize, embedding_optimizer=tables)
    toy.trainer(strategy, 2, max_epochs=1, **options).fit(model, toy.loader(4 * STEPS), ckpt_path=resume)
    return model.losses, toy.weights(model)


def fits(rank: int, folder: str) -> list[Trained]:
    trained = [fit(kind, prioritize) for kind in ("table_wise", "row_wise") for prioritize in (False, True)]
    save = pl.callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=5, filename="{step}", save_top_k=-1)
    trained.append(fit("row_wise", True, "adam", enable_checkpointing=True, callbacks=[save]))
    trained.append(fit("row_wise", True, "adam", resume=f"{folder}/step=5.ckpt"))
    with pytest.raises(ConfigurationError, match="the weights of a weighted bag need gradients, which cannot be held"):
        fit("row_wise", True, accumulate_grad_batches=2)
    return trained


def same(one: Trained, other: Trained) -> bool:
    return one[0] == other[0] and toy.same(one[1], other[1])


def test_equal_to_a_hand_written_loop(tmp_path: Path) -> None:
    expected = run_ranks(loops, args=([("table_wise",), ("row_wise",), ("row_wise", POSITIONS)],))
    for (whole, split, untrained), trained in zip(expected, run_ranks(fits, args=(str(tmp_path),)), strict=True):
        assert len(whole[0]) == STEPS
        assert all(same(whole, one) for one in trained[:2])
        assert all(same(split, one) for one in trained[2:4])
        assert not same(untrained, trained[2])  # the comparison can fail
        uninterrupted, resumed = trained[4:]
        assert resumed[0] == uninterrupted[0][5:]
        assert toy.same(resumed[1], uninterrupted[1])


class OwnWeights(Positions):
    """Computes the weights of the ids before the collection sends them to the owners of their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = self.embeddings._embedding_bag_collection
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        weights = self.scale * torch.ones(features.values().numel())
        features = KeyedJaggedTensor(features.keys(), features.values(), weights, lengths=features.lengths())
        return super().forward(features)


def fit_own_weights(rank: int, world: int) -> str:
    model = OwnWeights()
    try:
        toy.trainer(FreeScaleStrategy(balance="off"), world, max_steps=2).fit(model, toy.loader())
    except ConfigurationError as error:
        return str(error)
    return "trained"


def test_weights_that_would_get_no_gradient_are_refused() -> None:
    for message in run_ranks(fit_own_weights, 2, args=(2,)):
        assert "embeddings: the weights of its bags need gradients" in message
