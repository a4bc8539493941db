"""What happens to a batch between the loader and the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_freescale.batch.contents import find_tensors
from lightning_freescale.strategy.prepared_batch import start_copy
from tests.balance.batches import seq_batch
from tests.toy import Samples, collate


@dataclass(frozen=True)
class Frozen:
    tensor: Tensor


def devices(batch: Any) -> set[str]:
    return {tensor.device.type for tensor in find_tensors(batch)}


def test_all_tensors_of_a_batch_are_moved() -> None:
    samples = Samples(4)
    own = collate([samples[index] for index in range(4)])
    batch = {"own": own, "history": seq_batch([1, 2]), "more": [torch.ones(2), (torch.ones(3), "text")]}
    moved = start_copy(batch, torch.device("meta"))
    assert devices(batch) == {"cpu"}
    assert devices(moved) == {"meta"}
    assert moved["own"].features.keys() == own.features.keys()
    assert moved["more"][1][1] == "text"


def test_what_cannot_be_changed_is_left_to_lightning() -> None:
    frozen = Frozen(torch.ones(2))
    assert devices(start_copy([frozen, torch.ones(1)], torch.device("meta"))) == {"cpu", "meta"}
