"""The strategy's hooks of training, validation and prediction, in the order of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.balance.balancer import Balancer
from lightning_freescale.batch.contents import find_parts
from lightning_freescale.embedding import table_optimizer
from lightning_freescale.embedding.exchange_mode import ExchangeMode
from lightning_freescale.embedding.schedule import ExchangeSchedule
from lightning_freescale.runtime import lightning_compat as compat
from lightning_freescale.runtime.gradient_places import backward_of_training_step
from lightning_freescale.strategy import loss_weighting
from lightning_freescale.strategy.accumulation import GradientAccumulation
from lightning_freescale.strategy.checkpoints.hooks import CheckpointHooks
from lightning_freescale.strategy.control import Control, Request
from lightning_freescale.strategy.lookup_watch import LookupWatch
from lightning_freescale.strategy.pipeline import BatchPipeline
from lightning_freescale.strategy.progress_bar import show_last_values
from lightning_freescale.strategy.refusals import called_once
from lightning_freescale.strategy.sharded_model import ShardedModel
from lightning_freescale.strategy.table_learning_rate import TableLearningRates, log_table_rates
from lightning_freescale.strategy.table_steps import TableSteps, name_gradient_hooks
from lightning_freescale.strategy.unused_rows import UnusedRows

FLUSH = "trainer.strategy.flush(), which all ranks must call"


class StepHooks(CheckpointHooks):
    """Lightning's hooks around the steps, as a part of the strategy class.

    A training step calls, in this order: ``batch_to_device`` (in ``strategy.py``), ``on_train_batch_start``,
    ``training_step``, ``pre_backward``, ``backward``, ``post_backward``, and the user's optimizer.
    """

    control: Control | None
    _is_overridden: Callable[[str, object], bool]
    _accumulation: GradientAccumulation
    _completing: Any = None  # The callback of :meth:`complete_tables_for_callbacks`.
    _balancer: Balancer
    _exchange_mode: ExchangeMode
    _pipeline: BatchPipeline
    _rates: TableLearningRates | None
    _validation_steps: dict[str, int]  # Step counts of the tables before a validation.
    _lookups: LookupWatch | None = None
    _unused_rows: UnusedRows | None = None
    _table_steps: TableSteps
    _in_training_step: bool
    _failed: bool
    _module: Any
    _sharded_model: ShardedModel | None

    @property
    def schedule(self) -> ExchangeSchedule | None:
        """The schedule of the prioritized exchange; ``None`` if steps are synchronous."""
        return self._exchange_mode.schedule

    @property
    def _has_tables(self) -> bool:
        return self._sharded_model is not None and self._sharded_model.has_tables

    def _act_on_request(self, request: Request) -> None:
        """Stop or requeue on all ranks. The strategy implements it."""
        raise NotImplementedError

    def on_train_start(self) -> None:
        super().on_train_start()
        trainer, loaders = self._module.trainer, self._pipeline.train_loaders
        self.before_loaders_restart()
        compat.restore_train_loaders(trainer, opened=lambda: any(loader.opened for loader in loaders))
        for loader in loaders[-1:]:
            # On another number of ranks the epoch has other batches. The samples done so far count as these batches.
            compat.shift_batch_progress(trainer, loader.shift)
            loader.shift = 0
        self.restore_random_states()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        trainer = self._module.trainer
        compat.count_running_epoch(trainer)
        self._enter(f"in epoch {trainer.current_epoch}")
        if self._has_tables and self._rates is not None:
            self._table_steps.end_batch()
            log_table_rates(trainer, self._rates)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        trainer = module.trainer
        if self._has_tables:
            micro_batch = self._accumulation.begin(trainer, module)
            # Hooks of the user may have replaced the features since the batch was prepared.
            features = list(find_parts(args[0] if args else None, KeyedJaggedTensor))
            ids = sum([part.values().numel() for part in features])
            self._exchange_mode.before_step(ids, self._accumulation.number)
            if self.schedule is not None:
                if self._pipeline.has_new_ids:
                    self.schedule.flush()
                    self.schedule.discard()
                self.schedule.begin_step(features, *self._pipeline.features_ahead(), micro_batch)
        if self._pipeline.current:
            self._balancer.begin_step(self._pipeline.cost_sums, self._pipeline.index)
        self._log_over_the_global_batch(compat.train_results(trainer))
        self._in_training_step = True
        try:
            output = super().training_step(*args, **kwargs)
        finally:
            self._in_training_step = False
        if self._unused_rows is not None and not module.automatic_optimization:  # the step has run its backwards itself
            self._unused_rows.check()
        self._balancer.compute_timer.end_forward()
        return output

    def next_batch(self) -> Any:
        """The batch of the next training step, safe to use on the current stream; ``None`` if it is not known.

        It is known in a training step of a model whose embeddings may be exchanged with priorities, unless a hook of the user
        replaces batches. User code may still change its fields before its step.
        """
        return self._pipeline.next_batch()

    def _log_over_the_global_batch(self, results: Any) -> None:
        """Weight the values of the next step by samples or tokens, as the loss is, unless ``log`` gets a batch size."""
        weights = self._pipeline.loss_weights()
        if weights:
            compat.set_logged_batch_size(results, weights[self.global_rank])
        compat.keep_logged_values_in_place(results)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A mean that ``training_step`` logs with ``sync_dist=True`` is a mean over the global batch."""
        with self._balancer.compute_timer.waiting():
            if isinstance(tensor, Tensor) and reduce_op in loss_weighting.MEANS:
                if not tensor.is_floating_point():
                    total = super().reduce(tensor.clone(), group, "sum")
                    return loss_weighting.mean_of_counts(total, torch.distributed.get_world_size(group))
                if self._in_training_step and group in (None, torch.distributed.group.WORLD):
                    tensor = loss_weighting.weigh(tensor, self._pipeline.loss_weights(), self.global_rank)
            return super().reduce(tensor, group, reduce_op)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Weight the loss by this rank's share, so that the mean over the ranks is the mean over the global batch."""
        weights = self._pipeline.loss_weights()
        factor = loss_weighting.share(weights, self.global_rank)
        if self._has_tables:
            factor *= self._accumulation.loss_factor(weights, self._module)
            if self._module.automatic_optimization:
                self._table_steps.note_backward(self._accumulation.last)
        loss = closure_loss * factor if factor != 1.0 else closure_loss
        with backward_of_training_step(accumulates=not self._is_overridden("backward", self._module)):
            return super().backward(loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self._has_tables and self._module.automatic_optimization:
            closure = called_once(closure, optimizer)
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._has_tables:
            self._accumulation.end_window()
            self._table_steps.note_step()
        return result

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self._balancer.compute_timer.end_forward()  # With manual optimization training_step has not ended yet.
        if self._has_tables:
            assert self.control is not None
            self.control.watch_loss(self._module.trainer.global_step, closure_loss)
            self.copy_tables()
        if self.schedule is not None:
            self.schedule.before_backward()
        self._balancer.compute_timer.begin_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._balancer.compute_timer.end_step()
        if self._unused_rows is not None and self._module.automatic_optimization:
            self._unused_rows.check()
        if self.schedule is not None:
            self.schedule.after_backward()
        if self._has_tables:
            self._accumulation.end_backward()
        if self.schedule is not None:
            self.schedule.end_step()

    def _await_tables(self) -> None:
        """Before an update on the current stream: wait for copies of the tables, and for the streams that work on them."""
        self.before_tables_change()
        self._exchange_mode.await_tables()

    def flush(self) -> None:
        """Apply every pending gradient of the tables, and drop rows of the next step that have been read.

        Call it on all ranks before you read or change the tables in a callback. It waits for all ranks.
        """
        if self.schedule is None:
            self.complete_tables()
            return
        assert self.control is not None
        self.control.gather(None, what=FLUSH)  # A rank that is alone would exchange other rows than the others.
        self.complete_tables()
        self.schedule.discard()

    def complete_tables(self) -> None:
        """Apply every pending gradient of the tables."""
        if self.schedule is not None:
            self.schedule.flush()
        self.before_tables_change()

    def complete_tables_for_callbacks(self, trainer: Any) -> None:
        """Let callbacks see complete tables when a validation starts and an epoch or the training ends.

        Their hooks are called before those of the strategy, and an epoch may end early.
        """

        places = {
            "on_validation_start": "in a validation",
            "on_train_epoch_end": "at the end of epoch {}",
            "on_train_end": "at the end of the training",
        }

        def complete(place: str, *_: Any) -> None:
            self._enter(place.format(trainer.current_epoch))
            self.complete_tables()

        hooks = {hook: partial(complete, place) for hook, place in places.items()}
        self._completing = compat.add_callback(trainer, first=True, **hooks)

    def _enter(self, place: str) -> None:
        """Note where this rank is in the training. If the ranks wait for each other in vain, the error says where they were."""
        if self.control is not None:
            self.control.enter(place)

    def watch_updates(self, trainer: Any, fitting: bool) -> None:
        """Watch the look-ups and updates of a run.

        The tables get their learning rates before each look-up. Backwards that no optimizer step follows are found, and so are
        losses that leave rows out on some ranks.
        """
        self.unwatch_updates()
        self._lookups = LookupWatch(self._module, trainer, self._rates if fitting else None)
        self._table_steps = TableSteps()
        if fitting:
            name_gradient_hooks(trainer)
        if fitting and trainer.world_size > 1:
            assert self.control is not None
            self._unused_rows = UnusedRows(self._module, self.global_rank, self.control.ask, self._is_prioritized)

    def _is_prioritized(self, name: str) -> bool:
        """Whether the collection of this name has been called with priorities in this step."""
        return self.schedule is not None and self.schedule.is_prioritized(name)

    def unwatch_updates(self) -> None:
        if self._lookups is not None:
            self._lookups.close()
        if self._unused_rows is not None:
            self._unused_rows.close()
        self._lookups = self._unused_rows = None

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._has_tables:
            assert self.control is not None
            self._table_steps.end_batch()
            self.complete_tables()
            self.control.check_losses()  # A save whose losses are not finite has failed. The loss is the reason.
        self.finish_saves()
        if self._has_tables:
            assert self.control is not None
            show_last_values(self._module.trainer)
            self._act_on_request(self.control.agree_on_request())  # No header carries a signal of the last batches.
        self.remove_host_copies()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.complete_tables()
        self._exchange_mode.stop_clock()
        self._set_evaluation(True)
        self._validation_steps = table_optimizer.steps(self._module)

    def on_validation_end(self) -> None:
        super().on_validation_end()
        table_optimizer.set_steps(self._module, self._validation_steps)  # FBGEMM has counted the look-ups as steps.
        self._set_evaluation(False)
        self._enter(f"in epoch {self._module.trainer.current_epoch}")
        self._exchange_mode.start_clock()

    def _set_evaluation(self, evaluates: bool) -> None:
        """Note whether look-ups belong to a validation, and so to no step."""
        if self.schedule is not None:
            self.schedule.set_evaluation(evaluates)
        if self._lookups is not None:
            self._lookups.check_backwards(evaluates)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._outside_of_steps():
            return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        with self._outside_of_steps():
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @contextmanager
    def _outside_of_steps(self) -> Iterator[None]:
        """Leave the time inside out of the times of steps that ``prioritize="auto"`` compares."""
        if self._failed:  # Do not wait for a device whose collectives may never complete.
            yield
            return
        self._exchange_mode.stop_clock()
        yield
        self._exchange_mode.start_clock()

    def on_predict_end(self) -> None:
        super().on_predict_end()
        self._pipeline.end_predictions()
