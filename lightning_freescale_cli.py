"""Starts the ``freescale`` command: its ``cli/main.py`` alone, for importing the package takes seconds that ``--help`` need not.

The command imports what it runs when it runs it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path


def main() -> int:
    package = importlib.util.find_spec("lightning_freescale")  # finds it, does not import it
    assert package is not None
    assert package.origin is not None
    spec = importlib.util.spec_from_file_location("freescale", Path(package.origin).with_name("cli") / "main.py")
    assert spec is not None
    assert spec.loader is not None
    cli = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cli)
    return cli.main()
