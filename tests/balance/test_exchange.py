"""Samples exchanged between real ranks: each arrives once, with all its values, and no rank hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from lightning_freescale.balance import CostModel, Planner, straggler
from lightning_freescale.balance.exchange import ExchangeLoader, PeerFailed
from lightning_freescale.balance.partition import Mode
from lightning_freescale.balance.sample_sizes import sample_sizes
from lightning_freescale.runtime.errors import FreeScaleError, InputError
from lightning_freescale.strategy.control import Control
from lightning_freescale.strategy.prefetch import PrefetchLoader, Prepared
from tests.balance.batches import ad_batch, contents, lengths_of, seq_batch
from tests.ranks import run_ranks

KINDS: dict[str, Callable[[list[int]], Any]] = {"user's": ad_batch, "SeqBatch": seq_batch}


def local_indices(rank: int, step: int, world: int) -> list[int]:
    """Return the samples that a rank loads. Both the samples and their number differ between ranks."""
    count = 3 + (rank + step) % 3
    return [1000 * step + 100 * rank + at for at in range(count)]


class Loader:
    """Local batches of one rank. The loader can fail or end early, and counts its batches."""

    def __init__(self, rank: int, world: int, make: Callable, steps: int = 5, fails_at: int | None = None):
        self.rank, self.world, self.make, self.steps, self.fails_at = rank, world, make, steps, fails_at
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        for step in range(self.steps):
            if step == self.fails_at:
                raise KeyError(f"disk of rank {self.rank}")
            self.given = step + 1
            yield self.make(local_indices(self.rank, step, self.world))

    def __len__(self) -> int:
        return self.steps


def connect(rank: int) -> dist.ProcessGroup:
    dist.init_process_group("gloo")
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=20))


def threads() -> int:
    return sum(thread.name == "freescale-exchange" for thread in threading.enumerate())


# ---- samples that arrive ----


def _balanced(rank: int, world: int, kind: str, mode: Mode) -> list[list[tuple]]:
    exchange = ExchangeLoader(Loader(rank, world, KINDS[kind]), group=connect(rank), planner=Planner(mode))
    return [contents(batch) for batch in exchange]


@pytest.mark.parametrize(
    ("world", "kind", "mode"),
    [(2, "user's", "fixed"), (2, "SeqBatch", "variable"), (3, "SeqBatch", "zigzag"), (4, "user's", "variable")],
)
def test_every_sample_arrives_once_bit_for_bit(world: int, kind: str, mode: Mode) -> None:
    by_rank = run_ranks(_balanced, world=world, args=(world, kind, mode))
    assert {len(steps) for steps in by_rank} == {5}
    for step in range(5):
        sources = [local_indices(rank, step, world) for rank in range(world)]
        everything = contents(KINDS[kind]([index for indices in sources for index in indices]))
        arrived = [by_rank[rank][step] for rank in range(world)]
        assert sorted(sample for own in arrived for sample in own) == sorted(everything)
        place = {repr(sample): at for at, sample in enumerate(everything)}
        for own in arrived:  # ordered by source rank, then by the order there
            assert own
            assert [place[repr(sample)] for sample in own] == sorted(place[repr(sample)] for sample in own)
        if mode != "variable":
            counts = [len(own) for own in arrived]
            assert max(counts) - min(counts) <= 1
    moved = [sample for sample in by_rank[0][1] if sample not in contents(KINDS[kind](local_indices(0, 1, world)))]
    assert moved  # some samples were exchanged


def test_the_comparison_of_samples_detects_a_wrong_value() -> None:
    one, other = contents(ad_batch([3, 4])), contents(ad_batch([3, 4]))
    assert one == other
    batch = ad_batch([3, 4])
    batch.event_time[-1] += 1
    assert contents(batch) != one
    assert contents(ad_batch([4, 3])) != one


def _loads(rank: int, planner: Planner) -> tuple[list[float], dict]:
    group = connect(rank)
    exchange = ExchangeLoader(Loader(rank, 2, seq_batch, steps=20), group=group, planner=planner)
    loads = [float(planner.cost_model(batch.lengths.numpy()).sum()) for batch in exchange]
    return loads, vars(exchange.stats)


def test_loads_become_balanced_and_the_cost_of_the_exchange_is_reported() -> None:
    planner = Planner("fixed", CostModel(1.0))
    before = [
        [sum(1 + lengths_of(index)[1] for index in local_indices(rank, step, 2)) for rank in range(2)]
        for step in range(20)
    ]
    after, stats = zip(*run_ranks(_loads, args=(planner,)), strict=True)
    idle = [np.mean([straggler(step, [0, 1], 2) for step in steps]) for steps in (before, zip(*after, strict=True))]
    assert idle[1] < idle[0] / 2
    for own in stats:
        assert own["batches"] == 20
        assert own["bytes_sent"] > 0
        assert 0 <= own["exposed"] <= own["waited"]
        assert own["exchanging"] > 0


def _even(rank: int) -> tuple[list[bool], dict]:
    """All ranks load batches of the same lengths. Return for each batch whether it is the object that was loaded."""
    loaded = [seq_batch([10 * step + at for at in range(4)]) for step in range(5)]
    exchange = ExchangeLoader(loaded, group=connect(rank), planner=Planner())
    return [given is own for given, own in zip(exchange, loaded, strict=True)], vars(exchange.stats)


def test_samples_of_balanced_batches_do_not_move() -> None:
    for same, stats in run_ranks(_even, world=3):
        assert same == [True] * 5
        assert stats["bytes_sent"] == 0


def _new_planner(rank: int) -> tuple[list[list[tuple]], int]:
    """Every rank gets a new planner at another batch."""
    by_length, by_square = Planner("fixed", CostModel(1.0)), Planner("variable", CostModel(0.0, 1.0))
    exchange = ExchangeLoader(Loader(rank, 3, seq_batch, steps=9), group=connect(rank), planner=by_length)
    steps = []
    for number, batch in enumerate(exchange):
        if number == 2 * rank:
            exchange.planner = by_square
        steps.append(contents(batch))
    return steps, exchange.planners.count


def _planner_of_each_batch(rank: int) -> tuple[int, int]:
    exchange = ExchangeLoader(Loader(rank, 2, seq_batch, steps=9), group=connect(rank), planner=Planner("fixed"))
    for _ in range(4):
        for number, _ in enumerate(exchange):
            exchange.planner = Planner("fixed", CostModel(1.0 + number))
    return exchange.planners.count, exchange.planners.kept


def test_planners_that_no_rank_needs_are_forgotten() -> None:
    for count, kept in run_ranks(_planner_of_each_batch):
        assert count == 37
        assert kept <= 6  # those of the batches that are prepared in advance


def test_ranks_may_get_a_new_planner_at_different_batches() -> None:
    by_rank = run_ranks(_new_planner, world=3)
    assert [planners for _, planners in by_rank] == [2, 2, 2]
    for step in range(9):
        everything = contents(seq_batch([index for rank in range(3) for index in local_indices(rank, step, 3)]))
        assert sorted(sample for own, _ in by_rank for sample in own[step]) == sorted(everything)
    counts = [[len(own[step]) for own, _ in by_rank] for step in range(9)]
    assert max(counts[0]) - min(counts[0]) <= 1


# ---- a rank has no batch ----


def _uneven(rank: int, fails: bool) -> tuple[int, str]:
    loader = Loader(rank, 3, seq_batch, steps=3 if rank == 1 and not fails else 6, fails_at=3 if rank == 1 else None)
    exchange = ExchangeLoader(loader, group=connect(rank), planner=Planner())
    steps = 0
    try:
        for _ in exchange:
            steps += 1
        outcome = "end"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    assert threads() == 0
    return steps, outcome


def test_after_the_end_of_one_rank_the_others_yield_their_own_batches() -> None:
    """The caller decides whether uneven data are an error."""
    assert run_ranks(_uneven, world=3, args=(False,)) == [(6, "end"), (3, "end"), (6, "end")]


def test_a_rank_that_fails_raises_its_own_error_at_that_batch() -> None:
    by_rank = run_ranks(_uneven, world=3, args=(True,))
    assert by_rank[1] == (3, "KeyError: 'disk of rank 1'")
    assert by_rank[0] == by_rank[2] == (3, "PeerFailed: batch 3: not loaded on rank 1; see the error there")


def _refused(rank: int) -> tuple[int, str]:
    def check(batch: Any) -> None:
        if rank == 0 and int(batch.timestamps[0]) >= 2_000_000:
            raise InputError("id 99 is outside its table")

    exchange = ExchangeLoader(Loader(rank, 2, seq_batch), group=connect(rank), planner=Planner(), check=check)
    steps = []
    with pytest.raises(InputError if rank == 0 else PeerFailed) as raised:
        steps.extend(exchange)
    return len(steps), str(raised.value)


def test_a_bad_batch_is_refused_on_the_rank_that_loaded_it() -> None:
    by_rank = run_ranks(_refused)
    assert by_rank == [(2, "id 99 is outside its table"), (2, "batch 2: not loaded on rank 0; see the error there")]


# ---- batches that cannot be split into samples ----


def _plain(rank: int, kind: str) -> tuple[list[Any], str | None, int]:
    """Batches that differ between ranks, that hold a number, or whose layout changes after some steps."""

    def make(indices: list[int]) -> Any:
        step = indices[0] // 1000
        if kind == "ranks differ":
            return seq_batch(indices, feature=rank == 0)
        if kind == "a number":
            return {"batch": seq_batch(indices), "step": step}
        padded = torch.zeros(len(indices), 4 if step < 2 or rank == 0 else 5)
        return {"batch": seq_batch(indices), "padded": padded}

    exchange = ExchangeLoader(
        Loader(rank, 2, make),
        group=connect(rank),
        planner=Planner(),
        sizes=lambda batch: sample_sizes(batch["batch"] if isinstance(batch, dict) else batch),
    )
    epochs = [[contents(batch["batch"] if isinstance(batch, dict) else batch) for batch in exchange] for _ in range(2)]
    assert epochs[0] == epochs[1]
    return epochs[0], exchange.unbalanced, threads()


@pytest.mark.parametrize(
    ("kind", "first_plain", "reasons"),
    [
        ("ranks differ", 0, ["the batches of ranks 0 and 1 differ in batch.features[action]"] * 2),
        ("a number", 0, ["batch['step']: of type int, not a tensor with a row per sample"] * 2),
        ("padding", 2, ["samples cannot be separated on rank 1", "batch: this batch and earlier ones differ in"]),
    ],
)
def test_ranks_train_what_they_load_from_the_first_inseparable_batch_on(
    kind: str, first_plain: int, reasons: list[str]
) -> None:
    by_rank = run_ranks(_plain, args=(kind,))
    for rank, (steps, reason, left) in enumerate(by_rank):
        assert reason is not None
        assert reason.startswith(reasons[rank])
        assert left == 0
        for step in range(5):
            feature = kind != "ranks differ" or rank == 0
            own = contents(seq_batch(local_indices(rank, step, 2), feature=feature))
            assert (steps[step] == own) == (step >= first_plain), step


def _dies(rank: int) -> None:
    exchange = ExchangeLoader(Loader(rank, 2, seq_batch, steps=50), group=connect(rank), planner=Planner())

    def train() -> None:
        for step, _ in enumerate(exchange):
            if rank == 1 and step == 3:
                os._exit(1)

    with pytest.raises(FreeScaleError, match=r"rank 0: the exchange of samples for batch \d+ failed"):
        train()
    with pytest.raises(FreeScaleError, match="the ranks may be at different batches"):
        next(iter(exchange))


def test_a_dead_rank_ends_the_others() -> None:
    with pytest.raises(AssertionError) as raised:
        run_ranks(_dies, every_error=True)
    assert list(raised.value.errors) == [1]  # type: ignore[attr-defined]  # the other rank came back by itself


# ---- stopping an iteration, and starting another one ----


def _stop_early(rank: int) -> list[list[tuple]]:
    exchange = ExchangeLoader(Loader(rank, 2, seq_batch, steps=8), group=connect(rank), planner=Planner())
    for taken in (1, 3, 0, 2):
        iterator = iter(exchange)
        for _ in range(taken):
            next(iterator)
        if taken % 2:
            del iterator  # as at the end of a loop with break
            assert threads() == 0
    return [contents(batch) for batch in exchange]


def test_a_stopped_iteration_neither_hangs_nor_leaks() -> None:
    by_rank = run_ranks(_stop_early)
    for step in range(8):
        everything = contents(seq_batch([index for rank in range(2) for index in local_indices(rank, step, 2)]))
        assert sorted(by_rank[0][step] + by_rank[1][step]) == sorted(everything)


class Steps(Dataset):
    """Item ``step`` is the local batch of that step, for a DataLoader with worker processes."""

    def __init__(self, rank: int):
        self.rank = rank

    def __len__(self) -> int:
        return 6

    def __getitem__(self, step: int) -> Any:
        return seq_batch(local_indices(self.rank, step, 2))


def _with_workers(rank: int) -> list[list[list[tuple]]]:
    loader = DataLoader(Steps(rank), batch_size=None, num_workers=2, persistent_workers=True)
    exchange = ExchangeLoader(loader, group=connect(rank), planner=Planner())
    return [[contents(batch) for batch in exchange] for _ in range(2)]


def test_a_loader_with_worker_processes() -> None:
    zero, one = run_ranks(_with_workers)
    for epoch in range(2):
        for step in range(6):
            everything = contents(seq_batch([index for rank in range(2) for index in local_indices(rank, step, 2)]))
            assert sorted(zero[epoch][step] + one[epoch][step]) == sorted(everything)


class Stateful(Loader):
    def state_dict(self) -> dict:
        return {"given": self.given}


def _state(rank: int) -> tuple[list[dict], bool, bool, int]:
    group = connect(rank)
    exchange = ExchangeLoader(Stateful(rank, 2, seq_batch), group=group, planner=Planner())
    states = [exchange.state_dict() for _ in exchange]
    plain = ExchangeLoader(Loader(rank, 2, seq_batch), group=group, planner=Planner())
    return states, hasattr(exchange, "load_state_dict"), hasattr(plain, "state_dict"), len(plain)


def test_the_state_belongs_to_the_batch_that_was_yielded_last() -> None:
    for states, loads, plain, length in run_ranks(_state):
        assert states == [{"given": number} for number in range(1, 6)]
        assert not loads
        assert not plain
        assert length == 5


# ---- behind the prefetch loader, as the strategy uses it ----


def _prefetched(rank: int, fails_at: int | None) -> tuple[list[list[tuple]], str]:
    group = connect(rank)
    control = Control(timedelta(seconds=20))
    exchange = ExchangeLoader(
        Loader(rank, 2, seq_batch, fails_at=fails_at if rank == 1 else None), group=group, planner=Planner()
    )
    loader = PrefetchLoader(
        exchange,
        prepare=lambda batch: Prepared(batch, batch.num_samples),
        control=control,
        limit=lambda _: 4,
        on_request=lambda request: None,
    )
    seen: list[list[tuple]] = []
    try:
        for batch in loader:
            seen.append(contents(batch.batch))
            assert batch.weights[rank] == batch.batch.num_samples
    except Exception as error:
        return seen, f"{type(error).__name__}: {error}"
    return seen, f"{threads()} threads"


def test_behind_the_prefetch_loader_all_ranks_end_together() -> None:
    (zero, end), (one, other_end) = run_ranks(_prefetched, args=(None,))
    assert end == other_end == "0 threads"
    assert len(zero) == len(one) == 4  # the limit
    for step in range(4):
        everything = contents(seq_batch([index for rank in range(2) for index in local_indices(rank, step, 2)]))
        assert sorted(zero[step] + one[step]) == sorted(everything)


def test_behind_the_prefetch_loader_all_ranks_raise_the_error_of_one() -> None:
    (zero, error), (one, other_error) = run_ranks(_prefetched, args=(2,))
    assert len(zero) == len(one) == 2
    assert "rank 1: batch 2: KeyError: 'disk of rank 1'" in error
    assert error == other_error
