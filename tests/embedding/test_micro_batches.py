"""The prioritized exchange of micro-batches gives the bits of the synchronous exchange with the same accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import PoolingType
from torchrec.sparse import jagged_tensor

from lightning_freescale.embedding import collisions
from lightning_freescale.embedding.all_to_all import COLLISION, EXCLUSIVE, RowKind
from lightning_freescale.embedding.collisions import CollisionDetector
from lightning_freescale.embedding.schedule import ExchangeSchedule
from lightning_freescale.embedding.stages import FetchingBatch, ReturningBatch
from lightning_freescale.runtime.streams import SideStream
from tests.embedding.comparison import case, compare
from tests.embedding.training import BAG_SHARDINGS, SHARDINGS, build, build_bags, make_schedule, random_batches, train
from tests.ranks import run_ranks


@pytest.mark.parametrize("world", [1, 3])
def test_every_sharding_and_optimizer(world: int) -> None:
    """Eight batches: complete windows of two, a last window of two of three, and one window."""
    cases = [
        case(world, 8, kind=kind, optimizer=optimizer, seed=seed, window=window)
        for seed, kind in enumerate(SHARDINGS)
        for optimizer, window in (("rowwise_adagrad", 2), ("adam", 3), ("sgd", 3), ("clipped_sgd", 9))
    ]
    for result in run_ranks(compare, world, args=(world, cases)):
        assert result == [True] * len(cases)


def test_every_sharding_and_pooling_of_bags() -> None:
    poolings = [{}, {"pooling": PoolingType.MEAN}, {"weighted": True}]
    cases = [
        case(
            2,
            8,
            kind=kind,
            optimizer="rowwise_adagrad",
            make=build_bags,
            options=poolings[(seed + i) % 3],
            window=window,
        )
        for seed, kind in enumerate(BAG_SHARDINGS)
        for i, window in enumerate((2, 3))
        # the weighted mean is synchronous, and TorchRec divides the sums of row-wise means outside of the tables
        if not (kind in ("row_wise", "mixed") and poolings[(seed + i) % 3].get("pooling"))
    ]
    assert len(cases) >= 8
    for result in run_ranks(compare, 2, args=(2, cases)):
        assert result == [True] * len(cases)


def test_uneven_batches_an_empty_rank_flushes_and_learning_rates() -> None:
    cases = [
        case(
            3,
            9,
            kind=kind,
            optimizer="rowwise_adagrad",
            samples=lambda rank, step: 0 if rank == 1 or step in (0, 3, 4, 5) else 1 + 3 * rank,
            rates=lambda step: 0.1 / (1 + step),
            flush_at=flush_at,
            window=window,
        )
        for kind in SHARDINGS
        for window, flush_at in ((2, (0, 2, 3)), (3, (1, 4, 5, 6)), (3, ()))
    ]
    for result in run_ranks(compare, 3, args=(3, cases)):
        assert result == [True] * len(cases)


# ---- what travels when ----------------------------------------------------------------------------------------------
def transfers(rank: int) -> list[tuple[str, int]]:
    """When rows are read, and when gradients arrive and tables change: what, and the number of the step."""
    dist.init_process_group("gloo")
    module = build("row_wise", "sgd", 2)
    schedule = make_schedule(module)
    exchange = schedule.modules[0].exchange
    found: list[tuple[str, int]] = []
    step = 0

    def note(
        name: str, operation: Callable[..., Any], counts: Callable[..., bool] = lambda *_: True
    ) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if counts(*args):
                found.append((name, step))
            return operation(*args, **kwargs)

        return noted

    def has_rows(batch: FetchingBatch | ReturningBatch, kind: RowKind) -> bool:
        return any(kind in sets for sets in batch.row_sets)

    def advance(_: int) -> None:
        nonlocal step
        step += 1

    for kind, word in ((EXCLUSIVE, "early"), (COLLISION, "urgent")):
        only = lambda batch, given, kind=kind: given == kind and has_rows(batch, kind)  # noqa: E731
        exchange.send_rows = note(f"{word} rows", exchange.send_rows, only)  # type: ignore[method-assign]
        late = {"early": "late", "urgent": "urgent"}[word]
        exchange.gradients.send = note(f"{late} gradients", exchange.gradients.send, only)  # type: ignore[method-assign]
    exchange.gradients.apply_held = note("update", exchange.gradients.apply_held)  # type: ignore[method-assign]
    train(module, random_batches(rank, 10, 1, lambda rank, step: 4), schedule, between=advance, window=3)
    return found


def test_only_the_last_micro_batch_of_a_window_is_urgent() -> None:
    """Steps 0 to 8 in windows of three, and step 9 alone. Step 0 is synchronous, and step 1 fetches its own rows."""
    expected = [
        ("early rows", 1),  # of step 1, which nobody has announced
        ("early rows", 1),  # of step 2
        ("late gradients", 2),  # of step 1
        # The ids of step 0 are not known, so all is urgent once.
        *[(name, 2) for name in ("urgent gradients", "update", "urgent rows")],
    ]
    for first in (3, 6):
        before = [("late gradients", first)] if first > 3 else []  # of the window before
        expected += [
            *before,
            ("early rows", first),
            ("late gradients", first + 1),
            ("early rows", first + 1),
            ("late gradients", first + 2),
            ("early rows", first + 2),  # of the next window, which this window does not read
            *[(name, first + 2) for name in ("urgent gradients", "update", "urgent rows")],
        ]
    expected += [("late gradients", 9), ("urgent gradients", 9), ("update", 9)]
    for found in run_ranks(transfers):
        assert found == expected


# ---- CUDA streams and the host --------------------------------------------------------------------------------------
class NotedStream(SideStream):
    """A stream of a CPU that notes whether it is the current one."""

    is_current = False

    @contextmanager
    def work(self, *after: Any, **options: Any) -> Iterator[None]:
        self.is_current = True
        yield
        self.is_current = False


def streams_of_flags(rank: int) -> list[bool]:
    """Whether the flags of rows were made on the stream of the ids, for each sharding group."""
    dist.init_process_group("gloo")
    module = build("mixed", "sgd", 2)
    schedule = make_schedule(module)
    stream = schedule.modules[0].exchange.finder._ids_stream = NotedStream(torch.device("cpu"))
    found: list[bool] = []

    class Detector(CollisionDetector):
        def __init__(self, *args: Any):
            super().__init__(*args)
            found.append(stream.is_current)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collisions, "CollisionDetector", Detector)
        train(module, random_batches(rank, 6, 1, lambda rank, step: 4), schedule, window=2)
    return found


def test_flags_of_rows_are_made_on_the_stream_that_uses_them() -> None:
    """The stream of the ids does not wait for the model's. That one would clear the flags after the ids have set them."""
    assert run_ranks(streams_of_flags) == [[True, True]] * 2


