"""The exchange of ids that takes less host work gives what TorchRec's gives: ids, lengths, weights, and the context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding import id_exchange
from lightning_freescale.embedding.distinct_ids import add_cpu_kernel
from lightning_freescale.embedding.id_exchange import ArrivingIds, RowWiseIds
from lightning_freescale.embedding.owner_counts import KnownCounts
from tests.embedding.training import build, build_bags, random_batches, to_kjt
from tests.ranks import run_ranks

IN_CONTEXT = ("input_splits", "output_splits", "batch_size_per_rank", "sparse_features_recat")


def arrived(input_dist: Any, module: Any, kjt: Any) -> tuple[list[Any], list[Any], int]:
    """The ids of each sharding group, what the context says about them, and the number of exchanges that were not TorchRec's."""
    context = module.create_context()
    arriving = input_dist(context, kjt).wait()
    own = sum(isinstance(awaitable, ArrivingIds) for awaitable in arriving.awaitables)
    received: list[Any] = []
    for features in arriving.wait():
        parts = features.values(), features.lengths(), features.weights_or_none(), features.offsets()
        received += [features.keys(), features.stride(), features.length_per_key(), *parts]
    noted = [getattr(inner, name, None) for inner in context.sharding_contexts for name in IN_CONTEXT]
    return received, noted, own


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def agree(
    rank: int,
    module: Any,
    samples: Callable[[int, int], int],
    weighted: bool = False,
    change: Callable[[KeyedJaggedTensor], KeyedJaggedTensor] = lambda kjt: kjt,
) -> bool:
    """Whether both exchanges give the same for the batches of this rank, after ``change``."""
    row_wise = 0
    known = KnownCounts(module)
    for batch in random_batches(rank, 3, 11, samples):
        kjt = change(to_kjt(batch, weighted=weighted))
        theirs, their_context, number = arrived(module.input_dist, module, kjt)
        assert number == 0
        row_wise = sum(isinstance(part, RwSparseFeaturesDist) for part in module._input_dists)
        ours, our_context, number = arrived(known.input_dist, module, kjt)
        assert number == row_wise
        if not all(map(same, [*ours, *our_context], [*theirs, *their_context])):
            return False
    assert row_wise
    return True


def with_another(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    other = KeyedJaggedTensor(
        ["other"], torch.arange(kjt.stride()), lengths=torch.ones(kjt.stride(), dtype=torch.int64)
    )
    return KeyedJaggedTensor.concat([kjt, other])


def check_ids(rank: int, world: int) -> None:
    """Assert that both exchanges are the same, and that a wrong order is noticed."""
    add_cpu_kernel()
    cases = (
        build("row_wise", "sgd", world),
        build("mixed", "sgd", world),
        build("row_wise", "sgd", world, use_index_dedup=True),
        build_bags("row_wise", "sgd", world),
    )
    for module in cases:
        assert agree(rank, module, lambda rank, step: 3)
        assert agree(rank, module, lambda rank, step: 1 + step if rank else 4)  # other batch sizes on each rank
        assert agree(rank, module, lambda rank, step: 0 if rank else 2)  # ranks without samples
    assert agree(rank, build_bags("row_wise", "sgd", world, weighted=True), lambda rank, step: 3, weighted=True)
    # Features in another order than the tables, and a feature without a table.
    assert agree(rank, build("row_wise", "sgd", world), lambda rank, step: 3, change=lambda kjt: kjt.permute([2, 0, 1]))
    assert agree(rank, build("row_wise", "sgd", world), lambda rank, step: 3, change=with_another)

    order = RowWiseIds.order
    RowWiseIds.order = lambda self, samples, device: order(self, samples, device).flip(0)  # type: ignore[method-assign]
    assert not agree(rank, cases[0], lambda rank, step: 3)
    RowWiseIds.order = order  # type: ignore[method-assign]


def check_on_ranks(rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    check_ids(rank, world)


@pytest.mark.parametrize("world", [2, 3])
def test_ids_arrive_as_torchrec_sends_them(world: int) -> None:
    run_ranks(check_on_ranks, world, (world,))


def check_kept_orders(rank: int, world: int) -> int:
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    ids = RowWiseIds(dist.group.WORLD, 2)
    first = ids.order([1, 1], torch.device("cpu"))
    assert first.tolist() == [0, 2, 1, 3]
    assert ids.order([1, 1], torch.device("cpu")) is first
    assert ids.order([1, 2], torch.device("cpu")).tolist() == [0, 2, 3, 1, 4, 5]
    for samples in range(2 * id_exchange.KEPT_ORDERS):
        ids.order([samples, 0], torch.device("cpu"))
    return len(ids._orders)


def test_a_limited_number_of_orders_is_kept() -> None:
    assert max(run_ranks(check_kept_orders, 2, (2,))) <= id_exchange.KEPT_ORDERS
