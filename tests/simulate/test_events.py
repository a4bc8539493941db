"""Engines and links: known cases, and random programs against a reference that advances tick by tick."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_freescale.simulate.events import CONTENTION, DENSE, EMBEDDING, STRAGGLER, SimulatedRanks
from tests.simulate import ticks
from tests.simulate.ticks import Op


def each(*seconds: float) -> np.ndarray:
    return np.array(seconds, dtype=float)


def test_a_wait_is_split_when_the_last_rank_joins() -> None:
    ranks = SimulatedRanks(2, latency=0.25)
    ranks.compute(each(1, 3))
    ranks.wait(ranks.send(each(0.5, 0.75), urgent=True), EMBEDDING)
    assert ranks.now.tolist() == [3.75, 4.0]
    assert ranks.useful.tolist() == [1, 3]
    assert ranks.parts[STRAGGLER].tolist() == [2, 0]
    assert ranks.parts[EMBEDDING].tolist() == [0.75, 1.0]
    assert ranks.parts[DENSE].tolist() == [0, 0]


def test_an_urgent_transfer_interrupts_another_transfer() -> None:
    ranks = SimulatedRanks(1, latency=0.0)
    bulk = ranks.send(each(10), urgent=False)
    ranks.compute(each(4))
    ranks.wait(ranks.send(each(3), urgent=True), EMBEDDING)
    assert ranks.now.tolist() == [7]
    ranks.wait(bulk, EMBEDDING)
    assert ranks.now.tolist() == [13]


def test_a_transfer_after_another_starts_when_the_other_is_done_on_all_ranks() -> None:
    ranks = SimulatedRanks(2, latency=0.0)
    late = ranks.send(each(1, 5), urgent=False)
    next_ = ranks.send(each(2, 2), urgent=False, after=late)
    ranks.compute(each(6, 6))
    ranks.wait(ranks.send(each(1, 1), urgent=True), EMBEDDING)  # interrupts it
    ranks.wait(next_, EMBEDDING)
    assert late.done.tolist() == [1, 5]
    assert next_.done.tolist() == [8, 8]


def test_a_transfer_that_uses_sms_slows_down_compute() -> None:
    ranks = SimulatedRanks(1, latency=1.0)
    ranks.send(
        each(4), urgent=True, slowdown=2.0
    )  # runs from 1 to 5: in these four seconds, compute makes the progress of two
    ranks.compute(each(10))
    assert ranks.now.tolist() == [12]
    assert ranks.parts[CONTENTION].tolist() == [2]
    ranks.compute(each(1))  # the transfer is done
    assert ranks.now.tolist() == [13]


def test_a_transfer_without_sms_does_not_slow_down_compute() -> None:
    ranks = SimulatedRanks(1, latency=0.0)
    ranks.send(each(4), urgent=True)
    ranks.compute(each(10))
    assert ranks.now.tolist() == [10]


def test_an_allreduce_with_a_path_of_its_own_shares_no_link() -> None:
    ends = {}
    for own_path in (False, True):
        ranks = SimulatedRanks(1, latency=0.0)
        rows, reduce = ranks.send(each(4), urgent=True), ranks.send(each(3), urgent=True, own_path=own_path)
        ranks.wait(reduce, DENSE)
        ranks.wait(rows, EMBEDDING)
        ends[own_path] = ranks.now.tolist(), reduce.done.tolist()
    assert ends == {False: ([7], [7]), True: ([4], [3])}


def test_other_work_is_a_part_of_the_bubble() -> None:
    ranks = SimulatedRanks(2, latency=0.0)
    ranks.spend(each(1, 2), EMBEDDING)
    assert ranks.now.tolist() == ranks.parts[EMBEDDING].tolist() == [1, 2]
    assert ranks.useful.tolist() == [0, 0]


def test_an_urgent_transfer_cannot_follow_another() -> None:
    ranks = SimulatedRanks(1, latency=0.0)
    with pytest.raises(ValueError, match="urgent"):
        ranks.send(each(1), urgent=True, after=ranks.send(each(1), urgent=True))


def random_program(rng: np.random.Generator, ranks: int) -> list[Op]:
    """A random sequence of sends, waits and compute. At its end the ranks wait for every send."""
    program: list[Op] = []
    sends: list[bool] = []

    def seconds(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.integers(least, most, ranks).tolist())

    for _ in range(int(rng.integers(3, 25))):
        kind = rng.choice(["compute", "send", "send", "wait"])
        if kind == "compute":
            program.append(Op("compute", seconds(0, 8)))
        elif kind == "send":
            urgent = bool(rng.random() < 0.5)
            follows = not urgent and sends and not sends[-1] and rng.random() < 0.6
            program.append(Op("send", seconds(1, 6), urgent, len(sends) - 1 if follows else None))
            sends.append(urgent)
        elif sends:
            program.append(Op("wait", number=int(rng.integers(len(sends)))))
    return program + [Op("wait", number=number) for number in range(len(sends))]


@pytest.mark.parametrize("seed", range(150))
def test_random_programs_against_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, latency = int(rng.integers(1, 5)), int(rng.integers(0, 3))
    program = random_program(rng, count)
    through, done = ticks.run(program, count, latency)
    ranks, transfers = SimulatedRanks(count, latency), []
    for op in program:
        if op.name == "compute":
            ranks.compute(each(*op.seconds))
        elif op.name == "send":
            after = None if op.after is None else transfers[op.after]
            transfers.append(ranks.send(each(*op.seconds), urgent=op.urgent, after=after))
        else:
            ranks.wait(transfers[op.number], EMBEDDING)
    assert [transfer.done.tolist() for transfer in transfers] == done
    assert ranks.now.tolist() == through
    np.testing.assert_allclose(ranks.useful + sum(ranks.parts.values()), ranks.now)
