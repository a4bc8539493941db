"""The training under torchrun's elastic agent, with as many ranks as the agent gives it.

``torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 ... tests/faults/elastic.py FOLDER`` runs it as a script.
:func:`run_agent` runs the same agent in this process, and forks its ranks, which have nothing to import then.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.faults.training import Settings, train

GATE_SECONDS = 120.0
RENDEZVOUS = {"last_call_timeout": 3, "join_timeout": 60, "keep_alive_interval": 1, "keep_alive_max_attempt": 4}


class Gate(pl.Callback):
    """Holds the training after a step, until the file ``FOLDER/gates/WORLD.STEP`` is removed or a SIGTERM arrives."""

    def __init__(self, folder: Path):
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, out: Any, batch: Any, i: int) -> None:
        gate = self.folder / "gates" / f"{trainer.world_size}.{trainer.global_step}"
        end = time.monotonic() + GATE_SECONDS
        while gate.exists() and not trainer.strategy.control.stop:  # type: ignore[attr-defined]
            assert time.monotonic() < end, f"{gate} is still there after {GATE_SECONDS:.0f} s"
            time.sleep(0.01)


def run_elastic_rank(folder: str) -> None:
    """The life of one rank. Rank 0 writes the final weights to ``FOLDER/weights.pt``."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # A forked rank has the handler of its agent.
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # oneDNN's state does not survive a fork.
    os.environ["OMP_NUM_THREADS"] = "1"
    rank, world, nodes = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE"))
    train(rank, world, folder, None, Settings(timeout=10.0), nodes, [Gate(Path(folder))])


def run_agent(folder: str, port: int, is_host: bool) -> None:
    """Run an agent with one rank, as ``torchrun --nnodes 1:2 --nproc-per-node 1`` does. The host has the store of the rendezvous.

    If ``is_host`` were left to the agents, the one that comes first would be the host. All others end if it vanishes.
    """
    # With a shared store, torch 2.13 does not tell a new host the address of the ranks' store, and all agents hang.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=2,
        nproc_per_node=1,
        run_id="faults",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={**RENDEZVOUS, "is_host": is_host},
        max_restarts=3,
        start_method="fork",
        local_addr="127.0.0.1",
    )
    elastic_launch(config, run_elastic_rank)(folder)


if __name__ == "__main__":
    run_elastic_rank(*sys.argv[1:])
