"""Ranks whose batches are even already rest, and nobody is left waiting when one of them ends."""

from __future__ import annotations

import doctest
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from lightning_freescale.balance import Planner, rest
from lightning_freescale.balance.exchange import ExchangeLoader
from lightning_freescale.strategy.control import Control
from lightning_freescale.strategy.prefetch import LookaheadLoader
from tests.balance.batches import seq_batch
from tests.balance.test_exchange import connect, local_indices, threads
from tests.ranks import run_ranks


def mostly_even(rank: int, steps: int, uneven: set[int]) -> list[Any]:
    """The same lengths on all ranks, but in the steps ``uneven``, whose samples are worth moving."""
    return [seq_batch(local_indices(rank, step, 2) if step in uneven else [1, 2, 3, 4]) for step in range(steps)]


def _rested(rank: int, uneven: set[int], epochs: list[int]) -> tuple[list[int], list[set[int]]]:
    """Batches looked at, and those that were moved, of epochs of so many batches."""
    exchange = ExchangeLoader([], group=connect(rank), planner=Planner())
    looked_at, moved = [], []
    for steps in epochs:
        before = exchange.stats.looked_at
        loaded = exchange.loader = mostly_even(rank, steps, uneven)
        moved.append(
            {number for number, (given, own) in enumerate(zip(exchange, loaded, strict=True)) if given is not own}
        )
        looked_at.append(exchange.stats.looked_at - before)
    return looked_at, moved


def test_examples() -> None:
    assert doctest.testmod(rest).failed == 0


def test_even_batches_are_soon_let_be() -> None:
    """16 in a row are enough; then the 16th is looked at and the 32nd after that, in the next epoch the 16th again."""
    for looked_at, moved in run_ranks(_rested, args=(set(), [70, 33])):
        assert looked_at == [16 + 2, 1]
        assert moved == [set(), set()]


def test_a_look_that_finds_work_ends_the_rest() -> None:
    """Batches 20 to 24 are missed, 31 is not, and all are looked at again until 16 in a row were even."""
    for looked_at, moved in run_ranks(_rested, args=({20, 21, 22, 23, 24, 31, 32, 40}, [70])):
        assert moved == [{31, 32, 40}]
        assert looked_at == [16 + (1 + 9) + 16]


def _ends_in_rest(rank: int, error: bool) -> tuple[int, str]:
    group, control = connect(rank), Control(timedelta(seconds=20))
    batches = mostly_even(rank, 25 if rank == 1 else 30, set())

    def load() -> Iterator[Any]:
        yield from batches
        if rank == 1 and error:
            raise KeyError("disk of rank 1")

    class Source:
        def __iter__(self) -> Iterator[Any]:
            return load()

    loader = LookaheadLoader(
        ExchangeLoader(Source(), group=group, planner=Planner()),
        stage=lambda batch: (batch, batch.num_samples, None),
        control=control,
        limit=lambda: float("inf"),
        on_stop=lambda: None,
    )
    seen = 0
    try:
        for _ in loader:
            seen += 1
    except Exception as caught:
        return seen, str(caught)
    return seen, ""


@pytest.mark.parametrize(
    ("error", "text"), [(False, "rank 1: the loader ended after 25 batches"), (True, "KeyError: 'disk of rank 1'")]
)
def test_a_rank_that_ends_or_fails_while_all_rest_is_named(error: bool, text: str) -> None:
    (zero, said), (one, also) = run_ranks(_ends_in_rest, args=(error,))
    assert said == also
    assert text in said
    assert zero == one == (24 if not error else 25)


class Threads:
    """Even batches; keeps the names of the threads that have loaded them."""

    def __init__(self, steps: int):
        self.steps, self.names = steps, []  # type: ignore[var-annotated]

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.steps):
            self.names.append(threading.current_thread().name)
            yield seq_batch([1, 2, 3, 4])


def _loaded_by(rank: int) -> tuple[list[str], str]:
    loader = Threads(50)
    for _ in ExchangeLoader(loader, group=connect(rank), planner=Planner()):
        pass
    return loader.names, threading.current_thread().name


def test_the_training_loads_what_nobody_looks_at() -> None:
    """As without balancing: it would pay for a thread beside it with nothing to show for it."""
    for names, training in run_ranks(_loaded_by):
        assert [number for number, name in enumerate(names) if name != training] == [*range(16), 31]


def _given_up_in_rest(rank: int) -> tuple[int, int]:
    """Threads and batches of a second epoch, after a first that ranks leave at different batches, both in the rest."""
    exchange = ExchangeLoader(mostly_even(rank, 60, set()), group=connect(rank), planner=Planner())
    for number, _ in enumerate(exchange):
        if number == 18 + 5 * rank:
            break
    return threads(), sum(1 for _ in exchange)


def test_an_epoch_may_be_given_up_in_the_rest() -> None:
    assert run_ranks(_given_up_in_rest) == [(0, 60), (0, 60)]
