"""Every private name of Lightning that this package uses, in one place.

Lightning has no public interface for some of what a strategy must know or change. Each function here wraps one such
place and says what it relies on. ``tests/runtime/test_lightning_compat.py`` checks that the names exist in the
installed Lightning and behave as described. No other file of the package uses a private name of the Trainer.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import signal
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_freescale.runtime.log import logger
from lightning_freescale.runtime.process_groups import new_gloo_group

FITTING = "fit"  # The value of TrainerFn.FITTING in `lightning` and in `pytorch_lightning`.


# ---- progress ------------------------------------------------------------------------------------------------------
def logging_step(trainer: Any) -> int:
    """The step number that Lightning's own callbacks pass to the loggers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def should_update_logs(trainer: Any) -> bool:
    """Whether Lightning logs at the current step (``log_every_n_steps``)."""
    return trainer._logger_connector.should_update_logs


def current_batch_is_processed(trainer: Any) -> bool:
    """Whether the training step of the batch fetched last has ended.

    A checkpoint that is written inside a batch, for instance in ``on_train_batch_start`` or after an exception, must
    not count that batch as done. Lightning resumes at ``processed`` batches in the same way.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return progress.processed >= progress.ready


def shift_batch_progress(trainer: Any, batches: int) -> None:
    """Add ``batches`` to the number of batches of this epoch that count as done."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    for count in ("ready", "started", "processed", "completed"):
        setattr(progress, count, getattr(progress, count) + batches)


def count_running_epoch(trainer: Any) -> None:
    """Count the epoch that runs as begun.

    Lightning does not, if the run has resumed from a checkpoint of the last batch of an epoch. A resume from a later checkpoint
    of this run would then begin the epoch anew, and train its first samples twice.
    """
    progress = trainer.fit_loop.epoch_progress
    missing = progress.current.processed + 1 - progress.current.ready
    for counts in (progress.current, progress.total) if missing > 0 else ():
        counts.ready += missing
        counts.started += missing


class WindowPosition(NamedTuple):
    """The place of the current batch among the micro-batches of one optimizer step."""

    place: int  # from 0
    number: int  # accumulate_grad_batches
    last: bool  # the optimizer steps after this batch


EVERY_BATCH = WindowPosition(0, 1, True)  # the position without accumulation


def accumulation_window(trainer: Any) -> WindowPosition:
    """Where the current batch is in its optimizer step. The last batch of an epoch always ends a step."""
    number = trainer.accumulate_grad_batches
    if number == 1:
        return EVERY_BATCH
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return WindowPosition((ready - 1) % number, number, not trainer.fit_loop._should_accumulate())


def timeout_of(strategy: Any) -> timedelta | None:
    """How long the strategy lets a collective wait; ``None`` if it does not say."""
    return getattr(strategy, "_timeout", None)


# ---- data loaders --------------------------------------------------------------------------------------------------
def restore_train_loaders(trainer: Any, opened: Callable[[], bool]) -> None:
    """Give the train loaders the state of the checkpoint once more.

    Lightning drops that state if ``configure_optimizers`` reads ``trainer.estimated_stepping_batches`` (Lightning
    issue 20550). A loader without a length was opened before the state arrived, so its iterator starts again.

    Args:
        opened: says whether a train loader has fetched a batch already.
    """
    fit_loop = trainer.fit_loop
    restart = bool(fit_loop._combined_loader_states_to_load) and opened()
    fit_loop._load_combined_loader_states()
    if restart:
        iter(fit_loop._data_fetcher)


def batch_limit(trainer: Any, loader: object) -> float:
    """The number of batches that Lightning takes from ``loader`` in one epoch; infinite if it does not know."""
    loop = trainer._active_loop
    combined = getattr(loop, "_combined_loader", None)
    if combined is None or combined.limits is None:
        return float("inf")
    for candidate, limit in zip(combined.flattened, combined.limits, strict=True):
        if candidate is loader:
            return limit
    return float("inf")


