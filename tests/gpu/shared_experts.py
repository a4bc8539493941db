"""Compares HSTU whose experts four ranks share with one rank that holds all experts, in float32, in one to three micro-chunks.

``test_cluster.py`` starts each rank on a GPU. Rank 0 prints one JSON line. Without a GPU the same runs on CPUs over gloo:

    python -m benchmarks.cluster 4 -- tests/gpu/shared_experts.py gloo
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import lightning_freescale.transport  # noqa: F401 - registers the backend
from benchmarks.harness.rank_setup import use_device
from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.models import HSTU, FeedForward
from lightning_freescale.models.moe.exchange import ExpertExchange
from lightning_freescale.runtime.streams import work_so_far
from tests.gpu.sleeping_waits import sleep_in_waits

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if CUDA else torch.device("cpu")
SAMPLES = (24, 0, 1, 40)  # of each rank: one has none, and one has fewer than there are chunks
DIM, ITEMS, LONGEST, DRAWN = 128, 1000, 200, 16
STEPS = 3  # of each comparison: memory and streams are used again
LATE_CYCLES = 20_000_000  # about 10 ms


class Rows:
    def __init__(self, values: Tensor):
        self._values = values

    def values(self) -> Tensor:
        return self._values


def make_samples(step: int) -> tuple[list[Tensor], Tensor, dict[str, list[Tensor]], list[Tensor]]:
    """Ids and negatives of all samples, the embeddings of their events and negatives, and the gradients of the outputs."""
    rng = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, LONGEST, (sum(SAMPLES),), generator=rng).tolist()
    ids = torch.randint(ITEMS, (sum(lengths),), generator=rng).split(lengths)
    drawn = torch.randint(ITEMS, (len(lengths), DRAWN), generator=rng)
    rows, douts = (torch.randn(sum(lengths), DIM, generator=rng).split(lengths) for _ in range(2))
    negatives = torch.randn(len(lengths), DRAWN, DIM, generator=rng)
    return list(ids), drawn, {HISTORY: list(rows), NEGATIVES: list(negatives)}, list(douts)


def make_input(step: int, first: int, last: int) -> tuple[SeqBatch, dict[str, Tensor], Tensor]:
    """The batch of the samples from ``first`` to ``last``, the embeddings, and the gradient of the output."""
    ids, drawn, rows, douts = make_samples(step)
    lengths = torch.tensor([len(part) for part in ids[first:last]], dtype=torch.int64)
    values = torch.cat([*ids[first:last], drawn[first:last].flatten()])
    counts = torch.cat([lengths, torch.full_like(lengths, DRAWN)])
    features = KeyedJaggedTensor(keys=[HISTORY, NEGATIVES], values=values, lengths=counts)
    times = torch.cat([torch.arange(int(n)) * 3600 for n in lengths] or [torch.empty(0, dtype=torch.int64)])
    found = {
        name: torch.cat(
            [part[:0].view(0, DIM) for part in parts[:1]] + [part.view(-1, DIM) for part in parts[first:last]]
        )
        for name, parts in rows.items()
    }
    dout = torch.cat([douts[0][:0], *douts[first:last]])
    leaves = {name: part.to(DEVICE).requires_grad_() for name, part in found.items()}
    return SeqBatch(features, times).to(DEVICE), leaves, dout.to(DEVICE)


def make_model(chunks: int | None) -> HSTU:
    torch.manual_seed(0)
    settings = FeedForward(8, 2, 256, expert_parallel=chunks is not None, micro_chunks=chunks)
    model = HSTU(ITEMS, embedding_dim=DIM, num_heads=4, max_history=LONGEST, feed_forward=settings, meta_tables=True)
    for part in (model.layers, model.feed_forwards):
        part.to(DEVICE).train()
    for layer in model.feed_forwards:
        for parameter in layer.moe.parameters():  # larger than initially, so that a wrong part is seen
            torch.nn.init.normal_(parameter, std=parameter.shape[-2] ** -0.5)
    return model


def compute(model: HSTU, step: int, first: int, last: int) -> dict[str, Tensor]:
    """The output, and the gradients of the embeddings and of all weights."""
    batch, leaves, dout = make_input(step, first, last)
    out = model.encode({name: Rows(part) for name, part in leaves.items()}, batch)
    learned = {name: p for name, p in model.named_parameters() if not name.startswith("embedding.")}
    grads = torch.autograd.grad((out * dout).sum(), [leaves[HISTORY], *learned.values()])
    return {"out": out.detach(), "rows": grads[0]} | dict(zip(learned, grads[1:], strict=True))


def compare(model: HSTU, wanted: Sequence[dict[str, Tensor]]) -> float:
    """The largest relative error of an array, by its norm, over all ranks and steps. A collective."""
    rank, firsts = dist.get_rank(), [sum(SAMPLES[:rank]) for rank in range(len(SAMPLES) + 1)]
    worst = 0.0
    for step, want in enumerate(wanted):
        got = compute(model, step, firsts[rank], firsts[rank + 1])
        events = [
            sum(len(part) for part in make_samples(step)[0][firsts[r] : firsts[r + 1]]) for r in range(len(SAMPLES))
        ]
        for name, value in got.items():
            if name in ("out", "rows"):
                expected = want[name].split(events)[rank]
            else:
                expected = want[name]
                dist.all_reduce(value)
            if value.numel():
                error = float((value.double() - expected.double()).norm() / want[name].double().norm())
                worst = max(worst, error if error == error else float("inf"))
    found = torch.tensor(worst, device=DEVICE)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


@contextmanager
def late_outputs(ordered: bool) -> Any:
    """Outputs of experts are computed late. The exchange waits for them, or does not if it is not ``ordered``."""
    start = ExpertExchange.start

    def start_late(
        self: ExpertExchange, arrays: Sequence[Tensor], send: list[int], receive: list[int], ready: Any = None
    ) -> Any:
        if len(arrays) > 1 or not arrays[0].is_floating_point():
            return start(self, arrays, send, receive, ready)
        late = torch.full_like(arrays[0], torch.nan)
        too_early = work_so_far(late.device)
        if CUDA:
            torch.cuda._sleep(LATE_CYCLES)
            late.copy_(arrays[0])
        return start(self, [late], send, receive, None if ordered else too_early)

    ExpertExchange.start = start_late  # type: ignore[method-assign]
    try:
        yield
    finally:
        ExpertExchange.start = start  # type: ignore[method-assign]


def main() -> None:
    if CUDA:
        sleep_in_waits()
        use_device("cuda")
    backend = sys.argv[1]
    dist.init_process_group("nccl" if CUDA else "gloo")
    group = dist.new_group(backend=backend)
    one = make_model(None)
    wanted = [compute(one, step, 0, sum(SAMPLES)) for step in range(STEPS)]
    results: dict[str, Any] = {"backend": dist.get_backend(group), "chunks": {}}
    for chunks in (1, 2, 3):
        model = make_model(chunks)
        for layer in model.feed_forwards:
            layer.moe.expert_exchange.group = group  # type: ignore[union-attr]
        results["chunks"][chunks] = compare(model, wanted)
        if chunks == 2:
            if CUDA:
                with late_outputs(ordered=True):
                    results["late"] = compare(model, wanted)
            with late_outputs(ordered=False):  # on a CPU nothing is copied, so the wrong numbers travel
                results["unordered"] = compare(model, wanted)
            with torch.no_grad():
                model.feed_forwards[0].moe.w_out[5, 3, 2] += 0.1  # type: ignore[union-attr, operator, index]
            results["changed weight"] = compare(model, wanted)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
