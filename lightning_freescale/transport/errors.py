"""The error of a transfer that did not come to its end."""

from __future__ import annotations

from lightning_freescale.runtime.errors import FreeScaleError


class TransportError(FreeScaleError):
    """A peer died, left, disagreed or did not answer in time. Names rank, peer, collective and bytes."""
