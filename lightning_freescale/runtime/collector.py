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
        if gc.get_freeze_count() == 0:  # the user has frozen none
            # This moves all objects to the oldest generation. The next collection would go through all of them otherwise.
            gc.freeze()
            gc.unfreeze()
        gc.enable()
