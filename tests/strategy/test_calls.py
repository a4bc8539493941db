"""Calls that differ by rank, by step or from what was announced: they train as TorchRec does, or are errors."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchrec import KeyedJaggedTensor

from lightning_freescale import FreeScaleError, FreeScaleStrategy
from lightning_freescale.embedding import mode_trial, prioritized
from lightning_freescale.embedding.support import CHANGED_IDS, NOT_IN_BATCH
from lightning_freescale.strategy import questions
from lightning_freescale.strategy.control import Control
from tests import toy
from tests.ranks import run_ranks
from tests.strategy.noting import CHECKED_STEPS, Noting, check_few_steps

STEPS = 10
LATE = CHECKED_STEPS + 2  # a step after those in which the ranks tell each other what they have found
SHARDING = {"item": "row_wise", "shop": "table_wise"}


@pytest.fixture(autouse=True)
def _few_checked_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    check_few_steps(monkeypatch)


def mirrored(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same features with other ids of the same tables."""
    parts = [part.max() - part if len(part) else part for part in features.values().split(features.length_per_key())]
    return KeyedJaggedTensor(features.keys(), torch.cat(parts), lengths=features.lengths())


class Changing(toy.Model):
    """Changes its batch in some steps, on some ranks."""

    def __init__(self, ranks: tuple[int, ...] = (0, 1), first: int = 0) -> None:
        super().__init__()
        self.ranks, self.first = ranks, first

    @property
    def changes(self) -> bool:
        return self.global_rank in self.ranks and self.trainer.global_step >= self.first


class Replaces(Changing):
    """Calls its collection with other ids than those of the batch."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return super().forward(mirrored(features) if self.changes else features)


class ReplacesInHook(Changing):
    """Replaces the ids of its batch after the transfer."""

    def on_after_batch_transfer(self, batch: toy.Batch, dataloader_idx: int) -> toy.Batch:
        return dataclasses.replace(batch, features=mirrored(batch.features)) if self.changes else batch


class ReplacesBeforeStep(Changing):
    """Replaces the ids of its batch when its step begins."""

    def on_train_batch_start(self, batch: toy.Batch, batch_idx: int) -> None:
        if self.changes:
            batch.features = mirrored(batch.features)


class ChangesData(Changing):
    """Changes ids in place. No version counter counts this."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        if self.changes:
            features.values().data.copy_(mirrored(features).values())
        return super().forward(features)


class ReplacesTensor(Changing):
    """Replaces the tensor of the ids, with the version of the one before."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        if self.changes:
            features._values = mirrored(features).values()
        return super().forward(features)


class CallsTwice(Changing):
    """Calls its collection once more, on all ranks, in later steps."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        scores = super().forward(features)
        return scores + super().forward(features) if self.changes else scores


class LeavesRowsOut(Changing):
    """The loss of some steps does not depend on the rows, although they are looked up."""

    def loss(self, batch: toy.Batch) -> Tensor:
        loss = super().loss(batch)
        return self.head(torch.ones(1, toy.DIM * len(toy.FEATURES))).mean() if self.changes else loss


class LeavesRowsOutByHand(LeavesRowsOut):
    """The same with manual optimization."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: toy.Batch, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


class MultipliesBy0(Changing):
    """Leaves batches out, as the error of the models above says."""

    def loss(self, batch: toy.Batch) -> Tensor:
        return super().loss(batch) * (not self.changes)


class InEvaluation(toy.Model):
    """Has its collection in evaluation mode. TorchRec updates the tables all the same."""

    def training_step(self, batch: toy.Batch, batch_idx: int) -> Tensor:
        self.embeddings.eval()
        return super().training_step(batch, batch_idx)


class ValidatesWithGradients(toy.Model):
    """Looks up rows with gradients in its validation."""

    def validation_step(self, batch: toy.Batch, batch_idx: int) -> None:
        with torch.enable_grad():
            for _ in range(2):
                assert self(batch.features).requires_grad


class SkipsLookUps(toy.Model):
    """Looks up no rows in every third step, as a model with a task for each kind of batch does."""

    def loss(self, batch: toy.Batch) -> Tensor:
        if len(self.losses) % 3 != 2:
            return super().loss(batch)
        return self.head(torch.ones(2, toy.DIM * len(toy.FEATURES))).square().mean()


class SkipsFeatures(toy.Model):
    """Some batches have no features. Their loss does not depend on the tables."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch.features is not None:
            return super().training_step(batch, batch_idx)
        loss = self.head(torch.ones(2, toy.DIM * len(toy.FEATURES))).square().mean()
        self.losses.append(loss.item())
        return loss


