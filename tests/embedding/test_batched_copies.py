"""DDP that copies the gradients of a bucket at once trains as plain DDP does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.bubbles.probes import AllReduceProbe
from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding import shard
from lightning_freescale.embedding.batched_copies import BATCHES_COPIES, BatchedCopiesDDP
from lightning_freescale.embedding.fixed_buckets import FixedBucketsDDP
from lightning_freescale.runtime.errors import ConfigurationError
from tests import toy
from tests.ranks import run_ranks

needs_batches = pytest.mark.skipif(not BATCHES_COPIES, reason="DDP has no batched_grad_copy before torch 2.12")
STEPS = 5
OPTIONS: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005}  # several buckets
State = dict[str, Tensor]


class Net(nn.Module):
    """Has a layer that is used twice, parameters with one common gradient, two types, and strides that are not row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.shared, self.norm = nn.Linear(12, 12), nn.LayerNorm(12)
        self.narrow = nn.Linear(12, 4, dtype=torch.bfloat16)
        self.first, self.second = (nn.Parameter(torch.randn(4)) for _ in range(2))
        self.sometimes = nn.Linear(4, 4)

    def forward(self, x: Tensor, everything: bool = True) -> Tensor:
        hidden = self.convolution(x).flatten(1)
        hidden = self.norm(self.shared(torch.tanh(self.shared(hidden))))
        output = self.narrow(hidden.bfloat16()).float() + (self.first + self.second)
        return (self.sometimes(output) if everything else output).square().mean()


def plain(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, **OPTIONS | options)


