"""Kernels of HSTU attention and of softmax attention on a Hopper GPU, which ``benchmarks.hstu_attention`` compares."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.attention_inputs import AttentionCase, long_tailed, make_inputs, milliseconds
from benchmarks.harness.variant_names import FLASH, FLEX
from lightning_freescale.models.attention import hopper, plan_attention
from lightning_freescale.models.attention.buckets import log_bucket, relative_times

HEADS = 4
FLEX_BLOCK = 128  # rows and columns of a block of flex attention
Timing = tuple[float, float, float]  # milliseconds of forward, backward, and both in one call
Function = Callable[..., Tensor]


def kernel_cases(quick: bool) -> list[AttentionCase]:
    lengths = {"log-normal to 21,000": long_tailed(21_000)}
    if not quick:
        lengths |= {"log-normal to 8,192": long_tailed(8192), "8 x 8,192": [8192] * 8, "64 x 1,024": [1024] * 64}
    return [AttentionCase(name, made, HEADS, width) for name, made in lengths.items() for width in (64, 128)]


def functions(case: AttentionCase, inputs: dict[str, Tensor]) -> dict[str, Function]:
    """The kernels to compare, as functions of q, k and v, and of both bias tables for those with "bias" in their name."""
    from lightning_freescale.models.attention import triton_attention  # Triton is installed on CUDA machines only

    offsets, times = inputs["offsets"], inputs["timestamps"]
    plan, bias_plan, alpha = (
        plan_attention(offsets, times, bias=False),
        plan_attention(offsets, times),
        case.width**-0.5,
    )
    found: dict[str, Function] = {
        "Hopper, no bias": lambda q, k, v: hopper.attention(q, k, v, offsets, alpha, plan.hopper),
        "Hopper, relative bias": lambda q, k, v, *b: hopper.attention(q, k, v, offsets, alpha, bias_plan.hopper, b),
        "Triton, relative bias": lambda q, k, v, *b: triton_attention.attention(
            q, k, v, (b[0], b[1]), alpha, bias_plan.triton
        ),
    }
    flash = flash_attention(case, offsets)
    return found | ({FLASH: flash} if flash else {}) | {FLEX: flex_attention(case)}


def flash_attention(case: AttentionCase, offsets: Tensor) -> Function | None:
    """FlashAttention-2 of PyTorch over jagged histories; ``None`` before PyTorch 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    ends, longest = offsets.int(), max(case.lengths)
    attention: Callable[..., Any] = varlen_attn
    has_flag = "is_causal" in inspect.signature(attention).parameters  # PyTorch 2.10; later releases have a window
    causal: dict[str, Any] = {"is_causal": True} if has_flag else {"window_size": (-1, 0)}
    return lambda q, k, v: attention(q, k, v, ends, ends, longest, longest, **causal)


def flex_attention(case: AttentionCase) -> Function:
    """Flex attention of PyTorch, compiled; all histories are one sequence whose mask separates them."""
    from torch.nn.attention import flex_attention as flex

    mask = block_mask(case.lengths, "cuda")
    compiled: Callable[..., Any] = torch.compile(flex.flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
        return compiled(*rows, block_mask=mask)[0].transpose(0, 1)

    return call


def block_mask(lengths: list[int], device: str) -> Any:
    """The mask of flex attention over histories of these lengths. PyTorch's own function would store all pairs of events."""
    from torch.nn.attention.flex_attention import BlockMask

    history = torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(lengths, device=device))

    def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (history[query] == history[key])

    first = history[::FLEX_BLOCK]
    last = torch.cat([history[FLEX_BLOCK - 1 : -1 : FLEX_BLOCK], history[-1:]])
    block = torch.arange(len(first), device=device)
    whole = (block[:, None] > block) & (first == last[:, None])  # all keys and queries are of one history
    some = (block[:, None] >= block) & (last >= first[:, None]) & ~whole
    size = len(history), len(history)
    lists = *_block_list(some), *_block_list(whole)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=FLEX_BLOCK, mask_mod=allowed, seq_lengths=size)


def _block_list(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of ``chosen [N, N]`` how many entries are true, and their columns first; as :class:`BlockMask` needs them."""
    order = chosen.int().argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1).int()[None, None], order.int()[None, None]


def time_kernel(name: str, function: Callable[..., Tensor], inputs: dict[str, Tensor], repeats: int) -> Timing:
    tables = ("position_bias", "time_bias") if "relative bias" in name else ()
    learned = [inputs[argument] for argument in ("q", "k", "v", *tables)]
    out = function(*learned)
    dout = torch.randn_like(out)
    return (
        milliseconds(lambda: function(*learned), "cuda", repeats),
        milliseconds(lambda: torch.autograd.grad(out, learned, dout, retain_graph=True), "cuda", repeats),
        milliseconds(lambda: torch.autograd.grad(function(*learned), learned, dout), "cuda", repeats),
    )


def measure_kernels(case: AttentionCase, repeats: int, rounds: int) -> list[dict[str, Any]]:
    inputs = make_inputs(case, "cuda")
    compared = functions(case, inputs)
    timings: dict[str, list[Timing]] = {name: [] for name in compared}
    for _ in range(rounds):
        for name, function in compared.items():
            timings[name].append(time_kernel(name, function, inputs, repeats))
    product = 2 * case.heads * case.width * sum(n * (n + 1) // 2 for n in case.lengths)  # FLOPs of one product
    rows, strips = [], round(constant_strips(case, inputs), 3)
    for name, found in timings.items():
        row: dict[str, Any] = {"case": case.name, "width": case.width, "kernel": name, "constant strips": strips}
        for column, products, times in zip(
            ("forward", "backward", "both"), (2, 5, 7), zip(*found, strict=True), strict=True
        ):
            rates = [products * product / time / 1e9 for time in times]
            row[f"{column} TFLOP/s"] = statistics.mean(rates)
            row[f"{column} spread"] = f"{min(rates):.0f} to {max(rates):.0f}"
        rows.append(row)
    return rows


def constant_strips(case: AttentionCase, inputs: dict[str, Tensor]) -> float:
    """Share of the strips of 16 keys and 64 queries in which all distances are in one bucket of positions and one of times."""
    times = relative_times(inputs["timestamps"], inputs["offsets"]).split(case.lengths)
    constant = strips = 0
    for t in times:
        row = torch.arange(len(t), dtype=torch.int32, device=t.device)
        same = torch.ones((), dtype=torch.bool, device=t.device)
        for x in (row, t):
            keys, queries = (_bounds(x, size) for size in (16, 64))
            low = log_bucket(queries[0] - keys[1][:, None], 2**31 - 1)
            same = same & (low == log_bucket(queries[1] - keys[0][:, None], 2**31 - 1))
        causal = (
            torch.arange(same.shape[1], device=t.device) >= torch.arange(same.shape[0], device=t.device)[:, None] // 4
        )
        constant += int((same & causal).sum())
        strips += int(causal.sum())
    return constant / strips


def _bounds(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Least and largest value of each ``size`` values; the last one is repeated to fill up."""
    filled = torch.cat([x, x[-1:].expand(-len(x) % size)]).view(-1, size)
    return filled.amin(1), filled.amax(1)


def matrix_product(repeats: int) -> float:
    """TFLOP/s of a large bfloat16 matrix product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b, "cuda", repeats) / 1e9
