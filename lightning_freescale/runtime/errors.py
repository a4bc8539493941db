"""Errors a user can act on. Each names the field, the value and the rank."""

from __future__ import annotations


class FreeScaleError(RuntimeError):
    """Base of every error this package raises on purpose."""


class InputError(FreeScaleError, ValueError):
    """A batch, a column or a file holds something that cannot be trained on."""


class CheckpointError(FreeScaleError):
    """A checkpoint is damaged, incomplete, or belongs to another model."""


class ConfigurationError(FreeScaleError, ValueError):
    """A setting (optimizer, precision, sharding, ...) that cannot be exact here, or is unknown."""
