"""The ``freescale`` command. A subcommand is a line in ``COMMANDS``; its module is imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

STACK = ("lightning-freescale", "lightning", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")


class Command(NamedTuple):
    main: str  # "module:function", called as function(arguments, prog=...); returns the exit code, or None for 0
    help: str


COMMANDS = {
    "demo": Command(
        "lightning_freescale.cli.demo:main", "train an HSTU recommender on two processes, without FreeScale and with it"
    ),
    "plan": Command("lightning_freescale.cli.plan:main", "say what balancing would win on your data"),
    "report": Command("lightning_freescale.cli.report:main", "show where the time of a run went"),
    "export": Command("lightning_freescale.cli.export:main", "write a checkpoint as one plain, unsharded state dict"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``freescale``; returns the exit code."""
    options = _parser().parse_args(argv)
    prog = f"freescale {options.command}"
    module, function = COMMANDS[options.command].main.split(":")
    run = getattr(importlib.import_module(module), function)
    from lightning_freescale.runtime.errors import FreeScaleError

    try:
        return run(options.arguments, prog=prog) or 0
    except FreeScaleError as error:  # says what to do; a traceback would hide it
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="freescale",
        description="Distributed training of sequence recommenders with PyTorch Lightning.",
        epilog="\n".join(["commands:", *(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())])
        + "\n\n'freescale COMMAND --help' lists a command's options",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=versions(), help="versions of this package and its stack"
    )
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="one of those below")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="of the command")
    return parser


def versions() -> str:
    """What a bug report needs, from the installed packages' metadata: imports none of them."""
    found = []
    for name in STACK:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


if __name__ == "__main__":
    sys.exit(main())
