"""The mixture of experts against a loop over all experts: on a CPU, in Triton's interpreter, and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_freescale.models.moe import MoE, experts
from lightning_freescale.models.moe.dispatch import arrange_copies, arrange_plain
from lightning_freescale.runtime.errors import ConfigurationError
from tests.models.interpreter import run_interpreted

# tokens, dim, hidden, experts, top_k
SHAPES = ((40, 8, 24, 6, 2), (33, 8, 16, 4, 4), (17, 16, 8, 1, 1), (0, 8, 8, 3, 2), (1, 8, 8, 5, 1), (200, 24, 8, 3, 1))


def make_moe(dim: int, hidden: int, count: int, top_k: int, save: Any = "ab") -> MoE:
    torch.manual_seed(0)
    moe = MoE(dim, hidden, count, top_k, save)
    for parameter in moe.parameters():  # larger than initially, so that a wrong part is seen
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return moe


def make_tokens(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """Tokens, and a gradient of the output."""
    rng = torch.Generator().manual_seed(1)
    x, dout = torch.randn(2, tokens, dim, generator=rng).unbind()
    return x, dout


def loop(moe: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the losses of the router: every expert computes all tokens, and gates of 0 leave most of them out."""
    scores = F.linear(x, moe.router)
    gates, chosen = scores.softmax(1).topk(moe.top_k, 1)
    if moe.top_k > 1:
        gates = gates / gates.sum(1, keepdim=True)
    out, tokens = torch.zeros_like(x), max(1, len(x))
    balance = scores.sum() * 0
    for expert in range(moe.experts):
        ab = x @ moe.w_in[expert]
        y = (F.silu(ab[:, 0::2]) * ab[:, 1::2]) @ moe.w_out[expert]
        out = out + y * torch.where(chosen == expert, gates, 0).sum(1, keepdim=True)
        share = (chosen == expert).to(x.dtype).sum() / (tokens * moe.top_k)
        balance = balance + moe.experts * share * scores.softmax(1)[:, expert].sum() / tokens
    return out, balance + (scores.exp().sum(1).log() ** 2).sum() / tokens


def results(moe: MoE, x: Tensor, dout: Tensor, reference: bool = False) -> dict[str, Tensor]:
    """The output, and the gradients of the tokens and of all parameters; the losses of the router count too."""
    x = x.detach().requires_grad_()
    if reference:
        out, losses = loop(moe, x)
    else:
        out = moe(x)
        terms = moe.take_terms()
        assert terms is not None
        losses = terms.balance + terms.z
    total = (out * dout).sum() + losses
    grads = torch.autograd.grad(total, [x, *moe.parameters()])
    return {"out": out.detach(), "x": grads[0]} | dict(zip(dict(moe.named_parameters()), grads[1:], strict=True))


