"""Expert parallelism: every rank computes some of the experts, for the tokens of all ranks.

Copies of tokens travel to the rank that computes their expert, by an all-to-all, and the outputs travel back. Gates travel with
the copies, so that the rank that computes an expert also computes the gradients of its gates, and no output is kept for
backward.

All ranks have the weights of all experts, as they have all other dense weights. The gradient of an expert's weights is complete
on the rank that computes it and 0 on the others. Their mean, which DistributedDataParallel computes, is the mean of the
gradients that the ranks would have without expert parallelism. So optimizers and checkpoints are as without, and a rank can
evaluate alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_freescale.models.moe import products
from lightning_freescale.models.moe.dispatch import Arrangement, arrange_plain
from lightning_freescale.models.moe.experts import Save, apply_experts
from lightning_freescale.runtime.errors import ConfigurationError


class ExpertExchange:
    """How copies of tokens travel.

    Attributes:
        group: process group of the exchange; ``None`` is the default group. All of its ranks must take part in every forward
            and backward of training, in the same order.
        observe: called with the bytes that this rank sends; the exchange runs within the context that it returns.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.observe: Callable[[int], AbstractContextManager[Any]] = _unobserved

    def __reduce__(self) -> Any:
        """A copy of a model has an exchange of its own. A process group belongs to one run and cannot be copied."""
        return ExpertExchange, ()

    @property
    def world_size(self) -> int:
        """Ranks that share the experts; 1 without process groups."""
        return dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1

    def all_to_all(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send ``send[r]`` rows to rank ``r``, and return the rows from all ranks, ``receive[r]`` from rank ``r``."""
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        with self.observe(rows.numel() * rows.element_size()):
            dist.all_to_all_single(received, rows.contiguous(), receive, send, group=self.group)
        return received


def _unobserved(sent_bytes: int) -> AbstractContextManager[Any]:
    return nullcontext()


class Routes(NamedTuple):
    """How many copies travel between this rank and each other one."""

    send: list[int]
    receive: list[int]
    exchange: ExpertExchange


def apply_parallel_experts(
    x: Tensor, gates: Tensor, chosen: Tensor, w_in: Tensor, w_out: Tensor, save: Save, exchange: ExpertExchange
) -> Tensor:
    """:func:`~.experts.apply_experts`, where every rank computes its share of the experts. The host waits for the device."""
    ranks, experts = exchange.world_size, len(w_in)
    if experts % ranks:
        raise ConfigurationError(
            f"experts: {experts} cannot be divided among {ranks} ranks; choose a multiple, or expert_parallel=False"
        )
    share, rank = experts // ranks, dist.get_rank(exchange.group)
    index = arrange_plain(chosen, experts, 1)
    counts = exchange.all_to_all(index.counts, [share] * ranks, [share] * ranks)  # of each of my experts, by rank
    send, receive = (x.view(ranks, share).sum(1).tolist() for x in (index.counts, counts))
    routes = Routes(send, receive, exchange)
    rows, row_gates = _Send.apply(x, gates, index, routes)
    own = torch.arange(share, device=x.device).repeat(ranks).repeat_interleave(counts, output_size=len(rows))
    mine = slice(rank * share, (rank + 1) * share)
    y = apply_experts(rows, row_gates[:, None], own[:, None], w_in[mine], w_out[mine], save)
    return _Return.apply(y, index, routes)


class _Send(torch.autograd.Function):
    """Tokens and gates to copies at the ranks of their experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, index: Arrangement, routes: Routes) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*index)
        ctx.routes = routes
        ways = routes.send, routes.receive
        rows = routes.exchange.all_to_all(products.gather(x, index), *ways)
        return rows, routes.exchange.all_to_all(gates.flatten()[index.copies], *ways)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor, drow_gates: Tensor) -> tuple[Tensor | None, ...]:
        index, routes = Arrangement(*ctx.saved_tensors), ctx.routes
        ways = routes.receive, routes.send
        dx = products.combine(routes.exchange.all_to_all(drows, *ways), index)
        return dx, routes.exchange.all_to_all(drow_gates, *ways)[index.rows], None, None


class _Return(torch.autograd.Function):
    """Outputs of copies to the sums of their tokens."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, index: Arrangement, routes: Routes) -> Tensor:
        ctx.save_for_backward(*index)
        ctx.routes = routes
        return products.combine(routes.exchange.all_to_all(y, routes.receive, routes.send), index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        index, routes = Arrangement(*ctx.saved_tensors), ctx.routes
        dy = products.gather(dout.contiguous(), index)
        return routes.exchange.all_to_all(dy, routes.send, routes.receive), None, None
