"""Which kernels the attention selects on CUDA. The kernels themselves are replaced, so no GPU is needed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_freescale.models.attention import cuda, hopper
from lightning_freescale.models.attention.cuda import CudaPlan

OFFSETS, TIMESTAMPS = torch.tensor([0, 3, 8]), torch.tensor([5, 6, 9, 1, 1, 2, 3, 7])
Q = torch.zeros(8, 2, 16)
BIASES = torch.ones(4), torch.ones(63)


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
    monkeypatch.setattr(cuda, "log_once", lambda message: made.append(("log", message)))
    return made


@pytest.mark.parametrize("bias", [True, False])
def test_hopper_kernels_where_they_run(calls: list, monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    monkeypatch.setattr(hopper, "available", lambda device: True)
    monkeypatch.setattr(hopper, "supports", lambda *args: None)
    plan = CudaPlan(OFFSETS, TIMESTAMPS, bias)
    cuda.attention(Q, Q, Q, *(BIASES if bias else (None, None)), 0.25, plan)
    (_, message), (kernel, offsets, alpha, own_plan, biases) = calls
    assert "the Hopper kernels run" in message
    assert (kernel, alpha) == ("hopper", 0.25)
    assert offsets is OFFSETS
    assert own_plan is plan.hopper
    assert own_plan.total == 8
    if bias:
        assert biases == BIASES
        assert own_plan.times.tolist() == [0, 1, 4, 0, 0, 1, 2, 6]
        assert own_plan.edges.tolist()[:4] == [0, 1, 1, 2]
    else:
        assert biases is own_plan.times is own_plan.edges is None


@pytest.mark.parametrize(("available", "reason"), [(False, "the GPU is not a Hopper"), (True, "the width is 16")])
@pytest.mark.parametrize("bias", [True, False])
def test_triton_kernels_otherwise(
    calls: list, monkeypatch: pytest.MonkeyPatch, available: bool, reason: str, bias: bool
) -> None:
    monkeypatch.setattr(hopper, "available", lambda device: available)
    monkeypatch.setattr(hopper, "supports", lambda *args: "the width is 16")
    cuda.attention(Q, Q, Q, *(BIASES if bias else (None, None)), 0.25, CudaPlan(OFFSETS, TIMESTAMPS, bias))
    (_, message), (kernel, biases, alpha, plan) = calls
    assert message.endswith(f"because {reason}")
    assert (kernel, alpha) == ("triton", 0.25)
    assert biases == (BIASES if bias else None)
    assert plan[2].tolist() == ([0, 1, 4, 0, 0, 1, 2, 6] if bias else [0] * 8)
