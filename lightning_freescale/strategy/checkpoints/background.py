"""Asynchronous saves: one thread writes copies of the state while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from lightning_freescale.runtime.errors import CheckpointError, FreeScaleError
from lightning_freescale.strategy.control import Control


class BackgroundSaves:
    """Runs one save at a time in a thread. A failure is raised on all ranks by the next :meth:`finish`."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._save: Future[None] | None = None
        self._path = ""
        self._control: Control | None = None

    @property
    def busy(self) -> bool:
        """Whether a save has been started whose result no call of :meth:`finish` has seen."""
        return self._save is not None

    @property
    def writing(self) -> bool:
        """Whether the thread works on a save."""
        return self._save is not None and not self._save.done()

    def control(self, control: Control) -> Control:
        """The control plane for collectives in the thread: a process group of its own. A collective."""
        if self._control is None:
            self._control = Control(control.timeout, shares_watch=control)
            _ = self._control.group  # Opens the group here, and not in the thread.
        return self._control

    def start(self, save: Callable[[], None], path: str) -> None:
        """Run ``save`` in the thread. It must work on copies, and the save before it must be finished."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="freescale-save")
        self._path = path
        self._save = self._executor.submit(save)

    def after_save(self, action: Callable[[], Any]) -> None:
        """Run ``action`` in the thread if the save in progress succeeds."""
        assert self._executor is not None
        save = self._save
        assert save is not None
        self._executor.submit(lambda: None if save.exception() else action())

    def finish(self, control: Control) -> None:
        """Wait for the save in progress, and raise on all ranks if it failed on one. A collective."""
        error = self._wait()
        text = None
        if error is not None:
            named = isinstance(error, FreeScaleError)  # Such a message names the rank and the path.
            text = str(error) if named else f"rank {control.rank}: saving {self._path}: {type(error).__name__}: {error}"
        found = [text for text in control.gather(text) if text is not None]
        if found:
            raise CheckpointError(
                f"an asynchronous save failed, and the checkpoint before it is still complete: {found[0]}"
            ) from error

    def close(self, seconds: float | None = None) -> BaseException | None:
        """Wait for the thread to end, without other ranks. Return the failure that :meth:`finish` has not raised.

        Args:
            seconds: leave the thread alone if it takes longer. It may wait for a rank that has ended.
        """
        if self._save is not None and not wait([self._save], seconds).done:
            assert self._executor is not None
            assert seconds is not None
            self._executor.shutdown(wait=False)
            self._save = self._executor = self._control = None
            return TimeoutError(f"{self._path} was not complete {seconds:g} s after the training had failed")
        error = self._wait()
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None
        if self._control is not None:
            self._control.close()
            self._control = None
        return error

    def _wait(self) -> BaseException | None:
        save, self._save = self._save, None
        if save is None:
            return None
        error = save.exception()
        if self._executor is not None:
            self._executor.submit(
                lambda: None
            ).result()  # Actions after the save run first: the thread keeps the order.
        return error
