"""Models that use a collection as if it was not sharded: by several names, like a dictionary, with hooks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from lightning_freescale import ConfigurationError, FreeScaleStrategy
from lightning_freescale.embedding.aliases import one_name_each
from lightning_freescale.embedding.unsharded_api import refuse_lost_hooks
from tests import toy
from tests.ranks import run_ranks

SGD = {"optimizer": "sgd", "lr": 0.05}


class Aliased(toy.Model):
    """A second name of the collection. The first one is used in training."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.ModuleDict({"first": nn.Linear(1, 1).requires_grad_(False), "tables": self.embeddings})

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        return self.other["tables"](features)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = self.look_up(features)
        return self.head(torch.cat([toy.mean(rows[key]) for key in toy.FEATURES], dim=1)).squeeze(-1)


class KeptInList(Aliased):
    """A plain list has the collection, so PyTorch does not know of this name."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.embeddings]

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        return self.kept[0](features)


class LikeADictionary(Aliased):
    """Uses the collection and its output as if it was not sharded."""

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        assert self.embeddings.embedding_dim() == toy.DIM
        assert [config.name for config in self.embeddings.embedding_configs()] == list(toy.ROWS)
        assert not self.embeddings.need_indices()
        rows = self.embeddings(features)
        assert rows
        assert "clicks" in rows
        assert "nothing" not in rows
        assert len(rows) == len(list(rows)) == len(toy.FEATURES)
        return {key: rows[key] for key in sorted(rows)}


class Hooked(Aliased):
    """Hooks of the collection: one counts, one changes what it returns, and one is removed during the training."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = [0, 0]
        self.embeddings.register_forward_pre_hook(self.count)
        self.embeddings.register_forward_hook(self.doubled)
        self.handle = self.embeddings.register_forward_hook(self.count_also)

    def count(self, module: nn.Module, arguments: Any) -> None:
        self.counts[0] += 1

    def count_also(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self.counts[1] += 1

    def doubled(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        return {
            key: JaggedTensor(2 * rows.values(), lengths=rows.lengths(), offsets=rows.offsets())
            for key, rows in output.items()
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.handle.remove()


class SharedEncoder(pl.LightningModule):
    """Two names of a module that contains the collection."""

    def __init__(self) -> None:
        super().__init__()
        self.left = toy.Model()
        self.right = self.left
        self.losses: list[float] = []

    def training_step(self, batch: toy.Batch, batch_idx: int) -> Tensor:
        both = self.left(batch.features) + self.right(batch.features)
        loss = nn.functional.binary_cross_entropy_with_logits(both, batch.label)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(
    rank: int,
    kind: type[pl.LightningModule],
    prioritize: bool | None,
    world: int,
    folder: str = "",
    resume: bool = False,
) -> Any:
    """Losses, weights, and the keys of the state. ``prioritize=None`` trains with plain DDP."""
    pl.seed_everything(1, verbose=False)
    module = kind()
    strategy: Any = "ddp"
    if prioritize is not None:
        form: Any = "sharded" if folder.endswith("sharded") else "auto"
        strategy = FreeScaleStrategy(
            prioritize=prioritize, balance="off", sharding="row_wise", embedding_optimizer=SGD, checkpoint=form
        )
    saved = f"{folder}/one.ckpt"
    trainer = toy.trainer(strategy, world, max_epochs=2 if resume or not folder else 1)
    trainer.fit(module, toy.loader(24, 4 // world, shuffle=False), ckpt_path=saved if resume else None)
    if folder and not resume:
        trainer.save_checkpoint(saved)
    return module.losses, toy.weights(module)


class WithSgd:
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)  # type: ignore[attr-defined]


class AliasedSgd(WithSgd, Aliased):
    pass


class KeptInListSgd(WithSgd, KeptInList):
    pass


class LikeADictionarySgd(WithSgd, LikeADictionary):
    pass


class HookedSgd(WithSgd, Hooked):
    def on_train_end(self) -> None:
        assert self.counts == [12, 3]


@pytest.mark.parametrize(
    "kind", [AliasedSgd, KeptInListSgd, LikeADictionarySgd, SharedEncoder], ids=lambda k: k.__name__
)
def test_all_names_of_a_collection_train_one_table(kind: type[pl.LightningModule]) -> None:
    plain = run_ranks(fit, 1, args=(kind, None, 1))[0][1]
    synchronous, prioritized = (run_ranks(fit, args=(kind, prioritize, 2)) for prioritize in (False, True))
    assert [losses for losses, _ in synchronous] == [losses for losses, _ in prioritized]
    for (_, weights), (_, others) in zip(synchronous, prioritized, strict=True):
        assert toy.same(weights, others)
    weights = synchronous[0][1]
    assert weights.keys() == plain.keys()
    assert any(not torch.equal(weights[key], fresh) for key, fresh in kind().state_dict().items())
    for key, value in plain.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-6)


def fit_twice(rank: int, kind: type[pl.LightningModule], prioritize: bool) -> Any:
    """A second Trainer continues with the sharded model, and then validates it. The loader has no length."""
    pl.seed_everything(1, verbose=False)
    module = kind()
    for _ in range(2):
        strategy = FreeScaleStrategy(prioritize=prioritize, balance="off", sharding="row_wise", embedding_optimizer=SGD)
        trainer = toy.trainer(strategy, 2, max_steps=4, max_epochs=-1)
        trainer.fit(module, Endless(rank))
    return module.losses, toy.weights(module), trainer.validate(module, toy.loader(8, shuffle=False), verbose=False)


class Endless:
    """Yields batches without end."""

    def __init__(self, rank: int):
        self.rank = rank

    def __iter__(self) -> Iterator[toy.Batch]:
        while True:
            yield from list(toy.loader(24, shuffle=False))[self.rank :: 2]


@pytest.mark.parametrize("kind", [KeptInListSgd, LikeADictionarySgd], ids=lambda k: k.__name__)
def test_a_second_trainer_continues_with_them(kind: type[pl.LightningModule]) -> None:
    synchronous, prioritized = (run_ranks(fit_twice, args=(kind, prioritize)) for prioritize in (False, True))
    for (losses, weights, metrics), (other_losses, other_weights, other_metrics) in zip(
        synchronous, prioritized, strict=True
    ):
        assert len(losses) == 8
        assert losses == other_losses
        assert metrics == other_metrics
        assert toy.same(weights, other_weights)


@pytest.mark.parametrize(("kind", "form"), [(AliasedSgd, "sharded"), (SharedEncoder, "file")])
def test_checkpoints_of_collections_with_several_names(
    kind: type[pl.LightningModule], form: str, tmp_path: Path
) -> None:
    folder = tmp_path / form
    folder.mkdir()
    whole = run_ranks(fit, args=(kind, True, 2))
    first = run_ranks(fit, args=(kind, True, 2, str(folder)))
    resumed = run_ranks(fit, args=(kind, True, 2, str(folder), True))
    for (all_losses, weights), (losses, _), (later, again) in zip(whole, first, resumed, strict=True):
        assert losses + later == all_losses
        assert toy.same(weights, again)
    if form == "file":
        loaded = kind.load_from_checkpoint(folder / "one.ckpt", weights_only=False).state_dict()
        assert toy.same(dict(loaded), first[0][1])


class FrozenInside(pl.LightningModule):
    """The first name of the frozen collection is inside another module, its second one is not."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = toy.Model()
        self.tables = self.encoder.embeddings.requires_grad_(False)
        self.losses: list[float] = []

    training_step = SharedEncoder.training_step
    configure_optimizers = SharedEncoder.configure_optimizers

    @property
    def left(self) -> Any:
        return self.encoder

    right = left


@pytest.mark.parametrize("prioritize", [False, True])
def test_a_frozen_collection_with_two_names_stays_frozen(prioritize: bool) -> None:
    pl.seed_everything(1, verbose=False)
    before = FrozenInside().state_dict()
    for losses, weights in run_ranks(fit, args=(FrozenInside, prioritize, 2)):
        assert len(set(losses)) > 1
        for key, value in before.items():
            assert torch.equal(weights[key], value) == ("embeddings" in key or "tables" in key)


def test_names_are_hidden_and_come_back() -> None:
    module = Aliased()
    table = module.embeddings
    before = [name for name, _ in module.named_modules(remove_duplicate=False)]
    with one_name_each(module, {"embeddings": table}):
        assert [name for name, child in module.named_modules(remove_duplicate=False) if child is table] == [
            "embeddings"
        ]
        module.embeddings = nn.Identity()  # type: ignore[assignment]  # as sharding replaces it
    assert module.other["tables"] is module.embeddings
    module.embeddings = module.other["tables"] = table
    assert [name for name, _ in module.named_modules(remove_duplicate=False)] == before


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (
            lambda table: table.weight.register_hook(lambda gradient: 2 * gradient),
            "item.weight has a hook for its grad",
        ),
        (
            lambda table: table.register_forward_hook(lambda *_: None),
            "embeddings has a hook for embeddings.item, which",
        ),
    ],
)
def test_hooks_that_would_not_be_called_are_refused(hook: Any, message: str) -> None:
    module = toy.Model()
    hook(module.embeddings.embeddings["item"])
    with pytest.raises(ConfigurationError, match=message):
        refuse_lost_hooks({"embeddings": module.embeddings})


def fit_with_profiler(rank: int, folder: str) -> list[float]:
    model = toy.Model()
    profiler = PyTorchProfiler(dirpath=folder, filename="profile", export_to_chrome=False)
    trainer = toy.trainer(FreeScaleStrategy(prioritize=True, balance="off"), 2, max_steps=3, profiler=profiler)
    trainer.fit(model, toy.loader())
    return model.losses


def test_a_profiler_of_lightning_has_hooks_for_all_modules(tmp_path: Path) -> None:
    """They record names, so nothing is lost if they are not called."""
    assert [len(losses) for losses in run_ranks(fit_with_profiler, args=(str(tmp_path),))] == [3, 3]


def test_hooks_for_the_backward_of_a_collection_are_refused() -> None:
    module = toy.Model()
    refuse_lost_hooks({"embeddings": module.embeddings})
    module.embeddings.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match="embeddings has a hook for its backward, which would not"):
        refuse_lost_hooks({"embeddings": module.embeddings})


class OwnDdp(toy.Model):
    def configure_model(self) -> None:
        self.head = nn.parallel.DistributedDataParallel(self.head)  # type: ignore[assignment]


class OwnSharding(toy.Model):
    def configure_model(self) -> None:
        self.embeddings = DistributedModelParallel(self.embeddings, device=torch.device("cpu"))  # type: ignore[assignment]


def fit_wrapped(rank: int) -> list[str]:
    messages = []
    for kind in (OwnDdp, OwnSharding):
        with pytest.raises(ConfigurationError) as error:
            toy.trainer(FreeScaleStrategy(), 2).fit(kind(), toy.loader(8))
        messages.append(str(error.value))
    return messages


def test_models_that_wrap_or_shard_themselves_are_refused() -> None:
    for ddp, sharding in run_ranks(fit_wrapped):
        assert ddp.startswith("head is a DistributedDataParallel, but the strategy wraps the model itself")
        assert sharding.startswith(
            "embeddings is a DistributedModelParallel, but the strategy shards the tables itself"
        )
