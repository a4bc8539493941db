"""The strategy's checkpoint hooks.

A checkpoint is one plain Lightning file (``file.py``) or a folder of shards (``folder.py``). ``saving.py`` and ``loading.py``
decide what is saved and loaded, and in which order. ``host_copies/`` adds copies in the memory of hosts.
"""

from __future__ import annotations

from lightning_freescale.strategy.checkpoints.host_copies.hooks import HostCopyHooks


class CheckpointHooks(HostCopyHooks):
    """Lightning's checkpoint hooks, as a part of the strategy class."""

    def close_saves(self) -> None:
        """Wait for an asynchronous save, and forget what this run has loaded. Nothing in here waits for other ranks."""
        super().close_saves()
        self.forget_loaded()
