"""``PrefetchLoader``: fetches batches before they are trained, and keeps all ranks at the same batch.

It can resume in the middle of an epoch, and it behaves equally on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.batch.reused_memory import ReusedMemory
from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.runtime.errors import InputError
from lightning_freescale.runtime.log import log_once
from lightning_freescale.strategy.checkpoints.random_states import LoaderRandomStates
from lightning_freescale.strategy.control import Control, Request
from lightning_freescale.strategy.headers import Status
from lightning_freescale.strategy.prepared_batch import PreparedBatch

# Batches fetched beyond the current one: two for the exchange to work on, and one whose header is in transit.
PREFETCH_DEPTH = 3

Uneven = Literal["error", "stop", "continue", "join"]


class Prepared(NamedTuple):
    """What the preparation of a batch yields. The other fields are those of :class:`PreparedBatch`."""

    batch: Any
    weight: int
    features: Sequence[KeyedJaggedTensor] = ()
    moved: bool = False
    copied: torch.cuda.Event | None = None
    cost_sums: Any = None
    numbers: NDArray[np.int64] | None = None  # [ranks, N] for the header of the batch


class PrefetchLoader:
    """Iterates ``loader`` and fetches up to ``PREFETCH_DEPTH`` batches before they are trained.

    Each batch is prepared as soon as it is fetched (checks, copy to the device), and its header goes to the other
    ranks. When the batch is trained, the headers of all ranks have arrived. If a rank failed to fetch or check its
    batch, or ran out of data before the others, all ranks raise the same error at the same step, after the steps
    before it are done.

    The object passes for the wrapped loader: attributes are read from it and written to it, and ``isinstance`` tests
    succeed, because Lightning and users look at ``sampler``, ``dataset`` or ``worker_init_fn``.

    Args:
        loader: any iterable of batches.
        prepare: called on each batch when it is fetched.
        control: the control plane of the ranks.
        limit: returns the number of batches that an epoch may have; infinite if it is not known.
        on_request: called when a rank asked all ranks to stop or to requeue.
        on_iter: called before each iteration.
        uneven: what to do when the data of some ranks end before those of others. ``"error"`` raises on all ranks.
            ``"stop"`` ends the epoch on all ranks. ``"continue"`` lets a rank without data repeat its last batch with
            weight 0. ``"join"`` ends the iteration on that rank, which must call :meth:`join_others` afterwards.
        hand_out: turns a prepared batch into what the caller receives.
        is_processed: says whether the batch handed out last counts as done in a checkpoint.
        random_states: notes and restores the random states of a train loader.
        timeline: records the time of each wait for a batch.
        waits_on_host: says whether the batches wait for their step in the memory that the loader put them into.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        prepare: Callable[[Any], Prepared],
        control: Control,
        limit: Callable[[PrefetchLoader], float],
        on_request: Callable[[Request], None],
        on_iter: Callable[[PrefetchLoader], None] = lambda loader: None,
        uneven: Uneven = "error",
        hand_out: Callable[[PreparedBatch], Any] = lambda prepared: prepared,
        is_processed: Callable[[], bool] = lambda: True,
        random_states: LoaderRandomStates | None = None,
        timeline: Timeline | None = None,
        waits_on_host: Callable[[], bool] = lambda: False,
    ):
        self.loader = loader
        self.prepare, self.control, self.limit = prepare, control, limit
        self.on_request, self.on_iter = on_request, on_iter
        self.uneven, self.hand_out, self.is_processed = uneven, hand_out, is_processed
        self.random_states, self.timeline, self.waits_on_host = random_states, timeline or Timeline(), waits_on_host
        self.current: PreparedBatch | None = None  # The batch that is in training, or was trained last.
        self.opened = False  # Whether the current iteration has fetched a batch.
        self.shift = 0  # How many more batches are done than the checkpoint says, which had another world size.
        self._queue: deque[PreparedBatch] = deque()
        self._newest: PreparedBatch | None = None
        self._source: Iterator[Any] = iter(())
        self._memory = ReusedMemory(waiting=0)
        self._index = self._first_index = 0  # The batches fetched, and trained before a resume, in this epoch.
        self._limit = float("inf")
        self._last_host_batch: Any = None
        self._state_before: dict | None = None  # The state of the user's loader before the current batch.
        self._loader_state_to_load: dict | None = None
        self.length = self._length()

    # ---- stands for the wrapped loader -----------------------------------------------------------------------------
    # Lightning and users test isinstance(loader, DataLoader).
    __class__ = property(lambda self: type(self.loader) if self._is_initialised() else PrefetchLoader)  # type: ignore

    def _is_initialised(self) -> bool:
        return "length" in vars(self)  # The attribute that __init__ sets last.

    def __getattr__(self, name: str) -> Any:
        if not self._is_initialised():  # For instance while the object is unpickled.
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or not self._is_initialised():
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def _length(self) -> int | None:
        """The number of batches of an epoch on all ranks; ``None`` if it is not known. A collective if uneven."""
        try:
            length = len(self.loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            length = None
        if self.uneven not in ("stop", "continue"):
            return length
        lengths = self.control.gather(length)
        if None in lengths:
            return None
        return min(lengths) if self.uneven == "stop" else max(lengths)

    def __len__(self) -> int:
        if self.uneven in ("stop", "continue") and self.length is not None:
            return self.length
        return len(self.loader)  # type: ignore[arg-type]  # A TypeError tells Lightning that the length is unknown.

    # ---- iteration -------------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[Any]:
        self.on_iter(self)
        if self.opened:
            self._first_index = 0  # A new epoch starts. A position that was loaded belonged to the last one.
        self._queue.clear()
        self._newest = self.current = self._state_before = None
        self.opened = False
        return self.timeline.iterate("input_wait", self._batches())

    def _batches(self) -> Iterator[Any]:
        # This is a generator. It fetches nothing before the first next(), after set_epoch() and load_state_dict().
        if self.random_states is not None:
            self.random_states.before_open()
        self._source, self._index = self._open(), self._first_index
        self._limit = self.limit(self)
        # Without a length Lightning fetches one more batch ahead.
        self._memory = ReusedMemory(PREFETCH_DEPTH + (self.length is None) if self.waits_on_host() else 0)
        try:
            yield from self._hand_out_batches()
        finally:
            if self.uneven != "join":
                self._source = iter(())  # The wrapped loader may hold threads or processes until it is released.

    def _hand_out_batches(self) -> Iterator[Any]:
        depth = 0
        while True:
            depth = min(depth + 1, PREFETCH_DEPTH)  # The first step of an epoch waits for two batches, not for four.
            self._fill(depth)
            batch = self._queue.popleft()
            self._act_on(batch)
            if self._ends(batch):
                self._queue.appendleft(batch)  # join_others() starts here.
                return
            if batch.batch is None:
                batch = self._repeat_last(batch)
            # All ranks learn one batch early that a rank ends: Lightning may never ask for another batch.
            if self.uneven == "error":
                self._refuse_uneven_end(self._queue[0], batches=batch.index + 1)
            if self.random_states is not None:
                self.random_states.before_batch()
            yield self.hand_out(batch)

    def use(self, batch: PreparedBatch) -> None:
        """Note that ``batch`` is in training from now on. Lightning may have fetched later batches already."""
        if self.current is not None and self.current is not batch:
            self._state_before = self.current.loader_state
        self.current = batch

    def _fill(self, depth: int) -> None:
        """Fetch until ``depth`` batches follow the next one."""
        while len(self._queue) <= depth and not self._is_complete():
            batch = self._fetch(self._index, past_limit=self._index >= self._limit)
            if self._newest is not None:
                self._newest.next = batch
            self._newest = batch
            self._queue.append(batch)
            self._index += 1

    def _is_complete(self) -> bool:
        """Whether no header is needed after the newest one. All ranks must send equally many in an epoch."""
        return bool(self._queue) and self._queue[-1].batch is None and self.uneven == "error"

    def _fetch(self, index: int, past_limit: bool) -> PreparedBatch:
        try:
            if past_limit:
                raise StopIteration
            host_batch = self._memory.next(self._source)
            prepared = self.prepare(host_batch)
        except StopIteration:
            return PreparedBatch(None, index, self.control.send_header(Status.END))
        except Exception as error:  # All ranks raise it when this batch is to be trained.
            return PreparedBatch(None, index, self.control.send_header(Status.ERROR), error=error)
        if self.uneven in ("continue", "join"):
            self._last_host_batch = host_batch
        return PreparedBatch(
            prepared.batch,
            index,
            self.control.send_header(Status.BATCH, prepared.weight, prepared.numbers),
            features=prepared.features,
            copied=prepared.copied,
            moved=prepared.moved,
            cost_sums=prepared.cost_sums,
            loader_state=self.loader.state_dict() if hasattr(self.loader, "state_dict") else None,
            loader=self,
        )

    def _act_on(self, batch: PreparedBatch) -> None:
        """Do what the headers of ``batch`` ask for. All ranks do the same."""
        diverged = failed = stop = False
        requeues = 0
        for header in batch.headers:
            diverged = diverged or header.bad_step >= 0
            failed = failed or header.status == Status.ERROR
            stop = stop or header.stop
            requeues = max(requeues, header.requeues)
        if diverged:
            self.control.check_losses()
        if failed:
            self.control.agree(batch.error, where=f"batch {batch.index}")
        if batch.index == 0:
            self._refuse_uneven_end(batch, batches=0)
        request = self.control.requested(stop, requeues)
        if request != Request.NONE:
            self.on_request(request)

    def _ends(self, batch: PreparedBatch) -> bool:
        """Whether the epoch ends before ``batch`` on this rank."""
        if batch.on_all_ranks:
            return False
        ended = [header.status == Status.END for header in batch.headers]
        if self.uneven == "stop" and any(ended):
            if not all(ended):
                log_once(f"uneven='stop': the epoch ends after {batch.index} batches with the shortest rank's data")
            return True
        return all(ended) or (batch.batch is None and self.uneven != "continue")

    def _repeat_last(self, batch: PreparedBatch) -> PreparedBatch:
        """A batch that keeps this rank in step with the others. Its header said that it has weight 0."""
        prepared = self.prepare(self._last_host_batch)
        repeated = PreparedBatch(prepared.batch, batch.index, batch.pending, copied=prepared.copied, loader=self)
        repeated.next, repeated.moved, repeated.features = batch.next, prepared.moved, prepared.features
        return repeated

    @staticmethod
    def _refuse_uneven_end(batch: PreparedBatch, batches: int) -> None:
        if batch.on_all_ranks:
            return
        ended = [rank for rank, header in enumerate(batch.headers) if header.status == Status.END]
        more = [rank for rank in range(len(batch.headers)) if rank not in ended]
        if ended and more:
            raise InputError(
                f"rank {', '.join(map(str, ended))}: the loader ended after {batches} batches"
                f"{' (no samples at all)' if batches == 0 else ''}, while rank {', '.join(map(str, more))} has more. "
                "Every rank needs the same number of batches: pad or drop the last ones (drop_last=True), or set "
                "uneven='stop' or uneven='continue' of the strategy, if it is a train loader."
            )

    def join_others(self, step: Callable[[PreparedBatch], None]) -> None:
        """Take part in the steps of ranks that have more batches, with ``uneven="join"``. Returns when all have ended.

        Every step of a sharded model is a collective, so a rank without data must take part in it.

        Args:
            step: runs the step on a copy of this rank's last batch. Its output is dropped.
        """
        while self.opened:
            self._fill(PREFETCH_DEPTH)
            batch = self._queue.popleft()
            self._act_on(batch)
            if all(header.status == Status.END for header in batch.headers):
                self.opened = False
            else:
                step(self._repeat_last(batch))

    # ---- resume ----------------------------------------------------------------------------------------------------
    def _resumable(self) -> Any:
        """The sampler or the dataset of the loader, if it can skip batches without loading them (``resume``)."""
        for owner in (getattr(self.loader, "sampler", None), getattr(self.loader, "dataset", None)):
            if owner is not None and hasattr(owner, "resume"):
                return owner
        return None

    def _open(self) -> Iterator[Any]:
        """An iterator over the loader after the batches that were trained before a resume."""
        done, state = self._first_index, self._loader_state_to_load
        self._loader_state_to_load, self.opened = None, True
        if done and state is not None and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(state)
            return iter(self.loader)
        source = iter(self.loader)
        if self._resumable() is None:
            for _ in range(done):  # This loader cannot skip batches. It loads and drops them.
                next(source, None)
        return source

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch. A collective if the user's loader has a state of its own, which all ranks save.

        Lightning saves the result of rank 0 alone, so it is equal on all ranks.
        """
        current, done, own = self.current, self._first_index, self._loader_state_to_load
        processed = current is not None and self.is_processed()
        if current is not None:
            done = current.index + processed
            own = current.loader_state if processed else self._state_before
        inner = self.control.gather(own) if hasattr(self.loader, "state_dict") else None
        if current is not None and processed and current.is_last():
            return {"batches": 0, "position": None, "inner": None}  # The next batch is the first of the next epoch.
        owner = self._resumable()
        position = owner.position(done) if hasattr(owner, "position") else None
        known = inner is not None and None not in inner
        return {"batches": done, "position": position, "inner": inner if known else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first_index, self.opened = state["batches"], False
        self._loader_state_to_load = self._own_loader_state(state["inner"])
        if not self._first_index:
            return
        owner = self._resumable()
        if owner is not None and state["position"] is not None:
            self._first_index = owner.resume(state["batches"], state["position"])
            self.shift = self._first_index - state["batches"]
        elif owner is not None:
            owner.resume(self._first_index)

    def _own_loader_state(self, states: list[dict] | None) -> dict | None:
        """The state of this rank's loader, if the checkpoint was written on as many ranks."""
        if states is None or len(states) == self.control.world_size:
            return None if states is None else states[self.control.rank]
        log_once(
            f"the checkpoint holds the positions of {len(states)} loaders, but {self.control.world_size} ranks train: "
            "each rank skips the batches done so far instead of restoring its loader's own state"
        )
        return None
