"""The ranks compare few batches while these are balanced. No rank hangs if another one ends or fails then."""

from __future__ import annotations

import doctest
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from lightning_freescale.balance import Planner
from lightning_freescale.balance.exchange import ExchangeLoader, comparison_schedule
from lightning_freescale.strategy.control import Control
from lightning_freescale.strategy.prefetch import PrefetchLoader, Prepared
from tests.balance.batches import seq_batch
from tests.balance.test_exchange import connect, local_indices, threads
from tests.ranks import run_ranks


def mostly_balanced(rank: int, steps: int, uneven: set[int]) -> list[Any]:
    """Batches of the same lengths on all ranks, except in the steps ``uneven``: there some samples must move."""
    return [seq_batch(local_indices(rank, step, 2) if step in uneven else [1, 2, 3, 4]) for step in range(steps)]


def _compare(rank: int, uneven: set[int], epochs: list[int]) -> tuple[list[int], list[set[int]]]:
    """For epochs of the given numbers of batches: how many batches were compared, and in which samples moved."""
    exchange = ExchangeLoader([], group=connect(rank), planner=Planner())
    compared, moved = [], []
    for steps in epochs:
        before = exchange.stats.compared
        loaded = exchange.loader = mostly_balanced(rank, steps, uneven)
        moved.append(
            {number for number, (given, own) in enumerate(zip(exchange, loaded, strict=True)) if given is not own}
        )
        compared.append(exchange.stats.compared - before)
    return compared, moved


def test_examples() -> None:
    assert doctest.testmod(comparison_schedule).failed == 0


def test_most_balanced_batches_are_not_compared() -> None:
    """After 16 balanced batches the ranks compare the 16th batch and then the 32nd; in the next epoch the 16th again."""
    for compared, moved in run_ranks(_compare, args=(set(), [70, 33])):
        assert compared == [16 + 2, 1]
        assert moved == [set(), set()]


def test_a_comparison_that_moves_samples_ends_the_skipping() -> None:
    """Batches 20 to 24 are skipped, 31 is not. Then all are compared, until 16 in a row are balanced."""
    for compared, moved in run_ranks(_compare, args=({20, 21, 22, 23, 24, 31, 32, 40}, [70])):
        assert moved == [{31, 32, 40}]
        assert compared == [16 + (1 + 9) + 16]


def _ends_while_skipping(rank: int, error: bool) -> tuple[int, str]:
    group, control = connect(rank), Control(timedelta(seconds=20))
    batches = mostly_balanced(rank, 25 if rank == 1 else 30, set())

    def load() -> Iterator[Any]:
        yield from batches
        if rank == 1 and error:
            raise KeyError("disk of rank 1")

    class Source:
        def __iter__(self) -> Iterator[Any]:
            return load()

    loader = PrefetchLoader(
        ExchangeLoader(Source(), group=group, planner=Planner()),
        prepare=lambda batch: Prepared(batch, batch.num_samples),
        control=control,
        limit=lambda _: float("inf"),
        on_request=lambda request: None,
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
def test_a_rank_that_ends_or_fails_in_a_skipped_batch_is_named(error: bool, text: str) -> None:
    (zero, message), (one, other_message) = run_ranks(_ends_while_skipping, args=(error,))
    assert message == other_message
    assert text in message
    assert zero == one == (24 if not error else 25)


class Threads:
    """Yields balanced batches, and keeps the names of the threads that loaded them."""

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


def test_the_training_thread_loads_skipped_batches() -> None:
    """This costs as much as without balancing. A background thread would add cost and gain nothing."""
    for names, training in run_ranks(_loaded_by):
        assert [number for number, name in enumerate(names) if name != training] == [*range(16), 31]


def _stop_while_skipping(rank: int) -> tuple[int, int]:
    """Return the threads after, and the batches of a second epoch. The ranks stop the first at different skipped batches."""
    exchange = ExchangeLoader(mostly_balanced(rank, 60, set()), group=connect(rank), planner=Planner())
    for number, _ in enumerate(exchange):
        if number == 18 + 5 * rank:
            break
    return threads(), sum(1 for _ in exchange)


def test_an_epoch_may_stop_at_a_skipped_batch() -> None:
    assert run_ranks(_stop_while_skipping) == [(0, 60), (0, 60)]
