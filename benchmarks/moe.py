"""A mixture of experts on one GPU, forward and backward: time, TFLOP/s, memory kept for backward, and peak of the memory.

    python -m benchmarks.moe [--quick] [--json] [--output FILE] [--rounds 3] [--peak 989]

SwiGLU experts in bfloat16, 32,768 tokens, random experts and gates, hidden = 4 dim. Every variant starts from the tokens, the
gates and the number of the experts of each token, and computes the gradients of tokens, gates and weights. The FLOPs are those
of the products of an expert with the tokens that chose it, 18 T k D H, no matter what a variant computes in addition. MFU is
their rate divided by the peak rate of the GPU.

"kept" are the arrays that one layer keeps for backward, without its inputs. "peak" is the most memory that a step needs beyond
its inputs, of one layer and of eight layers with residuals and weights of their own. Memory is measured once: it does not vary.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from benchmarks.hstu_attention import milliseconds
from lightning_freescale.models.moe.experts import apply_experts

TOKENS = 32_768
STACKED = 8  # layers of the peak of many layers
LOOP = "loop over experts"
GROUPED = "grouped_mm, autograd"


class MoECase(NamedTuple):
    """The shape of a layer; the hidden units are four times ``dim``."""

    dim: int
    experts: int
    top_k: int

    @property
    def flops(self) -> float:
        return 18.0 * TOKENS * self.top_k * self.dim * 4 * self.dim


CASES = (MoECase(512, 8, 2), MoECase(2048, 16, 4))


class Weights(NamedTuple):
    """The weights of one layer: ``[E, D, 2 H]`` with ``a`` and ``b`` side by side, and ``[E, H, D]``."""

    both: Tensor
    out: Tensor


def separate(weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of ``a`` and of ``b`` as arrays of their own, and those of the output, for the other variants."""
    a, b = (weights.both[..., i::2].detach().contiguous().requires_grad_() for i in (0, 1))
    return a, b, weights.out