def collate_without(samples: Any) -> toy.Batch:
    """A batch without features in every third step."""
    batch = toy.collate(samples)
    return dataclasses.replace(batch, features=None) if batch.index[0] // 4 % 3 == 1 else batch  # type: ignore[arg-type]


def fit(
    rank: int, model: Any, prioritize: Any, options: dict[str, Any], loader: Any = None, timeout: float = 60.0
) -> dict[str, Any]:
    logging.getLogger("lightning_freescale").setLevel(logging.ERROR)
    pl.seed_everything(1, verbose=False)
    questions.MAX_ANSWER_SECONDS = timeout / 4
    module = model(**options)
    module.reasons, module.prioritized = set(), 0
    optimizer = {"optimizer": "adagrad", "lr": 0.1}
    strategy = Noting(
        prioritize=prioritize, balance="off", sharding=SHARDING, embedding_optimizer=optimizer, timeout=timeout
    )
    trainer = toy.trainer(
        strategy,
        2,
        max_epochs=-1,
        max_steps=STEPS,
        limit_val_batches=1,
        val_check_interval=5,
        num_sanity_val_steps=0,
        inference_mode=False,
    )
    try:
        trainer.fit(module, loader or toy.loader(44), toy.loader(8, shuffle=False))
    except (FreeScaleError, RuntimeError) as error:
        return {"error": "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])}
    return {
        "losses": module.losses,
        "weights": toy.weights(module),
        "reasons": module.reasons - {None},
        "prioritized": module.prioritized,
        "asked": strategy.control is not None and strategy.control._questions._last is not None,
    }


def fit_without_features(rank: int, prioritize: Any) -> dict[str, Any]:
    samples = toy.Samples(48)
    sampler = DistributedSampler(samples, num_replicas=2, rank=rank, shuffle=False)
    loader = DataLoader(samples, batch_size=2, sampler=sampler, collate_fn=collate_without)
    return fit(rank, SkipsFeatures, prioritize, {}, loader)


def check(model: Any, prioritize: Any = True, **options: Any) -> dict[str, Any]:
    """Compare a training with the synchronous one, bit by bit, and return what rank 0 says of it."""
    synchronous = run_ranks(fit, args=(model, False, options))
    found = run_ranks(fit, args=(model, prioritize, options))
    for plain, other in zip(synchronous, found, strict=True):
        assert "error" not in other, other
        assert other["losses"] == plain["losses"]
        assert len(plain["losses"]) == STEPS
        assert toy.same(other["weights"], plain["weights"])
    assert found[0]["reasons"] == found[1]["reasons"]
    assert found[0]["prioritized"] == found[1]["prioritized"]
    return found[0]


ONE, BOTH = (1,), (0, 1)


@pytest.mark.parametrize(
    ("model", "ranks", "first", "reasons", "prioritized"),
    [
        (Replaces, ONE, 0, {NOT_IN_BATCH}, 0),
        (Replaces, BOTH, LATE, {NOT_IN_BATCH}, LATE),
        (ReplacesInHook, ONE, 3, set(), STEPS - 1),
        (ReplacesBeforeStep, BOTH, 3, set(), STEPS - 1),
        (ChangesData, BOTH, 3, {CHANGED_IDS}, 3),
        (ReplacesTensor, BOTH, LATE, {CHANGED_IDS}, LATE),
        (LeavesRowsOut, BOTH, 3, set(), STEPS - 1),
    ],
)
def test_calls_that_change(model: Any, ranks: tuple[int, ...], first: int, reasons: set[str], prioritized: int) -> None:
    found = check(model, ranks=ranks, first=first)
    assert found["reasons"] == reasons
    assert found["prioritized"] == prioritized


def test_one_rank_differs_in_a_synchronous_step() -> None:
    """The first steps of ``"auto"`` are synchronous, so the ranks can still agree."""
    assert check(Replaces, "auto", ranks=ONE, first=3)["reasons"] == {NOT_IN_BATCH}


@pytest.mark.parametrize("model", [Replaces, ReplacesBeforeStep, LeavesRowsOut])
def test_a_rank_that_differs_in_a_prioritized_step_says_so(model: Any) -> None:
    first, second = run_ranks(fit, args=(model, True, {"ranks": ONE, "first": 3}, None, 8.0))
    assert second["error"].startswith("FreeScaleError: rank 1: embeddings is ")
    assert "on this rank but not on rank 0" in second["error"]
    assert "rank 1 ended with FreeScaleError: rank 1: embeddings is " in first["error"]


@pytest.mark.parametrize(
    ("model", "prioritize", "first"),
    [(LeavesRowsOut, False, 3), (LeavesRowsOutByHand, False, 0), (LeavesRowsOut, True, 0)],
)
def test_a_rank_that_leaves_rows_out_of_a_synchronous_step_says_so(model: Any, prioritize: bool, first: int) -> None:
    """With gloo, its next transfer would otherwise abort the process of the other rank."""
    one, other = run_ranks(fit, args=(model, prioritize, {"ranks": ONE, "first": first}, None, 8.0))
    said = (
        "FreeScaleError: rank 1: the loss does not depend on the rows of embeddings, on this rank but not on rank 0. "
    )
    assert other["error"].startswith(said)
    assert f"rank 1 ended with {said}" in one["error"]


def test_rows_that_all_ranks_leave_out() -> None:
    """They ask once. The next steps that leave the rows out ask nothing."""
    first, second = run_ranks(questions_about_rows)
    assert first == second == ["embeddings/no gradients/4"]


def questions_about_rows(rank: int) -> list[str]:
    with noted_questions() as (_, asked):
        assert "error" not in fit(rank, LeavesRowsOut, False, {"ranks": BOTH, "first": 3})
    return asked


def test_a_loss_that_is_multiplied_by_0_leaves_a_batch_out() -> None:
    assert check(MultipliesBy0, ranks=ONE, first=3)["prioritized"] == STEPS - 1


@contextmanager
def noted_questions() -> Iterator[tuple[pytest.MonkeyPatch, list[str]]]:
    """A patch that may have further parts, and what this rank asks the others."""
    asked: list[str] = []
    ask = Control.ask

    def noted(self: Control, question: str) -> list[int]:
        asked.append(question)
        return ask(self, question)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Control, "ask", noted)
        yield patch, asked