def divided_by_bucket(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Copies each gradient by itself, but divides a bucket as a whole.

    Plain DDP multiplies by 1/n on a CPU and divides in place by n. The two round differently if n is no power of two.
    """
    ddp = plain(module, **options)
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return ddp


def batched(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return BatchedCopiesDDP(module, **OPTIONS | options)


def one_gradient_lost(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """The negative control: a gradient of each bucket is left out."""

    def reduce(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with types, not with strings
        bucket.gradients()[0].zero_()
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    ddp = plain(module, **options)
    ddp.register_comm_hook(None, reduce)
    return ddp


Build = Callable[..., DistributedDataParallel]


# ---- ways to use backward ---------------------------------------------------------------------------------------------
def inputs(step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
    return torch.randn(4, 2, 3, 3, generator=generator)


def once(ddp: Any, step: int) -> None:
    ddp(inputs(step)).backward()


def accumulated(ddp: Any, step: int) -> None:
    for part in range(3):
        with ddp.no_sync() if part < 2 else nullcontext():
            ddp(inputs(step, part)).backward()


def two_passes(ddp: Any, step: int) -> None:
    for part in range(2):
        ddp(inputs(step, part)).backward()


def repeated(ddp: Any, step: int) -> None:
    """DDP does not reduce in the second backward, because no forward came before it."""
    loss = ddp(inputs(step))
    loss.backward(retain_graph=True)
    loss.backward()


def beside_ddp(ddp: Any, step: int) -> None:
    """The first backward does not belong to DDP, and the second one is reduced."""
    ddp.module(inputs(step, 1)).backward()
    ddp(inputs(step)).backward()


def partly_used(ddp: Any, step: int) -> None:
    ddp(inputs(step), everything=step % 2 == 0).backward()


def failed_before(ddp: Any, step: int) -> None:
    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    loss = ddp(inputs(step, 1))
    loss.register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss.backward()
    ddp(inputs(step)).backward()


def with_gradients_of_parameters(ddp: Any, step: int) -> None:
    loss = ddp(inputs(step))
    (gradient,) = torch.autograd.grad(loss, ddp.module.first, retain_graph=True)
    (loss * (1 + gradient.square().sum())).backward()


CASES: dict[str, tuple[Callable[[Any, int], None], dict[str, Any]]] = {
    "one backward": (once, {}),
    "no_sync": (accumulated, {}),
    "two passes": (two_passes, {}),
    "repeated backward": (repeated, {}),
    "backward beside DDP": (beside_ddp, {}),
    "failed backward": (failed_before, {}),
    "torch.autograd.grad": (with_gradients_of_parameters, {}),
    "one bucket": (once, {"bucket_cap_mb": 25}),
    "unused parameters": (partly_used, {"find_unused_parameters": True}),
    "static graph": (once, {"static_graph": True}),
}


def train(build: Build, case: str, hooks: bool = False, set_to_none: bool = True) -> State:
    """The losses, the gradients that hooks have seen, and the parameters after some steps of AdamW with clipping."""
    torch.manual_seed(0)
    backward, options = CASES[case]
    net = Net()
    ddp = build(net, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    seen: list[Tensor] = []
    if hooks:
        net.shared.weight.register_hook(lambda gradient: gradient * 2)
        net.shared.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
        net.first.register_hook(lambda gradient: seen.append(gradient.clone()))
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(ddp, step)
        seen.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1))
        seen.append(torch.cat([p.grad.flatten().float() for p in net.parameters() if p.grad is not None]))
        optimizer.step()
    return {f"seen {index}": value for index, value in enumerate(seen)} | net.state_dict()


def compare(rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    cases = list(CASES) if world == 2 else list(CASES)[:2]  # further ranks change only the rounding of the division
    for case in cases:
        for hooks, set_to_none in ((False, True), (True, True), (False, False)):
            found = train(batched, case, hooks, set_to_none)
            for build in (plain, divided_by_bucket) if world == 2 else (divided_by_bucket,):
                expected = train(build, case, hooks, set_to_none)
                assert toy.same(found, expected), (case, hooks, set_to_none, build.__name__)
        assert not toy.same(train(batched, case), train(one_gradient_lost, case)), case  # the comparison can fail


@pytest.mark.parametrize("world", [2, 3])
def test_the_same_bits(world: int) -> None:
    """On three ranks, compared with copies of the single gradients and the same division."""
    run_ranks(compare, world, (world,), timeout=200)


def failed_within(rank: int) -> list[str]:
    """What DDP says after a backward that has failed when some gradients were ready."""
    dist.init_process_group("gloo")
    messages = []
    for build in (plain, batched):
        ddp = build(Net())
        for step in range(2):
            once(ddp, step)
        handle = ddp.module.shared.weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            once(ddp, 2)
        handle.remove()
        with pytest.raises(RuntimeError) as error:
            once(ddp, 3)
        messages.append(str(error.value))
    return messages


def test_a_backward_that_fails_halfway_is_the_same_error() -> None:
    for one, other in run_ranks(failed_within):
        assert one == other
        assert "Expected to have finished reduction in the prior iteration" in one


def first_gradients(rank: int) -> None:
    """The division of three ranks by 1/3 and by 3 differs by rounding only."""
    dist.init_process_group("gloo")
    gradients = []
    for build in (plain, batched):
        torch.manual_seed(0)
        ddp = build(Net())
        once(ddp, 0)
        gradients.append([parameter.grad for parameter in ddp.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if one.dtype == torch.bfloat16 else 1e-6, atol=1e-8)


def test_plain_ddp_differs_by_rounding() -> None:
    run_ranks(first_gradients, 3)


# ---- the copies -------------------------------------------------------------------------------------------------------
def copies(ddp: Any) -> dict[str, int]:
    """How often DDP copies one gradient, and how often several, in the backward of a step after the first two."""
    for step in range(2):  # DDP lays out its buckets anew after the first step.
        ddp.zero_grad()
        once(ddp, step)
    ddp.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        once(ddp, 2)
    names = [event.name for event in profiler.events()]
    single = ("torch::distributed::reducer::mul_out", "torch::distributed::reducer::copy_")
    return {"single": sum(name in single for name in names), "together": names.count("aten::_foreach_copy_")}


def count_copies(rank: int) -> list[dict[str, int]]:
    dist.init_process_group("gloo")
    one = {"bucket_cap_mb": 25}
    ways: list[tuple[Build, dict[str, Any]]] = [(plain, {}), (divided_by_bucket, {}), (batched, {}), (batched, one)]
    return [copies(build(Net(), **options)) for build, options in ways]


@needs_batches
def test_a_bucket_is_copied_at_once() -> None:
    number = len(list(Net().parameters()))
    for single, divided, several, one in run_ranks(count_copies):
        assert single == divided == {"single": number, "together": 0}
        assert several["single"] == 0
        assert 2 < several["together"] < number
        assert one == {"single": 0, "together": 2}  # one for each type


# ---- create_graph -----------------------------------------------------------------------------------------------------
def gradient_with_graph(rank: int) -> list[float]:
    dist.init_process_group("gloo")
    found = []
    for build in (plain, batched, lambda module: plain(module, batched_grad_copy=True)):
        layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(layer.weight)
        ddp = build(layer)
        ddp(torch.full((1, 1), 1.0 + rank)).square().sum().backward(create_graph=True)
        assert layer.weight.grad is not None
        found.append(layer.weight.grad.item())
    return found


@needs_batches
def test_gradients_with_a_graph_are_divided_once() -> None:
    for expected, found, option_alone in run_ranks(gradient_with_graph):
        assert found == expected == 5.0  # the mean of 2 and 8
        assert option_alone == 2.5, "DDP divides once now: BatchedCopiesDDP needs no hook from this release on"


# ---- hooks of the user, and the monitor -------------------------------------------------------------------------------
def count_buckets(state: Any, bucket: Any) -> Any:
    state["buckets"] += 1
    return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


count_buckets.__annotations__.clear()  # DDP compares annotations with types, and these are strings.


def users_hook(rank: int) -> int:
    dist.init_process_group("gloo")
    ddp, state = batched(Net(), bucket_cap_mb=25), {"buckets": 0}
    with torch.no_grad():
        ddp(inputs(0))  # A validation comes first.
    ddp.register_comm_hook(state, count_buckets)
    for step in range(STEPS):
        once(ddp, step)
    return state["buckets"]


def test_a_hook_of_the_user_comes_first() -> None:
    assert run_ranks(users_hook) == [2 * STEPS] * 2


def late_hook(rank: int) -> str:
    dist.init_process_group("gloo")
    ddp = batched(Net())
    once(ddp, 0)
    with pytest.raises(ConfigurationError) as error:
        ddp.register_comm_hook({"buckets": 0}, count_buckets)
    once(ddp, 1)  # The model can still be trained.
    return str(error.value)


def test_a_hook_that_comes_after_the_first_training_is_refused() -> None:
    assert all("ddp_comm_hook in the first training" in message for message in run_ranks(late_hook))


def overlap(rank: int) -> float:
    dist.init_process_group("gloo")
    ddp = batched(Net())
    probe = AllReduceProbe(ddp, Timeline())
    for step in range(3):
        once(ddp, step)
    return probe.hidden_before()


def test_the_monitor_still_sees_the_overlap() -> None:
    assert all(seconds > 0 for seconds in run_ranks(overlap))


# ---- in the Trainer ---------------------------------------------------------------------------------------------------
class FixedBatchedDDP(BatchedCopiesDDP, FixedBucketsDDP):
    """The strategy batches the copies on CUDA only. This class does it on a CPU."""


class UsersHook(FreeScaleStrategy):
    """Lightning registers communication hooks on CUDA only. This class does the same on a CPU."""

    def _register_ddp_hooks(self) -> None:
        if self._ddp_comm_hook is not None:
            assert isinstance(self.model, FixedBatchedDDP)
            self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


def fit(ddp: type, options: dict[str, Any], fits: int = 1, **strategy: Any) -> dict[str, Any]:
    shard.FixedBucketsDDP = ddp  # type: ignore[misc]
    pl.seed_everything(1, verbose=False)
    model = toy.Model()
    for _ in range(fits):
        trainer = toy.trainer(UsersHook(**strategy), 2, **options)
        trainer.fit(model, toy.loader(16), toy.loader(8, shuffle=False))
    wrapped = model._freescale.sharded._dmp_wrapped_module
    assert type(wrapped) is ddp
    assert not getattr(wrapped, "_needs_hook", False)
    return {"losses": model.losses, "weights": toy.weights(model), "steps": trainer.global_step}


def settings() -> Iterator[dict[str, Any]]:
    yield {}
    yield {"accumulate_grad_batches": 2}
    yield {"gradient_clip_val": 0.01, "limit_val_batches": 1}


def fits(rank: int) -> None:
    for options in settings():
        one, other = (fit(ddp, options, fits=2) for ddp in (FixedBucketsDDP, FixedBatchedDDP))
        assert one["losses"] == other["losses"], options
        assert toy.same(one["weights"], other["weights"]), options
    state = {"buckets": 0}
    hooked = fit(FixedBatchedDDP, {"limit_val_batches": 1}, ddp_comm_state=state, ddp_comm_hook=count_buckets)
    assert state["buckets"] == hooked["steps"] > 0


def test_the_trainer() -> None:
    run_ranks(fits, timeout=120)


# ---- on a GPU ---------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
def test_both_divisions_are_equal_on_a_gpu() -> None:
    """DDP multiplies by 1/n while it copies one gradient, and divides a bucket by n."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = torch.randn(1 << 16, device="cuda").to(dtype)
        for ranks in range(1, 129):
            assert torch.equal(values * (1.0 / ranks), values.clone().div_(ranks)), (dtype, ranks)
