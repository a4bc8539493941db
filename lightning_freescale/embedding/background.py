"""The thread in which the host does a part of the exchange, beside the backward and between two steps.

The exchange of a step takes the host several milliseconds: it launches small kernels and starts transfers. With short compute the
GPU would wait for the host. The backward of the model leaves most of Python's lock free, so both run at the same time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.streams import current_stream, selected

if TYPE_CHECKING:
    from lightning_freescale.embedding.prioritized import PrioritizedEmbedding

NAME = "freescale-prefetch"


class Background:
    """Runs one piece of work after the other in a thread of its own. Its waits have the timeouts of the transfers.

    Args:
        device: of the exchange. The work sees the CUDA stream that was the current one when it was given.
        threaded: whether there is a thread. Without it, the work runs at once, where it is given.
    """

    def __init__(self, device: torch.device, threaded: bool = False):
        self._device, self.threaded = device, threaded
        self._given: queue.SimpleQueue[tuple[Callable[[], None], torch.cuda.Stream | None, threading.Event] | None]
        self._given = queue.SimpleQueue()
        self._last: threading.Event | None = None  # set when the work that was given last is done
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Start ``work`` after the work that was given before. The caller must not touch what it uses until :meth:`join`."""
        if not self.threaded:
            work()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
            self._thread.start()
        self._last = threading.Event()
        self._given.put((work, current_stream(self._device), self._last))

    def join(self) -> None:
        """Wait until all work is done. Raise the error of the first work that failed. The work after it is left out."""
        if self._last is None or threading.current_thread() is self._thread:
            return
        self._last.wait()
        self._last = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread. The work must be done."""
        if self._thread is not None:
            self._given.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (given := self._given.get()) is not None:
            work, stream, done = given
            try:
                if self._error is None:
                    with selected(stream):
                        work()
            except BaseException as error:
                self._error = error
            finally:
                done.set()


def make_background(
    exchanges: Sequence[PrioritizedEmbedding], groups: Iterable[dist.ProcessGroup], threaded: bool | None
) -> Background:
    """The thread of the exchanges of one model; None for ``threaded`` uses it where that is possible and gains time.

    On a CPU the thread would take time from the compute. NCCL needs the same order of all its operations on every rank, and the
    backward starts the AllReduce of the dense gradients. Callbacks may read the identities of zero-collision tables, which the
    search for collisions changes.
    """
    device = exchanges[0].device
    if threaded is None:
        every_group = [*groups, *(exchange.module._env.process_group for exchange in exchanges)]
        threaded = (
            device.type == "cuda"
            and not any("nccl" in dist.get_backend(group) for group in every_group)
            and all(exchange.remaps is None for exchange in exchanges)
        )
    if threaded:
        log_once("prioritize: a thread of its own starts a part of the exchange, beside the backward")
    return Background(device, threaded)
