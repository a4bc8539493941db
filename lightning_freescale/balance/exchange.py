"""Balancing at run time: samples move between ranks, in the background, a batch or two before they are trained on.

For streams and for loaders of any kind, whose lengths nobody knows beforehand. For every batch the ranks, on the host and
over a process group of their own, (1) say whether they have one, (2) gather history lengths and candidate counts, (3)
compute the same plan, and (4) send each sample to its rank, all of its parts in one AllToAll of bytes. Where batches are even
already, they soon look at few of them (``rest.py``), and the training loads the others itself, as it would without balancing.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_freescale.balance.pack import (
    CannotBalance,
    Layout,
    Owner,
    Samples,
    agree,
    check_layout,
    pack,
    packed_sizes,
    put_together,
    sample_sizes,
    take_apart,
)
from lightning_freescale.balance.planner import Planner
from lightning_freescale.balance.rest import Rest
from lightning_freescale.runtime.errors import FreeScaleError, InputError
from lightning_freescale.runtime.log import log_once

Sizes = Callable[[Any], tuple[NDArray[np.int64], NDArray[np.int64]]]
DEPTH = 2  # batches made ready beyond the one in use
CLOSE_SECONDS = 2.0  # how long to wait for the other ranks when an iteration is given up


class PeerFailed(FreeScaleError):
    """Another rank could not load its part of this batch; that rank says why."""


class Word(IntEnum):
    """What a rank says of its next batch, before anything of it moves."""

    BATCH = 0
    END = 1  # its data are at their end
    ERROR = 2  # it could not be loaded
    CLOSED = 3  # nobody asks for it any more
    PLAIN = 4  # a sound batch, but its samples cannot be told apart


@dataclass
class ExchangeStats:
    """Sums over the batches handed out.

    Attributes:
        batches: their number.
        waited: seconds the training waited for a batch, whatever the reason.
        exposed: seconds of it that the exchange accounts for: its time on the critical path.
        exchanging: seconds the exchange took, hidden or not.
        bytes_sent: to other ranks.
        looked_at: batches whose lengths the ranks have compared.
    """

    batches: int = 0
    looked_at: int = 0
    waited: float = 0.0
    exposed: float = 0.0
    exchanging: float = 0.0
    bytes_sent: int = 0


class ExchangeLoader:
    """Iterates ``loader`` with the samples of every global batch dealt to the ranks by cost.

    The samples of a step are those of all ranks' local batches, as without it; a new local batch holds its samples by
    source rank, then by their place there. Its type is that of the old ones, see :mod:`~.pack`.

    If a rank has no batch where others have one, all learn it before anything moves: the exception of a rank that failed
    is raised there when its batch is due, and :class:`PeerFailed` on the others. If the samples of some batch cannot be
    told apart, all ranks train that batch and those after it where they were loaded, and say why.

    Args:
        loader: any iterable of local batches on the host, of the same length on every rank; its attributes stay visible. Two
            threads ask it for batches, this one's and the training's, never at the same time.
        group: a gloo process group that nobody else uses.
        planner: how to balance. A new one may be set at any time; it counts as soon as all ranks have it.
        check: raises if a local batch cannot be trained on; called where it was loaded, before its samples may move. Batches
            that nobody looks at are left to the caller, see :attr:`checked`.
        sizes: history lengths and candidate counts of a batch's samples.
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
        sizes: Sizes = sample_sizes,
        pin_memory: bool = False,
    ):
        self.loader, self.group = loader, group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.check, self.sizes, self.pin_memory = check, sizes, pin_memory
        self.planners = [planner]  # all there have been: ranks may get a new one at different batches
        self.stats = ExchangeStats()
        self.checked = False  # whether the batch handed out last has passed ``check``
        self.unbalanced: str | None = None  # why batches are trained where they are loaded, if they are
        self.even = 0  # batches in a row that were even, at the end of an epoch: the same on all ranks
        self._run: _Run | None = None
        self._state: dict | None = None

    @property
    def planner(self) -> Planner:
        return self.planners[-1]

    @planner.setter
    def planner(self, planner: Planner) -> None:
        self.planners.append(planner)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: unpickling
            raise AttributeError(name)
        value = getattr(self.loader, name)
        # The loader's own position is some batches ahead of the training.
        return self._state_dict if name == "state_dict" else value

    def _state_dict(self) -> dict | None:
        return self._state

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # TypeError when unsized, which is what Lightning probes for

    def __iter__(self) -> Iterator[Any]:
        # A generator: nothing is fetched before the first next(), after set_epoch() and load_state_dict().
        self.leave()
        run = self._run = _Run(self, iter(self.loader))
        try:
            while True:
                asked = time.perf_counter()
                made = run.take()
                waited = time.perf_counter() - asked
                if isinstance(made, BaseException):
                    raise made
                if made is None:
                    return
                self.stats.batches += 1
                self.stats.waited += waited
                self.stats.exposed += min(waited, made.seconds)
                self.stats.exchanging += made.seconds
                self.stats.bytes_sent += made.bytes_sent
                self.stats.looked_at += made.looked_at
                self.checked = made.looked_at and self.check is not None
                self._state = made.state
                yield made.batch
        finally:
            run.close()

    def close(self) -> None:
        """Give up the iteration under way. The thread ends as soon as the other ranks know, too."""
        if self._run is not None:
            self._run.close()

    def leave(self) -> dist.ProcessGroup:
        """Close, and wait until all ranks have: then another loader may have the process group. A collective."""
        self.close()
        if self._run is not None:
            self._run.finish()
        return self.group


