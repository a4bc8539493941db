"""``BubbleMonitor``: a callback that measures, while the model trains, how long each rank is idle and why.

It records the spans of a step through Lightning's hooks and the probes. Once per logging interval it gathers the steps of all
ranks, and sends the figures to the loggers, the progress bar and the run folder.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightning_freescale.balance.cost import CostModel
from lightning_freescale.bubbles.attribution import attribute
from lightning_freescale.bubbles.batch_stats import add_batch_stats, record_batch
from lightning_freescale.bubbles.clock import clock_offset
from lightning_freescale.bubbles.gather import IntervalGather
from lightning_freescale.bubbles.outputs import RunFolder, log_picture, open_image_loggers
from lightning_freescale.bubbles.overhead import OverheadMeter, sampling_period
from lightning_freescale.bubbles.pending import Moment
from lightning_freescale.bubbles.probes import AllReduceProbe, ExchangeProbe, ExpertProbe, hidden_allreduce
from lightning_freescale.bubbles.spans import Kind, Step
from lightning_freescale.bubbles.summary import Summary, peak_flops
from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.runtime import lightning_compat as compat
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.process_groups import are_complete, leave, new_gloo_group

if TYPE_CHECKING:  # at run time the base is Callback of ``lightning`` or of ``pytorch_lightning``
    _Base = pl.Callback
else:
    _Base = object

# Steps from the end of an interval to its gather. By then the device has usually finished the interval, so that reading its
# events does not wait.
GATHER_DELAY = 2


class BubbleMonitorMixin(_Base):
    """Measures the bubbles of training, and logs them at the steps at which Lightning logs.

    Tags: ``bubble/total`` and its parts ``bubble/straggler``, ``bubble/exposed_embedding``, ``bubble/exposed_experts``,
    ``bubble/exposed_dense``, ``bubble/input_wait``, ``bubble/other``, as shares of the ranks' time; ``balance/imbalance``
    (largest over mean compute time of the ranks), ``balance/sparsity``, ``embedding/collision_rate``, ``embedding/prioritized``
    (0 or 1), ``comm/overlap``, ``throughput/samples_per_s``, ``throughput/tokens_per_s``, ``step/time_ms``. ``summary.py``
    lists the others. ``<log_dir>/freescale`` keeps recorded steps for ``freescale report``.

    Args:
        every: record one step in ``every``. By default the monitor records all steps of the first logging interval, then one
            step in ten, or fewer if that would take more than 0.5% of the training time.
        image_every: steps between two pictures of the timeline in TensorBoard; 0 turns them off.
        cost: gives the cost of each sample ``[B]`` from history lengths ``[B]`` and candidates ``[B]``. By default the model's
            ``cost_coefficients()`` are used if it has them, else the number of events.
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
        self._next_every = (
            self._every
        )  # takes effect when an interval is gathered, so that all ranks change at the same step
        self._image_every, self._cost = image_every, cost
        self._running = False
        self._exchange: ExchangeProbe | None = None
        self._experts: ExpertProbe | None = None
        self._allreduce: AllReduceProbe | None = None
        self._optimizer_hooks: list[Any] = []
        self._folder: RunFolder | None = None
        self._group: dist.ProcessGroup | None = None
        self._gathers: deque[IntervalGather] = deque()  # started and not published

    # ---- start and end ---------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy, world = trainer.strategy, trainer.world_size
        timeline = self.timeline = getattr(strategy, "timeline", None) or self.timeline
        timeline.open(strategy.root_device)
        _name_streams(strategy, timeline)
        self._group = new_gloo_group(compat.timeout_of(strategy)) if world > 1 else None
        self._offset = clock_offset(self._group, timeline.clock) if self._group is not None else 0.0
        self._exchange = ExchangeProbe(pl_module, timeline)
        self._experts = ExpertProbe(pl_module, timeline)
        self._allreduce = AllReduceProbe(strategy.model, timeline)
        self._optimizer_hooks = [
            optimizer.register_step_post_hook(lambda *_: self._end(Kind.OPTIMIZER)) for optimizer in strategy.optimizers
        ]
        self._has_flops = hasattr(pl_module, "cost_coefficients")
        self._cost_model = self._cost or (CostModel.of_module(pl_module) if self._has_flops else CostModel())
        self._summary = Summary(
            self._has_flops, peak_flops(strategy.root_device, str(trainer.precision)) if self._has_flops else None
        )
        self._folder = RunFolder(trainer, self._offset)
        self._image_loggers = open_image_loggers(trainer) if self._image_every else []
        self._interval = max(1, trainer.log_every_n_steps)
        self._next = -1  # index of the current step; not known before the first step has ended
        self._recorded_in_interval, self._recorded_last = (
            0,
            False,
        )  # number of steps; whether the last step was recorded
        self._closed: deque[int] = deque()  # last step of each interval that is not gathered yet
        self._logging_step = 0
        self._logged_under: dict[int, int] = {}  # by the last step of an interval that is not published yet
        self._gathers.clear()
        self._began: dict[Kind, Moment] = {}
        self._hidden: dict[int, float] = {}  # by step: seconds of AllReduce that ran during backward
        self._next_picture = 0
        self._collisions_of = -1  # the interval whose collisions are already counted
        self._overhead = OverheadMeter(strategy.root_device)
        self._running = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._running:
            return
        self.timeline.cancel_step()
        self._close_interval(self._next - 1)
        while self._closed:
            self._gather()
        while self._gathers:
            self._publish(trainer, self._gathers.popleft())
        self._stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._running and self._folder is not None:
            # Other ranks may have died, so write the steps of this rank without a collective.
            self.timeline.cancel_step()
            for step in [*(step for gather in self._gathers for step in gather.steps), *self._take()]:
                self._folder.write(step)
        self._stop()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        self._running = False
        self.timeline.cancel_step()
        for probe in (self._exchange, self._experts):
            if probe is not None:
                probe.close()
        self._exchange = self._experts = self._allreduce = None
        for hook in self._optimizer_hooks:
            hook.remove()
        self._optimizer_hooks = []
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        if are_complete(
            self._gathers, seconds=2.0
        ):  # An AllGather that never completes would block the end of the group.
            leave(self._group)
        self._gathers.clear()
        self._group = None

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
            record_batch(self.timeline, batch)
            self._overhead.batch = self.timeline.clock() - began
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
        for kind in list(self._began):  # with manual optimization, backward and optimizer run inside training_step
            self._end(kind)
        logging_step = compat.logging_step(trainer)
        # With gradient accumulation, several batches have the same logging step.
        index = logging_step if self._next < 0 else self._next
        recorded = timeline.active
        timeline.end_step()
        began = timeline.clock()
        self._begin_step(index + 1)
        with timeline.span(Kind.METRICS):
            self._note_end(index, recorded, logging_step)
            if recorded:
                self._overhead.add_step(timeline.clock() - began)
            self._advance_intervals(trainer, pl_module, index)

    def _begin_step(self, index: int) -> None:
        """Start to record step ``index`` if it is one of the recorded steps."""
        assert self._exchange is not None
        self._next = index
        if self._records(index):
            self.timeline.begin_step(index)
        # Count the collisions of one step per interval, with the step before it.
        count, count_next = (
            self._records(later) and later // self._interval != self._collisions_of for later in (index, index + 1)
        )
        self._exchange.collisions.follow(count=count, remember=count or count_next)
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
        """Leave the time since the last step, such as validation, out of the next step."""
        if self._running and self.timeline.active:
            self.timeline.begin_step(self._next)

    # ---- intervals: closed at their last step, gathered a little later, published when the gather is done ------------
    def _note_end(self, index: int, recorded: bool, logging_step: int) -> None:
        """Store what is known now that step ``index`` has ended. Lightning's own callbacks log under ``logging_step``."""
        assert self._allreduce is not None
        if self._recorded_last:  # DDP gives the figure one step later
            self._hidden[index - 1] = self._allreduce.hidden_before()
        self._recorded_last = recorded
        self._recorded_in_interval += recorded
        self._logging_step = logging_step
        if (index + 1) % self._interval == 0:
            self._close_interval(index)

    def _advance_intervals(self, trainer: Any, pl_module: Any, index: int) -> None:
        """Gather the interval whose time has come, and publish those whose gather is done."""
        gather_now = bool(self._closed) and index >= self._closed[0] + GATHER_DELAY
        # All ranks publish an interval before they gather the next one, so that all use the same sampling period.
        while self._gathers and (gather_now or self._gathers[0].is_completed()):
            values = self._publish(trainer, self._gathers.popleft())
            pl_module.log("bubble", values["bubble/total"], prog_bar=True, logger=False, batch_size=1)
        if gather_now:
            self._every = self._next_every
            self._gather()

    def _close_interval(self, index: int) -> None:
        if self._recorded_in_interval:
            self._closed.append(index)
            self._logged_under[index] = self._logging_step
        self._recorded_in_interval = 0

    def _take(self, upto: int | None = None) -> list[Step]:
        """The recorded steps up to index ``upto``, with their batch statistics and the AllReduce behind backward."""
        steps = []
        for step in self.timeline.take(upto):
            spans = step.spans + hidden_allreduce(step, self._hidden.pop(step.index, 0.0))
            steps.append(add_batch_stats(replace(step, spans=spans), self._cost_model, self._has_flops))
        return steps

    def _gather(self) -> None:
        """Start the gather of the oldest closed interval."""
        began = self.timeline.clock()
        last = self._closed.popleft()
        steps = self._take(upto=last)
        overhead = self._overhead.per_step(steps)
        steps = [replace(step, counts={**step.counts, "overhead": overhead}) for step in steps]
        with_picture = bool(self._image_every) and last >= self._next_picture
        if with_picture:
            self._next_picture = last + self._image_every
        self._gathers.append(IntervalGather(last, steps, self._offset, self._group, with_picture))
        self._overhead.gather = self.timeline.clock() - began

    def _publish(self, trainer: Any, gather: IntervalGather) -> dict[str, float]:
        """Log the figures of an interval, write its steps, and choose the next sampling period. Returns values by tag."""
        assert self._folder is not None
        accounts, drawn = gather.wait()
        bubbles = attribute(accounts)
        values = self._summary(bubbles)
        schedule = getattr(trainer.strategy, "schedule", None)
        values["embedding/prioritized"] = float(schedule is not None and bool(schedule.prioritized))
        logging_step = self._logged_under.pop(gather.step)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=logging_step)
        if drawn:
            log_picture(self._image_loggers, drawn, gather.steps[-1].index, logging_step)
        self._folder.write_interval(gather.steps, bubbles.wall)
        if self._adapt:
            share = bubbles.counts["overhead"].mean(axis=1).max() / bubbles.wall.mean()
            self._next_every = min(sampling_period(share), self._interval)
        return values


class BubbleMonitor(BubbleMonitorMixin, pl.Callback):
    __doc__ = BubbleMonitorMixin.__doc__


def add_monitor(trainer: Any, monitor: type[BubbleMonitorMixin]) -> None:
    """Add a monitor to ``trainer`` if the trainer has a logger and no monitor."""
    present = any(isinstance(callback, BubbleMonitorMixin) for callback in trainer.callbacks)
    if trainer.loggers and not trainer.fast_dev_run and not present:
        trainer.callbacks.append(monitor())


def _name_streams(strategy: Any, timeline: Timeline) -> None:
    """Give the CUDA streams of a FreeScale strategy names for pictures and traces."""
    sides = [(getattr(strategy, "_copies", None), "copies")]
    for module in getattr(getattr(strategy, "schedule", None), "modules", ()):
        sides += [(module.exchange.ids_stream, "ids"), (module.exchange.table_stream, "tables")]
    for side, track in sides:
        if side is not None and side.stream is not None:
            timeline.name_stream(side.stream, track)