def counts_by_torchrec(rank: int, make: Any) -> dict[int, int]:
    """How often TorchRec counts the ids of each feature at the owner, by step. On a GPU the host waits for such a count."""
    dist.init_process_group("gloo")
    module = make("row_wise", "sgd", 2)
    schedule = make_schedule(module)
    step, found, count = 0, dict.fromkeys(range(10), 0), jagged_tensor._maybe_compute_length_per_key

    def noted(*args: Any, **kwargs: Any) -> Any:
        at_owner = kwargs["stride"] > 4  # it has the samples of two ranks
        found[step] += at_owner and kwargs["length_per_key"] is None
        return count(*args, **kwargs)

    def advance(_: int) -> None:
        nonlocal step
        step += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jagged_tensor, "_maybe_compute_length_per_key", noted)
        train(module, random_batches(rank, 9, 1, lambda rank, step: 4), schedule, between=advance, window=3)
    return found


@pytest.mark.parametrize("make", [build, build_bags])
def test_the_host_does_not_ask_for_the_ids_of_each_feature(make: Any) -> None:
    for found in run_ranks(counts_by_torchrec, args=(make,)):
        assert found[0] > 0  # the synchronous step, where TorchRec asks
        assert not any(found[step] for step in range(3, 9))


# ---- the comparison can fail ----------------------------------------------------------------------------------------
def never_wait_for_the_last_micro_batch(schedule: ExchangeSchedule) -> None:
    exchange = schedule.modules[0].exchange
    plan_rows = exchange.plan_rows

    def all_early(batch: Any, all_of: RowKind | None = None) -> FetchingBatch:
        return plan_rows(batch, EXCLUSIVE)

    exchange.plan_rows = all_early  # type: ignore[method-assign]


