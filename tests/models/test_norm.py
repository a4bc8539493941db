"""Norms of rows: PyTorch's operations on a CPU, and the Triton kernels, interpreted and compiled, against float64.

Errors are ``|got - expected| / |expected|``. The kernels compute in float32 and round each result once.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_freescale.models.norm import gated_layer_norm, layer_norm, unit_rows
from tests.models.cases import assert_close, relative_errors
from tests.models.interpreter import run_interpreted

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
TYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
EPS = 1e-5


def norm_inputs(
    rows: int, width: int, *, gated: bool = True, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> dict[str, Tensor]:
    """Random arguments of ``layer_norm``. ``x`` and ``gate`` are views of one tensor, like the parts of a projection."""
    rng = torch.Generator().manual_seed(0)
    both = (torch.randn(rows, 2 * width, generator=rng) * 2 + 1).to(device, dtype)
    weight, bias = (torch.randn(width, generator=rng).to(device) for _ in range(2))
    made = {"x": both[:, :width], "weight": weight, "bias": bias}
    return made | ({"gate": both[:, width:]} if gated else {})


def run_norm(function: Callable[..., Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output, and all gradients for a fixed random gradient of the output. Results are converted to float64."""
    leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    out = function(**leaves)
    dout = torch.randint(-8, 9, out.shape, generator=torch.Generator().manual_seed(1)).to(out) / 4  # exact in any type
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {name: value.detach().double() for name, value in zip(("out", *leaves), (out, *grads), strict=True)}


