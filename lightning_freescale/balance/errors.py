"""The exceptions of load balancing."""

from __future__ import annotations

from lightning_freescale.runtime.errors import FreeScaleError, InputError


class CannotBalance(InputError):
    """The batch can be trained on, but its samples cannot be separated or do not fit the batches of other ranks."""


class PeerFailed(FreeScaleError):
    """Another rank could not load its part of this batch. The exception on that rank tells why."""
