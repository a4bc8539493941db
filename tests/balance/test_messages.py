"""The messages of the exchange between real ranks: how many there are, and what they hold when batches are uneven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_freescale.balance import Planner
from lightning_freescale.balance.exchange import ExchangeLoader
from lightning_freescale.balance.exchange.messages import ROW, RankMessages
from lightning_freescale.balance.exchange.split_batch import split_batch
from tests.balance.batches import ad_batch, contents, seq_batch
from tests.balance.test_exchange import KINDS, Loader, connect, local_indices
from tests.ranks import run_ranks

# ---- announcements ----


def rows_of(rank: int, count: int) -> Any:
    return 1000 * rank + np.arange(count * ROW).reshape(count, ROW)


def _announce(rank: int, counts: list[int], capacity: int) -> list[Any]:
    messages = RankMessages(connect(rank))
    own = rows_of(rank, counts[rank])
    announced = messages.announce(rank + 10, rank + 20, counts[rank], own, capacity)
    gathered = messages.gather_rows(own, announced.counts)
    numbers = [part.tolist() for part in announced[:3]]
    return [*numbers, None if announced.rows is None else announced.rows.tolist(), gathered.tolist()]


@pytest.mark.parametrize(
    ("counts", "capacity"),
    [([2, 2, 2], 2), ([3, 0, 1], 3), ([0, 4, 2], 7), ([1, 5, 2], 4), ([2, 0, 0], 0), ([0, 0, 0], 0), ([0, 0, 0], 2)],
)
def test_rows_arrive_with_the_announcement_if_there_is_room_for_all(counts: list[int], capacity: int) -> None:
    expected = [row for rank, count in enumerate(counts) for row in rows_of(rank, count).tolist()]
    for statuses, planners, announced, rows, gathered in run_ranks(_announce, world=3, args=(counts, capacity)):
        assert statuses == [10, 11, 12]
        assert planners == [20, 21, 22]
        assert announced == counts
        assert rows == (expected if max(counts) <= capacity else None)
        assert gathered == expected


# ---- batches of other sizes than before ----

Counts = list[list[int]]


class Sized(Loader):
    """A loader that also decides how many samples each of its batches has."""

    def __init__(self, rank: int, make: Callable, counts: Counts, fails_at: int | None = None):
        super().__init__(rank, len(counts[0]), make, len(counts), fails_at)
        self.counts = counts

    def __iter__(self) -> Any:
        for step in range(self.steps):
            if step == self.fails_at:
                raise KeyError(f"disk of rank {self.rank}")
            yield self.make(sized_indices(self.rank, step, self.counts))


def sized_indices(rank: int, step: int, counts: Counts) -> list[int]:
    return [1000 * step + 100 * rank + at for at in range(counts[step][rank])]


def count_gathers(exchange: ExchangeLoader) -> list[int]:
    """Return a list of one number, which grows with every gather of ``exchange``."""
    gathers, gather = [0], exchange._messages._gather

    def counted(message: Any) -> Any:
        gathers[0] += 1
        return gather(message)

    exchange._messages._gather = counted  # type: ignore[method-assign]
    return gathers


def _sized(rank: int, kind: str, counts: Counts) -> tuple[list[list[tuple]], int]:
    loader = Sized(rank, KINDS[kind], counts)
    exchange = ExchangeLoader(loader, group=connect(rank), planner=Planner("variable"))
    gathers = count_gathers(exchange)
    return [contents(batch) for batch in exchange], gathers[0]


@pytest.mark.parametrize(
    ("kind", "counts", "second_gathers"),
    [
        ("user's", [[4, 3], [4, 4], [3, 4], [2, 2]], 1),  # only the first batch needs a second gather
        ("SeqBatch", [[2, 2], [3, 2], [3, 3], [2, 6], [6, 5]], 3),  # some batches are larger than all before
        ("user's", [[3, 0], [0, 3], [0, 0], [4, 0], [4, 1]], 2),  # ranks without samples, also in the first batch
        ("SeqBatch", [[3, 0], [0, 3], [0, 0], [4, 0], [4, 1]], 2),
        ("SeqBatch", [[0, 0], [3, 1], [2, 3]], 1),  # the first batch has no samples at all
    ],
)
def test_a_second_gather_only_follows_if_a_batch_is_larger_than_all_before(
    kind: str, counts: Counts, second_gathers: int
) -> None:
    by_rank = run_ranks(_sized, args=(kind, counts))
    for step in range(len(counts)):
        everything = contents(KINDS[kind]([at for rank in range(2) for at in sized_indices(rank, step, counts)]))
        assert sorted(sample for own, _ in by_rank for sample in own[step]) == sorted(everything)
    end_of_data = 1
    assert [gathers for _, gathers in by_rank] == [len(counts) + second_gathers + end_of_data] * 2


# ---- a rank fails ----


def _fails(rank: int, fails_at: int) -> tuple[int, str, int]:
    loader = Sized(rank, seq_batch, [[2, 3], [4, 2], [3, 1], [6, 6]], fails_at if rank == 1 else None)
    exchange = ExchangeLoader(loader, group=connect(rank), planner=Planner())
    gathers, steps = count_gathers(exchange), 0
    try:
        for _ in exchange:
            steps += 1
    except Exception as error:
        return steps, f"{type(error).__name__}: {error}", gathers[0]
    raise AssertionError("no error")


@pytest.mark.parametrize(("fails_at", "gathers"), [(0, 1), (1, 3), (2, 5), (3, 6)])
def test_all_ranks_learn_of_a_failure_before_rows_that_do_not_fit(fails_at: int, gathers: int) -> None:
    """The rank that fails announces no samples. In the last case the other rank has more than ever before."""
    failed = f"PeerFailed: batch {fails_at}: not loaded on rank 1; see the error there"
    assert run_ranks(_fails, args=(fails_at,)) == [
        (fails_at, failed, gathers),
        (fails_at, "KeyError: 'disk of rank 1'", gathers),
    ]


# ---- statistics ----


def _sent(rank: int, kind: str) -> tuple[list[list[tuple]], int]:
    exchange = ExchangeLoader(Loader(rank, 3, KINDS[kind]), group=connect(rank), planner=Planner("variable"))
    return [contents(batch) for batch in exchange], exchange.stats.bytes_sent


def sample_bytes(batch: Any) -> int:
    """The bytes of a batch of one sample: its tensors, and a length per jagged tensor and one more."""
    split = split_batch(batch)
    return sum(tensor.rows.nbytes for tensor in split.tensors) + 8 * (len(split.length_names) + 1)


@pytest.mark.parametrize(("kind", "make"), [("user's", ad_batch), ("SeqBatch", seq_batch)])
def test_bytes_sent_are_those_of_the_samples_that_move(kind: str, make: Callable[[list[int]], Any]) -> None:
    for rank, (steps, sent) in enumerate(run_ranks(_sent, world=3, args=(kind,))):
        expected = 0
        for step, arrived in enumerate(steps):
            for index in local_indices(rank, step, 3):
                (sample,) = contents(make([index]))
                expected += 0 if sample in arrived else sample_bytes(make([index]))
        assert sent == expected
        assert sent > 0
