"""The learning rate of the tables follows the user's optimizers, schedulers, tuner and monitor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_freescale import ConfigurationError, FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks

BASE = 0.08


class Rates(pl.Callback):
    """Notes the rate that the tables use in every step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        groups = trainer.strategy._sharded.fused_optimizer.param_groups
        self.rates.append(float(groups[0]["lr"]))


def optimizer_of(name: str, model: toy.Model) -> Any:
    """What ``configure_optimizers`` returns in each case."""
    dense = list(model.head.parameters())
    if name == "none":
        return None
    if name == "own group":
        groups = [{"params": dense, "lr": 0.5}, {"params": model.embeddings.parameters(), "lr": 0.2}]
        return torch.optim.SGD(groups, lr=0.5)
    if name == "scheduler of the own group":
        groups = [{"params": dense, "lr": 0.5}, {"params": model.embeddings.parameters(), "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, lr=0.5)
        rules = [lambda step: 1.0, lambda step: 0.5**step]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rules)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if name == "plateau":
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        config = {"scheduler": scheduler, "interval": "step", "monitor": "loss", "strict": True}
        return {"optimizer": optimizer, "lr_scheduler": config}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Model(toy.Model):
    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.name, self)


def rates_of(name: str, explicit: bool) -> list[float]:
    rates = Rates()
    options = {"optimizer": "sgd", "lr": BASE} if explicit else {"optimizer": "sgd"}
    plugin = FreeScaleStrategy(embedding_optimizer=options, balance="off", prioritize=True)
    trainer = toy.trainer(plugin, 2, max_steps=4, callbacks=[rates], max_epochs=1)
    trainer.fit(Model(name), toy.loader())
    return [round(rate, 6) for rate in rates.rates]


CASES = {
    ("none", True): [BASE] * 4,
    ("own group", False): [0.2] * 4,
    ("own group", True): [BASE] * 4,
    ("scheduler of the own group", False): [0.2, 0.1, 0.05, 0.025],
    ("scheduler of the own group", True): [BASE, BASE / 2, BASE / 4, BASE / 8],
    ("step", True): [BASE, BASE / 2, BASE / 4, BASE / 8],
    ("step", False): [0.02, 0.01, 0.005, 0.0025],
}


def all_rates(rank: int) -> list[list[float]]:
    return [rates_of(name, explicit) for name, explicit in CASES]


def test_the_rate_follows_the_group_and_the_scheduler() -> None:
    for found in run_ranks(all_rates):
        for case, rates, expected in zip(CASES, found, CASES.values(), strict=True):
            assert rates == [round(rate, 6) for rate in expected], case


def plateau_rates(rank: int) -> list[float]:
    return rates_of("plateau", True)


def test_reduce_on_plateau_lowers_the_rate_of_the_tables() -> None:
    for rates in run_ranks(plateau_rates):
        assert rates[0] == BASE
        assert rates[-1] < BASE


# ---- several runs of one model ---------------------------------------------------------------------------------------
def fit_twice(rank: int) -> tuple[list[float], list[float]]:
    model, found = Model("step"), []
    for _ in range(2):
        rates = Rates()
        plugin = FreeScaleStrategy(embedding_optimizer={"optimizer": "sgd", "lr": BASE}, balance="off")
        toy.trainer(plugin, 2, max_steps=3, callbacks=[rates]).fit(model, toy.loader())
        found.append(rates.rates)
    return found[0], found[1]


def test_a_second_fit_starts_at_the_full_rate() -> None:
    for first, second in run_ranks(fit_twice):
        assert first == second
        assert first[0] == pytest.approx(BASE)


