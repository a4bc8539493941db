"""A training that fails says which rank has failed, whatever CUDA, the callbacks and the interpreter's lock do meanwhile."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MeanMetric

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.runtime import nccl_calls
from lightning_freescale.runtime.device_errors import is_device_error, is_nccl_error
from lightning_freescale.runtime.errors import CheckpointError, FreeScaleError
from lightning_freescale.strategy import failing, failure_watch
from lightning_freescale.strategy.failing import NamedFailures, note_on
from lightning_freescale.strategy.failure_watch import FailureWatch
from tests import toy
from tests.ranks import RankFailed, run_ranks

PATIENCE = 20.0  # seconds
TIMEOUT = 30.0  # seconds, of the strategy
CAUSE_SECONDS = 3.0  # Shorter than in a training.
TEXT = "CUDA error: operation not supported on global/shared address space"


def error_of_cuda() -> Exception:
    return torch.AcceleratorError(f"{TEXT}\nSearch for `cudaErrorInvalidAddressSpace' in the manual.")


class FailInStep(L.Callback):
    """Calls ``action`` in the second step."""

    def __init__(self, action: Callable[[], None]):
        self.action = action

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        if trainer.global_step == 1:
            self.action()


class SaveOnException(L.pytorch.callbacks.ModelCheckpoint):
    """Copies a metric from the device before it saves. After an error of CUDA, that raises the error again."""

    def _monitor_candidates(self, trainer: L.Trainer) -> Any:
        if trainer.interrupted:
            raise error_of_cuda()
        return super()._monitor_candidates(trainer)


class DeviceMetric(MeanMetric):
    """A logged value on a device. After an error of CUDA, the Trainer's attempt to move it to the CPU raises the error again."""

    device_has_failed = False

    def to(self, *args: Any, **options: Any) -> Any:
        if self.device_has_failed:
            raise error_of_cuda()
        return super().to(*args, **options)


class LoggingModel(toy.Model):
    def __init__(self) -> None:
        super().__init__()
        self.metric = DeviceMetric()

    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metric(loss.detach())
        self.log("metric", self.metric, batch_size=len(batch.label))
        return loss


class FailingData(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return toy.loader()

    def on_exception(self, exception: BaseException) -> None:
        raise error_of_cuda()


class FailingLogger(CSVLogger):
    def finalize(self, status: str) -> None:
        raise error_of_cuda()


def fit(folder: str, action: Callable[[], None], world: int = 2) -> BaseException:
    """Train until ``action`` ends it. Returns the error. Everything that follows raises an error of CUDA too."""
    failing.CAUSE_SECONDS = CAUSE_SECONDS
    strategy, model = FreeScaleStrategy(timeout=TIMEOUT), LoggingModel()
    strategy._balancer.close = lambda: _raise(error_of_cuda())  # type: ignore[method-assign]

    def fail() -> None:
        DeviceMetric.device_has_failed = True
        action()

    callbacks = [FailInStep(fail), SaveOnException(folder, save_on_exception=True)]
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": callbacks, "logger": FailingLogger(folder)}
    trainer = toy.trainer(strategy, world, log_every_n_steps=1, **options)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError) as failure:
        trainer.fit(model, datamodule=FailingData())
    assert strategy.control._watch is None  # All parts of the strategy have ended.
    assert signal.getsignal(signal.SIGTERM) == handler  # So have those of the Trainer.
    assert "on_exception" not in vars(callbacks[1])
    return failure.value


def _raise(error: Exception) -> None:
    raise error


# ---- errors of CUDA --------------------------------------------------------------------------------------------------
def _lose_a_rank(rank: int, folder: str) -> None:
    def fail() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise error_of_cuda()  # What runs behind an aborted kernel may raise it. The news of the death may come later.

    error = fit(folder, fail)
    assert isinstance(error, FreeScaleError)
    assert str(error) == f"rank 0: AcceleratorError: {TEXT}. This follows a failure: rank 1 has died"
    assert isinstance(error.__cause__, torch.AcceleratorError)


def test_an_error_of_cuda_names_the_rank_that_has_died(tmp_path: Any) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(_lose_a_rank, args=(str(tmp_path),), every_error=True)
    assert failure.value.errors == {1: "died with exit code -9"}


TRANSFER = "NCCL error in: ProcessGroupNCCL.cpp:612, remote process exited or there was a network error"
SAVE = f"an asynchronous save failed: rank 1: saving a.ckpt: AcceleratorError: {TEXT}"


def _lose_the_rank_with_the_store(rank: int, folder: str) -> None:
    errors = [None, error_of_cuda(), dist.DistBackendError(TRANSFER), CheckpointError(SAVE)]

    def fail() -> None:
        if rank == 0:
            time.sleep(0.5)  # The others meet their errors before the death is known.
            os.kill(os.getpid(), signal.SIGKILL)
        raise errors[rank]  # type: ignore[misc]

    error = fit(folder, fail, world=4)
    reason = "This follows a failure: rank 0 has died"
    if rank == 3:  # An error of this package, here of a save in the background, keeps its type.
        assert error is errors[rank]
        assert error.__notes__ == [f"rank 3: {reason}"]
        return
    assert type(error) is FreeScaleError
    assert str(error).startswith(f"rank {rank}: {type(errors[rank]).__name__}: ")
    assert str(error).endswith(reason)
    assert error.__cause__ is errors[rank]


