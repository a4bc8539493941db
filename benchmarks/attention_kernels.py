"""HSTU attention on a Hopper GPU: the kernels without and with relative bias, the Triton kernels, and softmax attention.

    python -m benchmarks.attention_kernels [--quick] [--json] [--output FILE] [--rounds 3]

All kernels run in turn on the same inputs, in several rounds: bfloat16, 4 heads, about 64K tokens, median of event
times in each round. TFLOP/s count only the causal pairs of the true lengths: 2 products in forward and 5 in backward.
Backward with relative bias includes the gradients of both tables. Events are an hour apart on average, exponentially
distributed; "constant strips" is the share of strips of 16 keys and 64 queries whose bias is one constant, for which the
kernels have a fast path. The softmax row is FlashAttention-2 of PyTorch (``varlen_attn``); its FLOPs are counted in the
same way. The matrix product shows what the GPU computes at best.
"""

from __future__ import annotations

import inspect
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.hstu_attention import AttentionCase, make_inputs, milliseconds
from lightning_freescale.models.attention import hopper, plan_attention
from lightning_freescale.models.attention.buckets import log_bucket, relative_times

TOKENS = 65_536
HEADS = 4
Timing = tuple[float, float, float]  # milliseconds of forward, backward, and both in one call


def long_tailed(longest: int) -> list[int]:
    """Log-normal lengths of ``TOKENS`` events in all. The first seed whose longest history reaches ``longest`` is used."""
    for seed in range(1000):
        generator, lengths = np.random.default_rng(seed), [0]
        while sum(lengths) < TOKENS:
            lengths.append(int(min(generator.lognormal(7.3, 1.2), longest)))
        lengths[-1] -= sum(lengths) - TOKENS
        if max(lengths) == longest:
            return [length for length in lengths if length > 0]
    raise ValueError(f"no seed gives a history of {longest} events")


def cases(quick: bool) -> list[AttentionCase]:
    lengths = {"log-normal to 21,000": long_tailed(21_000)}
    if not quick:
        lengths |= {"log-normal to 8,192": long_tailed(8192), "8 x 8,192": [8192] * 8}
    return [AttentionCase(name, made, HEADS, width) for name, made in lengths.items() for width in (64, 128)]


def functions(case: AttentionCase, inputs: dict[str, Tensor]) -> dict[str, Callable[..., Tensor]]:
    """The kernels to compare, as functions of q, k and v, and of both bias tables for those with "bias" in their name."""
    from lightning_freescale.models.attention import triton_attention  # Triton is installed on CUDA machines only

    offsets, times = inputs["offsets"], inputs["timestamps"]
    plan, bias_plan, alpha = (
        plan_attention(offsets, times, bias=False),
        plan_attention(offsets, times),
        case.width**-0.5,
    )
    found: dict[str, Callable[..., Tensor]] = {
        "Hopper, no bias": lambda q, k, v: hopper.attention(q, k, v, offsets, alpha, plan.hopper),
        "Hopper, relative bias": lambda q, k, v, *b: hopper.attention(q, k, v, offsets, alpha, bias_plan.hopper, b),
        "Triton, relative bias": lambda q, k, v, *b: triton_attention.attention(
            q, k, v, (b[0], b[1]), alpha, bias_plan.triton
        ),
    }
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # PyTorch before 2.10
        return found
    ends, longest = offsets.int(), max(case.lengths)
    attention: Callable[..., Any] = varlen_attn
    has_flag = "is_causal" in inspect.signature(attention).parameters  # PyTorch 2.10; later releases have a window
    causal: dict[str, Any] = {"is_causal": True} if has_flag else {"window_size": (-1, 0)}
    found["softmax"] = lambda q, k, v: attention(q, k, v, ends, ends, longest, longest, **causal)
    return found


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


def measure(case: AttentionCase, repeats: int, rounds: int) -> list[dict[str, Any]]:
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


def main() -> None:
    parser = report.make_parser(__doc__, quick="one case of lengths, fewer repetitions")
    parser.add_argument("--rounds", type=int, default=3, help="times that every kernel is measured (default: 3)")
    arguments = parser.parse_args()
    if not hopper.available():
        sys.exit("this benchmark needs a GPU of compute capability 9.0 (Hopper)")
    repeats = 5 if arguments.quick else 15
    rows = [row for case in cases(arguments.quick) for row in measure(case, repeats, arguments.rounds)]
    results = {"matrix_product_tflops": matrix_product(repeats), "attention": rows}
    name = torch.cuda.get_device_name()
    title = f"HSTU attention, bfloat16, {HEADS} heads, {name}; a matrix product: {results['matrix_product_tflops']:.0f} TFLOP/s"
    report.publish(arguments, report.head("attention_kernels", name) | results, {title: rows})


if __name__ == "__main__":
    main()