class Tuned(toy.Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def find_rate(rank: int, folder: str) -> tuple[float, bool]:
    pl.seed_everything(1, verbose=False)
    model, rates = Tuned(), Rates()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plugin = FreeScaleStrategy(embedding_optimizer={"optimizer": "sgd", "lr": BASE}, balance="off")
    trainer = toy.trainer(plugin, 2, max_steps=2, callbacks=[rates], default_root_dir=folder)
    Tuner(trainer).lr_find(model, toy.loader(), num_training=12, update_attr=False)
    restored = toy.same(toy.weights(model), before)
    rates.rates.clear()
    trainer.fit(model, toy.loader())
    return rates.rates[0], restored


def test_the_rate_finder_leaves_weights_and_rate_of_the_tables_alone(tmp_path: Path) -> None:
    for rate, restored in run_ranks(find_rate, args=(str(tmp_path),)):
        assert rate == pytest.approx(BASE)
        assert restored


# ---- monitor, frozen tables, conflicts -------------------------------------------------------------------------------
def fit_monitored(rank: int, folder: str) -> str:
    logger = CSVLogger(folder, name="", version="")
    plugin = FreeScaleStrategy(embedding_optimizer={"optimizer": "sgd", "lr": BASE}, balance="off", monitor=False)
    trainer = toy.trainer(
        plugin, 2, max_steps=3, logger=logger, log_every_n_steps=1, callbacks=[LearningRateMonitor("step")]
    )
    trainer.fit(Model("step"), toy.loader())
    return (Path(folder) / "metrics.csv").read_text() if rank == 0 else ""


def test_the_learning_rate_monitor_shows_the_rate_of_the_tables(tmp_path: Path) -> None:
    header, *rows = run_ranks(fit_monitored, args=(str(tmp_path),))[0].splitlines()
    column = header.split(",").index("lr-tables")
    shown = [float(cells[column]) for cells in (row.split(",") for row in rows) if cells[column]]
    assert shown == pytest.approx([BASE, BASE / 2, BASE / 4])


class Frozen(toy.Model):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.embeddings.parameters():
            parameter.requires_grad = False


def fit_frozen(rank: int, model: type) -> bool:
    pl.seed_everything(1, verbose=False)
    module = model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    strategy = FreeScaleStrategy(
        prioritize=True, balance="off", embedding_optimizer={"optimizer": "adam", "weight_decay": 0.1}
    )
    toy.trainer(strategy, 2, max_epochs=1).fit(module, toy.loader())
    after = toy.weights(module)
    return all(torch.equal(after[name], before[name]) for name in before if name.startswith("embeddings"))


def test_frozen_tables_keep_their_weights() -> None:
    assert run_ranks(fit_frozen, args=(Frozen,)) == [True, True]
    assert run_ranks(fit_frozen, args=(toy.Model,)) == [False, False]


class Tied(toy.Model):
    def __init__(self) -> None:
        super().__init__()
        self.output = torch.nn.Linear(toy.DIM, toy.ROWS["item"], bias=False)
        self.output.weight = self.embeddings.embeddings["item"].weight


def refused(rank: int, case: str) -> str:
    model = Tied() if case == "tied" else toy.Model()
    try:
        toy.trainer(FreeScaleStrategy(), 2, max_steps=1).fit(model, toy.loader())
        if case == "options":
            other = FreeScaleStrategy(embedding_optimizer={"optimizer": "sgd", "lr": 0.1})
            toy.trainer(other, 2, max_steps=1).fit(model, toy.loader())
        if case == "averaging":
            averaging = pl.callbacks.StochasticWeightAveraging(1e-2)
            toy.trainer(FreeScaleStrategy(), 2, max_steps=2, callbacks=[averaging]).fit(toy.Model(), toy.loader())
    except ConfigurationError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("tied", ["output.weight", "tied to the table", "embeddings"]),
        ("options", ["embedding_optimizer", "'sgd'", "an earlier Trainer"]),
        ("averaging", ["StochasticWeightAveraging", "sharded"]),
    ],
)
def test_what_would_silently_be_another_model_is_refused(case: str, words: list[str]) -> None:
    for message in run_ranks(refused, args=(case,)):
        assert all(word in message for word in words), message


class TwoItemTables(toy.Model):
    """Two collections whose tables have the same name. The first one is frozen."""

    tie = False

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(name="item", embedding_dim=toy.DIM, num_embeddings=96, feature_names=["clicks"])
        self.other = EmbeddingCollection(tables=[config])
        for parameter in self.embeddings.parameters():
            parameter.requires_grad = False
        if self.tie:
            self.other.embeddings["item"].weight = self.embeddings.embeddings["item"].weight

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return super().forward(features) + self.other(features)["clicks"].values().sum()


class TwoTiedTables(TwoItemTables):
    tie = True