class _Loaded(NamedTuple):
    """A local batch, or why there is none."""

    word: Word
    batch: Any = None
    state: dict | None = None  # the loader's own, after this batch
    samples: Samples | None = None
    sizes: NDArray[np.int64] | None = None  # [n, 2] history lengths and candidate counts
    error: Exception | None = None


class _Made(NamedTuple):
    """A batch to hand out, and what balancing it took."""

    batch: Any
    state: dict | None
    seconds: float = 0.0
    bytes_sent: int = 0
    looked_at: bool = False


class _Leave(NamedTuple):
    """In the place of so many batches that nobody looks at."""

    batches: float


class _Run:
    """One iteration: the thread that makes batches, and the queue they wait in."""

    def __init__(self, owner: ExchangeLoader, source: Iterator[Any]):
        self._owner, self._source = owner, source
        self._room = threading.Semaphore(DEPTH)
        self._ready: queue.SimpleQueue[_Made | _Leave | BaseException | None] = queue.SimpleQueue()
        self._left = 0.0  # batches that the training thread loads, before it asks for the next one that was made
        self._back: queue.SimpleQueue[_Loaded | None] = queue.SimpleQueue()  # what ended that; None: their number
        self._closed = threading.Event()
        self._agreed: tuple[Layout, list[Owner]] | None = None
        self._plain = False
        self._rest = Rest(owner.even)
        owner.even = 0  # an iteration that is given up leaves the ranks at different batches
        self._number = 0  # of the batch
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="freescale-exchange", daemon=True)
        self._thread.start()

    # ---- in the training thread ------------------------------------------------------------------------------------
    def take(self) -> _Made | BaseException | None:
        """The next batch, what went wrong with it, or ``None`` at the end."""
        if not self._left:
            made = self._ready.get()
            if not isinstance(made, _Leave):
                self._room.release()
                return made
            self._left = made.batches
        loaded = self._load(look=False)
        sound = loaded.word is Word.BATCH
        self._left = self._left - 1 if sound else 0.0
        self._number += sound
        if not self._left:
            self._back.put(None if sound else loaded)
        return _Made(loaded.batch, loaded.state) if sound else loaded.error

    def close(self) -> None:
        if self._thread.is_alive():
            self._closed.set()
            self._back.put(_Loaded(Word.CLOSED))
            self._room.release()
            self._thread.join(CLOSE_SECONDS)

    def finish(self) -> None:
        """Wait until the other ranks have given up this iteration, too: the next one uses the same process group."""
        self._thread.join()
        if self._broken is not None:
            raise FreeScaleError("the exchange of samples failed before; ranks are no longer in step") from self._broken

    # ---- in the background -----------------------------------------------------------------------------------------
    def _work(self) -> None:
        try:
            while self._advance():
                pass
        except Exception as error:
            self._broken = error
            if not isinstance(error, FreeScaleError):
                self._broken = FreeScaleError(
                    f"rank {self._owner.rank}: the exchange of samples for batch {self._number} failed: {error}"
                )
                self._broken.__cause__ = error
            self._ready.put(self._broken)

    def _advance(self) -> bool:
        """Make one batch, after those that nobody looks at; whether there may be more."""
        failed = self._wait(math.inf if self._plain else self._rest.pause())
        if self._plain:
            return False
        self._room.acquire()
        loaded = failed or self._load(look=True)  # of one that failed, ranks that are at their next look hear below
        start = time.perf_counter()
        count = 0 if loaded.samples is None else loaded.samples.num_samples
        mine = np.array([loaded.word, count, len(self._owner.planners)])
        words, counts, planners = self._gather(mine).T
        if not np.isin(words, (Word.BATCH, Word.PLAIN)).all():
            if failed is None:
                self._ready.put(loaded.error or self._refusal(loaded.word, words))
            if (words == Word.END).all():
                self._owner.even = self._rest.even
            return False
        try:
            if (plain := np.flatnonzero(words == Word.PLAIN)).size:
                raise loaded.error or CannotBalance(f"samples cannot be told apart on rank {_names(plain)}")
            planner = self._owner.planners[planners.min() - 1]  # the latest that all ranks have
            batch, sent = self._exchange(loaded, counts, planner)
        except CannotBalance as reason:  # on all ranks at this batch, of which nothing has moved
            self._plain, self._owner.unbalanced = True, str(reason)
            log_once(f"balance: batches are trained where they are loaded, for their samples cannot move: {reason}")
            batch, sent = loaded.batch, 0
        moved = batch is not loaded.batch
        self._rest.note(moved)
        seconds = time.perf_counter() - start
        self._ready.put(_Made(batch if moved else self._pinned(batch), loaded.state, seconds, sent, looked_at=True))
        self._number += 1
        return True

    def _pinned(self, batch: Any) -> Any:
        return pin_memory(batch) if self._owner.pin_memory else batch

    def _wait(self, batches: float) -> _Loaded | None:
        """Leave so many to the training thread; what became of the one that could not be loaded, if there was one."""
        if not batches:
            return None
        self._ready.put(_Leave(batches))
        return self._back.get()

    def _load(self, look: bool) -> _Loaded:
        """The next local batch, taken apart for a look. All that can go wrong on this rank alone goes wrong here."""
        owner = self._owner
        if self._closed.is_set():
            return _Loaded(Word.CLOSED)
        try:
            batch = next(self._source)
            state = owner.loader.state_dict() if hasattr(owner.loader, "state_dict") else None
            if look and owner.check is not None:
                owner.check(batch)
        except StopIteration:
            return _Loaded(Word.END)
        except Exception as error:  # raised where and when the batch is due
            return _Loaded(Word.ERROR, error=error)
        if self._closed.is_set():
            return _Loaded(Word.CLOSED)
        if not look:
            return _Loaded(Word.BATCH, batch, state)
        try:
            samples = take_apart(batch)
            if self._agreed is not None:
                check_layout(samples, *self._agreed)
            sizes = np.stack(owner.sizes(batch), axis=1).astype(np.int64)
            if len(sizes) != samples.num_samples:
                raise CannotBalance(f"{len(sizes)} lengths for {samples.num_samples} samples")
        except CannotBalance as reason:
            return _Loaded(Word.PLAIN, batch, state, error=reason)
        except Exception as error:
            return _Loaded(Word.ERROR, error=error)
        return _Loaded(Word.BATCH, batch, state, samples, sizes)

    def _refusal(self, own: Word, words: NDArray[np.int64]) -> BaseException | None:
        """What this rank makes of a batch that not all ranks have."""
        if own in (Word.END, Word.CLOSED):
            return None
        if (failed := np.flatnonzero(words == Word.ERROR)).size:
            return PeerFailed(f"batch {self._number}: not loaded on rank {_names(failed)}")
        ended = np.flatnonzero((words == Word.END) | (words == Word.CLOSED))
        return InputError(
            f"the loader ended after {self._number} batches on rank {_names(ended)}, while rank {self._owner.rank} has more; "
            "every rank needs the same number of batches: pad or drop the last ones"
        )

    def _exchange(self, loaded: _Loaded, counts: NDArray[np.int64], planner: Planner) -> tuple[Any, int]:
        """Deal the samples of all ranks, ``counts [world]`` of them: the new batch, or the old if none moves, and bytes sent.

        A collective.
        """
        samples, sizes = loaded.samples, loaded.sizes
        assert samples is not None
        assert sizes is not None
        rank, world = self._owner.rank, self._owner.world_size
        if self._agreed is None:
            layouts: list[Any] = [None] * world
            dist.all_gather_object(layouts, samples.layout, group=self._owner.group)
            self._agreed = layouts[0], agree(layouts)
        _, owners = self._agreed

        padded = np.zeros((counts.max(), 2), dtype=np.int64)
        padded[: len(sizes)] = sizes
        sizes = np.concatenate([own[:count] for own, count in zip(self._gather(padded), counts, strict=True)])
        home = np.repeat(np.arange(world), counts)
        dealt = planner.from_home(home, *sizes.T, world=world)
        if dealt is home:
            return loaded.batch, 0
        plan = np.split(dealt, np.cumsum(counts)[:-1])  # by source rank

        order = np.argsort(plan[rank], kind="stable")
        sent = np.bincount(plan[rank], minlength=world)
        received = np.array([(destinations == rank).sum() for destinations in plan])
        columns = samples.lengths.shape[1]
        lengths = self._all_to_all(samples.lengths[order].ravel(), sent * columns, received * columns)
        lengths = lengths.reshape(-1, columns)

        packed, packed_bytes = pack(samples, owners, order)
        bytes_sent = _sum_runs(packed_bytes, sent)
        bytes_received = _sum_runs(packed_sizes(samples, owners, lengths).sum(axis=1), received)
        packed = self._all_to_all(packed, bytes_sent, bytes_received)
        batch = put_together(samples, owners, lengths, packed, self._owner.pin_memory)
        moved = int(bytes_sent.sum() - bytes_sent[rank]) + 8 * columns * int(sent.sum() - sent[rank])
        return batch, moved

    def _gather(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """``[world, ...]`` from ``[...]`` of every rank."""
        mine = torch.from_numpy(values)
        received = [torch.empty_like(mine) for _ in range(self._owner.world_size)]
        dist.all_gather(received, mine, group=self._owner.group)
        return torch.stack(received).numpy()

    def _all_to_all(self, values: NDArray, sent: NDArray[np.int64], received: NDArray[np.int64]) -> NDArray:
        """``values``, ``sent [world]`` of them for each rank, to those ``received [world]`` from each rank."""
        out = torch.empty(int(received.sum()), dtype=torch.from_numpy(values).dtype)
        dist.all_to_all_single(out, torch.from_numpy(values), received.tolist(), sent.tolist(), group=self._owner.group)
        return out.numpy()


def _names(ranks: NDArray[np.int64]) -> str:
    return ", ".join(map(str, ranks))


def _sum_runs(values: NDArray[np.int64], runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum of the first ``runs[0]`` values, of the next ``runs[1]``, and so on."""
    totals = np.concatenate([[0], np.cumsum(values)])
    return np.diff(totals[np.concatenate([[0], np.cumsum(runs)])])
