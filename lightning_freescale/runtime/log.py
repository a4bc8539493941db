"""What was chosen and why, said once, by rank zero."""

from __future__ import annotations

import logging
from functools import cache

from lightning_utilities.core.rank_zero import rank_zero_only

logger = logging.getLogger("lightning_freescale")
# As Lightning does: visible unless the user configured logging. TorchRec's import gives the root logger a handler, too.
_own = not logging.root.handlers or logging.getLogger("lightning.pytorch").handlers
if _own and not logger.handlers:
    logger.addHandler(logging.StreamHandler())
    logger.propagate = False
logger.setLevel(logging.INFO)


@cache
def _say(message: str, level: int) -> None:
    logger.log(level, message)


def log_once(message: str, level: int = logging.INFO) -> None:
    """Log ``message`` on rank zero, the first time it is said in this process."""
    if getattr(rank_zero_only, "rank", 0) == 0:
        _say(message, level)
