"""The logger of the package, and messages that appear once: what was chosen, and why."""

from __future__ import annotations

import logging
from functools import cache

from lightning_utilities.core.rank_zero import rank_zero_only

logger = logging.getLogger("lightning_freescale")
# As Lightning does, print to stderr unless the user has configured logging. A handler of the root logger does not prove that:
# TorchRec's import adds one. Lightning's logger has handlers only if the root logger had none when Lightning was imported.
_not_configured = not logging.root.handlers or logging.getLogger("lightning.pytorch").handlers
if _not_configured and not logger.handlers:
    logger.addHandler(logging.StreamHandler())
    logger.propagate = False
logger.setLevel(logging.INFO)


@cache
def _log_first_time(message: str, level: int) -> None:
    logger.log(level, message)


def log_once(message: str, level: int = logging.INFO, every_rank: bool = False) -> None:
    """Log ``message`` on rank 0, or on every rank. A message that this process has logged before is not logged again."""
    if every_rank or getattr(rank_zero_only, "rank", 0) == 0:
        _log_first_time(message, level)
