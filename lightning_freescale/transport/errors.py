"""The error of a transfer that fails."""

from __future__ import annotations

from lightning_freescale.runtime.errors import FreeScaleError


class TransportError(FreeScaleError):
    """A peer died, left the group, issued another collective, or did not send in time.

    The message names the rank that noticed it, the collective, the peer and the bytes. All ranks that use the group raise the
    same error.
    """