def by_grouped_mm(x: Tensor, gates: Tensor, chosen: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Copies sorted by expert, three grouped products, and a sum over the copies: what autograd keeps is kept."""
    experts, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(1, len(w1) + 1, device=x.device)).int()
    tokens = order // chosen.shape[1]
    copies = x[tokens]
    hidden = F.silu(F.grouped_mm(copies, w1, offs=ends)) * F.grouped_mm(copies, w2, offs=ends)
    y = F.grouped_mm(hidden, w3, offs=ends)
    return torch.zeros_like(x).index_add(0, tokens, y * gates.flatten()[order, None])


def by_loop(x: Tensor, gates: Tensor, chosen: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """One expert after another. The host waits for the number of tokens of each."""
    out = torch.zeros_like(x)
    for expert in range(len(w1)):
        tokens, choice = (chosen == expert).nonzero(as_tuple=True)
        copies = x[tokens]
        y = (F.silu(copies @ w1[expert]) * (copies @ w2[expert])) @ w3[expert]
        out = out.index_add(0, tokens, y * gates[tokens, choice, None])
    return out


def checkpointed(*arguments: Tensor) -> Tensor:
    return checkpoint(by_grouped_mm, *arguments, use_reentrant=False)


VARIANTS: dict[str, tuple[Callable[..., Tensor], Callable[[Weights], tuple[Tensor, ...]]]] = {
    LOOP: (by_loop, separate),
    GROUPED: (by_grouped_mm, separate),
    "grouped_mm, checkpointing": (checkpointed, separate),
    "MoE, keeps a and b": (apply_experts, tuple),
    "MoE, keeps x": (partial(apply_experts, save="x"), tuple),
}


class MoEInputs(NamedTuple):
    x: Tensor
    gates: Tensor
    chosen: Tensor
    dout: Tensor


def make_inputs(case: MoECase) -> MoEInputs:
    torch.manual_seed(0)
    x, dout = (torch.randn(TOKENS, case.dim, device="cuda").bfloat16() for _ in range(2))
    gates = torch.rand(TOKENS, case.top_k, device="cuda").bfloat16()
    chosen = torch.rand(TOKENS, case.experts, device="cuda").topk(case.top_k)[1]
    return MoEInputs(x.requires_grad_(), gates.requires_grad_(), chosen, dout)


def make_weights(case: MoECase) -> Weights:
    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(std=0.02).requires_grad_()

    hidden = 4 * case.dim
    return Weights(draw(case.experts, case.dim, 2 * hidden), draw(case.experts, hidden, case.dim))


def run_step(
    function: Callable[..., Tensor], inputs: MoEInputs, layers: list[tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """The gradients of tokens, gates and all weights. More than one layer have residuals."""
    out = inputs.x
    for weights in layers:
        y = function(out, inputs.gates, inputs.chosen, *weights)
        out = y if len(layers) == 1 else out + y
    learned = [inputs.x, inputs.gates, *(weight for weights in layers for weight in weights)]
    return torch.autograd.grad(out, learned, inputs.dout)


def kept_bytes(step: Callable[[], Any], known: list[Tensor]) -> int:
    """Bytes of the arrays that are kept for backward, without the ``known`` ones."""
    skipped = {x.untyped_storage().data_ptr() for x in known}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in skipped:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        step()
    return sum(found.values())


def peak_bytes(step: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def measure(case: MoECase, repeats: int, rounds: int, peak: float) -> list[dict[str, Any]]:
    inputs, weights = make_inputs(case), make_weights(case)
    steps = {
        name: partial(run_step, function, inputs, [arrange(weights)]) for name, (function, arrange) in VARIANTS.items()
    }
    memory = {}
    for name, step in steps.items():
        step()  # compile
        known = [*inputs, *step.args[2][0]]
        checkpoints = "checkpointing" in name  # its hooks keep the inputs alone, which ours would not see
        memory[name] = 0 if checkpoints else kept_bytes(step, known), peak_bytes(step)
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(milliseconds(step, "cuda", repeats))
    steps.clear()
    stacked = stacked_peaks(case, inputs)
    rows = []
    for name, found in times.items():
        rate = case.flops / statistics.mean(found) / 1e9
        kept, one = memory[name]
        row: dict[str, Any] = {"dim": case.dim, "experts": case.experts, "top_k": case.top_k, "variant": name}
        row |= {"ms": statistics.mean(found), "spread": f"{min(found):.2f} to {max(found):.2f}"}
        row |= {"speed": statistics.mean(times[GROUPED]) / statistics.mean(found)}
        row |= {"TFLOP/s": rate, "MFU %": 100 * rate / peak, "kept MB": kept / 1e6, "peak MB": one / 1e6}
        rows.append(row | {"peak of 8 MB": stacked[name] / 1e6})
    return rows


def stacked_peaks(case: MoECase, inputs: MoEInputs) -> dict[str, int]:
    found = {}
    for name, (function, arrange) in VARIANTS.items():
        layers = [arrange(make_weights(case)) for _ in range(STACKED)]
        found[name] = peak_bytes(partial(run_step, function, inputs, layers))
    return found


def main() -> None:
    parser = report.make_parser(__doc__, quick="the smaller shape, fewer repetitions")
    parser.add_argument("--rounds", type=int, default=3, help="times that every variant is measured (default: 3)")
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s of the GPU, dense bfloat16 (default: 989)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU")
    cases, repeats = (CASES[:1], 5) if arguments.quick else (CASES, 10)
    rows = [row for case in cases for row in measure(case, repeats, arguments.rounds, arguments.peak)]
    name = torch.cuda.get_device_name()
    results = {"peak_tflops": arguments.peak, "tokens": TOKENS, "moe": rows}
    title = f"Mixture of experts, {TOKENS:,} tokens, bfloat16, forward and backward, {name}"
    report.publish(arguments, report.head("moe", name) | results, {title: rows})


if __name__ == "__main__":
    main()
