"""Experts that the ranks share, compared with one process that computes all tokens: four ranks on gloo, and a training."""

from __future__ import annotations

import copy
import threading
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale import BubbleMonitor, FreeScaleStrategy
from lightning_freescale.bubbles.spans import ENGINE, Kind, Step
from lightning_freescale.models import FeedForward
from lightning_freescale.models.moe import MoE
from lightning_freescale.runtime.errors import ConfigurationError
from tests import toy
from tests.bubbles.test_monitor import Remembering
from tests.models.test_hstu import loader, planted, tiny, training_batch
from tests.models.test_moe import make_tokens
from tests.ranks import run_ranks

WORLD = 4
SPLIT = [13, 0, 20, 7]  # tokens of each rank; one has none
DIM, HIDDEN, EXPERTS = 8, 12, 8


def make_shared(top_k: int, save: Any) -> MoE:
    torch.manual_seed(0)
    moe = MoE(DIM, HIDDEN, EXPERTS, top_k, save, expert_parallel=True)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return moe


def results(moe: MoE, x: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """The output, the gradient of the tokens, and the gradients of the parameters for the sum of the losses."""
    x = x.detach().requires_grad_()
    out = moe(x)
    (out * dout).sum().backward()
    assert x.grad is not None
    return {"out": out.detach(), "x": x.grad} | {
        name: p.grad for name, p in moe.named_parameters() if p.grad is not None
    }


CASES = [(2, "ab"), (1, "ab"), (8, "x")]


def share_experts(rank: int) -> list[Any]:
    dist.init_process_group("gloo")
    x, dout = (part.split(SPLIT)[rank] for part in make_tokens(sum(SPLIT), DIM))
    found: list[Any] = []
    for top_k, save in CASES:
        moe = make_shared(top_k, save)
        wrapped = DistributedDataParallel(moe)
        tokens = x.detach().requires_grad_()
        out = wrapped(tokens)
        (out * dout).sum().backward()
        grads = {name: p.grad for name, p in moe.named_parameters()}
        found.append({"out": out.detach(), "x": tokens.grad} | grads)
        alone = moe.eval()(x) if rank == 2 else None  # a rank evaluates without the others
        assert alone is None or torch.allclose(alone, out, atol=1e-6)
    sent: list[int] = []
    moe = make_shared(2, "ab")
    assert moe.expert_exchange is not None
    observe = moe.expert_exchange.observe
    moe.expert_exchange.observe = lambda work, nbytes: sent.append(nbytes) or observe(work, nbytes)  # type: ignore[func-returns-value]
    moe(x)
    found.append(sent)
    try:
        MoE(DIM, HIDDEN, 6, 2, expert_parallel=True)(x)
    except ConfigurationError as error:
        found.append(str(error))
    return found


def test_four_ranks_equal_one() -> None:
    ranks = run_ranks(share_experts, world=WORLD)
    x, dout = make_tokens(sum(SPLIT), DIM)
    for number, (top_k, save) in enumerate(CASES):
        want = results(make_shared(top_k, save), x, dout)
        for name in ("out", "x"):
            got = torch.cat([found[number][name] for found in ranks])
            torch.testing.assert_close(got, want[name], rtol=1e-6, atol=1e-6)
        for name in ("router", "w_in", "w_out"):  # the mean over the ranks, on every rank
            for found in ranks:
                torch.testing.assert_close(found[number][name] * WORLD, want[name], rtol=1e-5, atol=2e-6)
                assert torch.equal(found[number][name], ranks[0][number][name])
        assert not torch.allclose(ranks[0][number]["w_in"] * WORLD, 1.01 * want["w_in"], rtol=1e-5, atol=2e-6)
    counts, rows, back = ranks[0][-2]
    assert (counts, rows) == (8 * EXPERTS, 4 * (DIM + 1) * 2 * SPLIT[0])  # copies with their gates
    assert back % (4 * DIM) == 0
    assert all("experts: 6 cannot be divided among 4 ranks" in found[-1] for found in ranks)


class RecordingBackends(pl.Callback):
    """Notes the backend of the expert exchange of every layer in the first step."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        exchanges = [layer.moe.expert_exchange for layer in pl_module.feed_forwards]
        self.found |= {dist.get_backend(exchange.group) for exchange in exchanges if exchange is not None}


class RecordingWaits(pl.Callback):
    """Counts the waits for the exchange of experts on the timeline, and those whose transfer had started before other work."""

    def __init__(self, monitor: BubbleMonitor) -> None:
        self.monitor, self.waits, self.early = monitor, 0, 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        take = self.monitor.timeline.take

        def taken(upto: int | None = None) -> list[Step]:
            steps = take(upto)
            for span in (span for step in steps for span in step.spans if span.kind is Kind.EXPERT_EXCHANGE):
                if span.track == ENGINE:
                    self.waits += 1
                    self.early += span.joined < span.start
            return steps

        self.monitor.timeline.take = taken  # type: ignore[method-assign]


def train(rank: int, chunks: int) -> tuple[dict[str, Tensor], dict[str, float], RecordingWaits]:
    """Train with shared experts in ``chunks``, or without shared experts if there are 0."""
    pl.seed_everything(0, verbose=False)
    histories, _ = planted(32)
    batches = [training_batch(histories[i : i + 8][rank::2], seed=i + rank) for i in range(0, 32, 8)]
    settings = FeedForward(experts=4, top_k=2, hidden=8, expert_parallel=chunks > 0, micro_chunks=chunks or None)
    model = tiny(lr=1e-3, feed_forward=settings, meta_tables=True)
    strategy = FreeScaleStrategy(sharding="row_wise", balance="off", transport="host")
    monitor, logger = BubbleMonitor(every=1, image_every=0), Remembering()
    backends, waits = RecordingBackends(), RecordingWaits(monitor)
    options: dict[str, Any] = {"callbacks": [monitor, backends, waits], "logger": logger, "log_every_n_steps": 2}
    toy.trainer(strategy, 2, max_epochs=1, use_distributed_sampler=False, **options).fit(model, loader(batches))
    logged = {name: value for values in logger.logged.values() for name, value in values.items()}  # rank 0 logs
    assert backends.found == ({"freescale"} if chunks else set())
    assert all(
        layer.moe.expert_exchange is None or layer.moe.expert_exchange.group is None for layer in model.feed_forwards
    )
    return toy.weights(model), logged, waits


def train_all(rank: int) -> list[tuple[dict[str, Tensor], dict[str, float], tuple[int, int]]]:
    found = [train(rank, chunks) for chunks in (0, 1, 2)]
    return [(weights, logged, (waits.waits, waits.early)) for weights, logged, waits in found]


def test_training_equals_one_without_and_shows_its_exchange() -> None:
    ranks = run_ranks(train_all)
    for (plain, *_), *shared in ranks:
        for weights, *_ in shared:
            for name, want in plain.items():
                torch.testing.assert_close(weights[name], want, rtol=1e-3, atol=1e-5, msg=name)
    (_, plain_log, plain_waits), *shared_runs = ranks[0]
    assert plain_log["bubble/exposed_experts"] == 0
    assert plain_waits == (0, 0)
    for chunks, (_, logged, (waits, early)) in enumerate(shared_runs, 1):
        assert logged["bubble/exposed_experts"] > 0
        assert logged["comm/mbytes_per_step"] > plain_log["comm/mbytes_per_step"]
        assert {"experts/busiest", "experts/layer_2/busiest"} <= logged.keys()
        assert waits > 0
        assert waits % (2 * 5 * chunks) == 0  # layers, exchanges of a layer and chunk
        assert early == waits  # only the wait counts as exposed, not what ran between start and wait


def test_one_process_computes_alone() -> None:
    moe, (x, dout) = make_shared(2, "ab"), make_tokens(10, DIM)
    shared = results(moe, x, dout)
    moe.expert_exchange = None
    moe.zero_grad()
    plain = results(moe, x, dout)
    assert all(torch.equal(shared[name], plain[name]) for name in plain)


def test_a_copy_has_an_exchange_without_the_group_of_the_run() -> None:
    moe = make_shared(2, "ab")
    assert moe.expert_exchange is not None
    moe.expert_exchange.group = threading.Lock()  # type: ignore[assignment]  # like a process group, it cannot be copied
    copied = copy.deepcopy(moe)
    assert copied.expert_exchange is not None
    assert copied.expert_exchange is not moe.expert_exchange
    assert copied.expert_exchange.group is None


@pytest.mark.parametrize("setting", [True, False])
def test_the_setting_reaches_the_layers(setting: bool) -> None:
    model = tiny(feed_forward={"experts": 4, "top_k": 2, "expert_parallel": setting})
    assert all((layer.moe.expert_exchange is not None) == setting for layer in model.feed_forwards)  # type: ignore[union-attr]