def fit_two_item_tables(rank: int) -> tuple[dict[str, bool], str]:
    changed = {}
    for prioritize in (False, True):
        module = TwoItemTables()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        strategy = FreeScaleStrategy(prioritize=prioritize, balance="off", find_unused_parameters=True)
        toy.trainer(strategy, 2, max_steps=2).fit(module, toy.loader())
        after = toy.weights(module)
        changed |= {
            f"{name} {prioritize}": not torch.equal(after[name], before[name]) for name in before if "item" in name
        }
    with pytest.raises(ConfigurationError) as refused:
        toy.trainer(FreeScaleStrategy(), 2, max_steps=1).fit(TwoTiedTables(), toy.loader())
    return changed, str(refused.value)


def test_a_frozen_table_freezes_no_other_one_of_its_name_and_tables_of_two_collections_are_not_tied() -> None:
    for changed, message in run_ranks(fit_two_item_tables):
        assert len(changed) == 4
        assert all(trained is name.startswith("other") for name, trained in changed.items()), changed
        assert message.startswith("other.embeddings.item.weight is tied to the table embeddings.embeddings.item.weight")


# ---- schedulers that begin below the highest rate --------------------------------------------------------------------
HIGHEST = 0.5  # of the dense parameters, in all cases


def schedule(name: str, optimizer: torch.optim.Optimizer) -> Any:
    rules = torch.optim.lr_scheduler
    if name == "one cycle":
        return rules.OneCycleLR(optimizer, max_lr=HIGHEST, total_steps=10)
    if name == "cyclic":  # it replaces the rate of the optimizer by base_lr
        return rules.CyclicLR(optimizer, 0.05, HIGHEST, step_size_up=3, cycle_momentum=False)
    if name == "warm restarts":
        return rules.CosineAnnealingWarmRestarts(optimizer, T_0=4)
    warm_up = rules.LinearLR(optimizer, start_factor=0.01, total_iters=3)
    if name == "warm-up":
        return warm_up
    if name == "warm-up and cyclic":
        later = rules.CyclicLR(optimizer, 0.05, HIGHEST, step_size_up=3, cycle_momentum=False)
    else:
        later = rules.CosineAnnealingLR(optimizer, T_max=6)
    return rules.SequentialLR(optimizer, [warm_up, later], milestones=[3])


STARTS = {
    "one cycle": 1 / 25,  # the default of OneCycleLR
    "cyclic": 1 / 10,
    "warm restarts": 1.0,
    "warm-up": 1 / 100,
    "warm-up and cyclic": 1 / 1000,  # to base_lr
    "warm-up and cosine": 1 / 100,
}


class Scheduled(toy.Model):
    def __init__(self, name: str, own_group: bool):
        super().__init__()
        self.name, self.own_group = name, own_group

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.head.parameters()}, {"params": self.embeddings.parameters()}]
        made_with = 0.05 if "cyclic" in self.name else HIGHEST
        optimizer = torch.optim.SGD(groups if self.own_group else self.parameters(), lr=made_with)
        return [optimizer], [{"scheduler": schedule(self.name, optimizer), "interval": "step"}]


class BothRates(Rates):
    """Notes the rate of the dense parameters, too."""

    def __init__(self) -> None:
        super().__init__()
        self.dense: list[float] = []

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        super().on_before_backward(trainer, module, loss)
        self.dense.append(float(trainer.optimizers[0].param_groups[0]["lr"]))


def scheduled_rates(rank: int) -> list[tuple[list[float], list[float], list[float]]]:
    """For each scheduler: the dense rates, those of tables with a rate of their own, and those of tables in a group alone."""
    found = []
    for name in STARTS:
        explicit, own = BothRates(), BothRates()
        for rates, options in ((explicit, {"optimizer": "sgd", "lr": BASE}), (own, {"optimizer": "sgd"})):
            strategy = FreeScaleStrategy(embedding_optimizer=options, balance="off", prioritize=False)
            toy.trainer(strategy, 2, max_steps=9, callbacks=[rates]).fit(Scheduled(name, rates is own), toy.loader())
        found.append((explicit.dense, explicit.rates, own.rates))
    return found


def test_the_highest_rate_of_a_schedule_is_the_rate_of_the_tables() -> None:
    for found in run_ranks(scheduled_rates):
        for (name, start), (dense, tables, own) in zip(STARTS.items(), found, strict=True):
            assert dense[0] == pytest.approx(HIGHEST * start), name
            assert max(dense) == pytest.approx(HIGHEST), name
            assert tables == pytest.approx([BASE * rate / HIGHEST for rate in dense]), name
            assert own == pytest.approx(dense), name
