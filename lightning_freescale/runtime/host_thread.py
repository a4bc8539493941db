"""A thread that does work of the host beside the training thread.

While autograd runs a backward pass in a thread of its own, the training thread waits. The work that the host has to do for the
exchange can run meanwhile. Python's lock lets one thread at a time run Python code, but most calls of torch release it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

Task = Callable[[], None]


class HostThread:
    """Runs one task at a time beside the caller. The thread starts with the first task.

    Args:
        device: the device of the tasks. Each of them begins on its default stream, and with gradients enabled.
        name: the name of the thread.
    """

    def __init__(self, device: torch.device, name: str):
        self._device, self._name = device, name
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None

    def start(self, task: Task) -> None:
        """Run ``task`` in the thread, after the task before it. Raises the error of that one."""
        self.join()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name=self._name)
            self._thread.start()
        self._idle.clear()
        self._tasks.put(task)

    def join(self) -> None:
        """Wait for the end of the task, and raise its error. A task may call this, too: it does not wait for itself."""
        if threading.current_thread() is self._thread:
            return
        self._idle.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread, after its task. Its error is not raised. A later task starts a new thread."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread = None

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:
                self._error = error
            finally:
                del task  # It holds the tensors of a batch.
                self._idle.set()
