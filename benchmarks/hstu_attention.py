"""HSTU attention. On a CPU the jagged implementation and a dense, padded one; on a Hopper GPU our kernels and those of PyTorch.

    python -m benchmarks.hstu_attention [--quick] [--json] [--output FILE] [--rounds 3] [--sweep]

CPU: float32, one thread, shortest time of forward and backward. "dense" pads to the longest history. "-" means that its scores
do not fit into memory.

GPU: all kernels run in turn on the same inputs, in several rounds: bfloat16, 4 heads, about 64K tokens, median of event times in
each round. Backward with relative bias includes the gradients of both tables. Events are an hour apart on average, exponentially
distributed; "constant strips" is the share of strips of 16 keys and 64 queries whose bias is one constant, for which the kernels
have a fast path. The rows of softmax attention show what PyTorch's kernels reach on the same histories: FlashAttention-2
(``varlen_attn``) and flex attention. The matrix product shows what the GPU computes at best.

TFLOP/s count only the causal pairs of the true lengths: 2 products in forward, 5 in backward (scores again, dq, dk, dv, and the
gradient of the weights), no matter what an implementation computes in addition.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.attention_inputs import AttentionCase, log_normal, make_inputs, milliseconds
from benchmarks.harness.attention_kernels import HEADS, kernel_cases, matrix_product, measure_kernels
from lightning_freescale.models.attention import dense_attention, hopper, hstu_attention, plan_attention

Row = dict[str, float | int | str]


def cpu_cases(quick: bool) -> list[AttentionCase]:
    made = [
        AttentionCase("32 log-normal to 200", log_normal(32, 60, 200), 2, 32),
        AttentionCase("8 log-normal to 2,000", log_normal(8, 400, 2000), 2, 32),
        AttentionCase("1 x 2,000", [2000], 2, 32),
    ]
    return made[:1] if quick else made


def time_both(
    function: Callable[..., Tensor], inputs: dict[str, Tensor], device: str, repeats: int
) -> tuple[float, float]:
    """Milliseconds of forward and of backward."""
    learned = [x for x in inputs.values() if x.requires_grad]
    forward = milliseconds(lambda: function(**inputs), device, repeats)
    out = function(**inputs)
    dout = torch.randn_like(out)
    backward = milliseconds(lambda: torch.autograd.grad(out, learned, dout, retain_graph=True), device, repeats)
    return forward, backward


def dense_fits(case: AttentionCase) -> bool:
    """Whether the scores fit into memory: backward holds six float32 arrays of scores at its peak."""
    return 6 * 4 * len(case.lengths) * case.heads * max(case.lengths) ** 2 < 2**31


def measure_on_cpu(case: AttentionCase, repeats: int) -> Row:
    inputs = make_inputs(case, "cpu")
    plan = plan_attention(inputs["offsets"], inputs["timestamps"])  # made once per batch; all layers share it
    forward, backward = time_both(lambda **x: hstu_attention(**x, plan=plan), inputs, "cpu", repeats)
    product = 2 * case.heads * case.width * sum(n * (n + 1) // 2 for n in case.lengths)  # FLOPs of one product
    row: Row = {
        "case": case.name,
        "heads x width": f"{case.heads} x {case.width}",
        "tokens": sum(case.lengths),
        "padding %": 100 * (1 - sum(case.lengths) / (len(case.lengths) * max(case.lengths))),
        "forward ms": forward,
        "backward ms": backward,
        "forward TFLOP/s": 2 * product / forward / 1e9,
        "backward TFLOP/s": 5 * product / backward / 1e9,
    }
    row |= {"dense forward ms": "-", "dense backward ms": "-", "speedup": "-"}
    if dense_fits(case):
        dense = time_both(dense_attention, inputs, "cpu", max(2, repeats // 4))
        row |= {
            "dense forward ms": dense[0],
            "dense backward ms": dense[1],
            "speedup": sum(dense) / (forward + backward),
        }
    return row


def sweep(repeats: int) -> list[Row]:
    """Times with other launch parameters than those of ``triton_attention.configs``, one kernel at a time. CUDA only."""
    from lightning_freescale.models.attention import triton_attention
    from lightning_freescale.models.attention.triton_attention import LaunchConfig

    chosen, rows = triton_attention.configs, []
    tried = [
        LaunchConfig(64, 32, 4, 2),
        LaunchConfig(64, 32, 4, 3),
        LaunchConfig(64, 64, 4, 2),
        LaunchConfig(128, 32, 8, 2),
        LaunchConfig(128, 64, 8, 2),
    ]
    for case in (
        AttentionCase("128 log-normal to 21,000", log_normal(128, 2000, 21_000), 4, 64),
        AttentionCase("16 x 2,048", [2048] * 16, 8, 128),
    ):
        inputs = make_inputs(case, "cuda")
        for kernel in ("forward", "queries", "keys"):
            for config in tried:
                triton_attention.configs = lambda *args, k=kernel, c=config: chosen(*args) | {k: c}
                plan = plan_attention(inputs["offsets"], inputs["timestamps"])
                try:
                    times = time_both(lambda **x: hstu_attention(**x, plan=plan), inputs, "cuda", repeats)  # noqa: B023
                except Exception as error:  # for example too much shared memory: report it and try the next one
                    times = (float("nan"),) * 2
                    print(f"{kernel} {tuple(config)}: {type(error).__name__}: {error}")
                took = times[0] if kernel == "forward" else times[1]
                rows.append(
                    {"case": case.name, "kernel": kernel, "own, other, warps, stages": str(tuple(config)), "ms": took}
                )
    triton_attention.configs = chosen
    return rows


def main() -> None:
    parser = report.make_parser(__doc__, quick="fewer cases and repetitions")
    parser.add_argument(
        "--rounds", type=int, default=3, help="times that every kernel is measured on a GPU (default: 3)"
    )
    parser.add_argument("--sweep", action="store_true", help="also time other launch parameters of the Triton kernels")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        rows = [measure_on_cpu(case, 3) for case in cpu_cases(arguments.quick)]
        name = "one CPU thread"
        tables = {f"HSTU attention, float32, {name}": rows}
        report.publish(arguments, report.head("hstu_attention", name) | {"attention": rows}, tables)
        return
    if not hopper.available():
        sys.exit("this benchmark needs a GPU of compute capability 9.0 (Hopper), or a machine without a GPU")
    repeats = 5 if arguments.quick else 10
    rows = [row for case in kernel_cases(arguments.quick) for row in measure_kernels(case, repeats, arguments.rounds)]
    results: dict[str, Any] = {"matrix_product_tflops": matrix_product(repeats), "attention": rows}
    name = torch.cuda.get_device_name()
    product = f"a matrix product: {results['matrix_product_tflops']:.0f} TFLOP/s"
    tables = {f"HSTU attention, bfloat16, {HEADS} heads, {name}; {product}": rows}
    if arguments.sweep:
        results["sweep"] = sweep(repeats)
        title = "Launch parameters: time of forward, or of the whole backward with one kernel changed"
        tables[title] = results["sweep"]
    report.publish(arguments, report.head("hstu_attention", name) | results, tables)


if __name__ == "__main__":
    main()
