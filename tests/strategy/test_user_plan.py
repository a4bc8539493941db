"""A plan of the user, or of TorchRec's planner: the training is that of TorchRec with the same plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan

from lightning_freescale import ConfigurationError, FreeScaleStrategy, ZeroCollision, zero_collision
from lightning_freescale.embedding.support import reason_against_prioritizing
from tests import toy
from tests.ranks import run_ranks
from tests.strategy.test_against_torchrec import SAMPLES, STEPS, by_hand, plan_by_hand

SGD = {"optimizer": "sgd", "lr": 0.1}


def make_plan(kind: str, bags: bool) -> ShardingPlan:
    sharder: Any = EmbeddingBagCollectionSharder() if bags else EmbeddingCollectionSharder()
    return plan_by_hand(toy.Model(bags=bags), 2, kind, sharder)


def train(rank: int, kind: str, bags: bool, prioritize: bool) -> tuple[list[float], dict[str, Tensor]]:
    plan = make_plan(kind, bags)
    pl.seed_everything(1, verbose=False)
    model = toy.Model(bags=bags)
    strategy = FreeScaleStrategy(balance="off", prioritize=prioritize, plan=plan, embedding_optimizer=SGD)
    toy.trainer(strategy, 2, max_epochs=-1, max_steps=STEPS).fit(model, toy.loader(SAMPLES))
    return model.losses, toy.weights(model)


@pytest.mark.parametrize(
    ("kind", "bags"),
    [
        ("table_row_wise/table_wise", True),
        ("grid_shard/table_row_wise", True),
        ("data_parallel/row_wise", True),
        ("table_wise/row_wise", False),
    ],
)
def test_equal_to_a_hand_written_loop(kind: str, bags: bool) -> None:
    expected = run_ranks(by_hand, args=(2, kind, "sgd", bags))
    for prioritize in (False, True):
        for by_torchrec, got in zip(expected, run_ranks(train, args=(kind, bags, prioritize)), strict=True):
            assert got[0] == by_torchrec[0]
            assert toy.same(got[1], by_torchrec[1])


def test_the_comparison_can_fail() -> None:
    """The optimizer of a data-parallel table is that of the dense parameters, so another placement trains differently."""
    expected = run_ranks(by_hand, args=(2, "data_parallel/row_wise", "sgd", True))
    assert not toy.same(run_ranks(train, args=("row_wise", True, False))[0][1], expected[0][1])


# ---- the planner -----------------------------------------------------------------------------------------------------
def shardings(model: toy.Model) -> dict[str, str]:
    return {name: entry.sharding_type for name, entry in model.embeddings.module_sharding_plan.items()}


def planned(rank: int) -> list[Any]:
    found: list[Any] = []
    column, table = (ParameterConstraints(sharding_types=[kind]) for kind in ("column_wise", "table_wise"))
    for bags, constraints, topology in (
        (True, {"item": column, "shop": table}, None),
        (False, {"item": ParameterConstraints(sharding_types=["row_wise"])}, Topology(2, "cpu", local_world_size=2)),
    ):
        pl.seed_everything(1, verbose=False)
        model = toy.Model(bags=bags)
        strategy = FreeScaleStrategy(prioritize=True, balance="off", constraints=constraints, topology=topology)
        toy.trainer(strategy, 2, max_steps=4).fit(model, toy.loader())
        found.append((shardings(model), model.losses))
    impossible = {"item": ParameterConstraints(sharding_types=["row_wise"])}
    with pytest.raises(ConfigurationError, match=r"constraints, topology: TorchRec's planner finds no plan\. .*item"):
        toy.trainer(FreeScaleStrategy(constraints=impossible), 2).fit(toy.Model(bags=True), toy.loader())
    return found


def test_torchrecs_planner_keeps_the_constraints() -> None:
    (first, second), other = run_ranks(planned, timeout=100)
    assert first[0] == {"item": "column_wise", "shop": "table_wise"}
    assert second[0]["item"] == "row_wise"
    assert [plan for plan, _ in other] == [first[0], second[0]]
    assert all(torch.isfinite(torch.tensor(losses)).all() and len(losses) == 4 for _, losses in (first, second))


# ---- checkpoints of data-parallel tables -----------------------------------------------------------------------------
def resume(rank: int, folder: str, form: Any) -> tuple[list[float], list[float]]:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(f"{folder}/half.ckpt")

    def trainer(*callbacks: pl.Callback) -> pl.Trainer:
        own = FreeScaleStrategy(
            balance="off", plan=make_plan("data_parallel/row_wise", True), embedding_optimizer=SGD, checkpoint=form
        )
        return toy.trainer(own, 2, max_epochs=-1, max_steps=8, callbacks=list(callbacks))

    pl.seed_everything(1, verbose=False)
    whole, second = toy.Model(bags=True), toy.Model(bags=True)
    trainer(Save()).fit(whole, toy.loader(shuffle=False))
    trainer().fit(second, toy.loader(shuffle=False), ckpt_path=f"{folder}/half.ckpt")
    assert toy.same(toy.weights(whole), toy.weights(second))
    return whole.losses[4:], second.losses


@pytest.mark.parametrize("form", ["file", "sharded"])
def test_a_data_parallel_table_resumes(tmp_path: Path, form: str) -> None:
    for whole, resumed in run_ranks(resume, args=(str(tmp_path), form)):
        assert whole == resumed
        assert len(resumed) == 4


# ---- bad input -------------------------------------------------------------------------------------------------------
def test_options_that_contradict_each_other_are_refused() -> None:
    plan = make_plan("row_wise", False)
    with pytest.raises(ConfigurationError, match="sharding and plan both say how the tables are sharded"):
        FreeScaleStrategy(sharding="row_wise", plan=plan)
    with pytest.raises(ConfigurationError, match="plan and constraints or topology both say"):
        FreeScaleStrategy(plan=plan, constraints={})
    with pytest.raises(ConfigurationError, match="plan: expected a torchrec ShardingPlan, not dict"):
        FreeScaleStrategy(plan={"item": "row_wise"})  # type: ignore[arg-type]


class RawIds(toy.Model):
    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.embeddings, EmbeddingCollection)
        self.embeddings = zero_collision(self.embeddings, {name: ZeroCollision(buckets=4) for name in toy.ROWS})


def refused(rank: int) -> list[str]:
    good = make_plan("row_wise", False)
    dense = make_plan("row_wise", False)
    dense.plan["embeddings"]["shop"].compute_kernel = "dense"  # type: ignore[index]
    found = []
    for model, options in (
        (toy.Model(), {"plan": ShardingPlan({})}),
        (toy.Model(), {"plan": ShardingPlan({"embeddings": {"item": good.plan["embeddings"]["item"]}})}),  # type: ignore[index,dict-item]
        (toy.Model(), {"plan": ShardingPlan({**good.plan, "other": good.plan["embeddings"]})}),
        (toy.Model(), {"plan": dense}),
        (toy.Model(), {"plan": make_plan("data_parallel/row_wise", False)}),
        (toy.Model(), {"constraints": {"items": ParameterConstraints()}}),
        (RawIds(), {"plan": good}),
    ):
        with pytest.raises(ConfigurationError) as error:
            toy.trainer(FreeScaleStrategy(**options), 2).fit(model, toy.loader())  # type: ignore[arg-type]
        found.append(str(error.value))
    return found


def test_plans_that_do_not_fit_are_refused() -> None:
    words = [
        "plan: it has no entry for embeddings; it has nothing",
        "plan: the entry for embeddings has no table 'shop'",
        "plan: the model has no collection named 'other'; it has embeddings",
        "plan: table 'shop' has the compute kernel 'dense'",
        "plan: table 'item' of an EmbeddingCollection cannot be data_parallel on a CPU",
        "constraints: no table named 'items'; the tables are item, shop",
        "embeddings has zero-collision ids, whose rows are placed by bucket",
    ]
    for messages in run_ranks(refused):
        assert all(word in message for word, message in zip(words, messages, strict=True)), messages


def reasons(rank: int) -> list[str | None]:
    """Of plans without and with host memory, with a cache, with rows on a disk, and with a data-parallel table."""
    model = toy.Model()
    toy.trainer(FreeScaleStrategy(plan=make_plan("row_wise", False)), 2, max_steps=1).fit(model, toy.loader())
    module: Any = model.embeddings
    found = [reason_against_prioritizing(module)]
    for kernel in ("fused_uvm", "fused_uvm_caching", "key_value"):
        module.module_sharding_plan["item"].compute_kernel = kernel
        found.append(reason_against_prioritizing(module))
    module.module_sharding_plan["item"].sharding_type = "data_parallel"
    return [*found, reason_against_prioritizing(module)]


def test_what_the_prioritized_exchange_does_not_know_stays_synchronous() -> None:
    expected = [
        None,
        None,
        None,
        "has a table 'item' with the compute kernel key_value",
        "has a table 'item' with data_parallel sharding",
    ]
    assert run_ranks(reasons) == [expected, expected]