def update_after_every_micro_batch(schedule: ExchangeSchedule) -> None:
    gradients = schedule.modules[0].exchange.gradients
    apply_collisions = gradients.apply_collisions

    def at_once(batch: ReturningBatch) -> None:
        apply_collisions(batch)
        gradients.apply_late()
        gradients.apply_held(batch)

    gradients.apply_collisions = at_once  # type: ignore[method-assign]


def forget_the_micro_batches_before_the_last(schedule: ExchangeSchedule) -> None:
    """When it is decided which rows of the batch after the window are read early."""
    finder = schedule.modules[0].exchange.finder
    find_window = finder.find_window

    def find_last(window: Any, following: Any) -> None:
        find_window(window, following)
        find_window(window[-1:], following)

    finder.find_window = find_last  # type: ignore[method-assign]


def forget_the_late_rows(schedule: ExchangeSchedule) -> None:
    """Rows that the batch after the window does not use are not updated."""
    gradients = schedule.modules[0].exchange.gradients
    apply = gradients.apply

    def without_late(batch: ReturningBatch, kind: RowKind) -> None:
        if kind == EXCLUSIVE and batch.divided and batch.computing.held_by:
            for lookup in batch.computing.held_by:
                if lookup is not None:
                    lookup.late = []
        apply(batch, kind)

    gradients.apply = without_late  # type: ignore[method-assign]


def forget_the_late_gradients(schedule: ExchangeSchedule) -> None:
    gradients = schedule.modules[0].exchange.gradients
    gradients.apply_late = lambda: setattr(gradients, "_late", None)  # type: ignore[method-assign]


def count_every_micro_batch(schedule: ExchangeSchedule) -> None:
    optimizer = schedule.modules[0].exchange.tables.optimizer
    begin_step = optimizer.begin_step
    optimizer.begin_step = lambda counts=True: begin_step()  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "sabotage",
    [
        never_wait_for_the_last_micro_batch,
        update_after_every_micro_batch,
        forget_the_micro_batches_before_the_last,
        forget_the_late_rows,
        forget_the_late_gradients,
        count_every_micro_batch,
    ],
)
def test_the_comparison_detects(sabotage: Callable[[ExchangeSchedule], None]) -> None:
    cases = [case(2, 8, kind="row_wise", optimizer="adam", sabotage=sabotage, window=3)]
    results = run_ranks(compare, 2, args=(2, cases))
    assert [False] in results, "no rank noticed"


def scale_without_a_wait(schedule: ExchangeSchedule) -> None:
    """The window of steps 3 and 4 is not complete, so what step 3 has left is scaled. Its gradients are on their way then."""
    schedule.apply_late = lambda: None  # type: ignore[method-assign]


def test_gradients_on_their_way_are_scaled_too() -> None:
    """The sabotage does nothing to a complete window."""
    cases = [
        case(2, steps, kind="row_wise", optimizer="sgd", sabotage=scale_without_a_wait, window=3) for steps in (6, 5)
    ]
    assert run_ranks(compare, 2, args=(2, cases)) == [[True, False]] * 2


def held_bytes(rank: int) -> list[int]:
    """For a window of one micro-batch, and for one of two with the same ids."""
    dist.init_process_group("gloo")
    found = []
    for steps in (1, 2):
        module = build("row_wise", "sgd", 2)
        batches = random_batches(rank, 1, 1, lambda rank, step: 4) * steps
        train(module, batches, make_schedule(module), window=5)
        found.append(sum(lookup.forward.__self__.applied_bytes for lookup in module._lookups))
    return found


def test_memory_of_held_gradients_is_counted() -> None:
    for one, two in run_ranks(held_bytes):
        assert two == 2 * one > 0
