"""A training on two hosts whose link goes down: every process ends within twice its timeout, and names the reason."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import lightning as L

from lightning_freescale import FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks
from tests.transport.test_two_hosts import ADDRESSES, BUSY_SECONDS, LINK, enter, hosts

__all__ = ["hosts"]  # a fixture
TIMEOUT = 8.0


class CutsTheLink(L.Callback):
    """The second host cuts the link after the second batch."""

    cut_at: float | None = None

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            if trainer.global_rank == 1:
                subprocess.run(["ip", "link", "set", LINK, "down"], check=True)
            self.cut_at = time.monotonic()


def _fit(rank: int, names: list[str]) -> tuple[str, float]:
    enter(names[rank])
    os.environ.update(MASTER_ADDR=ADDRESSES[0], GLOO_SOCKET_IFNAME=f"freescale-{rank}")
    callback = CutsTheLink()
    try:
        toy.trainer(FreeScaleStrategy(timeout=TIMEOUT), 2, callbacks=[callback]).fit(toy.Model(), toy.loader())
    except Exception as error:
        assert callback.cut_at is not None
        return str(error), time.monotonic() - callback.cut_at
    return "it trains on without its peer", 0.0


def test_both_hosts_end_within_twice_the_timeout(hosts: list[str]) -> None:
    for message, seconds in run_ranks(_fit, args=(hosts,), timeout=100):
        assert "rank" in message
        assert "trains on" not in message
        assert seconds < 2 * TIMEOUT + BUSY_SECONDS, message