def largest_difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest ``|got - want|`` of all elements, relative to the largest element of ``want``."""
    errors = [
        float((got[name].cpu().double() - y.cpu().double()).abs().max() / y.abs().max().clamp(min=1e-9))
        for name, y in want.items()
        if y.numel()
    ]
    return max(errors)


@pytest.mark.parametrize("save", ["ab", "x"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_a_loop_over_experts(shape: tuple[int, ...], save: str) -> None:
    tokens, *sizes = shape
    moe, inputs = make_moe(*sizes, save), make_tokens(tokens, sizes[0])
    got, want = results(moe, *inputs), results(moe, *inputs, reference=True)
    assert largest_difference(got, want) < 1e-6 or not tokens
    again = results(moe, *inputs)
    assert all(torch.equal(got[name], again[name]) for name in got)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 70),
    dim=st.integers(1, 12),
    hidden=st.integers(1, 20),
    count=st.integers(1, 9),
    data=st.data(),
)
def test_any_shape_equals_a_loop_over_experts(tokens: int, dim: int, hidden: int, count: int, data: Any) -> None:
    top_k = data.draw(st.integers(1, count))
    moe, inputs = make_moe(dim, hidden, count, top_k).double(), [x.double() for x in make_tokens(tokens, dim)]
    got, want = results(moe, *inputs), results(moe, *inputs, reference=True)
    assert all(torch.allclose(got[name], want[name], rtol=1e-9, atol=1e-9) for name in want)


def test_the_comparison_sees_a_change() -> None:
    """Negative control: one changed weight of one expert, or a token that goes to another expert."""
    moe, inputs = make_moe(8, 24, 6, 2), make_tokens(40, 8)
    want = results(moe, *inputs, reference=True)
    with torch.no_grad():
        moe.w_out[3, 5, 2] += 1e-3
    assert largest_difference(results(moe, *inputs), want) > 1e-5
    with torch.no_grad():
        moe.w_out[3, 5, 2] -= 1e-3
        moe.router[0] += 0.5
    assert largest_difference(results(moe, *inputs), want) > 1e-3


def test_experts_without_tokens() -> None:
    moe, (x, dout) = make_moe(8, 16, 4, 1), make_tokens(30, 8)
    with torch.no_grad():
        moe.router.zero_()
        moe.router[2] = 1.0
    x = x.abs()  # every token chooses expert 2
    got = results(moe, x, dout)
    assert largest_difference(got, results(moe, x, dout, reference=True)) < 1e-6
    assert not got["w_in"][[0, 1, 3]].any()
    assert got["w_in"][2].any()
    terms = (moe(x), moe.take_terms())[1]
    assert terms is not None
    assert terms.load.tolist() == [0, 0, 1, 0]


def test_backward_twice() -> None:
    """The gradients take the memory of what was kept, but not if backward runs again."""
    moe, (x, dout) = make_moe(8, 24, 6, 2), make_tokens(40, 8)
    out = moe(x.requires_grad_())
    first, second, third = (
        torch.autograd.grad(out, [x, *moe.parameters()], dout, retain_graph=keep) for keep in (True, True, False)
    )
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, third, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, [x], dout)


def test_what_is_kept_for_backward() -> None:
    """The result of the first product, or nothing: no array with a row for each copy and the width of a token."""
    tokens, dim, hidden, count, top_k = 50, 8, 24, 6, 3
    x, _ = make_tokens(tokens, dim)
    for save in ("ab", "x"):
        moe, kept = make_moe(dim, hidden, count, top_k, save), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.shape) or t, lambda t: t):
            moe(x.requires_grad_())
        assert (torch.Size([tokens * top_k, 2 * hidden]) in kept) == (save == "ab")
        assert not [s for s in kept if len(s) == 2 and s[0] == tokens * top_k and s[1] != 2 * hidden]


def test_wrong_settings() -> None:
    for name, options in {
        "top_k: must be between 1 and experts \\(4\\), not 5": (8, 8, 4, 5),
        "experts: must be at least 1": (8, 8, 0, 0),
        "hidden: must be at least 1": (8, 0, 4, 2),
        "save: 'y' is unknown": (8, 8, 4, 2, "y"),
    }.items():
        with pytest.raises(ConfigurationError, match=name):
            MoE(*options)  # type: ignore[arg-type]


def test_arrangement_in_tiles() -> None:
    chosen = torch.tensor([[0, 3], [3, 1], [3, 0]])
    index = arrange_plain(chosen, 4, 2)
    assert index.ends.tolist() == [2, 4, 4, 8]
    assert index.counts.tolist() == [2, 1, 0, 3]
    assert index.copies.tolist()[:8] == [0, 5, 3, -1, 1, 2, 4, -1]
    assert index.rows.tolist() == [[0, 4], [5, 2], [6, 1]]
    assert index.tile_experts.tolist() == [0, 1, 3, 3, 4][: len(index.tile_experts)]


SCRIPT = """
import torch
from lightning_freescale.models.moe import dispatch, experts, products
from lightning_freescale.models.moe import activation_triton, dispatch_triton, rows_triton, up_triton
from tests.models.test_moe import largest_difference, make_moe, make_tokens, results

def grouped(x, w, index):
    y = torch.zeros(len(x), w.shape[2])
    for expert, (first, last) in enumerate(products._spans(index)):
        y[first:last] = x[first:last] @ w[expert]
    return y

