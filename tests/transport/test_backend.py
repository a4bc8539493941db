"""The collectives of the freescale backend on CPU, compared with gloo and with results computed by slicing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailed, run_ranks
from tests.transport.collectives import (
    DTYPES,
    ENGINES,
    all_to_all_case,
    in_group,
    random_tensor,
    same_bits,
    with_each_engine,
)


def run_with_each_engine(fn: Callable, world: int, args: tuple = ()) -> list[Any]:
    """Run ``fn`` on ``world`` ranks with each engine. Returns the results of all ranks and engines."""
    results = run_ranks(with_each_engine, world, (world, fn, args))
    assert all(list(result) == list(ENGINES) for result in results)
    return [value for result in results for value in result.values()]


def _collectives(rank: int, world: int, group: Any) -> int:
    checked = 0
    for seed, dtype in enumerate(DTYPES):
        generator = torch.Generator().manual_seed(seed)
        source, in_splits, out_splits, right = all_to_all_case(rank, world, seed, dtype)
        output = torch.empty_like(right)
        dist.all_to_all_single(output, source, out_splits, in_splits, group=group)
        assert same_bits(output, right), f"uneven all_to_all_single of {dtype}"

        parts = [part.clone() for part in torch.empty_like(right).split(out_splits)]
        dist.all_to_all(parts, [part.contiguous() for part in source.split(in_splits)], group=group)
        assert all(same_bits(a, b) for a, b in zip(parts, right.split(out_splits), strict=True)), (
            f"all_to_all of {dtype}"
        )

        everyone = [random_tensor((peer, 2), dtype, generator) for peer in range(world)]  # rank 0 sends nothing
        gathered = [torch.empty_like(tensor) for tensor in everyone]
        dist.all_gather(gathered, everyone[rank], group=group)
        assert all(same_bits(a, b) for a, b in zip(gathered, everyone, strict=True)), f"uneven all_gather of {dtype}"

        everyone = [random_tensor((3, 2), dtype, generator) for _ in range(world)]
        output = torch.empty((3 * world, 2), dtype=dtype)
        dist.all_gather_into_tensor(output, everyone[rank], group=group)
        assert all(same_bits(a, b) for a, b in zip(output.split(3), everyone, strict=True)), f"all_gather of {dtype}"

        for root in range(world):
            tensor = everyone[rank].clone()
            dist.broadcast(tensor, src=root, group=group)
            assert same_bits(tensor, everyone[root]), f"broadcast of {dtype} from {root}"
        checked += 1
    return checked


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_collective_with_every_dtype(world: int) -> None:
    assert run_with_each_engine(_collectives, world) == [len(DTYPES)] * world * len(ENGINES)


def _compare_with_gloo(rank: int, world: int, group: Any) -> None:
    for seed in range(30):
        source, in_splits, out_splits, right = all_to_all_case(rank, world, seed, torch.float32)
        ours, theirs = torch.empty_like(right), torch.empty_like(right)
        dist.all_to_all_single(ours, source, out_splits, in_splits, group=group)
        dist.all_to_all_single(theirs, source, out_splits, in_splits)
        assert same_bits(ours, theirs)
    ours, theirs = torch.arange(5.0) + rank, torch.arange(5.0) + rank
    dist.all_reduce(ours, group=group)
    dist.all_reduce(theirs)
    assert same_bits(ours, theirs)
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": peer} for peer in range(world)]
    scattered = torch.empty(2)
    dist.reduce_scatter_tensor(scattered, torch.ones(2 * world), group=group)
    assert scattered.tolist() == [world, world]
    dist.barrier(group=group)


def test_collectives_give_the_same_results_as_gloo() -> None:
    run_with_each_engine(_compare_with_gloo, 2)


def _exchange_empty_tensors(rank: int, world: int, group: Any) -> None:
    nothing = torch.empty(0, 4)
    dist.all_to_all_single(torch.empty(0, 4), nothing, [0] * world, [0] * world, group=group)
    dist.all_to_all_single(torch.empty(0, 4), nothing, group=group)
    dist.all_gather([torch.empty(0, 4) for _ in range(world)], nothing, group=group)
    dist.broadcast(nothing, src=0, group=group)
    # Only rank 0 sends something, and only to the last rank.
    splits = torch.zeros(world, world, dtype=torch.long)
    splits[0, -1] = 5
    source = torch.arange(5.0) if rank == 0 else torch.empty(0)
    output = torch.empty(int(splits[:, rank].sum()))
    dist.all_to_all_single(output, source, splits[:, rank].tolist(), splits[rank].tolist(), group=group)
    assert output.tolist() == ([0, 1, 2, 3, 4] if rank == world - 1 else [])
    scalar = torch.tensor(float(rank))
    dist.broadcast(scalar, src=world - 1, group=group)
    assert scalar.item() == world - 1


def test_empty_tensors_and_zero_splits() -> None:
    run_with_each_engine(_exchange_empty_tensors, 3)


def _wait_out_of_order(rank: int, world: int, group: Any, count: int) -> int:
    works = []
    for seed in range(count):
        source, in_splits, out_splits, right = all_to_all_case(rank, world, seed, torch.int64, width=1 + seed % 50)
        output = torch.zeros_like(right)
        work = dist.all_to_all_single(output, source, out_splits, in_splits, group=group, async_op=True)
        works.append((work, output, right))
    random.Random(rank).shuffle(works)  # each rank waits in another order
    for work, output, right in works:
        assert work.wait()
        assert work.is_completed()
        assert same_bits(output, right)
    return len(works)


def test_many_outstanding_exchanges_are_waited_for_out_of_order() -> None:
    assert run_with_each_engine(_wait_out_of_order, 3, (200,)) == [200] * 3 * len(ENGINES)


def _use_futures(rank: int, world: int, group: Any) -> None:
    output = torch.empty(world)
    future = dist.all_to_all_single(output, torch.full((world,), float(rank)), group=group, async_op=True).get_future()
    future.wait()
    assert output.tolist() == list(range(world))
    parts = [torch.empty(1) for _ in range(world)]
    work = dist.all_gather(parts, torch.tensor([float(rank)]), group=group, async_op=True)
    work.get_future().wait()
    assert [part.item() for part in parts] == list(range(world))
    from torch.distributed import _functional_collectives as functional

    moved = functional.all_to_all_single(torch.full((world,), float(rank)), None, None, group)
    assert moved.tolist() == list(range(world))


def test_futures_and_functional_collectives() -> None:
    run_with_each_engine(_use_futures, 2)


def _call_with_bad_arguments(rank: int, world: int, group: Any) -> None:
    good = torch.zeros(4, 2)
    for call, message in [
        (lambda: dist.all_to_all_single(good, good.T, group=group), "contiguous"),
        (lambda: dist.all_to_all_single(good, good, [1, 2], [2, 2], group=group), "sum to its 4 rows"),
        (
            lambda: dist.all_to_all_single(good, torch.zeros(3, 2), [2, 2], [], group=group),
            "3 rows cannot be divided equally",
        ),
        (lambda: dist.all_to_all([good], [good], group=group), "1 tensors for 2 ranks"),
        (lambda: dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.zeros(2), group=group), "sends 8 bytes"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_errors_name_the_bad_argument() -> None:
    run_ranks(in_group, 2, (2, {}, _call_with_bad_arguments, ()))


def test_errors_name_the_bad_option() -> None:
    from lightning_freescale import ConfigurationError
    from lightning_freescale.transport import Options

    with pytest.raises(ConfigurationError, match="priority='urgent'"):
        Options(priority="urgent")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="chunk_bytes=17"):
        Options(chunk_bytes=17)
    with pytest.raises(ConfigurationError, match="network_threads=0"):
        Options(network_threads=0)
    with pytest.raises(ConfigurationError, match="unknown field 'colour'"):
        Options.of({"colour": 1})


def _compare_with_flipped_output(rank: int, world: int, group: Any) -> None:
    source, in_splits, out_splits, right = all_to_all_case(rank, world, 0, torch.float32)
    output = torch.empty_like(right)
    dist.all_to_all_single(output, source, out_splits, in_splits, group=group)
    assert same_bits(output.flip(0), right)


def test_the_comparison_can_fail() -> None:
    with pytest.raises(RankFailed, match="assert same_bits"):
        run_ranks(in_group, 2, (2, {}, _compare_with_flipped_output, ()))


def _use_as_default_group(rank: int, world: int) -> str:
    dist.init_process_group("freescale", rank=rank, world_size=world)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.barrier()
    name = dist.get_backend()
    dist.destroy_process_group()
    return f"{name} {tensor.tolist()}"


def test_the_backend_works_as_the_default_group() -> None:
    assert run_ranks(_use_as_default_group, 2, (2,)) == ["freescale [2.0, 2.0]"] * 2


def _reduce_beside_exchanges(rank: int) -> float:
    dist.init_process_group("gloo")
    group = dist.new_group(backend="freescale")
    total = torch.zeros(8)
    for _ in range(1500):
        sent = torch.ones(64 * dist.get_world_size())
        work = dist.all_to_all_single(torch.empty_like(sent), sent, group=group, async_op=True)
        del sent  # now gloo's thread holds the last reference
        one = torch.ones(8)
        dist.all_reduce(one, group=group)
        work.wait()
        total += one
    return total.sum().item()


def test_reductions_beside_exchanges_do_not_deadlock() -> None:
    assert run_ranks(_reduce_beside_exchanges, 2, timeout=100) == [1500 * 8 * 2.0] * 2
