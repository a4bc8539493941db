"""Lightning's own tests, run once with ``ddp`` and once with ``freescale``. A tool, not a part of ``make test``."""
