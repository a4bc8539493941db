"""A process that is forked from a rank never destroys a process group of the rank."""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch.distributed as dist

from lightning_freescale.runtime.process_groups import keep_from_forked_processes
from tests.ranks import run_ranks


def forked_child_ends(rank: int, protected: bool) -> bool:
    """Leave a group in a reference cycle, then fork a process that collects garbage. Whether it ends within 5 s."""
    if protected:
        keep_from_forked_processes()
    dist.init_process_group("gloo")
    gc.disable()
    holder: dict[str, object] = {"group": dist.group.WORLD}
    holder["cycle"] = holder
    dist.destroy_process_group()
    del holder
    child = os.fork()
    if child == 0:
        if not protected:
            gc.unfreeze()  # an earlier test of this process may have protected it
        gc.collect()
        os._exit(0)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0] == child:
            return True
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


@pytest.mark.parametrize("protected", [True, False], ids=["protected", "negative control"])
def test_a_forked_process_does_not_destroy_groups(protected: bool) -> None:
    assert run_ranks(forked_child_ends, 2, (protected,)) == [protected, protected]
