"""Runs the ``freescale`` command for ``python -m lightning_freescale.cli``."""

from __future__ import annotations

import sys

from lightning_freescale.cli.main import main

sys.exit(main())
