"""``BubbleMonitor``: a callback that shows, while the model trains, how much of each rank is idle and why.

It marks the spans of a step through Lightning's hooks and the probes, has all ranks' accounts gathered once per logging
interval, and hands the result to the loggers, the progress bar and the run folder.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.throughput import get_available_flops
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.balance.cost import CostModel
from lightning_freescale.batch.contents import find_parts
from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES
from lightning_freescale.bubbles import picture
from lightning_freescale.bubbles.attribution import Bubbles, attribute
from lightning_freescale.bubbles.clock import clock_offset
from lightning_freescale.bubbles.gather import Gathering
from lightning_freescale.bubbles.probes import AllReduceProbe, ExchangeProbe
from lightning_freescale.bubbles.records import RecordWriter, rank_file, to_record
from lightning_freescale.bubbles.summary import Summary
from lightning_freescale.bubbles.timeline import ENGINE, Kind, Moment, Span, Step, Timeline
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once

if TYPE_CHECKING:  # the mixin stands on Callback of either Lightning namespace
    _Base = pl.Callback
else:
    _Base = object

OVERHEAD = 0.005  # of the training time; fewer steps are recorded if it takes that to stay below
# After the first interval one step in ten at most: on an H200 recorded steps took up to 7 % longer, more than the monitor's own
# account of what it does, for it does not see what the compute loses to its events.
SPARSE = 10
LAG = 2  # steps after which the device has surely got there: reading its events then waits for nothing
KEEP_ALL = 1000  # steps kept in the run folder; of later ones, the slowest and a typical one of each interval


class BubbleMonitorMixin(_Base):
    """Measures the bubbles of training and logs them, at the steps at which Lightning logs.

    Tags, shares of the ranks' time unless they say otherwise: ``bubble/total`` and its parts ``bubble/straggler``,
    ``bubble/exposed_embedding``, ``bubble/exposed_dense``, ``bubble/input_wait``, ``bubble/other``; ``balance/imbalance``
    (largest over mean compute time of the ranks), ``balance/sparsity``, ``embedding/collision_rate``,
    ``embedding/prioritized`` (0 or 1), ``comm/overlap``,
    ``throughput/samples_per_s``, ``throughput/tokens_per_s``, ``step/time_ms``; see ``summary.py`` for a few more.
    Recorded steps are kept in ``<log_dir>/freescale`` for ``freescale report``.

    Args:
        every: record every so many steps. By default all of the first logging interval, then one in ten, or fewer if that
            would cost more than 0.5% of the training time.
        image_every: steps between two pictures of the timeline in TensorBoard; 0 for none.
        cost: cost of each sample from history lengths ``[B]`` and candidates ``[B]``; by default by the model's
            ``cost_coefficients()`` if it has any, else the number of events.
    """

    def __init__(
        self,
        every: int | None = None,
        image_every: int = 1000,
        cost: Callable[[NDArray, NDArray], NDArray] | None = None,
    ):
        super().__init__()
        if every is not None and every < 1:
            raise ConfigurationError(f"every: must be at least 1, not {every}")
        self.timeline = Timeline()
        self._every, self._adapt = every or 1, every is None
        self._wanted = self._every  # from the next interval on: all ranks change at the same step
        self._image_every, self._cost = image_every, cost
        self._running = False
        self._exchange: ExchangeProbe | None = None
        self._allreduce: AllReduceProbe | None = None
        self._optimizer_hooks: list[Any] = []
        self._writer: RecordWriter | None = None

    # ---- start and end ---------------------------------------------------------------------------------------------
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.timeline = getattr(trainer.strategy, "timeline", None) or self.timeline

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy, timeline = trainer.strategy, self.timeline
        timeline.open(strategy.root_device)
        _name_streams(strategy, timeline)
        self._rank, self._world = trainer.global_rank, trainer.world_size
        options = {"timeout": strategy._timeout} if getattr(strategy, "_timeout", None) else {}
        self._group = dist.new_group(backend="gloo", **options) if self._world > 1 else None
        self._offset = clock_offset(self._group, timeline.clock) if self._group is not None else 0.0
        self._exchange = ExchangeProbe(pl_module, timeline)
        self._allreduce = AllReduceProbe(strategy.model, timeline)
        self._optimizer_hooks = [
            optimizer.register_step_post_hook(lambda *_: self._end(Kind.OPTIMIZER)) for optimizer in strategy.optimizers
        ]
        self._flops = hasattr(pl_module, "cost_coefficients")
        self._cost_model = self._cost or (CostModel(*pl_module.cost_coefficients()) if self._flops else CostModel())
        self._summary = Summary(self._flops, self._peak_flops(trainer) if self._flops else None)
        if not trainer.fast_dev_run:  # which leaves nothing behind
            self._writer = RecordWriter(rank_file(Path(trainer.log_dir or "."), self._rank), self._header(trainer))
        self._kept = 0
        self._interval = max(1, trainer.log_every_n_steps)
        self._next = -1  # index of the step that is under way; unknown before the first has ended
        self._open_steps, self._recorded_last = 0, False  # recorded in this interval; whether the last step was
        self._closed: deque[int] = deque()  # last steps of intervals to be posted
        self._posted: deque[Gathering] = deque()
        self._began: dict[Kind, Moment] = {}
        self._hidden: dict[int, float] = {}  # AllReduce behind backward: seconds by step
        self._next_picture = 0
        self._collisions_of = -1  # interval whose collisions are counted
        self._loggers_with_images = self._warm_up(trainer)
        # Our own cost in seconds: of each of the last recorded steps, of noting a batch, of posting an interval, of a span.
        self._spent: deque[float] = deque(maxlen=100)
        self._noting, self._posting, self._span_cost = 0.0, 0.0, _span_cost(strategy.root_device)
        self._running = True

    def _warm_up(self, trainer: Any) -> list[Any]:
        """Open what is slow to open now rather than in a step. Returns the loggers that take pictures."""
        if self._rank or not self._image_every:
            return []
        loggers = [logger for logger in trainer.loggers if hasattr(getattr(logger, "experiment", None), "add_image")]
        if loggers and not picture.available():
            log_once("no pictures of the timeline in TensorBoard: they need Pillow (pip install pillow)")
            return []
        return loggers

    def _peak_flops(self, trainer: Any) -> float | None:
        device = trainer.strategy.root_device
        if device.type != "cuda":
            return None
        return get_available_flops(device, torch.bfloat16 if "bf16" in str(trainer.precision) else torch.float32)

    def _header(self, trainer: Any) -> dict[str, Any]:
        strategy = trainer.strategy
        settings = {name: getattr(strategy, f"_{name}", None) for name in ("balance", "prioritize", "transport")}
        plain = {
            name: value if isinstance(value, bool) else str(value)
            for name, value in settings.items()
            if value is not None
        }
        device = strategy.root_device
        return {
            "rank": self._rank,
            "world": self._world,
            "strategy": type(strategy).__name__,
            "settings": plain,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        }

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._running:
            return
        self.timeline.cancel_step()
        self._close_interval(self._next - 1)
        while self._closed:
            self._post()
        while self._posted:
            self._publish(trainer, self._posted.popleft())
        self._stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._running:  # other ranks may be gone: keep what is here, without a collective
            self.timeline.cancel_step()
            for step in [*(step for gathering in self._posted for step in gathering.steps), *self._take()]:
                self._keep(step)
        self._stop()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        self._running = False
        self.timeline.cancel_step()
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = self._allreduce = None
        for hook in self._optimizer_hooks:
            hook.remove()
        self._optimizer_hooks = []
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    # ---- the spans of a step ---------------------------------------------------------------------------------------
    def _begin(self, kind: Kind) -> None:
        if self.timeline.active:
            self._began[kind] = self.timeline.mark()

    def _end(self, kind: Kind) -> None:
        began = self._began.pop(kind, None) if self._running else None
        if began is not None and self.timeline.active:
            self.timeline.add(kind, began, self.timeline.mark())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.timeline.active:
            began = self.timeline.clock()
            self._note_batch(batch)
            self._noting = self.timeline.clock() - began
            self._begin(Kind.DENSE_FORWARD)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._end(Kind.DENSE_FORWARD)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self._allreduce is not None and self.timeline.active:
            self._begin(Kind.DENSE_BACKWARD)
            self._allreduce.before_backward(loss)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self._allreduce is not None and self.timeline.active:
            self._allreduce.after_backward()
            self._end(Kind.DENSE_BACKWARD)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._begin(Kind.OPTIMIZER)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._running:
            return
        timeline = self.timeline
        for kind in list(self._began):  # manual optimization: backward and optimizer ran inside of training_step
            self._end(kind)
        # The loggers' axis, as Lightning's own callbacks take it.
        index = trainer.fit_loop.epoch_loop._batches_that_stepped
        recorded = timeline.active
        timeline.end_step()
        began = timeline.clock()
        self._open(index + 1)
        with timeline.span(Kind.METRICS):
            self._close(index, recorded)
            if recorded:
                self._spent.append(self._noting + timeline.clock() - began)
            self._exchange_intervals(trainer, pl_module, index)

    def _open(self, index: int) -> None:
        """Be ready for step ``index``, which begins now."""
        assert self._exchange is not None
        self._next = index
        if self._records(index):
            self.timeline.begin_step(index)
        # Collisions of one step per interval, with the step before it.
        due, soon = (
            self._records(later) and later // self._interval != self._collisions_of for later in (index, index + 1)
        )
        self._exchange.collisions.follow(count=due, remember=due or soon)
        if self._exchange.collisions.counting:
            self._collisions_of = index // self._interval

    def _records(self, index: int) -> bool:
        """Whether step ``index`` is recorded: the same on every rank, and at least one step per interval."""
        return index % self._interval % self._every == 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._restart_step()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._restart_step()

    def _restart_step(self) -> None:
        """What has happened since the last step is no part of the next."""
        if self._running and self.timeline.active:
            self.timeline.begin_step(self._next)

    def _note_batch(self, batch: Any) -> None:
        timeline = self.timeline
        features = next(iter(find_parts(batch, KeyedJaggedTensor)), None)
        if features is None:
            tensor = next(iter(find_parts(batch, Tensor)), None)
            timeline.count("samples", tensor.shape[0] if tensor is not None and tensor.ndim else 1)
            return
        timeline.count("samples", features.stride())
        if features.variable_stride_per_key():
            timeline.count("tokens", features.values().numel())
            return
        by_key = dict(zip(features.keys(), features.lengths().view(-1, features.stride()), strict=True))
        lengths = by_key[HISTORY] if HISTORY in by_key else torch.stack(list(by_key.values())).sum(0)
        timeline.keep("lengths", lengths)
        if HISTORY in by_key and NEGATIVES in by_key:
            timeline.keep("candidates", (lengths - 1).clamp(min=0) * by_key[NEGATIVES])

    # ---- between steps ---------------------------------------------------------------------------------------------
    def _close(self, index: int, recorded: bool) -> None:
        """Note what is known now that step ``index`` has ended."""
        assert self._allreduce is not None
        if self._recorded_last:  # DDP tells one step later
            self._hidden[index - 1] = self._allreduce.hidden_before()
        self._recorded_last = recorded
        self._open_steps += recorded
        if (index + 1) % self._interval == 0:
            self._close_interval(index)

    def _exchange_intervals(self, trainer: Any, pl_module: Any, index: int) -> None:
        """Post the interval that is due, publish those that have arrived."""
        due = bool(self._closed) and index >= self._closed[0] + LAG
        # Before the next interval is posted, all ranks have seen the one before, and have adapted to it.
        while self._posted and (due or self._posted[0].ready()):
            values = self._publish(trainer, self._posted.popleft())
            pl_module.log("bubble", values["bubble/total"], prog_bar=True, logger=False, batch_size=1)
        if due:
            self._every = self._wanted
            self._post()

    def _close_interval(self, index: int) -> None:
        if self._open_steps:
            self._closed.append(index)
        self._open_steps = 0

    def _take(self, upto: int | None = None) -> list[Step]:
        """Recorded steps with what is known about them by now."""
        steps = []
        for step in self.timeline.take(upto):
            lengths = step.arrays.get("lengths", np.zeros(0))
            costs = self._cost_model(lengths, step.arrays.get("candidates", np.zeros(len(lengths))))
            counts = {"cost": float(costs.sum()), **step.counts}
            if len(lengths):
                counts |= {"tokens": float(lengths.sum()), "padded": float(len(lengths) * lengths.max())}
            if self._flops:
                counts["flops"] = counts["cost"]
            arrays = {"lengths": lengths, "costs": costs}
            spans = step.spans + self._hidden_allreduce(step, self._hidden.pop(step.index, 0.0))
            steps.append(replace(step, spans=spans, counts=counts, arrays=arrays))
        return steps

    @staticmethod
    def _hidden_allreduce(step: Step, seconds: float) -> tuple[Span, ...]:
        waited = [span.start for span in step.spans if span.kind is Kind.ALLREDUCE and span.track == ENGINE]
        if not seconds or not waited:
            return ()
        began = max(step.start, waited[-1] - seconds)
        return (Span(Kind.ALLREDUCE, f"{Kind.ALLREDUCE.value} (async)", began, waited[-1], math.nan),)

    def _post(self) -> None:
        began = self.timeline.clock()
        last = self._closed.popleft()
        steps = self._take(upto=last)
        # Medians: what other processes take from us is not our cost.
        spent = statistics.median(self._spent) + self._span_cost * statistics.median(len(step.spans) for step in steps)
        spent += self._posting / len(steps)
        steps = [replace(step, counts={**step.counts, "overhead": spent}) for step in steps]
        pictured = bool(self._image_every) and last >= self._next_picture
        if pictured:
            self._next_picture = last + self._image_every
        self._posted.append(Gathering(last, steps, self._offset, self._group, pictured))
        self._posting = self.timeline.clock() - began

    # ---- an interval, known on all ranks ---------------------------------------------------------------------------
    def _publish(self, trainer: Any, gathering: Gathering) -> dict[str, float]:
        accounts, pictured = gathering.wait()
        bubbles = attribute(accounts)
        values = self._summary(bubbles)
        schedule = getattr(
            trainer.strategy, "schedule", None
        )  # 1 while the exchange is prioritized, by wish or by trial
        values["embedding/prioritized"] = float(schedule is not None and bool(schedule.prioritized))
        for logger in trainer.loggers:
            logger.log_metrics(values, step=gathering.step)
        if pictured and self._loggers_with_images:
            image = picture.draw(pictured, title=f"step {gathering.steps[-1].index}")
            for logger in self._loggers_with_images:
                logger.experiment.add_image("bubble/timeline", image, gathering.step, dataformats="HWC")
        self._keep_steps(gathering.steps, bubbles)
        if self._adapt:
            worst = bubbles.counts["overhead"].mean(axis=1).max() / bubbles.wall.mean()
            self._wanted = min(sampling(worst), self._interval)
        return values

    def _keep_steps(self, steps: list[Step], bubbles: Bubbles) -> None:
        """Write the steps to the run folder: all of them at first, later the same two on every rank."""
        chosen = steps
        if self._kept >= KEEP_ALL:
            order = np.argsort(bubbles.wall.max(axis=0), kind="stable")
            chosen = [steps[index] for index in sorted({order[-1], order[(len(order) - 1) // 2]})]
        for step in chosen:
            self._keep(step)
        if self._writer is not None:
            self._writer.flush()

    def _keep(self, step: Step) -> None:
        if self._writer is not None:
            self._writer.write(to_record(step, self._offset))
            self._kept += 1


def sampling(share: float) -> int:
    """Record every so many steps, if recording one takes ``share`` of a step."""
    return max(SPARSE, math.ceil(share / OVERHEAD))


class BubbleMonitor(BubbleMonitorMixin, pl.Callback):
    __doc__ = BubbleMonitorMixin.__doc__


def add_monitor(trainer: Any, monitor: type[BubbleMonitorMixin]) -> None:
    """Give ``trainer`` a monitor, if it has a logger to tell and no monitor yet."""
    present = any(isinstance(callback, BubbleMonitorMixin) for callback in trainer.callbacks)
    if trainer.loggers and not trainer.fast_dev_run and not present:
        trainer.callbacks.append(monitor())


def _name_streams(strategy: Any, timeline: Timeline) -> None:
    """Say in pictures and traces what the CUDA streams of a FreeScale strategy are for."""
    sides = [(getattr(strategy, "_copies", None), "copies")]
    for lane in getattr(getattr(strategy, "schedule", None), "lanes", ()):
        sides += [(lane.moves.ids_stream, "ids"), (lane.moves.table_stream, "tables")]
    for side, track in sides:
        if side is not None and side.stream is not None:
            timeline.name(side.stream, track)


def _span_cost(device: torch.device, tries: int = 100) -> float:
    """Seconds of the host that recording one span takes, about."""
    timeline = Timeline()
    timeline.open(device)
    for index in range(2):  # the second time events are there already
        timeline.begin_step(index)
        began = timeline.clock()
        for _ in range(tries):
            with timeline.span(Kind.METRICS):
                pass
        seconds = (timeline.clock() - began) / tries
        timeline.end_step()
        timeline.take()
    return seconds
