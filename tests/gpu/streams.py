"""A rank of the prioritized exchange under PyTorch's CUDA sanitizer; started by ``test_cluster.py``.

Prints one JSON line on rank 0: the accesses to memory that two streams make in no given order, as far as PyTorch sees them.
With the argument ``broken`` one of them is put in: offsets that are worked out on the compute stream, from lengths of another.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.cuda._sanitizer import CUDASanitizerErrors

from tests.embedding.exchange import SHARDINGS, build, make_schedule, random_batches, train

STEPS = 5


def main() -> None:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = random_batches(rank, STEPS, 7, lambda r, s: 8 + 2 * r)
    races = []
    for kind in SHARDINGS:
        module = build(kind, "rowwise_adagrad", world, "cuda")
        schedule = make_schedule(module)
        if "broken" in sys.argv:
            _break(schedule)
        try:
            train(module, batches, schedule, "cuda")
        except CUDASanitizerErrors as errors:
            races.append(f"{kind}: {str(errors.errors[0])[:1500]}")
            break  # the same on every rank: what is looked at is what is launched, not when it runs
    torch.cuda.synchronize()
    if rank == 0:
        print("RESULT " + json.dumps(races), flush=True)
    os._exit(0)  # groups may have unfinished transfers


def _break(schedule: object) -> None:
    moves = schedule.lanes[0].moves  # type: ignore[attr-defined]
    note = moves._note

    def forgetful(*arguments: object) -> object:
        asked = note(*arguments)
        asked.features._offsets = None
        return asked

    moves._note = forgetful


if __name__ == "__main__":
    main()
