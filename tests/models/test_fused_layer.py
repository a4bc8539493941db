"""The fused layers of CUDA against the layers part by part: in Triton's interpreter, and compiled.

Errors are ``|got - expected| / |expected|``. The reference is the layers on a CPU in float32, or in float64 for the compiled one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_freescale.models.attention import cuda
from lightning_freescale.models.hstu_layer import HSTULayer
from lightning_freescale.models.personal_tokens import PersonalTokens, TokenSequences, arrange
from lightning_freescale.models.sequences import Attention, TokenAttention
from tests.models.cases import attention_inputs
from tests.models.interpreter import run_interpreted

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def make_layers(
    bias: bool, dim: int = 16, heads: int = 2, width: int = 16, dropout: float = 0.3, count: int = 2
) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(
        HSTULayer(dim, heads, width, 2 * width, 12 if bias else 0, dropout, number=3 + number)
        for number in range(count)
    )
    for parameter in layers.parameters():  # no zeros and ones: a part that is left out must be seen
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.5)
    return layers.train()


def make_layer(bias: bool, dim: int = 16, heads: int = 2, width: int = 16, dropout: float = 0.3) -> Any:
    """One layer of :func:`make_layers`."""
    return make_layers(bias, dim, heads, width, dropout)[0]


def make_batch(lengths: list[int], dim: int = 16) -> dict[str, Tensor]:
    times = attention_inputs(lengths, qk_dim=2, v_dim=2)["timestamps"]
    rng = torch.Generator().manual_seed(1)
    total = sum(lengths)
    return {
        "x": torch.randn(total, dim, generator=rng),
        "dout": torch.randn(total, dim, generator=rng),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
        "timestamps": times,
        "keys": torch.randint(-(2**31), 2**31, (total,), generator=rng).int(),
    }


def run_layers(
    layers: nn.ModuleList, batch: dict[str, Tensor], fused: bool = False, prepare: Callable[..., None] | None = None
) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of all parameters. ``fused`` calls the function of CUDA on any device.

    ``prepare`` is called with the layers and the plan before.
    """
    x: Any = batch["x"].detach().requires_grad_()
    leaves = {"x": x} | dict(layers.named_parameters())
    bias = layers[0].position_bias is not None
    attention = Attention(batch["offsets"], batch["timestamps"], bias)
    plan = cuda.CudaPlan(batch["offsets"], batch["timestamps"], bias)
    if prepare is not None:
        prepare(layers, plan)
    for layer in layers:
        last = layer is layers[-1]
        x = layer._fused(x, plan, batch["keys"]) if fused else layer(x, attention, batch["keys"], total=last)
    out = x.total() if fused else x
    grads = torch.autograd.grad(out, list(leaves.values()), batch["dout"].to(out.dtype))
    return {"out": out.detach()} | dict(zip(leaves, grads, strict=True))


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((got[name].cpu().double() - y.cpu()).norm() / y.cpu().norm()) for name, y in want.items()}


def run_with_tokens(
    layer: HSTULayer, batch: dict[str, Tensor], attention: TokenAttention, call: Any = None
) -> dict[str, Tensor]:
    """:func:`run_layer` with personal tokens. The rows of the batch are those of the layer: events and tokens."""
    x = batch["x"].detach().requires_grad_()
    plan = cuda.CudaPlan(attention.offsets, attention.timestamps, layer.position_bias is not None)
    out = layer(x, attention, batch["keys"]) if call is None else call(x, plan, batch["keys"], attention).total()
    names = ["x", *dict(layer.named_parameters())]
    grads = torch.autograd.grad(out, [x, *layer.parameters()], batch["dout"].to(out.dtype))
    return {"out": out.detach()} | dict(zip(names, grads, strict=True))


