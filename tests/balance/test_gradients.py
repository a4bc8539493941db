"""Balancing does not change the training: gradients of every step stay equal, at the source and by exchange."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_freescale.balance import Planner
from lightning_freescale.balance.exchange import ExchangeLoader
from lightning_freescale.balance.sampler import GlobalBatchSampler
from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES
from lightning_freescale.data import Histories, HistoryDataset, NegativeSampler, SeqBatch, Synthetic
from lightning_freescale.models import HSTU
from lightning_freescale.models.loss import sampled_softmax
from lightning_freescale.models.sequences import Attention
from tests.ranks import run_ranks
from tests.slow import slow

STEPS = 4
HISTORIES: Histories = Synthetic(
    users=16 * STEPS, items=60, clusters=6, mean_length=12, sigma=1.2, max_length=80
).generate()
WAYS = ("sampler", "exchange")
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def make_model(dtype: torch.dtype) -> HSTU:
    torch.manual_seed(0)
    model = HSTU(HISTORIES.num_items, embedding_dim=16, num_layers=2, num_heads=2, max_history=64)
    return model.to(dtype)


def mean_loss(model: HSTU, batch: SeqBatch) -> Tensor:
    """Return the loss of ``HSTU.training_step`` in the dtype of the model; the original rounds to float32."""
    (table,) = model.embedding.embeddings.values()
    ids = {key: batch.features[key].values() for key in (HISTORY, NEGATIVES)}
    embedded = {key: F.embedding(values, table.weight) for key, values in ids.items()}
    offsets = F.pad(batch.lengths.cumsum(0), (1, 0))
    keys = model.dropout_keys(batch)
    x = model.input_dropout(embedded[HISTORY] * model.input_scale, keys)
    attention = Attention(offsets, batch.timestamps, model.has_bias)
    for layer in model.layers:
        x = layer(x, attention, keys)
    total = sampled_softmax(
        F.normalize(x, dim=-1) / model.hparams["temperature"],
        F.normalize(embedded[HISTORY], dim=-1),
        ids[HISTORY],
        F.normalize(embedded[NEGATIVES], dim=-1),
        ids[NEGATIVES],
        offsets,
        None,
        batch.features[NEGATIVES].lengths(),
        batch.negatives_per_position,
    )
    return total / model.num_predicted(batch)


def _both_losses(rank: int) -> tuple[Tensor, Tensor]:
    model = make_model(torch.float32)
    batch = next(iter(loader(0, 1, None, "sampler", None)))
    return mean_loss(model, batch).detach(), model.training_step(batch, 0).detach()


def test_this_loss_equals_the_loss_of_the_model() -> None:
    ((here, there),) = run_ranks(_both_losses, world=1)
    assert torch.equal(here, there)


def loader(
    rank: int, world: int, planner: Planner | None, way: str, group: dist.ProcessGroup | None, batch_size: int = 16
) -> Iterable[SeqBatch]:
    """Return the local batches: not balanced without a planner, else balanced by the sampler or by exchange."""
    negatives = NegativeSampler(HISTORIES.num_items, 4, sets=3)  # histories of up to 64 events have two sets
    dataset = HistoryDataset(HISTORIES, 64, negatives)
    source = planner if way == "sampler" else None
    sampler = GlobalBatchSampler(dataset, batch_size // world, num_replicas=world, rank=rank, planner=source)
    local = DataLoader(dataset, sampler=sampler, batch_size=None)
    if way == "sampler" or planner is None:
        return local
    assert group is not None
    return ExchangeLoader(local, group=group, planner=planner)


def steps(
    model: HSTU, batches: Iterable[SeqBatch], learning_rate: float = 0.0, weighted: bool = True
) -> Iterator[tuple[float, dict[str, Tensor], int]]:
    """Train, and yield for each step the global loss, the sum of the gradients, and the samples of this rank."""
    world = dist.get_world_size()
    for batch in batches:
        model.zero_grad()
        tokens = model.num_predicted(batch).to(torch.float64)
        everybody = tokens.clone()
        dist.all_reduce(everybody)
        share = float(tokens / everybody) if weighted else 1 / world
        loss = mean_loss(model, batch) * share
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        parameters = dict(model.named_parameters())
        summed = torch.cat([parameter.grad.flatten() for parameter in parameters.values()])  # type: ignore[union-attr]
        dist.all_reduce(summed)  # one AllReduce for all gradients is faster than many
        split = summed.split([parameter.numel() for parameter in parameters.values()])
        gradients = {name: part.view_as(parameters[name]) for name, part in zip(parameters, split, strict=True)}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter -= learning_rate * gradients[name]
        yield float(total), gradients, batch.num_samples


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all gradients, relative to their norm."""
    apart = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    size = sum(float(other[name].double().square().sum()) for name in other)
    return (apart / size) ** 0.5


