"""After a transfer has failed, no rank writes a checkpoint: the weights may have been computed from what it left."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_freescale import FreeScaleError, FreeScaleStrategy
from lightning_freescale.transport import TransportError, failed_transfer
from tests import toy
from tests.ranks import run_ranks


class FailsATransfer(L.Callback):
    """Rank 0 waits in vain for rank 1, in a group of its own, and does not look at the result. Then all ranks save."""

    def __init__(self, path: str, fails: bool):
        self.path, self.fails, self.error = path, fails, ""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2:
            return
        options = {"cpu": "queue", "chunk_bytes": 4096, "buffer_bytes": 1 << 20}
        group: Any = dist.new_group(backend="freescale", pg_options=options)
        group._timeout = timedelta(seconds=0.5 if self.fails else 60)
        mover = group._mover(torch.device("cpu"))
        if trainer.global_rank == 0 or not self.fails:
            work = dist.all_to_all_single(torch.empty(2), torch.empty(2), group=group, async_op=True)
            while not work.is_completed():
                pass
        try:
            trainer.save_checkpoint(self.path)
            trainer.strategy.finish_saves()  # type: ignore[attr-defined]
        except FreeScaleError as error:
            self.error = str(error)
        with contextlib.suppress(TransportError):  # rank 1 may hear of the failure only now
            mover.close(10)
        assert failed_transfer() is None  # a group that is closed does not count


def _save_after_a_failure(rank: int, path: str, checkpoint: Any, fails: bool) -> tuple[str, bool]:
    failure = FailsATransfer(path, fails)
    plugins: list[Any] = [AsyncCheckpointIO()] if checkpoint == "sharded" else []
    trainer = toy.trainer(FreeScaleStrategy(checkpoint=checkpoint), 2, callbacks=[failure], plugins=plugins)
    trainer.fit(toy.Model(), toy.loader())
    return failure.error, Path(path).exists()


@pytest.mark.parametrize("checkpoint", ["file", "sharded"])
def test_no_checkpoint_is_written_after_a_failed_transfer(tmp_path: Path, checkpoint: str) -> None:
    """A file is saved by the training thread, and a folder asynchronously. Its own thread checks the transfers."""
    for error, written in run_ranks(_save_after_a_failure, args=(str(tmp_path / "a.ckpt"), checkpoint, True)):
        assert "the weights may be invalid, because a transfer has failed" in error
        assert "waiting for 4 bytes from rank 1" in error
        assert not written
    for error, written in run_ranks(_save_after_a_failure, args=(str(tmp_path / "b.ckpt"), checkpoint, False)):
        assert (error, written) == ("", True)