def token_case(
    lengths: list[int], cut: PersonalTokens, bias: bool, dim: int = 16
) -> tuple[dict[str, Tensor], TokenAttention]:
    events = torch.tensor(lengths)
    sequences = arrange(events, cut.history_lengths(events), sum(lengths), cut)
    batch = make_batch([length + cut.tokens * cut.segments for length in lengths], dim)
    return batch, TokenAttention(sequences, batch["timestamps"], bias)


SCRIPT = """
import torch
from lightning_freescale.models import elementwise_triton, norm_triton
from tests.models.test_fused_layer import errors, make_batch, make_layers, run_layers

elementwise_triton.COLUMNS, elementwise_triton.SUM_PROGRAMS, norm_triton.PROGRAMS = 32, 3, 2
from lightning_freescale.models.fused_layer import postpone_gradients, round_weights
batch = make_batch([5, 0, 12, 1])
for bias, dropout in ((True, 0.3), (False, 0.0)):
    layers = make_layers(bias, dropout=dropout)
    want = run_layers(layers, batch)
    found = errors(run_layers(layers, batch, fused=True), want)
    assert max(found.values()) < 2e-5, found
late = lambda layers, plan: postpone_gradients(layers[0], plan)
postponed = run_layers(layers, batch, fused=True, prepare=late)
at_once = run_layers(layers, batch, fused=True)
assert all(torch.equal(postponed[name], at_once[name]) for name in at_once)
round_half = lambda layers, plan: round_weights(layers, plan, torch.float16)
assert errors(run_layers(layers, batch, fused=True, prepare=round_half), want)["out"] < 2e-5  # another type: not used
def double(layers, plan):  # what is kept for the batch is used: a weight that is twice as large
    plan.rounded[id(layers[1].f2.weight), torch.float32] = 2 * layers[1].f2.weight.detach()
assert errors(run_layers(layers, batch, fused=True, prepare=double), want)["out"] > 1e-2
for name in ("0.f2.bias", "1.norm.weight"):  # negative control
    changed = make_layers(False, dropout=0.0)
    dict(changed.named_parameters())[name].data += 0.01
    assert errors(run_layers(changed, batch, fused=True), want)["out"] > 1e-4, name
"""
TOKEN_SCRIPT = """
import torch
from lightning_freescale.models import elementwise_triton, norm_triton
from lightning_freescale.models.personal_tokens import PersonalTokens
from tests.models.test_fused_layer import errors, make_layer, run_with_tokens, token_case

elementwise_triton.COLUMNS, elementwise_triton.SUM_PROGRAMS, norm_triton.PROGRAMS = 32, 3, 2
for segments, bias, dropout in ((1, True, 0.3), (3, True, 0.0), (2, False, 0.3)):
    cut = PersonalTokens(tokens=2, recent=4, refresh=3, segments=segments)
    batch, attention = token_case([5, 1, 21], cut, bias)
    layer = make_layer(bias, dropout=dropout)
    want = run_with_tokens(layer, batch, attention)
    found = errors(run_with_tokens(layer, batch, attention, layer._fused), want)
    assert max(found.values()) < 1e-5, found
    for rows, places in attention.sequences.later:  # negative control: gradients without those of the later copies
        places.zero_()
    assert errors(run_with_tokens(layer, batch, attention, layer._fused), want)["x"] > 1e-3
"""


def test_interpreted_layers_equal_their_parts() -> None:
    run_interpreted(SCRIPT)


def test_interpreted_layer_with_personal_tokens_equals_its_parts() -> None:
    run_interpreted(TOKEN_SCRIPT)


def on_cuda(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cuda() for name, value in batch.items()}


