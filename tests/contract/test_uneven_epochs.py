"""Data without a length that end earlier on some ranks: the ranks stay at the same batch in every epoch."""

from __future__ import annotations

from typing import Any

from lightning_freescale import FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks


class OfUnknownLength:
    """Yields ``batches`` batches of two samples."""

    def __init__(self, batches: int):
        self.batches = batches

    def __iter__(self) -> Any:
        samples = toy.Samples(64)
        return (toy.collate([samples[2 * index], samples[2 * index + 1]]) for index in range(self.batches))


def fit_uneven_epochs(rank: int, uneven: str) -> list[list[int]]:
    module = toy.Model()
    strategy = FreeScaleStrategy(uneven=uneven, balance="off", timeout=10)  # type: ignore[arg-type]
    toy.trainer(strategy, 2, max_epochs=3).fit(module, OfUnknownLength(5 if rank == 0 else 9))
    return [batch[:1] for batch in module.seen]


def test_uneven_data_without_a_length_stay_aligned_over_epochs() -> None:
    first, second = run_ranks(fit_uneven_epochs, args=("stop",))
    assert first == second == 3 * [[2 * index] for index in range(5)]
    first, second = run_ranks(fit_uneven_epochs, args=("continue",))
    assert second == 3 * [[2 * index] for index in range(9)]
    assert len(first) == len(second)
