"""Transfers of NCCL on four process groups beside matrix products, with PyTorch alone. :mod:`tests.gpu.repeat` starts each rank.

It shows what the machine does without this package: ranks that share SMs stop.
"""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist

from tests.gpu.stall_watch import StallWatch

GROUPS = 4
STEPS_AT_A_TIME = 50  # between two looks at the time, which all ranks take from rank 0
LONGEST_PAUSE = 0.01  # seconds, so that the ranks do not start their transfers at the same moment


def train(seconds: float, watch: StallWatch) -> int:
    """Compute and communicate until the time is over on rank 0. Returns the number of steps."""
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    options = [dist.ProcessGroupNCCL.Options(is_high_priority_stream=number % 2 == 0) for number in range(GROUPS)]
    groups = [dist.new_group(backend="nccl", pg_options=one) for one in options]
    ranks, pauses = dist.get_world_size(), random.Random(dist.get_rank())
    rows = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    gradients = [torch.zeros(170_000, device="cuda") for _ in groups]
    sent = [torch.randn(ranks, 500_000, device="cuda") for _ in groups]
    received = [torch.empty_like(x) for x in sent]
    end, steps = time.monotonic() + seconds, 0
    while True:
        for _ in range(STEPS_AT_A_TIME):
            works, x = [], rows
            for number, group in enumerate(groups):
                for _ in range(6):
                    x = x @ weight
                if number % 2:
                    works.append(dist.all_to_all_single(received[number], sent[number], group=group, async_op=True))
                else:
                    works.append(dist.all_reduce(gradients[number], group=group, async_op=True))
                if pauses.random() < 0.1:
                    time.sleep(pauses.random() * LONGEST_PAUSE)
            for _ in range(20):
                x = x @ weight
            for work in works:
                work.wait()
            torch.cuda.synchronize()
            steps += 1
            watch.progress(f"the end of step {steps}")
        over = torch.tensor([float(time.monotonic() > end)], device="cuda")
        dist.broadcast(over, 0)
        if over.item():
            return steps
