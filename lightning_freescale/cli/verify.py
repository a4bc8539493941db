"""``freescale verify``: reads checkpoints and compares their checksums."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tqdm import tqdm

from lightning_freescale.runtime.errors import CheckpointError
from lightning_freescale.strategy.checkpoints.verify import VerifiedCheckpoint, verify


def main(argv: Sequence[str], prog: str) -> int:
    """Run ``freescale verify``. Returns 1 if a checkpoint is damaged."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Read checkpoints and compare their checksums. No code from a checkpoint is run.",
    )
    parser.add_argument("checkpoints", metavar="CKPT", nargs="+", help="checkpoints (files or folders)")
    damaged = 0
    for path in parser.parse_args(argv).checkpoints:
        try:
            print(_describe(verify(path, lambda names: tqdm(names, unit="file", leave=False, disable=None))))
        except CheckpointError as error:
            damaged += 1
            print(f"{prog}: error: {error}", file=sys.stderr)
    return 1 if damaged else 0


def _describe(found: VerifiedCheckpoint) -> str:
    kind = "a file" if found.format == "file" else "a folder of shards"
    where = "its step is inside Python objects, which were not loaded"
    if found.step is not None:
        where = f"step {found.step}, epoch {found.epoch}"
    return f"{found.path}: undamaged, {kind} of {found.size / (1 << 20):,.1f} MiB, {where}"
