"""``freescale export``: writes a checkpoint as one unsharded state dict."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_freescale.strategy.checkpoint import export


def main(argv: Sequence[str], prog: str) -> None:
    """``freescale export``."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write the weights of a checkpoint folder to one file: model.load_state_dict(torch.load(OUT)) then works "
        "on the unsharded model, without this package and without a GPU.",
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint folder, as the Trainer wrote it")
    parser.add_argument("output", metavar="OUT", help="file to write, e.g. model.pt")
    options = parser.parse_args(argv)
    state = export(options.checkpoint, options.output)
    weights = sum(value.numel() for value in state.values())
    print(f"{options.output}: {len(state)} tensors, {weights:,} weights")