def _gradients(rank: int, world: int, dtype: torch.dtype) -> dict[Any, list[tuple[float, float, int]]]:
    model = make_model(dtype)  # before the process group exists, because then each rank would draw other tables
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    plain = list(steps(model, loader(rank, world, None, "sampler", group)))
    found: dict[Any, list[tuple[float, float, int]]] = {}
    for mode in ("fixed", "variable"):
        for way in WAYS:
            batches = loader(rank, world, Planner(mode), way, group)  # type: ignore[arg-type]
            balanced = list(steps(model, batches))
            assert len(balanced) == len(plain) == STEPS
            found[mode, way] = [
                (difference(new[1], old[1]), abs(new[0] / old[0] - 1), new[2])
                for old, new in zip(plain, balanced, strict=True)
            ]
    unweighted = steps(model, loader(rank, world, Planner("variable"), "sampler", group), weighted=False)
    found["unweighted"] = [
        (difference(new[1], old[1]), 0.0, new[2]) for old, new in zip(plain, unweighted, strict=True)
    ]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.float64)])
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_of_every_step_are_equal(world: int, dtype: torch.dtype) -> None:
    by_rank = run_ranks(_gradients, world=world, args=(world, dtype))
    for mode in ("fixed", "variable"):
        for way in WAYS:
            for found in by_rank:
                assert max(gradient for gradient, _, _ in found[mode, way]) <= TOLERANCE[dtype], (mode, way)
                assert max(loss for _, loss, _ in found[mode, way]) <= TOLERANCE[dtype], (mode, way)
            counts = np.array([[count for _, _, count in found[mode, way]] for found in by_rank])
            assert (counts.sum(axis=0) == 16).all()
            assert (counts != 16 // world).any() == (mode == "variable"), (mode, way)
    # The mean over the means of the ranks, as in DDP, is different.
    assert max(gradient for gradient, _, _ in by_rank[0]["unweighted"]) > 1e-3


def _thirty_steps(rank: int) -> dict[str, list[float]]:
    initial = make_model(torch.float64)  # in float32 the training itself amplifies rounding errors
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))

    def losses(planner: Planner | None, way: str) -> list[float]:
        model = copy.deepcopy(initial)
        local = loader(rank, 2, planner, way, group)
        taken: list[float] = []
        for epoch in range(8):
            local.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            taken += [loss for loss, _, _ in steps(model, local, learning_rate=0.05)]
        return taken[:30]

    return {
        "plain": losses(None, "sampler"),
        "fixed": losses(Planner("fixed"), "sampler"),
        "variable": losses(Planner("variable"), "exchange"),
    }


def test_losses_of_thirty_steps_are_equal() -> None:
    losses = run_ranks(_thirty_steps)[0]
    assert len(losses["plain"]) == 30
    assert losses["plain"][-1] < 0.9 * losses["plain"][0]  # the model learns
    for mode in ("fixed", "variable"):
        assert losses[mode] == pytest.approx(losses["plain"], rel=1e-9)
