"""HSTU attention on a Hopper GPU: the kernels without bias, the Triton kernels with relative bias, and softmax attention.

    python -m benchmarks.attention_kernels [--quick] [--json] [--output FILE] [--rounds 3]

All kernels run in turn on the same inputs, in several rounds: bfloat16, 4 heads, about 64K tokens, median of event
times in each round. TFLOP/s count only the causal pairs of the true lengths: 2 products in forward and 5 in backward.
The softmax column is FlashAttention-2 of PyTorch (``varlen_attn``); its FLOPs are counted in the same way. The matrix
product shows what the GPU computes at best.
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
from lightning_freescale.models.attention import hopper, hstu_attention, plan_attention

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


def functions(case: AttentionCase, inputs: dict[str, Tensor]) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """The kernels to compare, as functions of q, k and v."""
    offsets, times = inputs["offsets"], inputs["timestamps"]
    biases = inputs["position_bias"], inputs["time_bias"]
    plan, relative_plan = hopper.plan(offsets, sum(case.lengths)), plan_attention(offsets, times)
    found: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "Hopper, no bias": lambda q, k, v: hopper.attention(q, k, v, offsets, case.width**-0.5, plan),
        "Triton, relative bias": lambda q, k, v: hstu_attention(q, k, v, offsets, times, *biases, plan=relative_plan),
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


def time_kernel(function: Callable[..., Tensor], inputs: dict[str, Tensor], repeats: int) -> Timing:
    learned = [inputs[name] for name in ("q", "k", "v")]
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
            timings[name].append(time_kernel(function, inputs, repeats))
    product = 2 * case.heads * case.width * sum(n * (n + 1) // 2 for n in case.lengths)  # FLOPs of one product
    rows = []
    for name, found in timings.items():
        row: dict[str, Any] = {"case": case.name, "width": case.width, "kernel": name}
        for column, products, times in zip(
            ("forward", "backward", "both"), (2, 5, 7), zip(*found, strict=True), strict=True
        ):
            rates = [products * product / time / 1e9 for time in times]
            row[f"{column} TFLOP/s"] = statistics.mean(rates)
            row[f"{column} spread"] = f"{min(rates):.0f} to {max(rates):.0f}"
        rows.append(row)
    return rows


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
