"""Plans of the next batch: they change no value, and they are not used for a batch that has changed."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.models import HSTU, preparation
from lightning_freescale.models.layer_graphs.registry import plans_of
from lightning_freescale.models.preparation import MAX_MISSES, AheadPlan, PlannedBatch, plan_next
from tests.models.test_hstu import planted, tiny, training_batch


def with_next(model: HSTU, batch: Any) -> AheadPlan:
    """Plan ``batch`` as the backward of the step before does it on CUDA."""
    ahead = plans_of.setdefault(model.layers[0], AheadPlan())
    model._trainer = SimpleNamespace(strategy=SimpleNamespace(next_batch=lambda: batch))  # type: ignore[assignment]
    plan = plan_next(model, ahead)
    assert plan is not None
    plan(torch.float32)
    model._trainer = None
    return ahead


def outputs_and_gradients(model: HSTU, batch: SeqBatch) -> list[Tensor]:
    model.zero_grad()
    outputs = model(batch)
    outputs.backward(torch.linspace(-1, 1, outputs.numel()).view_as(outputs))
    return [outputs.detach(), *(value.grad.clone() for value in model.parameters() if value.grad is not None)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("added", [True, False])
def test_a_plan_made_ahead_gives_the_same_bits(added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HSTU, "adds_rows", lambda self, batch: added)  # as on CUDA
    model, batch = tiny(), training_batch(planted(20)[0])
    want = outputs_and_gradients(model, batch)
    ahead = with_next(model, batch)
    attention = ahead._planned and ahead._planned.attention
    model.prepare(batch)
    assert model._prepared is not None
    assert model._prepared.attention is attention
    assert same(outputs_and_gradients(model, batch), want)
    assert ahead.used == 1
    outputs_and_gradients(model, batch)
    assert ahead.used == 1  # it serves one step


def test_a_batch_that_user_code_changes_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny(), training_batch(planted(20)[0])
    old = outputs_and_gradients(model, batch)

    def change_after_plan() -> list[Tensor]:
        with_next(model, batch)
        batch.timestamps.mul_(1000)
        return outputs_and_gradients(model, batch)

    got = change_after_plan()
    want = outputs_and_gradients(model, batch)
    assert same(got, want)
    assert not same(want, old)
    # Negative control: the comparison notices the plan of an older content.
    monkeypatch.setattr(PlannedBatch, "fits", lambda self, model, batch: True)
    copies: list[int] = []
    plan = preparation.plan_histories
    monkeypatch.setattr(preparation, "plan_histories", lambda *given: (copies.append(1), plan(*copied(*given)))[1])
    batch.timestamps.floor_divide_(1000)
    assert not same(change_after_plan(), want)
    assert copies == [1]


def copied(model: HSTU, batch: SeqBatch, offsets: Tensor) -> tuple[HSTU, SeqBatch, Tensor]:
    """The batch with arrays of its own. On a CPU a plan refers to those of the batch."""
    return model, SeqBatch(batch.features, batch.timestamps.clone()), offsets


def test_a_batch_whose_fields_user_code_replaces_is_planned_again() -> None:
    model, batch, other = tiny(), training_batch(planted(20)[0]), training_batch(planted(20, seed=9)[0])
    for name, value in (("timestamps", batch.timestamps * 1000), ("features", other.features)):
        ahead = with_next(model, batch)
        setattr(batch, name, value)
        batch.timestamps = batch.timestamps[:1].repeat(int(batch.lengths.sum()))  # as many as there are events
        got = outputs_and_gradients(model, batch)
        assert ahead.used == 0
        assert same(got, outputs_and_gradients(model, SeqBatch(batch.features, batch.timestamps)))


def test_lengths_that_user_code_changes_are_used() -> None:
    model, batch = tiny(), training_batch([[1, 2, 3, 4], [5, 6], [7, 8, 9]])
    ahead = with_next(model, batch)
    batch.features.lengths()[:2] += torch.tensor([-1, 1])  # an event moves to the next history
    got = outputs_and_gradients(model, batch)
    assert ahead.used == 0
    fresh = training_batch([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    fresh.timestamps = batch.timestamps
    assert same(got, outputs_and_gradients(model, fresh))


def test_a_setting_that_changes_is_used() -> None:
    model, batch = tiny(), training_batch(planted(20)[0])
    ahead = with_next(model, batch)
    model.hparams["cuda_graphs"] = False
    model(batch)
    assert ahead.used == 0


def test_the_end_of_a_training_drops_the_plan() -> None:
    model, batch = tiny(), training_batch(planted(20)[0])
    ahead = with_next(model, batch)
    model.on_train_end()
    assert ahead._planned is None


def test_an_evaluation_leaves_the_plan() -> None:
    model, batch = tiny(), training_batch(planted(20)[0])
    ahead = with_next(model, batch)
    model.eval()
    with torch.no_grad():
        model(training_batch(planted(8, seed=3)[0]))
    model.train()
    model(batch)
    assert ahead.used == 1


def test_steps_on_other_batches_end_the_plans() -> None:
    model, batch, other = tiny(), training_batch(planted(20)[0]), training_batch(planted(20, seed=5)[0])
    for misses in range(MAX_MISSES):
        ahead = with_next(model, batch)
        assert ahead.is_worth_it
        model(other)
        assert ahead.used == 0
        assert ahead.is_worth_it == (misses + 1 < MAX_MISSES)
    model._trainer = SimpleNamespace(strategy=SimpleNamespace(next_batch=lambda: batch))  # type: ignore[assignment]
    assert plan_next(model, ahead) is None
    model.on_train_end()
    assert plan_next(model, ahead) is not None  # the next training tries again
    model._trainer = None


def test_a_hit_forgives_misses() -> None:
    model, batch, other = tiny(), training_batch(planted(20)[0]), training_batch(planted(20, seed=5)[0])
    for _ in range(2 * MAX_MISSES):
        with_next(model, batch)
        model(other)
        ahead = with_next(model, batch)
        model(batch)
    assert ahead.used == 2 * MAX_MISSES
    assert ahead.is_worth_it


@pytest.mark.parametrize("strategy", [None, SimpleNamespace()])
def test_without_a_strategy_that_knows_the_next_batch_nothing_is_planned(strategy: Any) -> None:
    model = tiny()
    if strategy is not None:
        model._trainer = SimpleNamespace(strategy=strategy)  # type: ignore[assignment]
    assert plan_next(model, AheadPlan()) is None
    model._trainer = None


def test_what_is_no_batch_of_histories_is_not_planned() -> None:
    model = tiny()
    for batch in (None, {"a": torch.ones(2)}, (training_batch(planted(3)[0]), 1)):
        ahead = with_next(model, batch)
        assert ahead._planned is None
    tokens = tiny(personalization={"tokens": 2, "segments": 2})
    assert with_next(tokens, training_batch(planted(3)[0]))._planned is None


def test_a_plan_lives_as_long_as_its_model_stays_where_it_is() -> None:
    model, batch = tiny(), training_batch(planted(20)[0])
    with_next(model, batch)
    model.double()
    assert model.layers[0] not in plans_of
    with_next(model, batch)
    first = weakref.ref(model.layers[0])
    del model
    assert first() is None
    assert all(layer is not None for layer in plans_of)