def takes_dataloader_iter(trainer: Any) -> bool:
    """Whether the current step method fetches its batches itself, as ``training_step(self, dataloader_iter)`` does."""
    stages = {"training": "training_step", "testing": "test_step", "predicting": "predict_step"}
    name = next((step for stage, step in stages.items() if getattr(trainer, stage)), "validation_step")
    step = getattr(trainer.lightning_module, name, None)
    return step is not None and "dataloader_iter" in inspect.signature(step).parameters


# ---- batch transfer hooks ------------------------------------------------------------------------------------------
def transfer_hook_owner(trainer: Any, name: str) -> Any:
    """The LightningModule or data module whose transfer hook ``name`` Lightning calls."""
    return trainer._data_connector._datahook_selector.get_instance(name)


# ---- prepare_data --------------------------------------------------------------------------------------------------
_BARRIER = "_InfiniteBarrier"
_PREPARE_DATA_LIMIT = timedelta(days=10_000)  # Lightning's: one rank may prepare data for as long as it likes.


class PrepareDataBarrier:
    """Replaces the barrier around ``prepare_data``. The ranks meet within ``timeout``; the wait for the data has no limit.

    Lightning's own barrier waits without end for the connections, too, so all ranks hang if one dies before it has connected.
    """

    def __init__(self, timeout: timedelta):
        self._timeout = timeout
        self._group: Any = None

    def __enter__(self) -> PrepareDataBarrier:
        if dist.is_initialized():
            self._group = new_gloo_group(self._timeout)
        return self

    def __call__(self) -> None:
        if self._group is not None:
            dist.monitored_barrier(self._group, _PREPARE_DATA_LIMIT)

    def __exit__(self, *exception: Any) -> None:
        self()
        if self._group is not None:
            dist.destroy_process_group(self._group)


def limit_prepare_data(trainer: Any, timeout: timedelta | None) -> None:
    """Let the ranks of ``trainer`` meet within ``timeout`` before ``prepare_data``. ``None``: as Lightning does."""
    module = importlib.import_module(type(trainer._data_connector).__module__)
    original = getattr(getattr(module, _BARRIER), "original", getattr(module, _BARRIER))
    barrier: Any = original
    if timeout is not None:
        barrier = functools.partial(PrepareDataBarrier, timeout)
        barrier.original = original
    setattr(module, _BARRIER, barrier)


# ---- logged values -------------------------------------------------------------------------------------------------
def set_logged_batch_size(results: Any, size: int) -> None:
    """Let values that are logged in this step count for ``size`` samples. Lightning would guess from some tensor.

    Args:
        results: the collection of logged values of the loop that runs.
    """
    results.batch_size = size


def keep_logged_values_in_place(results: Any) -> None:
    """Let ``log`` not move a value to the device on which it is already.

    Lightning moves the state of a logged value in every call of ``log``. It looks for tensors in all attributes of the state, and
    finds in almost all calls that nothing is to be moved.

    Args:
        results: a collection of logged values. Values that are logged later for the first time are not changed.
    """
    for metric in results.values():
        if metric.is_tensor and "to" not in vars(metric):  # a Metric of the user may have been moved by the user
            metric.to = _Mover(metric)


class _Mover:
    """The method ``to`` of one logged value: does nothing if the last call has moved it to the same device."""

    def __init__(self, metric: Any):
        self._metric, self._device = metric, None

    def __call__(self, *args: Any, **options: Any) -> Any:
        wanted = args[0] if len(args) == 1 and not options else None
        if wanted is None or wanted != self._device:
            type(self._metric).to(self._metric, *args, **options)
            self._device = wanted
        return self._metric


def train_results(trainer: Any) -> Any:
    """The collection of the values that the training loop logs."""
    return trainer.fit_loop.epoch_loop._results


def logged_value(results: Any, metric: Any, on_step: bool) -> Any:
    """The tensor that Lightning shows for ``metric`` of ``results``, or ``None``."""
    return results._get_cache(metric, on_step)


