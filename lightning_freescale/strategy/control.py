"""Agreement between the ranks: a small header for every batch, and collectives that raise one error on all ranks.

The ranks must agree before they act. Does every rank still have data? Is every batch sound? Did a rank receive SIGTERM
or meet a loss that is not finite? A blocking collective in every step would wait for the slowest rank each time.
Instead, each rank sends its :class:`Header` when it *fetches* a batch and reads the headers of all ranks when it *uses*
that batch, some steps later. The headers have arrived by then, and all ranks act on them at the same step.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightning_freescale.runtime import errors
from lightning_freescale.runtime.errors import FreeScaleError
from lightning_freescale.runtime.object_gather import gather_objects
from lightning_freescale.runtime.process_groups import (
    are_complete,
    is_connection_error,
    leave,
    new_gloo_group,
)
from lightning_freescale.runtime.store_connection import StoreConnection
from lightning_freescale.runtime.streams import Readback
from lightning_freescale.strategy.end_reports import REPORT_SECONDS, EndReports, first_line
from lightning_freescale.strategy.failure_watch import STORE_IS_LOST, FailureWatch, publish_within_limit
from lightning_freescale.strategy.headers import Header, PendingHeaders, Status
from lightning_freescale.strategy.questions import Questions

# The host runs at most this many steps ahead of the device. It keeps the device busy and the memory of no more batches.
MAX_STEPS_AHEAD = 2
Ints = NDArray[np.int64]
_run_numbers = itertools.count(1)  # What a run leaves in the store is never found by a later one.


class Request(IntEnum):
    """What one rank asks all ranks to do at the next batch."""

    NONE = 0
    REQUEUE = 1  # SLURM's requeue signal: save a checkpoint and requeue the job.
    STOP = 2  # SIGTERM: stop the training.


class Control:
    """The control plane of the ranks. It has gloo groups of its own, so that it never queues behind training traffic.

    Headers and agreements have one group each, because a rank that fails never sends the headers that the other ranks
    wait for, but it still takes part in the agreement on the error.

    :meth:`close` leaves the groups. The next collective opens them again.

    Args:
        timeout: a wait for another rank that takes longer is an error.
        device: the device of this rank. On CUDA, waits of the device for a failed rank are ended.
        shares_watch: a control plane of the same rank, whose knowledge of failures this one uses.
    """

    def __init__(self, timeout: timedelta, device: torch.device | None = None, shares_watch: Control | None = None):
        self.timeout, self._device, self._shares_watch = timeout, device, shares_watch
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group: Any = None
        self._header_group: Any = None
        self._in_transit: deque[Any] = deque()  # Exchanges of headers that may not be complete.
        self._sent = 0
        self.num_numbers = (
            0  # Numbers besides the header that each rank tells each other one about a batch. Equal on all ranks.
        )
        self.stop, self.requeues = False, 0  # What this rank has received. Signal handlers set them.
        self._requeues_done = 0
        self._losses: deque[tuple[int, Readback]] = deque()
        self.diverged = False  # Whether a loss was not finite. The weights are invalid then.
        self._bad_loss: tuple[int, float] | None = None  # step, value
        self._run = 0  # The number of the run in this process. All ranks count the same.
        self._new_store_users()
        self._watch: FailureWatch | None = None
        self._closed_watch: FailureWatch | None = None  # It explains errors that come after the end of a run.
        self._lacks_a_report = False  # Whether this rank has waited in vain for the report of another one.
        self.failure: str | None = None  # Why waits of the device were ended. The weights are invalid then, for good.

    def __deepcopy__(self, memo: dict[int, Any]) -> Control:
        """This object itself. Process groups cannot be copied, but users copy callbacks, which may refer to the Trainer."""
        return self

    # ---- process groups --------------------------------------------------------------------------------------------
    @property
    def group(self) -> Any:
        """The group of agreements. Opening it is a collective."""
        if self._group is None:
            self._group = new_gloo_group(self.timeout)
        return self._group

    @group.setter
    def group(self, group: Any) -> None:
        self._group = group

    @property
    def header_group(self) -> Any:
        """The group of headers. Opening it is a collective."""
        if self._header_group is None:
            self._header_group = new_gloo_group(self.timeout)
        return self._header_group

    def open(self) -> None:
        """Open both groups, and watch for failures of other ranks. A collective."""
        self.check_ranks("the other ranks")
        self._lacks_a_report = False
        if self._watch is None and self.world_size > 1:
            self._run = next(_run_numbers)
            self._new_store_users().open()
            key, seconds = f"freescale/{self._run}/explanation", self.timeout.total_seconds()
            self._watch = FailureWatch(key, self.rank, seconds, self._device)
        _ = self.group, self.header_group  # Each property opens its group.

    def _new_store_users(self) -> StoreConnection:
        """Make what talks through the rendezvous store in this run. Returns its connection, which is not open yet."""
        connection, ranks = StoreConnection(), (self.rank, self.world_size, self.timeout.total_seconds())
        self._reports = EndReports(self._run, *ranks, connection)
        self._questions = Questions(f"freescale/{self._run}/asked", *ranks, connection)
        return connection

    def in_transit(self, transfer: Any) -> None:
        """Note a transfer of headers that was just started."""
        while self._in_transit and self._in_transit[0].is_completed():
            self._in_transit.popleft()
        self._in_transit.append(transfer)

    def close(self) -> None:
        """Leave the groups. Another rank may never have sent the headers that this one waits for; then they stay open."""
        if are_complete(self._in_transit, REPORT_SECONDS):
            leave(self._group)
            leave(self._header_group)
        if self._watch is not None:
            self._watch.close(abort=self.misses_a_rank)
            if self._watch.aborted and self.failure is None:
                self.failure = self._watch.explanation or "a rank is missing"
            self._watch, self._closed_watch = None, self._watch
        self._in_transit.clear()
        self._group = self._header_group = None
        self.stop, self.requeues, self._requeues_done = False, 0, 0

    # ---- headers ---------------------------------------------------------------------------------------------------
    def send_header(self, status: Status, weight: int = 0, numbers: Ints | None = None) -> PendingHeaders:
        """Tell the other ranks about the batch that was just fetched. Returns at once.

        Args:
            status: what became of the fetch.
            weight: number of samples or tokens of the batch.
            numbers: ``[ranks, num_numbers]`` what to tell each rank besides; without it the numbers are -1.
        """
        self._read_losses(keep=MAX_STEPS_AHEAD)
        self._sent += 1
        bad_step = self._bad_loss[0] if self._bad_loss else -1
        header = Header(status, weight, self.stop, self.requeues, bad_step)
        if numbers is None:
            numbers = np.full((self.world_size, self.num_numbers), -1)
        return PendingHeaders(self, header, numbers, self._sent)

    # ---- losses ----------------------------------------------------------------------------------------------------
    def watch_loss(self, step: int, loss: Tensor) -> None:
        """Check the loss of ``step`` later. Waits if the device is more than ``MAX_STEPS_AHEAD`` steps behind."""
        self._losses.append((step, Readback(loss)))
        self._read_losses(keep=MAX_STEPS_AHEAD)

    def _read_losses(self, keep: int) -> None:
        """Check the losses that have arrived on the host, and wait for all but the last ``keep``."""
        while self._losses and (len(self._losses) > keep or self._losses[0][1].arrived()):
            step, loss = self._losses.popleft()
            value = loss.wait().sum().item()
            self.check_ranks(f"the loss of step {step}")
            if self._bad_loss is None and not math.isfinite(value):
                self._bad_loss = (step, value)

    def check_losses(self) -> None:
        """Raise on every rank if any rank has met a loss that is not finite. A collective."""
        self._read_losses(keep=0)
        bad, self._bad_loss = self._bad_loss, None
        try:
            self.agree(None if bad is None else _divergence(*bad))
        except FreeScaleError:
            self.diverged = True
            raise

    def losses_so_far(self) -> Callable[[], FreeScaleError | None]:
        """A function that waits for the losses of all steps up to now, and returns the error if one is not finite.

        Any thread may call it. The training goes on meanwhile, and checks the same losses itself.
        """
        known, pending = self._bad_loss, list(self._losses)

        def error() -> FreeScaleError | None:
            found = ((step, loss.wait().sum().item()) for step, loss in pending)
            bad = known or next(((step, value) for step, value in found if not math.isfinite(value)), None)
            return None if bad is None else _divergence(*bad)

        return error

    # ---- agreement -------------------------------------------------------------------------------------------------
    def agree(self, error: BaseException | None, where: str = "") -> None:
        """Raise on every rank if ``error`` is given on any rank. The message names the ranks. A collective."""
        own = None if error is None else (type(error).__name__, str(error))
        found = [(rank, *failure) for rank, failure in enumerate(self.gather(own)) if failure is not None]
        if not found:
            return
        # PeerFailed only repeats the failure of another rank.
        found = [failure for failure in found if failure[1] != "PeerFailed"] or found
        kind = getattr(errors, found[0][1], FreeScaleError)
        prefix = f"{where}: " if where else ""
        # Ranks with the same failure share one line. The text of a foreign exception starts with its type.
        texts: dict[str, list[int]] = {}
        for rank, name, text in found:
            texts.setdefault(text if hasattr(errors, name) else f"{name}: {text}", []).append(rank)
        raise kind(
            "\n".join(f"rank {', '.join(map(str, ranks))}: {prefix}{text}" for text, ranks in texts.items())
        ) from error

    def agree_on_request(self) -> Request:
        """What the signals that any rank has received ask for. A collective."""
        stops, requeues = zip(*self.gather((self.stop, self.requeues)), strict=True)
        return self.requested(any(stops), max(requeues))

    def requested(self, stop: bool, requeues: int) -> Request:
        """What all ranks must do now. All ranks call it with the same arguments, in the same order.

        SLURM sends its signal to every rank, and a rank repeats it in the headers of several batches. The count tells a
        repetition from another signal. With one rank, a signal counts at once: there is nobody to agree with.

        Args:
            stop: whether any rank has received SIGTERM.
            requeues: the largest number of requeue signals that any rank has received.
        """
        if self.world_size == 1:
            stop, requeues = self.stop, self.requeues
        if stop:
            return Request.STOP
        new = requeues > self._requeues_done
        self._requeues_done = max(self._requeues_done, requeues)
        return Request.REQUEUE if new else Request.NONE

    def gather(self, value: Any, group: Any = None, what: str = "a gather") -> list[Any]:
        """``value`` of every rank, in rank order. A collective of ``group``, by default the group of agreements.

        Args:
            what: the name of the gather in errors.
        """
        if self.world_size == 1:
            return [value]
        self.check_ranks(what)
        try:
            found = gather_objects((what, value), group or self.group)
        except RuntimeError as error:
            raise self.missing_ranks(what, error) from error
        for rank, (other, _) in enumerate(found):
            if other != what:
                raise FreeScaleError(
                    f"rank {self.rank} is at {what}, and rank {rank} is at {other}. All ranks must come to both in the same order"
                )
        return [given for _, given in found]

    def ask(self, question: str) -> list[int]:
        """The ranks that do not ask the same question within a limit, which is shorter than that of a collective.

        It is no collective: a rank may find that it must not take part in what the others do next.
        """
        if self.world_size == 1:
            return []
        missing = self._questions.ask(question)
        self.check_ranks(question)  # A rank that has failed asks nothing.
        return missing

    # ---- failures of other ranks -----------------------------------------------------------------------------------
    @property
    def misses_a_rank(self) -> bool:
        """Whether a rank is known to be stuck or dead. No rank need wait for it once more."""
        return (
            self._lacks_a_report or self.failure is not None or (self._watch is not None and self._watch.misses_a_rank)
        )

    def explanation(self, seconds: float) -> str | None:
        """Why a rank has failed. Waits up to ``seconds`` for the news, because this rank is about to end with an exception."""
        watch = self._watch or self._closed_watch
        if self.failure is None and watch is not None:
            watch.leaving = True
            return watch.wait_for_explanation(seconds)
        return self.failure

    def check_ranks(self, what: str) -> None:
        """Raise if waits of the device were ended, because a rank has failed. All that followed them is invalid.

        Every way on from a wait leads through here. It also notes that the training goes on.

        Args:
            what: what this rank waits for, or has waited for.
        """
        first = self._shares_watch or self
        watch = first._watch
        if watch is not None:
            watch.progress += 1
            if watch.aborted and first.failure is None:
                reports = first.exchange_reports(FreeScaleError(f"it waited in vain: {watch.explanation}"), waited=True)
                first.failure = f"{watch.explanation}; {reports}"
        if first.failure is not None:
            raise FreeScaleError(f"rank {self.rank}: waited for {what}; {first.failure}")

    def report_exception(self, exception: BaseException) -> str | None:
        """Tell the other ranks that this one ends with ``exception``, which no other rank need have raised.

        Returns the reports of the other ranks; ``None`` if the exception names the rank already, or the user has no time.
        """
        watch, is_stop = self._watch, isinstance(exception, SystemExit)  # SIGTERM stops all ranks at the same batch.
        if watch is not None:
            watch.leaving = True
            if not is_stop and not is_connection_error(exception):  # Such an error is a consequence of another failure.
                publish_within_limit(watch, f"rank {self.rank} ended with {first_line(exception)}")
        if isinstance(exception, (FreeScaleError, KeyboardInterrupt)):  # Our own errors name the rank.
            if not self._reports.posted and isinstance(exception, FreeScaleError):
                with suppress(Exception):  # The store has ended. Nobody can read the report then.
                    self._reports.post(exception)
            return None
        return self.exchange_reports(exception, not is_stop, waited=is_connection_error(exception))

    def missing_ranks(self, what: str, error: Exception) -> FreeScaleError:
        """The error to raise if ``what`` did not arrive from all ranks. It says what happened to the other ranks."""
        return FreeScaleError(
            f"rank {self.rank}: waited for {what}; {self.exchange_reports(error, waited=True)} ({error})"
        )

    def exchange_reports(self, error: BaseException, publish: bool = True, waited: bool = False) -> str:
        """Report why this rank ends, and return the reports of the other ranks. The first failure explains the others.

        Args:
            error: why this rank ends.
            publish: whether ranks that still wait are told.
            waited: whether this rank ends because it has waited for another one. Then the reports also say where the ranks were.
        """
        watch = self._watch
        reports = (self._shares_watch or self)._reports
        try:
            store = reports.post(error, waited)
        except Exception:
            known = watch.explanation if watch is not None else None
            before = "" if known is None else f", after the report that {known}"
            return f"{STORE_IS_LOST}{before}"
        explanation, lacks_one = reports.of_others(store, lambda rank: watch is not None and watch.has_died(rank))
        self._lacks_a_report |= lacks_one
        if watch is not None and publish:
            publish_within_limit(watch, explanation)
        return explanation

    def enter(self, place: str) -> None:
        """Note where this rank is in the training, for the case that the ranks wait for each other in vain.

        Args:
            place: for example "in epoch 3".
        """
        (self._shares_watch or self)._reports.place = place

    def leave_last(self) -> None:
        """Let the other ranks read what is in the rendezvous store. All ranks call it when they end with an exception."""
        self._reports.leave_last()


def _divergence(step: int, value: float) -> FreeScaleError:
    return FreeScaleError(
        f"loss is {value} at step {step}. The weights are invalid from that step on. Checkpoints written "
        "before it are valid. Resume from the last one with a lower learning rate, or inspect that batch."
    )
