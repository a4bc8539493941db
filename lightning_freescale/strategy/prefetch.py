"""Keeps the batches after N while N trains. Resumable, and the same on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.strategy.control import Control, Header, Posted, Status

DEPTH = 3  # batches held beyond the current one: two to work ahead on, and one whose header is still on its way


class _Fetched(NamedTuple):
    batch: Any  # None unless the fetch succeeded
    inner_state: dict | None  # the wrapped loader's own state after this batch, if it has one
    posted: Posted
    error: Exception | None
    note: Any = None  # what staging noted of it


class LookaheadLoader:
    """Iterates ``loader``, ``DEPTH`` batches ahead of the training.

    Every batch passes through ``stage`` (checks, copy to the device) as soon as it is fetched, and its header goes to the
    other ranks. When the batch is due, all headers are there: if any rank failed to fetch or check its batch, or ran out of
    data before the others, all ranks raise the same error at the same step, with the steps before it done.

    Args:
        loader: any iterable of batches; its attributes stay visible (``sampler``, ``dataset``, ...), as Lightning needs.
        stage: called on each batch when it is fetched, returns the staged batch, its weight in the loss, and a note of any
            kind: :attr:`note` when the batch is due.
        control: the ranks' side channel.
        limit: number of batches an epoch may have; ``inf`` if unknown.
        on_stop: called when any rank was asked to stop; raises.
        timeline: on which the wait for each batch is marked.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        stage: Callable[[Any], tuple[Any, int, Any]],
        control: Control,
        limit: Callable[[], float],
        on_stop: Callable[[], None],
        timeline: Timeline | None = None,
    ):
        self.loader = loader
        self._stage, self._control, self._limit, self._on_stop = stage, control, limit, on_stop
        self._queue: deque[_Fetched] = deque()
        self._yielded = 0  # batches of this epoch handed out
        self._inner_state: dict | None = None
        self.batches_done = 0  # of the epoch to come, by a resume
        self.shift = 0  # how many more they are than the number saved, which was that of another world size
        self._inner_resume: dict | None = None
        self._timeline = timeline or Timeline()
        self.headers: list[Header] = []  # of the batch handed out last, by rank
        self.note: Any = None  # on the batch handed out last

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # TypeError when unsized, which is what Lightning probes for

    @property
    def batches(self) -> int:
        """Batches of this epoch handed out, those before a resume included."""
        return self._yielded

    def upcoming(self, k: int) -> Any:
        """The staged batch ``k`` steps ahead (1 or 2); ``None`` if any rank has none, so that all ranks act alike."""
        with self._timeline.span("id_exchange"):  # waits for the slowest rank's header
            for fetched in islice(self._queue, k):  # a rank that failed or ended says nothing of the batches after
                if any(header.status != Status.BATCH for header in fetched.posted.wait()):
                    return None
        return self._queue[k - 1].batch if len(self._queue) >= k else None

    def __iter__(self) -> Iterator[Any]:
        self._queue.clear()
        self._yielded = 0
        return self._timeline.iterate("input_wait", self._batches())

    def _batches(self) -> Iterator[Any]:
        # A generator: nothing is fetched before the first next(), after set_epoch() and load_state_dict().
        source, fetched = self._open()
        limit = self._limit()
        ahead = 0
        while True:
            ahead = min(ahead + 1, DEPTH)  # by and by: the first step of an epoch waits for two batches, not for all
            while len(self._queue) <= ahead and not (self._queue and self._queue[-1].batch is None):
                self._queue.append(self._fetch(source, past_limit=fetched >= limit))
                fetched += 1
            current = self._queue.popleft()
            self.headers = current.posted.wait()
            self._act_on(self.headers, current.error)
            if current.batch is None:
                return
            # Whether a batch is the last one is asked one batch early: Lightning may never ask for another.
            self._refuse_early_end(self._queue[0].posted.wait(), batches=self._yielded + 1)
            self._yielded += 1
            self._inner_state, self.note = current.inner_state, current.note
            yield current.batch

    def _fetch(self, source: Iterator[Any], past_limit: bool) -> _Fetched:
        try:
            if past_limit:
                raise StopIteration
            batch, weight, note = self._stage(next(source))
        except StopIteration:
            return _Fetched(None, None, self._control.post(Status.END), None)
        except Exception as error:  # raised on every rank when this batch is due
            return _Fetched(None, None, self._control.post(Status.ERROR), error)
        inner_state = self.loader.state_dict() if hasattr(self.loader, "state_dict") else None
        return _Fetched(batch, inner_state, self._control.post(Status.BATCH, weight), None, note)

    def _act_on(self, headers: list[Header], error: Exception | None) -> None:
        """Do what the ranks' words about the current batch ask for, on all of them alike."""
        if any(header.bad_step >= 0 for header in headers):
            self._control.check_losses()
        if any(header.status == Status.ERROR for header in headers):
            self._control.agree(error, where=f"batch {self._yielded}")
        if self._yielded == 0:
            self._refuse_early_end(headers, batches=0)
        if any(header.stop for header in headers):
            self._on_stop()

    @staticmethod
    def _refuse_early_end(headers: list[Header], batches: int) -> None:
        ended = [rank for rank, header in enumerate(headers) if header.status == Status.END]
        more = [rank for rank in range(len(headers)) if rank not in ended]
        if ended and more:
            raise InputError(
                f"rank {', '.join(map(str, ended))}: the loader ended after {batches} batches"
                f"{' (no samples at all)' if batches == 0 else ''}, while rank {', '.join(map(str, more))} has more; "
                "every rank needs the same number of batches: pad or drop the last ones (drop_last=True)"
            )

    # ---- resume --------------------------------------------------------------------------------------------------
    def _resumable(self) -> Any:
        """What can skip batches without loading them: the loader's sampler or dataset, if it has ``resume``."""
        for owner in (getattr(self.loader, "sampler", None), getattr(self.loader, "dataset", None)):
            if owner is not None and hasattr(owner, "resume"):
                return owner
        return None

    def _open(self) -> tuple[Iterator[Any], int]:
        """An iterator over the wrapped loader, past the batches that were trained on before a resume."""
        done, inner, self.batches_done, self._inner_resume = self.batches_done, self._inner_resume, 0, None
        self._yielded = done
        if done and inner is not None and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(inner)
            return iter(self.loader), done
        source = iter(self.loader)
        if self._resumable() is None:
            for _ in range(done):  # a loader that cannot skip: load and drop
                next(source, None)
        return source, done

    def state_dict(self) -> dict[str, Any]:
        """Position in the epoch. Lightning saves rank 0's alone, so it must not differ between ranks."""
        if self._queue and self._queue[0].batch is None and self._queue[0].error is None:
            return {"batches": 0, "position": None, "inner": None}  # saved on the last batch: the next epoch is next
        owner = self._resumable()
        position = owner.position(self._yielded) if hasattr(owner, "position") else None
        return {"batches": self._yielded, "position": position, "inner": self._inner_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches_done, self._inner_resume = state["batches"], state["inner"]
        if not self.batches_done:
            return
        owner = self._resumable()
        if owner is not None and state["position"] is not None:
            self.batches_done = owner.resume(state["batches"], state["position"])
            self.shift = self.batches_done - state["batches"]
        elif owner is not None:
            owner.resume(self.batches_done)
