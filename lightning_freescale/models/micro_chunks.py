"""Layers with experts that the ranks share, computed in parts of the batch: events of one part travel while another computes.

With two parts, A and B, the order in a layer is::

    compute    attention A | attention B | experts A | experts B | attention A of the next layer | ...
    travels                | events A    | events B  | outputs A | outputs B                     | ...

Backward has the opposite order, so the gradients of one part travel while those of the other are computed. A part has whole
samples. No result depends on the other samples of a batch, except sums over the events, whose order changes: gradients of
weights, and the losses of the routers. So the result is that of one part, but for rounding.

All ranks have the same number of parts, and each part takes part in all exchanges, even if it is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_freescale.models.feed_forward import FeedForwardLayer, StartedFeedForward
from lightning_freescale.models.moe.parallel import compute_in_turn
from lightning_freescale.models.sequences import Attention
from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.streams import Readback

MICRO_CHUNKS = 2  # where the exchange runs beside the compute


class Samples(NamedTuple):
    """The input of the layers for some samples: ``N`` events of ``B`` samples."""

    x: Tensor  # [N, D]
    offsets: Tensor  # [B + 1] int64
    timestamps: Tensor  # [N] int64
    keys: Tensor | None  # [N] int32, for dropout

    def split(self, count: int) -> list[Samples]:
        """``count`` parts with about equally many events. Some may be empty. On CUDA the host waits for the device."""
        if count == 1:
            return [self]
        x, offsets, timestamps, keys = self
        # A sample belongs to the part in which its middle lies.
        middles = (offsets[:-1] + offsets[1:]) * count
        ends = torch.searchsorted(middles, 2 * len(x) * torch.arange(1, count, device=offsets.device))
        found = Readback(torch.cat([ends, offsets[ends]])).wait().tolist()
        samples, events = [0, *found[: count - 1], len(offsets) - 1], [0, *found[count - 1 :], len(x)]
        sizes = [after - before for before, after in pairwise(events)]
        parts = zip(x.split(sizes), timestamps.split(sizes), pairwise(samples), events, strict=False)
        split_keys = [None] * count if keys is None else keys.split(sizes)
        return [
            Samples(rows, offsets[first : last + 1] - start, times, own)
            for (rows, times, (first, last), start), own in zip(parts, split_keys, strict=True)
        ]


class LayerInput(NamedTuple):
    """The rows of the layers, their attention, and their keys for dropout."""

    x: Tensor
    attention: Attention
    keys: Tensor | None


def count_chunks(layers: Iterable[FeedForwardLayer], device: torch.device) -> int:
    """The number of parts of a batch in training. It is the same on all ranks."""
    layer = next(iter(layers), None)
    exchange = None if layer is None else layer.moe.expert_exchange
    if layer is None or exchange is None or not layer.training:
        return 1
    chosen = layer.settings.micro_chunks
    if exchange.world_size == 1:
        count, reason = 1, "there is one rank, which computes all experts"
    elif chosen is not None:
        count, reason = chosen, "it was set"
    elif device.type != "cuda":
        count, reason = 1, f"on {device.type} the exchange and the layers use the same cores"
    else:
        count, reason = MICRO_CHUNKS, "events travel while the layers compute another part of the batch"
    log_once(f"expert_parallel: micro_chunks={count}, because {reason}")
    return count


def apply_in_chunks(
    layers: Iterable[nn.Module], feed_forwards: Iterable[FeedForwardLayer], inputs: Sequence[LayerInput]
) -> Tensor:
    """The output of all layers at the events of all ``inputs``. All ranks must have the same number of inputs."""
    outputs: list[Callable[[], Tensor]] = [partial(_given, part.x) for part in inputs]
    for layer, after in zip(layers, feed_forwards, strict=True):
        experts = after.moe.share_experts()
        assert experts is not None, "micro-chunks need experts that several ranks share"
        after.moe.sums = None
        started: list[StartedFeedForward] = []
        for output, part in zip(outputs, inputs, strict=True):
            x = layer(output(), part.attention, part.keys)
            started.append(after.start(x, part.keys, experts))
            if len(started) > 1:  # now that this part is queued, the host can wait for the counts of the one before
                started[-2].tokens.send()
            started[-1].tokens.open()
        compute_in_turn([part.tokens for part in started])
        outputs = [part.finish for part in started]
    return torch.cat([part.attention.events_of(output()) for output, part in zip(outputs, inputs, strict=True)])


def _given(x: Tensor) -> Tensor:
    return x
