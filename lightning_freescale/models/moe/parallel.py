"""Expert parallelism: every rank computes some of the experts, for the tokens of all ranks.

Copies of tokens travel to the rank that computes their expert, by an all-to-all, and the outputs travel back. Gates travel with
the copies, so that the rank that computes an expert also computes the gradients of its gates, and no output is kept for
backward.

All ranks have the weights of all experts, as they have all other dense weights. The gradient of an expert's weights is complete
on the rank that computes it and 0 on the others. Their mean, which DistributedDataParallel computes, is the mean of the
gradients that the ranks would have without expert parallelism. So optimizers and checkpoints are as without, and a rank can
evaluate alone.

Every exchange is started by one function and awaited by another (:class:`TravellingTokens`), so that other work runs between
them. In backward the roles are swapped: what waits in forward starts the exchange of the gradients, and what starts in forward
waits for them. Autograd runs the functions in exactly the opposite order of forward. So work that ran during an exchange in
forward also runs during the exchange of the gradients, and all ranks have their exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_freescale.models.moe import products
from lightning_freescale.models.moe.dispatch import arrange_copies
from lightning_freescale.models.moe.exchange import ExpertExchange, PendingCounts, PendingRows
from lightning_freescale.models.moe.experts import Save, apply_experts
from lightning_freescale.models.tiles import unit_stride
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.streams import work_so_far


class SharedExperts:
    """The experts of one layer that this rank computes, in one forward.

    Args:
        w_in: ``[E, D, 2 H]``, the weights of all experts.
        w_out: ``[E, H, D]``.
        save: what is kept for backward.
        exchange: how tokens travel.
    """

    def __init__(self, w_in: Tensor, w_out: Tensor, save: Save, exchange: ExpertExchange):
        ranks, experts = exchange.world_size, len(w_in)
        if experts % ranks:
            raise ConfigurationError(
                f"experts: {experts} cannot be divided among {ranks} ranks; choose a multiple, or expert_parallel=False"
            )
        self.ranks, self.share = ranks, experts // ranks
        first = dist.get_rank(exchange.group) * self.share
        self.w_in, self.w_out = w_in[first : first + self.share], w_out[first : first + self.share]
        self.save, self.exchange = save, exchange


class _Trip:
    """What the functions of the tokens of one rank share: the arrangement of the copies, and the exchange under way."""

    def __init__(self, experts: SharedExperts, chosen: Tensor):
        self.exchange = experts.exchange
        self.index = arrange_copies(chosen, experts.ranks * experts.share, tile=1)
        self.send: list[int] = []  # copies for each rank
        self.receive: list[int] = []  # copies from each rank
        self.copies: tuple[Tensor, Tensor] | None = None  # rows and gates that have not been sent
        self.ready: torch.cuda.Event | None = None  # when they are computed
        self.pending: PendingRows | None = None

    def start(self, arrays: Sequence[Tensor], back: bool, ready: torch.cuda.Event | None = None) -> None:
        """Start to send copies to their experts, or ``back``."""
        ways = (self.receive, self.send) if back else (self.send, self.receive)
        self.pending = self.exchange.start(arrays, *ways, ready)

    def wait(self) -> list[Tensor]:
        assert self.pending is not None, "an exchange of experts was awaited that had not started"
        received, self.pending = self.pending.wait(), None
        return received


class TravellingTokens:
    """Some tokens on their way to their experts and back.

    The methods are called in this order, on all ranks alike: :meth:`open`, :meth:`send`, :meth:`compute`, :meth:`give_back`,
    :meth:`result`. Other work may be queued between them. A rank without tokens calls them too.

    Args:
        experts: of the layer.
        x: ``[T, D]`` tokens.
        gates: ``[T, k]``.
        chosen: ``[T, k]`` int64.
    """

    def __init__(self, experts: SharedExperts, x: Tensor, gates: Tensor, chosen: Tensor):
        self._experts, self._trip = experts, _Trip(experts, chosen)
        self._link = _Gather.apply(x, gates, self._trip)
        self._counts: PendingCounts | None = None
        self._received: Tensor | None = None  # copies of each of this rank's experts, by rank
        self._outputs: Tensor | None = None

    def open(self) -> None:
        """Start to exchange the numbers of copies. Only then can the copies travel.

        On a CPU the copies leave at once. On CUDA the host would wait for the device: queue other work before :meth:`send`.
        """
        trip = self._trip
        self._counts = trip.exchange.start_counts(trip.index.counts, trip.ready)
        if not self._link.is_cuda:
            self.send()

    def send(self) -> None:
        """Start to send the copies. The host waits for their numbers. A second call does nothing."""
        if self._counts is None:
            return
        trip, ranks, share = self._trip, self._experts.ranks, self._experts.share
        *counts, self._received = self._counts.wait()
        trip.send, trip.receive = ([sum(part[r * share : (r + 1) * share]) for r in range(ranks)] for part in counts)
        assert trip.copies is not None
        trip.start(trip.copies, back=False, ready=trip.ready)
        self._counts = trip.copies = trip.ready = None

    def compute(self) -> None:
        """Wait for the copies of all ranks, and compute this rank's experts."""
        self.send()
        rows, gates = _Arrive.apply(self._link, self._trip)
        experts, device = self._experts, rows.device
        assert self._received is not None
        own = torch.arange(experts.share, device=device).repeat(experts.ranks)
        own = own.repeat_interleave(self._received, output_size=len(rows))
        with torch.autocast(device.type, enabled=False):
            self._outputs = apply_experts(rows, gates[:, None], own[:, None], experts.w_in, experts.w_out, experts.save)

    def give_back(self) -> None:
        """Start to return the outputs."""
        self._link, self._outputs = _Leave.apply(self._outputs, self._trip), None

    def result(self) -> Tensor:
        """Wait for the outputs, and return their sum for each token, ``[T, D]``."""
        return _Combine.apply(self._link, self._trip)


def compute_in_turn(parts: Sequence[TravellingTokens]) -> None:
    """Let the experts compute all parts of the tokens. Each part but the last one must have been sent.

    The copies of the next part travel while the experts compute, and so do the outputs of the one before.
    """
    for part in parts:
        part.compute()
        parts[-1].send()  # on CUDA the host waits here, and the device has the experts of the first part to compute
        part.give_back()


class _Gather(torch.autograd.Function):
    """Tokens and gates to copies, which leave later. The result has no elements: it links the function to :class:`_Arrive`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.copies = products.gather(unit_stride(x), trip.index), gates.flatten()[trip.index.copies]
        trip.ready = work_so_far(x.device)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        drows, dgates = ctx.trip.wait()
        index = ctx.trip.index
        return products.combine(drows, index), dgates[index.rows], None


class _Arrive(torch.autograd.Function):
    """The copies of all ranks, and their gates, at the rank of their experts."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, trip: _Trip) -> tuple[Tensor, ...]:
        ctx.trip = trip
        return tuple(trip.wait())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor, dgates: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trip.start([drows, dgates], back=True)
        return drows.new_empty(0), None


class _Leave(torch.autograd.Function):
    """Outputs of experts, on their way back. The result links the function to :class:`_Combine`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.start([y], back=True)
        return y.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = ctx.trip.wait()
        return dy, None


class _Combine(torch.autograd.Function):
    """The sums of the outputs of each token."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        (y,) = trip.wait()
        return products.combine(y, trip.index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trip.start([products.gather(dout.contiguous(), ctx.trip.index)], back=False)
        return dout.new_empty(0), None