def run_on_cuda(layers: nn.ModuleList, batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        return run_layers(layers.cuda(), on_cuda(batch))


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_compiled_layers_equal_their_parts_on_a_cpu(dtype: torch.dtype, bias: bool) -> None:
    layers, batch = make_layers(bias, 128, 2, 64), make_batch([300, 0, 65, 1, 700], 128)
    double = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    want = run_layers(make_layers(bias, 128, 2, 64).double(), double)
    found = errors(run_on_cuda(layers, batch, dtype), want)
    # Sums of terms that cancel.
    cancelling = [found.pop(name) for name in list(found) if name.endswith(("position_bias", "time_bias"))]
    assert max(found.values()) < TOLERANCE[dtype], found
    assert max(cancelling, default=0.0) < 4 * TOLERANCE[dtype], cancelling


@pytest.mark.gpu
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_compiled_layer_with_personal_tokens_equals_its_parts_on_a_cpu(dtype: torch.dtype, segments: int) -> None:
    cut = PersonalTokens(tokens=4, recent=64, refresh=32, segments=segments)
    lengths = [300, 65, 1, 700]
    batch, attention = token_case(lengths, cut, True, 128)
    double = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    want = run_with_tokens(make_layer(True, 128, 2, 64).double(), double, attention)
    sequences = attention.sequences
    later = [(rows.cuda(), places.cuda()) for rows, places in sequences.later]
    tensors = {name: part.cuda() for name, part in sequences._asdict().items() if name != "later"}
    moved = TokenAttention(TokenSequences(later=later, **tensors), batch["timestamps"].cuda(), True)
    layer = make_layer(True, 128, 2, 64).cuda()
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        got = run_with_tokens(layer, on_cuda(batch), moved)
        again = run_with_tokens(layer, on_cuda(batch), moved)
    found = errors(got, want)
    cancelling = [found.pop(name) for name in ("position_bias", "time_bias")]
    assert max(found.values()) < TOLERANCE[dtype], found
    assert max(cancelling) < 4 * TOLERANCE[dtype], cancelling
    assert all(torch.equal(got[name], again[name]) for name in got)


@pytest.mark.gpu
def test_same_bits_alone_and_in_any_batch() -> None:
    layers, lengths = make_layers(True, 128, 2, 64), [300, 65, 1, 700]
    batch = make_batch(lengths, 128)
    alone = {name: value[:300] for name, value in batch.items() if name != "offsets"}
    alone["offsets"] = torch.tensor([0, 300])
    together, single = (run_on_cuda(layers, inputs, torch.bfloat16) for inputs in (batch, alone))
    for name in ("out", "x"):
        assert torch.equal(together[name][:300], single[name]), name
    again = run_on_cuda(layers, batch, torch.bfloat16)
    assert all(torch.equal(together[name], again[name]) for name in together)


@pytest.mark.gpu
def test_weights_that_are_rounded_together_give_the_same_bits() -> None:
    from lightning_freescale.models.fused_layer import round_weights

    layers, batch = make_layers(True, 128, 2, 64).cuda(), on_cuda(make_batch([300, 65], 128))
    counts = []

    def prepare(layers: nn.ModuleList, plan: cuda.CudaPlan) -> None:
        round_weights(layers, plan, torch.bfloat16)
        counts.append(len(plan.rounded))

    with torch.autocast("cuda", torch.bfloat16):
        got, want = (run_layers(layers, batch, True, way) for way in (prepare, None))
    assert counts == [6]
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.gpu
def test_what_is_prepared_before_gives_the_same_gradients() -> None:
    from lightning_freescale.models.fused_layer import prepare_layers

    def prepare(layers: nn.ModuleList, plan: cuda.CudaPlan) -> None:
        prepare_layers(list(layers), plan)
        assert list(plan.late) == [id(layers[0].f1.weight)]

    layers, batch = make_layers(True, 128, 2, 64).cuda(), on_cuda(make_batch([300, 65], 128))
    with torch.autocast("cuda", torch.bfloat16):
        got, want = (run_layers(layers, batch, True, way) for way in (prepare, None))
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@pytest.mark.gpu
def test_no_events() -> None:
    got = run_on_cuda(make_layers(True, 128, 2, 64), make_batch([0, 0], 128), torch.bfloat16)
    assert got["out"].shape == (0, 128)
    assert not got["0.f1.weight"].any()
