"""Row-wise bags: each rank pools the rows that it owns, and the requester adds these partial sums of all ranks.

TorchRec adds them with a reduce-scatter. The result depends on the order of the additions in its last bits. On a CPU the order
is that of gloo, so the prioritized exchange adds in the same order. Gloo passes *segments* of the buffer around a ring of all
ranks. A rank owns some consecutive segments. The ranks are added in descending order, so that the owner of the segment is last:
with 4 ranks, the segments of rank 2 are ((rank 1 + rank 0) + rank 3) + rank 2. On a GPU NCCL chooses an order of its own, and the
two exchanges agree up to rounding. The kernels of row-wise tables always return sums. If the pooling is by mean, TorchRec divides
the sum of all ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist

from lightning_freescale.runtime.errors import ConfigurationError

LARGEST_SEGMENT = 1 << 20  # bytes
SEGMENTS_PER_RANK = 2  # of a small buffer
ELEMENT_BYTES = 4  # float32


def segments_of_ranks(elements: int, world: int) -> list[tuple[int, int]]:
    """First element, and the one after the last element, that each rank owns in gloo's ring over a buffer.

    >>> segments_of_ranks(10, 2)
    [(0, 6), (6, 10)]
    """
    total = elements * ELEMENT_BYTES
    per_rank = -(-max(-(-total // LARGEST_SEGMENT), SEGMENTS_PER_RANK * world) // world)
    segment = -(-elements // (per_rank * world))
    return [
        (min(elements, rank * per_rank * segment), min(elements, (rank + 1) * per_rank * segment))
        for rank in range(world)
    ]


def own_segments(width: int, samples: list[int], rank: int) -> list[tuple[int, int]]:
    """The part of each rank's segments that lies in the output of ``rank``, counted from the start of that output.

    Args:
        width: elements of a sample.
        samples: ``[W]`` samples of each rank. If all have the same number, one ring has the outputs of all ranks. Otherwise
            each output has a ring of its own.
    """
    own = samples[rank] * width
    before = rank * own if len(set(samples)) == 1 else 0
    elements = own * len(samples) if len(set(samples)) == 1 else own
    return [
        (min(max(start - before, 0), own), min(max(end - before, 0), own))
        for start, end in segments_of_ranks(elements, len(samples))
    ]


class SumOfPartials(torch.autograd.Function):
    """Adds the partial sums of all ranks. The gradient of each of them is that of the sum."""

    @staticmethod
    def forward(ctx: Any, partials: Tensor, segments: list[tuple[int, int]]) -> Tensor:
        """``[B, W, C]`` to ``[B, C]``. Uses ``segments``, as :func:`own_segments` returns them, on a CPU only."""
        samples, ctx.world, width = partials.shape
        if partials.is_cuda:
            return partials.sum(dim=1)
        by_rank = partials.transpose(0, 1).reshape(ctx.world, -1)
        total = torch.empty_like(by_rank[0])
        for owner, (start, end) in enumerate(segments):
            part = total[start:end]
            part.copy_(by_rank[(owner - 1) % ctx.world, start:end])
            for distance in range(2, ctx.world + 1):
                part += by_rank[(owner - distance) % ctx.world, start:end]
        return total.view(samples, width)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].unsqueeze(1).expand(-1, ctx.world, -1).contiguous(), None


def refuse_uneven_batches(model: nn.Module) -> None:
    """Make steps of TorchRec's exchange fail on all ranks alike if gloo cannot return the gradients of row-wise bags.

    Args:
        model: its tables are sharded, on a CPU.
    """
    for name, module in model.named_modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            for exchange in module._output_dists:
                if isinstance(exchange, RwPooledEmbeddingDist):
                    exchange.register_forward_pre_hook(functools.partial(_check_samples, name))


def _check_samples(name: str, _: nn.Module, arguments: tuple[Any, ...]) -> None:
    samples = list(getattr(arguments[1], "batch_size_per_rank", None) or ())
    if torch.is_grad_enabled() and len(set(samples)) > 1:
        raise ConfigurationError(
            f"{name}: the ranks have {samples} samples in this step. TorchRec trains row-wise bags over gloo only if all ranks "
            "have the same number. Make the batches equal, or use sharding='table_wise' or 'column_wise'"
        )
