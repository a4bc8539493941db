"""Numbers of ids that the ranks announce in headers: they are those that the exchange of ids would exchange itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_freescale import InputError
from lightning_freescale.embedding import announced_ids, owner_counts
from lightning_freescale.embedding.owner_counts import KnownCounts
from lightning_freescale.transport import direct_calls
from tests.embedding.test_id_exchange import arrived, same
from tests.embedding.training import ROWS, build, build_bags, random_batches, to_kjt
from tests.ranks import run_ranks

FEATURE_ROWS = {"a": ROWS["one"], "b": ROWS["two"], "c": ROWS["two"]}


def announce(kjt: KeyedJaggedTensor, world: int, change: int = 0) -> None:
    """Do what the headers do. ``change`` is added to the numbers of ids that arrive."""
    owner_counts.attach(kjt, kjt, FEATURE_ROWS, world)
    sent = torch.from_numpy(announced_ids.to_announce([kjt], FEATURE_ROWS, world))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    received[:, ::2] += change
    announced_ids.note([kjt], FEATURE_ROWS, received.numpy())


@contextmanager
def counted_transfers() -> Iterator[list[int]]:
    """Notes the number of elements of every transfer of ids inside."""
    transfers: list[int] = []
    start = direct_calls.start_all_to_all

    def counted(received: Tensor, sent: Tensor, *others: Any) -> Any:
        transfers.append(sent.numel())
        return start(received, sent, *others)

    direct_calls.start_all_to_all = counted
    yield transfers
    direct_calls.start_all_to_all = start


def agree(rank: int, world: int, module: Any, samples: Callable[[int, int], int], weighted: bool = False) -> bool:
    """Whether ids arrive as TorchRec sends them, without a transfer of their sizes."""
    known = KnownCounts(module)
    for batch in random_batches(rank, 3, 11, samples):
        kjt = to_kjt(batch, weighted=weighted)
        theirs, their_context, _ = arrived(module.input_dist, module, kjt)
        announce(kjt, world)
        with counted_transfers() as transfers:
            ours, our_context, own = arrived(functools.partial(known.input_dist, ahead=True), module, kjt)
        assert own == 1
        assert len(transfers) == 2 + weighted  # lengths, ids and weights
        if not all(map(same, [*ours, *our_context], [*theirs, *their_context])):
            return False
    return True


def check(rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    for module in (build("row_wise", "sgd", world), build("mixed", "sgd", world), build_bags("row_wise", "sgd", world)):
        assert agree(rank, world, module, lambda rank, step: 3)
        assert agree(rank, world, module, lambda rank, step: 1 + step if rank else 4)  # other batch sizes on each rank
        assert agree(rank, world, module, lambda rank, step: 0 if rank else 2)  # ranks without samples
    weighted = build_bags("row_wise", "sgd", world, weighted=True)
    assert agree(rank, world, weighted, lambda rank, step: 3, weighted=True)

    # A batch that is in training, or about which one rank has announced nothing: the sizes travel, on all ranks.
    known = KnownCounts(module)
    batches = [to_kjt(batch) for batch in random_batches(rank, 3, 11, lambda rank, step: 3)]
    arrived(known.input_dist, module, batches[0])
    announce(batches[1], world)
    for kjt, ahead in ((batches[1], False), (batches[2], True)):
        if kjt is batches[2]:
            owner_counts.attach(kjt, kjt, FEATURE_ROWS, world)
            sent = torch.from_numpy(announced_ids.to_announce([kjt], FEATURE_ROWS, world))
            if rank == 0:
                sent.fill_(-1)
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent)
            announced_ids.note([kjt], FEATURE_ROWS, received.numpy())
            counts = owner_counts.attached(kjt)
            assert counts is not None
            assert counts.arriving == {}
        sizes = known.input_dist(module.create_context(), kjt, ahead=ahead)
        assert all(awaitable._announced is None for awaitable in sizes.awaitables)
        sizes.wait().wait()

    # Ids that change after they were announced are refused.
    announce(batches[0], world)
    batches[0].values().clamp_(max=1)
    with pytest.raises(
        InputError,
        match=f"rank {rank}: the ids of the features a, b, c were changed in place before their batch was in training",
    ):
        known.input_dist(module.create_context(), batches[0], ahead=True)
    dist.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_announced_ids_arrive_as_torchrec_sends_them(world: int) -> None:
    run_ranks(check, world, (world,))


def check_wrong_numbers(rank: int, world: int) -> str:
    dist.init_process_group("gloo")
    module = build("row_wise", "sgd", world)
    kjt = to_kjt(random_batches(rank, 1, 11, lambda rank, step: 3)[0])
    module.input_dist(module.create_context(), kjt).wait().wait()
    announce(kjt, world, change=1)
    try:
        module_ids = KnownCounts(module).input_dist(module.create_context(), kjt, ahead=True).wait().wait()
    except RuntimeError as error:
        return str(error)
    return f"{sum(ids.values().numel() for ids in module_ids)} ids"


def test_wrong_numbers_are_noticed() -> None:
    """The control: the exchange uses the announced numbers, so it cannot succeed with others."""
    assert all("ids" not in text.split() for text in run_ranks(check_wrong_numbers, 2, (2,)))


def test_a_feature_in_two_tensors_is_not_announced() -> None:
    kjts = [KeyedJaggedTensor([name], torch.tensor([3, 9]), lengths=torch.tensor([2])) for name in ("x", "x", "y")]
    rows = {"y": 10, "x": 10, "z": 4}
    for kjt in kjts:
        owner_counts.attach(kjt, kjt, rows, 2)
    numbers = announced_ids.to_announce(kjts, rows, 2)
    assert numbers.shape == (2, announced_ids.numbers_per_rank(rows))
    assert numbers.tolist() == [[-1, -1, 1, 1, -1, -1], [-1, -1, 1, 1, -1, -1]]
    announced_ids.note(kjts, rows, numbers)
    found = [owner_counts.attached(kjt) for kjt in kjts]
    assert [counts.arriving for counts in found if counts] == [{}, {}, {"y": ([1, 1], [1, 1])}]


def test_numbers_of_a_batch_without_tables() -> None:
    assert announced_ids.to_announce([], {}, 3).shape == (3, 0)
    announced_ids.note([], {}, np.empty((3, 0), np.int64))
