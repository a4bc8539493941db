"""``ExchangeLoader``: the loader that the training iterates when the ranks exchange samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_freescale.balance.exchange.background import ExchangeThread
from lightning_freescale.balance.exchange.local_batches import WAITING_BATCHES, LocalBatches
from lightning_freescale.balance.exchange.messages import RankMessages
from lightning_freescale.balance.exchange.planners import Planners
from lightning_freescale.balance.planner import Planner
from lightning_freescale.balance.sample_sizes import SampleSizes, sample_sizes


@dataclass
class SampleExchangeStats:
    """Totals over all batches that the training has received.

    Attributes:
        batches: the number of batches.
        compared: batches whose lengths the ranks have compared.
        waited: seconds that the training waited for batches, for any reason.
        exposed: seconds of ``waited`` that the exchange can account for: its share of the critical path.
        exchanging: seconds that the exchange took, hidden or exposed.
        bytes_sent: bytes that this rank sent to other ranks.
    """

    batches: int = 0
    compared: int = 0
    waited: float = 0.0
    exposed: float = 0.0
    exchanging: float = 0.0
    bytes_sent: int = 0


class ExchangeLoader:
    """Iterates ``loader``, but assigns the samples of every global batch to the ranks by cost.

    The samples of a step are those of the local batches of all ranks, as without this loader. The samples of a new local
    batch are ordered by source rank, then by their order there. Its type is the type of the old batches; ``split_batch.py``
    tells which types can be split.

    If a rank has no batch and others have one, all ranks learn it before any sample moves. A rank that failed raises its
    own exception when the training asks for that batch; the other ranks raise :class:`PeerFailed`. If the data of a rank have
    ended, its iteration ends, and the other ranks yield their remaining batches as they load them. If the samples of a batch
    cannot be separated, all ranks train this batch and all later ones where they were loaded, and log the reason.

    Args:
        loader: any iterable of local batches in host memory. Its attributes are
            attributes of this loader, too. Two threads load batches from it, but never at the same time.
        group: a gloo process group that nothing else uses.
        planner: assigns samples to ranks. A new one may be set at any time; it is used as soon as all ranks have it.
        check: raises if a local batch cannot be trained on. It runs on the rank that loaded the batch, before samples move.
            It does not run for batches that the ranks do not compare: the caller must check those, see :attr:`checked`.
        sizes: returns the history lengths and the candidate counts of the samples of a batch.
        pin_memory: put batches into page-locked memory.
    """

    balanced = True

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        group: dist.ProcessGroup,
        planner: Planner,
        check: Callable[[Any], None] | None = None,
        sizes: SampleSizes = sample_sizes,
        pin_memory: bool = False,
    ):
        self.loader, self.group = loader, group
        self.check, self.sizes, self.pin_memory = check, sizes, pin_memory
        self.planners = Planners(planner)
        self.stats = SampleExchangeStats()
        self.checked = False  # whether ``check`` has accepted the batch that was yielded last
        self._messages = RankMessages(group)
        self._thread: ExchangeThread | None = None
        self._state: dict | None = None

    @property
    def planner(self) -> Planner:
        return self.planners.latest

    @planner.setter
    def planner(self, planner: Planner) -> None:
        self.planners.add(planner)

    @property
    def unbalanced(self) -> str | None:
        """Why the current iteration trains batches where they were loaded; ``None`` if it exchanges samples."""
        return None if self._thread is None else self._thread.unbalanced

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet while this object is unpickled
            raise AttributeError(name)
        value = getattr(self.loader, name)
        # The loader is some batches ahead of the training, so its own state is not the state of the training.
        return self._state_dict if name == "state_dict" else value

    def _state_dict(self) -> dict | None:
        return self._state

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # Lightning expects a TypeError if the loader has no length

    def __iter__(self) -> Iterator[Any]:
        # This is a generator, so it loads nothing before the first next(): set_epoch() and load_state_dict() come first.
        self.leave()
        thread = self._thread = self._start_thread()
        try:
            while True:
                asked = time.perf_counter()
                ready = thread.take()
                waited = time.perf_counter() - asked
                if isinstance(ready, BaseException):
                    raise ready
                if ready is None:
                    return
                self.stats.batches += 1
                self.stats.compared += ready.compared
                self.stats.waited += waited
                self.stats.exposed += min(waited, ready.seconds)
                self.stats.exchanging += ready.seconds
                self.stats.bytes_sent += ready.bytes_sent
                self.checked = ready.compared and self.check is not None
                self._state = ready.state
                yield ready.batch
        finally:
            thread.close()

    def _start_thread(self) -> ExchangeThread:
        return ExchangeThread(
            # Page-locked batches are copies.
            LocalBatches(self.loader, self.check, self.sizes, waiting=0 if self.pin_memory else WAITING_BATCHES),
            self._messages,
            self.planners,
            balanced=0 if self._thread is None else self._thread.balanced_at_end,
            pin_memory=self.pin_memory,
        )

    def close(self) -> bool:
        """Stop the current iteration. Return whether its thread has ended, which it does as soon as the other ranks know."""
        return self._thread is None or self._thread.close()

    def leave(self) -> dist.ProcessGroup:
        """Close on all ranks, and return the process group, which another loader may use then. All ranks must call this."""
        self.close()
        if self._thread is not None:
            self._thread.finish()
        return self.group
