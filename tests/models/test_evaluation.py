"""Validation and test of HSTU against a plain Python ranking, for the whole catalogue and for a part of it."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_freescale.data import SeqRecDataModule, Synthetic
from lightning_freescale.models import HSTU
from lightning_freescale.models.evaluation import without_seen
from lightning_freescale.runtime.errors import InputError
from tests.models.cases import make_batch
from tests.models.test_hstu import ITEMS, loader, planted, tiny, trainer


def python_metrics(model: HSTU, histories: list[list[int]], targets: list[int], filter_seen: bool) -> dict[str, float]:
    """The five metrics by sorting the catalogue for one user after another."""
    items = torch.nn.functional.normalize(model.embedding.embeddings["item"].weight, dim=-1)
    sums: dict[str, float] = dict.fromkeys(("hr@10", "hr@50", "ndcg@10", "ndcg@50", "mrr"), 0.0)
    for history, target in zip(histories, targets, strict=True):
        scores = (items @ model(make_batch([history]))[-1]).tolist()
        order = sorted(range(len(scores)), key=lambda item: -scores[item])
        if filter_seen:
            order = [item for item in order if item == target or item not in history]
        rank = order.index(target)
        sums["mrr"] += 1 / (rank + 1)
        for k in (10, 50):
            sums[f"hr@{k}"] += rank < k
            sums[f"ndcg@{k}"] += 1 / math.log2(rank + 2) if rank < k else 0.0
    return {name: value / len(targets) for name, value in sums.items()}


@pytest.mark.parametrize("filter_seen", [False, True])
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_metrics_equal_a_ranking_in_plain_python(tmp_path: Path, stage: str, filter_seen: bool) -> None:
    torch.manual_seed(0)
    model = HSTU(200, embedding_dim=16, max_history=32, filter_seen=filter_seen).eval()
    rng = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 30, (24,), generator=rng).tolist()
    histories = [torch.randint(200, (length,), generator=rng).tolist() for length in lengths]
    targets = torch.randint(200, (24,), generator=rng).tolist()
    targets[0] = histories[0][0]  # a seen item may be the target
    batches = loader([make_batch(histories[i : i + 10], targets=targets[i : i + 10]) for i in range(0, 24, 10)])
    logged = getattr(trainer(tmp_path), stage)(model, batches, verbose=False)[0]
    prefix = {"validate": "val", "test": "test"}[stage]
    expected = {f"{prefix}/{k}": v for k, v in python_metrics(model, histories, targets, filter_seen).items()}
    assert {name: value for name, value in logged.items() if not name.endswith("/loss")} == pytest.approx(expected)
    other = python_metrics(model, histories, targets, not filter_seen)
    assert other["mrr"] != pytest.approx(expected[f"{prefix}/mrr"])  # negative control


def test_the_data_module_holds_out_the_last_two_events(tmp_path: Path) -> None:
    """``validate`` ranks the second to last event of each user by the events before it, ``test`` the last one."""
    histories = Synthetic(users=30, items=60, clusters=6, mean_length=9).generate()
    users = [part.tolist() for part in np.split(histories.items, histories.offsets[1:-1])]
    data = SeqRecDataModule(histories, batch_size=8, max_history=100)
    torch.manual_seed(0)
    model = HSTU(60, embedding_dim=16, max_history=100, bias="input", position_embedding=False).eval()
    assert model.event_encoding is not None
    torch.nn.init.zeros_(model.event_encoding.time_gap.weight)  # the reference below has other times
    for stage, prefix, back in (("validate", "val", 2), ("test", "test", 1)):
        logged = getattr(trainer(tmp_path), stage)(model, datamodule=data, verbose=False)[0]
        expected = python_metrics(model, [own[:-back] for own in users], [own[-back] for own in users], False)
        found = {name.removeprefix(f"{prefix}/"): value for name, value in logged.items() if "loss" not in name}
        assert found == pytest.approx(expected)


def test_seen_items_among_a_part_of_the_catalogue() -> None:
    """Items of the history that are not ranked change nothing."""
    batch = make_batch([[7, 2, 99, 7], [0]])
    ids = torch.tensor([0, 2, 5, 7])
    hidden = without_seen(torch.ones(2, 4), ids, batch).isinf()
    assert hidden.tolist() == [[False, True, False, True], [True, False, False, False]]


def test_validation_among_a_part_of_the_catalogue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out, targets = planted(20, seed=1)
    batch = make_batch(held_out, targets=targets)
    model = tiny()
    whole = trainer(tmp_path).validate(model, loader([batch]), verbose=False)[0]
    model.hparams["max_eval_items"] = ITEMS
    assert trainer(tmp_path).validate(model, loader([batch]), verbose=False)[0] == whole
    model.hparams["max_eval_items"] = 9
    monkeypatch.setattr(logging.getLogger("lightning_freescale"), "propagate", True)
    with caplog.at_level(logging.INFO):
        part = trainer(tmp_path).validate(model, loader([batch]), verbose=False)[0]
    assert part["val/hr@10"] == 1.0  # at most nine items rank before the target
    assert part["val/ndcg@10"] > whole["val/ndcg@10"]
    assert "9 random items of 30" in caplog.text


def test_validation_needs_targets(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="targets: None"):
        trainer(tmp_path).validate(tiny(), loader([make_batch([[1, 2]])]), verbose=False)


def test_validation_ranks_by_brute_force(tmp_path: Path) -> None:
    held_out, targets = planted(20, seed=1)
    model = tiny().eval()
    logged = trainer(tmp_path).validate(model, loader([make_batch(held_out, targets=targets)]), verbose=False)[0]
    items = torch.nn.functional.normalize(model.embedding.embeddings["item"].weight, dim=-1)
    hits, gains = [], []
    for history, target in zip(held_out, targets, strict=True):
        order = (items @ model(make_batch([history]))[-1]).argsort(descending=True).tolist()
        rank = order.index(target)
        hits.append(rank < 10)
        gains.append(1 / torch.log2(torch.tensor(rank + 2.0)).item() if rank < 10 else 0.0)
    assert logged["val/hr@10"] == pytest.approx(sum(hits) / 20)
    assert logged["val/ndcg@10"] == pytest.approx(sum(gains) / 20)
