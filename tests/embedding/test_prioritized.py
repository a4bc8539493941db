"""The prioritized exchange gives the losses, weights and optimizer state of the synchronous exchange, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.modules.embedding_configs import DataType

from lightning_freescale.embedding import fused_index
from lightning_freescale.embedding.all_to_all import COLLISION, EXCLUSIVE, RowKind
from lightning_freescale.embedding.local_tables import LocalTables
from lightning_freescale.embedding.schedule import ExchangeSchedule
from lightning_freescale.embedding.stages import ComputingBatch, FetchingBatch, ReturningBatch, RoutedBatch
from lightning_freescale.runtime.errors import FreeScaleError
from tests.embedding import training
from tests.embedding.comparison import case, compare
from tests.embedding.training import OPTIMIZERS, SHARDINGS, Batches, build, make_schedule, random_batches, train
from tests.ranks import run_ranks


@pytest.mark.parametrize("world", [1, 4])
def test_every_sharding_and_optimizer(world: int) -> None:
    optimizers = ("sgd", "adagrad", "decayed_rowwise_adagrad", "adam")
    cases = [
        case(world, kind=kind, optimizer=optimizer, seed=seed)
        for seed, kind in enumerate(SHARDINGS)
        for optimizer in (optimizers if world == 2 else optimizers[seed % 2 :: 2])
    ]
    for result in run_ranks(compare, world, args=(world, cases)):
        assert result == [True] * len(cases)


def test_uneven_batches_an_empty_rank_and_steps_without_ids() -> None:
    shapes = [
        lambda rank, step: 0 if (rank + step) % 3 == 0 else 1 + 3 * rank,
        lambda rank, step: 0 if rank == 1 or step in (0, 3, 5) else 4,
    ]
    cases = [
        case(3, kind=kind, optimizer="rowwise_adagrad", samples=shape, seed=10 + i)
        for i, shape in enumerate(shapes)
        for kind in SHARDINGS
    ]
    for result in run_ranks(compare, 3, args=(3, cases)):
        assert result == [True] * len(cases)


def test_one_to_fifty_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_index, "LAST_STAMP", 9)  # the stamps start again several times
    cases = [case(2, steps=steps, kind="row_wise", optimizer="adagrad", seed=steps) for steps in (1, 2, 3, 4, 50)]
    for result in run_ranks(compare, 2, args=(2, cases)):
        assert result == [True] * len(cases)


def test_a_batch_that_replaces_a_prefetched_batch() -> None:
    """Its collisions with the batch before it must be found again."""
    cases = [
        case(2, kind=kind, optimizer="rowwise_adagrad", wrong_prefetch=True, seed=5) for kind in ("row_wise", "mixed")
    ]
    for result in run_ranks(compare, 2, args=(2, cases)):
        assert result == [True] * len(cases)


def read_by_fbgemm(schedule: ExchangeSchedule) -> None:
    """As for tables behind a cache, which exist on a GPU only."""
    tables = schedule.modules[0].exchange.tables
    tables.cached = [True] * len(tables.cached)


def test_rows_that_fbgemm_reads() -> None:
    cases = [
        case(2, kind=kind, optimizer="rowwise_adagrad", sabotage=read_by_fbgemm, samples=lambda rank, step: 4 * rank)
        for kind in ("mixed", "column_wise")
    ]
    for result in run_ranks(compare, 2, args=(2, cases)):
        assert result == [True] * len(cases)


def which_groups_are_cached(rank: int) -> list[list[bool]]:
    """Of a module without a cache, and of the same module if one of its tables had a cache."""
    dist.init_process_group("gloo")
    module = build("mixed", "sgd", 1)
    found = [LocalTables(module).cached]
    # TorchRec's group of tables says "fused" for a table behind a cache, too. The table itself says what it is.
    config = module._lookups[0].grouped_configs[0]
    config.embedding_tables[0].compute_kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING
    assert config.compute_kernel == EmbeddingComputeKernel.FUSED
    return [*found, LocalTables(module).cached]


def test_tables_behind_a_cache_are_found() -> None:
    assert run_ranks(which_groups_are_cached, 1) == [[[False, False], [True, False]]]


def test_learning_rate_of_the_own_step_and_flushes_in_between() -> None:
    cases = [
        case(
            2, steps=12, kind=kind, optimizer=optimizer, rates=lambda step: 0.1 / (1 + step), flush_at=flush_at, seed=4
        )
        for kind in ("row_wise", "mixed")
        for optimizer in ("sgd", "rowwise_adagrad")
        for flush_at in ((), (0, 1, 5, 6, 11))
    ]
    for result in run_ranks(compare, 2, args=(2, cases)):
        assert result == [True] * len(cases)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_data(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 4))
    drawn = []
    for _ in range(4):  # starting processes is slow: run several cases in each set of processes
        ids = st.lists(st.integers(0, 23), max_size=4)
        samples = st.lists(st.tuples(ids, ids, ids).map(list), max_size=3)
        steps = data.draw(st.integers(1, 6))
        batches = [[data.draw(samples) for _ in range(steps)] for _ in range(world)]
        kind, optimizer = data.draw(st.sampled_from(SHARDINGS)), data.draw(st.sampled_from(OPTIMIZERS))
        options = {"data_type": data.draw(st.sampled_from([DataType.FP32, DataType.FP32, DataType.FP16]))}
        window = data.draw(st.sampled_from([1, 1, 2, 3]))  # micro-batches of an optimizer step
        drawn.append({"kind": kind, "optimizer": optimizer, "batches": batches, "options": options, "window": window})
    for result in run_ranks(compare, world, args=(world, drawn)):
        assert result == [True] * len(drawn)


# ---- negative controls: the comparison detects each error ------------------------------------------------------------
def prefetch_every_row(schedule: ExchangeSchedule) -> None:
    def detect(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(first, dtype=torch.bool), torch.zeros_like(second, dtype=torch.bool)

    finder = schedule.modules[0].exchange.finder
    finder.fused, finder.detectors = [], [detect for _ in finder.fused]  # type: ignore[misc]


def skip_the_division(schedule: ExchangeSchedule) -> None:
    gradients = schedule.modules[0].exchange.gradients
    update = gradients.update

    def undivided(group: int, rows: Any, received: torch.Tensor, batch: ComputingBatch) -> None:
        settings = replace(batch.settings, divide_by_ranks=False)
        update(group, rows, received, replace(batch, settings=settings))

    gradients.update = undivided  # type: ignore[method-assign]


def skip_the_reordering(schedule: ExchangeSchedule) -> None:
    gradients = schedule.modules[0].exchange.gradients
    update = gradients.update

    def unordered(group: int, rows: Any, received: torch.Tensor, batch: ComputingBatch) -> None:
        update(group, replace(rows, wire_position=torch.arange(len(rows.owner_wire_order))), received, batch)

    gradients.update = unordered  # type: ignore[method-assign]


def look_up_the_next_row(schedule: ExchangeSchedule) -> None:
    """Applies to tables that are alone in their sharding group: their rows are read in wire order."""
    exchange = schedule.modules[0].exchange
    plan_rows = exchange.plan_rows

    def shifted(batch: RoutedBatch) -> FetchingBatch:
        fetching = plan_rows(batch)
        for sets in fetching.row_sets:
            for kind, rows in sets.items():
                sets[kind] = replace(rows, wire_ids=None if rows.wire_ids is None else rows.wire_ids.roll(1))
        return fetching

    exchange.plan_rows = shifted  # type: ignore[method-assign]


def apply_late_gradients_after_the_prefetch(schedule: ExchangeSchedule) -> None:
    exchange = schedule.modules[0].exchange
    apply_late, send_rows = exchange.gradients.apply_late, exchange.send_rows
    exchange.gradients.apply_late = lambda: None  # type: ignore[method-assign]

    def send_first(batch: FetchingBatch, kind: RowKind) -> None:
        send_rows(batch, kind)
        if kind == EXCLUSIVE:
            apply_late()

    exchange.send_rows = send_first  # type: ignore[method-assign]


def apply_late_gradients_with_the_present_learning_rate(schedule: ExchangeSchedule) -> None:
    optimizer = schedule.modules[0].exchange.tables.optimizer
    optimizer.set_learning_rates = lambda rates: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "sabotage",
    [
        prefetch_every_row,
        skip_the_division,
        skip_the_reordering,
        look_up_the_next_row,
        apply_late_gradients_after_the_prefetch,
        apply_late_gradients_with_the_present_learning_rate,
    ],
    ids=lambda f: f.__name__,
)
def test_the_comparison_detects(sabotage: Any) -> None:
    kind = "table_wise" if sabotage is look_up_the_next_row else "row_wise"
    cases = [
        case(2, kind=kind, optimizer="rowwise_adagrad", sabotage=change, rates=lambda step: 0.1 / (1 + step))
        for change in (sabotage, None)
    ]
    results = run_ranks(compare, 2, args=(2, cases))
    assert not all(result[0] for result in results)
    assert all(result[1] for result in results)


# ---- the order of operations -----------------------------------------------------------------------------------------
def order_of_operations(rank: int) -> list[tuple[str, str, int]]:
    """(operation, kind of rows, batch) in the order in which they happen."""
    dist.init_process_group("gloo")
    module = build("row_wise", "sgd", 2)
    schedule = make_schedule(module)
    exchange = schedule.modules[0].exchange
    seen: list[tuple[str, str, int]] = []
    number: dict[int, int] = {}  # of each batch
    kjts = [training.to_kjt(batch) for batch in random_batches(rank, 5, 0, lambda r, s: 6)]
    operations = {
        "send_rows": (exchange, "send_rows"),
        "send_gradients": (exchange.gradients, "send"),
        "apply_gradients": (exchange.gradients, "apply"),
    }
    for name, (owner, method) in operations.items():
        original = getattr(owner, method)

        def noted(
            batch: FetchingBatch | ReturningBatch, kind: RowKind, name: str = name, original: Any = original
        ) -> None:
            if name != "apply_gradients" or batch.transfers.get(kind):
                seen.append((name, kind, number[id(batch.kjt)]))
            original(batch, kind)

        setattr(owner, method, noted)
    head = torch.nn.Linear(training.DIM, 1)
    number.update({id(kjt): step for step, kjt in enumerate(kjts)})
    for step, kjt in enumerate(kjts):
        schedule.begin_step([kjt], kjts[step + 1 : step + 2], kjts[step + 2 : step + 3])
        loss = head(module(kjt)["a"].values()).sum()
        seen.append(("forward", "", step))
        schedule.before_backward()
        loss.backward()
        seen.append(("backward", "", step))
        schedule.after_backward()
    schedule.flush()
    return seen


def test_exclusive_rows_leave_before_backward_and_collisions_after_it() -> None:
    for seen in run_ranks(order_of_operations):
        for step in (2, 3):  # steps that have neighbours on both sides
            at = seen.index
            assert at(("apply_gradients", EXCLUSIVE, step - 1)) < at(("send_rows", EXCLUSIVE, step + 1))
            assert at(("forward", "", step)) < at(("send_rows", EXCLUSIVE, step + 1)) < at(("backward", "", step))
            assert at(("send_gradients", COLLISION, step)) < at(("backward", "", step))
            assert at(("backward", "", step)) < at(("apply_gradients", COLLISION, step))
            assert at(("apply_gradients", COLLISION, step)) < at(("send_rows", COLLISION, step + 1))
            assert at(("send_rows", COLLISION, step + 1)) < at(("send_gradients", EXCLUSIVE, step))
            assert at(("send_gradients", EXCLUSIVE, step)) < at(("forward", "", step + 1))


def count_collisions(rank: int, batches: list[Batches]) -> tuple[int, int, int]:
    dist.init_process_group("gloo")
    module = build("row_wise", "sgd", len(batches))
    schedule = make_schedule(module)
    train(module, batches[rank], schedule)
    stats = schedule.modules[0].exchange.stats
    return stats.batches, stats.rows, stats.collisions


def test_collisions_are_counted() -> None:
    world, steps = 3, 6
    batches = [random_batches(rank, steps, 3, lambda r, s: 4) for rank in range(world)]
    table = [0, 1, 1]

    def rows(step: int, ranks: range) -> list[tuple[int, int]]:
        return [
            (table[f], i)
            for rank in ranks
            for sample in batches[rank][step]
            for f, ids in enumerate(sample)
            for i in ids
        ]

    for rank, counted in enumerate(run_ranks(count_collisions, world, args=(batches,))):
        # the first step is synchronous, and the second has no prioritized step before it
        expected = sum(
            row in set(rows(step - 1, range(world)))
            for step in range(2, steps)
            for row in rows(step, range(rank, rank + 1))
        )
        total = sum(len(rows(step, range(rank, rank + 1))) for step in range(1, steps))
        assert counted == (steps - 1, total, expected)
        assert 0 < expected < total


# ---- backwards that the exchange does not support ----------------------------------------------------------------------
def unsupported_backwards(rank: int) -> tuple[str, str]:
    """The errors of a second backward through one step, and of a backward through an earlier step."""
    dist.init_process_group("gloo")
    kjts = [training.to_kjt(batch) for batch in random_batches(rank, 3, 0, lambda r, s: 6)]
    errors = []
    for earlier_step in (False, True):
        module = build("row_wise", "sgd", 2)
        schedule = make_schedule(module)
        losses: list[torch.Tensor] = []
        for step, kjt in enumerate(kjts):  # the first step is synchronous
            schedule.begin_step([kjt], kjts[step + 1 : step + 2], kjts[step + 2 : step + 3])
            output = module(kjt)
            losses.append(sum((output[key].values().sum() for key in training.KEYS), torch.zeros(())))
            if step == 1 and earlier_step:
                continue  # no backward in this step
            schedule.before_backward()
            losses[step].backward(retain_graph=True)
            schedule.after_backward()
        with pytest.raises(FreeScaleError) as error:
            losses[1 if earlier_step else 2].backward()
        errors.append(str(error.value))
    return errors[0], errors[1]


def test_unsupported_backwards_are_errors() -> None:
    for twice, late in run_ranks(unsupported_backwards):
        assert "backward ran twice through the embeddings of one step" in twice
        assert "outside of the backward of their own step" in late
