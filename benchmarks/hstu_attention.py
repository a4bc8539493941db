"""HSTU attention: the jagged implementation and a dense, padded one, forward and backward, on the available device.

    python -m benchmarks.hstu_attention [--quick] [--json] [--output FILE] [--sweep]

CUDA: bfloat16, median of event times. CPU: float32, one thread, shortest time. TFLOP/s count only the causal pairs of
the true lengths: 2 products in forward, 5 in backward (scores again, dq, dk, dv, and the gradient of the weights), no
matter what an implementation computes in addition. "dense" pads to the longest history. "-" means that its scores do
not fit into memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from lightning_freescale.models.attention import dense_attention, hstu_attention, plan_attention
from lightning_freescale.models.attention.buckets import num_buckets

Row = dict[str, float | int | str]


class AttentionCase(NamedTuple):
    name: str
    lengths: list[int]
    heads: int
    width: int  # Dqk = Dv


def log_normal(samples: int, mean: float, longest: int, seed: int = 0) -> list[int]:
    """Log-normal lengths with sigma 1.2."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - 0.72, 1.2, samples)
    return drawn.clip(1, longest).astype(int).tolist()


def cases(device: str, quick: bool) -> list[AttentionCase]:
    if device == "cpu":
        made = [
            AttentionCase("32 log-normal to 200", log_normal(32, 60, 200), 2, 32),
            AttentionCase("8 log-normal to 2,000", log_normal(8, 400, 2000), 2, 32),
            AttentionCase("1 x 2,000", [2000], 2, 32),
        ]
        return made[:1] if quick else made
    made = [
        AttentionCase("256 x 1,024", [1024] * 256, 4, 64),
        AttentionCase("128 log-normal to 21,000", log_normal(128, 2000, 21_000), 4, 64),
        AttentionCase("2,048 log-normal to 1,000", log_normal(2048, 100, 1000), 4, 64),
        AttentionCase("1 x 21,000", [21_000], 8, 128),
        AttentionCase("16 x 2,048", [2048] * 16, 8, 128),
    ]
    return made[:2] if quick else made


def make_inputs(case: AttentionCase, device: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    total, dtype = sum(case.lengths), torch.float32 if device == "cpu" else torch.bfloat16
    gaps = torch.empty(total).exponential_(1 / 3600).long() + 1  # one event an hour
    made = {name: torch.randn(total, case.heads, case.width, dtype=dtype) for name in ("q", "k", "v")}
    made |= {
        "offsets": torch.tensor([0, *case.lengths]).cumsum(0),
        "timestamps": torch.cat([part.cumsum(0) for part in gaps.split(case.lengths)]),
        "position_bias": torch.randn(num_buckets(max(case.lengths))),
        "time_bias": torch.randn(num_buckets(2**31 - 1)),
    }
    return {name: x.to(device).requires_grad_(x.is_floating_point()) for name, x in made.items()}


def milliseconds(call: Callable[[], Any], device: str, repeats: int) -> float:
    """Median of CUDA event times, or the shortest wall time on a CPU, after a warm-up."""
    call()
    if device == "cpu":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return 1e3 * min(times)
    call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start_event, end_event in events:
        start_event.record()
        call()
        end_event.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


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


def dense_fits(case: AttentionCase, device: str) -> bool:
    """Whether the scores fit into memory: backward holds six float32 arrays of scores at its peak."""
    need = 6 * 4 * len(case.lengths) * case.heads * max(case.lengths) ** 2
    return need < (2**31 if device == "cpu" else 0.8 * torch.cuda.mem_get_info()[0])


def measure(case: AttentionCase, device: str, repeats: int) -> Row:
    inputs = make_inputs(case, device)
    plan = plan_attention(inputs["offsets"], inputs["timestamps"])  # made once per batch; all layers share it
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    forward, backward = time_both(lambda **x: hstu_attention(**x, plan=plan), inputs, device, repeats)
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
    if device == "cuda":
        row["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    row |= {"dense forward ms": "-", "dense backward ms": "-", "speedup": "-"}
    if dense_fits(case, device):
        dense = time_both(dense_attention, inputs, device, max(2, repeats // 4))
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
    parser.add_argument("--sweep", action="store_true", help="also time other launch parameters of the kernels (CUDA)")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    repeats = (5 if arguments.quick else 20) if device == "cuda" else 3
    results = {"attention": [measure(case, device, repeats) for case in cases(device, arguments.quick)]}
    name = torch.cuda.get_device_name() if device == "cuda" else "one CPU thread"
    tables = {f"HSTU attention, {'bfloat16' if device == 'cuda' else 'float32'}, {name}": results["attention"]}
    if arguments.sweep and device == "cuda":
        results["sweep"] = sweep(repeats)
        title = "Launch parameters: time of forward, or of the whole backward with one kernel changed"
        tables[title] = results["sweep"]
    report.publish(arguments, report.head("hstu_attention", name) | results, tables)


if __name__ == "__main__":
    main()
