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


def fit_uneven_epochs(rank: int, uneven: str, balance: str = "off") -> list[list[int]]:
    module = toy.Model()
    strategy = FreeScaleStrategy(uneven=uneven, balance=balance, timeout=10)  # type: ignore[arg-type]
    toy.trainer(strategy, 2, max_epochs=3).fit(module, OfUnknownLength(5 if rank == 0 else 9))
    return [batch[:1] if balance == "off" else batch for batch in module.seen]


def test_uneven_data_without_a_length_stay_aligned_over_epochs() -> None:
    first, second = run_ranks(fit_uneven_epochs, args=("stop",))
    assert first == second == 3 * [[2 * index] for index in range(5)]
    first, second = run_ranks(fit_uneven_epochs, args=("continue",))
    assert second == 3 * [[2 * index] for index in range(9)]
    assert len(first) == len(second)


def test_uneven_data_are_balanced_until_the_first_rank_ends() -> None:
    """Both ranks load the same samples, so each of them is trained twice."""
    first, second = run_ranks(fit_uneven_epochs, args=("stop", "fixed"))
    both = [sorted(own + other) for own, other in zip(first, second, strict=True)]
    assert both == 3 * [sorted(2 * [2 * index, 2 * index + 1]) for index in range(5)]
    first, second = run_ranks(fit_uneven_epochs, args=("continue", "fixed"))
    assert len(first) == len(second) == 27
    assert [second[9 * epoch + 5 :][:4] for epoch in range(3)] == 3 * [[[2 * at, 2 * at + 1] for at in range(5, 9)]]
