"""The package under test, inputs for it, and the attention written down plainly."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parents[3] / "lightning_freescale" / "models" / "attention" / "hopper"


def _load(name: str, path: Path) -> Any:
    """Load a package or a module by its path: it needs PyTorch only, and a machine may have no more."""
    folders = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


hopper = _load("hopper_under_test", FOLDER / "__init__.py")
buckets = _load("buckets_under_test", FOLDER.parent / "buckets.py")
EDGES = buckets.bucket_edges(hopper.BIAS_SLOTS)


def compile_kernels(qk: int, v: int, half: bool, bias: bool) -> None:
    """Compile the kernels of these head widths and this type, and keep them in the cache."""
    options = sys.modules["hopper_under_test.config"].config(qk, v, half, bias).options()
    sys.modules["hopper_under_test.compiler"].compiled(options)


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lengths: list[int]
    times: Tensor | None = None  # int32; with biases only
    biases: tuple[Tensor, Tensor] | None = None

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


def with_bias(inputs: Inputs, times: Tensor | None = None, positions: int | None = None, seed: int = 1) -> Inputs:
    """``inputs`` with random biases. Gaps between the events are log-uniform from a second to a month, unless given."""
    generator = torch.Generator().manual_seed(seed)
    device, total = inputs.q.device, sum(inputs.lengths)
    if times is None:
        gaps = (torch.rand(total, generator=generator) * 15).exp().long()
        parts = [gap.cumsum(0).clamp(max=2**30 - 1) for gap in gaps.split(inputs.lengths)]
        times = torch.cat(parts) if total else torch.zeros(0)
    sizes = positions or buckets.num_buckets(max(inputs.lengths)), buckets.num_buckets(2**31 - 1)
    position, time = (torch.randn(size, generator=generator).to(device) for size in sizes)
    return inputs._replace(times=times.int().to(device), biases=(position, time))


def select(inputs: Inputs, sample: int) -> Inputs:
    """The inputs of one history alone."""
    start, length = sum(inputs.lengths[:sample]), inputs.lengths[sample]
    times = None if inputs.times is None else inputs.times[start : start + length].clone()
    return Inputs(*(x[start : start + length].clone() for x in inputs[:4]), [length], times, inputs.biases)


def run(inputs: Inputs, alpha: float | None = None) -> list[Tensor]:
    """Output and gradients of ``q, k, v`` and the biases by the kernels."""
    alpha = inputs.q.shape[-1] ** -0.5 if alpha is None else alpha
    leaves = [x.detach().requires_grad_() for x in (*inputs[:3], *(inputs.biases or ()))]
    plan = hopper.plan(inputs.offsets, len(inputs.q), inputs.times, EDGES.to(inputs.q.device))
    out = hopper.attention(*leaves[:3], inputs.offsets, alpha, plan, tuple(leaves[3:]) or None)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)]


def run_through_silu(before: Inputs, active: Inputs) -> list[Tensor]:
    """The gradients of ``before``, of which ``active`` is the SiLU, and their sums over the events, by the kernels."""
    plan = hopper.plan(active.offsets, len(active.q))
    scaled = (active.dout.float() * plan.scale()[:, None, None]).to(active.q.dtype).contiguous()
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in active[:3])
    columns = [x.shape[1] * x.shape[2] for x in active[:3]]
    shares = torch.zeros(hopper.SILU_BLOCKS, sum(columns), device=active.q.device)
    silu = hopper.Silu(before[:3], shares.split(columns, 1))
    hopper.backward(*active[:3], None, active.q.shape[-1] ** -0.5, plan, scaled, grads, silu)
    return [*grads, *shares.sum(0).split(columns)]


def expected(inputs: Inputs, alpha: float | None = None) -> list[Tensor]:
    """Output and gradients in float64, one history at a time."""
    alpha = inputs.q.shape[-1] ** -0.5 if alpha is None else alpha
    leaves = [x.detach().double().requires_grad_() for x in (*inputs[:3], *(inputs.biases or ()))]
    times = (
        torch.zeros(len(inputs.q), dtype=torch.int32, device=inputs.q.device) if inputs.times is None else inputs.times
    )
    outs = []
    for q, k, v, t in zip(*(x.split(inputs.lengths) for x in (*leaves[:3], times)), strict=True):
        scores = alpha * torch.einsum("ihd,jhd->hij", q, k)
        if inputs.biases:
            row = torch.arange(len(q), dtype=torch.int32, device=q.device)
            for table, x in zip(leaves[3:], (row, t), strict=True):
                scores = scores + table[buckets.log_bucket(x[:, None] - x, len(table)).long()]
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
