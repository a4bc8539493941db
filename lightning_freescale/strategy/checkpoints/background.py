"""Asynchronous saves: one thread writes copies of the state while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from lightning_freescale.runtime.errors import CheckpointError, FreeScaleError
from lightning_freescale.strategy.control import Control


class BackgroundSaves:
    """Runs one save at a time in a thread. A failure is raised on all ranks by the next :meth:`finish`.

    If all ranks write, their threads agree on the outcome at the end of a save. So the training threads need not ask each
    other. If rank 0 writes alone, which may take longer than a collective may wait, :meth:`finish` asks it.
    """

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
        """The control plane for collectives in the thread: process groups of its own. The first call is a collective."""
        if self._control is None:
            self._control = Control(control.timeout, shares_watch=control)
            _ = self._control.group, self._control.header_group  # Opens the groups here, and not in the thread.
        return self._control

    def start(self, save: Callable[[], None], path: str) -> None:
        """Run ``save`` in the thread. It must work on copies, and the save before it must be finished.

        After a call of :meth:`control`, all ranks must call it. Without one, the outcome is that of this rank.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="freescale-save")
        self._path = path
        self._save = self._executor.submit(_with_one_outcome, save, path, self._control)

    def after_save(self, action: Callable[[], Any]) -> None:
        """Run ``action`` in the thread if the save in progress succeeds."""
        assert self._executor is not None
        save = self._save
        assert save is not None
        self._executor.submit(lambda: None if save.exception() else action())

    def finish(self, control: Control | None = None) -> None:
        """Wait for the save in progress, and raise on all ranks if it failed on one. All ranks must call it.

        Args:
            control: agree on the outcome by it, because the threads have not done so. This is a collective.
        """
        error = self._wait()
        text = None if error is None else str(error)
        if control is not None:
            own = None if error is None else _described(error, self._path, control)
            text = next((found for found in control.gather(own) if found is not None), None)
        if text is not None:
            raise CheckpointError(
                f"an asynchronous save failed, and the checkpoint before it is still complete: {text}"
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


def _described(error: BaseException, path: str, control: Control) -> str:
    """The text of ``error`` with the rank and the path. An error of this package names them itself."""
    if isinstance(error, FreeScaleError):
        return str(error)
    return f"rank {control.rank}: saving {path}: {type(error).__name__}: {error}"


def _with_one_outcome(save: Callable[[], None], path: str, control: Control | None) -> None:
    """Run ``save``. Raise on all ranks if it fails on one. A collective of the ranks of ``control``."""
    if control is None:
        save()
        return
    error: BaseException | None = None
    text = None
    try:
        save()
    except BaseException as failure:
        error, text = failure, _described(failure, path, control)
    found = [text]
    if error is None or not control.misses_a_rank:
        # A rank that has failed does not know in which collective of the save the others are. So the outcome has a process
        # group of its own.
        try:
            found = control.gather(text, control.header_group)
        except FreeScaleError as failure:
            error = error or failure
            found = [text or str(failure)]
    texts = [text for text in found if text is not None]
    if texts:
        raise CheckpointError(texts[0]) from error