def exact(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    def norm(x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor | None = None) -> Tensor:
        out = F.layer_norm(x, weight.shape, weight, bias, EPS)
        return out if gate is None else out * gate

    return run_norm(norm, {name: value.double() for name, value in inputs.items()})


def short_and_empty_rows(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """``x`` with a row of zeros and a row that is shorter than ``eps``, the smallest divisor."""
    x = inputs["x"].clone()
    x[0] = 0.0
    x[-1] *= 1e-20
    return {"x": x}


def exact_unit_rows(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return run_norm(lambda x: F.normalize(x, dim=-1), {name: value.double() for name, value in inputs.items()})


def test_on_a_cpu_pytorch_computes_the_norms() -> None:
    norm, x, gate = nn.LayerNorm(12), torch.randn(7, 12), torch.randn(7, 12)
    assert torch.equal(layer_norm(norm, x), norm(x))
    assert torch.equal(gated_layer_norm(norm, x, gate), norm(x) * gate)
    assert torch.equal(unit_rows(x.bfloat16()), F.normalize(x.bfloat16().float(), dim=-1))


SCRIPT = """
import torch
import torch.nn.functional as F
from lightning_freescale.models import norm_triton
from tests.models.cases import assert_close, relative_errors
from tests.models.test_norm import EPS, exact, exact_unit_rows, norm_inputs, run_norm, short_and_empty_rows

def interpreted(x, weight, bias, gate=None):
    return norm_triton.layer_norm(x, gate, weight, bias, EPS, x.dtype)

for rows, width, elements, programs in ((1, 8, 64, 4), (37, 12, 64, 3), (50, 16, 4096, 512)):
    norm_triton.ELEMENTS = norm_triton.BACKWARD_ELEMENTS = elements
    norm_triton.PROGRAMS = programs  # a program has several tiles, the last one is not full
    for gated in (False, True):
        inputs = norm_inputs(rows, width, gated=gated)
        assert_close(run_norm(interpreted, inputs), exact(inputs), 1e-6)
    lone = short_and_empty_rows(inputs)
    assert_close(run_norm(norm_triton.unit_rows, lone), exact_unit_rows(lone), 1e-6)
    inner = {"x": inputs["x"]}
    assert_close(run_norm(norm_triton.unit_rows, inner), exact_unit_rows(inner), 1e-6)
    first = (rows + 1) // 2
    given = run_norm(lambda x: norm_triton.unit_rows(x, first), inner)
    expected = run_norm(lambda x: F.normalize(x[:first], dim=-1), inner)
    assert given["out"].shape == (first, width) and not given["x"][first:].any()
    assert_close(given, expected, 1e-6)
wrong = inputs | {"bias": inputs["bias"] + 1e-3}
assert relative_errors(run_norm(interpreted, wrong), exact(inputs))["out"] > 1e-4
assert relative_errors(run_norm(norm_triton.unit_rows, inner), exact_unit_rows({"x": inner["x"] + 1e-3}))["out"] > 1e-4
assert interpreted(**norm_inputs(0, 8)).shape == norm_triton.unit_rows(norm_inputs(0, 8)["x"]).shape == (0, 8)
"""


def test_interpreted_kernels_equal_float64() -> None:
    run_interpreted(SCRIPT)


def compiled(x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor | None = None) -> Tensor:
    """The kernel with weight and bias as plain tensors: ``nn.LayerNorm`` takes parameters only."""
    from lightning_freescale.models import norm_triton

    return norm_triton.layer_norm(x, gate, weight, bias, EPS, x.dtype)


@pytest.mark.gpu
@TYPES
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (1000, 128), (3001, 96), (40_000, 512), (5, 5000)])
def test_compiled_kernels_equal_float64(rows: int, width: int, gated: bool, dtype: torch.dtype) -> None:
    inputs = norm_inputs(rows, width, gated=gated, dtype=dtype, device="cuda")
    assert_close(run_norm(compiled, inputs), exact(inputs), TOLERANCE[dtype])


@pytest.mark.gpu
@TYPES
@pytest.mark.parametrize(("rows", "width"), [(2, 8), (3001, 96), (40_000, 128)])
def test_compiled_unit_rows_equal_float64(rows: int, width: int, dtype: torch.dtype) -> None:
    from lightning_freescale.models import norm_triton

    inputs = {"x": norm_inputs(rows, width, dtype=dtype, device="cuda")["x"]}
    assert_close(run_norm(norm_triton.unit_rows, inputs), exact_unit_rows(inputs), TOLERANCE[dtype])
    if dtype == torch.float32:
        inputs = short_and_empty_rows(inputs)
        assert_close(run_norm(norm_triton.unit_rows, inputs), exact_unit_rows(inputs), TOLERANCE[dtype])


@pytest.mark.gpu
def test_a_wrong_bias_is_detected() -> None:
    inputs = norm_inputs(1000, 128, dtype=torch.bfloat16, device="cuda")
    wrong = inputs | {"bias": inputs["bias"] + 0.1}
    assert relative_errors(run_norm(compiled, wrong), exact(inputs))["out"] > 3 * TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_same_bits_alone_and_in_any_batch() -> None:
    inputs = norm_inputs(5000, 128, dtype=torch.bfloat16, device="cuda")
    alone = {name: value[:300] if value.dim() == 2 else value for name, value in inputs.items()}
    together, single = run_norm(compiled, inputs), run_norm(compiled, alone)
    for name in ("out", "x", "gate"):
        assert torch.equal(together[name][:300], single[name]), name
    again = run_norm(compiled, inputs)
    assert all(
        torch.equal(together[name], again[name]) for name in together
    )  # the kernels use no atomics, so a second run has the same bits


@pytest.mark.gpu
def test_the_module_on_cuda() -> None:
    """The output has the type of autocast. Without rows the output is empty and the gradients are zero."""
    norm, x = nn.LayerNorm(128, device="cuda"), torch.randn(9, 128, device="cuda", requires_grad=True)
    assert layer_norm(norm, x).dtype == torch.float32
    with torch.autocast("cuda", torch.bfloat16):
        out = gated_layer_norm(norm, x, x.bfloat16())
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), norm(x) * x, rtol=1e-2, atol=1e-2)
    nothing = gated_layer_norm(norm, x[:0], x[:0])
    nothing.sum().backward()
    assert nothing.shape == (0, 128)
    assert norm.weight.grad is not None
    assert not norm.weight.grad.any()
