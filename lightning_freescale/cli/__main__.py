"""Lets ``python -m lightning_freescale.cli`` run the ``freescale`` command."""

import sys

from lightning_freescale.cli.main import main

sys.exit(main())
