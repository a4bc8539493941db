"""Data that end at different times on different ranks, in prediction, training and validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_freescale import FreeScaleStrategy
from tests import toy
from tests.contract.test_loaders import Stream, fit
from tests.ranks import RankFailed, run_ranks


class Predicts(toy.Model):
    def predict_step(self, batch: toy.Batch, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return torch.stack([batch.index.float(), self(batch.features)], dim=1)


def predict(rank: int, name: str, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    pl.seed_everything(3, verbose=False)
    loaders = [toy.loader(size, batch_size=1, shuffle=False) for size in sizes]
    trainer = toy.trainer("ddp" if name == "ddp" else FreeScaleStrategy(), 2)
    predictions = trainer.predict(Predicts(), loaders if len(loaders) > 1 else loaders[0])
    return [torch.cat(part) for part in (predictions if len(loaders) > 1 else [predictions])]


@pytest.mark.parametrize("sizes", [(9,), (7, 4, 9)], ids=str)
def test_every_sample_is_predicted_once(sizes: tuple[int, ...]) -> None:
    truth = run_ranks(predict, args=("ddp", sizes))
    for expected, result in zip(truth, run_ranks(predict, args=("freescale", sizes)), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


class Shorter(Stream):
    """Rank 1 has two batches fewer than rank 0."""

    def __iter__(self) -> Iterator[toy.Batch]:
        for index, batch in enumerate(super().__iter__()):
            if not (self.bounds[0] > 0 and index >= self.batches - 2):
                yield batch


def shorter(rank: int, world: int) -> DataLoader:
    return DataLoader(Shorter(rank, world), batch_size=None)


class Continued(Stream):
    """What all ranks of :class:`Shorter` train together, on one rank."""

    def __iter__(self) -> Iterator[toy.Batch]:
        samples = toy.Samples(1000)
        for batch in range(self.batches):
            end = self.size if batch < self.batches - 2 else self.size // 3
            yield toy.collate([samples[batch * self.size + index] for index in range(end)])


def continued(rank: int, world: int) -> DataLoader:
    return DataLoader(Continued(rank, world), batch_size=None)


def test_uneven_data_continue_with_empty_ranks_or_stop_with_the_shortest() -> None:
    truth = run_ranks(fit, 1, args=("ddp", 1, continued))[0]["weights"]
    for name in ("synchronous", "prioritized", "balanced"):
        result = run_ranks(_fit_uneven, 2, args=(name, "continue"))
        assert [len(part["losses"]) for part in result] == [6, 6]
        for key, value in truth.items():
            torch.testing.assert_close(result[0]["weights"][key], value, rtol=1e-4, atol=1e-6)
    for name in ("prioritized", "balanced"):
        stopped = run_ranks(_fit_uneven, 2, args=(name, "stop"))
        assert [len(part["losses"]) for part in stopped] == [4, 4]
        with pytest.raises(RankFailed, match="uneven='continue'"):
            run_ranks(_fit_uneven, 2, args=(name, "error"))


def _fit_uneven(rank: int, name: str, uneven: str) -> dict[str, Any]:
    return fit(rank, name, 2, shorter, strategy={"uneven": uneven})


def validate_limited(rank: int) -> int:
    module = toy.Model()
    trainer = toy.trainer(FreeScaleStrategy(), 2, limit_val_batches=3)
    trainer.validate(module, DataLoader(Shorter(rank, 2, batches=5), batch_size=None), verbose=False)
    return 1


def test_a_limit_hides_an_uneven_end() -> None:
    assert run_ranks(validate_limited) == [1, 1]
