"""The dense part of a training step of HSTU on one GPU: time, TFLOP/s and MFU, layer by parts and fused.

    python -m benchmarks.dense_step [--quick] [--json] [--output FILE] [--rounds 3] [--ranks 4]

Dense part: everything after the lookup, forward and backward, with the loss over sampled negatives: bfloat16 by autocast. The
FLOPs are those of ``HSTU.cost_coefficients``: of the products of the true lengths, no matter what a kernel computes in
addition. MFU is their rate divided by the peak rate of the GPU (``--peak``, in TFLOP/s; 989 is an H200). The model of width 512
has about 64K events. The last model and its histories are those of ``benchmarks.end_to_end``: 128 histories, 32 negatives.

The variants run in turn in each round: the layer part by part with the Triton attention and the loss in PyTorch operations; the
same with the attention and the loss that this GPU selects; the fused layer, which is what HSTU runs.

Before that, four ranks share the GPU, and SMs are reserved for each (``harness/gpu_cluster/reserved_sms.py``). They compute the
same steps at the same time, and their MFU refers to their share of the peak rate. ``--ranks 0`` leaves this out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.harness.attention_inputs import long_tailed, milliseconds
from benchmarks.harness.gpu_cluster import launcher, reserved_sms
from benchmarks.harness.gpu_cluster.bare_ranks import GpuRank
from benchmarks.harness.gpu_cluster.matrix_product_check import check_products
from benchmarks.harness.workload import LongTailWorkload
from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.models.attention import hopper
from lightning_freescale.models.hstu import HSTU
from lightning_freescale.models.hstu_layer import HSTULayer
from lightning_freescale.models.sequences import Attention

ITEMS = 10_000
HOUR = 3600
BIASES = ("relative", "input")
FOUND = "found: "  # precedes the figures that rank 0 prints for the process that started it


class DenseCase(NamedTuple):
    """A model and its histories."""

    dim: int
    heads: int
    layers: int
    lengths: list[int]
    negatives: int = 128  # of a sample

    @property
    def name(self) -> str:
        return f"{self.layers} layers of {self.dim}, {self.heads} heads of {self.dim // self.heads}"

    @property
    def histories(self) -> str:
        kind = "log-normal to" if min(self.lengths) < max(self.lengths) else f"{len(self.lengths)} x"
        return f"{kind} {max(self.lengths):,}"


def end_to_end_case() -> DenseCase:
    """The model and the first batch of ``benchmarks.end_to_end``."""
    workload = LongTailWorkload(samples=128, longest=8192, rows=8_000_000, negatives=32)
    return DenseCase(128, 4, 4, workload.lengths(0, 0).tolist(), workload.negatives)


CASES = (DenseCase(512, 4, 8, long_tailed(8192)), DenseCase(512, 4, 8, [8192] * 8), end_to_end_case())


class Rows:
    """Embeddings of a feature, as a lookup returns them."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def values(self) -> Tensor:
        return self._values


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


@contextmanager
def part_by_part() -> Iterator[None]:
    def parts(layer: HSTULayer, x: Tensor, attention: Attention, keys: Tensor | None, total: bool) -> Tensor:
        return layer.plain(x, attention, keys)

    with replaced(HSTULayer, "forward", parts):
        yield


@contextmanager
def before() -> Iterator[None]:
    from lightning_freescale.models import loss_triton  # Triton is installed on CUDA machines only

    no_kernels = replaced(loss_triton, "supports", lambda outputs, negatives: False)
    with part_by_part(), no_kernels, replaced(hopper, "available", lambda device: False):
        yield


@contextmanager
def fused() -> Iterator[None]:
    yield


VARIANTS: dict[str, Callable[[], Any]] = {
    "parts, Triton attention, loss in PyTorch": before,
    "parts": part_by_part,
    "fused layer": fused,
}


