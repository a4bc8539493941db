"""Reference models to train with the strategy."""

from lightning_freescale.models.hstu import HSTU

__all__ = ["HSTU"]
