"""The dense part of a training step of HSTU on one GPU: time, TFLOP/s and MFU, layer by parts and fused.

    python -m benchmarks.dense_step [--quick] [--json] [--output FILE] [--rounds 3]

Dense part: everything after the lookup, forward and backward, with the loss over 128 negatives: bfloat16 by autocast, about 64K
events. The FLOPs are those of ``HSTU.cost_coefficients``: of the products of the true lengths, no matter what
a kernel computes in addition. MFU is their rate divided by the peak rate of the GPU (``--peak``, in TFLOP/s; 989 is an H200).

The variants run in turn in each round: the layer part by part with the Triton attention and the loss in PyTorch operations; the
same with the attention and the loss that this GPU selects; the fused layer, which is what HSTU runs.
"""

from __future__ import annotations

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

from benchmarks.attention_kernels import long_tailed
from benchmarks.harness import report
from benchmarks.hstu_attention import milliseconds
from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.models.attention import hopper
from lightning_freescale.models.hstu import HSTU, HSTULayer

ITEMS = 10_000
SAMPLED = 128  # negatives of a sample
HOUR = 3600


class DenseCase(NamedTuple):
    """A model and its histories."""

    dim: int
    heads: int
    layers: int
    lengths: list[int]

    @property
    def name(self) -> str:
        return f"{self.layers} layers of {self.dim}, {self.heads} heads of {self.dim // self.heads}"

    @property
    def histories(self) -> str:
        kind = "log-normal to" if min(self.lengths) < max(self.lengths) else f"{len(self.lengths)} x"
        return f"{kind} {max(self.lengths):,}"


CASES = (
    DenseCase(512, 4, 8, long_tailed(8192)),
    DenseCase(512, 4, 8, [8192] * 8),
    DenseCase(128, 4, 4, long_tailed(8192)),
)


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
    with replaced(HSTULayer, "forward", HSTULayer.plain):
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
        values=torch.randint(ITEMS, (total + samples * SAMPLED,)),
        lengths=torch.cat([lengths, torch.full_like(lengths, SAMPLED)]),
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
    sizes = {HISTORY: total, NEGATIVES: samples * SAMPLED}
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
    flops = float((a * long + b * long**2 + c * SAMPLED * (long - 1)).sum())
    return step, flops


def measure(case: DenseCase, bias: str, repeats: int, rounds: int, peak: float) -> list[dict[str, Any]]:
    step, flops = make_step(case, bias)
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, variant in VARIANTS.items():
            with variant():
                times[name].append(milliseconds(step, "cuda", repeats))
    rows = []
    for name, found in times.items():
        rates = [flops / time / 1e9 for time in found]
        row: dict[str, Any] = {
            "model": case.name,
            "histories": case.histories,
            "bias": bias,
            "variant": name,
            "ms": statistics.mean(found),
        }
        row |= {"TFLOP/s": statistics.mean(rates), "spread": f"{min(rates):.0f} to {max(rates):.0f}"}
        rows.append(row | {"MFU %": 100 * statistics.mean(rates) / peak})
    return rows


def main() -> None:
    parser = report.make_parser(__doc__, quick="one model, fewer repetitions")
    parser.add_argument("--rounds", type=int, default=3, help="times that every variant is measured (default: 3)")
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s of the GPU, dense bfloat16 (default: 989)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU")
    repeats = 3 if arguments.quick else 10
    cases = CASES[:1] if arguments.quick else CASES
    rows = [
        row
        for case in cases
        for bias in ("relative", "input")
        for row in measure(case, bias, repeats, arguments.rounds, arguments.peak)
    ]
    name = torch.cuda.get_device_name()
    results = {"peak_tflops": arguments.peak, "negatives": SAMPLED, "dense_step": rows}
    title = f"Dense part of a training step, bfloat16, {name}, peak {arguments.peak:.0f} TFLOP/s"
    report.publish(arguments, report.head("dense_step", name) | results, {title: rows})


if __name__ == "__main__":
    main()
