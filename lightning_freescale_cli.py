"""The console script ``freescale``. It loads ``lightning_freescale/cli/main.py`` without importing the package.

Importing the package takes seconds, which ``freescale --help`` does not need. The command imports a subcommand's module only when
it runs it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path


def main() -> int:
    """Run ``freescale``; returns the exit code."""
    package = importlib.util.find_spec("lightning_freescale")  # locates the package without importing it
    assert package is not None
    assert package.origin is not None
    spec = importlib.util.spec_from_file_location("freescale", Path(package.origin).with_name("cli") / "main.py")
    assert spec is not None
    assert spec.loader is not None
    cli = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cli)
    return cli.main()
