"""Tells code of the user from that of Lightning and of this package."""

from __future__ import annotations

import functools
from typing import Any

_OTHERS = ("lightning", "pytorch_lightning", "lightning_freescale")


def is_of_user(function: Any) -> bool:
    """Whether a hook is the user's own. Those of Lightning, for example of its profilers, only read what they are given."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", None)).partition(".")[0] not in _OTHERS
