"""Keeps Python's garbage collector from looking at all objects of the process in the middle of a step.

A full collection looks at every object that the collector knows. After the imports these are several hundred thousand, so it
takes some hundred milliseconds. It starts when a rank has made enough objects, which is in another step on every rank, and all
other ranks wait for it. So the objects that exist when a training starts are set aside. Later collections look at newer objects
alone.
"""

from __future__ import annotations

import gc

FROZEN_BY_PYTHON = 10_000  # at most; Python 3.12 itself sets some hundred objects aside when it starts


class FrozenObjects:
    """Sets objects aside from :meth:`freeze` to :meth:`release`.

    Garbage is collected before, for example the model of an earlier training, whose memory on the GPU is needed. An object that
    is set aside and becomes garbage in a cycle is freed after :meth:`release`.
    """

    def __init__(self) -> None:
        self._frozen = False

    def freeze(self) -> None:
        """Collect garbage and set aside all present objects.

        Nothing happens if the user has disabled the collector. If the user has frozen objects, garbage is collected only.
        """
        if self._frozen or not gc.isenabled():
            return
        gc.collect()
        if gc.get_freeze_count() > FROZEN_BY_PYTHON:
            return
        gc.freeze()
        self._frozen = True

    def release(self) -> None:
        """Let the collector look at all objects again."""
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
