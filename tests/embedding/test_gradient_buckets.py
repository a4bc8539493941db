"""Sizes of the buckets of the dense gradients."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.embedding import gradient_buckets
from lightning_freescale.embedding.gradient_buckets import (
    DDP_BUCKET_BYTES,
    choose_bucket_bytes,
    choose_bucket_megabytes,
    divide_layers,
    expected_seconds,
    layers_in_backward,
    may_choose,
)
from tests.ranks import run_ranks


def test_examples() -> None:
    assert doctest.testmod(gradient_buckets).failed == 0


LINKS = [(3e-4, 7e-10), (3e-5, 1e-11), (1e-3, 1e-10)]  # latency in seconds, seconds per byte: slow, fast, long latency


def test_buckets_are_never_larger_than_those_of_ddp() -> None:
    assert choose_bucket_bytes([10 * DDP_BUCKET_BYTES], 1.0, 0.0) == DDP_BUCKET_BYTES
    assert choose_bucket_bytes([DDP_BUCKET_BYTES] * 3, 1.0, 0.0) <= DDP_BUCKET_BYTES
    assert choose_bucket_bytes([1], 1.0, 0.0) == 1


@pytest.mark.parametrize("layers", [[], [0], [0, 0]], ids=str)
def test_a_model_without_dense_parameters(layers: list[int]) -> None:
    assert choose_bucket_bytes(layers, 1e-4, 1e-9) == DDP_BUCKET_BYTES


def test_a_longer_latency_makes_fewer_buckets() -> None:
    layers = [1_000_000] * 40
    counts = [len(divide_layers(layers, choose_bucket_bytes(layers, latency, 1e-9))) for latency in (1e-5, 1e-3, 1e-1)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 2 * counts[-1]


@pytest.mark.parametrize(("latency", "per_byte"), LINKS)
@pytest.mark.parametrize("layers", [[330_000] * 4, [9_000_000] + [300_000] * 6, [100_000, 4_000_000, 200_000]], ids=str)
def test_no_other_number_of_layers_is_expected_to_be_faster(layers: list[int], latency: float, per_byte: float) -> None:
    """Every number of buckets of about equal size, as they were chosen before, and one bucket for everything."""
    chosen = divide_layers(layers, choose_bucket_bytes(layers, latency, per_byte))
    best = expected_seconds(layers, chosen, latency, per_byte)
    for number in range(1, 1 + len(layers)):
        others = divide_layers(layers, sum(layers) / number)
        assert best <= expected_seconds(layers, others, latency, per_byte) * (1 + 1e-9)


def test_what_a_step_is_expected_to_wait() -> None:
    """Two layers of equal size, and an AllReduce that takes a second for each of them and has no latency."""
    beside = 0.08 * 2
    assert expected_seconds([1, 1], [2], 0.0, 1.0) == pytest.approx(2 + beside)  # both after the backward
    assert expected_seconds([1, 1], [1, 1], 0.0, 1.0) == pytest.approx(1 + beside)  # the first one beside the backward
    # A large layer, and a backward of 36, 72 or 144 s. Its AllReduce delays those after it, unless the backward is long.
    assert expected_seconds([10, 1, 1], [1, 1, 1], 0.0, 1.0) == pytest.approx((6 + 1 + 1) / 3 + 0.08 * 12)
    assert expected_seconds([1, 10, 1], [1, 1, 1], 0.0, 1.0) == pytest.approx((8 + 5 + 1) / 3 + 0.08 * 12)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def buckets_of_ddp(rank: int, world: int, unused: bool) -> list[list[str]]:
    """Train two steps, and return what DDP's buckets contain afterwards."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(4)))
    layers = layers_in_backward((name, value.nbytes) for name, value in model.named_parameters())
    chosen = choose_bucket_bytes(layers, 3e-4, 5e-7, model_order=unused)
    options: dict[str, Any] = {"bucket_cap_mb": chosen / 2**20, "find_unused_parameters": unused}
    ddp = torch.nn.parallel.DistributedDataParallel(model, **options)
    found: list[list[str]] = []
    names = {value: name for name, value in model.named_parameters()}

    def note(state: Any, bucket: Any) -> Any:
        found.append([names[value] for value in bucket.parameters()])
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    note.__annotations__.clear()  # DDP compares annotations with types, and these are strings.
    ddp.register_comm_hook(None, note)
    for _ in range(2):  # DDP makes the buckets in the order of the gradients after the first backward.
        found.clear()
        ddp(torch.ones(2, 16)).sum().backward()
    return found


@pytest.mark.parametrize(
    ("unused", "expected"), [(False, [{"3", "2", "1"}, {"0"}]), (True, [{"3"}, {"2"}, {"1"}, {"0"}])]
)
def test_ddp_makes_buckets_of_whole_layers(unused: bool, expected: list[set[str]]) -> None:
    """The last bucket has the first layer, and from other layers at most small parameters."""
    for buckets in run_ranks(buckets_of_ddp, 2, (2, unused)):
        assert [{name[0] for name in bucket if name.endswith("linear.weight")} for bucket in buckets] == expected


def choices(rank: int, world: int) -> tuple[float, float]:
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    assert may_choose(dist.group.WORLD)
    torch.use_deterministic_algorithms(True)
    assert not may_choose(dist.group.WORLD)
    torch.use_deterministic_algorithms(False)
    alone = dist.new_group([0], backend="gloo")
    if rank == 0:
        assert not may_choose(alone)
    parameters = [(f"layers.{number}.weight", 4_000_000) for number in range(10)]
    chosen = choose_bucket_megabytes(parameters, dist.group.WORLD, torch.device("cpu"))
    return chosen, sum(size for _, size in parameters) / 2**20


def test_all_ranks_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)  # gloo has waited on the host
    found: list[Any] = run_ranks(choices, 2, (2,))
    assert len(set(found)) == 1
    chosen, whole = found[0]
    assert 0 < chosen <= min(whole, DDP_BUCKET_BYTES / 2**20)