plain = [experts.arrange_copies, products.up, products.gather, products.combine, products.activation_gradients]
dispatch_triton.COPIES, dispatch_triton.SCANNED, activation_triton.UNITS = 64, 2, 8
rows_triton.GATHER_ROWS = activation_triton.UNIT_ROWS = 128
for tokens, *sizes in ((40, 8, 24, 3, 2), (200, 24, 8, 2, 1)):
    moe, inputs = make_moe(*sizes), make_tokens(tokens, sizes[0])
    experts.arrange_copies, products.up, products.gather, products.combine, products.activation_gradients = plain
    want = results(moe, *inputs)
    def arrange(chosen, count):
        got = dispatch_triton.arrange_copies(chosen, count, 128)
        expected = dispatch.arrange_plain(chosen, count, 128)
        assert all(torch.equal(a, b) for a, b in zip(got, expected))
        dense, expected = dispatch_triton.arrange_copies(chosen, count, 1), dispatch.arrange_plain(chosen, count, 1)
        assert all(torch.equal(a, b) for a, b in zip(dense, expected))
        return got
    experts.arrange_copies = arrange
    products.gather, products.combine = rows_triton.gather, lambda y, index, gates=None: rows_triton.combine(y, index, gates)
    products.activation_gradients = lambda df, *rest: (df, activation_triton.activate_backward(df, *rest))
    for fused in (True, False):
        def up(x, w, index):
            if fused:
                return up_triton.up(x, w, index, True)
            ab = grouped(x, w, index)
            return ab, activation_triton.activate(ab, index)
        products.up = up
        assert largest_difference(results(moe, *inputs), want) < 1e-5, (tokens, sizes, fused)
    with torch.no_grad():
        moe.w_in[0, 0, 0] += 0.1  # negative control
    assert largest_difference(results(moe, *inputs), want) > 1e-4
"""


def test_interpreted_kernels_equal_the_operations() -> None:
    run_interpreted(SCRIPT)


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["ab", "x"])
@pytest.mark.parametrize(
    "shape",
    [(3000, 128, 512, 8, 2), (1500, 256, 2048, 5, 5), (900, 72, 200, 3, 1), (130, 64, 64, 1, 1), (0, 64, 64, 4, 2)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_compiled_kernels_equal_float64(shape: tuple[int, ...], save: str, dtype: torch.dtype) -> None:
    """The router is fixed by the reference, because rounding may choose another expert."""
    tokens, *sizes = shape
    moe, (x, dout) = make_moe(*sizes, save), make_tokens(tokens, sizes[0])
    x, dout, w_in, w_out = (part.to(dtype).double() for part in (x, dout, moe.w_in.detach(), moe.w_out.detach()))
    gates, chosen = (part.detach() for part in moe.double().route(x))
    want = run_experts(x, gates, chosen, w_in, w_out, dout, save)
    moved = [part.cuda().to(dtype) for part in (x, w_in, w_out, dout)]

    def on_cuda() -> dict[str, Tensor]:
        return run_experts(moved[0], gates.cuda().float(), chosen.cuda(), *moved[1:], save)

    got = on_cuda()
    if tokens:
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        assert largest_norm_error(got, want) < tolerance
    again = on_cuda()
    assert all(torch.equal(got[name], again[name]) for name in got)


@pytest.mark.gpu
def test_compiled_arrangement() -> None:
    for tokens, count, top_k in ((40_000, 16, 4), (1000, 3, 1), (5, 130, 7), (0, 4, 2)):
        chosen = torch.rand(tokens, count, device="cuda").topk(top_k)[1]
        for tile in (128, 1):
            got, want = arrange_copies(chosen, count, tile), arrange_plain(chosen, count, tile)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def largest_norm_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max(
        float((got[name].cpu().double() - y).norm() / y.norm()) for name, y in want.items() if bool(y.norm() > 0)
    )


def run_experts(
    x: Tensor, gates: Tensor, chosen: Tensor, w_in: Tensor, w_out: Tensor, dout: Tensor, save: Any
) -> dict[str, Tensor]:
    leaves = [part.detach().requires_grad_() for part in (x, gates, w_in, w_out)]
    out = experts.apply_experts(leaves[0], leaves[1], chosen, leaves[2], leaves[3], save)
    grads = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach()} | dict(zip(("x", "gates", "w_in", "w_out"), grads, strict=True))
