"""The training as a script for torchrun, with as many ranks as torchrun gives it: ``elastic.py FOLDER SETTINGS_AS_JSON``."""

from __future__ import annotations

import json
import os
import sys

import torch

from tests.faults.training import Settings, train


def main(folder: str, settings: str) -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    weights = train(rank, world, folder, None, Settings(**json.loads(settings)), int(os.environ["GROUP_WORLD_SIZE"]))
    if rank == 0:
        torch.save(weights, os.path.join(folder, "weights.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
