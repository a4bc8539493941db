"""Copies beside compute are exact, whether or not the driver takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_freescale.runtime import copies_beside_compute
from lightning_freescale.runtime.copies_beside_compute import can_overlap, copy_beside_compute
from lightning_freescale.runtime.streams import SideStream


def originals(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(4000, 64, generator=generator).to(device)
    return [table, table[:, 3:9], table[:0], table.to(torch.bfloat16), torch.tensor(3, device=device), table[100:200]]


@pytest.mark.parametrize("driver", ["has it", "does not have it", "refuses"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_are_exact(device: str, driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        return 801  # CUDA_ERROR_NOT_SUPPORTED

    if driver != "has it":
        monkeypatch.setattr(copies_beside_compute, "_batch_copy", lambda: refuse if driver == "refuses" else None)
    sources = originals(device)
    targets = [torch.full_like(source, 7) for source in sources]
    with SideStream(torch.device(device)).work(compute=True):
        copy_beside_compute(list(zip(targets, sources, strict=True)))
    if device == "cuda":
        torch.cuda.synchronize()
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)
    assert not torch.equal(torch.full_like(sources[0], 7), sources[0])  # the comparison can fail


def test_only_whole_tensors_of_a_gpu_go_to_the_driver() -> None:
    table = torch.zeros(4, 4)
    assert not can_overlap(table, table)


@pytest.mark.gpu
def test_the_driver_takes_the_copies() -> None:
    source = originals("cuda")[0]
    target = torch.zeros_like(source)
    with SideStream(source.device).work(compute=True):
        taken = copies_beside_compute._copy_in_batch([(target, source)])
    torch.cuda.synchronize()
    assert torch.equal(target, source) is taken
    if copies_beside_compute._batch_copy() is not None:
        assert taken
