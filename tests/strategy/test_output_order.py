"""The output of a sharded collection has the order of the unsharded one, so a checkpoint means the same without sharding."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import lightning_freescale as fs
from lightning_freescale import ConfigurationError, FreeScaleStrategy
from lightning_freescale.embedding import shard, unsharded_api
from tests import toy
from tests.ranks import run_ranks

ROWS = {"a": 96, "b": 8, "c": 72, "d": 120}  # by default, the second table stays whole on one rank
FEATURES = {"a": ["u", "v"], "b": ["w"], "c": ["x"], "d": ["v"]}  # two tables share a feature
OWN_FEATURES = {"a": ["u"], "b": ["w"], "c": ["x"], "d": ["v"]}
KEYS = ["u", "v", "w", "x"]
LARGEST = {"u": 96, "v": 96, "w": 8, "x": 72}  # rows of the smallest table of each feature
SAMPLES = 4


def sequences() -> EmbeddingCollection:
    tables = [
        EmbeddingConfig(name=name, embedding_dim=8, num_embeddings=rows, feature_names=FEATURES[name])
        for name, rows in ROWS.items()
    ]
    return EmbeddingCollection(tables=tables)


def bags(means: str = "", features: dict[str, list[str]] = FEATURES) -> EmbeddingBagCollection:
    """Tables of several widths: TorchRec groups tables by them.

    Args:
        means: the tables that are pooled by their mean.
        features: the features of each table.
    """
    tables = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=4 if name == "a" else 8,
            num_embeddings=rows,
            feature_names=features[name],
            pooling=PoolingType.MEAN if name in means else PoolingType.SUM,
        )
        for name, rows in ROWS.items()
    ]
    return EmbeddingBagCollection(tables=tables)


def means() -> EmbeddingBagCollection:
    return bags("ac", OWN_FEATURES)


def mean_and_shared() -> EmbeddingBagCollection:
    return bags("c")


def whole_means() -> EmbeddingBagCollection:
    return bags("abcd")


def weighted_bags() -> FeatureProcessedEmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=rows, feature_names=OWN_FEATURES[name])
        for name, rows in ROWS.items()
    ]
    processors: dict[str, nn.Module] = {key: PositionWeightedModule(max_feature_length=6) for key in KEYS}
    return FeatureProcessedEmbeddingBagCollection(
        EmbeddingBagCollection(tables=tables, is_weighted=True),
        processors,  # type: ignore[arg-type]
    )


def any_ids() -> nn.Module:
    return fs.zero_collision(sequences(), {name: fs.ZeroCollision(buckets=4) for name in ROWS})


def collate(indices: list[int]) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(int(indices[0]))
    lengths = torch.randint(0, 6, (len(KEYS), len(indices)), generator=generator)
    ids = [torch.randint(0, LARGEST[key], (int(lengths[i].sum()),), generator=generator) for i, key in enumerate(KEYS)]
    return KeyedJaggedTensor(KEYS, torch.cat(ids), lengths=lengths.flatten())


class Model(pl.LightningModule):
    """Uses the features of its collection in the order in which they come."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        self.tables = make()
        width = {
            bags: 32,
            whole_means: 32,
            mean_and_shared: 32,
            sequences: 40,
            any_ids: 40,
            means: 28,
            weighted_bags: 32,
        }[make]
        self.head = nn.Linear(width, 1)
        self.keys: list[str] = []

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        output = self.tables(features)
        self.keys = list(output.keys())
        if isinstance(self.tables, EmbeddingCollection) or not hasattr(output, "key_dim"):
            pooled = [
                torch.stack([jagged.values()[a:b].sum(0) for a, b in pairwise(jagged.offsets().tolist())])
                for jagged in output.values()
            ]
            return self.head(torch.cat(pooled, dim=1))
        return self.head(output.values())

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        return (self(batch) - 1.0).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(rank: int, make: Any, prioritize: bool, sharding: Any) -> tuple[list[str], Tensor, dict[str, Tensor]]:
    pl.seed_everything(1, verbose=False)
    model = Model(make)
    strategy = FreeScaleStrategy(prioritize=prioritize, balance="off", sharding=sharding)
    toy.trainer(strategy, 2, max_epochs=1).fit(model, DataLoader(range(48), batch_size=SAMPLES, collate_fn=collate))
    model.eval()
    with torch.no_grad():
        scores = model(collate([100 + i for i in range(SAMPLES)]))
    return model.keys, scores, toy.weights(model) if make is not any_ids else {}


MIXED = {"a": "row_wise", "b": "table_wise", "c": "column_wise", "d": "row_wise"}


@pytest.mark.parametrize(
    ("make", "prioritize", "sharding"),
    [
        (sequences, True, None),
        (sequences, False, None),
        (bags, True, MIXED),
        (bags, False, None),
        (means, True, None),
        (means, False, None),
        (whole_means, True, "table_wise"),
        (weighted_bags, True, None),
    ],
)
def test_a_model_that_uses_all_features_at_once_predicts_the_same_unsharded(
    make: Any, prioritize: bool, sharding: Any
) -> None:
    keys, scores, weights = run_ranks(fit, args=(make, prioritize, sharding))[0]
    unsharded = Model(make).eval()
    unsharded.load_state_dict(weights)
    with torch.no_grad():
        expected = unsharded(collate([100 + i for i in range(SAMPLES)]))
    assert keys == unsharded.keys
    torch.testing.assert_close(scores, expected, rtol=0.0, atol=1e-6)  # bags are summed in another order


def test_zero_collision_tables_have_the_order_of_their_tables() -> None:
    """Two of them share a feature. Their fresh rows are written apart."""
    runs = [run_ranks(fit, args=(any_ids, prioritize, None))[0] for prioritize in (False, True)]
    for keys, scores, _ in runs:
        assert keys == ["u", "v@a", "w", "x", "v@d"]
        assert torch.equal(scores, runs[0][1])


def test_torchrec_has_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above."""
    monkeypatch.setattr(unsharded_api, "restore_order", lambda *_: None)
    assert run_ranks(fit, args=(sequences, False, None))[0][0] != ["u", "v@a", "w", "x", "v@d"]
    assert run_ranks(fit, args=(bags, False, None))[0][0] != ["u", "v@a", "w", "x", "v@d"]
    assert run_ranks(fit, args=(weighted_bags, False, None))[0][0] != ["u", "w", "x", "v"]


def refused(rank: int, make: Any, sharding: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        fit(rank, make, False, sharding)
    return str(error.value)


@pytest.mark.parametrize(
    ("make", "sharding", "message"),
    [
        (means, {"b": "table_wise"}, "table 'a' is row-wise and pools by the mean, and table 'b' has another sharding"),
        (mean_and_shared, None, "several tables share the feature 'v', of which at least one pools by the sum"),
    ],
)
def test_bags_that_torchrec_would_divide_are_refused(make: Any, sharding: Any, message: str) -> None:
    assert all(message in text for text in run_ranks(refused, args=(make, sharding)))


def test_torchrec_divides_such_bags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the refusal, the model predicts something else when its tables are sharded."""
    monkeypatch.setattr(shard, "refuse_wrong_means", lambda *_: None)
    for make, sharding in ((means, {"b": "table_wise"}), (mean_and_shared, None)):
        _, scores, weights = run_ranks(fit, args=(make, False, sharding))[0]
        unsharded = Model(make).eval()
        unsharded.load_state_dict(weights)
        with torch.no_grad():
            assert not torch.allclose(scores, unsharded(collate([100 + i for i in range(SAMPLES)])), atol=1e-3)
