"""The package under test, inputs for it, and the attention written down plainly."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parents[3] / "lightning_freescale" / "models" / "attention" / "hopper"


def _load() -> Any:
    """Load the package by its path: it needs PyTorch only, and a machine may have no more."""
    name = "hopper_under_test"
    spec = importlib.util.spec_from_file_location(
        name, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


hopper = _load()


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lengths: list[int]

    @property
    def offsets(self) -> Tensor:
        return torch.tensor([0, *self.lengths], device=self.q.device).cumsum(0)


def make(
    lengths: list[int],
    heads: int = 2,
    qk: int = 64,
    v: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    seed: int = 0,
) -> Inputs:
    """Random inputs; ``q, k, v`` are slices of one array, as a layer's projection gives them."""
    generator = torch.Generator().manual_seed(seed)
    total, sizes = sum(lengths), [heads * qk, heads * qk, heads * v, heads * v]
    packed = torch.randn(total, sum(sizes), generator=generator).to(device, dtype)
    parts = [x.unflatten(1, (heads, -1)) for x in packed.split(sizes, 1)]
    return Inputs(*parts, lengths)


def select(inputs: Inputs, sample: int) -> Inputs:
    """The inputs of one history alone."""
    start, length = sum(inputs.lengths[:sample]), inputs.lengths[sample]
    return Inputs(*(x[start : start + length].clone() for x in inputs[:4]), [length])


def run(inputs: Inputs, alpha: float | None = None) -> list[Tensor]:
    """Output and gradients of ``q, k, v`` by the kernels."""
    alpha = inputs.q.shape[-1] ** -0.5 if alpha is None else alpha
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = hopper.attention(*leaves, inputs.offsets, alpha)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)]


def expected(inputs: Inputs, alpha: float | None = None) -> list[Tensor]:
    """Output and gradients in float64, one history at a time."""
    alpha = inputs.q.shape[-1] ** -0.5 if alpha is None else alpha
    leaves = [x.detach().double().requires_grad_() for x in inputs[:3]]
    outs = []
    for q, k, v in zip(*(x.split(inputs.lengths) for x in leaves), strict=True):
        scores = alpha * torch.einsum("ihd,jhd->hij", q, k)
        weights = torch.nn.functional.silu(scores).tril()
        rows = torch.arange(1, len(q) + 1, device=q.device)
        outs.append(torch.einsum("hij,jhd->ihd", weights, v) / rows[:, None, None])
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.dout.double())]


def errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    """``|got - want| / |want|`` of each array; infinite where a value is not finite."""
    result = []
    for x, y in zip(got, want, strict=True):
        error = ((x.double() - y).norm() / y.norm()).item() if y.numel() else 0.0
        result.append(error if error == error else float("inf"))
    return result
