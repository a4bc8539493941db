"""``freescale export``: writes a checkpoint as one file that needs neither this package nor several ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_freescale.cli import trained_model
from lightning_freescale.inference import model_file
from lightning_freescale.strategy.checkpoints import id_map
from lightning_freescale.strategy.checkpoints.export import export


def main(argv: Sequence[str], prog: str) -> None:
    """Run ``freescale export``."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write the weights of a checkpoint to one file. The unsharded model can load it with "
        "model.load_state_dict(torch.load(OUT)), without this package and without a GPU.",
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint (a file or a folder) that the Trainer wrote")
    parser.add_argument("output", metavar="OUT", help="file to write, for example model.pt")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--inference",
        action="store_true",
        help="write all that freescale recommend and freescale serve need, also on a machine without TorchRec: weights, "
        "settings and the ids of the items. For checkpoints of an HSTU that was trained with SeqRecDataModule",
    )
    kind.add_argument(
        "--lightning",
        action="store_true",
        help="write a full Lightning checkpoint with hyperparameters and optimizer states, for "
        "Model.load_from_checkpoint(OUT) and for Trainers with any strategy",
    )
    parser.add_argument(
        "--trusted",
        action="store_true",
        help="allow Python objects in the checkpoint, which may run code when it is read; use it for your own files only",
    )
    options = parser.parse_args(argv)
    if options.inference:
        content = trained_model.inference_content(options.checkpoint, options.trusted)
        model_file.write(options.output, content)
        items = content["hyper_parameters"]["num_items"]
        print(f"{options.output}: {len(content['weights'])} tensors, {items:,} items, model {content['fingerprint']}")
        return
    state = export(
        options.checkpoint,
        options.output,
        lightning=options.lightning,
        weights_only=False if options.trusted else None,
    )
    weights = sum(value.numel() for value in state.values())
    print(f"{options.output}: {len(state)} tensors, {weights:,} weights")
    for table, path in id_map.paths(state, options.output).items():
        print(f"{path}: the rows of the ids of table {table}")
