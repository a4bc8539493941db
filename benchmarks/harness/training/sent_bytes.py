"""Counts the bytes that a rank sends to other ranks for the tables: ids, rows, gradients and collision marks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from lightning_freescale.transport import direct_calls


class SentBytes:
    """A counter of the bytes that leave this rank in all-to-alls, ReduceScatters and AllGathers.

    The AllReduce of the dense gradients is not counted: DDP issues it in C++.

    Attributes:
        total: bytes so far.
    """

    def __init__(self) -> None:
        self.total = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the collectives that TorchRec and the strategy issue inside, without what a rank sends to itself."""
        with ExitStack() as stack:
            calls = [(dist, name, sent) for name, sent in _SENT.items()]
            for module, name, sent in [*calls, (direct_calls, "start_all_to_all", _in_direct_all_to_all)]:
                stack.enter_context(patch.object(module, name, self._counted(getattr(module, name), sent)))
            yield

    def _counted(self, issue: Any, sent: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self.total += sent(*args, **options)
            return issue(*args, **options)

        return counted


def _in_all_to_all(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> int:
    own = input_split_sizes[dist.get_rank(group)] if input_split_sizes else len(input) // dist.get_world_size(group)
    return input[: len(input) - own].nbytes


def _in_direct_all_to_all(received: Tensor, sent: Tensor, receive: list[int], send: list[int], group: Any) -> int:
    return _in_all_to_all(received, sent, receive, send, group)


def _in_reduce_scatter(output: Any, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> int:
    ranks = dist.get_world_size(group)
    return input.nbytes * (ranks - 1) // ranks


def _in_reduce_scatter_of_lists(
    output: Tensor, input_list: list[Tensor], op: Any = None, group: Any = None, async_op: bool = False
) -> int:
    return sum(part.nbytes for part in input_list) - input_list[dist.get_rank(group)].nbytes


def _in_all_gather(outputs: Any, sent: Tensor, group: Any = None, async_op: bool = False) -> int:
    return sent.nbytes * (dist.get_world_size(group) - 1)


_SENT = {
    "all_to_all_single": _in_all_to_all,
    "reduce_scatter_tensor": _in_reduce_scatter,
    "reduce_scatter": _in_reduce_scatter_of_lists,
    "all_gather_into_tensor": lambda output_tensor, input_tensor, *args, **kw: _in_all_gather(
        output_tensor, input_tensor, *args, **kw
    ),
    "all_gather": lambda tensor_list, tensor, *args, **kw: _in_all_gather(tensor_list, tensor, *args, **kw),
}
