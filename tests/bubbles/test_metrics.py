"""The metrics give the same figures on real ranks and in one process that has the steps of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchmetrics import MetricCollection

from lightning_freescale.bubbles import metrics
from tests.ranks import run_ranks

# [ranks, steps]
WALL = np.array([[0.1, 0.2, 0.1], [0.1, 0.2, 0.1]])
PART = np.array([[0.05, 0.02, 0.0], [0.01, 0.0, 0.02]])
LOAD = np.array([[3.0, 1.0, 2.0], [1.0, 1.0, 6.0]])
LENGTHS = [[torch.tensor([3, 1]), torch.tensor([4])], [torch.tensor([2, 2, 8]), torch.tensor([1, 3])]]
EXPECTED = {
    "share": PART.sum() / WALL.sum(),
    "overlap": PART.sum() / (PART.sum() + WALL.sum()),
    "sparsity": 1 - 24 / (6 + 4 + 24 + 6),
    "collisions": 0.25,
    "bytes": 1000 * LOAD.mean(),
    "step": 1e3 * WALL.mean(),
    "rate": LOAD.sum() / WALL[0].sum(),
    "mfu": LOAD.sum() / WALL[0].sum() / 2 / 50,
    "imbalance": (3 / 2 + 1 + 6 / 4) / 3,
}


def collection() -> dict[str, Any]:
    return {
        "share": metrics.BubbleShare(),
        "overlap": metrics.OverlapEfficiency(),
        "sparsity": metrics.PaddingSparsity(),
        "collisions": metrics.CollisionRate(),
        "bytes": metrics.BytesExchanged(),
        "step": metrics.StepTime(),
        "rate": metrics.Rate(),
        "mfu": metrics.Rate(peak=50.0),
        "imbalance": metrics.Imbalance(),
    }


def update(held: dict[str, Any], ranks: list[int], step: int) -> None:
    for rank in ranks:
        wall, part, load = WALL[rank, step], PART[rank, step], LOAD[rank, step]
        held["share"].update(part, wall)
        held["overlap"].update(part, wall)
        if step < 2:
            held["sparsity"].update_lengths(LENGTHS[rank][step])
        held["collisions"].update(torch.tensor(1), torch.tensor(4))
        held["bytes"].update(1000 * load)
        held["step"].update(wall)
    amount = LOAD[ranks, step]
    for name in ("rate", "mfu"):
        held[name].update(amount, WALL[0, step], ranks=len(ranks))
    held["imbalance"].update(amount if step else amount[None])  # [ranks] or [steps, ranks]


def on_ranks(rank: int) -> list[dict[str, float]]:
    dist.init_process_group("gloo")
    held = collection()
    results = []
    for _ in range(2):  # the second round shows that reset clears everything
        for step in range(3):
            update(held, [rank], step)
        results.append({name: float(metric.compute()) for name, metric in held.items()})
        for metric in held.values():
            metric.reset()
    return results


def test_ranks_compute_the_known_figures() -> None:
    for results in run_ranks(on_ranks):
        assert results[0] == pytest.approx(EXPECTED)
        assert results[1] == pytest.approx(EXPECTED)


def test_one_process_with_all_steps_computes_the_known_figures() -> None:
    held = collection()
    for step in range(3):
        update(held, [0, 1], step)
    assert {name: float(metric.compute()) for name, metric in held.items()} == pytest.approx(EXPECTED)


def test_one_rank_without_sync_has_other_figures() -> None:
    """Without the sync, a rank has only its own share."""
    held = collection()
    for step in range(3):
        update(held, [1], step)
    alone = {name: float(metric.compute()) for name, metric in held.items()}
    assert alone["share"] == pytest.approx(PART[1].sum() / WALL[1].sum())
    assert alone["imbalance"] == 1
    assert alone["rate"] < EXPECTED["rate"]


def test_empty_metrics_are_finite() -> None:
    values = {name: float(metric.compute()) for name, metric in collection().items()}
    assert all(np.isfinite(value) for value in values.values())
    assert values["overlap"] == values["imbalance"] == 1
    assert values["share"] == values["rate"] == 0


def test_collections_forward_and_state_dicts_work() -> None:
    collected = MetricCollection({"a": metrics.BubbleShare(), "b": metrics.BubbleShare()})
    collected.update(part=torch.tensor([0.01, 0.03]), wall=torch.tensor([0.1, 0.1]))
    assert collected.compute()["a"] == pytest.approx(0.2)
    first = metrics.BubbleShare()
    assert first(0.05, 0.1) == pytest.approx(0.5)  # forward: the value of this update
    first(0.0, 0.1)
    assert first.compute() == pytest.approx(0.25)
    first.persistent(True)
    second = metrics.BubbleShare()
    second.persistent(True)
    second.load_state_dict(first.state_dict())
    assert second.compute() == first.compute()