def logged_name(results: Any, metric: Any, on_step: bool) -> str:
    """The name under which the progress bar shows ``metric`` of ``results``."""
    return results._forked_name(metric, on_step)[1]


def update_progress_bar_metrics(trainer: Any, values: Mapping[str, float]) -> None:
    """Change what ``trainer.progress_bar_metrics`` returns."""
    trainer._logger_connector._progress_bar_metrics.update(values)


# ---- signals -------------------------------------------------------------------------------------------------------
def replace_signal_handlers(
    trainer: Any, on_sigterm: Callable[[int, Any], None], on_requeue: Callable[[int, Any], None]
) -> Callable[[int, Any], None]:
    """Replace Lightning's handlers for SIGTERM and for SLURM's requeue signal. Call it before ``fit`` starts its loop.

    Lightning's handlers run collectives inside the signal, which can interrupt other collectives. Its training loop
    also broadcasts a flag and reads it back from the device in every step; that broadcast is switched off.

    Returns:
        Lightning's own requeue handler. It saves a checkpoint and requeues the job. Call it between two steps.
    """
    connector = trainer._signal_connector
    requeue = type(connector)._slurm_sigusr_handler_fn.__get__(connector)
    connector._sigterm_notifier_fn = on_sigterm
    connector._slurm_sigusr_handler_fn = on_requeue
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    return requeue


def mark_sigterm_received(trainer: Any) -> None:
    """Let ``trainer.received_sigterm`` be true."""
    trainer._signal_connector.received_sigterm = True


def forward_signal(launcher: Any, signum: int) -> None:
    """Send the signal to the processes that ``launcher`` has started, if there is a launcher."""
    if launcher is not None:
        launcher.kill(signal.Signals(signum))


# ---- checkpoints ---------------------------------------------------------------------------------------------------
Loading = Callable[..., Any]


def choose_checkpoint(trainer: Any, choose: Callable[[Any, bool | None], Any]) -> None:
    """Let ``choose`` replace the path from which the next ``fit`` resumes.

    It gets ``ckpt_path``, which may be ``None``, and ``weights_only``.

    Lightning decides about ``ckpt_path`` before the ranks are connected, and does not ask the strategy if it is ``None``.
    """
    connector = trainer._checkpoint_connector

    def resume_start(checkpoint_path: Any = None, *options: Any, **named: Any) -> None:
        del connector.resume_start  # The method of the class counts again.
        connector.resume_start(choose(checkpoint_path, named.get("weights_only")), *options, **named)

    connector.resume_start = resume_start


def parameters_to_prune(callback: Any) -> Iterable[tuple[Any, str]]:
    """The modules and names of the parameters that a ``ModelPruning`` has chosen in its ``setup``."""
    return callback._parameters_to_prune


def add_callback(trainer: Any, first: bool = False, **hooks: Callable[..., Any]) -> Any:
    """Add a callback with these hooks, before all others or after all of them. Returns it, for :func:`remove_callback`."""
    # The class of the Trainer may be the user's own. That of its connector is always Lightning's.
    package, _, _ = type(trainer._checkpoint_connector).__module__.partition(".trainer")
    callback = importlib.import_module(f"{package}.callbacks").LambdaCallback(**hooks)
    trainer.callbacks.insert(0 if first else len(trainer.callbacks), callback)
    return callback


def remove_callback(trainer: Any, callback: Any) -> None:
    """Remove what :func:`add_callback` has added."""
    trainer.callbacks[:] = [other for other in trainer.callbacks if other is not callback]


def wrap_load_from_checkpoint(package: str, wrap: Callable[[Loading], Loading]) -> None:
    """Replace the function ``(path_or_url, map_location, weights_only)`` with which ``load_from_checkpoint`` reads a path."""
    core = "lightning.pytorch" if package == "lightning" else package
    _wrap_once(importlib.import_module(f"{core}.core.saving"), wrap)


