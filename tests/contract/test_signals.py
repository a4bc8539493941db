"""Signals that reach one rank alone: all ranks stop, or save a checkpoint and requeue the job, at the same step."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_freescale import FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks

BATCHES = 16


class Signalled(toy.Model):
    """Rank 1 receives a signal in one of its steps."""

    def __init__(self, signum: signal.Signals | None, batch: int):
        super().__init__()
        self.signum, self.at = signum, batch

    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        if self.signum is not None and self.global_rank == 1 and batch_idx == self.at:
            os.kill(os.getpid(), self.signum)
        return super().training_step(batch, batch_idx)


# ---- SIGTERM ---------------------------------------------------------------------------------------------------------
def terminate(rank: int) -> list[tuple[int, bool, int]]:
    found = []
    for batch in (BATCHES - 4, BATCHES - 1):
        trainer = toy.trainer(FreeScaleStrategy(timeout=20), 2, max_epochs=1)
        with pytest.raises(SIGTERMException) as stopped:
            trainer.fit(Signalled(signal.SIGTERM, batch), toy.loader(64))
        found.append((trainer.global_step, trainer.received_sigterm, stopped.value.code))
    return found


def test_sigterm_in_the_last_batches_stops_all_ranks() -> None:
    """The headers of these batches have been sent before the signal arrives."""
    first, second = run_ranks(terminate)
    assert first == second
    assert [(received, code) for _, received, code in first] == [(True, 143)] * 2
    assert first[-1][0] == BATCHES


def fit_after_sigterm(rank: int, at: int) -> tuple[int, int, dict[str, torch.Tensor]]:
    """Where the training was stopped, how many batches were trained after that, and the weights."""
    pl.seed_everything(1, verbose=False)
    stopped = 0
    for signum in (signal.SIGTERM, None) if at >= 0 else (None,):
        saves = pl.callbacks.ModelCheckpoint(dirpath="saves", save_last=True, save_on_exception=True)
        strategy = FreeScaleStrategy(prioritize=True, timeout=20)
        trainer = toy.trainer(strategy, 2, max_epochs=1, enable_checkpointing=True, callbacks=[saves])
        model = Signalled(signum, at)
        with contextlib.suppress(SIGTERMException):
            trainer.fit(model, toy.loader(64), ckpt_path="last")
        stopped = trainer.global_step if signum else stopped
    return stopped, len(model.losses), toy.weights(model)


def test_sigterm_saves_a_checkpoint_from_which_nothing_is_lost() -> None:
    disturbed = run_ranks(fit_after_sigterm, args=(5,))
    assert disturbed[0][0] == disturbed[1][0]
    stopped, after, _ = disturbed[0]
    assert 5 < stopped <= 10  # The headers of at most four batches are in transit.
    assert stopped + after == BATCHES
    shutil.rmtree("saves")
    undisturbed = run_ranks(fit_after_sigterm, args=(-1,))
    assert all(toy.same(a[2], b[2]) for a, b in zip(disturbed, undisturbed, strict=True))


# ---- SLURM's requeue signal ------------------------------------------------------------------------------------------
def slurm_trainer(rank: int) -> pl.Trainer:
    os.environ.update(SLURM_JOB_ID="123", SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_NODEID="0")
    os.environ.update(
        SLURM_NTASKS="2",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_JOB_NAME="train",
        PATH=f"{Path().resolve()}:{os.environ['PATH']}",
    )
    strategy = FreeScaleStrategy(balance="off", prioritize=True, timeout=20)
    environment = SLURMEnvironment(requeue_signal=signal.SIGUSR1)
    return toy.trainer(strategy, 2, max_epochs=1, default_root_dir="job", plugins=[environment])


def fit_requeued(rank: int, at: int) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module = Signalled(signal.SIGUSR1 if at >= 0 else None, at)
    trainer = slurm_trainer(rank)
    trainer.fit(module, toy.loader(64))
    return {"steps": trainer.global_step, "trained": len(module.losses), "weights": toy.weights(module)}


@pytest.mark.parametrize("at", [4, BATCHES - 1])
def test_the_requeue_signal_saves_one_checkpoint_and_requeues_once(at: int) -> None:
    scontrol = Path("scontrol")
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {Path("calls").resolve()}\n')
    scontrol.chmod(0o755)
    trained = run_ranks(fit_requeued, args=(at,))
    assert Path("calls").read_text() == "requeue 123\n"
    (checkpoint,) = Path("job").glob("hpc_ckpt_*.ckpt")
    saved = torch.load(checkpoint, weights_only=False)["global_step"]
    assert at < saved <= min(at + 5, BATCHES)  # The headers of at most four batches are in transit.
    resumed = run_ranks(fit_requeued, args=(-1,))
    for before, after in zip(trained, resumed, strict=True):
        assert before["steps"] == after["steps"] == before["trained"] == BATCHES
        assert after["trained"] == BATCHES - saved
        assert toy.same(before["weights"], after["weights"])
