"""Input that cannot be trained on: an error that names field, value and rank, on every rank, with the good steps done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from lightning_freescale import FreeScaleStrategy, SeqBatch
from lightning_freescale.balance.exchange.comparison_schedule import BALANCED_IN_A_ROW
from tests import toy
from tests.ranks import RankFailed, run_ranks

KEYS = list(toy.FEATURES)


def kjt(values: list[int], lengths: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(KEYS, torch.tensor(values), lengths=torch.tensor(lengths))


def good_batch() -> toy.Batch:
    return toy.Batch(torch.tensor([0, 1]), kjt([1, 2, 3, 4, 5, 6], [1, 1, 1, 1, 1, 1]), torch.tensor([0.0, 1.0]))


def with_features(features: KeyedJaggedTensor, samples: int = 2) -> toy.Batch:
    return toy.Batch(torch.arange(samples), features, torch.zeros(samples))


BAD: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "id above the table": (lambda: with_features(kjt([1, 2, 3, 96, 5, 6], [1] * 6)), ["carts", "96", "0 to 95"]),
    "id below zero": (lambda: with_features(kjt([1, 2, 3, 4, -7, 6], [1] * 6)), ["shops", "-7", "0 to 39"]),
    "negative length": (lambda: with_features(kjt([1, 2, 3, 4], [1, 1, -1, 1, 1, 1])), ["carts", "-1", "sample 0"]),
    "lengths do not sum": (lambda: with_features(kjt([1, 2, 3, 4], [1] * 6)), ["clicks, carts, shops", "6", "4"]),
    "too few weights": (
        lambda: with_features(
            KeyedJaggedTensor(KEYS, torch.arange(6), weights=torch.ones(3), lengths=torch.ones(6, dtype=torch.int64))
        ),
        ["clicks, carts, shops", "3 weights for 6 values"],
    ),
    "empty batch": (lambda: with_features(kjt([], []), 0), ["clicks", "0 samples"]),
    "no batch": (lambda: None, ["batch: None"]),
}


class Loader:
    """Good batches, but number ``bad`` is ``make()`` on rank 1."""

    def __init__(self, rank: int, make: Callable[[], Any], good: Callable[[], Any] = good_batch, bad: int = 3):
        self.rank, self.make, self.good, self.bad = rank, make, good, bad

    def __len__(self) -> int:
        return self.bad + 5

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            yield self.make() if self.rank == 1 and index == self.bad else self.good()


def fit(rank: int, name: str, balance: str, bad: int, done: Any) -> None:
    model = toy.Model()
    try:
        toy.trainer(FreeScaleStrategy(timeout=20, balance=balance), 2, max_epochs=1).fit(
            model, Loader(rank, BAD[name][0], bad=bad)
        )
    finally:
        done[rank] = len(model.losses)


SKIPPED = BALANCED_IN_A_ROW + 4  # a batch that the ranks do not compare, because those before it were balanced


@pytest.mark.parametrize(
    ("name", "balance", "bad"),
    [(name, balance, 3) for name in BAD for balance in ("fixed", "off")]
    + [(name, "fixed", SKIPPED) for name in ("id above the table", "no batch")],
)
def test_bad_batch(name: str, balance: str, bad: int) -> None:
    done = torch.zeros(2, dtype=torch.int64).share_memory_()
    with pytest.raises(RankFailed) as failure:
        run_ranks(fit, args=(name, balance, bad, done), every_error=True)
    assert set(failure.value.errors) == {0, 1}
    for text in failure.value.errors.values():
        message = text[text.rindex("lightning_freescale.runtime.errors.InputError") :]
        assert f"rank 1: batch {bad}:" in message
        assert all(word in message for word in BAD[name][1]), message
    assert done.tolist() == [bad, bad]  # the batches before it are trained


# ---- SeqBatch ----------------------------------------------------------------------------------------------------------
def seq_batch(lengths: list[int], timestamps: int | None = None, rating: list[int] | None = None) -> SeqBatch:
    total = sum(lengths)
    keys, values, all_lengths = ["history"], torch.zeros(total, dtype=torch.int64), list(lengths)
    if rating is not None:
        keys, all_lengths = [*keys, "rating"], all_lengths + rating
        values = torch.zeros(total + sum(rating), dtype=torch.int64)
    features = KeyedJaggedTensor(keys, values, lengths=torch.tensor(all_lengths))
    return SeqBatch(features, torch.zeros(total if timestamps is None else timestamps, dtype=torch.int64))


SEQUENCES: dict[str, tuple[Callable[[], SeqBatch], list[str]]] = {
    "zero-length history": (lambda: seq_batch([2, 0]), ["history", "length 0", "sample 1"]),
    "timestamps missing": (lambda: seq_batch([2, 1], timestamps=2), ["timestamps", "2 values", "3 events"]),
    "feature not aligned": (lambda: seq_batch([2, 1], rating=[1, 2]), ["rating", "history"]),
}


class Sequences(toy.Model):
    def training_step(self, batch: SeqBatch, batch_idx: int) -> torch.Tensor:  # type: ignore[override]
        return self.head(torch.ones(1, len(toy.FEATURES) * toy.DIM)).sum()


def fit_sequences(rank: int, name: str) -> None:
    loader = Loader(rank, SEQUENCES[name][0], good=lambda: seq_batch([2, 1]))
    toy.trainer(FreeScaleStrategy(timeout=20, find_unused_parameters=True), 2, max_epochs=1).fit(Sequences(), loader)


@pytest.mark.parametrize("name", SEQUENCES)
def test_bad_seq_batch(name: str) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(fit_sequences, args=(name,), every_error=True)
    for rank in (0, 1):
        message = failure.value.errors[rank].split("InputError: ")[-1]
        assert message.startswith("rank 1: batch 3:")
        assert all(word in message for word in SEQUENCES[name][1]), message


# ---- loaders that end early or break ----------------------------------------------------------------------------------
class Short(Loader):
    def __init__(self, rank: int, batches: int):
        self.batches = batches if rank == 1 else 8

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        return iter([good_batch() for _ in range(self.batches)])


class Endless(Short):
    """An iterable without a length."""

    __len__ = None  # type: ignore[assignment]


class Broken(Loader):
    def __iter__(self) -> Iterator[Any]:
        yield good_batch()
        if self.rank == 1:
            raise OSError("disk is gone")
        yield from (good_batch() for _ in range(7))


def fit_loader(rank: int, make: Callable[[int], Any]) -> int:
    model = toy.Model()
    toy.trainer(FreeScaleStrategy(timeout=20), 2, max_epochs=1).fit(model, make(rank))
    return len(model.losses)


@pytest.mark.parametrize("kind", [Short, Endless])
@pytest.mark.parametrize("batches", [1, 5])
def test_a_rank_with_fewer_batches(kind: type, batches: int) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(fit_loader, args=(lambda rank: kind(rank, batches),), every_error=True)
    for rank in (0, 1):
        message = failure.value.errors[rank].split("InputError: ")[-1]
        assert f"the loader ended after {batches} batches" in message
        assert "rank 1" in message
        assert "rank 0 has more" in message


def test_a_rank_with_no_samples() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(fit_loader, args=(lambda rank: Endless(rank, 0),), every_error=True)
    for rank in (0, 1):
        message = failure.value.errors[rank].split("InputError: ")[-1]
        assert "the loader ended after 0 batches" in message
        assert "rank 1" in message


def test_equal_loaders_end_without_error() -> None:
    assert run_ranks(fit_loader, args=(lambda rank: Endless(rank, 8),)) == [8, 8]


def test_a_broken_loader() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(fit_loader, args=(lambda rank: Broken(rank, good_batch),), every_error=True)
    for rank in (0, 1):
        assert "rank 1: batch 1: OSError: disk is gone" in failure.value.errors[rank]


# ---- losses ------------------------------------------------------------------------------------------------------------
class Nan(toy.Model):
    at = 3

    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_rank == 1 and batch_idx == self.at else loss


class NanAtTheEnd(Nan):
    at = 31


def fit_nan(rank: int, model: type, path: str | None) -> None:
    import lightning.pytorch as pl

    options: dict[str, Any] = {"max_epochs": 1}
    if path is not None:
        save = pl.callbacks.ModelCheckpoint(dirpath=path, every_n_train_steps=2, save_top_k=-1)
        options |= {"enable_checkpointing": True, "callbacks": [save]}
    toy.trainer(FreeScaleStrategy(timeout=20), 2, **options).fit(model(), toy.loader(128))


@pytest.mark.parametrize("model", [Nan, NanAtTheEnd])
def test_a_nan_loss_ends_training_on_every_rank(model: type) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(fit_nan, args=(model, None), every_error=True)
    for rank in (0, 1):
        assert f"rank 1: loss is nan at step {model.at}" in failure.value.errors[rank]


def test_no_checkpoint_holds_a_nan(tmp_path: Any) -> None:
    with pytest.raises(RankFailed):
        run_ranks(fit_nan, args=(Nan, str(tmp_path)), every_error=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=2.ckpt"]