def wrap_checkpoint_io(package: str, wrap: Callable[[Loading], Loading]) -> None:
    """Replace the function ``(path_or_url, map_location, weights_only)`` with which ``TorchCheckpointIO`` reads a path."""
    fabric = "lightning.fabric" if package == "lightning" else "lightning_fabric"
    _wrap_once(importlib.import_module(f"{fabric}.plugins.io.torch_io"), wrap)


def _wrap_once(module: Any, wrap: Callable[[Loading], Loading]) -> None:
    if not hasattr(module.pl_load, "wrapped_by_freescale"):
        module.pl_load = wrap(module.pl_load)
        module.pl_load.wrapped_by_freescale = True


# ---- errors --------------------------------------------------------------------------------------------------------
def replace_errors(launcher: Any, replace: Callable[[Any, BaseException], BaseException]) -> None:
    """Let ``replace(trainer, error)`` replace the error of a run, before the Trainer and its callbacks handle it.

    The Trainer runs everything through its launcher.
    """
    launcher.launch = functools.partial(_launch_and_replace, launcher, replace)


def _launch_and_replace(
    launcher: Any,
    replace: Callable[[Any, BaseException], BaseException],
    function: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Any:
    try:
        return type(launcher).launch(launcher, function, *args, **options)
    except BaseException as error:
        if (better := replace(options.get("trainer"), error)) is not error:
            raise better from error
        raise


def log_errors_of_handling(trainer: Any, hides: Callable[[Exception], bool]) -> None:
    """Log errors for which ``hides`` returns true, and which are raised while the next exception is handled.

    They would hide the exception, and stop its handling. The Trainer calls the hooks of callbacks and the data module, ends the
    loggers, and then tears down the strategy, the loop and its connectors. A loop moves logged values to the CPU there.
    """
    loop, epoch_loop = trainer._active_loop, trainer.fit_loop.epoch_loop
    parts = [(callback, "on_exception") for callback in trainer.callbacks]
    parts += [(trainer.datamodule, "on_exception"), *((part, "finalize") for part in trainer.loggers)]
    parts += [
        (owner._results, "cpu") for owner in {loop, epoch_loop, epoch_loop.val_loop} if hasattr(owner, "_results")
    ]
    parts += [(owner, "teardown") for owner in (loop, trainer._logger_connector, trainer._signal_connector)]
    for owner, name in parts:
        if owner is not None:
            setattr(owner, name, functools.partial(_call_and_log_error, owner, name, hides))


def _call_and_log_error(owner: Any, name: str, hides: Callable[[Exception], bool], *args: Any, **options: Any) -> None:
    vars(owner).pop(name, None)  # The method of the class counts again.
    try:
        getattr(owner, name)(*args, **options)
    except Exception as error:
        if not hides(error):
            raise
        text = f"{type(error).__name__}: {error}".split("\n")[0]
        logger.warning("%s could not handle the exception: %s", type(owner).__name__, text)


# ---- names for the contract test -----------------------------------------------------------------------------------
def private_names() -> Iterable[str]:
    """The private attributes that this module reads or replaces, as paths that start at a Trainer."""
    return (
        "fit_loop.epoch_loop._batches_that_stepped",
        "fit_loop.epoch_loop._results",
        "fit_loop._should_accumulate",
        "fit_loop.epoch_loop.batch_progress.current.ready",
        "fit_loop.epoch_loop._broadcast_sigterm_tensor",
        "fit_loop.epoch_loop.batch_progress.current.processed",
        "fit_loop._combined_loader_states_to_load",
        "fit_loop._load_combined_loader_states",
        "fit_loop._combined_loader",
        "fit_loop._data_fetcher",
        "_checkpoint_connector.resume_start",
        "_data_connector._datahook_selector",
        "_logger_connector.should_update_logs",
        "_logger_connector._progress_bar_metrics",
        "_logger_connector.teardown",
        "_signal_connector.teardown",
        "fit_loop.epoch_loop.val_loop._results",
        "_signal_connector._sigterm_notifier_fn",
        "_signal_connector._slurm_sigusr_handler_fn",
        "_signal_connector.received_sigterm",
    )
