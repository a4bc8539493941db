"""The header of a batch: what each rank tells the others about the batch that it has just fetched.

Headers travel in host memory while earlier batches train, so what they carry is known on every rank when the batch is used.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_freescale.transport import direct_calls

if TYPE_CHECKING:
    from lightning_freescale.strategy.control import Control


class Status(IntEnum):
    """What became of the fetch of a batch on one rank."""

    BATCH = 0  # The batch is sound.
    END = 1  # There is no batch: the data have ended or the limit is reached.
    ERROR = 2  # Fetching or checking the batch failed.


_STATUSES = tuple(Status)  # by value


class Header(NamedTuple):
    """What one rank tells all others about one batch."""

    status: Status
    weight: int = 0  # Number of samples or tokens that the mean loss of this rank is taken over.
    stop: bool = False  # Whether this rank has received SIGTERM.
    requeues: int = 0  # How many requeue signals this rank has received.
    bad_step: int = -1  # The first step with a loss that was not finite; -1 if there is none.


class PendingHeaders:
    """The headers of all ranks for one batch. The exchange is started here and awaited by :meth:`wait`.

    Args:
        control: the control plane of the ranks.
        header: what this rank tells all ranks.
        numbers: ``[ranks, N]`` what this rank tells each rank besides. ``N`` is equal on all ranks.
        sequence: number of the header, for messages.
    """

    def __init__(self, control: Control, header: Header, numbers: NDArray[np.int64], sequence: int):
        self._control, self._sequence = control, sequence
        sent = np.empty((control.world_size, len(header) + numbers.shape[1]), np.int64)
        sent[:, : len(header)] = header
        sent[:, len(header) :] = numbers
        self._sent = torch.from_numpy(sent)  # The tensor must live until the transfer is complete.
        self._received = torch.empty_like(self._sent)
        self._headers: list[Header] | None = None
        self._all_batches: bool | None = None  # The answer of are_all_batches().
        self._work = direct_calls.start_all_to_all(self._received, self._sent, [], [], control.header_group)
        control.in_transit(self._work)

    def wait(self) -> list[Header]:
        """The headers in rank order."""
        if self._headers is not None:
            return self._headers
        what = f"the header of batch {self._sequence}"
        self._control.check_ranks(what)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._control.missing_ranks(what, error) from error
        self._headers = [
            Header(_STATUSES[status], weight, bool(stop), requeues, bad_step)
            for status, weight, stop, requeues, bad_step in self._received[:, : len(Header._fields)].tolist()
        ]
        return self._headers

    def are_all_batches(self) -> bool:
        """Whether every rank has a sound batch."""
        if self._all_batches is None:
            self._all_batches = all(header.status == Status.BATCH for header in self.wait())
        return self._all_batches

    def numbers(self) -> NDArray[np.int64]:
        """``[ranks, N]`` what each rank tells this one besides its header."""
        self.wait()
        return self._received[:, len(Header._fields) :].numpy()
