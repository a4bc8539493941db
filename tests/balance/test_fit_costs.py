"""``fit_costs`` with the Trainer: measured steps correct a wrong cost model, equally on all ranks. Nothing else changes.

A fake clock advances by the sum of the squared history lengths of each step. So the true cost of a sample is known, and other
work on the machine does not disturb the test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_freescale import FreeScaleStrategy, SeqBatch, SeqRecDataModule
from lightning_freescale.balance import CostModel, Planner, compute_timer, fixed, loads
from lightning_freescale.models import HSTU
from tests import toy
from tests.ranks import run_ranks
from tests.slow import slow

SQUARE = 1.5e-5  # seconds per squared event
WRONG = CostModel(linear=1.0)  # without the quadratic term
EVERY = 6
SAVED = 16  # steps before the checkpoint
TAIL = 6  # last steps to check; some batches are planned already when the first fitted cost model is used
USERS, BATCH = 360, 12  # 30 steps
SYNTHETIC = {"users": USERS, "items": 50, "clusters": 5, "mean_length": 14, "sigma": 1.0, "max_length": 61, "seed": 0}


class Clock:
    """Replaces the module ``time``."""

    now = 0.0  # seconds

    def perf_counter(self) -> float:
        return self.now


class Sleeper(HSTU):
    """Takes ``SQUARE`` seconds per squared event, ``slow`` times as long on the last rank. Records the samples of each step.

    The last rank is slow before the step ``recovers``.
    """

    slow, recovers = 1.0, 10**9
    clock: Clock
    save: Path | None = None

    def on_train_start(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.shares: list[Any] = []
        self.first = planner(self.trainer)

    def training_step(self, batch: SeqBatch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        lengths = batch.lengths.numpy()
        last = self.trainer.global_rank == self.trainer.world_size - 1
        slow = last and self.trainer.global_step < self.recovers
        self.clock.now += SQUARE * float((lengths**2).sum()) * (self.slow if slow else 1.0)
        self.shares.append(getattr(planner(self.trainer), "shares", None))
        starts = torch.nn.functional.pad(batch.lengths.cumsum(0), (1, 0))[:-1]
        tokens = int(self.num_predicted(batch))
        users = batch.timestamps[starts].tolist()  # the first timestamp of a history identifies its user
        self.steps.append({"users": users, "lengths": lengths, "loss": loss.item() * tokens, "tokens": tokens})
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        dense = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        self.steps[-1]["gradient"] = torch.cat([part.flatten() for part in dense if part is not None]).numpy().copy()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.save is not None and batch_idx == SAVED - 1:
            self.trainer.save_checkpoint(self.save)
            self.trainer.should_stop = True

    def on_train_end(self) -> None:
        self.last = planner(self.trainer)
        self.error = getattr(self.trainer.strategy._balancer.cost_fit, "error", None)


def planner(trainer: pl.Trainer) -> Planner | None:
    """Return the planner of the train loader."""
    balanced = trainer.strategy._balancer._balanced  # type: ignore[attr-defined]
    return balanced[0].planner if balanced else None


def fit(
    rank: int,
    world: int,
    cache: Path,
    source: Any = "off",
    workers: int = 0,
    slow: float = 1.0,
    recovers: int = 10**9,
    epochs: int = 1,
    save: Path | None = None,
    resume: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    settings = {"balance": "off", "fit_costs": EVERY, "embedding_optimizer": {"optimizer": "sgd", "lr": 1e-3}} | options
    strategy = FreeScaleStrategy(**settings)  # type: ignore[arg-type]
    data = SeqRecDataModule(
        batch_size=BATCH // world,
        max_history=60,
        balance=source,
        num_workers=workers,
        num_negatives=4,
        cache_dir=cache,
        synthetic=SYNTHETIC,
    )
    model = Sleeper(data.num_items, embedding_dim=8, num_layers=1, num_heads=1, max_history=60, lr=1e-5)
    model.slow, model.recovers, model.save = slow, recovers, save
    model.clock = compute_timer.time = Clock()  # type: ignore[assignment,attr-defined]
    trainer = toy.trainer(strategy, world, max_epochs=epochs)
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    return {
        "steps": model.steps,
        "first": model.first,
        "last": model.last,
        "error": model.error,
        "shares": model.shares,
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def plain(cache: Path) -> list[dict[str, Any]]:
    return run_ranks(_fit, args=(2, cache, {"prioritize": False}))


def _fit(rank: int, world: int, cache: Path, options: dict[str, Any]) -> dict[str, Any]:
    return fit(rank, world, cache, **options)


def by_step(runs: list[dict[str, Any]], key: str) -> list[tuple[Any, ...]]:
    """Return what each rank recorded, by step."""
    return list(zip(*([step[key] for step in run["steps"]] for run in runs), strict=True))


def same_training(runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    """Check that every step has the same samples, losses and dense gradients, but another partition."""

    def users(of: list[dict[str, Any]]) -> list[list[int]]:
        return [sorted(user for own in step for user in own) for step in by_step(of, "users")]

    def losses(of: list[dict[str, Any]]) -> list[float]:
        return [sum(step) for step in by_step(of, "loss")]

    assert users(runs) == users(plain)
    assert by_step(runs, "users") != by_step(plain, "users")
    assert losses(runs) == pytest.approx(losses(plain), rel=1e-6)
    differences = [
        np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)
        for (mine, *_), (theirs, *_) in zip(by_step(runs, "gradient"), by_step(plain, "gradient"), strict=True)
    ]
    # Rounding of float32: another partition adds the same terms in another order. Terms that cancel make single steps worse.
    # Wrong weights of the ranks would change gradients by more than 1e-3, see test_gradients.py.
    assert np.mean(differences) <= 1e-6
    assert max(differences) <= 1e-5


def saved_costs(path: Path) -> Any:
    """Return the fitted costs in a checkpoint, which is one file or a folder."""
    saved = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=path.is_dir())
    return saved.get("freescale", saved)["balance"]


def excess(runs: list[dict[str, Any]]) -> list[float]:
    """Return for each step how much more work the heaviest rank has than with a partition by true costs."""
    found = []
    for step in by_step(runs, "lengths"):
        costs = np.concatenate(step).astype(float) ** 2
        plan = fixed(costs, len(step))
        found.append(max(float((own**2).sum()) for own in step) / loads(costs, plan, len(step)).max() - 1)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"source": Planner("fixed", WRONG), "prioritize": False},
        slow({"source": Planner("fixed", WRONG), "prioritize": True, "workers": 2}),
        {"balance": Planner("fixed", WRONG), "prioritize": True},
        slow({"balance": Planner("variable", WRONG), "prioritize": False}),
    ],
    ids=["source", "source with workers, prioritized", "exchange, prioritized", "exchange, variable"],
)
def test_a_wrong_cost_model_is_corrected(options: dict[str, Any], cache: Path, plain: list[dict[str, Any]]) -> None:
    runs = run_ranks(_fit, args=(2, cache, options))
    for run in runs:
        assert run["first"].cost_model == WRONG
        assert run["last"] == runs[0]["last"]
        assert run["error"] == runs[0]["error"]
    fitted = runs[0]["last"].cost_model
    assert fitted.quadratic == pytest.approx(SQUARE, rel=0.05)
    assert fitted.quadratic * 60 > 3 * fitted.linear  # for a history of 60 events, most of the cost is quadratic
    same_training(runs, plain)
    if runs[0]["last"].mode == "fixed":  # with variable the shares also matter
        found = excess(runs)
        assert np.mean(found[: 2 * EVERY]) > 0.02
        assert np.mean(found[-TAIL:]) < 0.5 * np.mean(found[: 2 * EVERY])


def test_without_fit_costs_the_cost_model_does_not_change(cache: Path, plain: list[dict[str, Any]]) -> None:
    runs = run_ranks(_fit, args=(2, cache, {"source": Planner("fixed", WRONG), "fit_costs": False}))
    assert all(run["last"] == Planner("fixed", WRONG) and run["error"] is None for run in runs)
    same_training(runs, plain)
    again = run_ranks(_fit, args=(2, cache, {"source": Planner("fixed", WRONG), "fit_costs": False}))
    assert by_step(again, "loss") == by_step(runs, "loss")  # bit for bit


@pytest.mark.slow
def test_with_variable_work_leaves_a_slow_rank_and_comes_back(cache: Path) -> None:
    """The last rank takes twice as long for its work in the first 45 of 90 steps."""
    recovers = 45
    options = {"source": "variable", "slow": 2.0, "recovers": recovers, "epochs": 3, "fit_costs": 4}
    runs = run_ranks(_fit, args=(2, cache, options))
    assert runs[0]["shares"] == runs[1]["shares"]
    shares = runs[0]["shares"]
    assert shares[0] is None  # equal shares
    assert shares[recovers][1] == pytest.approx(1 / 3, abs=0.04)
    assert shares[-1][1] == pytest.approx(1 / 2, abs=0.04)
    work = np.array([[float((own**2).sum()) for own in step] for step in by_step(runs, "lengths")])  # [steps, ranks]
    times = work * np.where(np.arange(len(work))[:, None] < recovers, [1.0, 2.0], 1.0)
    longest = times.max(axis=1) / work.sum(axis=1)  # the time of a step, for one unit of work
    at_first, adapted, recovered = (longest[part].mean() for part in (slice(8), slice(30, recovers), slice(-15, None)))
    assert adapted < at_first - 0.1
    assert recovered < adapted - 0.05


def test_with_variable_every_step_has_the_same_samples(cache: Path, plain: list[dict[str, Any]]) -> None:
    same_training(run_ranks(_fit, args=(2, cache, {"source": "variable", "slow": 2.0})), plain)


@pytest.mark.parametrize(("way", "world"), [slow("source", 2), ("balance", 2), ("source", 3)])
def test_fitted_costs_survive_a_checkpoint_on_any_number_of_ranks(
    way: str, world: int, cache: Path, plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    options = {way: Planner("fixed", WRONG), "prioritize": False}
    path = tmp_path / "fitted.ckpt"
    before = run_ranks(_fit, args=(2, cache, {**options, "save": path}))
    saved = saved_costs(path)
    fitted = before[0]["last"].cost_model
    assert saved == {"cost_model": fitted.state_dict(), "shares": None}
    assert fitted != WRONG
    after = run_ranks(_fit, world, args=(world, cache, {**options, "resume": path}))
    assert all(run["first"] == Planner("fixed", fitted) for run in after)
    assert all(run["last"] == after[0]["last"] for run in after)
    assert all(run["last"].cost_model.quadratic > 0 for run in after)

    def users(of: list[dict[str, Any]]) -> list[int]:
        return [user for step in by_step(of, "users") for own in step for user in own]

    assert len(before[0]["steps"]) == SAVED
    assert sorted(users(before) + users(after)) == sorted(users(plain))  # none twice, none lost


class Epochs(toy.Model):
    """Records at the start of each epoch the number of process groups, the exchange, and its planner."""

    def on_train_epoch_start(self) -> None:
        balancer = self.trainer.strategy._balancer  # type: ignore[attr-defined]
        groups = len(torch.distributed.distributed_c10d._world.pg_map)
        self.epochs = [*getattr(self, "epochs", []), (groups, balancer.exchanges[0], planner(self.trainer))]


def _reload(rank: int, reload: int) -> tuple[list[int], int, list[Planner], list[list[int]]]:
    model = Epochs()
    trainer = toy.trainer(
        FreeScaleStrategy(fit_costs=3, prioritize=True), 2, max_epochs=4, reload_dataloaders_every_n_epochs=reload
    )
    trainer.fit(model, toy.loader(28, batch_size=2))
    groups, exchanges, planners = zip(*model.epochs, strict=True)
    return list(groups), len(set(map(id, exchanges))), list(planners), model.seen


def test_reloaded_loaders_keep_process_groups_and_fitted_costs() -> None:
    runs = run_ranks(_reload, args=(1,))
    for groups, exchanges, planners, _ in runs:
        assert exchanges == 4
        assert groups == [groups[0]] * 4
        assert planners == runs[0][2]
    (groups, exchanges, _, _), _ = run_ranks(_reload, args=(0,))
    assert exchanges == 1
    assert groups[0] == runs[0][0][0]
    for epoch in range(4):  # every sample of an epoch once
        steps = slice(7 * epoch, 7 * (epoch + 1))
        assert sorted(index for run in runs for batch in run[3][steps] for index in batch) == list(range(28))
