"""Errors that a user can act on. Each message names the field, the value and, in a distributed run, the rank."""

from __future__ import annotations


class FreeScaleError(RuntimeError):
    """Base class of the errors about data, settings, checkpoints and ranks."""


class InputError(FreeScaleError, ValueError):
    """A batch, a column or a file holds something that cannot be trained on."""


class CheckpointError(FreeScaleError):
    """A checkpoint is damaged, incomplete, or belongs to another model."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path."""


class ConfigurationError(FreeScaleError, ValueError):
    """A setting (optimizer, precision, sharding, ...) is unknown, or the training would not be exact with it."""
