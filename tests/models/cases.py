"""Inputs and comparisons that the tests of the models share, on a CPU, on CUDA and in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.models.attention import dense_attention
from lightning_freescale.models.attention.buckets import num_buckets

NAMES = ("out", "dq", "dk", "dv", "dposition", "dtime")
MINUTE, YEAR = 60, 365 * 24 * 3600


def attention_inputs(
    lengths: Sequence[int],
    *,
    heads: int = 2,
    qk_dim: int = 16,
    v_dim: int = 16,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    sorted_times: bool = True,
    position_buckets: int | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random arguments of ``hstu_attention``. Gaps between events are log-uniform from a second to a month."""
    rng = torch.Generator().manual_seed(seed)
    total, longest = sum(lengths), max(lengths, default=0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    gaps = (torch.rand(total, generator=rng) * 15).exp().long()
    times = [1_500_000_000 + part.cumsum(0) for part in gaps.split(list(lengths))]
    if not sorted_times:
        times = [part[torch.randperm(len(part), generator=rng)] for part in times]
    tables = torch.promote_types(dtype, torch.float32)  # under autocast the tables stay float32
    made = {
        "q": normal(total, heads, qk_dim).to(dtype),
        "k": normal(total, heads, qk_dim).to(dtype),
        "v": normal(total, heads, v_dim).to(dtype),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
        "timestamps": torch.cat(times) if times else torch.empty(0, dtype=torch.int64),
        "position_bias": normal(position_buckets or num_buckets(longest)).to(tables),
        "time_bias": normal(num_buckets(2**31 - 1)).to(tables),
    }
    return {name: value.to(device) for name, value in made.items()}


def run_attention(function: Callable[..., Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output, and all gradients for a fixed random gradient of the output. Results are converted to float64."""
    return _run(function, inputs, ("q", "k", "v", "position_bias", "time_bias"))


def run_without_bias(function: Callable[..., Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """As :func:`run_attention`, without the two biases of ``inputs``."""
    return _run(function, inputs | {"position_bias": None, "time_bias": None}, ("q", "k", "v"))


def _run(function: Callable[..., Tensor], inputs: dict[str, Any], learned: Sequence[str]) -> dict[str, Tensor]:
    leaves = {name: None if value is None else value.detach().clone() for name, value in inputs.items()}
    for name in learned:
        leaves[name].requires_grad_()
    out = function(**leaves)
    dout = (
        torch.randint(-8, 9, out.shape, generator=torch.Generator().manual_seed(1)).to(out) / 4
    )  # these values are exact in any type
    grads = torch.autograd.grad(out, [leaves[name] for name in learned], dout)
    names = NAMES[: 1 + len(learned)]
    return {name: value.detach().double() for name, value in zip(names, (out, *grads), strict=True)}


def zero_bias(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """``inputs`` with biases of 0, for the reference of attention without bias."""
    return inputs | {name: torch.zeros_like(inputs[name]) for name in ("position_bias", "time_bias")}


def dense_result(inputs: dict[str, Tensor], names: Sequence[str] = NAMES) -> dict[str, Tensor]:
    """Output and gradients of the reference, computed in float64 from the same inputs (which may be rounded)."""
    wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    found = run_attention(dense_attention, wide)
    return {name: found[name] for name in names}


def relative_errors(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """``|got - expected| / |expected|`` of each result. NaN stays NaN."""
    return {
        name: float((got[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-30)) for name in expected
    }


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Fail if any relative error is above ``tolerance`` or NaN."""
    errors = relative_errors(got, expected)
    assert all(error <= tolerance for error in errors.values()), f"tolerance {tolerance}: {errors}"


def make_batch(
    histories: Sequence[Sequence[int]],
    negatives: Sequence[Sequence[int]] | None = None,
    targets: Sequence[int] | None = None,
    features: dict[str, Sequence[Sequence[int]]] | None = None,
    gap: int = MINUTE,
) -> SeqBatch:
    """A batch from lists of ids, with one event every ``gap`` seconds."""
    negatives = negatives if negatives is not None else [[] for _ in histories]
    columns = {HISTORY: histories, NEGATIVES: negatives, **(features or {})}
    values = [torch.tensor([i for row in column for i in row], dtype=torch.int64) for column in columns.values()]
    lengths = [torch.tensor([len(row) for row in column], dtype=torch.int64) for column in columns.values()]
    times = [gap * torch.arange(len(row)) for row in histories]
    return SeqBatch(
        KeyedJaggedTensor(keys=list(columns), values=torch.cat(values), lengths=torch.cat(lengths)),
        torch.cat(times) if times else torch.empty(0, dtype=torch.int64),
        None if targets is None else torch.tensor(targets),
    )
