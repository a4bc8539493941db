"""The SASRec that ``benchmarks.quality`` compares HSTU with."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.harness.training.sasrec import SASRec
from benchmarks.harness.training.step_timestamps import StepTimestamps
from tests.models.cases import make_batch
from tests.models.test_hstu import ITEMS, loader, planted, trainer, training_batch


def sasrec() -> SASRec:
    torch.manual_seed(0)
    model = SASRec(ITEMS, embedding_dim=16, num_layers=2, max_history=32, lr=1e-2)
    model.timestamps = StepTimestamps(torch.device("cpu"))
    return model


def test_outputs_depend_on_the_past_alone() -> None:
    model = sasrec().eval()
    first = model(make_batch([[1, 2, 3, 4, 5], [9, 8]]))
    second = model(make_batch([[1, 2, 3, 4, 25], [9, 8]]))
    torch.testing.assert_close(first[:4], second[:4])
    assert not torch.allclose(first[4], second[4])
    torch.testing.assert_close(model(make_batch([[9, 8]])), first[5:])  # the other samples do not matter either


def test_learns_a_planted_sequence(tmp_path: Path) -> None:
    histories, _ = planted()
    held_out, targets = planted(40, seed=1)
    fit = trainer(tmp_path, max_epochs=15)
    batches = loader([training_batch(histories[i : i + 16], seed=i) for i in range(0, 64, 16)])
    fit.fit(sasrec(), batches, loader([make_batch(held_out, targets=targets)]))
    assert fit.callback_metrics["val/hr@10"] > 0.9
