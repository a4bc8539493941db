"""The dense part of a training step of HSTU with experts, which ranks may share, for ``benchmarks/expert_parallel.py``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness.attention_inputs import log_normal
from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.models import HSTU, FeedForward

ITEMS = 10_000
HOUR = 3600


class LookedUpRows:
    """Embeddings of a feature, as a lookup returns them."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def values(self) -> Tensor:
        return self._values


class ExpertStep:
    """A step of this rank, forward and backward. Calling it is a collective if ranks share the experts.

    Args:
        shape: of the model and of the samples, see ``benchmarks/expert_parallel.py``.
        device: of this rank.
        group: the process group of the exchange; ``None``: every rank computes all experts.
        chunks: number of micro-chunks.

    Attributes:
        sent_bytes: what this rank has sent to other ranks in the last step.
    """

    def __init__(self, shape: Any, device: torch.device, group: Any, chunks: int) -> None:
        rank = dist.get_rank()
        self.device, self.sent_bytes = device, 0
        torch.manual_seed(0)
        shared = group is not None
        settings = FeedForward(
            shape.experts, shape.top_k, shape.hidden, expert_parallel=shared, micro_chunks=chunks if shared else None
        )
        self.model = HSTU(
            ITEMS,
            embedding_dim=shape.dim,
            num_layers=shape.layers,
            num_heads=shape.heads,
            max_history=shape.longest,
            feed_forward=settings,
            meta_tables=True,
        )
        for part in (self.model.layers, self.model.feed_forwards):
            part.to(device).train()
        for layer in self.model.feed_forwards:
            exchange: Any = layer.moe.expert_exchange  # type: ignore[union-attr]
            if exchange is not None:
                exchange.group, exchange.observe = group, self._count(group)
        self.batch, self.rows = _make_batch(shape, device, rank)
        dense = (self.model.layers, self.model.feed_forwards)
        self.learned = [*self.rows.values(), *(p for part in dense for p in part.parameters())]

    def __call__(self) -> Tensor:
        """The loss."""
        self.sent_bytes = 0
        cuda = self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
            loss = self.model.loss({name: LookedUpRows(values) for name, values in self.rows.items()}, self.batch)
        torch.autograd.grad(loss, self.learned)
        return loss.detach()

    def meet(self) -> None:
        """Wait until all ranks have come here and their devices are done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def mean(self, value: Any) -> float:
        """The mean over all ranks."""
        total = torch.as_tensor(float(value), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def _count(self, group: Any) -> Callable[[Any, int], Any]:
        others = 1 - 1 / dist.get_world_size(group)  # of random experts, this share belongs to other ranks

        def observe(work: Any, sent_bytes: int) -> Any:
            self.sent_bytes += int(sent_bytes * others)
            return nullcontext

        return observe


def _make_batch(shape: Any, device: torch.device, rank: int) -> tuple[SeqBatch, dict[str, Tensor]]:
    """The samples of a rank, and their embeddings. All ranks have about equally many events."""
    rng = torch.Generator().manual_seed(1 + rank)
    lengths = torch.tensor(log_normal(shape.samples, shape.mean_length, shape.longest)).clamp(min=2)
    total, drawn = int(lengths.sum()), shape.samples * shape.negatives
    features = KeyedJaggedTensor(
        keys=[HISTORY, NEGATIVES],
        values=torch.randint(ITEMS, (total + drawn,), generator=rng),
        lengths=torch.cat([lengths, torch.full_like(lengths, shape.negatives)]),
    )
    times = torch.cat([torch.arange(int(length)) * HOUR for length in lengths])
    sizes = {HISTORY: total, NEGATIVES: drawn}
    rows = {name: torch.randn(size, shape.dim, generator=rng).mul_(0.02) for name, size in sizes.items()}
    leaves = {name: values.to(device).requires_grad_() for name, values in rows.items()}
    return SeqBatch(features, times).to(device), leaves
