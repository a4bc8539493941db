"""Pauses Python's garbage collector while the package is imported. The pause begins with the import of this module.

An import creates many objects and hardly any garbage. The collections would take a fifth of the time of the imports.
"""

from __future__ import annotations

import gc

_collected = gc.isenabled()
gc.disable()


def resume() -> None:
    """End the pause, unless the collector was off before."""
    if _collected:
        gc.enable()
