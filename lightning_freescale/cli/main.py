"""The ``freescale`` command. ``COMMANDS`` lists its subcommands. A subcommand's module is imported only when it runs."""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

PACKAGES = (  # that --version shows
    "lightning-freescale",
    "lightning",
    "torch",
    "torchrec",
    "fbgemm-gpu",
    "fbgemm-gpu-cpu",
)


class Command(NamedTuple):
    """A subcommand."""

    main: str  # "module:function"; function(arguments, prog=...) returns the exit code, or None for 0
    help: str


COMMANDS = {
    "demo": Command(
        "lightning_freescale.cli.demo:main", "train an HSTU recommender on two processes, without and with FreeScale"
    ),
    "plan": Command("lightning_freescale.cli.plan:main", "show how much time balancing would save on your data"),
    "report": Command("lightning_freescale.cli.report:main", "show where the time of a training run went"),
    "recommend": Command(
        "lightning_freescale.cli.recommend:main", "write the best items of every user of a file, by a trained model"
    ),
    "serve": Command("lightning_freescale.cli.serve:main", "answer requests for recommendations over HTTP"),
    "evaluate": Command("lightning_freescale.cli.evaluate:main", "rank the last event of every user of a file"),
    "verify": Command("lightning_freescale.cli.verify:main", "check that checkpoints are complete and undamaged"),
    "doctor": Command(
        "lightning_freescale.cli.doctor:main", "show what is installed, which transport fits this machine, what to fix"
    ),
    "export": Command("lightning_freescale.cli.export:main", "write a checkpoint as one unsharded state dict"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``freescale``; returns the exit code."""
    options = _parser().parse_args(argv)
    prog = f"freescale {options.command}"
    module, function = COMMANDS[options.command].main.split(":")
    run = getattr(importlib.import_module(module), function)
    from lightning_freescale.runtime.errors import FreeScaleError

    if argv is None:  # the process belongs to the command
        gc.freeze()  # later collections, and the last one at exit, skip what was imported
    try:
        return run(options.arguments, prog=prog) or 0
    except FreeScaleError as error:  # its message says what to do; a traceback would hide the message
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="freescale",
        description="FreeScale: distributed training of sequence recommenders with PyTorch Lightning.",
        epilog="\n".join(["commands:", *(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())])
        + "\n\n'freescale COMMAND --help' shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=versions(),
        help="print the versions of this package and of the packages it uses",
    )
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="one of the commands below")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the command")
    return parser


def versions() -> str:
    """Versions for a bug report. They come from package metadata, so that no package is imported."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


if __name__ == "__main__":
    sys.exit(main())