def asked_questions(rank: int) -> list[str]:
    """What a rank asks the others in two trials of ``"auto"``, the second one with gradient accumulation."""
    model = ReplacesBeforeStep()
    callbacks = [GradientAccumulationScheduler({1: 3})]
    with noted_questions() as (patch, asked):
        patch.setattr(mode_trial, "BLOCK_STEPS", 2)
        patch.setattr(mode_trial, "MAX_TIME_RATIO", 0)  # the synchronous exchange wins, and its schedule ends
        toy.trainer(FreeScaleStrategy(prioritize="auto", balance="off"), 2, callbacks=callbacks).fit(
            model, toy.loader(80)
        )
    return asked


def test_no_question_is_asked_twice() -> None:
    """Answers stay in the store. A rank that is alone would take those of the first trial for answers."""
    first, second = run_ranks(asked_questions)
    assert first == second
    assert len(first) > 6
    assert len(set(first)) == len(first)


def keys_of_questions(rank: int) -> list[int]:
    """How many keys are in the store after each of some questions."""
    dist.init_process_group("gloo")
    control = Control(timedelta(seconds=20))
    control.open()
    found = []
    for number in range(6):
        assert control.ask(f"question {number}") == []
        dist.barrier()  # gloo uses no store then
        found.append(dist.distributed_c10d._get_default_store().num_keys())
        dist.barrier()
    control.close()
    return found


def test_answers_do_not_collect_in_the_store() -> None:
    """A model that skips its tables in some steps asks in each of them."""
    found = run_ranks(keys_of_questions)[0]
    assert found[2:] == [found[1]] * 4


def test_changes_that_nobody_looks_for_change_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: without the comparison of values, ids that were changed are trained as they were."""
    monkeypatch.setattr(prioritized, "SUMMED_BATCHES", 0)
    options = {"ranks": BOTH, "first": 3}
    plain, found = (run_ranks(fit, args=(ChangesData, mode, options))[0] for mode in (False, True))
    assert found["reasons"] == set()
    assert found["losses"] != plain["losses"]


def test_a_collection_in_evaluation_mode_is_prioritized() -> None:
    found = check(InEvaluation)
    assert found["reasons"] == set()
    assert found["prioritized"] == STEPS - 1


def test_look_ups_with_gradients_in_a_validation_do_not_count() -> None:
    found = check(ValidatesWithGradients)
    assert found["reasons"] == set()
    assert found["prioritized"] == STEPS - 1


def test_steps_without_look_ups_ask_nothing() -> None:
    """A question takes as long as a short step, and such a model would ask in every third one."""
    found = check(SkipsLookUps)
    assert found["reasons"] == set()
    assert not found["asked"]


def test_batches_without_features() -> None:
    synchronous, found = (run_ranks(fit_without_features, args=(mode,)) for mode in (False, True))
    for plain, other in zip(synchronous, found, strict=True):
        assert "error" not in other, other
        assert other["losses"] == plain["losses"]
        assert toy.same(other["weights"], plain["weights"])
        assert other["reasons"] == set()
        assert other["prioritized"] > STEPS // 3
