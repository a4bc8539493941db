"""Errors that a user can act on. Each message names the field, the value and, in a distributed run, the rank."""

from __future__ import annotations

from collections.abc import Sequence


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


def name_ranks(ranks: Sequence[int]) -> str:
    """How a message names some ranks.

    >>> name_ranks([0]), name_ranks([0, 2])
    ('rank 0', 'ranks 0, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