def test_errors_of_cuda_and_nccl_name_the_rank_that_has_taken_the_store_with_it(tmp_path: Any) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(_lose_the_rank_with_the_store, world=4, args=(str(tmp_path),), every_error=True)
    assert failure.value.errors == {0: "died with exit code -9"}


def _lose_the_device(rank: int, folder: str) -> str:
    error = fit(folder, lambda: _raise(error_of_cuda()))
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_ranks_whose_device_fails_say_so(tmp_path: Any) -> None:
    """The negative control, too: an error of CUDA stays what it is while no other rank has failed."""
    for rank, error in enumerate(run_ranks(_lose_the_device, args=(str(tmp_path),))):
        assert error.count(TEXT) == 2
        assert f"rank {1 - rank} ended with AcceleratorError: {TEXT}" in error
        assert "If they share a device or an MPS server, that has failed" in error


class FailedRank(NamedFailures):
    """The end of a strategy on a GPU, after an error."""

    _failed, _last_error, _wait = True, "FreeScaleError: rank 2 has died", timedelta(seconds=0.2)
    root_device, world_size, global_rank = torch.device("cuda"), 2, 0  # type: ignore[assignment]


def test_the_end_of_a_training_that_has_failed_has_a_limit(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failing, "LEAST_EXIT_SECONDS", 0.5)
    codes = []
    for seconds in (0, int(PATIENCE)):
        if (child := os.fork()) == 0:
            FailedRank().end_after_failure([lambda: _raise(error_of_cuda()), lambda: ctypes.PyDLL(None).sleep(seconds)])  # noqa: B023
            time.sleep(1.0)  # The limit has ended with the end of the training.
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert codes == [0, 1]
    assert "rank 0: FreeScaleError: rank 2 has died. The end of the training takes longer" in capfd.readouterr().err


def test_errors_of_cuda_are_told_from_others() -> None:
    assert is_device_error(error_of_cuda())
    assert is_device_error(RuntimeError("CUDA driver error: unknown error"))
    assert is_device_error(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    assert not is_device_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"))
    assert not is_device_error(RuntimeError("[gloo] Connection closed by peer"))
    assert is_nccl_error(dist.DistBackendError(TRANSFER))
    assert is_nccl_error(RuntimeError("ncclRemoteError: A call failed possibly due to a network error"))
    assert not is_nccl_error(RuntimeError("[gloo] Connection closed by peer"))
    one = f"rank 0 ended with AcceleratorError: {TEXT}"
    assert note_on(f"{one}; {one}", error_of_cuda()) != f"{one}; {one}"
    for reports in (f"{one}; rank 2 has died", f"{one}; rank 2 ended with ValueError: no"):
        assert note_on(reports, error_of_cuda()) == reports


# ---- a call of NCCL that waits for the dead rank; gloo stands for NCCL ------------------------------------------------
def _stay_in_a_call(rank: int) -> None:
    failure_watch.GRACE_SECONDS, failure_watch.LEAVING_SECONDS, failure_watch.WATCH_SECONDS = 0.3, 1.0, 0.1
    nccl_calls.NAME, nccl_calls.DEVICE = "gloo", torch.device("cpu")
    dist.init_process_group("gloo")
    if rank == 0:
        backend = SimpleNamespace(get_error=lambda: None, abort=lambda: os._exit(7))  # The abort would crash.
        watch = FailureWatch("call", 0, TIMEOUT, torch.device("cuda"), lambda: [backend])
        watch.publish("rank 7 has died")
        dist.all_reduce(torch.ones(1))
    time.sleep(PATIENCE)


def test_nccl_is_not_aborted_under_a_thread_that_uses_it(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(_stay_in_a_call)
    assert failure.value.errors == {0: "died with exit code 1"}
    assert "rank 0: rank 7 has died\nThe process ends itself" in capfd.readouterr().err


# ---- the interpreter's lock -------------------------------------------------------------------------------------------
def _hold_the_lock(rank: int) -> None:
    failure_watch.LEAST_EXIT_SECONDS, failure_watch.HOLD_FACTOR, failure_watch.WATCH_SECONDS = 4.0, 0.0, 0.1
    dist.init_process_group("gloo")
    watch = FailureWatch("lock", rank, TIMEOUT)
    deadline = time.monotonic() + PATIENCE
    while len(watch._peers._welcome) < (2 if rank == 0 else 1) and time.monotonic() < deadline:
        time.sleep(0.05)
    dist.barrier()
    if rank == 1:
        ctypes.PyDLL(None).sleep(int(PATIENCE))  # No Python code of this process runs from now on.
    if rank == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    assert watch.wait_for_explanation(PATIENCE) == "rank 2 has died"
    time.sleep(0.5)  # The threads of the watch tell it to the others.
    watch.close()


def test_a_rank_that_holds_the_interpreters_lock_ends_and_names_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(_hold_the_lock, world=3, every_error=True)
    assert failure.value.errors == {1: "died with exit code 1", 2: "died with exit code -9"}
    message = capfd.readouterr().err
    assert "rank 1: no Python code has run for 4 s" in message
    assert "rank 0 reports: rank 2 has died" in message
