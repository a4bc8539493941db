"""``dedup``: each distinct row travels once. The prioritized exchange equals the synchronous one with the same setting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.distributed.embedding import ShardedEmbeddingCollection

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embedding.distinct_ids import DedupTrial, add_cpu_kernel, distinct_ids
from tests import toy
from tests.embedding import training
from tests.embedding.comparison import case, compare
from tests.embedding.training import SHARDINGS, Batches, build, make_schedule, random_batches, tables, train
from tests.ranks import run_ranks

DEDUP = {"use_index_dedup": True}


# ---- the CPU kernel --------------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_distinct_ids_by_hand(data: st.DataObject) -> None:
    """Against sets of (table, id), for tables with several features."""
    features_of_table = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    rows = [data.draw(st.integers(1, 6)) for _ in features_of_table]
    samples = data.draw(st.integers(0, 3))
    cumsum, starts, table_of = [0], [0], []
    for table, count in enumerate(features_of_table):
        cumsum += [cumsum[-1]] * (count - 1) + [cumsum[-1] + rows[table]]
        starts += [starts[-1] + count] * count
        table_of += [table] * count
    lengths = [data.draw(st.integers(0, 4)) for _ in range(len(table_of) * samples)]
    ids, tables_of_ids = [], []
    for place, length in enumerate(lengths):
        table = table_of[place // samples]
        ids += [data.draw(st.integers(0, rows[table] - 1)) for _ in range(length)]
        tables_of_ids += [table] * length
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    got_lengths, got_offsets, distinct, position = distinct_ids(
        torch.tensor(cumsum), torch.tensor(starts), offsets, torch.tensor(ids, dtype=torch.int64)
    )
    assert distinct[position].tolist() == ids  # every id finds its row again
    expected = sorted(set(zip(tables_of_ids, ids, strict=True)))
    assert distinct.tolist() == [row for _, row in expected]
    assert position.tolist() == [expected.index(key) for key in zip(tables_of_ids, ids, strict=True)]
    assert got_offsets.tolist() == torch.cat([torch.zeros(1, dtype=torch.int64), got_lengths.cumsum(0)]).tolist()
    for table in range(len(rows)):  # the features of a table hold its rows
        held = sum(int(got_lengths[place]) for place in range(len(lengths)) if table_of[place // samples] == table)
        assert held == sum(key[0] == table for key in expected) or not samples


# ---- exactness -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [1, 3])
def test_prioritized_equals_synchronous(world: int) -> None:
    add_cpu_kernel()
    cases = [
        case(world, kind=kind, optimizer=optimizer, seed=seed, options=DEDUP)
        for seed, kind in enumerate(SHARDINGS)
        for optimizer in ("sgd", "rowwise_adagrad")
    ]
    cases.append(
        case(
            world,
            kind="mixed",
            optimizer="adagrad",
            samples=lambda rank, step: (rank + step) % 3,
            seed=9,
            options=DEDUP,
        )
    )
    for result in run_ranks(compare, world, args=(world, cases)):
        assert result == [True] * len(cases)


def _sum_of_duplicates(rank: int, batches: list[Batches], kind: str) -> tuple[float, float, int, int]:
    """Largest relative difference of weights without and with dedup, how far they moved, and the rows of both."""
    dist.init_process_group("gloo")
    found, rows = [], []
    for options in ({}, DEDUP):
        module = build(kind, "sgd", len(batches), **options)
        schedule = make_schedule(module)
        train(module, batches[rank], schedule)
        found.append(tables(module))
        rows.append(schedule.modules[0].exchange.stats.rows)
    start = tables(build(kind, "sgd", len(batches)))
    apart = max(float((found[0][key] - found[1][key]).abs().max()) for key in start if start[key].numel())
    moved = max(float((found[0][key] - start[key]).abs().max()) for key in start if start[key].numel())
    return apart, moved, rows[0], rows[1]


@pytest.mark.parametrize("kind", ["row_wise", "mixed"])
def test_without_dedup_the_same_numbers_are_summed_in_another_order(kind: str) -> None:
    add_cpu_kernel()
    batches = [random_batches(rank, 6, 3, lambda r, s: 6) for rank in range(2)]
    for apart, moved, plain_rows, distinct_rows in run_ranks(_sum_of_duplicates, args=(batches, kind)):
        assert apart < 1e-5 * moved
        assert distinct_rows < plain_rows  # fewer rows travel


def forget_duplicates(module: ShardedEmbeddingCollection) -> None:
    """Only the last gradient of a row counts, as if nobody had summed the duplicates."""
    request = module.input_dist

    def without(context: Any, features: Any) -> Any:
        waiting = request(context, features)
        context.reverse_indices = [position.clone().fill_(0) for position in context.reverse_indices]
        return waiting

    module.input_dist = without  # type: ignore[method-assign]


def _wrong_positions(rank: int, batches: list[Batches]) -> bool:
    dist.init_process_group("gloo")
    modules = [build("row_wise", "sgd", 2, **DEDUP) for _ in range(2)]
    forget_duplicates(modules[1])
    losses = [train(module, batches[rank], make_schedule(module)) for module in modules]
    return losses[0] == losses[1]


def test_the_comparison_detects_wrong_positions() -> None:
    add_cpu_kernel()
    batches = [random_batches(rank, 4, 3, lambda r, s: 6) for rank in range(2)]
    assert run_ranks(_wrong_positions, args=(batches,)) == [False, False]


# ---- auto ------------------------------------------------------------------------------------------------------------
def _auto(rank: int, batches: list[Batches], validate_first: bool) -> tuple[bool, bool, list[float], list[float]]:
    """The choice in both modes, and their losses."""
    dist.init_process_group("gloo")
    chosen, losses = [], []
    for prioritized in (False, True):
        module = build("row_wise", "rowwise_adagrad", len(batches), **DEDUP)
        DedupTrial("embeddings", module)
        if validate_first:  # must not decide
            module.eval()
            with torch.no_grad():
                module(training.to_kjt([[[0] * 9] * 3] * 4))["a"].values()
            module.train()
        schedule = make_schedule(module) if prioritized else None
        losses.append(train(module, batches[rank], schedule))
        chosen.append(module._use_index_dedup)
    return chosen[0], chosen[1], losses[0], losses[1]


@pytest.mark.parametrize("repeated", [False, True])
def test_the_first_batch_decides_on_all_ranks_alike(repeated: bool) -> None:
    """Rank 1 alone has no repeated id; its choice follows from the sum over the ranks."""
    add_cpu_kernel()
    distinct = [[[[step, 8 + rank], [rank], []] for _ in range(1)] for rank in range(2) for step in range(1)]
    batches: list[Batches] = []
    for rank in range(2):
        first = [[[1, 1, 1, 1], [2, 2], [2]]] * 3 if repeated and rank == 0 else distinct[rank]
        batches.append([first, *random_batches(rank, 4, 1, lambda r, s: 3)])
    for synchronous, prioritized, expected, got in run_ranks(_auto, args=(batches, True)):
        assert synchronous is prioritized is repeated
        assert got == expected


def _fit(rank: int, dedup: Any, prioritize: bool) -> tuple[list[float], list[bool]]:
    model = toy.Model()
    strategy = FreeScaleStrategy(balance="off", prioritize=prioritize, dedup=dedup)
    trainer = toy.trainer(strategy, 2, max_epochs=1)
    trainer.fit(model, toy.loader())
    modules = [child for child in model.modules() if isinstance(child, ShardedEmbeddingCollection)]
    return model.losses, [module._use_index_dedup for module in modules]


@pytest.mark.parametrize("dedup", [True, "auto"])
def test_the_strategy_trains_alike_in_both_modes(dedup: Any) -> None:
    synchronous, prioritized = (run_ranks(_fit, args=(dedup, mode)) for mode in (False, True))
    assert synchronous == prioritized
    assert all(used == [dedup is True] for _, used in synchronous)  # the toy data repeat no id
