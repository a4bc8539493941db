"""A thread for the host's part of the exchange, beside the thread that launches the kernels of the model.

An exchange takes many small calls on the host. On a GPU with fast compute they would take longer than the compute, if the thread
that launches the model had to do them, too. The calls run in the order in which they were handed over, on every rank the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from lightning_freescale.runtime.errors import FreeScaleError


class RowExchangeThread:
    """Runs calls one after the other in a thread of its own; or at once, where they are handed over, if ``inline`` is set.

    An error of a call is raised by the next :meth:`wait` or :meth:`submit`. The calls after it do not run.

    Args:
        device: the calls use this CUDA device, and the present stream of the calling thread.
        timeout: seconds that a wait for the thread may take.

    Attributes:
        inline: whether calls run at once. The thread is started when it is needed first.
    """

    def __init__(self, device: torch.device, timeout: float):
        self._device, self._timeout = device, timeout
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._calls: SimpleQueue[tuple[Callable[..., Any], tuple] | None] = SimpleQueue()
        self._idle = threading.Condition()
        self._waiting = 0  # calls that have not ended
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.inline = True

    def submit(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Run ``call(*arguments)`` after all calls before it."""
        if self.inline:
            self.wait()
            call(*arguments)
            return
        self._raise()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="freescale exchange", daemon=True)
            self._thread.start()
        with self._idle:
            self._waiting += 1
        self._calls.put((call, arguments))

    def wait(self) -> None:
        """Return when all calls have ended, and raise the error of the first one that failed.

        Raises:
            FreeScaleError: if they take longer than the timeout.
        """
        if self._waiting and threading.current_thread() is not self._thread:
            with self._idle:
                done = self._idle.wait_for(lambda: self._waiting == 0, self._timeout)
            if not done:
                raise FreeScaleError(
                    f"the exchange of embedding rows did not go on for {self._timeout:.0f} s: another rank is late or has "
                    "failed. See the messages of the other ranks"
                )
        self._raise()

    def stop(self) -> None:
        """End the thread after the calls that it has. Does not wait for it."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread = None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)
        while (entry := self._calls.get()) is not None:
            call, arguments = entry
            try:
                if self._error is None:
                    call(*arguments)
            except BaseException as error:
                self._error = error
            del entry, call, arguments  # keeps no tensor alive while it waits
            with self._idle:
                self._waiting -= 1
                if not self._waiting:
                    self._idle.notify_all()