def make_step(case: DenseCase, bias: str) -> tuple[Callable[[], Any], float]:
    """A function that computes one step, and its FLOPs."""
    torch.manual_seed(0)
    lengths = torch.tensor(case.lengths)
    total, samples = int(lengths.sum()), len(lengths)
    gaps = torch.empty(total).exponential_(1 / HOUR).long() + 1
    features = KeyedJaggedTensor(
        keys=[HISTORY, NEGATIVES],
        values=torch.randint(ITEMS, (total + samples * case.negatives,)),
        lengths=torch.cat([lengths, torch.full_like(lengths, case.negatives)]),
    )
    batch = SeqBatch(features, torch.cat([part.cumsum(0) for part in gaps.split(lengths.tolist())])).to(
        torch.device("cuda")
    )
    model = HSTU(
        ITEMS,
        embedding_dim=case.dim,
        num_layers=case.layers,
        num_heads=case.heads,
        max_history=max(case.lengths),
        bias=bias,  # type: ignore[arg-type]
        meta_tables=True,
    )
    dense = [model.layers, model.event_encoding]
    for part in dense:
        if part is not None:
            part.cuda().train()
    sizes = {HISTORY: total, NEGATIVES: samples * case.negatives}
    rows = {
        name: torch.randn(size, case.dim, device="cuda").mul_(0.02).requires_grad_() for name, size in sizes.items()
    }
    learned = [*rows.values(), *(p for part in dense if part is not None for p in part.parameters())]

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss({name: Rows(values) for name, values in rows.items()}, batch)
        torch.autograd.grad(loss, learned)

    a, b, c = model.cost_coefficients()
    long = lengths.double()
    flops = float((a * long + b * long**2 + c * case.negatives * (long - 1)).sum())
    return step, flops


def measure(case: DenseCase, bias: str, repeats: int, rounds: int, peak: float) -> list[dict[str, Any]]:
    step, flops = make_step(case, bias)
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, variant in VARIANTS.items():
            with variant():
                times[name].append(milliseconds(step, "cuda", repeats))
    return [describe(case, bias, flops, found, peak, variant=name) for name, found in times.items()]


def describe(
    case: DenseCase, bias: str, flops: float, times: list[float], peak: float, **more: int | str
) -> dict[str, Any]:
    """A row of the table, from milliseconds."""
    rates = [flops / time / 1e9 for time in times]
    row: dict[str, Any] = {"model": case.name, "histories": case.histories, "bias": bias, **more}
    row |= {"ms": statistics.mean(times), "TFLOP/s": statistics.mean(rates)}
    return row | {"spread": f"{min(rates):.0f} to {max(rates):.0f}", "MFU %": 100 * statistics.mean(rates) / peak}


# ---- several ranks on one GPU ------------------------------------------------------------------------------------------------
def measure_ranks(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the ranks and return their rows. This process must not have used the GPU before."""
    argv = ["-m", "benchmarks.dense_step", *sys.argv[1:]]
    outputs = launcher.run(arguments.ranks, argv, arguments.limit, gpu=True)
    lines = [line for line in outputs[0].splitlines() if line.startswith(FOUND)]
    return json.loads(lines[-1].removeprefix(FOUND))


def run_rank(arguments: argparse.Namespace) -> None:
    """Measure as one of the ranks, all of them at the same time; rank 0 prints the rows."""
    rank = GpuRank()
    check_products(rank.device, rank.rank, width=512)
    sms = reserved_sms.count()
    peak = arguments.peak * sms / torch.cuda.get_device_properties(rank.device).multi_processor_count
    rows = []
    for case in CASES[:1] if arguments.quick else (CASES[0], CASES[-1]):
        for bias in BIASES:
            step, flops = make_step(case, bias)
            times = []
            for _ in range(arguments.rounds):
                milliseconds(step, "cuda", 1)  # compiled and warm before all ranks start
                rank.meet()
                times += rank.gather(milliseconds(step, "cuda", arguments.repeats))
            rows.append(describe(case, bias, flops, times, peak, ranks=rank.world, SMs=sms))
    if rank.rank == 0:
        print(FOUND + json.dumps(rows), flush=True)
    rank.meet()


def main() -> None:
    parser = report.make_parser(__doc__, quick="one model, fewer repetitions")
    parser.add_argument("--rounds", type=int, default=3, help="times that every variant is measured (default: 3)")
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s of the GPU, dense bfloat16 (default: 989)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks that share the GPU; 0 for none (default: 4)")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which the ranks end (default: 300)")
    arguments = parser.parse_args()
    arguments.repeats = 3 if arguments.quick else 6
    if not launcher.has_gpu():
        sys.exit("this benchmark needs a GPU")
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    shared = measure_ranks(arguments) if arguments.ranks else []
    rows = [
        row
        for case in (CASES[:1] if arguments.quick else CASES)
        for bias in BIASES
        for row in measure(case, bias, arguments.repeats, arguments.rounds, arguments.peak)
    ]
    name = torch.cuda.get_device_name()
    tables = {f"Dense part of a training step, bfloat16, {name}, peak {arguments.peak:.0f} TFLOP/s": rows}
    if shared:
        tables["The same on ranks that share the GPU; MFU of the share of a rank"] = shared
    results = {"peak_tflops": arguments.peak, "dense_step": rows, "ranks": shared}
    report.publish(arguments, report.head("dense_step", name) | results, tables)


if __name__ == "__main__":
    main()
