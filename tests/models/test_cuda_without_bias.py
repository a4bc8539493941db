"""Which kernels attention without bias selects on CUDA. The kernels themselves are replaced, so no GPU is needed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_freescale.models.attention import cuda_without_bias, hopper
from lightning_freescale.models.attention.cuda_without_bias import BiasFreePlan

OFFSETS = torch.tensor([0, 3, 8])
Q = torch.zeros(8, 2, 16)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replace both kernels. Returns the list of their calls."""
    made: list[tuple[Any, ...]] = []
    triton = ModuleType("triton_attention")
    triton.plan = lambda offsets, times: ("triton plan", offsets, times)  # type: ignore[attr-defined]
    triton.attention = lambda q, k, v, *rest: made.append(("triton", *rest)) or v  # type: ignore[attr-defined]
    name = "lightning_freescale.models.attention.triton_attention"
    monkeypatch.setitem(sys.modules, name, triton)
    monkeypatch.setattr(sys.modules["lightning_freescale.models.attention"], "triton_attention", triton, raising=False)
    monkeypatch.setattr(hopper, "attention", lambda q, k, v, *rest: made.append(("hopper", *rest)) or v)
    messages = made
    monkeypatch.setattr(cuda_without_bias, "log_once", lambda message: messages.append(("log", message)))
    return made


def test_hopper_kernels_where_they_run(calls: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "available", lambda device: True)
    monkeypatch.setattr(hopper, "supports", lambda q, k, v: None)
    plan = BiasFreePlan(OFFSETS, 8)
    cuda_without_bias.attention(Q, Q, Q, 0.25, plan)
    (_, message), (kernel, offsets, alpha, own_plan) = calls
    assert "the Hopper kernels run" in message
    assert (kernel, alpha) == ("hopper", 0.25)
    assert offsets is OFFSETS
    assert own_plan is plan.hopper
    assert own_plan.total == 8


@pytest.mark.parametrize(("available", "reason"), [(False, "the GPU is not a Hopper"), (True, "the width is 16")])
def test_triton_kernels_otherwise(calls: list, monkeypatch: pytest.MonkeyPatch, available: bool, reason: str) -> None:
    monkeypatch.setattr(hopper, "available", lambda device: available)
    monkeypatch.setattr(hopper, "supports", lambda q, k, v: "the width is 16")
    cuda_without_bias.attention(Q, Q, Q, 0.25, BiasFreePlan(OFFSETS, 8))
    (_, message), (kernel, position_bias, time_bias, alpha, plan) = calls
    assert message.endswith(f"because {reason}")
    assert (kernel, alpha) == ("triton", 0.25)
    assert position_bias.tolist() == time_bias.tolist() == [0.0]
    assert plan[2].tolist() == [0] * 8
